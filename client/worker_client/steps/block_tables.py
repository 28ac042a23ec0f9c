"""Checks the blocks that a step gives to requests, and accounts for them: the columns of the
message, the length of each block table, and who may write to which block (block_holders.py)."""

from array import array
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain, product
from typing import Any, Literal, NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import astuple
from numpy.typing import NDArray

from rpc_schema.kv_cache import NULL_BLOCK, blocks_behind, has_checkpoint
from worker_client.errors import config_error
from worker_client.scheduler_output import NewRequest, SchedulerOutput
from worker_client.steps.block_holders import BlockHolders, BlockTaken
from worker_client.steps.cached_blocks import CachedBlocks
from worker_client.steps.step_checks import (
    MAX_COUNT,
    MAX_STEP_BLOCKS,
    WRONG_TYPE,
    GroupLimits,
    is_integer,
)
from worker_client.steps.step_fault import StepFault, malformed, not_running, wrong_block

BLOCK_KINDS = frozenset((list, tuple, range, array, np.ndarray))
"""Types of collections of block ids. Bytes and sets would iterate, but are mistakes."""

MAX_UNCOUNTED_BYTES = 1 << 16
"""Bytes of appended blocks, two each, that are collected before they are counted at once with
numpy."""

Int32s = NDArray[np.int32]
_UINT16 = np.dtype("<u2")
_NONE_NEW: Mapping[str, int] = {}


class GivenBlocks(Struct, frozen=True, gc=False):
    """Blocks that a step gives to requests."""

    slots: bytes
    """A column of uint16: the request that gets each block."""
    groups: bytes
    """A column of uint8: the KV group of each block; empty: the first group."""
    rows: bytes
    """A column of rows (slot and KV group in one number: see block_holders.py)."""
    ids: bytes
    """A column of int32."""
    listed: Sequence[int]


NO_BLOCKS = GivenBlocks(b"", b"", b"", b"", ())


class CheckedBlocks(NamedTuple):
    """The blocks of a step that passed all checks."""

    given: GivenBlocks
    written: GivenBlocks
    """The blocks among them that the step's requests write to."""
    prefixes: Sequence[Int32s]
    """For each row of each new request, the blocks that it only reads; empty if there are none, or
    if blocks are not checked."""
    filled: Sequence[int] = ()
    """Blocks that the step fills before its forward pass."""


NONE_CHECKED = CheckedBlocks(NO_BLOCKS, NO_BLOCKS, ())


def _read_blocks(
    blocks: Mapping[str, Sequence[int]],
) -> tuple[list[int], "array[int]", list[int]] | StepFault:
    """Return the blocks of all requests, also as int32, and the number of each request's blocks;
    the last is empty if each has one."""
    if not BLOCK_KINDS.issuperset(map(type, blocks.values())):
        return _wrong_blocks(blocks)
    try:
        try:
            ids, lengths = [block_id for (block_id,) in blocks.values()], []
        except ValueError:  # not one block each
            lengths = [len(own) for own in blocks.values()]
            if sum(lengths) > MAX_STEP_BLOCKS:
                message, value = "the step does not fit into a message", f"{sum(lengths)} blocks"
                fix = f"give at most {MAX_STEP_BLOCKS} blocks in a step"
                return StepFault(message, "new_block_ids", value, fix)
            ids = list(chain.from_iterable(blocks.values()))
        return ids, array("i", ids), lengths
    except WRONG_TYPE:
        return _wrong_blocks(blocks)


def _wrong_blocks(blocks: Mapping[str, Any]) -> StepFault:
    for req_id, own in blocks.items():
        if type(own) not in BLOCK_KINDS or (type(own) is np.ndarray and own.ndim != 1):
            fix = "give a list, a tuple, a range or a one-dimensional array of integers"
            return wrong_block(req_id, own, fix)
        for block_id in own:
            if not is_integer(block_id, -MAX_COUNT - 1, MAX_COUNT):
                return wrong_block(req_id, block_id, "give whole numbers of 32 bits")
    return malformed("new_block_ids", blocks, "give sequences of block ids")


class BlockTables:
    """The block tables of a SlotTable's requests, one for each slot and KV group. Blocks are
    checked if the limits say how many there are."""

    def __init__(self, num_slots: int, limits: GroupLimits) -> None:
        self._num_slots = num_slots
        self._limits = limits
        self._groups = groups = limits.block_groups
        self._row_code: Literal["H", "I"] = "H" if len(groups) == 1 else "I"
        self._holders: BlockHolders | None = None
        if limits.num_blocks:
            self._holders = BlockHolders(num_slots, limits.num_blocks, groups)
        self._lengths = np.zeros((len(groups), num_slots), np.int32)
        """For each group and slot, entries of its block table, including those behind a window."""
        self._appended_rows, self._appended_ids = bytearray(), bytearray()
        """Rows and ids (int32) of blocks that were taken, but are not counted and held yet."""
        self._planned: frozenset[str] = frozenset()
        """Requests that may begin with blocks of weights that were replaced since their first step
        was planned."""

    def lengths(self, slots: Int32s) -> Int32s:
        """Return [groups, slots]: entries of each block table. Call count_appended() before."""
        lengths: Int32s = self._lengths[:, slots]
        return lengths

    def take_free(self, output: SchedulerOutput, slot_of: Mapping[str, int]) -> GivenBlocks | None:
        """Take one free block for each running request that gets any. In the rare step that gives
        several to a request, or one that is not known to be free, take nothing and return None:
        call take() instead."""
        if not output.more_new_block_ids:
            if not output.new_block_ids:
                return NO_BLOCKS
            return self._take_group(0, output.new_block_ids, slot_of)
        taken: list[GivenBlocks] = []
        for group, given in enumerate((output.new_block_ids, *output.more_new_block_ids)):
            blocks = self._take_group(group, given, slot_of)
            if blocks is None:
                for earlier in taken:
                    self.give_back(earlier)
                return None
            taken.append(blocks)
        return _joined(taken)

    def _take_group(
        self, group: int, given: Mapping[str, Sequence[int]], slot_of: Mapping[str, int]
    ) -> GivenBlocks | None:
        """Take blocks of one group, one each, if all of them are free."""
        holders = self._holders
        if holders is None or not BLOCK_KINDS.issuperset(map(type, given.values())):
            return None
        try:
            listed = [block_id for (block_id,) in given.values()]
            slots = array("H", map(slot_of.__getitem__, given)).tobytes()
            ids = array("I", listed).tobytes()  # none is negative
            if holders.take(listed):
                return self._in_group(group, slots, ids, listed)
        except (*WRONG_TYPE, LookupError):  # what is wrong is found by take
            pass
        return None

    def take(
        self, output: SchedulerOutput, slot_of: Mapping[str, int], num_computed: Int32s
    ) -> GivenBlocks | StepFault:
        """Take the blocks of running requests for a step, or return the fault of one that cannot be
        taken; none was then. Call count_appended() before. num_computed: tokens of each slot whose
        steps were sent."""
        blocks = self._read_groups((output.new_block_ids, *output.more_new_block_ids), slot_of)
        if isinstance(blocks, StepFault):
            return blocks
        joined = _joined(blocks)
        if self._holders is not None:
            self._holders.leave_behind(num_computed)
            fault = self._written_fault(self._holders, joined, slot_of)
            if fault is not None:
                return fault
            self._holders.take(joined.listed)
        return joined

    def give_back(self, blocks: GivenBlocks) -> None:
        """Undo take or take_free: the step is not sent."""
        if self._holders is not None:
            self._holders.give_back(blocks.listed)

    def append_later(self, blocks: GivenBlocks) -> None:
        """Account for taken blocks: later, for many steps at once."""
        self._appended_rows += blocks.rows
        self._appended_ids += blocks.ids
        if len(self._appended_rows) > MAX_UNCOUNTED_BYTES:
            self.count_appended()

    def count_appended(self) -> None:
        """Account for all blocks that wait for it."""
        if self._appended_rows:
            rows, ids = bytes(self._appended_rows), bytes(self._appended_ids)
            self._append(rows, rows, ids)
            self._appended_rows.clear()
            self._appended_ids.clear()

    def check(
        self,
        output: SchedulerOutput,
        new: Sequence[NewRequest],
        ended: Sequence[int],
        slot_of: Mapping[str, int],
        slot_of_new: Mapping[str, int],
        num_computed: Int32s,
    ) -> CheckedBlocks | StepFault:
        """Check the blocks of a step, those of its new requests included; take none. Return the
        fault of one that cannot be used as the step says. Call count_appended() before.

        new: the step's new requests. ended: slots of the requests that end with it. slot_of: of the
        requests before it.
        """
        by_group = self._read_step(output, new, slot_of, slot_of_new)
        if isinstance(by_group, StepFault):
            return by_group
        filled = tuple(each for values in output.extensions for each in values.filled_blocks)
        if filled:
            fault = self._filled_fault(filled, ended, num_computed)
            if fault is not None:
                return fault
        given = self._check_given(by_group, new, ended, slot_of, slot_of_new, num_computed, filled)
        return given if isinstance(given, StepFault) else given._replace(filled=filled)

    def _check_given(
        self,
        by_group: Sequence[GivenBlocks],
        new: Sequence[NewRequest],
        ended: Sequence[int],
        slot_of: Mapping[str, int],
        slot_of_new: Mapping[str, int],
        num_computed: Int32s,
        filled: Collection[int],
    ) -> CheckedBlocks | StepFault:
        """Check the blocks that requests are given. filled: those that the step fills first."""
        if not by_group:
            return NONE_CHECKED
        blocks = _joined(by_group)
        if self._holders is None:
            return CheckedBlocks(blocks, blocks, ())
        checked = CheckedBlocks(blocks, blocks, ())
        if any(request.num_computed_tokens for request in new):
            checked = CheckedBlocks(blocks, *self._split(by_group, new))
        self._holders.leave_behind(num_computed)
        with self._holders.without(ended) if ended else nullcontext():
            fault = self._prefixes_fault(self._holders, new, checked) if checked.prefixes else None
            if fault is None:
                fault = self._written_fault(self._holders, checked.written, slot_of, slot_of_new)
        if fault is None and checked.prefixes:
            fault = self._contents_fault(self._holders, new, slot_of, filled)
            fault = fault or self._borders_fault(new)
        return fault or checked

    def _filled_fault(
        self, filled: Sequence[int], ended: Sequence[int], num_computed: Int32s
    ) -> StepFault | None:
        """Check that no request which goes on has a block that the step fills, and that it fills
        none twice."""
        if self._holders is None:
            return None
        self._holders.leave_behind(num_computed)
        with self._holders.without(ended) if ended else nullcontext():
            held = self._holders.first_held(filled)
        if held is not None:
            fix = "fill blocks that exist and that no request has"
            return StepFault("a request has a block that is to be filled", "extensions", held, fix)
        if len({*filled}) < len(filled):
            twice, _ = Counter(filled).most_common(1)[0]
            fix = "fill it once in a step"
            return StepFault("a block is to be filled twice", "extensions", twice, fix)
        return None

    def apply(self, checked: CheckedBlocks, slots: Sequence[int]) -> None:
        """Account for the blocks of a checked step, which begins requests in these free slots."""
        if checked.filled and self._holders is not None:
            self._holders.fill(checked.filled)
        if slots:
            self._planned = frozenset()
            self._lengths[:, slots] = 0
            if self._holders is not None:
                self._holders.admit(self._holders.rows_of(slots), checked.prefixes)
        if checked.given.rows:
            self._append(checked.given.rows, checked.written.rows, checked.written.ids)

    def release(self, slots: Sequence[int]) -> None:
        """End the requests in these slots. Call count_appended() before."""
        if self._holders is not None:
            self._holders.release(slots)

    def lose_contents(self) -> None:
        """Record that the workers' KV cache has lost its contents: requests cannot begin with
        blocks that were filled before."""
        if self._holders is not None:
            self._holders.lose_contents()

    def leave_weights(self, planned: frozenset[str]) -> None:
        """See SlotTable.leave_weights. planned: ids of the new requests of the planned step."""
        self._planned = planned
        if self._holders is not None:
            self._holders.leave_weights()

    def share_recomputed(self) -> None:
        """See SlotTable.share_recomputed. Call count_appended() before."""
        if self._holders is not None:
            self._holders.share_recomputed()

    def with_contents(self, blocks: CachedBlocks, num_computed: Int32s) -> CachedBlocks:
        """Return those of these blocks that are full, as far as is known here. Call
        count_appended() before.

        Raises:
            ClientConfigError: a block does not exist.
        """
        if self._holders is None:
            return blocks
        try:
            return blocks.only(self._holders.are_filled(blocks.block_ids, num_computed))
        except BlockTaken as taken:
            block_id = int(blocks.block_ids[taken.index])
            fix = f"use 1 to {self._limits.num_blocks - 1}"
            raise config_error("block_ids", block_id, "there is no such block", fix) from None

    def _read_step(
        self,
        output: SchedulerOutput,
        new: Sequence[NewRequest],
        slot_of: Mapping[str, int],
        slot_of_new: Mapping[str, int],
    ) -> list[GivenBlocks] | StepFault:
        """Return all blocks of a step, group by group, not checked yet; empty if there are none."""
        given: list[dict[str, Sequence[int]]] = [{each.req_id: each.block_ids for each in new}]
        for group in range(1, len(self._groups)):
            given.append({each.req_id: _of_group(each, group) for each in new})
        appended = (output.new_block_ids, *output.more_new_block_ids)
        for own, added in zip(given, appended, strict=False):
            own.update(added)
        if not any(given):
            return []
        return self._read_groups(given, slot_of, slot_of_new)

    def _read_groups(
        self,
        given: Sequence[Mapping[str, Sequence[int]]],
        slot_of: Mapping[str, int],
        slot_of_new: Mapping[str, int] = _NONE_NEW,
    ) -> list[GivenBlocks] | StepFault:
        """Return blocks for requests, group by group, as columns, not checked yet."""
        columns = []
        for group, own in enumerate(given):
            blocks = self._read_group(group, own, slot_of, slot_of_new) if own else NO_BLOCKS
            if isinstance(blocks, StepFault):
                return blocks
            columns.append(blocks)
        return columns

    def _read_group(
        self,
        group: int,
        given: Mapping[str, Sequence[int]],
        slot_of: Mapping[str, int],
        slot_of_new: Mapping[str, int],
    ) -> GivenBlocks | StepFault:
        read = _read_blocks(given)
        if isinstance(read, StepFault):
            return read
        listed, raw, lengths = read
        try:
            if slot_of_new:
                own = [slot_of_new[n] if n in slot_of_new else slot_of[n] for n in given]
                slots = array("H", own).tobytes()
            else:
                slots = array("H", map(slot_of.__getitem__, given)).tobytes()
        except KeyError as error:
            return not_running(error.args[0], given[error.args[0]])
        if lengths:
            slots = np.repeat(np.frombuffer(slots, _UINT16), lengths).tobytes()
        return self._in_group(group, slots, raw.tobytes(), listed)

    def _in_group(self, group: int, slots: bytes, ids: bytes, listed: Sequence[int]) -> GivenBlocks:
        if self._row_code == "H":
            return GivenBlocks(slots, b"", slots, ids, listed)
        rows = np.frombuffer(slots, _UINT16).astype("<u4") + group * self._num_slots
        return GivenBlocks(slots, bytes((group,)) * len(listed), rows.tobytes(), ids, listed)

    def _split(
        self, by_group: Sequence[GivenBlocks], new: Sequence[NewRequest]
    ) -> tuple[GivenBlocks, Sequence[Int32s]]:
        """Return the blocks to which the step's requests write, and for each row of the new ones
        those that it only reads."""
        split = [self._split_group(group, own, new) for group, own in enumerate(by_group)]
        # A slot's rows come one after the other, as BlockHolders.rows_of has them.
        prefixes = list(chain.from_iterable(zip(*(own for _, own in split), strict=True)))
        return _joined([own for own, _ in split]), prefixes

    def _split_group(
        self, group: int, blocks: GivenBlocks, new: Sequence[NewRequest]
    ) -> tuple[GivenBlocks, list[Int32s]]:
        """Return all blocks of a group to which the step's requests write, and those that each new
        request only reads: those full of computed tokens."""
        ids = np.frombuffer(blocks.ids, "<i4")
        is_written = np.ones(ids.size, np.bool_)
        prefixes, first = [], 0
        for request in new:
            num_full = request.num_computed_tokens // self._groups[group].block_size
            end = first + len(_of_group(request, group))
            prefix = slice(first, min(end, first + num_full))
            prefixes.append(ids[prefix])
            is_written[prefix] = False
            first = end
        slots, ids = np.frombuffer(blocks.slots, _UINT16)[is_written], ids[is_written]
        return self._in_group(group, slots.tobytes(), ids.tobytes(), ids.tolist()), prefixes

    def _prefixes_fault(
        self, holders: BlockHolders, new: Sequence[NewRequest], checked: CheckedBlocks
    ) -> StepFault | None:
        """Check the blocks that new requests only read."""
        filled, count = frozenset(checked.written.listed), len(self._groups)
        for index, request in enumerate(new):
            own = checked.prefixes[count * index : count * (index + 1)]
            if any(prefix.size for prefix in own):
                fault = self._prefix_fault(holders, request, own, filled)
                if fault is not None:
                    return fault
        return None

    def _prefix_fault(
        self,
        holders: BlockHolders,
        request: NewRequest,
        prefixes: Sequence[Int32s],
        filled: frozenset[int],
    ) -> StepFault | None:
        """Check the blocks of each group that a request only reads; `filled` are those that this
        step writes to."""
        for group, prefix in zip(self._groups, prefixes, strict=True):
            try:
                holders.check_prefix(prefix, blocks_behind(request.num_computed_tokens, group))
            except BlockTaken as taken:
                return self._outside(request.req_id, int(prefix[taken.index]))
        listed = [i for prefix in prefixes for i in prefix.tolist() if i != NULL_BLOCK]
        own = frozenset(listed)
        if len(own) < len(listed):
            fix = "name each block once: they hold different tokens"
            return wrong_block(request.req_id, listed, fix)
        both = own & filled
        if both:
            fix = "begin with this block in a later step: this step is the one that fills it"
            return wrong_block(request.req_id, min(both), fix)
        return None

    def _contents_fault(
        self,
        holders: BlockHolders,
        new: Sequence[NewRequest],
        slot_of: Mapping[str, int],
        filled: Collection[int],
    ) -> StepFault | None:
        """Check that the blocks of new requests' computed tokens have contents. slot_of: of the
        requests before the step, which may begin again with their own blocks."""
        come = {*filled}
        for request, (number, group) in product(new, enumerate(self._groups)):
            if request.req_id in self._planned:
                continue
            num_filled = -(-request.num_computed_tokens // group.block_size)
            slot = slot_of.get(request.req_id)
            row = None if slot is None else number * self._num_slots + slot
            own = _of_group(request, number)[:num_filled]
            if come:
                own = [block_id for block_id in own if block_id not in come]
            emptied = holders.first_emptied(own, row)
            if emptied is not None:
                fix = "begin at num_computed_tokens = 0: the KV cache has lost its contents since"
                return wrong_block(request.req_id, emptied, fix)
        return None

    def _borders_fault(self, new: Sequence[NewRequest]) -> StepFault | None:
        """Check that new requests of a model with checkpoints begin at one."""
        every = self._limits.checkpoint_blocks
        for request in new if every else ():
            num_blocks = request.num_computed_tokens // self._groups[0].block_size
            for block_id in request.block_ids[:num_blocks][-1:]:
                if not has_checkpoint(int(block_id), every):
                    fix = (
                        f"begin at a block whose id is a multiple of {every}, or at 0: the others "
                    )
                    fix += "have no checkpoint of the state"
                    return wrong_block(request.req_id, block_id, fix)
        return None

    def _written_fault(
        self, holders: BlockHolders, blocks: GivenBlocks, *slots_of: Mapping[str, int]
    ) -> StepFault | None:
        """Check that the blocks exist, and that no other request has them. slots_of: the slots of
        running requests, then of new ones."""
        try:
            holders.check(blocks.rows, blocks.listed)
        except BlockTaken as taken:
            everybody = chain.from_iterable(slot_of.items() for slot_of in slots_of)
            names = {slot: req_id for req_id, slot in everybody}
            slot = int(np.frombuffer(blocks.slots, _UINT16)[taken.index])
            block_id, who = blocks.listed[taken.index], "another request reads it"
            if not 1 <= block_id < self._limits.num_blocks:
                return self._outside(names[slot], block_id)
            if taken.row is not None:
                who = f"request {names[taken.row % self._num_slots]!r} writes to it"
            fix = f"give a block that no other request uses: {who} until it finishes"
            return wrong_block(names[slot], block_id, fix)
        return None

    def _outside(self, req_id: str, block_id: object) -> StepFault:
        most = self._limits.num_blocks - 1
        return wrong_block(req_id, block_id, f"give block ids from 1 to {most}")

    def _append(self, rows: bytes, written_rows: bytes, written_ids: bytes) -> None:
        """Account for blocks of these rows, and for those of them that are written to."""
        numbers = np.frombuffer(rows, self._row_code)
        counts = np.bincount(numbers, minlength=self._lengths.size).astype(np.int32)
        self._lengths += counts.reshape(self._lengths.shape)
        if self._holders is not None:
            self._holders.hold(written_rows, written_ids)


def _of_group(request: NewRequest, group: int) -> Sequence[int]:
    """Return a new request's blocks of a group; it may have none of further groups."""
    by_group = request.blocks_by_group
    return by_group[group] if group < len(by_group) else ()


def _joined(by_group: Sequence[GivenBlocks]) -> GivenBlocks:
    """Return the blocks of all groups."""
    if len(by_group) == 1:
        return by_group[0]
    slots, groups, rows, ids, listed = zip(*map(astuple, by_group), strict=True)
    everything = list(chain.from_iterable(listed))
    return GivenBlocks(b"".join(slots), b"".join(groups), b"".join(rows), b"".join(ids), everything)
