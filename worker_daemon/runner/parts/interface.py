"""The interface of a part: one optional feature of a step, in one object. A step that uses no part
only tests a few integers.

Letters: R samples, Q sequences that sample (sample_rows.py), V vocabulary, N tokens, H hidden size,
S rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, NamedTuple, Protocol, TypeAlias

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
from worker_daemon.layers.encoder import EncoderEmbedding
from worker_daemon.lora.adapters import Adapters
from worker_daemon.models.pooler import Pooler
from worker_daemon.runner.report import Report as Report
from worker_daemon.runner.routed_experts import KeptExperts, ReplayTarget
from worker_daemon.runner.sample_rows import SampleRows
from worker_daemon.runner.scheduled_step import (
    OutputSize,
    ScheduledStep,
    StepLimits,
    invalid,
)

Per: TypeAlias = Literal["token", "sequence", "sample"]
"""The number of entries in a column: one per token, per sequence, or per sampled token."""

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
    """Turns hidden states into the model's outputs; None except on the last stage."""
    encoder: EncoderEmbedding | None = None
    """Gives tokens their types; None except on an encoder's first stage."""
    adapters: Adapters | None = None
    """The model's LoRA adapters; None if it was loaded without."""
    processors: Mapping[str, MakeLogitsProcessor] = field(default_factory=dict)
    """Custom logits processors, in the order of the limits' names."""
    dtype: torch.dtype = torch.float32
    """The model's dtype."""
    find_upload: FindUpload = no_uploads
    kept_experts: KeptExperts | None = None
    """The experts of tokens; None except on the last stage of a model that keeps them."""
    replay: ReplayTarget | None = None
    """Takes the experts that requests bring; None if the model was loaded without."""

    @property
    def num_rows(self) -> int:
        """S: max_num_seqs rows, and the spare row, to which padding entries point."""
        return self.limits.max_num_seqs + 1


class TokenChooser(Protocol):
    """Chooses tokens once all parts have adjusted the logits."""

    def choose(self, logits: Tensor, rows: SampleRows) -> Tensor:
        """Return int64 [R], a token for each sample of logits [R, V], NO_TOKEN where the
        logits are NaN or infinite. rows: without padding. Never waits for the device."""

    def choose_any(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """Choose the same tokens for request rows and positions that only the device knows, both
        int32 [R]. A CUDA graph may hold the launches, which serve every option of the rows."""

    def logprobs(
        self, logits: Tensor, token_ids: Tensor, rows: SampleRows, *, are_drawn: bool
    ) -> Tensor:
        """Return float32 [R], the log probability of each of token_ids int64 [R] in the
        distribution that choose draws from. are_drawn: it has drawn them, so none is -inf.
        Meaningless for NO_TOKEN. Other arguments as for choose."""


class Chosen(NamedTuple):
    """The tokens of a step's samples, and what they were chosen from."""

    token_ids: Tensor
    """int64 [R]: NO_TOKEN if no token could be chosen."""
    logits: Tensor
    """[R, V] as the last part has left them."""
    chooser: TokenChooser
    are_drawn: bool = True
    """False: requests have brought the tokens."""

    def logprobs(self, rows: SampleRows, places: Tensor) -> Tensor:
        """Return the log probabilities of some tokens in the distributions that they were, or would
        have been, drawn from: float32 [P]. rows [P] and places, int64 [P]: which."""
        logits, token_ids = self.logits[places], self.token_ids[places]
        return self.chooser.logprobs(logits, token_ids, rows, are_drawn=self.are_drawn)


class PositionLogits(Protocol):
    """Logits at any position of a step's forward pass."""

    def compute(self, hidden: Tensor) -> Tensor:
        """Return logits [P, V] in the model's dtype for hidden states [P, H]. Every rank of a stage
        must make the same calls."""

    def replay(self, logits: Tensor, token_ids: Tensor, rows: SampleRows) -> Chosen:
        """Return given tokens, int64 [P], as the outcome of sampling from logits [P, V]. rows:
        replayed ones, whatever parts they use. Changes no state."""


class StepPart:
    """One feature. These methods do nothing; a part overrides those that it needs.

    One object serves a runner, on the step thread alone; it owns the feature's state of the S rows.
    The validation methods (`check`, `check_step`, `check_batch`) are pure. They see no value that
    differs between ranks, so that all ranks accept or refuse alike. A request's extension is kept
    with its row, and reported unchanged to a driver that adopts the request.
    """

    request_extension: ClassVar[type[RequestExtension] | None] = None
    """Extension of requests that use the part; None if requests carry none."""
    step_extension: ClassVar[type[StepExtension] | None] = None
    """Extension of steps that use the part; None if steps carry none."""
    may_come_later: ClassVar[bool] = True
    """False if a SampleTokens cannot have the step_extension: it acts before the forward pass."""
    loads_blocks: ClassVar[bool] = False
    """True if a step with the part's extension may fill blocks before its forward pass."""
    heaviest: ClassVar[RequestExtension | None] = None
    """Extension of requests in the memory profile and in warm-up; None: the part is not
    profiled."""
    columns: ClassVar[tuple[Per, ...]] = ()
    """int32 columns that a step brings to the device for the forward pass."""
    in_forward: ClassVar[bool] = False
    """True if the part acts around the forward pass. Steps that use it have separate graphs."""
    has_graphs: ClassVar[bool] = True
    """False if steps that use the part around the forward pass run without graphs."""
    in_sampling: ClassVar[bool] = True
    """True if the part changes logits or reports on them. A row that uses only parts with False is
    sampled greedily (argmax)."""
    checks_batches: ClassVar[bool] = False
    """True if the part may refuse a combination of rows (`check_batch`)."""
    may_refuse: ClassVar[bool] = False
    """True if the part may refuse a sampled token after a step has counted it (`refuse`), as in
    speculative decoding. The host then has only upper bounds of the lengths of such rows, and steps
    that use the part have separate graphs."""
    pools: ClassVar[bool] = False
    """True if a request with the part's extension samples nothing and ends with an output
    (`pool`)."""
    follows_tokens: ClassVar[bool] = False
    """True if the part keeps state that depends on its rows' tokens (`begin`, `gain`)."""
    reports_forward: ClassVar[bool] = False
    """True if the part reports on the forward pass (`report_forward`)."""

    @classmethod
    def serves(cls, context: PartContext) -> bool:
        """Return False if the model was loaded without the feature. The runner then has no such
        part, and refuses requests that need it."""
        return True

    def __init__(self, context: PartContext) -> None:
        """Create the feature's state for the rows, which are all free."""

    # Validation.

    def check(self, extension: Any, request: NewRequestData, limits: StepLimits) -> None:
        """Check a new request's extension, using only the message and the limits. Do not refuse for
        a reason that may differ between ranks (a missing upload): let the step fail.

        Raises:
            InvalidStepError: names field, value and fix. Nothing was applied.
        """

    def check_step(self, extension: Any, frames: Sequence[Frame], limits: StepLimits) -> Any:
        """Check a step's extension, and return the value that `adjust_logits` receives. frames: the
        extension's array frames. Raises as check does."""
        return extension

    def loaded_blocks(self, step_values: Any) -> Int32s:
        """Return the blocks that a step fills before its forward pass, by the value that check_step
        returned for its extension. Called if `loads_blocks`."""
        raise NotImplementedError

    def check_drafts(self, step_values: Any, slots: Int64s, drafts: Int32s) -> None:
        """Check the value that check_step returned against the drafts [B] of the slots [B] that it
        may name. Raises as check does."""

    def check_batch(self, slots: Int64s, new: Sequence[NewRequestData]) -> None:
        """Check the rows of a step together. slots: the step's; new: its new requests, before
        admit(). Raises as check does. Called if `checks_batches`."""

    # Rows.

    def uses(self, extension: Any) -> bool:
        """Return True if all steps of a request with this extension use the part around the forward
        pass and in sampling. admit, begin, report_forward and pool are called for any request with
        the extension, whatever this returns."""
        return True

    def uses_step(self, step: ScheduledStep) -> bool:
        """Return True if a step uses the part around the forward pass because of the positions of
        its tokens, although `uses` is False for its rows. Depends only on the message and the
        rows."""
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

    # The forward pass of a step in which a row uses the part. May be captured, except fill.

    def fill(self, columns: Sequence[Int32s], step: ScheduledStep, step_values: Any | None) -> None:
        """Fill the step's columns, which hold zeros. Entries after the step's own are padding and
        stay zero. step_values: what check_step returned for the step's extension; None if the step
        has none."""

    def before_forward(self, hidden: Tensor, columns: Sequence[Tensor]) -> Tensor:
        """Return the input of this stage's first layer: hidden [N, H] itself, or another tensor."""
        return hidden

    def forward_ended(self) -> None:
        """Clean up after the forward pass, whether it succeeded or failed. Called if
        `in_forward`."""

    def after_forward(self, hidden: Tensor, columns: Sequence[Tensor]) -> Tensor:
        """Return the output of this stage's last layer: hidden [N, H] itself, or another tensor."""
        return hidden

    def report_forward(
        self, hidden: Tensor, step: ScheduledStep, positions: PositionLogits
    ) -> Report | None:
        """Return what the reply reports about the forward pass itself. hidden [N, H]: the output of
        the last stage's last layer, with the step's tokens first, in order. Called on that stage
        after the forward pass if `reports_forward` and a row of the step has the part's extension.
        Never waits for the device."""
        return None

    # Sampling, only on the last stage.

    def adjust_logits(self, logits: Tensor, rows: SampleRows, step_values: Any | None) -> Tensor:
        """Return logits [R, V]: the given ones, or new ones. Must not modify the given ones. They
        are in the model's dtype or in float32; new ones may be in float32. A sample that is not its
        row's newest is adjusted as if the row's tokens ended before its position. In a step with
        drafts (rows.drafted), each is adjusted as if the row's tokens were those of begin and gain,
        and behind them the drafts before the sample; positions_np are then upper bounds.
        rows: without padding. step_values: what check_step returned for the step's extension; None
        if the step has none. Never waits for the device."""
        return logits

    def launch_sampling(self, logits: Tensor, rows: SampleRows) -> None:
        """Launch the part's own kernels for sampling, if it has any, inside compiling_ahead, where
        launches only request their kernels. logits [R, V] and the rows have any values. A kernel
        that is not launched here is compiled when a step needs it."""

    def refuse(self, token_ids: Tensor, rows: SampleRows) -> Tensor:
        """Return int32 [Q]: 1 where the token in token_ids, int64 [Q], which a row would gain, is
        refused, otherwise 0. A row with a refused token computes its last token again in its next
        step. rows: the newest samples. Every rank of the stage must return the same. Called if
        `may_refuse` and a row uses the part; NO_TOKEN is never refused."""
        return torch.zeros_like(token_ids, dtype=torch.int32)

    def gain(self, token_ids: Tensor, rows: SampleRows) -> None:
        """Process the rows' new tokens, int64 [Q]; negative: none. rows: the newest samples. In a
        step with drafts: int64 [R], and all samples. A row gains the first ones, and none of the
        rest. Called if `follows_tokens` and a row uses the part. Never waits for the device."""

    def report(self, logits: Tensor, chosen: Chosen, rows: SampleRows) -> Report | None:
        """Return the part's addition to the reply. logits [R, V]: as adjust_logits returned
        them."""
        return None

    # Pooling.

    def output_size(self, extension: Any, num_tokens: int, limits: StepLimits) -> OutputSize:
        """Return the size of the output of a request of num_tokens, whose extension was checked.
        Called if `pools`."""
        raise NotImplementedError

    def pool(self, hidden: Tensor, step: ScheduledStep) -> Report | None:
        """Process a step's hidden states [N, H], which end in padding, and return the outputs of
        requests that end with the step, if any. Called on the last stage, after the forward pass
        and outside of graphs, if `pools` and a pooling request has tokens in the step. Never waits
        for the device."""
        return None

    # Memory.

    @staticmethod
    def heaviest_of_step(
        slots: Int64s, limits: StepLimits
    ) -> tuple[StepExtension, tuple[Frame, ...]] | None:
        """Return the step extension for these slots that takes the most memory, and its frames, for
        the memory profile and warm-up. None: the part has none. slots: once more per draft."""
        return None

    @staticmethod
    def row_bytes() -> int:
        """Return the bytes that the part keeps on the device for each of the S rows."""
        return NO_BYTES

    @staticmethod
    def sampling_row_bytes(vocab_size: int) -> int:
        """Return the bytes that the part keeps for each of the S rows on the last stage only."""
        return NO_BYTES

    @staticmethod
    def sampling_bytes(num_rows: int, vocab_size: int, itemsize: int) -> int:
        """Return the bytes that a step with num_rows samples takes, in addition to their
        logits. itemsize: bytes of the model's dtype."""
        return NO_BYTES


def refuse_fault(fault: RuleFault | None, request: NewRequestData) -> None:
    """Refuse a request if one of its extensions has a fault.

    Raises:
        InvalidStepError: there is a fault.
    """
    if fault is not None:
        raise invalid(f"scheduled_new_reqs[{request.req_id}].{fault.field}", fault.value, fault.fix)
