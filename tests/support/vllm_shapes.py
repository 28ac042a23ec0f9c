"""Values shaped like vLLM's, for tests of our translation where vLLM is not installed. The golden
file of tests/vllm/test_surface.py has the fields of the real ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from types import SimpleNamespace
from typing import Any

import msgspec


class SamplingParams(msgspec.Struct, kw_only=True):
    """vLLM's, with two of the fields that are not served."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    detokenize: bool = True
    structured_outputs: Any = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    bad_words: list[str] | None = None
    _bad_words_token_ids: list[list[int]] | None = None
    _all_stop_token_ids: set[int] = msgspec.field(default_factory=set)
    skip_clone: bool = False
    watermarking: bool | None = None
    thinking_token_budget: int | None = None
    prompt_logprob_token_ids: Any = None
    routed_experts_prompt_start: int = 0

    @property
    def all_stop_token_ids(self) -> set[int]:
        return self._all_stop_token_ids

    @property
    def bad_words_token_ids(self) -> list[list[int]] | None:
        return self._bad_words_token_ids


class PoolingParams(msgspec.Struct, kw_only=True):
    """vLLM's, with some of the fields that are not served."""

    task: str | None = None
    use_activation: bool | None = None
    dimensions: int | None = None
    requires_token_ids: bool = False
    skip_reading_prefix_cache: bool | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    late_interaction_params: object | None = None
    extra_kwargs: dict[str, object] | None = None
    late_chunking_params: object | None = None


@dataclass
class Request:
    """A request of vLLM's scheduler."""

    request_id: str
    sampling_params: Any = None
    pooling_params: Any = None
    num_prompt_tokens: int = 5
    lora_request: Any = None
    prompt_token_ids: Sequence[int] | None = None
    prompt_embeds: Any = None
    prompt_is_token_ids: Sequence[bool] | None = None
    mm_features: Sequence[Any] = ()
    cache_salt: Any = None
    block_hashes: list[Any] = field(default_factory=list)
    skip_reading_prefix_cache: bool = False

    def update_block_hashes(self) -> None:
        """Hash the only block anew."""
        self.block_hashes.append(self.cache_salt)


@dataclass
class NewRequestData:
    """A request's first step, and each after a preemption."""

    req_id: str
    prompt_token_ids: Sequence[int] | None
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int = 0
    prompt_embeds: Any = None
    prompt_is_token_ids: Sequence[bool] | None = None
    prefill_token_ids: Sequence[int] | None = None


@dataclass
class CachedRequestData:
    """What requests that run get in a step."""

    req_ids: list[str] = field(default_factory=list)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass
class SchedulerOutput:
    """A step of vLLM's scheduler."""

    num_scheduled_tokens: Mapping[str, int] = field(default_factory=dict)
    scheduled_spec_decode_tokens: Mapping[str, Sequence[int]] = field(default_factory=dict)
    skip_drafts: bool = False
    scheduled_new_reqs: list[NewRequestData] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequestData = field(default_factory=CachedRequestData)
    finished_req_ids: set[str] = field(default_factory=set)
    preempted_req_ids: set[str] | None = None
    has_structured_output_requests: bool = False

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


def pooling_config(**changes: Any) -> Any:
    """Return a configuration of a server that pools, with some fields of its pooler_config changed:
    pooler__field=value. Others are as in vllm_config."""
    own = {k.partition("__")[2]: v for k, v in changes.items() if k.startswith("pooler__")}
    others = {k: v for k, v in changes.items() if not k.startswith("pooler__")}
    names = ("pooling_type", "tok_pooling_type", "use_activation", "logit_mean", "step_tag_id")
    pooler = section_of({"seq_pooling_type": "LAST", **dict.fromkeys(names)}, own)
    fields = {
        "model_config__runner_type": "pooling",
        "model_config__convert_type": "embed",
        "model_config__hf_config": SimpleNamespace(),
        "model_config__pooler_config": pooler,
        "scheduler_config__async_scheduling": False,
    }
    return vllm_config(**{**fields, **others})


def eplb_config(**changes: Any) -> Any:
    """Return vLLM's options for balanced experts, with some fields changed."""
    defaults = {"num_redundant_experts": 0, "step_interval": 3000, "window_size": 1000}
    return section_of(defaults, changes)


def vllm_config(**changes: Any) -> Any:
    """Return a configuration that is served, with some fields of its sections changed:
    section__field=value."""
    sections: dict[str, dict[str, Any]] = {
        "model_config": {
            "model": "/models/m",
            "dtype": "torch.float32",
            "max_model_len": 512,
            "original_max_model_len": 512,
            "seed": 3,
            "enable_sleep_mode": False,
            "enforce_eager": False,
            "quantization": None,
            "is_encoder_decoder": False,
            "is_multimodal_model": False,
            "multimodal_config": None,
            "logits_processors": None,
            "enable_prompt_embeds": False,
            "enable_return_routed_experts": False,
            "logprobs_mode": "raw_logprobs",
            "max_logprobs": 20,
            "runner_type": "generate",
            "convert_type": "none",
            "hf_config": None,
            "hf_overrides": {},
            "hf_text_config": None,
            "pooler_config": None,
        },
        "parallel_config": {
            "pipeline_parallel_size": 1,
            "tensor_parallel_size": 1,
            "data_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "nnodes": 1,
            "enable_expert_parallel": False,
            "enable_eplb": False,
            "eplb_config": eplb_config(),
        },
        "scheduler_config": {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "async_scheduling": True,
            "enable_chunked_prefill": True,
            "long_prefill_token_threshold": 0,
            "long_prefill_token_threshold_adaptive": False,
        },
        "cache_config": {
            "block_size": 16,
            "gpu_memory_utilization": 0.9,
            "kv_cache_memory_bytes": None,
            "cache_dtype": "auto",
            "enable_prefix_caching": True,
            "kv_offloading_backend": "native",
            "kv_offloading_size": None,
        },
        "load_config": {"load_format": "auto"},
    }
    given: dict[str, Any] = {
        "lora_config": None,
        "speculative_config": None,
        "quant_config": None,
        "kv_transfer_config": None,
        "additional_config": {},
    }
    changed: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            changed.setdefault(section, {})[name] = value
        else:
            given[section] = value
    made = {name: section_of(own, changed.get(name, {})) for name, own in sections.items()}
    return section_of(given | made, {})


DERIVED = (
    "convert_type",
    "hf_config",
    "hf_text_config",
    "is_encoder_decoder",
    "is_multimodal_model",
    "original_max_model_len",
    "runner_type",
)
"""Attributes of sections that are no fields."""


def section_of(defaults: Mapping[str, Any], changes: Mapping[str, Any]) -> Any:
    """Return a section of a configuration: a dataclass with these defaults, some fields changed."""
    fields = [
        (name, Any, field(default_factory=lambda value=value: value))
        for name, value in defaults.items()
        if name not in DERIVED
    ]
    section = make_dataclass("Section", fields)()
    for name, value in (*defaults.items(), *changes.items()):
        setattr(section, name, value)
    return section
