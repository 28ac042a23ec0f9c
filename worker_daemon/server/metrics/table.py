"""The metrics of a daemon: names, labels and meanings. docs/metrics.md is made from it."""

from typing import Final

from worker_host.metrics import ExportedMetric, MetricKind

PREFIX: Final = "worker_daemon_"


def _counter(name: str, text: str, *labels: str) -> ExportedMetric:
    return ExportedMetric(f"{PREFIX}{name}_total", MetricKind.COUNTER, text, labels)


def _gauge(name: str, text: str, *labels: str) -> ExportedMetric:
    return ExportedMetric(PREFIX + name, MetricKind.GAUGE, text, labels)


def _histogram(name: str, text: str, *labels: str) -> ExportedMetric:
    return ExportedMetric(PREFIX + name, MetricKind.HISTOGRAM, text, labels)


BUILD_INFO: Final = _gauge(
    "build_info",
    "1; versions of the daemon and its libraries, and the implementations in use.",
    *("version", "protocol", "python", "torch", "nccl", "device", "attention", "layers"),
    "all_reduce",
)
STATE: Final = _gauge(
    "state",
    "1 for the present state of each axis (load, link, serving, lease, weights, kv_cache), 0 for "
    "the others. weights and kv_cache are absent unless memory can sleep.",
    *("axis", "state"),
)
RANK: Final = _gauge("rank", "Global rank in the group; 0 before a driver has set it.")
LEASE_EPOCH: Final = _gauge("lease_epoch", "Epoch of the lease's holder; 0 if the lease is free.")
LEASE_REMAINING: Final = _gauge(
    "lease_remaining_seconds", "Time until the lease expires, unless it is renewed; 0 unless held."
)
STARTUP: Final = _gauge(
    "startup_seconds",
    "Time from the process's start until its sockets were bound, and until its worker was made.",
    "phase",
)
OPERATION: Final = _gauge(
    "operation_seconds",
    "Duration of the last operation of each kind, steps excepted: InitDevice, LoadModel, "
    "CompileOrWarmUpModel and so on.",
    "operation",
)
LOAD_PROGRESS: Final = _gauge(
    "load_progress_ratio", "Share of the weights that is loaded, while a model is being loaded."
)
STEP: Final = _histogram("step_seconds", "Time from step to step, without idle times.")
STEP_PHASE: Final = _histogram(
    "step_phase_seconds",
    "Phases of a step that has a result. launch: the step thread's work (checks, inputs, launching "
    "or, on the CPU, computing). result: from there until the tokens are on the host. send: from "
    "there until the reply is sent.",
    "phase",
)
STEPS: Final = _counter("steps", "Steps that ran, by result: ok or failed.", "result")
STEP_REPLAYS: Final = _counter("step_replays", "Replies that were sent again.")
STEP_REJECTED: Final = _counter(
    "step_rejected", "Requests on the step socket that were not accepted.", "reason"
)
ERRORS: Final = _counter(
    "errors",
    "Accepted requests that failed, by error code: OUT_OF_MEMORY, COMM, DEVICE and so on.",
    "code",
)
INFLIGHT_STEPS: Final = _gauge(
    "inflight_steps", "Outcomes that wait for their result or for their turn to be sent."
)
INPUT_WAIT: Final = _gauge(
    "input_wait_ratio",
    "Share of time in which a pipeline stage waits for its input, over the last sampled steps.",
)
TOKENS: Final = _counter("tokens", "Tokens sampled; 0 on ranks that do not answer steps.", "kind")
DRAFTED_ROWS: Final = _counter(
    "drafted_rows", "Times that a request had drafts in a step, since the KV cache was made."
)
DRAFT_TOKENS: Final = _counter("draft_tokens", "Drafts that steps have verified, since then.")
ACCEPTED_TOKENS: Final = _counter(
    "accepted_draft_tokens", "Accepted drafts by their place in the step, from 0.", "position"
)
REQUESTS: Final = _gauge("requests_running", "Requests that have a slot.")
KV_BLOCKS: Final = _gauge(
    "kv_blocks",
    "KV blocks: total (without the null block), and held by running requests, where a shared block "
    "counts once for each.",
    "state",
)
KV_USAGE: Final = _gauge("kv_usage_ratio", "Held KV blocks over all, 1 at most.")
HOST_BLOCKS: Final = _gauge(
    "kv_host_blocks",
    "Slots for KV blocks in host memory: total, and held by known contents. Absent without any.",
    "state",
)
HOST_MOVES: Final = _counter(
    "kv_host_moved_blocks",
    "KV blocks stored in host memory, loaded from there, and loads that were invalid: blocks whose "
    "contents did not match, or that this rank did not have. Those are computed again. Restored "
    "blocks were taken over from an earlier daemon, rejected ones were not. Sent ones went to "
    "another group, received ones came from one, failed ones are of moves that did not end well. "
    "Since the KV cache was made.",
    "kind",
)
FILE_BYTES: Final = _gauge(
    "kv_file_bytes",
    "Size of the files of KV blocks: held, of any model, and the bound. Absent without any.",
    "state",
)
FILE_MOVES: Final = _counter(
    "kv_file_blocks",
    "KV blocks stored in files; dropped, because too many waited; failed, because the file system "
    "refused (a full disk); loaded; bad files, which could not be read or were not what they "
    "should be; and invalid loads, whose contents did not match or were not there. Bad and invalid "
    "ones are computed again. Since the daemon's start, invalid and loaded ones since the KV cache "
    "was made.",
    "kind",
)
KV_MOVED_BYTES: Final = _counter(
    "kv_moved_bytes",
    "Bytes of KV blocks that this rank has moved out of the KV cache and into it: place host, the "
    "copies to its host memory and from there; files, to its files and from there; groups, from "
    "its host memory to another group's, and back. Since the KV cache was made, for files since "
    "the daemon's start.",
    *("place", "direction"),
)
KV_MOVE_TIME: Final = _counter(
    "kv_move_seconds",
    "Time that these moves took: of the copies on the device; of the threads that read and write "
    "files; from a move's first message to its last.",
    *("place", "direction"),
)
MEMORY: Final = _gauge(
    "memory_bytes",
    "Memory of the device (or the host) by use, as in `worker-client status --json`, after the "
    "last operation that was no step.",
    "kind",
)
UPLOADS: Final = _gauge("upload_bytes", "Host memory of the attached driver's uploads.")
GRAPHS: Final = _gauge("graphs", "CUDA graphs that are captured.")
WEIGHTS_VERSION: Final = _gauge(
    "weights_version", "Number of the weights' version when they were last complete."
)
EXPERT_TOKENS: Final = _counter(
    "expert_tokens",
    "Tokens routed to experts, by layer. Read from the device every 10 s at most.",
    "layer",
)
EXPERT_IMBALANCE: Final = _gauge(
    "expert_imbalance_ratio",
    "Tokens of a layer's busiest expert over the mean of its experts, since the model was loaded.",
    "layer",
)
EXPERT_RANK_IMBALANCE: Final = _gauge(
    "expert_rank_imbalance_ratio",
    "Tokens of the busiest rank that shares a layer's experts over the mean of these ranks, since "
    "the experts were placed as they are, if an expert's copies have equal parts. Of this daemon's "
    "replica. Absent without enable_eplb.",
    "layer",
)
EXPERTS_MOVED: Final = _counter(
    "experts_moved", "Slots that got another expert, since the model was loaded."
)
EXPERT_MOVES_FAILED: Final = _counter(
    "expert_moves_failed",
    "Layers whose experts could not be moved to this rank, or not be switched, since then.",
)
WATCHDOG_AGE: Final = _gauge(
    "watchdog_age_seconds",
    "Time for which the running phase of the step thread, or the wait for a result, has lasted; 0 "
    "while idle.",
)
OVERDUE: Final = _gauge("overdue", "1 while a phase is past its deadline.")
HANGS: Final = _counter("hangs", "Phases that passed their deadline.")
COMM_ABORTS: Final = _counter("comm_aborts", "Links that the daemon aborted.")
XID: Final = _counter("xid", "Faults of the GPU by XID; 0: lost without one.", "code")
DEGRADED: Final = _gauge("device_degraded", "1 while the device has a problem that ends nothing.")
BAD_FRAMES: Final = _counter("rpc_bad_frames", "Messages that did not decode.")
AUTH_FAILURES: Final = _counter("auth_failures", "Handshakes that were refused.")
UTILIZATION: Final = _gauge("gpu_utilization_ratio", "Share of time in which a kernel ran (NVML).")
TEMPERATURE: Final = _gauge("gpu_temperature_celsius", "Temperature of the GPU (NVML).")
POWER: Final = _gauge("gpu_power_watts", "Power of the GPU (NVML).")

DAEMON_METRICS: Final = (
    *(BUILD_INFO, STATE, RANK, LEASE_EPOCH, LEASE_REMAINING, STARTUP, OPERATION, LOAD_PROGRESS),
    *(STEP, STEP_PHASE, STEPS, STEP_REPLAYS, STEP_REJECTED, ERRORS, INFLIGHT_STEPS, INPUT_WAIT),
    *(TOKENS, DRAFTED_ROWS, DRAFT_TOKENS, ACCEPTED_TOKENS, REQUESTS, KV_BLOCKS, KV_USAGE),
    *(HOST_BLOCKS, HOST_MOVES, FILE_BYTES, FILE_MOVES, KV_MOVED_BYTES, KV_MOVE_TIME),
    *(MEMORY, UPLOADS, GRAPHS, WEIGHTS_VERSION),
    *(EXPERT_TOKENS, EXPERT_IMBALANCE, EXPERT_RANK_IMBALANCE, EXPERTS_MOVED, EXPERT_MOVES_FAILED),
    *(WATCHDOG_AGE, OVERDUE, HANGS, COMM_ABORTS, XID, DEGRADED),
    *(BAD_FRAMES, AUTH_FAILURES, UTILIZATION, TEMPERATURE, POWER),
)
