"""Knows which tokens of the rows a draft model has not computed: those of plain decodes, while it
makes no drafts (drafting/interface.py). Before it makes some, it computes them.

All of it is known to the host from the step messages, so that all ranks of a stage compute the
same. A count of tokens from a row's end on needs no exact position: refused drafts make it too
large, and then tokens are computed again that were right.

Blocks that a row has filled meanwhile are marked as lacking, since a later request may find its
prefix in them.
"""

from typing import Final

import numpy as np

from worker_daemon.contracts.arrays import Bools, Int32s, Int64s
from worker_daemon.drafting.interface import MissingTokens
from worker_daemon.layers.prompt_attention import MIN_LATER_TOKENS
from worker_daemon.runner.request_state import RequestState
from worker_daemon.runner.scheduled_step import ScheduledStep

_ALL: Final = 1 << 30
"""Missing tokens of a row of which nothing is known."""


class DraftBacklog:
    """The missing tokens of all rows. Belongs to the InputBuilder of a stage with a draft model,
    whose blocks are those of the first KV group."""

    def __init__(self, state: RequestState) -> None:
        """Starts as restart leaves it."""
        limits = state.limits
        num_rows = limits.max_num_seqs + 1
        self._state = state
        self._block_size = limits.block_groups[0].block_size
        self._budget = limits.max_num_batched_tokens
        self._counts = np.full(num_rows, _ALL, np.int32)
        """[S + 1] upper bound of each row's missing tokens: its last computed ones."""
        self._firsts = np.zeros(num_rows, np.int32)
        """[S + 1] lower bound of the position of the first of them, if there are some."""
        self._gaps = state.draft_gaps
        self._table = np.zeros((num_rows, limits.max_blocks_per_seq), np.int32)
        """[S + 1, max_blocks] blocks of each row in the first KV group, as far as it has some."""

    def restart(self) -> None:
        """Assume that everything is missing, as on a rank that has just been made."""
        self._counts.fill(_ALL)
        self._firsts.fill(0)
        self._gaps.restart()

    def take(self, step: ScheduledStep, *, follows: bool) -> MissingTokens | None:
        """Note a step that is about to run. follows: the draft model computes its tokens with it.
        Return what is to be computed after it, at most max_num_batched_tokens; None: nothing."""
        if step.recomputes:  # the rows' ends, and what is known of them, stay as they are
            return None
        if step.new_requests or step.block_updates.rows.size:
            self._take_blocks(step)
        own = self._counts[step.slots]
        is_behind = own > 0
        if not follows:
            if not is_behind.all():
                self._fall_behind(step, ~is_behind)
            self._counts[step.slots] = own + step.num_tokens
        elif is_behind.any():
            self._counts[step.slots] = np.where(is_behind, own + step.num_tokens, 0)
        else:
            return None
        if step.skips_drafts or self._state.computes_nothing:
            return None
        return self._choose(step)

    def caught_up(self, missing: MissingTokens) -> None:
        """Note that these tokens have been computed."""
        self._counts[missing.rows] = missing.left
        whole = missing.rows[missing.left == 0]
        if whole.size:
            self._mark(whole, lacks=False)

    def _take_blocks(self, step: ScheduledStep) -> None:
        """Note the blocks that a step gives to rows, and what new rows lack of their prefixes."""
        is_own = step.block_updates.rows < self._counts.size
        rows, indices = step.block_updates.rows[is_own], step.block_updates.indices[is_own]
        block_ids = step.block_updates.block_ids[is_own]
        self._table[rows, indices] = block_ids
        for request in step.new_requests:
            self._begin(request.slot, request.num_computed_tokens)
        if step.new_requests:
            num_read = np.zeros(self._counts.size, np.int32)
            for request in step.new_requests:
                num_read[request.slot] = request.num_computed_tokens // self._block_size
            block_ids = block_ids[indices >= num_read[rows]]
        self._gaps.of_blocks[block_ids] = False
        behind = np.unique(rows[self._counts[rows] > 0])
        if behind.size:
            self._mark(behind, lacks=True)

    def _begin(self, slot: int, num_computed: int) -> None:
        """Begin a row some of whose tokens were computed: in its first blocks."""
        num_blocks = -(-num_computed // self._block_size)
        lacking = np.flatnonzero(self._gaps.of_blocks[self._table[slot, :num_blocks]])
        first = int(lacking[0]) * self._block_size if lacking.size else num_computed
        self._firsts[slot], self._counts[slot] = first, num_computed - first

    def _fall_behind(self, step: ScheduledStep, now: Bools) -> None:
        """Note that rows lack the tokens of a step, and lacked none before. now [B]: True for
        them."""
        slots, firsts = step.slots[now], step.starts[now]
        if step.corrections is not None:
            known = self._state.num_known_tokens[slots]
            is_bound = step.corrections[now] >= 0
            firsts = np.where(is_bound, np.minimum(firsts, known), firsts)
        self._firsts[slots] = firsts
        self._mark(slots, lacks=True)

    def _mark(self, slots: Int64s | Int32s, *, lacks: bool) -> None:
        """Mark the blocks of rows from their first missing token on."""
        begins = self._firsts[slots] // self._block_size
        ends = np.minimum(self._state.counts.blocks_by_group[0, slots], self._table.shape[1])
        counts = np.maximum(ends - begins, 0)
        indices = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - ends, counts)
        self._gaps.of_blocks[self._table[np.repeat(slots, counts), indices]] = lacks

    def _choose(self, step: ScheduledStep) -> MissingTokens | None:
        """Return the tokens that the rows of a step lack that are to have drafts after it: of those
        first that lack the fewest, so that most of them lack none. A row that lacks too many has
        bad drafts for some steps; nobody waits for it."""
        own = self._counts[step.slots]
        indices = np.flatnonzero((own > 0) & (step.num_samples > 0))
        if not indices.size:
            return None
        slots, ends = step.slots[indices], step.ends[indices]
        missing = np.minimum(own[indices], ends)
        most = missing
        if step.corrections is not None:
            # The true length of a row whose end is a bound: it has sampled all but the known ones.
            is_bound = step.corrections[indices] >= 0
            least = self._state.num_known_tokens[slots] + step.num_tokens[indices]
            bound = np.where(missing <= least, np.minimum(missing, MIN_LATER_TOKENS - 1), 0)
            most = np.where(is_bound, bound, missing)
        order = np.argsort(missing, kind="stable")
        reached = np.cumsum(most[order], dtype=np.int64)
        counts = np.zeros_like(most)
        counts[order] = (self._budget - (reached - most[order])).clip(0, most[order])
        chosen = np.flatnonzero(counts)
        if not chosen.size:
            return None
        left = missing[chosen] - counts[chosen]
        return MissingTokens(
            indices[chosen].astype(np.int32),
            slots[chosen].astype(np.int32),
            counts[chosen],
            left,
            ends[chosen] - left,
        )
