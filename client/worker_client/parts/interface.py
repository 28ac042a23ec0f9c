"""What an optional feature of requests is to a driver: the counterpart of a daemon's part of a
step. A request that carries no extension has to do with none of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from rpc_schema.codec import Frame
from rpc_schema.extensions import ReplyExtension, RequestExtension


class ExtensionFault(NamedTuple):
    """What is wrong with an extension, in the form of an error's field, value and fix."""

    field: str
    value: object
    fix: str


@dataclass(frozen=True, slots=True)
class ModelBounds:
    """What of the loaded model bounds what a request may ask."""

    vocab_size: int


class RequestPart:
    """One feature. Here it does nothing: a part overrides what it is about. Stateless."""

    extension: ClassVar[type[RequestExtension]]
    """What a request that uses it carries."""
    reply_extension: ClassVar[type[ReplyExtension] | None] = None
    """What a step's reply carries of it; None where it reports nothing."""
    limits_running: ClassVar[bool] = False
    """Whether `may_start` ever says no."""
    may_refuse: ClassVar[bool] = False
    """A request that has it may gain fewer tokens than its steps counted (StepResult.refused)."""

    def find_fault(self, extension: Any, bounds: ModelBounds) -> ExtensionFault | None:
        """Return what a daemon would refuse about an extension whose fields are in their bounds, by
        name of the field; None if nothing."""
        return None

    def prefix_salt(self, extension: Any) -> bytes:
        """Return what changes the meaning of the request's tokens: requests share cached blocks
        only where it is equal. Empty: nothing does."""
        return b""

    def may_start(self, extension: Any, running: Sequence[Any]) -> bool:
        """Whether a request may be scheduled beside those that run. running: their extensions of
        the feature."""
        return True

    def read_reply(
        self,
        extension: Any,
        frames: Sequence[Frame],
        req_ids: Sequence[str],
        asked: Mapping[str, Any],
    ) -> Mapping[str, Any]:
        """Return what a reply reports of requests. frames: the extension's own; req_ids: the rows
        of the reply; asked: extensions of the requests that have the feature, by id.

        Raises:
            BadFrameError: the frames do not fit.
        """
        return {}
