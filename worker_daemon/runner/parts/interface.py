"""The interface of a part: one optional feature of a step, in one object. A step that uses no part
only tests a few integers.

Letters: R rows that sample, V vocabulary, N tokens, H hidden size, S rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from rpc_schema.codec import Frame
from rpc_schema.extensions import RequestExtension, StepExtension
from rpc_schema.step import NewRequestData
from rpc_schema.token_rules import RuleFault
from worker_daemon.contracts.arrays import Int32s, Int64s
from worker_daemon.contracts.logits_processor import MakeLogitsProcessor
from worker_daemon.contracts.sampling import Sampling
from worker_daemon.contracts.uploads import FindUpload, no_uploads
from worker_daemon.lora.adapters import Adapters
from worker_daemon.models.pooler import Pooler
from worker_daemon.runner.report import Report as Report
from worker_daemon.runner.sample_rows import SampleRows
from worker_daemon.runner.scheduled_step import (
    OutputSize,
    ScheduledStep,
    StepLimits,
    invalid,
)

Per: TypeAlias = Literal["token", "sequence", "sample"]
"""The number of entries in a column: one per token, per sequence, or per sequence that samples."""

ComputeLogits: TypeAlias = Callable[[Tensor], Tensor]
"""Returns logits [P, V] in the model's dtype of hidden states [P, H]. Every rank of a stage calls
it alike."""

NO_BYTES: Final = 0


@dataclass(frozen=True, slots=True)
class PartContext:
    """Sizes and device for which a part is made."""

    limits: StepLimits
    device: torch.device
    is_first_stage: bool
    is_last_stage: bool
    sampling: Sampling
    """Sampling kernels of the device."""
    pooler: Pooler | None = None
    """The model's conversion of hidden states; None on stages but the last."""
    adapters: Adapters | None = None
    """The model's LoRA adapters; None if it was loaded without."""
    processors: Mapping[str, MakeLogitsProcessor] = field(default_factory=dict)
    """Custom logits processors, in the order of the limits' names."""
    dtype: torch.dtype = torch.float32
    """The model's dtype."""
    find_upload: FindUpload = no_uploads

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
    """It acts around the forward pass: steps that use it have graphs of their own."""
    has_graphs: ClassVar[bool] = True
    """False: steps that use it around the forward pass are launched kernel by kernel."""
    in_sampling: ClassVar[bool] = True
    """It acts on logits, or reports of them. False: rows that use nothing else take their likeliest
    token."""
    judges_batches: ClassVar[bool] = False
    """It refuses some combinations of rows (`judge_batch`)."""
    may_refuse: ClassVar[bool] = False
    """A request that uses it may not gain every token that a step counts for it (`refuse`): then
    the host has upper bounds of its rows' lengths, and steps that use it have graphs of their
    own."""
    pools: ClassVar[bool] = False
    """A request that has its extension samples nothing: it ends with an output (`pool`)."""
    follows_tokens: ClassVar[bool] = False
    """It keeps something of its rows' tokens (`begin`, `gain`)."""
    reports_forward: ClassVar[bool] = False
    """It reports something of the forward pass (`report_forward`)."""

    @classmethod
    def serves(cls, context: PartContext) -> bool:
        """Return False if the model was loaded without the feature: then the runner has no such
        part, and refuses requests that need it."""
        return True

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

    def judge_batch(self, slots: Int64s, new: Sequence[NewRequestData]) -> None:
        """Check the rows of a step together. slots: those of the step; new: its new requests, which
        admit() has not had. Raises as judge does. Called if `judges_batches`."""

    # Rows.

    def uses(self, extension: Any) -> bool:
        """Return True if all steps of a request with this extension use the part."""
        return True

    def uses_step(self, step: ScheduledStep) -> bool:
        """Return True if a step uses a part around the forward pass though no row uses it in all
        steps: by the positions of its tokens. Decided by the message and the rows alone."""
        return False

    def admit(self, requests: Sequence[NewRequestData], extensions: Sequence[Any | None]) -> None:
        """Start requests in their slots. extensions: each request's extension of this part, or
        None. Called if one of them has an extension, or a former request of one of the slots had
        one."""

    def begin(
        self,
        requests: Sequence[NewRequestData],
        extensions: Sequence[Any | None],
        tokens: Sequence[Int32s],
    ) -> None:
        """Begin to follow the tokens of new requests; called after admit. tokens: all that each
        request has so far. A request that resumes after a failure, a preemption or under another
        driver is admitted again, so the part's state is rebuilt here and nowhere else."""

    # The forward pass of a step in which a row uses the part. May be captured, but for fill.

    def fill(self, columns: Sequence[Int32s], step: ScheduledStep, brought: Any | None) -> None:
        """Fill the step's columns, which hold zeros. Entries after the step's own are padding and
        stay zero. brought: see adjust_logits."""

    def before_forward(self, hidden: Tensor, columns: Sequence[Tensor]) -> Tensor:
        """Return the input of this stage's first layer: hidden [N, H] itself, or another tensor."""
        return hidden

    def forward_ended(self) -> None:
        """The forward pass has ended, or has failed. Called if `in_forward`."""

    def after_forward(self, hidden: Tensor, columns: Sequence[Tensor]) -> Tensor:
        """Return the output of this stage's last layer: hidden [N, H] itself, or another tensor."""
        return hidden

    def report_forward(
        self, hidden: Tensor, step: ScheduledStep, compute_logits: ComputeLogits
    ) -> Report | None:
        """Return what the reply is to tell of the forward pass itself. hidden [N, H]: what the last
        layer of the last stage gave away, the step's tokens in their order first. Called on that
        stage behind the forward pass, of a part that reports it, if a row of the step has the
        part's extension. Never waits for the device."""
        return None

    # Sampling, on the last stage alone.

    def adjust_logits(self, logits: Tensor, rows: SampleRows, brought: Any | None) -> Tensor:
        """Return logits [R, V], those given or others: they stay as they are. They come in the
        model's dtype or in float32, and may leave in float32.
        rows: without padding. brought: what judge_step made of the step's extension, if it has
        one. Never waits for the device."""
        return logits

    def refuse(self, token_ids: Tensor, rows: SampleRows) -> Tensor:
        """Return int32 [R]: 1 if the row's token is refused, else 0; the tokens are int64 [R]. Such
        a row computes its last token again in its next step. Every rank of the stage must return
        the same. Called if the part may refuse and a row uses it; NO_TOKEN is never refused."""
        return torch.zeros_like(token_ids, dtype=torch.int32)

    def gain(self, token_ids: Tensor, rows: SampleRows) -> None:
        """Rows have gained their tokens of int64 [R]; negative: none. Of a part that follows
        tokens, where a row uses it. Never waits for the device."""

    def report(self, logits: Tensor, token_ids: Tensor, rows: SampleRows) -> Report | None:
        """Return the part's addition to the reply. logits [R, V]: as adjust_logits returned them;
        token_ids int64 [R]: NO_TOKEN if no token could be chosen."""
        return None

    # Pooling.

    def output_size(self, extension: Any, num_tokens: int, limits: StepLimits) -> OutputSize:
        """Return the size of the output of a request of num_tokens, whose extension was judged.
        Called where the part pools."""
        raise NotImplementedError

    def pool(self, hidden: Tensor, step: ScheduledStep) -> Report | None:
        """Take in a step's hidden states [N, H], padding behind them, and return the outputs of
        requests that end with it, if any. Called on the last stage, behind the forward pass and
        outside of graphs, where the part pools and such a request has tokens in the step. Never
        waits for the device."""
        return None

    # Memory.

    @staticmethod
    def heaviest_of_step(
        slots: Int64s, limits: StepLimits
    ) -> tuple[StepExtension, tuple[Frame, ...]] | None:
        """Return the extension of a step that samples these slots in the memory profile and in
        warm-up, with its frames; None: there is none."""
        return None

    @staticmethod
    def row_bytes() -> int:
        """Return the bytes that the part keeps on the device for each of the S rows."""
        return NO_BYTES

    @staticmethod
    def sampling_row_bytes(vocab_size: int) -> int:
        """Return what it keeps for each of the S rows on the last stage alone."""
        return NO_BYTES

    @staticmethod
    def sampling_bytes(num_rows: int, vocab_size: int, itemsize: int) -> int:
        """Return the bytes that a step with num_rows sampled rows takes, in addition to their
        logits. itemsize: bytes of the model's dtype."""
        return NO_BYTES


class TokenChooser(Protocol):
    """Chooses tokens once all parts have adjusted the logits."""

    def choose(self, logits: Tensor, rows: SampleRows) -> Tensor:
        """Return int64 [R], a token for each row of logits [R, V], NO_TOKEN where there are no
        numbers to choose by. rows: without padding. Never waits for the device."""


def refuse_fault(fault: RuleFault | None, request: NewRequestData) -> None:
    """Refuse a request for what is wrong with one of its extensions.

    Raises:
        InvalidStepError: something is.
    """
    if fault is not None:
        raise invalid(f"scheduled_new_reqs[{request.req_id}].{fault.field}", fault.value, fault.fix)
