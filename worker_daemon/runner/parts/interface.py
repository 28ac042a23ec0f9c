"""The interface of a part: one optional feature of a step, in one object. A step that uses no part
only tests a few integers.

Letters: R rows that sample, V vocabulary, N tokens, H hidden size, S rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from rpc_schema.codec import Frame
from rpc_schema.extensions import ReplyExtension, RequestExtension, StepExtension
from rpc_schema.step import NewRequestData
from worker_daemon.contracts.arrays import Int32s
from worker_daemon.contracts.sampling import Sampling
from worker_daemon.runner.sample_rows import SampleRows
from worker_daemon.runner.scheduled_step import ScheduledStep, StepLimits

Per: TypeAlias = Literal["token", "sequence", "sample"]
"""The number of entries in a column: one per token, per sequence, or per sequence that samples."""

NO_BYTES: Final = 0


@dataclass(frozen=True, slots=True)
class Report:
    """A part's addition to a step's reply."""

    extension: ReplyExtension
    columns: tuple[Tensor, ...]
    """Tensors on the device, one per array frame of the extension."""


@dataclass(frozen=True, slots=True)
class PartContext:
    """Sizes and device for which a part is made."""

    limits: StepLimits
    device: torch.device
    is_first_stage: bool
    is_last_stage: bool
    sampling: Sampling
    """Sampling kernels of the device."""

    @property
    def num_rows(self) -> int:
        """S, the spare row included."""
        return self.limits.max_num_seqs + 1


class StepPart:
    """One feature. These methods do nothing; a part overrides those that it needs.

    One object serves a runner, on the step thread alone; it owns the feature's state of the S rows.
    The judging methods are pure and see no value that differs between ranks, so that all ranks
    accept or refuse alike. A request's extension is kept with its row, and reported unchanged to a
    driver that adopts the request.
    """

    request_extension: ClassVar[type[RequestExtension] | None] = None
    """Extension of requests that use the part; None if requests carry none."""
    step_extension: ClassVar[type[StepExtension] | None] = None
    """Extension of steps that use the part; None if steps carry none."""
    heaviest: ClassVar[RequestExtension | None] = None
    """Extension of requests in the memory profile and in warm-up; None: the part is not
    profiled."""
    columns: ClassVar[tuple[Per, ...]] = ()
    """int32 columns that a step brings to the device for the forward pass."""
    in_forward: ClassVar[bool] = False
    """True if it acts around the forward pass: steps that use it have graphs of their own."""
    may_refuse: ClassVar[bool] = False
    """True if it may refuse tokens that a step has counted (`refuse`). The host then has only upper
    bounds of its rows' lengths, and steps that use it have graphs of their own."""

    def __init__(self, context: PartContext) -> None:
        """Create the feature's state of the rows, all of which are free."""

    # Judging.

    def judge(self, extension: Any, request: NewRequestData, limits: StepLimits) -> None:
        """Check a new request's extension, using only the message and the limits. Do not refuse for
        a reason that may differ between ranks (a missing upload): let the step fail.

        Raises:
            InvalidStepError: names field, value and fix. Nothing was applied.
        """

    def judge_step(self, extension: Any, frames: Sequence[Frame], limits: StepLimits) -> Any:
        """Check a step's extension, and return the value that `adjust_logits` receives. frames: the
        extension's array frames. Raises as judge does."""
        return extension

    # Rows.

    def uses(self, extension: Any) -> bool:
        """Return True if steps of a request with this extension use the part."""
        return True

    def admit(self, requests: Sequence[NewRequestData], extensions: Sequence[Any | None]) -> None:
        """Start requests in their slots. extensions: each request's extension of this part, or
        None. Called if one of them has an extension, or a former request of one of the slots had
        one."""

    # The forward pass of a step in which a row uses the part. All but fill may be captured.

    def fill(self, columns: Sequence[Int32s], step: ScheduledStep, brought: Any | None) -> None:
        """Fill the step's columns, which hold zeros. Entries after the step's own are padding and
        stay zero. brought: see adjust_logits."""

    def before_forward(self, hidden: Tensor, columns: Sequence[Tensor]) -> Tensor:
        """Return the input of this stage's first layer: hidden [N, H] itself, or another tensor."""
        return hidden

    def after_forward(self, hidden: Tensor, columns: Sequence[Tensor]) -> Tensor:
        """Return the output of this stage's last layer: hidden [N, H] itself, or another tensor."""
        return hidden

    # Sampling, on the last stage alone.

    def adjust_logits(self, logits: Tensor, rows: SampleRows, brought: Any | None) -> Tensor:
        """Return logits [R, V] in the model's dtype: those given, unchanged, or a new tensor. rows:
        without padding. brought: the value that judge_step returned for the step's extension, if
        there is one. Never waits for the device."""
        return logits

    def refuse(self, token_ids: Tensor, rows: SampleRows) -> Tensor:
        """Return int32 [R]: 1 if the row's token is refused, else 0; the tokens are int64 [R]. Such
        a row computes its last token again in its next step. Every rank of the stage must return
        the same. Called if the part may refuse and a row uses it; NO_TOKEN is never refused."""
        return torch.zeros_like(token_ids, dtype=torch.int32)

    def report(self, logits: Tensor, token_ids: Tensor, rows: SampleRows) -> Report | None:
        """Return the part's addition to the reply. logits [R, V]: as adjust_logits returned them;
        token_ids int64 [R]: NO_TOKEN if no token could be chosen."""
        return None

    # Memory.

    @staticmethod
    def row_bytes() -> int:
        """Return the bytes that the part keeps on the device for each of the S rows."""
        return NO_BYTES

    @staticmethod
    def sampling_bytes(num_rows: int, vocab_size: int, itemsize: int) -> int:
        """Return the bytes that a step with num_rows sampled rows takes, in addition to their
        logits. itemsize: bytes of the model's dtype."""
        return NO_BYTES


class TokenChooser(Protocol):
    """Chooses tokens once all parts have adjusted the logits."""

    def choose(self, logits: Tensor, rows: SampleRows) -> Tensor:
        """Return int64 [R], a token for each row of logits [R, V]; NO_TOKEN if the row's logits are
        NaN or infinite. rows: without padding. Never waits for the device."""
