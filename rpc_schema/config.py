"""Configuration sent by a driver. `worker_daemon/worker/resolve.py` turns it into the daemon's
settings."""

import hashlib
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from rpc_schema.base import Count, Name, Positive, Unsigned, Value

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["auto", "fp8"]
KVCacheDtype = Literal["auto", "fp8"]
KVTierMemory = Literal["host", "device"]
PromptAttentionDtype = Literal["auto", "fp8"]
LoadFormat = Literal["auto", "dummy", "sharded_state", "tensorizer"]

FIT_MAX_MODEL_LEN = -1
"""On command lines, means a max_model_len that the driver fits to the KV cache. It is never sent:
the model is loaded with its own limit, then UpdateMaxModelLen lowers it."""

MIN_STEP_DEADLINE_MS = 1000
"""A busy host can stop a process for tenths of a second. A shorter deadline would treat that as a
hang and end daemons."""

MAX_SAMPLES_PER_SEQ = 255
"""Bound on max_samples_per_seq, set by the column of counts in replies."""

MAX_DRAFTS = 31
"""Bound on num_speculative_tokens."""

MAX_LOOKUP = 32
"""Bound on prompt_lookup_max and prompt_lookup_min."""

MAX_REDUNDANT_EXPERTS = 4096
"""Bound on num_redundant_experts."""

DraftMethod = Literal["none", "driver", "ngram", "suffix", "draft_model"]

_MOST_DIGITS = 9


class ParallelConfig(Value, frozen=True, kw_only=True):
    """The shape of the group. The global rank is dp_rank * world_size + pp_rank *
    tensor_parallel_size + tp_rank, where dp_rank is the number of its replica."""

    pipeline_parallel_size: Positive = 1
    tensor_parallel_size: Positive = 1
    layer_partition: tuple[Positive, ...] | None = None
    """Layers of each stage; None splits them evenly; middle stages get the remainder."""
    data_parallel_size: Positive = 1
    """Replicas of the model, each with its own pipeline x tensor ranks."""
    data_parallel_lockstep: bool = False
    """All replicas take each step together, under one link and one sequence, as models need that
    share something between replicas. False: a replica has a link and steps of its own."""

    @property
    def world_size(self) -> int:
        """Number of daemons of one replica."""
        return self.pipeline_parallel_size * self.tensor_parallel_size

    @property
    def world_size_across_dp(self) -> int:
        """Number of daemons of all replicas."""
        return self.data_parallel_size * self.world_size

    @property
    def replicas_in_step(self) -> int:
        """Number of replicas that take each step together."""
        return self.data_parallel_size if self.data_parallel_lockstep else 1

    @property
    def group_size(self) -> int:
        """Number of daemons that share a link and a sequence of steps."""
        return self.replicas_in_step * self.world_size

    def ranks_of(self, dp_rank: int) -> range:
        """Return the global ranks of one replica."""
        return range(dp_rank * self.world_size, (dp_rank + 1) * self.world_size)


def read_layer_partition(text: str) -> tuple[int, ...]:
    """Parse a layer_partition "N,N,...": each stage's number of layers. Does not check it against
    the model.

    Raises:
        ValueError: it is not a list of counts.
    """
    words = [word.strip() for word in text.split(",")]
    for word in words:
        is_number = word.isascii() and word.isdecimal() and len(word) <= _MOST_DIGITS
        if not is_number or int(word) == 0:
            raise ValueError("not a list of counts")
    return tuple(map(int, words))


class ModelConfig(Value, frozen=True, kw_only=True):
    """Weights, their precision, and the context length."""

    model: Annotated[str, Meta(min_length=1, max_length=4096)]
    """Directory in Hugging Face format, under one of the daemon's model roots; with sharded_state
    and tensorizer the directory of a saved set, under one of them or the save root. Or a repository
    and its commit, ORG/NAME@ and 40 hexadecimal digits, in the daemon's hub cache below a model
    root; a directory of that name has precedence."""
    dtype: Dtype = "auto"
    quantization: Quantization = "auto"
    """auto takes what config.json says. fp8 stores the matrices of the layers of an unquantized
    checkpoint in FP8: each rank quantizes its rows as they are loaded."""
    load_format: LoadFormat = "auto"
    """auto reads a checkpoint, dummy generates values, sharded_state reads a set that
    SaveShardedState wrote for a group of the same shape and dtype, tensorizer one of
    SaveTensorizedModel."""
    verify_checksums: bool = False
    """Compare the tensors loaded from a saved set with the checksums of its index."""
    max_model_len: Positive | None = None
    """Longest prompt plus output in tokens; None takes the model's own limit."""
    enable_expert_parallel: bool = False
    """Divide experts over the tensor-parallel ranks, of all replicas in lockstep, in order, the
    first ranks having one more if they do not divide evenly; otherwise each rank has a part of
    every expert. Only for models with experts."""
    seed: Unsigned = 0
    """Seed of dummy weights; sampling seeds belong to requests."""
    enable_sleep_mode: bool = False
    """Lay out weights and KV cache so that Sleep can release their memory. After warm-up the daemon
    then allocates page-locked host memory for its weights, if the host has enough."""
    hf_overrides: Annotated[str, Meta(max_length=65536)] = ""
    """JSON object with fields that replace those of config.json (of its text_config, if the
    checkpoint is multimodal): rope_parameters, which then stands for all fields that scale
    positions, and max_position_embeddings. Empty: none."""
    enable_return_routed_experts: bool = False
    """Keep the experts of each token with its KV, for requests that ask for them. Only for models
    with experts."""
    enable_eplb: bool = False
    """The experts that a rank has can change while it serves (MoveExperts), to balance the ranks'
    loads. Needs enable_expert_parallel, and several ranks. Takes memory for one layer's experts
    more."""
    num_redundant_experts: Annotated[int, Meta(ge=0, le=MAX_REDUNDANT_EXPERTS)] = 0
    """With enable_eplb, further copies of a layer's experts: all ranks have equally many slots for
    its experts and these."""

    def find_fault(self) -> tuple[str, object, str, str] | None:
        """Return the first combination of fields that means nothing for any model, as field, value,
        problem and fix; None if there is none."""
        if self.num_redundant_experts and not self.enable_eplb:
            problem = "experts have copies only if they can be balanced"
            return "num_redundant_experts", self.num_redundant_experts, problem, "0, or enable_eplb"
        if self.enable_eplb and not self.enable_expert_parallel:
            problem = "each rank has a part of every expert: there is nothing to balance"
            return "enable_eplb", True, problem, "use enable_expert_parallel with it"
        return None


class SchedulerConfig(Value, frozen=True, kw_only=True):
    """The largest step that the driver will send, and what its requests may ask for."""

    max_num_seqs: Annotated[int, Meta(ge=1, le=65535)] = 256
    max_num_batched_tokens: Positive = 8192
    step_deadline_ms: Annotated[int, Meta(ge=100, le=3_600_000)] = 60_000
    """A step that takes longer counts as hung; gloo's own timeout is this plus a second. At least
    MIN_STEP_DEADLINE_MS, and as long as the longest step takes."""
    logits_processors: Annotated[tuple[Name, ...], Meta(max_length=16)] = ()
    """Names of custom logits processors that requests may ask for; each daemon has them
    installed."""
    max_samples_per_seq: Annotated[int, Meta(ge=1, le=MAX_SAMPLES_PER_SEQ)] = 1
    """Most tokens that a request samples in one step (ExecuteModel.num_samples). The buffers for
    logits have room for as many of each request."""


class SpeculativeConfig(Value, frozen=True, kw_only=True):
    """Speculative decoding: drafts of next tokens, which a step verifies."""

    method: DraftMethod = "none"
    """Source of the drafts. none: steps have none. driver: steps bring them. ngram: the last
    stage's device looks up the request's last tokens in its earlier ones. suffix: also in the
    tokens of earlier requests. draft_model: a smaller model on the last stage's devices. Steps may
    bring drafts with each of these methods."""
    num_speculative_tokens: Annotated[int, Meta(ge=0, le=MAX_DRAFTS)] = 0
    """Most drafts of a request in one step; at least 1 unless method is none."""
    prompt_lookup_max: Annotated[int, Meta(ge=1, le=MAX_LOOKUP)] = 4
    """ngram: the longest run of last tokens that is looked up. suffix: beyond it, a longer match
    counts no more."""
    prompt_lookup_min: Annotated[int, Meta(ge=1, le=MAX_LOOKUP)] = 2
    """ngram and suffix: the shortest match that gives drafts."""
    max_kept_tokens: Annotated[int, Meta(ge=1024, le=1 << 24)] = 1 << 18
    """suffix: the tokens of earlier requests that are kept, the newest ones."""
    model: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None
    """draft_model: directory of the draft model, like ModelConfig.model. It has the same
    vocabulary, and its dtype is found like that of the model for which it drafts."""

    @property
    def on_device(self) -> bool:
        """True if the workers make drafts, False if only steps bring them."""
        return self.method not in ("none", "driver")

    def find_fault(self) -> tuple[str, object, str, str] | None:
        """Return the first combination of fields that means nothing, as field, value, problem and
        fix; None if there is none."""
        num = self.num_speculative_tokens
        if self.method == "none" and num:
            problem, fix = "there is nothing that makes drafts", "give a method, or 0"
            return "num_speculative_tokens", num, problem, fix
        if self.method != "none" and not num:
            problem = f"method {self.method} needs the most drafts of a request in a step"
            return "num_speculative_tokens", num, problem, f"give 1 to {MAX_DRAFTS}"
        if self.prompt_lookup_min > self.prompt_lookup_max:
            problem = "the shortest match would be longer than the longest"
            fix = f"give at most prompt_lookup_max, {self.prompt_lookup_max}"
            return "prompt_lookup_min", self.prompt_lookup_min, problem, fix
        if self.method == "draft_model" and self.model is None:
            return "model", None, "method draft_model needs a draft model", "name its directory"
        if self.method != "draft_model" and self.model is not None:
            problem, fix = f"method {self.method} has no model", "leave it out, or draft_model"
            return "model", self.model, problem, fix
        return None


class CacheConfig(Value, frozen=True, kw_only=True):
    """Layout of the KV cache, and bounds on its memory."""

    block_size: Annotated[int, Meta(ge=1, le=1024)] = 16
    gpu_memory_utilization: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.9
    """Share of the device's total memory that this worker may use."""
    kv_cache_memory_bytes: Unsigned | None = None
    """Overrides the result of profiling; the profile still runs."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """auto is the model's dtype; fp8 is float8_e4m3fn with the checkpoint's scales, or 1. Models
    without a KV cache ignore it."""
    kv_host_memory_bytes: Unsigned = 0
    """Host memory of each rank for the host tier: blocks that leave the prefix cache. 0: none."""
    kv_files: bool = False
    """Keep full blocks in files of each daemon's directory, for prompts that begin with them."""
    kv_tier_memory: KVTierMemory = "host"
    """Place of the host tier's memory: device takes kv_host_memory_bytes of the rank's GPU instead,
    which another group's ranks on this host can read (prefill apart from decode)."""
    prompt_attention_dtype: PromptAttentionDtype = "auto"
    """Dtype of the products of long prompts' attention: auto is the model's; fp8 rounds queries and
    weights, too, over a KV cache in FP8, on GPUs of compute capability 9 or more."""


class GraphConfig(Value, frozen=True, kw_only=True):
    """Use of CUDA graphs."""

    enforce_eager: bool = False


class LoraConfig(Value, frozen=True, kw_only=True):
    """Room for LoRA adapters."""

    max_loras: Annotated[int, Meta(ge=0, le=256)] = 0
    """Maximum number of adapters in one step: slots in device memory. 0 refuses adapters and
    allocates nothing."""
    max_lora_rank: Annotated[int, Meta(ge=1, le=512)] = 16
    """Largest rank of an adapter; every slot has room for it."""
    max_cpu_loras: Positive | None = None
    """Maximum number of adapters in host memory, at least max_loras; None: max_loras."""

    @property
    def num_cpu_loras(self) -> int:
        """Maximum number of adapters in host memory."""
        return self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras


class WorkerConfig(Value, frozen=True, kw_only=True):
    """The complete configuration. `attach` compares it, so that a new driver knows if its
    configuration is already loaded."""

    parallel: ParallelConfig
    model: ModelConfig
    scheduler: SchedulerConfig = SchedulerConfig()
    cache: CacheConfig = CacheConfig()
    graph: GraphConfig = GraphConfig()
    lora: LoraConfig = LoraConfig()
    speculative: SpeculativeConfig = SpeculativeConfig()

    def fingerprint(self) -> str:
        """Return a stable hash of the encoded configuration, 32 hex digits."""
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=16).hexdigest()

    def differing_fields(self, other: "WorkerConfig") -> list[str]:
        """Return the fields in which two configurations differ, as `section.field: mine !=
        theirs`."""
        differences = []
        for section in self.__struct_fields__:
            mine, theirs = getattr(self, section), getattr(other, section)
            differences += [
                f"{section}.{field}: {getattr(mine, field)!r} != {getattr(theirs, field)!r}"
                for field in mine.__struct_fields__
                if getattr(mine, field) != getattr(theirs, field)
            ]
        return differences


class RendezvousAddress(Value, frozen=True, kw_only=True):
    """Address of a rendezvous: a key-value store that serves only members that prove its secret
    (rendezvous/store.py)."""

    host: Annotated[str, Meta(min_length=1, max_length=256)]
    port: Annotated[int, Meta(ge=1, le=65535)]
    secret: Annotated[bytes, Meta(min_length=32, max_length=32)]

    def __repr__(self) -> str:
        return f"RendezvousAddress(host={self.host!r}, port={self.port})"


class Rendezvous(Value, frozen=True, kw_only=True):
    """A rank's access to a new link."""

    link: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    """Without data_parallel_lockstep it is, modulo data_parallel_size, the rank's replica, so that
    no step of another replica names it."""
    place: RendezvousAddress | None
    """Served by one of the link's daemons; None for a link of one, which needs no rendezvous."""
    rank: Count
    local_world_size: Positive
    """Daemons of all replicas on this host: they share its CPU cores."""
