"""Messages between a daemon's start and its end other than steps: attach, device, model, memory,
health, shutdown."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from rpc_schema.base import (
    ContentHash,
    ControlReply,
    ControlRequest,
    Count,
    Event,
    Name,
    Positive,
    StepReply,
    StepRequest,
    Text,
    Uid,
    Unsigned,
    Value,
)
from rpc_schema.config import (
    MAX_DRAFTS,
    CacheConfig,
    GraphConfig,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    Rendezvous,
    RendezvousAddress,
    SchedulerConfig,
    SpeculativeConfig,
    WorkerConfig,
)
from rpc_schema.expert_placement import (
    MAX_EXPERTS,
    ExpertMoves,
    ExpertPlacement,
    RankPlacement,
)
from rpc_schema.health import LoadState, ServingState, StatusHead
from rpc_schema.host_tier import HostTierStatus
from rpc_schema.kv_cache import KVCacheConfig, KVCacheSpec
from rpc_schema.kv_files import KVFilesStatus
from rpc_schema.lease import (
    DEFAULT_LEASE_TTL_MS,
    DEFAULT_ORPHAN_KV_TTL_MS,
    FREE_LEASE,
    HolderName,
    LeaseState,
    LeaseStatus,
)
from rpc_schema.pooling import NO_POOLING, PoolingSupport
from rpc_schema.routed_experts import RoutedExpertsShape
from rpc_schema.step import Done
from rpc_schema.weight_transfer import WeightsStatus

LinkState = Literal["none", "up", "broken"]
MemoryTag = Literal["weights", "kv_cache"]
TagState = Literal["awake", "asleep", "discarded", "lost"]
"""awake: mapped. asleep: not mapped, until WakeUp restores it (a KV cache is empty then).
discarded: not mapped, without content to restore. lost: mapped, but the weights must be loaded
again."""
SleepLevel = Literal[1, 2]


MAX_EPOCH_STEP = 1 << 20
"""Limit on the difference between a daemon's last epoch and the next one. If another daemon of the
group is further ahead, a driver sends several requests."""


class PrepareAttach(ControlRequest["PrepareAttachReply"], frozen=True, tag=2, kw_only=True):
    """First phase of attach: announce an epoch higher than any that this daemon has seen, by at
    most 2^20 (otherwise CONFIG). Refused to a driver that has not sent Hello with this daemon's
    protocol version, and, with LEASE_HELD, while another driver holds the lease or is attaching.
    Once granted, no other driver gets the lease for a second, unless by force."""

    driver_id: Uid
    epoch: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    force: bool = False
    """Take the lease from its holder; only for the role admin."""


class PrepareAttachReply(ControlReply, frozen=True, tag=2, kw_only=True):
    """granted is False if last_epoch is not below the requested epoch: request a higher one."""

    granted: bool
    last_epoch: Unsigned


class CommitAttach(ControlRequest["CommitAttachReply"], frozen=True, tag=3, kw_only=True):
    """Second phase: this driver owns the daemon's steps from now on, and its lease begins. Requests
    of earlier drivers are dropped unless keep_requests is set. Only the sender's key (on ipc
    without keys: its user) may use the epoch from now on; others are FORBIDDEN."""

    driver_id: Uid
    epoch: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    results_route: Uid
    """Routing id of the driver's results socket. A secret: a connection with this id receives the
    results. While it has no connection, the lease is claimable."""
    keep_requests: bool = False
    """Keep the earlier drivers' requests for AdoptRequests; the first ExecuteModel drops those that
    it does not name."""
    lease_ttl_ms: Unsigned = DEFAULT_LEASE_TTL_MS
    """1000 to 60000: time without a renewal after which the lease expires. It ends sooner if the
    driver's process or its results connection ends."""
    orphan_kv_ttl_ms: Unsigned = DEFAULT_ORPHAN_KV_TTL_MS
    """0 to 3600000: time for which requests stay on the daemon after the lease has expired. Weights
    stay."""
    holder_name: HolderName = ""


class ReplyDelay(Value, frozen=True, kw_only=True):
    """Time from when a step's result is known to be on the host until its reply is sent, over the
    last results of the attached driver's steps (at most 1024)."""

    num_replies: Count
    """0 if this rank has sent none: both times are 0 then."""
    p50_us: float
    p99_us: float


class KVCacheAdvice(Value, frozen=True, kw_only=True):
    """Values of kv_cache_memory_bytes for the loaded model, from the memory in use after
    warm-up."""

    request_bytes: Unsigned
    """Value that keeps this rank within its gpu_memory_utilization."""
    card_bytes: Unsigned
    """Value that fills the memory that other processes leave."""


class GpuLoad(Value, frozen=True, kw_only=True):
    """Readings of NVML for a GPU, at most two seconds old; None if it has none."""

    utilization_percent: Count | None = None
    """Recent share of time in which a kernel ran."""
    temperature_c: int | None = None
    power_w: Count | None = None


class DraftsVerified(Value, frozen=True, kw_only=True):
    """Drafts that steps have verified (speculative decoding), since the KV cache was made. Each
    counts once on the rank that answers steps."""

    num_verified: Unsigned
    """Number of times that a request had drafts in a step. Each time it gains one token more than
    drafts are accepted."""
    num_drafted: Unsigned
    """Drafts."""
    accepted_by_place: Annotated[tuple[Unsigned, ...], Meta(max_length=MAX_DRAFTS)]
    """Accepted drafts at each place: the first draft of a request in a step, the second, and so
    on."""


class ExpertLoad(Value, frozen=True, kw_only=True):
    """Tokens routed to each expert of a layer since the model was loaded. Counts only grow, until
    weights of another checkpoint are loaded. Padding, warm-up and dummy steps do not count; tokens
    that are computed again count again. Every rank of a stage counts all experts, including those
    that other ranks hold."""

    layer: Count
    """Layer of the model."""
    counts: Annotated[bytes, Meta(max_length=8 * MAX_EXPERTS)]
    """Little-endian int64 [E], one count for each expert."""


class Status(StatusHead, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A daemon's state at one moment."""

    link_state: LinkState
    link: Unsigned
    epoch: Unsigned
    """Epoch of last_seq: that of `lease` once the running operation has ended."""
    last_seq: Unsigned
    rank: Count
    phase: str
    phase_ms: Count
    config: WorkerConfig | None
    """Configuration of the loaded model; None below MODEL_LOADED."""
    kv_cache: KVCacheConfig | None
    memory_bytes: dict[str, int]
    """Device (or host) memory by use: weights, kv_cache, graphs, activations (with the allocator's
    cache for them), context (with communicators, library handles and code), others (other
    processes; absent if they cannot be distinguished from context); activations_peak, free, total.
    With enable_sleep_mode, weights and kv_cache are their current memory, and there are also
    buffers (of the model, in context), torch_reserved (memory of torch's allocator) and host_backup
    (host memory for sleep)."""
    providers: dict[str, str]
    """Implementation of each part of a step: attention, layers, all_reduce; and the number of
    graphs."""
    input_wait_share: float
    """Share of time, 0 to 1, in which this stage waits for its input, over the last sampled steps;
    0 in a pipeline of one stage."""
    reply_delay: ReplyDelay
    transitions: tuple[str, ...]
    """The last state changes, oldest first."""
    failure: Text = ""
    kv_cache_advice: KVCacheAdvice | None = None
    """From READY on."""
    memory_tags: dict[MemoryTag, TagState] = msgspec.field(default_factory=dict)
    """Sleep state of weights and KV cache; empty without enable_sleep_mode."""
    weights: WeightsStatus | None = None
    """None below MODEL_LOADED."""
    draft_weights: WeightsStatus | None = None
    """State of the draft model's weights; None without one. Ranks that do not run it hold none."""
    lease: LeaseStatus = FREE_LEASE
    num_bad_frames: Count = 0
    """Number of messages that did not decode, since the daemon's start."""
    num_refused: Count = 0
    """Number of refused handshakes; 0 without keys."""
    degraded: Text = ""
    """Fault of the device that does not stop the daemon, such as the loss of NVML. Empty: none."""
    num_tokens: Unsigned = 0
    """Tokens sampled since the daemon's start; 0 on ranks that do not answer steps."""
    num_requests: Count = 0
    """Running requests: those that have a slot, with or without tokens in the last step."""
    usual_step_us: Count = 0
    """Moving average of the time from step to step, without idle times."""
    gpu_load: GpuLoad | None = None
    num_kv_blocks_held: Count = 0
    """KV blocks of running requests; a shared block counts once per request."""
    upload_bytes: Unsigned = 0
    """Host memory for the attached driver's uploads; unfinished ones count in full."""
    max_upload_bytes: Unsigned = 0
    """Bound on upload_bytes (--upload-memory-bytes)."""
    drafts: DraftsVerified | None = None
    """None until steps have had drafts, and on ranks that do not answer steps."""
    expert_loads: tuple[ExpertLoad, ...] = ()
    """One entry for each layer with experts of this stage. They are as of this GetStatus, or as of
    an earlier one if the step thread did not answer in time."""
    model_names: tuple[str, ...] = ()
    """Names in a ModelConfig that mean the loaded directory to this daemon: its absolute path and,
    if it is below the first root, the path from there. Empty below MODEL_LOADED."""
    host_tier: HostTierStatus | None = None
    """None without one."""
    expert_placements: tuple[RankPlacement, ...] = ()
    """One entry for each layer with experts of this stage; empty without enable_eplb."""
    expert_moves: ExpertMoves | None = None
    """None without enable_eplb."""
    kv_files: KVFilesStatus | None = None
    """None if the loaded configuration keeps none."""


class CommitAttachReply(ControlReply, frozen=True, tag=3, kw_only=True):
    """Attached. The previous_* fields describe the daemon's position before the attach; if ranks
    differ in them, they need a new link."""

    previous_epoch: Unsigned
    previous_seq: Unsigned
    previous_clean: bool
    """No step was interrupted and every send was received."""
    status: Status


class Detach(ControlRequest["Acknowledged"], frozen=True, tag=4, kw_only=True):
    """Detach and free the lease, or give up a prepared epoch. The model stays loaded. The next
    attach drops the requests, unless it sets keep_requests. A request that the daemon reads
    afterwards is refused: first wait until the status of every rank has the last request's seq as
    last_seq, or else the next driver finds some ranks in a step that the others have refused."""

    epoch: Unsigned


class OpenRendezvous(ControlRequest["OpenRendezvousReply"], frozen=True, tag=5, kw_only=True):
    """Serve a rendezvous on the daemon's data interface: of the next link, or of ranks between
    which experts move, which name the next link too."""

    epoch: Unsigned
    link: Unsigned
    num_ranks: Positive


class OpenRendezvousReply(ControlReply, frozen=True, tag=5, kw_only=True):
    place: RendezvousAddress


class AbortLink(ControlRequest["Acknowledged"], frozen=True, tag=30, kw_only=True):
    """Leave the link, since a rank is lost. Stop waiting for other ranks, and refuse steps until
    a Relink; weights, KV cache and graphs stay."""

    epoch: Unsigned
    cause: Text


class GetStatus(ControlRequest["GetStatusReply"], frozen=True, tag=7, kw_only=True):
    """Return the daemon's status."""


class GetStatusReply(ControlReply, frozen=True, tag=7, kw_only=True):
    status: Status


class Shutdown(ControlRequest["Acknowledged"], frozen=True, tag=8, kw_only=True):
    """Stop the daemon: the running step is finished first, within its drain time."""


class Drain(ControlRequest["Acknowledged"], frozen=True, tag=31, kw_only=True):
    """Take no more steps or drivers, but keep weights, KV cache, link and lease. The heartbeat
    informs the lease holder, which has a second to stop; the running step is finished. Answered
    once no step runs and none can start. Repeating it changes nothing."""

    undo: bool = False
    """Take steps and drivers again."""


class Acknowledged(ControlReply, frozen=True, tag=8, kw_only=True):
    """The request was carried out."""


class Attached(StepReply, frozen=True, tag=3, kw_only=True):
    """Reply at seq 0 of an epoch: the results socket reaches this driver. Sent once; it is lost if
    the connection ends before the driver reads it, and then the next connection shows the
    same."""


class InitDevice(StepRequest["InitDeviceReply"], frozen=True, tag=10, kw_only=True):
    """Create the device context, the link and the baseline memory snapshot. Legal in CREATED."""

    parallel: ParallelConfig
    rendezvous: Rendezvous
    cache: CacheConfig
    scheduler: SchedulerConfig
    """Only step_deadline_ms is used here: it bounds gloo's waits."""


class InitDeviceReply(StepReply, frozen=True, tag=10, kw_only=True):
    device_name: str
    total_memory_bytes: Unsigned
    free_memory_bytes: Unsigned
    backend: str
    """nccl or gloo."""


class Relink(StepRequest[Done], frozen=True, tag=11, kw_only=True):
    """Leave the communicators and build new ones; weights, KV cache and plan stay."""

    rendezvous: Rendezvous
    warm_up_follows: bool = False
    """A rank is new, so all ranks receive a CompileOrWarmUpModel before the next step; it captures
    the graphs that were dropped with the link."""


class Reset(StepRequest[Done], frozen=True, tag=12, kw_only=True):
    """Return to an earlier state of the load chain; memory returns to that state's baseline."""

    to: Literal["CREATED", "DEVICE_READY", "MODEL_LOADED"]


class LoadModel(StepRequest["LoadModelReply"], frozen=True, tag=13, kw_only=True):
    """Build this rank's stage and shard and fill it with weights."""

    model: ModelConfig
    scheduler: SchedulerConfig
    cache: CacheConfig
    graph: GraphConfig
    lora: LoraConfig = LoraConfig()
    speculative: SpeculativeConfig = SpeculativeConfig()
    weights_version: Unsigned | None = None
    """Number of the weights' version. None: that of the saved set, or 0."""
    content: ContentHash | None = None
    """Identity of config.json and the weights, if `model` names a repository: SHA-256 over names,
    sizes and the hub's hashes (model_hub/cache.py). If the daemon's files have another one, nothing
    is loaded. None: unknown."""
    expert_placements: Annotated[tuple[ExpertPlacement, ...], Meta(max_length=1024)] = ()
    """With enable_eplb, by layer, at least of this stage: the placement that the other ranks have.
    Empty: experts in order, then the redundant ones, which repeat them in order."""


class LoadModelReply(StepReply, frozen=True, tag=13, kw_only=True):
    model_memory_bytes: Unsigned
    seconds: float
    max_model_len: Positive
    """Resolved limit: the model's own if the driver gave none."""


class GetKVCacheSpec(StepRequest["GetKVCacheSpecReply"], frozen=True, tag=14, kw_only=True):
    """Return the KV cache per token of this rank's layers."""


class GetKVCacheSpecReply(StepReply, frozen=True, tag=14, kw_only=True):
    layers: tuple[KVCacheSpec, ...]


class DetermineAvailableMemory(
    StepRequest["DetermineAvailableMemoryReply"], frozen=True, tag=15, kw_only=True
):
    """Run the largest step once, capture some of the graphs, and return the bytes that remain for
    the KV cache. All ranks take part; it may be repeated."""


class MemoryChange(Value, frozen=True, kw_only=True):
    """Memory taken or freed by another process."""

    pid: Count
    """Process id from NVML; for a container, the host's. 0 if unknown."""
    num_bytes: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
    """Negative: freed."""


class DetermineAvailableMemoryReply(StepReply, frozen=True, tag=15, kw_only=True):
    available_bytes: Unsigned
    weights_bytes: Unsigned
    activation_peak_bytes: Unsigned
    requested_bytes: Unsigned
    graph_bytes: Unsigned = 0
    """Estimated memory of the CUDA graphs."""
    changes: tuple[MemoryChange, ...] = ()
    """Memory changes by other processes during the profile. The profile takes them into account as
    far as they are known; a driver should ask all ranks again."""


class InitializeFromConfig(StepRequest[Done], frozen=True, tag=16, kw_only=True):
    """Allocate the KV cache. There is one entry per rank of the replica, in
    rank order."""

    kv_cache_configs: Annotated[tuple[KVCacheConfig, ...], Meta(min_length=1, max_length=4096)]


class InitializeCache(StepRequest[Done], frozen=True, tag=17, kw_only=True):
    """Record the numbers of blocks that the driver chose."""

    num_gpu_blocks: Positive
    num_cpu_blocks: Count = 0


class UpdateMaxModelLen(StepRequest[Done], frozen=True, tag=18, kw_only=True):
    """Lower (or restore) the longest context after the driver fitted it to the KV cache."""

    max_model_len: Positive


class CompileOrWarmUpModel(
    StepRequest["CompileOrWarmUpModelReply"], frozen=True, tag=19, kw_only=True
):
    """Run synthetic steps through the normal entry, so that nothing is compiled or allocated while
    serving. All ranks take part, including those that are READY when another one is new; READY
    ranks keep their graphs."""


class CompileOrWarmUpModelReply(StepReply, frozen=True, tag=19, kw_only=True):
    seconds: float


class GetSupportedTasks(StepRequest["GetSupportedTasksReply"], frozen=True, tag=20, kw_only=True):
    """Return the tasks of the loaded model."""


class GetSupportedTasksReply(StepReply, frozen=True, tag=20, kw_only=True):
    tasks: tuple[Name, ...]


class GetModelMetadata(StepRequest["GetModelMetadataReply"], frozen=True, tag=21, kw_only=True):
    """Return a description of the loaded model for the driver."""


class GetModelMetadataReply(StepReply, frozen=True, tag=21, kw_only=True):
    architecture: Name
    vocab_size: Positive
    hidden_size: Positive
    num_layers: Positive
    max_model_len: Positive
    dtype: Name
    eos_token_ids: tuple[Count, ...]
    attention_backend: Name
    """Implementation chosen at start-up."""
    generates: bool = True
    """True if the model has an LM head."""
    pooling: PoolingSupport = NO_POOLING
    checkpoint_changed: bool = False
    """The files that this rank's weights are from have been replaced since they were read."""
    routed_experts: RoutedExpertsShape | None = None
    """Sizes of the experts that requests may ask for; None: loaded without
    enable_return_routed_experts."""


class SaveShardedState(StepRequest["SaveShardedStateReply"], frozen=True, tag=22, kw_only=True):
    """Write this rank's weights under the daemon's save root, next to an existing set of that name.
    Readers see no change before FinishShardedState."""

    save: Uid
    """128 random bits, the same on all ranks: they link the files of one save."""
    name: Annotated[str, Meta(min_length=1, max_length=128)]
    """Name of the set: letters, digits, '.', '_' and '-', never a path."""
    pattern: Annotated[str, Meta(min_length=1, max_length=128)]
    """Pattern of the file names, with {rank} and {part}."""
    max_size_bytes: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    """Bound on the tensors in one file; a larger tensor has a separate file."""


class SaveShardedStateReply(StepReply, frozen=True, tag=22, kw_only=True):
    num_files: Count
    size_bytes: Unsigned
    seconds: float


class FinishShardedState(StepRequest[Done], frozen=True, tag=23, kw_only=True):
    """End a save: put the files of all ranks in place under the set's name, or remove them."""

    save: Uid
    keep: bool
    """True only after every rank has answered SaveShardedState: rank 0 then replaces the set."""


class SaveTensorizedModel(
    StepRequest["SaveTensorizedModelReply"], frozen=True, tag=60, kw_only=True
):
    """Save through the tensorizer library, one file for each rank. FinishShardedState ends the
    save, as for SaveShardedState."""

    save: Uid
    """See SaveShardedState."""
    name: Annotated[str, Meta(min_length=1, max_length=128)]
    """See SaveShardedState."""


class SaveTensorizedModelReply(StepReply, frozen=True, tag=60, kw_only=True):
    size_bytes: Unsigned
    """Size of the tensors."""
    seconds: float


class ComputeWeightChecksums(
    StepRequest["ComputeWeightChecksumsReply"], frozen=True, tag=24, kw_only=True
):
    """Hash this rank's current weights."""


class ComputeWeightChecksumsReply(StepReply, frozen=True, tag=24, kw_only=True):
    checksums: dict[Name, Annotated[bytes, Meta(min_length=16, max_length=16)]]
    """BLAKE2b-128 by checkpoint name, for each tensor that this rank holds completely or in part:
    the hash of its elements in row-major order, little-endian."""


class Profile(StepRequest["ProfileReply"], frozen=True, tag=25, kw_only=True):
    """Begin or end a profile of this rank's steps; one runs at a time. Without a running profile,
    ending only logs a warning."""

    action: Literal["start", "stop"]
    kind: Literal["torch", "cuda"]
    """torch writes a trace; cuda marks the period for an external profiler."""
    prefix: Annotated[str, Meta(max_length=64)] = ""
    """Prefix of the name of the trace that a start begins: letters, digits, '.', '_' and '-', never
    a path. Empty: the previous prefix, at first `trace`."""


class ProfileReply(StepReply, frozen=True, tag=25, kw_only=True):
    file: Text
    """The trace that was written, PREFIX-ppP-tpT-rankR.json.gz, with its path on the daemon's host;
    empty if there was none."""


class Sleep(StepRequest["MemoryTagsReply"], frozen=True, tag=40, kw_only=True):
    """Release the memory of weights and KV cache; addresses stay. All requests are dropped. Level 1
    keeps the weights in host memory; level 2 keeps nothing. Repeating it changes nothing."""

    level: SleepLevel = 1


class WakeUp(StepRequest["MemoryTagsReply"], frozen=True, tag=41, kw_only=True):
    """Allocate memory for the tags (None: all) again, in any order. The KV cache is empty then."""

    tags: tuple[MemoryTag, ...] | None = None


class Discard(StepRequest["MemoryTagsReply"], frozen=True, tag=42, kw_only=True):
    """Release the tags' memory and keep none of its content, not even host copies. Discarding the
    KV cache drops all requests."""

    tags: tuple[MemoryTag, ...]


class MemoryTagsReply(StepReply, frozen=True, tag=40, kw_only=True):
    """State of this rank's memory tags after Sleep, WakeUp or Discard."""

    memory_tags: dict[MemoryTag, TagState]
    seconds: float


class Heartbeat(Event, frozen=True, tag=1, kw_only=True):
    """Published on the events socket four times a second."""

    serving: ServingState
    load: LoadState
    link_state: LinkState
    epoch: Unsigned
    link: Unsigned
    last_seq: Unsigned
    phase: str
    phase_ms: Count
    lease: LeaseState = "free"
    lease_remaining_ms: Count = 0
    phase_limit_ms: Count = 0
    """Time that the phase may last without progress; 0 while it waits for a request."""
    drains: bool = False
    """True if the daemon drains: the lease holder should send no more steps."""


class Hung(Event, frozen=True, tag=3, kw_only=True):
    """Published when a phase has passed its deadline."""

    phase: str
    phase_ms: Count
    stacks: Text
    """The file, on the daemon's host, with the stacks of all threads."""


class Slow(Event, frozen=True, tag=4, kw_only=True):
    """Published when a step lasts much longer than recent ones. A rank that waits for a slow one
    may publish it too."""

    phase: str
    phase_ms: Count
    usual_ms: Count


class StateChanged(Event, frozen=True, tag=2, kw_only=True):
    """Published when the daemon's state changes; the text reads `before -> after (cause)`."""

    transition: Text
