"""Transfer of weights into a running worker: by a trainer's broadcasts, through its CUDA memory, or
from files; and the state of a worker's weights."""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from rpc_schema.base import (
    Count,
    Name,
    Positive,
    RawInt32,
    StepReply,
    StepRequest,
    Text,
    Unsigned,
    Value,
)
from rpc_schema.config import RendezvousAddress
from rpc_schema.identity import ContentIdentity
from rpc_schema.step import Done

TensorDtype = Literal[
    "float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "int32", "int64"
]
WeightFormat = Literal["checkpoint", "kernel"]
WeightsState = Literal["none", "whole", "updating", "dirty", "discarded"]

NewVersion: TypeAlias = Unsigned | None
"""Number of the version that an update makes, larger than the rank's present one. None: one more. A
driver names it, since ranks may have different ones and must have the same afterwards."""

UpdateTarget: TypeAlias = Literal["model", "draft_model", "lora"]
"""The weights that an update changes."""

RunningRows: TypeAlias = Literal["drop", "keep", "recompute"]
"""Treatment of the rows of running requests when the weights change. drop: they are freed. keep:
they go on with the KV that they have, and other weights compute the rest. recompute: they go on
after a RecomputeRequests; a driver that adopts them before it computes their KV again."""

MAX_TENSORS = 65536
MAX_STATUS_NAMES = 16

TimeoutMs = Annotated[int, Meta(ge=100, le=3_600_000)]
"""Limit on a worker's wait for the next data from the trainer."""

Directory = Annotated[str, Meta(min_length=1, max_length=4096)]
"""Directory of a checkpoint, under one of the daemon's model roots."""


class BroadcastEngine(Value, frozen=True, tag=1, kw_only=True):
    """A separate communicator over torch.distributed: the trainer has the first ranks, of which 0
    serves the rendezvous, a worker is rank_offset + its rank within its group: its
    replica, or all replicas in lockstep."""

    backend: Literal["gloo", "nccl"]
    place: RendezvousAddress
    rank_offset: Positive = 1
    world_size: Annotated[int, Meta(ge=2, le=65536)]
    """Trainer and workers together."""
    num_trainers: Positive = 1
    """Ranks of the trainer, rank_offset at most. More than one send shards (ShardSource)."""


class IpcEngine(Value, frozen=True, tag=2, kw_only=True):
    """The trainer's CUDA memory, mapped by the worker: both are on one host."""


class DiskEngine(Value, frozen=True, tag=3, kw_only=True):
    """safetensors files under the daemon's model roots."""


Engine: TypeAlias = BroadcastEngine | IpcEngine | DiskEngine


class InitWeightTransferEngine(
    StepRequest["InitWeightTransferEngineReply"], frozen=True, tag=50, kw_only=True
):
    """Choose the source of the weights of later updates. With broadcasts: wait for the trainer and
    all other workers; a previous engine is closed first."""

    engine: Engine
    timeout_ms: TimeoutMs = 60_000


class InitWeightTransferEngineReply(StepReply, frozen=True, tag=50, kw_only=True):
    transfer_rank: Count
    """Rank in the communicator; 0 if there is none."""


class StartWeightUpdate(StepRequest[Done], frozen=True, tag=51, kw_only=True):
    """Begin an update: no step runs until it is finished, or the weights are loaded again."""

    format: WeightFormat
    """checkpoint: names and shapes as in the checkpoint; each rank takes its part. kernel:
    names, shapes and dtypes of the rank's own parameters, which are copied as they are; NAME@tpN is
    for tensor-parallel rank N alone."""
    partial: bool = False
    """True: tensors that are not sent keep their content. False: all must be sent."""
    version: NewVersion = None
    target: UpdateTarget = "model"
    """draft_model: the model that drafts for the loaded one. lora: an adapter in host memory, which
    changes as a whole when the update is finished. Both have versions of their own; requests go on,
    and steps may run while the update is open."""
    running: RunningRows = "drop"
    """For the target model alone: the others keep all rows."""
    lora_id: Count = 0
    """The adapter, for the target lora; 0 for others. Its tensors have PEFT's names and the shapes
    of the loaded adapter, of which it keeps ranks and scales."""


class BroadcastSource(Value, frozen=True, tag=1, kw_only=True):
    """The tensors come as the trainer's broadcasts in the order of their names: raw bytes,
    row-major, in the transfers of `weight_packing.plan_transfers`."""

    packed_bytes: Unsigned = 0
    """0: one transfer for each tensor. Otherwise tensors share transfers of at most this many
    bytes."""
    round: Unsigned = 0
    """Before it receives, each rank writes `ready` (or `refused`) under `round/ROUND/TRANSFER_RANK`
    in the trainer's store, so that the trainer can wait for all receivers."""


class IpcSource(Value, frozen=True, tag=2, kw_only=True):
    """The tensors are in the trainer's CUDA memory, row-major, and must not change until the
    reply."""

    handles: Annotated[
        tuple[Annotated[bytes, Meta(min_length=64, max_length=64)], ...], Meta(max_length=4096)
    ]
    """CUDA IPC memory handles of whole allocations."""
    blocks: Annotated[tuple[Count, ...], Meta(max_length=MAX_TENSORS)]
    """For each tensor: the index of its handle."""
    offsets: Annotated[tuple[Unsigned, ...], Meta(max_length=MAX_TENSORS)]
    """For each tensor: bytes from the start of that allocation."""


class DiskSource(Value, frozen=True, tag=3, kw_only=True):
    """The tensors are in a checkpoint's files. Names select tensors; without names, all tensors of
    the model are read. dtypes and shapes stay empty, since the files have them."""

    model: Directory
    """Directory of the checkpoint; of an adapter, under the daemon's adapter roots."""


class ShardSource(Value, frozen=True, tag=4, kw_only=True):
    """Each tensor, or piece of one, comes from one of the trainer's ranks, and a worker gets what
    lies in its part alone: raw bytes, row-major, in the rounds of `shard_plan.plan_rounds`, each an
    all-to-all exchange of the communicator.

    Before it receives, a worker writes the boxes that it needs under `round/ROUND/wants/RANK` in
    the trainer's store (`shard_wants`), then answers as for BroadcastSource."""

    sources: Annotated[tuple[Count, ...], Meta(max_length=MAX_TENSORS)]
    """For each tensor: the trainer's rank that sends it."""
    packed_bytes: Positive
    """Most bytes that a trainer's rank sends of its rows in a round; a longer row has a round by
    itself."""
    round: Unsigned = 0


Source: TypeAlias = BroadcastSource | IpcSource | DiskSource | ShardSource


class UpdateWeights(StepRequest["UpdateWeightsReply"], frozen=True, tag=52, kw_only=True):
    """Receive some tensors of an update. Names, dtypes and shapes are of equal length; if all three
    are empty, those of the previous round are used.

    A partial update may change single elements of a tensor: NAME.indices, int32 or int64 [n], are
    their places in the row-major tensor NAME, increasing, and NAME.values [n] what they become.
    Both are in one request, in which all indices come before anything else.

    A tensor may come in pieces, boxes that do not overlap and together are all of it, in any
    requests of the update; its name then stands once for each."""

    names: Annotated[tuple[Name, ...], Meta(max_length=MAX_TENSORS)] = ()
    dtypes: Annotated[tuple[TensorDtype, ...], Meta(max_length=MAX_TENSORS)] = ()
    shapes: Annotated[
        tuple[Annotated[tuple[Count, ...], Meta(max_length=8)], ...], Meta(max_length=MAX_TENSORS)
    ] = ()
    origins: Annotated[
        tuple[Annotated[tuple[Count, ...], Meta(max_length=8)], ...], Meta(max_length=MAX_TENSORS)
    ] = ()
    """For each tensor: the place of its first element, per dimension, in the tensor of that name
    that it is a piece of; empty for a whole tensor. Empty: all are whole."""
    source: Source


class UpdateWeightsReply(StepReply, frozen=True, tag=52, kw_only=True):
    num_tensors: Count
    """Number of tensors that this rank holds completely or in part."""
    size_bytes: Unsigned
    """Bytes received, including tensors that this rank does not hold."""
    seconds: float


class FinishWeightUpdate(StepRequest["FinishWeightUpdateReply"], frozen=True, tag=53, kw_only=True):
    """End an update: steps are legal again. Refused, and still open, while tensors are missing."""


class FinishWeightUpdateReply(StepReply, frozen=True, tag=53, kw_only=True):
    version: Unsigned


class ReloadWeights(StepRequest["ReloadWeightsReply"], frozen=True, tag=54, kw_only=True):
    """Read the weights again, in place: tensor addresses stay. All headers are checked before the
    first byte is written."""

    model: Annotated[str, Meta(max_length=4096)] = ""
    """Another directory under the model roots, with a model of the same shape. Empty: the directory
    that was loaded, or that UpdateConfig has named since."""
    version: NewVersion = None
    running: RunningRows = "drop"
    """keep is refused if the KV cache is in FP8: its scales are read again with the weights.
    recompute is refused if layers keep a state per request, in StartWeightUpdate too."""


class ReloadWeightsReply(StepReply, frozen=True, tag=54, kw_only=True):
    size_bytes: Unsigned
    seconds: float
    version: Unsigned


MAX_RECOMPUTED_BYTES = 8 << 20
"""Bound on the tokens of a RecomputeRequests."""


MAX_REPLICAS = 4096
"""Bound on the replicas in lockstep whose rows are recomputed at the same time."""


class RecomputeRequests(StepRequest["RecomputeRequestsReply"], frozen=True, tag=56, kw_only=True):
    """Compute KV of rows again, in place, with the present weights; nothing is sampled. No step is
    in flight. Each forward pass takes the rows' next tokens in their order, at most max_num_tokens:
    all ranks run the same passes without asking each other. Each may take a step's deadline. If one
    fails, steps fail until a resynchronization, as after a failed step."""

    rows: RawInt32
    """For each row (slot, first, end, num_tokens), slots ascending: the KV of its positions from
    first to end - 1 is computed, from the prompt of its admission and the num_tokens tokens that
    follow the prompt. A row may begin behind blocks that it shares with rows before it."""
    token_ids: Annotated[bytes, Meta(max_length=MAX_RECOMPUTED_BYTES)] = b""
    """Little-endian int32: the tokens that follow the rows' prompts, concatenated. The rank that
    answers steps reports them (AdoptRequests)."""
    max_num_tokens: Positive
    """At most the scheduler's max_num_batched_tokens."""
    is_cut: bool = False
    """The last row goes on in a later message: until then, its KV is of no use to another
    driver."""
    tokens_by_replica: Annotated[tuple[RawInt32, ...], Meta(max_length=MAX_REPLICAS)] = ()
    """Numbers of tokens, for replicas in lockstep, each of which computes rows of its own at the
    same time: those of each row of every replica, in the order of its rows, so that all ranks know
    everyone's passes. A replica that has no pass left takes part in those of the others without
    tokens if they share experts. Empty: there is one replica."""


class RecomputeRequestsReply(StepReply, frozen=True, tag=56, kw_only=True):
    num_tokens: Unsigned
    """Tokens whose KV was computed again, those of shared blocks once."""
    num_passes: Count
    seconds: float


class UpdateConfig(StepRequest[Done], frozen=True, tag=55, kw_only=True):
    """Change the source and options of the next ReloadWeights."""

    overrides: Annotated[dict[Name, str | int | bool], Meta(max_length=64)]
    """By section and field: `model.model`, `model.seed`, `load.load_format`,
    `load.verify_checksums`. Any other field is refused, and nothing is applied."""


class WeightsStatus(Value, frozen=True, kw_only=True):
    """State of this rank's weights."""

    state: WeightsState
    """updating and dirty: some tensors are new, some are not, and no step runs; dirty means that
    the update has failed. discarded: the memory has no content."""
    num_tensors: Count
    version: Unsigned
    """Number of the weights' version when they were last complete."""
    num_dirty: Count
    """Tensors written since the weights were last complete, including one whose write failed."""
    dirty: Annotated[tuple[Name, ...], Meta(max_length=MAX_STATUS_NAMES)]
    """Names of the first of these tensors."""
    num_missing: Count
    """Tensors still to be written before the weights are complete again."""
    missing: Annotated[tuple[Name, ...], Meta(max_length=MAX_STATUS_NAMES)]
    cause: Text = ""
    """Reason for the state dirty or discarded."""
    identity: ContentIdentity | None = None
    """Identity of the weights when they were last complete. Ranks of a group must have the same."""
