"""The metrics of a server: names, labels and meanings. docs/metrics.md is made from it."""

from typing import Final

from worker_host.metrics import ExportedMetric, MetricKind

PREFIX: Final = "worker_service_"
VLLM_PREFIX: Final = "vllm:"
_VLLM_LABELS: Final = ("model_name", "engine")


def _ours(name: str, kind: MetricKind, text: str, *labels: str) -> ExportedMetric:
    return ExportedMetric(PREFIX + name, kind, text, labels)


def _vllms(name: str, kind: MetricKind, text: str, *labels: str) -> ExportedMetric:
    return ExportedMetric(VLLM_PREFIX + name, kind, text, (*_VLLM_LABELS, *labels))


_COUNTER, _GAUGE, _HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM

BUILD_INFO: Final = _ours(
    "build_info", _GAUGE, "1; version and first model name.", "version", "model_name"
)
READY: Final = _ours("ready", _GAUGE, "1 while requests are taken.")
STARTUP: Final = _ours("startup_seconds", _GAUGE, "Time from making the engine until it was ready.")
RUNNING: Final = _ours("requests_running", _GAUGE, "Samples that are scheduled.")
WAITING: Final = _ours("requests_waiting", _GAUGE, "Samples that wait to be scheduled.")
TAKEN: Final = _ours(
    "samples_taken", _GAUGE, "Samples whose answers are unfinished, being sent included."
)
MOST_TAKEN: Final = _ours(
    "samples_limit", _GAUGE, "Bound on samples_taken: more are refused (503)."
)
OUTCOMES: Final = _ours(
    "requests_total",
    _COUNTER,
    "Samples that have ended, by outcome: stop, length, abort (the client left), error, or refused "
    "by the driver.",
    "outcome",
)
RESPONSES: Final = _ours(
    "http_responses_total", _COUNTER, "HTTP answers, by route and status.", "path", "code"
)
FIRST_TOKEN: Final = _ours(
    "time_to_first_token_seconds",
    _HISTOGRAM,
    "Time from when a sample's prompt was tokenized until its first token came.",
)
INTER_TOKEN: Final = _ours(
    "inter_token_seconds",
    _HISTOGRAM,
    "Time between two tokens of a sample. Tokens that come together share it evenly.",
)
REQUEST: Final = _ours(
    "request_seconds",
    _HISTOGRAM,
    "Time from when a sample's prompt was tokenized until its end. Only of stop and length.",
)
PROMPT_TOKENS: Final = _ours(
    "prompt_tokens_total", _COUNTER, "Tokens of the prompts of requests that got a token."
)
CACHED_TOKENS: Final = _ours(
    "cached_prompt_tokens_total", _COUNTER, "Tokens of prompts that were in the prefix cache."
)
LOADED_TOKENS: Final = _ours(
    "loaded_prompt_tokens_total", _COUNTER, "Those of them whose KV came from host memory."
)
QUERIED_TOKENS: Final = _ours(
    "queried_prompt_tokens_total",
    _COUNTER,
    "Tokens of prompts that were looked up in the prefix cache. Counted when a sample has ended.",
)
GENERATED_TOKENS: Final = _ours("generation_tokens_total", _COUNTER, "Tokens generated.")
DRAFTED_ROWS: Final = _ours(
    "drafted_rows_total", _COUNTER, "Times that a sample had drafts in a step."
)
DRAFT_TOKENS: Final = _ours("draft_tokens_total", _COUNTER, "Drafts that steps have verified.")
ACCEPTED_TOKENS: Final = _ours(
    "accepted_draft_tokens_total",
    _COUNTER,
    "Accepted drafts by their place in the step, from 0.",
    "position",
)
DRAFTING_CHANGES: Final = _ours(
    "drafting_changes_total",
    _COUNTER,
    "How often drafts have ceased to pay for good (stopped), and have paid again (resumed).",
    "change",
)
PREEMPTIONS: Final = _ours(
    "preemptions_total", _COUNTER, "Preemptions, counted when a sample has ended."
)
KV_USAGE: Final = _ours("kv_usage_ratio", _GAUGE, "Share of the KV blocks that requests hold.")
IN_FLIGHT: Final = _ours("steps_in_flight", _GAUGE, "Steps without a result.")
FAILED_STEPS: Final = _ours("failed_steps_total", _COUNTER, "Steps that have failed.")
RECOVERIES: Final = _ours(
    "recoveries_total", _COUNTER, "Daemons that died and were replaced, attempts included."
)
RANK_STATE: Final = _ours(
    "rank_state",
    _GAUGE,
    "1 for the present liveness of each rank (alive, suspect, dead), 0 for the others.",
    *("rank", "state"),
)
PREFILL_LINKED: Final = _ours(
    "prefill_linked",
    _GAUGE,
    "1 while blocks can come from the group that computes prompts (--prefill-endpoints). Absent "
    "without one, as are the others of it.",
)
PREFILL_PROMPTS: Final = _ours(
    "prefill_prompts_total",
    _COUNTER,
    "Prompts that requests have waited for, by how that ended: their blocks have come (moved); the "
    "other group had none (lacking); the link or the move has failed (failed); --prefill-timeout "
    "(late); their requests have ended before (left). This group computes what has not come.",
    "end",
)
PREFILL_BLOCKS: Final = _ours(
    "prefill_blocks_total", _COUNTER, "Blocks that have come from the other group."
)
PREFILL_EARLY: Final = _ours(
    "prefill_early_blocks_total",
    _COUNTER,
    "Those of them that have come while their prompts were still computed.",
)
PREFILL_FIRST: Final = _ours(
    "prefill_first_tokens_total",
    _COUNTER,
    "First tokens of requests that the other group has sampled.",
)
PREFILL_HELD: Final = _ours(
    "prefill_held_seconds", _HISTOGRAM, "Time for which requests have waited for their prompts."
)
PREFILL_LINKS: Final = _ours(
    "prefill_lost_links_total",
    _COUNTER,
    "Links to the other group that have ended, or could not be opened.",
)

SERVICE_METRICS: Final = (
    *(BUILD_INFO, READY, STARTUP, RUNNING, WAITING, TAKEN, MOST_TAKEN, OUTCOMES, RESPONSES),
    *(FIRST_TOKEN, INTER_TOKEN, REQUEST, PROMPT_TOKENS, CACHED_TOKENS, LOADED_TOKENS),
    *(
        QUERIED_TOKENS,
        GENERATED_TOKENS,
        DRAFTED_ROWS,
        DRAFT_TOKENS,
        ACCEPTED_TOKENS,
        DRAFTING_CHANGES,
    ),
    *(PREEMPTIONS, KV_USAGE, IN_FLIGHT, FAILED_STEPS, RECOVERIES, RANK_STATE),
    *(PREFILL_LINKED, PREFILL_PROMPTS, PREFILL_BLOCKS, PREFILL_EARLY, PREFILL_FIRST, PREFILL_HELD),
    PREFILL_LINKS,
)

V_RUNNING: Final = _vllms("num_requests_running", _GAUGE, "Samples that are scheduled.")
V_WAITING: Final = _vllms("num_requests_waiting", _GAUGE, "Samples that wait to be scheduled.")
V_KV_USAGE: Final = _vllms("kv_cache_usage_perc", _GAUGE, "Share of the KV blocks in use, 0 to 1.")
V_OLD_KV_USAGE: Final = _vllms(
    "gpu_cache_usage_perc", _GAUGE, "As kv_cache_usage_perc; the name that earlier vLLMs used."
)
V_QUERIES: Final = _vllms(
    "prefix_cache_queries_total", _COUNTER, "Prompt tokens looked up in the prefix cache."
)
V_HITS: Final = _vllms(
    "prefix_cache_hits_total", _COUNTER, "Prompt tokens found in the prefix cache."
)
V_OLD_QUERIES: Final = _vllms(
    "gpu_prefix_cache_queries_total", _COUNTER, "As prefix_cache_queries; an earlier name."
)
V_OLD_HITS: Final = _vllms(
    "gpu_prefix_cache_hits_total", _COUNTER, "As prefix_cache_hits; an earlier name."
)
V_PREEMPTIONS: Final = _vllms("num_preemptions_total", _COUNTER, "Preemptions.")
V_PROMPT: Final = _vllms("prompt_tokens_total", _COUNTER, "Tokens of prompts.")
V_GENERATION: Final = _vllms("generation_tokens_total", _COUNTER, "Tokens generated.")
V_SUCCESS: Final = _vllms(
    "request_success_total",
    _COUNTER,
    "Samples that have ended: stop, length, abort or error.",
    "finished_reason",
)
V_FIRST_TOKEN: Final = _vllms("time_to_first_token_seconds", _HISTOGRAM, "Time to the first token.")
V_INTER_TOKEN: Final = _vllms("inter_token_latency_seconds", _HISTOGRAM, "Time between two tokens.")
V_OLD_INTER_TOKEN: Final = _vllms(
    "time_per_output_token_seconds", _HISTOGRAM, "As inter_token_latency_seconds; an earlier name."
)
V_PER_TOKEN: Final = _vllms(
    "request_time_per_output_token_seconds",
    _HISTOGRAM,
    "A sample's mean time between two tokens.",
)
V_LATENCY: Final = _vllms("e2e_request_latency_seconds", _HISTOGRAM, "Time from begin to end.")
V_DECODE: Final = _vllms(
    "request_decode_time_seconds", _HISTOGRAM, "Time from the first token to the last."
)
V_PROMPT_LENGTHS: Final = _vllms("request_prompt_tokens", _HISTOGRAM, "Prompt tokens of a sample.")
V_LENGTHS: Final = _vllms("request_generation_tokens", _HISTOGRAM, "Tokens generated for a sample.")
V_NS: Final = _vllms("request_params_n", _HISTOGRAM, "Samples that a request asks for.")
V_MAX_TOKENS: Final = _vllms(
    "request_params_max_tokens", _HISTOGRAM, "Tokens that a request allows for a sample."
)
V_DRAFTED: Final = _vllms(
    "spec_decode_num_drafts_total", _COUNTER, "Times that a sample had drafts in a step."
)
V_DRAFT_TOKENS: Final = _vllms(
    "spec_decode_num_draft_tokens_total", _COUNTER, "Drafts that steps have verified."
)
V_ACCEPTED: Final = _vllms("spec_decode_num_accepted_tokens_total", _COUNTER, "Accepted drafts.")
V_ACCEPTED_BY_PLACE: Final = _vllms(
    "spec_decode_num_accepted_tokens_per_pos_total",
    _COUNTER,
    "Accepted drafts by their place in the step, from 0.",
    "position",
)
V_LORA: Final = ExportedMetric(
    "vllm:lora_requests_info",
    _GAUGE,
    "Time of the scrape; adapters of requests with and without a token so far.",
    ("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
)
V_CACHE: Final = ExportedMetric(
    "vllm:cache_config_info",
    _GAUGE,
    "1; the KV cache.",
    ("block_size", "num_gpu_blocks", "cache_dtype", "gpu_memory_utilization", "engine"),
)

VLLM_METRICS: Final = (
    *(V_RUNNING, V_WAITING, V_KV_USAGE, V_OLD_KV_USAGE, V_QUERIES, V_HITS, V_OLD_QUERIES),
    *(V_OLD_HITS, V_PREEMPTIONS, V_PROMPT, V_GENERATION, V_SUCCESS, V_FIRST_TOKEN, V_INTER_TOKEN),
    *(V_OLD_INTER_TOKEN, V_PER_TOKEN, V_LATENCY, V_DECODE, V_PROMPT_LENGTHS, V_LENGTHS, V_NS),
    *(V_MAX_TOKENS, V_DRAFTED, V_DRAFT_TOKENS, V_ACCEPTED, V_ACCEPTED_BY_PLACE, V_LORA, V_CACHE),
)
