"""The table of operations: every request to a daemon, with its reply, required role, legal states
and deadline. The codec, the daemon's dispatch, its access and lifecycle rules, the driver library
and docs/protocol.md are derived from it. The decoder rejects a request that is not in the table."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Generic, TypeAlias, TypeVar

from rpc_schema import (
    adoption,
    cached_blocks,
    drafts,
    expert_placement,
    kv_files,
    kv_transfer,
    lease,
    lora,
    step,
    trace,
    uploads,
)
from rpc_schema import lifecycle as lc
from rpc_schema import weight_transfer as wt
from rpc_schema.base import ControlRequest, StepReply, StepRequest
from rpc_schema.control import GREETING, ControlOperation
from rpc_schema.health import Hello, LoadState
from rpc_schema.lifecycle import LinkState, TagState
from rpc_schema.roles import Role

StepReplyT = TypeVar("StepReplyT", bound=StepReply)

StepMessage: TypeAlias = StepRequest[Any]
ControlMessage: TypeAlias = ControlRequest[Any] | Hello

LOAD_CHAIN: Final[tuple[LoadState, ...]] = (
    "CREATED",
    "DEVICE_READY",
    "MODEL_LOADED",
    "KV_READY",
    "READY",
)
LINK_STATES: Final[tuple[LinkState, ...]] = ("none", "up", "broken")

_WORD: Final = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")

_ANY_TAG: Final[frozenset[TagState]] = frozenset(("awake", "asleep", "discarded", "lost"))
_AWAKE: Final[frozenset[TagState]] = frozenset(("awake",))
THERE: Final[frozenset[TagState]] = frozenset(("awake", "lost"))


def _only(*states: LoadState) -> frozenset[LoadState]:
    return frozenset(states)


def _from(lowest: LoadState) -> frozenset[LoadState]:
    return frozenset(LOAD_CHAIN[LOAD_CHAIN.index(lowest) :])


_ANY: Final = frozenset(LINK_STATES)
_UP: Final[frozenset[LinkState]] = frozenset(("up",))
_DOWN: Final[frozenset[LinkState]] = frozenset(("none", "broken"))
_MADE: Final[frozenset[LinkState]] = frozenset(("up", "broken"))


@dataclass(frozen=True, slots=True)
class Rule:
    """States in which an operation is legal, on each axis of a daemon's state, and the states after
    its success (None: unchanged). All need SERVING."""

    load: frozenset[LoadState]
    link: frozenset[LinkState] = _ANY
    load_after: LoadState | None = None
    link_after: LinkState | None = None
    weights: frozenset[TagState] = _ANY_TAG
    kv_cache: frozenset[TagState] = _ANY_TAG
    fills_weights: bool = False
    """True if its success has written every weight."""


@dataclass(frozen=True, slots=True)
class StepOperation(Generic[StepReplyT]):
    """A request on the step socket, run in order."""

    request: type[StepRequest[StepReplyT]]
    reply: type[StepReplyT]
    rule: Rule
    role: Role = Role.DRIVER
    deadline_s: float | None = None
    """Limit on a rank's silence, without a rendezvous with the other ranks; a worker may set
    shorter phases. None: a step's deadline."""
    meets: bool = False
    """True if it includes a rendezvous of the ranks; they may have to wait until an old link
    ends."""
    waits_for_peers: bool = False
    """True if aborting the link, or a trainer's communicator, ends its wait."""


_STEP = Rule(_only("READY"), _UP, weights=_AWAKE, kv_cache=_AWAKE)
_LOADED = Rule(_from("MODEL_LOADED"))
_WEIGHTS_AWAKE = Rule(_from("MODEL_LOADED"), weights=_AWAKE)
_WEIGHTS_THERE = Rule(_from("MODEL_LOADED"), weights=THERE)
_WEIGHTS_FILLED = Rule(_from("MODEL_LOADED"), weights=THERE, fills_weights=True)

_STEP_ROWS: Final[tuple[StepOperation[Any], ...]] = (
    # Steps. The output rank answers.
    StepOperation(step.ExecuteModel, step.ModelRunnerOutput, _STEP, waits_for_peers=True),
    StepOperation(step.SampleTokens, step.ModelRunnerOutput, _STEP, waits_for_peers=True),
    StepOperation(step.ExecuteDummyBatch, step.ModelRunnerOutput, _STEP, waits_for_peers=True),
    StepOperation(
        drafts.TakeDraftTokenIds,
        drafts.TakeDraftTokenIdsReply,
        Rule(_only("READY"), _UP),
        waits_for_peers=True,
    ),
    # The load chain.
    StepOperation(
        lc.InitDevice,
        lc.InitDeviceReply,
        Rule(_only("CREATED"), _DOWN, "DEVICE_READY", "up"),
        deadline_s=120.0,
        meets=True,
        waits_for_peers=True,
    ),
    StepOperation(
        lc.LoadModel,
        lc.LoadModelReply,
        Rule(_only("DEVICE_READY"), load_after="MODEL_LOADED"),
        deadline_s=3600.0,
    ),
    StepOperation(lc.GetKVCacheSpec, lc.GetKVCacheSpecReply, _LOADED),
    StepOperation(
        lc.DetermineAvailableMemory,
        lc.DetermineAvailableMemoryReply,
        Rule(_only("MODEL_LOADED"), _UP, weights=_AWAKE),
        deadline_s=900.0,
        waits_for_peers=True,
    ),
    StepOperation(lc.UpdateMaxModelLen, step.Done, Rule(_only("MODEL_LOADED", "KV_READY"))),
    StepOperation(
        lc.InitializeFromConfig,
        step.Done,
        Rule(_only("MODEL_LOADED"), load_after="KV_READY", kv_cache=_AWAKE),
        deadline_s=300.0,
    ),
    StepOperation(lc.InitializeCache, step.Done, Rule(_only("KV_READY"))),
    StepOperation(
        lc.CompileOrWarmUpModel,
        lc.CompileOrWarmUpModelReply,
        # In READY if another rank is new; the weights need no content.
        Rule(_only("KV_READY", "READY"), _UP, "READY", weights=THERE, kv_cache=_AWAKE),
        deadline_s=1800.0,
        waits_for_peers=True,
    ),
    StepOperation(lc.GetSupportedTasks, lc.GetSupportedTasksReply, _LOADED),
    StepOperation(lc.GetModelMetadata, lc.GetModelMetadataReply, _LOADED),
    StepOperation(
        lc.Relink,
        step.Done,
        # May capture graphs again; they run on the weights and the KV cache.
        Rule(_from("DEVICE_READY"), _MADE, link_after="up", weights=THERE, kv_cache=_AWAKE),
        deadline_s=30.0,
        meets=True,
        waits_for_peers=True,
    ),
    StepOperation(  # its target must not be above the current state
        lc.Reset,
        step.Done,
        Rule(_from("CREATED")),
        deadline_s=30.0,
        meets=True,
        waits_for_peers=True,
    ),
    # Saves and profiles write files on the daemon's host.
    StepOperation(
        lc.SaveShardedState, lc.SaveShardedStateReply, _WEIGHTS_AWAKE, Role.ADMIN, 3600.0
    ),
    StepOperation(
        lc.SaveTensorizedModel, lc.SaveTensorizedModelReply, _WEIGHTS_AWAKE, Role.ADMIN, 3600.0
    ),
    StepOperation(lc.FinishShardedState, step.Done, _LOADED, Role.ADMIN, 600.0),
    StepOperation(
        lc.Profile,
        lc.ProfileReply,
        Rule(_from("DEVICE_READY")),
        Role.ADMIN,
        waits_for_peers=True,  # waits for earlier steps on the device
    ),
    # Weights.
    StepOperation(
        lc.ComputeWeightChecksums,
        lc.ComputeWeightChecksumsReply,
        _WEIGHTS_AWAKE,
        deadline_s=1800.0,
    ),
    StepOperation(  # waits for a trainer as long as the driver allows, like UpdateWeights
        wt.InitWeightTransferEngine,
        wt.InitWeightTransferEngineReply,
        Rule(_from("DEVICE_READY")),
        deadline_s=600.0,
        waits_for_peers=True,
    ),
    StepOperation(wt.StartWeightUpdate, step.Done, _WEIGHTS_THERE, deadline_s=120.0),
    StepOperation(
        wt.UpdateWeights,
        wt.UpdateWeightsReply,
        _WEIGHTS_THERE,
        deadline_s=600.0,
        waits_for_peers=True,
    ),
    StepOperation(
        wt.FinishWeightUpdate, wt.FinishWeightUpdateReply, _WEIGHTS_FILLED, deadline_s=600.0
    ),
    StepOperation(wt.ReloadWeights, wt.ReloadWeightsReply, _WEIGHTS_FILLED, deadline_s=3600.0),
    StepOperation(  # a step's deadline for each forward pass
        wt.RecomputeRequests, wt.RecomputeRequestsReply, _STEP, waits_for_peers=True
    ),
    StepOperation(wt.UpdateConfig, step.Done, _LOADED),
    # Placement of experts.
    StepOperation(
        expert_placement.MoveExperts,
        expert_placement.MoveExpertsReply,
        Rule(_from("MODEL_LOADED"), _UP, weights=_AWAKE),
    ),
    StepOperation(expert_placement.SwitchExperts, step.Done, _WEIGHTS_AWAKE),
    # Sleep. The first at level 1 may have to page-lock host memory.
    StepOperation(lc.Sleep, lc.MemoryTagsReply, _LOADED, deadline_s=600.0, waits_for_peers=True),
    StepOperation(lc.WakeUp, lc.MemoryTagsReply, _LOADED, deadline_s=120.0, waits_for_peers=True),
    StepOperation(lc.Discard, lc.MemoryTagsReply, _LOADED, deadline_s=120.0, waits_for_peers=True),
    # LoRA adapters. They are read from disk.
    StepOperation(lora.PrepareLora, lora.PrepareLoraReply, _LOADED),
    StepOperation(lora.AddLora, lora.AddLoraReply, _LOADED, deadline_s=600.0),
    StepOperation(lora.RemoveLora, lora.RemoveLoraReply, _LOADED),
    StepOperation(lora.ListLoras, lora.ListLorasReply, _LOADED),
    StepOperation(lora.PinLora, step.Done, _LOADED),
    # Adoption.
    StepOperation(adoption.AdoptRequests, adoption.AdoptRequestsReply, Rule(_only("READY"))),
)

_CONTROL_ROWS: Final[tuple[ControlOperation[Any], ...]] = (
    *GREETING,
    ControlOperation(lc.GetStatus, lc.GetStatusReply, Role.OBSERVER, repeatable=True),
    # Attach and lease. PrepareAttach by force needs an admin.
    ControlOperation(lc.PrepareAttach, lc.PrepareAttachReply, Role.DRIVER, repeatable=True),
    ControlOperation(lc.CommitAttach, lc.CommitAttachReply, Role.DRIVER, repeatable=True),
    ControlOperation(lc.Detach, lc.Acknowledged, Role.DRIVER, repeatable=True),
    ControlOperation(lease.RenewLease, lease.RenewLeaseReply, Role.DRIVER),
    # Links.
    ControlOperation(lc.OpenRendezvous, lc.OpenRendezvousReply, Role.DRIVER),
    ControlOperation(lc.AbortLink, lc.Acknowledged, Role.DRIVER),
    # Uploads. A late repetition of DropUploads could drop tensors that were uploaded again in the
    # meantime.
    ControlOperation(uploads.UploadChunk, uploads.UploadChunkReply, Role.DRIVER, repeatable=True),
    ControlOperation(uploads.FindUploads, uploads.FindUploadsReply, Role.DRIVER, repeatable=True),
    ControlOperation(uploads.ReadUpload, uploads.ReadUploadReply, Role.DRIVER, repeatable=True),
    ControlOperation(uploads.DropUploads, lc.Acknowledged, Role.DRIVER),
    # Contents of KV blocks, for the next driver.
    ControlOperation(
        cached_blocks.NoteCachedBlocks, cached_blocks.NoteCachedBlocksReply, Role.DRIVER
    ),
    ControlOperation(
        cached_blocks.GetCachedBlocks,
        cached_blocks.GetCachedBlocksReply,
        Role.DRIVER,
        repeatable=True,
    ),
    ControlOperation(
        kv_files.FetchKVBlocks, kv_files.FetchKVBlocksReply, Role.DRIVER, repeatable=True
    ),
    # Blocks that move between groups.
    ControlOperation(
        kv_transfer.GetKVConnectorHandshakeMetadata,
        kv_transfer.GetKVConnectorHandshakeMetadataReply,
        Role.DRIVER,
        repeatable=True,
    ),
    ControlOperation(kv_transfer.OpenKVTransfer, lc.Acknowledged, Role.DRIVER),
    ControlOperation(kv_transfer.MoveKVBlocks, lc.Acknowledged, Role.DRIVER),
    ControlOperation(
        kv_transfer.GetKVTransfers,
        kv_transfer.GetKVTransfersReply,
        Role.DRIVER,
        repeatable=True,
    ),
    ControlOperation(kv_transfer.CloseKVTransfer, lc.Acknowledged, Role.DRIVER, repeatable=True),
    # The daemon's end.
    ControlOperation(lc.Drain, lc.Acknowledged, Role.ADMIN, repeatable=True),
    ControlOperation(lc.Shutdown, lc.Acknowledged, Role.ADMIN),
    # Traces. Recording delays the steps of a group that another client may drive.
    ControlOperation(trace.ReadClock, trace.ReadClockReply, Role.OBSERVER),
    ControlOperation(trace.StartTrace, lc.Acknowledged, Role.ADMIN),
    ControlOperation(trace.StopTrace, trace.StopTraceReply, Role.ADMIN),
    ControlOperation(trace.ReadTrace, trace.ReadTraceReply, Role.OBSERVER),
    ControlOperation(trace.AskDriver, lc.Acknowledged, Role.ADMIN),
    ControlOperation(trace.PutDriverSteps, lc.Acknowledged, Role.DRIVER),
    ControlOperation(trace.ReadDriverSteps, trace.ReadDriverStepsReply, Role.OBSERVER),
)

STEP_OPERATIONS: Final[Mapping[type[StepMessage], StepOperation[Any]]] = MappingProxyType(
    {row.request: row for row in _STEP_ROWS}
)
CONTROL_OPERATIONS: Final[Mapping[type[Any], ControlOperation[Any]]] = MappingProxyType(
    {row.request: row for row in _CONTROL_ROWS}
)


def operation_name(request: type[object]) -> str:
    """Return the name of the worker's method for a request: init_device for InitDevice,
    get_kv_cache_spec for GetKVCacheSpec."""
    return _WORD.sub("_", request.__name__).lower()
