"""Values: an accepted step, the limits of every step, and the refusal of an invalid one.

Shapes: B scheduled requests, U block-table updates, G KV groups, S rows and the spare one.
Row g * (S + 1) + s of the block table holds the blocks of request row s in group g: with one group,
it is row s.
"""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from rpc_schema.errors import InvalidStepError
from rpc_schema.kv_cache import BlockGroup, block_groups, border_tokens
from rpc_schema.pooling import NO_POOLING, PoolingSupport
from rpc_schema.routed_experts import RoutedExpertsShape
from rpc_schema.step import NewRequestData
from worker_daemon.contracts.arrays import Bools, Int32s, Int64s
from worker_daemon.runner.steady_batch import SteadyBatch

MAX_BLOCK_UPDATES: Final = 1 << 20
"""Number of block-table entries that one step may write; each has a place in its packed buffer."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The limits of every step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    block_size: int
    """Tokens of a block, in the group with the smallest blocks."""
    num_blocks: int
    groups: tuple[BlockGroup, ...] = ()
    """Empty: one group of block_size, without a window."""
    generates: bool = True
    """True if the model has an LM head."""
    pooling: PoolingSupport = NO_POOLING
    logits_processors: tuple[str, ...] = ()
    """Names of the logits processors that requests may ask for."""
    hidden_size: int = 0
    """Width of prompt embeddings; 0: prompts may have none."""
    keeps_state: bool = False
    """Layers keep a state per request, on this rank or another: a request begins at position 0, or
    at a border."""
    checkpoint_blocks: int = 0
    """Blocks of the first group from a border to the next; 0: there are no checkpoints of
    states."""
    max_samples_per_seq: int = 1
    """Most tokens that a step may ask of a request (ExecuteModel.num_samples)."""
    max_drafts: int = 0
    """Most drafts of a request in a step; 0: steps have none."""
    makes_drafts: bool = False
    """The last stage makes drafts; otherwise steps bring them."""
    routed_experts: RoutedExpertsShape | None = None
    """Sizes of the experts that requests may ask for; None: they may not."""
    num_host_blocks: int = 0
    """Slots of the host tier; 0: there is none."""
    has_kv_files: bool = False
    """Steps may move blocks to files and from there."""

    @property
    def block_groups(self) -> tuple[BlockGroup, ...]:
        return block_groups(self.groups, self.block_size)

    @property
    def border_tokens(self) -> int:
        """Number of tokens from a border to the next; 0 if there are no checkpoints."""
        return border_tokens(self.block_groups, self.checkpoint_blocks)

    @property
    def num_groups(self) -> int:
        return len(self.block_groups)

    @property
    def max_blocks_per_seq(self) -> int:
        """Largest number of blocks of a request in one group."""
        return -(-self.max_model_len // self.block_size)

    @property
    def most_samples_per_seq(self) -> int:
        """Most tokens that a request samples in a step, for any reason."""
        return max(self.max_samples_per_seq, 1 + self.max_drafts)

    @property
    def max_num_samples(self) -> int:
        """Most tokens that a step samples: each follows one of its tokens."""
        most = self.max_num_seqs * self.most_samples_per_seq
        return max(self.max_num_seqs, min(most, self.max_num_batched_tokens))


class BlockUpdates(NamedTuple):
    """The block-table entries that a step writes. Aligned columns [U]."""

    rows: Int64s
    """Rows of the block table."""
    indices: Int32s
    block_ids: Int32s

    def part(self, which: slice) -> "BlockUpdates":
        """Return some of them."""
        return BlockUpdates(self.rows[which], self.indices[which], self.block_ids[which])


NO_UPDATES: Final = BlockUpdates(
    np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.int32)
)


class OutputSize(NamedTuple):
    """Size of a pooling request's output."""

    total_bytes: int
    """At least 1."""
    token_bytes: int
    """Bytes for each token of the prompt, see RowCounts.token_bytes."""


class StepExtensions(NamedTuple):
    """Extensions of a message for one step's parts (runner/parts/)."""

    used: int
    """Bits of the parts that have a value."""
    data: tuple[tuple[int, Any], ...]
    """A part's bit, and the value that it made from its extension."""

    def of(self, bit: int) -> Any | None:
        """Return the value for the part with that bit, if there is one."""
        return next((data for own, data in self.data if own == bit), None)

    def with_those_of(self, later: "StepExtensions") -> "StepExtensions":
        """Return both; if both have a value for a part, the later one's counts."""
        # The first match counts.
        return StepExtensions(self.used | later.used, (*later.data, *self.data))


NO_STEP_VALUES: Final = StepExtensions(0, ())


class Drafts(NamedTuple):
    """The drafts among a step's tokens."""

    counts: Int32s
    """[B] drafts of each request: the last ones of its tokens."""
    token_ids: Int32s | None
    """[sum of counts] in the order of the step's tokens; negative where the device has the draft.
    None: it has all of them."""


class TokensOfReplicas(NamedTuple):
    """The tokens that each replica in lockstep has in a forward pass of all."""

    counts: tuple[int, ...]
    are_decodes: bool
    """Each request of each replica has one token."""


class ScheduledStep(NamedTuple):
    """An accepted step, ready to run. Arrays are host memory; batch order is ascending slots."""

    seq: int
    slots: Int64s
    """[B]"""
    num_tokens: Int32s
    """[B] tokens of this step."""
    starts: Int32s
    """[B] position of each request's first token of this step; see corrections."""
    ends: Int32s
    """[B] tokens of each context, this step's included."""
    total_num_tokens: int
    longest: int
    """Tokens of the longest context, this step's included; 0 without requests."""
    num_samples: Int32s
    """[B] tokens that the request samples, one after each of its last tokens of this step; 0 unless
    the step computes its last known token. With drafts, one more than these."""
    new_requests: tuple[NewRequestData, ...]
    block_updates: BlockUpdates
    deferred: Bools | None
    """[B] True if the request's token is sampled later, by SampleTokens; None: none is."""
    step_values: StepExtensions
    corrections: Int32s | None = None
    """[B] tokens by which the row's bounds were lowered since its admission; -1 if none of its
    tokens can have been refused. If not None, starts and ends are upper bounds and the device has
    the true counts. None: all rows are exact."""
    steady: SteadyBatch | None = None
    """The steady batch that this step starts or continues; None for any other step."""
    pooling: Int64s | None = None
    """Slots of all pooling requests; None if none of them has tokens in this step."""
    has_several: bool = False
    """True if a request samples more than one token."""
    drafts: Drafts | None = None
    """None: no token is a draft."""
    skips_drafts: bool = False
    """The last stage makes no drafts after it."""
    recomputes: bool = False
    """It only computes KV again: nothing is sampled or reported, and counts stay. They may be
    bounds, but those of this step are exact."""
    shared_size: int = 0
    """Number of tokens to which all replicas that share experts pad it; 0: there are none."""


def blocks_before_window(num_computed: Int32s, group: BlockGroup) -> Int32s:
    """Return rpc_schema.kv_cache.blocks_behind for many rows: [n] -> [n]."""
    if group.window is None:
        return np.zeros_like(num_computed)
    return np.maximum(num_computed - group.window + 1, 0) // group.block_size


def invalid(field: str, value: object, fix: str) -> InvalidStepError:
    """Return the refusal of a step."""
    return InvalidStepError(
        "the step is refused; nothing was applied", field=field, value=value, fix=fix
    )
