"""A driver's interface to an optional feature of requests: the counterpart of a daemon's part of a
step. Requests without extensions use none."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, NamedTuple

from rpc_schema.codec import Frame
from rpc_schema.config import MAX_SAMPLES_PER_SEQ
from rpc_schema.extensions import ReplyExtension, RequestExtension
from rpc_schema.pooling import PoolingSupport
from rpc_schema.routed_experts import RoutedExpertsShape

MAX_PROMPT_TOKENS: Final = 2**31 - 1


class ExtensionFault(NamedTuple):
    """A fault of an extension, in the form of an error's field, value and fix."""

    field: str
    value: object
    fix: str


@dataclass(frozen=True, slots=True)
class ModelBounds:
    """Bounds of the loaded model, and of the request, on a request's extensions."""

    vocab_size: int
    pooling: PoolingSupport | None = None
    """None: unknown, and not checked."""
    max_loras: int | None = None
    """Maximum number of adapters in a step; None leaves adapters unchecked."""
    logits_processors: tuple[str, ...] | None = None
    """Names of the configuration; None leaves them unchecked."""
    hidden_size: int = 0
    """0 if unknown."""
    num_prompt_tokens: int = MAX_PROMPT_TOKENS
    """Length of the request's prompt, for parts that ask for it (RequestPart.judges_prompt)."""
    max_samples_per_seq: int = MAX_SAMPLES_PER_SEQ
    """Most samples of a request in a step."""
    keeps_experts: bool = True
    """Requests may ask for the experts of their tokens; True too if it is not known."""
    routed_experts: RoutedExpertsShape | None = None
    """Sizes of these experts; None: unknown, and not checked."""

    def of_prompt(self, num_tokens: int) -> "ModelBounds":
        """Return the bounds on a request with a prompt of so many tokens."""
        return replace(self, num_prompt_tokens=num_tokens)


class RequestPart:
    """One feature. The defaults do nothing: a part overrides what it needs. Stateless."""

    extension: ClassVar[type[RequestExtension]]
    """Extension of a request that uses it."""
    reply_extension: ClassVar[type[ReplyExtension] | None] = None
    """Its extension of a step's reply; None if it reports nothing."""
    reports_tokens: ClassVar[bool] = True
    """False if it reports on something other than the sampled tokens."""
    judges_prompt: ClassVar[bool] = False
    """True if `find_fault` needs ModelBounds.num_prompt_tokens."""
    limits_running: ClassVar[bool] = False
    """True if `may_start` can return False."""
    pools: ClassVar[bool] = False
    """A request that has it samples nothing: the reply of the step that computes its last token has
    its output, and ends it."""
    may_refuse: ClassVar[bool] = False
    """A request that has it may gain fewer tokens than its steps counted (StepResult.refused)."""

    may_jump: ClassVar[bool] = False
    """A request that has it gets the same output if tokens that its grammar forces are not sampled:
    the part reports nothing of them, and forbids no token."""

    def find_fault(self, extension: Any, bounds: ModelBounds) -> ExtensionFault | None:
        """Return the first fault that a daemon would refuse in an extension whose fields are within
        their bounds; None if there is none."""
        return None

    def prefix_salt(self, extension: Any) -> bytes:
        """Return the bytes that change the meaning of the request's tokens: requests share cached
        blocks only if these are equal. Empty: nothing does."""
        return b""

    def may_start(self, extension: Any, running: Sequence[Any], bounds: ModelBounds) -> bool:
        """Return True if a request may be scheduled beside those that run. running: their
        extensions of the feature."""
        return True

    def read_reply(
        self,
        extension: Any,
        frames: Sequence[Frame],
        req_ids: Sequence[str],
        asked: Mapping[str, Any],
    ) -> Mapping[str, Any]:
        """Return the reports of a reply, by request. frames: the extension's own; req_ids: the
        request of each token of the reply, "" for those to leave out; asked: extensions of the
        requests that have the feature, by id.

        Raises:
            BadFrameError: the frames do not fit.
        """
        return {}

    def read_outputs(
        self, extension: Any, frames: Sequence[Frame], ended: Mapping[int, str]
    ) -> Mapping[str, Any]:
        """Return the outputs of a reply, by request, where the part pools. ended: the requests that
        the step ends, by slot. Raises as read_reply does."""
        return {}
