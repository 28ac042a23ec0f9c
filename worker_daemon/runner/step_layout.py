"""Lays out a step's columns in one packed buffer, and chooses the sizes to which they are padded.
Pure.

The host fills the columns, one copy brings them to the device, kernels read them there. A captured
graph reads at fixed addresses, so the layout depends only on the sizes.
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from worker_daemon.layers.prompt_attention import (
    LONG_CONTEXT,
    MIN_LATER_TOKENS,
    are_long_chunks,
)
from worker_daemon.runner.scheduled_step import (
    MAX_BLOCK_UPDATES,
    ScheduledStep,
    StepLimits,
    TokensOfReplicas,
)

MAX_GRAPH_SEQS = 512
"""Larger decodes run eagerly."""

MIXED_SIZES = (16, 32, 64, *range(128, 513, 64))
"""Token counts to which a step with prompts is padded."""

DRAFTED_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of sequences to which decodes with drafts are padded; more take the plans of mixed
steps."""

MOST_PADDING = 2
"""A decode with drafts is padded to at most this many times its tokens."""

PROPOSAL_SIZES = (*DRAFTED_SIZES, 192, 256, 384, MAX_GRAPH_SEQS)
"""Numbers of rows to which a draft model's passes after a step are padded; it is small, so that
padding costs little."""

LARGE_MIXED_SIZES = (*range(640, 1025, 128), *range(1280, 2049, 256), *range(2560, 4097, 512))
"""Further ones, used if the device computes a layer faster than the host launches it."""

LARGE_MIXED_LONGEST = 4096
"""Longest context of a step that is padded to one of them. Beyond it, kernels that only eager steps
use (layers/prompt_attention.py) gain more than a graph does."""

_LAUNCH_PRODUCTS = 120_000_000_000
"""Multiplications that a device does while the host launches a layer: 0.4 ms, measured for 11
launches on the hosts of H200s, at 300e12 a second in 16 bits."""

_ALIGNMENT = 4
"""Columns start at multiples of 16 bytes: kernels are compiled once for all layouts."""

_Column = TypeVar("_Column")
_Entry = TypeVar("_Entry")


class StepShape(NamedTuple):
    """Sizes of a step's columns, padding included."""

    num_tokens: int
    """N"""
    num_seqs: int
    """B"""
    num_samples: int
    """R, tokens that are sampled: one for most sequences that sample."""
    num_updates: int
    """U, entries of the block table that the program writes. Others are written before it."""
    extra: tuple[int, ...] = ()
    """Sizes of the columns of parts that act around the forward pass (runner/parts/)."""
    num_corrected: int = 0
    """B if the rows' counts are taken from the device, else 0. Such steps may have drafts."""


class StepPlan(NamedTuple):
    """Everything that a step's launches depend on. It follows from the step message, so all ranks
    choose the same plan."""

    shape: StepShape
    max_query_len: int
    """An upper bound."""
    max_seq_len: int
    """Upper bound of the context lengths."""
    parts: int = 0
    """Bits of the parts that act around the forward pass."""

    def corrected(self) -> "StepPlan":
        """Return the plan of steps whose counts the device corrects."""
        return self._replace(shape=self.shape._replace(num_corrected=self.shape.num_seqs))


class StepColumns(NamedTuple, Generic[_Column]):
    """int32 columns of one step, on the host or on the device."""

    host_token_ids: _Column
    """[N]; -1 if the token was sampled and is only on the device."""
    token_rows: _Column
    """[N] request row of each token; the spare row for padding."""
    positions: _Column
    """[N]"""
    seq_rows: _Column
    """[B] request row of each sequence; the spare row for padding."""
    query_start_loc: _Column
    """[B + 1]"""
    seq_lens: _Column
    """[B] context lengths, this step's tokens included."""
    seq_order: _Column
    """[B] indices of the sequences, longest context first."""
    sample_rows: _Column
    """[R] request row of each sampled token; the spare row for padding."""
    sample_tokens: _Column
    """[R] index in the step of the token that it follows."""
    sample_positions: _Column
    """[R] position of the token that is sampled."""
    update_rows: _Column
    """[U]; for padding the spare row, whose blocks are all the null block."""
    update_indices: _Column
    """[U]"""
    update_block_ids: _Column
    """[U]"""
    corrections: _Column
    """[B] as in ScheduledStep; 0 for padding. [0] if positions and lengths are exact; otherwise the
    device corrects them."""
    first_samples: _Column
    """[B + 1] in a step with drafts: the first sample of each sequence that samples, then their
    number. [0] if positions and lengths are exact, like the next two."""
    num_before: _Column
    """[R] in a step with drafts: number of earlier samples of the same sequence."""
    num_verified: _Column
    """[1] number of sequences whose drafts the program verifies: those that sample, or none."""
    extra: tuple[_Column, ...]
    """The parts' columns, in the order of the shape."""

    @property
    def every(self) -> tuple[_Column, ...]:
        """All columns, the parts' columns last."""
        own: Any = self[:-1]
        return (*own, *self.extra)


_NUM_OWN_COLUMNS = len(StepColumns._fields) - 1


def column_sizes(shape: StepShape) -> tuple[int, ...]:
    """Return the number of int32 values of each column, the parts' columns last."""
    tokens, seqs, samples, updates, extra, corrected = shape
    return (
        tokens, tokens, tokens,
        seqs, seqs + 1, seqs, seqs,
        samples, samples, samples,
        updates, updates, updates,
        corrected, corrected and seqs + 1, corrected and samples, min(corrected, 1),
        *extra,
    )  # fmt: skip


def packed_size(shape: StepShape) -> int:
    """Return the length of the packed buffer in int32 values."""
    return sum(aligned(size) for size in column_sizes(shape))


def split_columns(shape: StepShape, take: Callable[[int, int], _Column]) -> StepColumns[_Column]:
    """Return every column of a packed buffer. take(start, stop) gives a view of the buffer."""
    columns = []
    start = 0
    for size in column_sizes(shape):
        columns.append(take(start, start + size))
        start += aligned(size)
    own, extra = columns[:_NUM_OWN_COLUMNS], tuple(columns[_NUM_OWN_COLUMNS:])
    return StepColumns._make([*own, extra])


class ExactShapes:
    """Chooses the size to which a step is padded, from the step message, so that all ranks pad
    alike. This class does not pad."""

    pads = False
    """False if each size is the step's own."""

    def fit(self, step: ScheduledStep) -> StepPlan:
        """Return the plan of a step."""
        shape = StepShape(
            num_tokens=step.total_num_tokens,
            num_seqs=step.slots.size,
            num_samples=int(step.num_samples.sum()),
            num_updates=step.block_updates.rows.size,
        )
        return StepPlan(shape, int(step.num_tokens.max(initial=0)), step.longest)

    def size_of_all(self, tokens: TokensOfReplicas) -> int:
        """Return the number of tokens to which replicas that share experts pad a step."""
        return max(tokens.counts)


class StepLadder(ExactShapes):
    """Decodes are padded to the next of a few numbers of sequences, other steps to the next of a
    few numbers of tokens; what is larger is exact."""

    pads = True

    def __init__(
        self,
        decode_sizes: Sequence[int],
        length_bounds: Callable[[int], Sequence[int]],
        mixed_plans: Sequence[StepPlan],
        num_groups: int = 1,
        *,
        drafts: Sequence[int] = (),
        max_num_tokens: int = 0,
    ) -> None:
        """decode_sizes: numbers of sequences, ascending. length_bounds(size): ascending bounds of
        the context length, the last one the longest possible; launches are the same between two
        bounds. mixed_plans: ascending by tokens (`mixed_plans`). num_groups: KV groups; a sequence
        may get a block of each in a step. drafts: numbers of drafts of a sequence, ascending, in
        steps of at most max_num_tokens tokens."""
        self._drafted = [
            _drafted_plan(size, 1 + count, bound, num_groups)
            for count in drafts
            for size in (size for size in DRAFTED_SIZES if size <= max(decode_sizes, default=0))
            if size * (1 + count) <= max_num_tokens
            for bound in length_bounds(size)
        ]
        self._decodes = [
            [_decode_plan(size, bound, num_groups) for bound in length_bounds(size)]
            for size in decode_sizes
        ]
        self._decodes_by_count = _by_count(decode_sizes, self._decodes)
        self._mixed = mixed_plans
        self._mixed_by_count = _by_count([p.shape.num_tokens for p in mixed_plans], mixed_plans)

    @property
    def plans(self) -> list[StepPlan]:
        """All padded plans: the mixed ones, decodes with drafts, then the others, each with the
        largest first."""
        decodes = [plan for plans in reversed(self._decodes) for plan in reversed(plans)]
        return [*reversed(self._mixed), *reversed(self._drafted), *decodes]

    def fit(self, step: ScheduledStep) -> StepPlan:
        """Return the padded plan, which may have room for fewer block updates than the step has, as
        when it admits many cached blocks. A step with a longer context than the plan is not
        padded."""
        count = step.total_num_tokens
        is_decode = 0 < count == step.slots.size and not step.new_requests
        if self._drafted and step.corrections is not None:
            is_decode = False  # few such steps have no drafts: they share the graphs of the others
            plan = self._fit_drafts(step)
            if plan is not None:
                return plan
        if is_decode and count <= len(self._decodes_by_count):
            for plan in self._decodes_by_count[count - 1]:
                if step.longest <= plan.max_seq_len:
                    return plan
        if 0 < count <= len(self._mixed_by_count):
            plan = self._mixed_by_count[count - 1]
            if step.longest <= plan.max_seq_len and not _has_late_chunk(step):
                return plan
        return super().fit(step)

    def _fit_drafts(self, step: ScheduledStep) -> StepPlan | None:
        """Return the plan of a decode with drafts; None if there is none that fits well."""
        if step.new_requests:
            return None
        num_seqs = step.slots.size
        most_tokens = max(MIXED_SIZES[0], MOST_PADDING * step.total_num_tokens)
        most_queries = int(step.num_tokens.max(initial=0))
        for plan in self._drafted:
            shape = plan.shape
            if (
                most_queries <= plan.max_query_len
                and num_seqs <= shape.num_seqs
                and step.longest <= plan.max_seq_len
                and shape.num_tokens <= most_tokens
            ):
                return plan
        return None


def _has_late_chunk(step: ScheduledStep) -> bool:
    """Return True if the step has a long chunk after a long context, which kernels that only eager
    steps use compute faster."""
    if step.longest < LONG_CONTEXT or step.total_num_tokens < MIN_LATER_TOKENS:
        return False
    is_late = step.ends >= LONG_CONTEXT
    return bool((are_long_chunks(step.num_tokens, step.ends) & is_late).any())


class ProposalPlan(NamedTuple):
    """Everything that the launches of a draft model after a step depend on."""

    num_seqs: int
    """Rows, padding included."""
    max_seq_len: int
    """Upper bound of the rows' lengths before the first draft."""


class ProposalLadder:
    """Pads the rows for which a draft model makes drafts to the next of a few numbers."""

    def __init__(self, sizes: Sequence[int], length_bounds: Callable[[int], Sequence[int]]) -> None:
        """sizes: ascending. length_bounds: see StepLadder."""
        self._plans = [
            [ProposalPlan(size, bound) for bound in length_bounds(size)] for size in sizes
        ]
        self._plans_by_count = _by_count(sizes, self._plans)

    @property
    def plans(self) -> list[ProposalPlan]:
        """All plans, the largest first."""
        return [plan for plans in reversed(self._plans) for plan in reversed(plans)]

    def fit(self, num_seqs: int, longest: int) -> ProposalPlan | None:
        """Return the plan for rows (at least one) whose last tokens have positions up to longest;
        None if it is none of the ladder's."""
        if num_seqs > len(self._plans_by_count):
            return None
        plans = self._plans_by_count[num_seqs - 1]
        return next((plan for plan in plans if longest < plan.max_seq_len), None)


def proposal_sizes(max_num_seqs: int) -> list[int]:
    """Return the sizes of a ProposalLadder; the last one is max_num_seqs, or the largest."""
    fitting = [size for size in PROPOSAL_SIZES if size < max_num_seqs]
    return fitting if fitting == [*PROPOSAL_SIZES] else [*fitting, max_num_seqs]


def _by_count(sizes: Sequence[int], entries: Sequence[_Entry]) -> list[_Entry]:
    """Return a table: entry count - 1 is for the smallest size of at least count."""
    steps = zip(entries, sizes, (0, *sizes), strict=False)
    return [entry for entry, size, smaller in steps for _ in range(size - smaller)]


def mixed_sizes(layer_weights: int) -> tuple[int, ...]:
    """Return the token counts to which steps with prompts are padded. layer_weights: weights by
    which a layer multiplies a token."""
    most = _LAUNCH_PRODUCTS // layer_weights
    return (*MIXED_SIZES, *(size for size in LARGE_MIXED_SIZES if size <= most))


def mixed_plans(
    max_num_seqs: int,
    max_num_tokens: int,
    longest: int,
    num_groups: int = 1,
    sizes: Sequence[int] = MIXED_SIZES,
    max_num_samples: int = 0,
) -> list[StepPlan]:
    """Return the plans of steps that are not decodes, ascending; max_num_tokens, max_num_seqs and
    max_num_samples (0: max_num_seqs) are the largest step's, longest its longest context. sizes:
    those of mixed_sizes."""
    plans = []
    for size in sizes:
        if size <= max_num_tokens:
            bound = longest if size <= MIXED_SIZES[-1] else min(longest, LARGE_MIXED_LONGEST)
            count, samples = min(size, max_num_seqs), min(size, max_num_samples or max_num_seqs)
            plans.append(StepPlan(StepShape(size, count, samples, num_groups * size), size, bound))
    return plans


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Return the ladder's sizes: 1, 2, 4, then multiples of 8 up to 256 and of 32 beyond; the last
    one is at least max_num_seqs."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, MAX_GRAPH_SEQS + 1, 32)]
    fitting = [size for size in sizes if size < max_num_seqs]
    return [*fitting, *sizes[len(fitting) : len(fitting) + 1]]


def largest_shape(limits: StepLimits) -> StepShape:
    """Return the shape of the largest step: tokens, sequences and block-table entries, each
    including padding. Samples are those of all requests, or of a padded decode with drafts: the
    memory profile counts as many for deferred ones, which may be of several steps."""
    seqs = max(limits.max_num_seqs + 1, *decode_sizes(limits.max_num_seqs))
    tokens, groups = limits.max_num_batched_tokens + seqs, limits.num_groups
    entries = groups * seqs * limits.max_blocks_per_seq
    updates = max(min(entries, max(groups * seqs, MAX_BLOCK_UPDATES)), groups * tokens)
    each = limits.most_samples_per_seq
    padded = min(seqs * each, limits.max_num_batched_tokens)
    samples = max(seqs, limits.max_num_seqs * each, padded)
    return StepShape(tokens, seqs, samples, updates)


def drafted_counts(most: int) -> list[int]:
    """Return the numbers of drafts, up to `most`, for which decodes have plans."""
    counts = {1, 2, 3, 4, 6, 8, 12, 15, most}
    return sorted(count for count in counts if 0 < count <= min(most, 15))


def _drafted_plan(size: int, queries: int, longest: int, num_groups: int) -> StepPlan:
    tokens = size * queries
    shape = StepShape(tokens, size, tokens, num_groups * size)
    return StepPlan(shape, queries, longest).corrected()


def _decode_plan(size: int, longest: int, num_groups: int) -> StepPlan:
    return StepPlan(StepShape(size, size, size, num_groups * size), 1, longest)


def aligned(size: int) -> int:
    """Return the space that a column of this many values takes in the packed buffer."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
