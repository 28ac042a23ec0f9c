"""Messages of a health probe: versions, health, and the beginning of a status. They import little,
since supervisors start a probe every few seconds."""

from typing import Literal

import msgspec

from rpc_schema.base import (
    Answered,
    ControlReply,
    ControlRequest,
    Count,
    Positive,
    Text,
    Uid,
    Unsigned,
    Value,
)

LoadState = Literal["CREATED", "DEVICE_READY", "MODEL_LOADED", "KV_READY", "READY"]
ServingState = Literal["SERVING", "DRAINING", "CLOSED", "FAILED"]


class Hello(
    msgspec.Struct, Answered["HelloReply"], array_like=True, frozen=True, tag=1, kw_only=True
):
    """The first message on a control socket. Never changes; fields may only be appended."""

    call: Unsigned
    protocol_version: Unsigned
    driver_id: bytes


class HelloReply(msgspec.Struct, array_like=True, frozen=True, tag=1, kw_only=True):
    """The answer to Hello, in any version. Never changes; fields may only be appended."""

    call: Unsigned
    protocol_version: Unsigned
    worker_uid: bytes
    software: str
    link_software: str = ""
    """Software that linked ranks must have in the same version: torch, and NCCL if present. Empty:
    unknown."""


class CheckHealth(ControlRequest["CheckHealthReply"], frozen=True, tag=6, kw_only=True):
    """Report whether the daemon is healthy and its step thread makes progress."""


class CheckHealthReply(ControlReply, frozen=True, tag=6, kw_only=True):
    healthy: bool
    phase: str
    phase_ms: Count
    detail: Text = ""


class StatusHead(Value, frozen=True, forbid_unknown_fields=False, kw_only=True):
    """Beginning of a Status."""

    worker_uid: Uid
    pid: Positive
    endpoint: str
    device: str
    serving: ServingState
    load: LoadState


class GetStatusHead(ControlRequest["GetStatusHeadReply"], frozen=True, tag=7, kw_only=True):
    """GetStatus, for a reader who needs only the beginning of the reply: the same bytes."""


class GetStatusHeadReply(
    ControlReply, frozen=True, tag=7, forbid_unknown_fields=False, kw_only=True
):
    """Beginning of a GetStatusReply."""

    status: StatusHead
