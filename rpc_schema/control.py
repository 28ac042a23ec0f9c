"""Operations of the control socket, and the codec of a set of them: of all (rpc_schema/codec.py),
or of a health probe's."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Generic, TypeAlias, TypeVar, Union

import msgspec

from rpc_schema import health
from rpc_schema.base import Answered, ControlReply
from rpc_schema.error_replies import ControlErrorReply
from rpc_schema.frames import MAX_CONTROL_BYTES, Frame, decode_frame
from rpc_schema.roles import Role

ControlReplyMessage: TypeAlias = ControlReply | health.HelloReply
ReplyT = TypeVar("ReplyT", bound=ControlReplyMessage)


@dataclass(frozen=True, slots=True)
class ControlOperation(Generic[ReplyT]):
    """A request on the control socket, answered at any time."""

    request: type[Answered[ReplyT]]
    reply: type[ReplyT]
    role: Role
    repeatable: bool = False
    """A repetition with the same `call` has no further effect. A driver sends it again if the
    connection ends before the reply."""


class ControlOperations:
    """A set of operations by their requests, with the decoder of their replies."""

    def __init__(self, rows: Iterable[ControlOperation[Any]]) -> None:
        self.rows: Final[Mapping[type[Any], ControlOperation[Any]]] = MappingProxyType(
            {row.request: row for row in rows}
        )
        self.replies: Final[tuple[type[Any], ...]] = (
            ControlErrorReply,
            *dict.fromkeys(row.reply for row in self.rows.values()),
        )
        self._decoder: msgspec.msgpack.Decoder[ControlReplyMessage] = msgspec.msgpack.Decoder(
            Union[self.replies]  # noqa: UP007  # made while running
        )

    def decode_reply(self, frames: Sequence[Frame]) -> ControlReplyMessage:
        """Decode the reply to a request of this set. Raises as decode_frame does."""
        return decode_frame(self._decoder, frames, MAX_CONTROL_BYTES)


GREETING: Final = (
    ControlOperation(health.Hello, health.HelloReply, Role.OBSERVER, repeatable=True),
    ControlOperation(health.CheckHealth, health.CheckHealthReply, Role.OBSERVER, repeatable=True),
)
PROBE_OPERATIONS: Final = ControlOperations(
    (
        *GREETING,
        ControlOperation(
            health.GetStatusHead, health.GetStatusHeadReply, Role.OBSERVER, repeatable=True
        ),
    )
)
