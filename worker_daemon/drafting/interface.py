"""The interface of a drafter: it follows the rows' tokens on the device that samples them, and
proposes the next ones when it is asked to.

Nothing tells it what a step has sampled. It has the tokens that steps read, as the target has, so
that its rows are right wherever their KV cache is, and those of the steps after which it proposes.

Shapes: S rows, Q sequences that sampled in a step, K num_speculative_tokens, N tokens of a step
with its padding, H hidden size and V vocabulary of the target.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol, TypeAlias

from torch import Tensor

from worker_daemon.contracts.arrays import Int32s
from worker_daemon.contracts.attention import AttentionMetadata
from worker_daemon.models.decoder import DecoderStage

NO_PROPOSAL: Final = 0
"""In place of a draft. It is a token: a step that is given it as a draft verifies it like any
other."""


class Gained(NamedTuple):
    """The tokens that rows have gained in a step. Device tensors."""

    rows: Tensor
    """int32 [Q]: request rows, each at most once; the spare row any number of times, as padding."""
    token_ids: Tensor
    """int64 [Q, 1 + K], or [Q, 1] after a step without drafts: oldest first; NO_TOKEN (-1) after
    the last one. A row whose first entry is NO_TOKEN has failed, or is padding."""
    counts: Tensor
    """int32 [Q] tokens gained, 0 to the number of columns."""
    lengths: Tensor
    """int32 [Q] tokens of each row, these included; 0 for padding."""
    ends: "RowEnds | None" = None
    """Set for a StepFollower alone."""


class RowEnds(NamedTuple):
    """Values by which a model continues after the last tokens that rows have gained."""

    longest: int
    """Upper bound of the positions of rows' last tokens, known to the host."""
    choose: "Choose"


class ComputedStep(NamedTuple):
    """A step's forward pass through the target. Device tensors at fixed addresses, as a graph may
    hold the pass; valid until the next step runs."""

    token_ids: Tensor
    """int64 [N]"""
    hidden: Tensor
    """[N, H] the last layer's output, in the target's dtype."""
    positions: Tensor
    """int32 [N]"""
    metadata: AttentionMetadata
    """Metadata of the first KV group."""


class MissingTokens(NamedTuple):
    """Tokens of rows that steps have computed, and a model that follows them has not. Host columns
    [M], of sequences of the newest step in its order."""

    indices: Int32s
    """Index of each one's sequence in the step."""
    rows: Int32s
    counts: Int32s
    """Tokens to compute, at least 1."""
    left: Int32s
    """Later tokens of the row, up to the step's last one, which remain missing."""
    ends: Int32s
    """Upper bound of the context length after the tokens to compute; exact for counts of
    MIN_LATER_TOKENS (layers/prompt_attention.py) and more."""


Choose: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Chooses tokens int64 [Q] from logits [Q, V] for positions int32 [Q], by the sampling parameters
and the noise of the rows; NO_TOKEN where logits are NaN. Every rank of a stage makes the same
calls. Never waits for the device."""


Replay: TypeAlias = Callable[[Gained], Tensor | None]
"""Replays a graph of StepFollower.compute, and returns its result, which is valid until the next
call; None if there is no graph for these rows."""


class Drafter(Protocol):
    """Makes drafts on the last stage. Every rank of a tensor-parallel stage has one, and they
    propose the same. Used on the step thread only."""

    @property
    def follower(self) -> "StepFollower | None":
        """The drafter itself, if it is a model; otherwise None."""

    @property
    def texts(self) -> Tensor | None:
        """int32 [S + 1, W], for the tokens of rows by position: the device writes those to it that
        a step reads, before `follow`. None: the drafter wants none."""

    def begin(self, slots: Sequence[int], tokens: Sequence[Int32s]) -> None:
        """Begin to follow new requests in these rows, each with all tokens that it has. A request
        that resumes after a failure, a preemption or under another driver begins again."""

    def follow(self, step: ComputedStep) -> None:
        """Follow the tokens of a step, after the target has computed them. Never waits for the
        device. A CUDA graph may hold the launches, which depend on the step's shapes alone."""

    def propose(self, gained: Gained) -> Tensor:
        """Follow the tokens that rows have gained, and return int64 [Q, K]: the drafts of their
        next tokens, NO_PROPOSAL where there is none. Never waits for the device. A CUDA graph may
        hold the launches, which depend on the shapes alone, unless the drafter is a model."""

    def forget(self) -> None:
        """Drop all rows: before a new driver, or new weights."""

    def restart(self) -> None:
        """Drop everything, as if just made: with a new link, when ranks may have followed different
        steps, and one of them may be new."""

    def compile_subset(self) -> "Drafter":
        """Return a drafter that launches the same kernels to follow steps, for a few layers only if
        it is a model, to compile and load them."""


class StepFollower(Drafter, Protocol):
    """A drafter that is a model: it computes what the target has computed. Plain decodes it leaves
    out, until it is to propose (`catch_up`): it costs nothing while it makes no drafts."""

    @property
    def stage(self) -> DecoderStage:
        """The whole model."""

    def follows(self, max_query_len: int) -> bool:
        """Return True if `follow` computes the tokens of a step with this AttentionMetadata's
        max_query_len."""

    def compute_tokens(self, step: ComputedStep) -> None:
        """Compute a step's tokens, also those that `follow` leaves out."""

    def catch_up(self, missing: MissingTokens, seq_lens: Tensor) -> None:
        """Compute tokens that rows are missing, after the newest step. seq_lens int32 [B], device:
        context lengths of the step's sequences. Never waits for the device."""

    def compute(self, gained: Gained) -> Tensor:
        """Compute what propose returns. A CUDA graph may hold the launches if it may hold those of
        ends.choose: they depend on the shapes and on ends.longest alone."""

    def propose_by(self, replay: Replay | None) -> None:
        """Let propose replay graphs where there are some; None: there are none."""

    def compile_subset(self) -> "StepFollower":
        """See Drafter."""


MakeDrafter: TypeAlias = Callable[[Tensor], Drafter | None]
"""Makes the drafter of a runner from its rows' block table in the first KV group, int32 [S + 1,
max_blocks]."""
