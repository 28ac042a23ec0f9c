"""A driver's interface to an optional feature of requests: the counterpart of a daemon's part of a
step. Requests without extensions use none."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from rpc_schema.codec import Frame
from rpc_schema.extensions import ReplyExtension, RequestExtension


class ExtensionFault(NamedTuple):
    """A fault of an extension, in the form of an error's field, value and fix."""

    field: str
    value: object
    fix: str


@dataclass(frozen=True, slots=True)
class ModelBounds:
    """Bounds of the loaded model on a request's extensions."""

    vocab_size: int


class RequestPart:
    """One feature. The defaults do nothing: a part overrides what it needs. Stateless."""

    extension: ClassVar[type[RequestExtension]]
    """Extension of a request that uses it."""
    reply_extension: ClassVar[type[ReplyExtension] | None] = None
    """Its extension of a step's reply; None if it reports nothing."""
    limits_running: ClassVar[bool] = False
    """True if `may_start` can return False."""
    may_refuse: ClassVar[bool] = False
    """A request that has it may gain fewer tokens than its steps counted (StepResult.refused)."""

    def find_fault(self, extension: Any, bounds: ModelBounds) -> ExtensionFault | None:
        """Return the first fault that a daemon would refuse in an extension whose fields are within
        their bounds; None if there is none."""
        return None

    def prefix_salt(self, extension: Any) -> bytes:
        """Return the bytes that change the meaning of the request's tokens: requests share cached
        blocks only if these are equal. Empty: nothing does."""
        return b""

    def may_start(self, extension: Any, running: Sequence[Any]) -> bool:
        """Return True if a request may be scheduled together with the running ones. running: their
        extensions of the feature."""
        return True

    def read_reply(
        self,
        extension: Any,
        frames: Sequence[Frame],
        req_ids: Sequence[str],
        asked: Mapping[str, Any],
    ) -> Mapping[str, Any]:
        """Return the reports of a reply, by request. frames: the extension's own; req_ids: the rows
        of the reply; asked: extensions of the requests that have the feature, by id.

        Raises:
            BadFrameError: the frames do not fit.
        """
        return {}
