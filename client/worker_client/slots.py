"""Translates between request ids and slots: from SchedulerOutput to rpc_schema.step.ExecuteModel,
and back from ModelRunnerOutput. Mirrors the counts of the workers' rows, so that it can send a step
in full.

A pure decode step with an unchanged set costs nothing per request: bitmap, slots and the ids of the
reply are kept in SteadyRequests, whose rows' counts are brought up to date only when they are read.
"""

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Literal, NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import astuple
from numpy.typing import NDArray

from rpc_schema.codec import Frame, encode_step
from rpc_schema.kv_cache import NULL_BLOCK, blocks_behind
from rpc_schema.pooling import MAX_POOLED_BYTES
from rpc_schema.step import ExecuteModel, ModelRunnerOutput, NewRequestData
from worker_client.block_holders import BlockHolders, BlockTaken
from worker_client.cached_blocks import CachedBlocks
from worker_client.encoded_step import (
    NONE_DEFERRED,
    EncodedStep,
    SteadyRequests,
    decode_reply,
    pack_bits,
)
from worker_client.errors import InvalidSchedulerOutput, config_error
from worker_client.masks import ALL_AT_ONCE, Masks, StepSampling, encoded, sampling_of
from worker_client.parts.registry import NONE_POOLED, Extensions, pools, reports
from worker_client.scheduler_output import NewRequest, SchedulerOutput, StepResult
from worker_client.step_checks import (
    BLOCK_KINDS,
    WIRE_LIMITS,
    WRONG_TYPE,
    GroupLimits,
    check_admissions,
    check_more_blocks,
    check_shape,
    encode_checked,
    named_ids,
    not_running,
    output_bytes,
    read_blocks,
    read_counts,
    read_tokens,
    repeated,
    unknown_request,
    wrong_block,
    wrong_count,
    wrong_ids,
)
from worker_client.step_checks import MAX_ADMITTED_TOKENS as MAX_ADMITTED_TOKENS

MAX_STEADY = 16
"""Number of steady sets that are kept: more than a pipeline has micro-batches."""

MAX_UNCOUNTED_BYTES = 1 << 16
"""Bytes of appended blocks, two each, that are collected before they are counted at once with
numpy."""

Int32s = NDArray[np.int32]
_NO_PREFIXES: Sequence[Int32s] = ()
_NONE_NEW: Mapping[str, int] = {}
_UINT16 = np.dtype("<u2")


class _Blocks(Struct, frozen=True, gc=False):
    """Blocks that a step gives to requests."""

    slots: bytes
    """A column of uint16: the request that gets each block."""
    groups: bytes
    """A column of uint8: the KV group of each block; empty: the first group."""
    rows: bytes
    """Request and group together: a column of rows (block_holders.py)."""
    ids: bytes
    """A column of int32."""
    listed: Sequence[int]


_NO_BLOCKS = _Blocks(b"", b"", b"", b"", ())


class _Rows(NamedTuple):
    """Scheduled rows, slots ascending, with their counts after the step."""

    slots: Int32s
    num_scheduled: Int32s
    num_computed: Int32s
    num_tokens: Int32s
    samples: NDArray[np.bool_]
    sampling_ids: Sequence[str]
    """Requests of those that sample."""
    pooled: Mapping[int, str]
    """Requests that end with an output of the step, by slot."""


class _Change(NamedTuple):
    """Changes that a checked step makes to the table."""

    ended_ids: Sequence[str]
    ended: Sequence[int]
    """Slots of the new requests, ascending."""
    slot_of_new: Mapping[str, int]
    admitted: Sequence[NewRequest]
    prefixes: Sequence[Int32s]
    """For each row of each new request, the blocks that it only reads; empty if there are none, or
    if blocks are not checked."""
    blocks: _Blocks
    written: _Blocks
    """The blocks among them that the step's requests write to."""
    rows: _Rows
    total: int
    """Scheduled tokens, decodes included."""
    sampling: StepSampling


class SlotTable:
    """Maps requests to slots, and tracks the progress of each row. Belongs to one thread. Has
    `max_num_seqs` slots; the lowest free one is assigned first."""

    def __init__(self, max_num_seqs: int, limits: GroupLimits = WIRE_LIMITS) -> None:
        """limits: the group's limits, if they are lower than a message's."""
        self.capacity = max_num_seqs
        self._limits = limits
        groups = limits.block_groups
        self._holders: BlockHolders | None = None
        if limits.num_blocks:
            self._holders = BlockHolders(max_num_seqs, limits.num_blocks, groups)
        self._slot_of: dict[str, int] = {}
        self._is_free = np.ones(max_num_seqs, np.bool_)
        self._num_computed = np.zeros(max_num_seqs, np.int32)
        self._num_tokens = np.zeros(max_num_seqs, np.int32)
        self._output_bytes = np.zeros(max_num_seqs, np.int32)
        """Bytes of each slot's output; 0 unless its request pools."""
        self._num_blocks = np.zeros((len(groups), max_num_seqs), np.int32)
        """For each group and slot, entries of its block table, including those behind a window."""
        self._appended_rows, self._appended_ids = bytearray(), bytearray()
        """Rows and ids (int32) of blocks that were taken, but are not counted and held yet."""
        self._reporting: Mapping[str, Extensions] = {}
        """Extensions of the requests whose replies contain more than tokens. Replaced, never
        changed: steps in flight share it."""
        self._steady: list[SteadyRequests] = []
        """The steady sets of the last values of decode_req_ids."""
        self._must_resync = False
        self._admitted_at = np.zeros(max_num_seqs, np.int64)
        """For each slot, the seq of the step that admitted its request."""
        self._refused: dict[int, int] = {}
        """By slot, the number of refused tokens that the workers' counts still include."""
        self._unsampled: set[int] = set()
        """Slots whose last token waits for sample_tokens."""
        self._held: dict[int, int] = {}
        """By a step's seq, its deferred requests that were not sampled yet, ended or not: the
        workers hold a copy of the logits of each."""

    @property
    def _row_code(self) -> Literal["H", "I"]:
        return "H" if len(self._limits.block_groups) == 1 else "I"

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._slot_of

    @property
    def req_ids(self) -> list[str]:
        """Ids of the requests that have a slot."""
        return list(self._slot_of)

    def slot_of(self, req_id: str) -> int:
        """Return the slot of a request; KeyError if it has none."""
        return self._slot_of[req_id]

    def encode(self, output: SchedulerOutput, *, epoch: int, link: int, seq: int) -> EncodedStep:
        """Encode a step and account for it as applied. The table changes only after the step is
        checked and encoded, when nothing can fail any more.

        Raises:
            InvalidSchedulerOutput: the output breaks a rule; nothing has changed.
        """
        ids = epoch, link, seq
        only_decodes = self._only_decodes(output)
        for steady in self._steady:
            if steady.req_ids is output.decode_req_ids:
                break
        else:
            steady = None
        if steady is None or not only_decodes:
            check_shape(output)
            self._flush()
            steady = steady or self._make_steady(output.decode_req_ids)
        if steady is not None and only_decodes:
            return self._encode_steady(output, steady, ids)
        counts = output.num_scheduled_tokens
        if steady is None and output.decode_req_ids:
            counts = {**dict.fromkeys(output.decode_req_ids, 1), **counts}
            if len(counts) != len(output.decode_req_ids) + len(output.num_scheduled_tokens):
                both = chain(output.decode_req_ids, output.num_scheduled_tokens)
                message = "it is in decode_req_ids twice, or in num_scheduled_tokens too"
                raise wrong_ids(message, "decode_req_ids", repeated(both))
        return self._encode_changed(output, steady, counts, ids)

    def _only_decodes(self, output: SchedulerOutput) -> bool:
        """Return True if a step only decodes and appends blocks."""
        blocks: object = output.new_block_ids
        if type(blocks) is not dict and not isinstance(blocks, Mapping):
            return False
        if type(output.more_new_block_ids) is not tuple or output.more_new_block_ids:
            check_more_blocks(output.more_new_block_ids, len(self._limits.block_groups))
        try:
            return not (
                self._must_resync
                or self._unsampled
                or output.deferred_req_ids
                or output.masks
                or output.num_scheduled_tokens
                or output.finished_req_ids
                or output.preempted_req_ids
                or output.scheduled_new_reqs
            )
        except ValueError:  # an array in place of a sequence
            return False

    def encode_later(
        self, step: EncodedStep, masks: Masks, req_ids: Collection[str] | None
    ) -> tuple[dict[int, str], StepSampling]:
        """Return the deferred requests of `step` that are to be sampled now, by slot, and what a
        SampleTokens says of them; masks of requests that have left their slots since are left out.
        req_ids: some of those that are left, None for all. None are left once rows were lost.

        Raises:
            InvalidSchedulerOutput: the step has not deferred a request, or it was sampled, or masks
            differ in shape.
        """
        chosen = {} if self._must_resync else step.left  # then its rows are gone
        if req_ids is not None:
            chosen = {slot: req_id for slot, req_id in chosen.items() if req_id in req_ids}
        slot_of = {req_id: slot for slot, req_id in chosen.items()}
        for field, names in (("masks", masks.keys()), ("req_ids", req_ids or ())):
            wrong = [req_id for req_id in names if req_id not in slot_of]
            if wrong:
                raise wrong_ids(f"step {step.seq} has not deferred it", field, wrong)
        staying = {name: slot for name, slot in slot_of.items() if self._slot_of.get(name) == slot}
        return chosen, StepSampling(NONE_DEFERRED, *encoded(masks, staying))

    def take_later(self, step: EncodedStep, chosen: Iterable[int]) -> None:
        """Note that deferred requests of a step, given by slot, were sampled."""
        for slot in list(chosen):
            if self._slot_of.get(step.left.pop(slot)) == slot:
                self._unsampled.discard(slot)
        if step.left:
            self._held[step.seq] = len(step.left)
        else:
            self._held.pop(step.seq, None)

    @staticmethod
    def decode(step: EncodedStep, reply: ModelRunnerOutput, arrays: Sequence[Frame]) -> StepResult:
        """Turn a reply to `step` into request ids. Raises as decode_reply does."""
        return decode_reply(step, reply, arrays)

    def fail(self, outputs: Iterable[SchedulerOutput]) -> frozenset[str]:
        """Undo failed steps: forget every request that took part or was to end in them, or whose
        last token waits to be sampled, and send the next step in full.

        Return the ids of those that took part.
        """
        self._flush()
        lost: set[str] = set()
        for output in outputs:
            lost.update(output.decode_req_ids, output.num_scheduled_tokens, output.new_block_ids)
            lost.update(*output.more_new_block_ids)
            lost.update(new.req_id for new in output.scheduled_new_reqs)
            self._release(self._known(output.finished_req_ids, output.preempted_req_ids))
        lost.update(name for name, slot in self._slot_of.items() if slot in self._unsampled)
        self._release(self._known(lost))
        self._must_resync = True
        return frozenset(lost)

    def drop_all(self) -> frozenset[str]:
        """Forget every request; the next step is sent in full, with no rows. Return their ids."""
        self._flush()
        dropped = frozenset(self._slot_of)
        self._release(list(dropped))
        self._must_resync = True
        return dropped

    def lose_contents(self) -> None:
        """Record that the workers' KV cache has lost its contents: requests cannot begin with
        blocks that were filled before."""
        if self._holders is not None:
            self._holders.lose_contents()

    def with_contents(self, blocks: CachedBlocks) -> CachedBlocks:
        """Return those of these blocks that are full, as far as the table knows: the cache may have
        lost their contents, or a request that still has to fill them.

        Raises:
            ClientConfigError: a block does not exist.
        """
        if self._holders is None:
            return blocks
        self._flush()
        try:
            return blocks.only(self._holders.are_filled(blocks.block_ids, self._num_computed))
        except BlockTaken as taken:
            block_id = int(blocks.block_ids[taken.index])
            fix = f"use 1 to {self._limits.num_blocks - 1}"
            raise config_error("block_ids", block_id, "there is no such block", fix) from None

    def withdraw(self, output: SchedulerOutput) -> frozenset[str]:
        """Drop every request, because a step was not sent. Return their ids, and those in the step,
        whose fields may have any type."""
        return self.drop_all() | named_ids(output)

    def require_resync(self) -> None:
        """Send the next step in full."""
        self._must_resync = True

    def _make_steady(self, req_ids: tuple[str, ...]) -> SteadyRequests | None:
        """Return those of decode_req_ids; None where not all of them are at their last token and
        sample."""
        if not req_ids:
            return None
        slots = self._slots(req_ids)
        if np.any(self._num_computed[slots] + 1 != self._num_tokens[slots]):
            return None
        if self._output_bytes[slots].any():
            return None
        steady = SteadyRequests(req_ids, slots, self.capacity)
        if int(np.count_nonzero(steady.bits)) != len(req_ids):
            twice = repeated(req_ids)
            raise wrong_ids("it is in decode_req_ids twice", "decode_req_ids", twice)
        self._check_total(len(req_ids))
        if len(self._steady) == MAX_STEADY:
            self._steady.clear()
        self._steady.append(steady)
        return steady

    def _encode_steady(
        self, output: SchedulerOutput, steady: SteadyRequests, ids: tuple[int, int, int]
    ) -> EncodedStep:
        epoch, link, seq = ids
        blocks = self._take_blocks(output)
        corrections = self._corrections(()) if self._refused else b""
        message = ExecuteModel(
            epoch=epoch,
            link=link,
            seq=seq,
            total_num_scheduled_tokens=len(steady.req_ids),
            scheduled=steady.bitmap,
            new_block_slots=blocks.slots,
            new_block_ids=blocks.ids,
            new_block_groups=blocks.groups,
            corrections=corrections,
        )
        try:
            frames = encode_step(message)
        except BaseException:
            if self._holders is not None:
                self._holders.give_back(array("i", blocks.ids))
            raise
        steady.num_pending += 1
        if corrections:
            self._lower()
        if blocks.slots:
            self._appended_rows += blocks.rows
            self._appended_ids += blocks.ids
            if len(self._appended_rows) > MAX_UNCOUNTED_BYTES:
                self._count_appended()
        return EncodedStep(seq, output, frames, steady, (), (), self._reporting)

    def _take_blocks(self, output: SchedulerOutput) -> _Blocks:
        """Check and take the blocks of running requests. Nearly always each request gets one block,
        and all of them are free: the fast path."""
        if not output.more_new_block_ids:
            if not output.new_block_ids:
                return _NO_BLOCKS
            return self._take_fast(output.new_block_ids) or self._take_judged(output)
        taken: list[_Blocks] = []
        for group, given in enumerate((output.new_block_ids, *output.more_new_block_ids)):
            blocks = self._take_fast(given, group)
            if blocks is None:
                if self._holders is not None:
                    self._holders.give_back([i for earlier in taken for i in earlier.listed])
                return self._take_judged(output)
            taken.append(blocks)
        return _joined(taken)

    def _take_fast(self, given: Mapping[str, Sequence[int]], group: int = 0) -> _Blocks | None:
        """Take blocks of one group, one each, if all of them are free."""
        holders = self._holders
        if holders is None or not BLOCK_KINDS.issuperset(map(type, given.values())):
            return None
        try:
            listed = [block_id for (block_id,) in given.values()]
            slots = array("H", map(self._slot_of.__getitem__, given)).tobytes()
            ids = array("I", listed).tobytes()  # none is negative
            if holders.take(listed):
                return self._in_group(group, slots, ids, listed)
        except (*WRONG_TYPE, LookupError):  # what is wrong is found by _take_judged
            pass
        return None

    def _in_group(self, group: int, slots: bytes, ids: bytes, listed: Sequence[int]) -> _Blocks:
        if self._row_code == "H":
            return _Blocks(slots, b"", slots, ids, listed)
        rows = np.frombuffer(slots, _UINT16).astype("<u4") + group * self.capacity
        return _Blocks(slots, bytes((group,)) * len(listed), rows.tobytes(), ids, listed)

    def _take_judged(self, output: SchedulerOutput) -> _Blocks:
        """Take blocks as _take_blocks does, one by one; raise if one cannot be taken."""
        blocks = self._read_blocks((output.new_block_ids, *output.more_new_block_ids))
        if self._holders is not None:
            self._flush()
            self._holders.leave_behind(self._num_computed)
            self._check_written(self._holders, blocks)
            self._holders.take(blocks.listed)
        return blocks

    def _encode_changed(
        self,
        output: SchedulerOutput,
        steady: SteadyRequests | None,
        counts: Mapping[str, int],
        ids: tuple[int, int, int],
    ) -> EncodedStep:
        change = self._judge(output, steady, counts)
        resync = self._resync_rows(change.ended) if self._must_resync else None
        frames = self._encode_change(output, steady, change, resync, ids)
        self._apply(change, ids[2])
        self._must_resync = False
        if steady is not None:
            steady.num_pending += 1
        rows = change.rows
        return EncodedStep(
            ids[2],
            output,
            frames,
            steady,
            rows.slots[rows.samples].tolist(),
            rows.sampling_ids,
            self._reporting,
            pooled=rows.pooled,
            resync=resync is not None,
            deferred=change.sampling.deferred,
        )

    def _judge(
        self, output: SchedulerOutput, steady: SteadyRequests | None, counts: Mapping[str, int]
    ) -> _Change:
        """Check a whole step, and return its changes. Nothing changes yet."""
        new = tuple(output.scheduled_new_reqs)
        ended_ids = self._known(output.finished_req_ids, output.preempted_req_ids)
        ended = sorted(self._slot_of[req_id] for req_id in ended_ids)
        new_slots = self._judge_admissions(new, ended_ids, ended)
        slot_of_new = dict(zip((request.req_id for request in new), new_slots, strict=True))
        gone = set(ended_ids)
        self._check_gone(output, gone.difference(slot_of_new), ended, steady, counts)
        rows = self._judge_rows(counts, new, slot_of_new)
        num_decodes = 0
        if steady is not None:
            num_decodes = len(steady.req_ids)
            if steady.bits[rows.slots].any():
                both = counts.keys() & set(steady.req_ids)
                message = "it is in decode_req_ids and in num_scheduled_tokens"
                raise wrong_ids(message, "decode_req_ids", both)
        total = num_decodes + int(rows.num_scheduled.sum())
        self._check_total(total)
        appended = (output.new_block_ids, *output.more_new_block_ids)
        for given in appended:
            self._check_standing(given, gone, slot_of_new)
        sampling = ALL_AT_ONCE
        if self._unsampled:
            self._check_sampled(steady, rows, ended)
        if output.deferred_req_ids or output.masks:
            slot_of = dict(zip(rows.sampling_ids, rows.slots[rows.samples].tolist(), strict=True))
            if steady is not None:
                slot_of |= zip(steady.sorted_req_ids, steady.slots.tolist(), strict=True)
            sampling = sampling_of(output, slot_of)
            if sampling.deferred:
                self._check_held(len(slot_of))
        judged = self._judge_blocks(appended, new, ended, slot_of_new)
        blocks, written, prefixes = judged
        return _Change(
            ended_ids, ended, slot_of_new, new, prefixes, blocks, written, rows, total, sampling
        )

    def _check_held(self, num_sampling: int) -> None:
        """Check the requests that sample in a step that defers, and those that earlier steps have
        deferred: workers have memory for one row of logits per slot."""
        held = 0 if self._must_resync else sum(self._held.values())
        if held + num_sampling > self.capacity:
            raise InvalidSchedulerOutput(
                f"{num_sampling} requests sample in a step that defers some, and {held} of earlier "
                f"steps wait for their sampling: more than max_num_seqs = {self.capacity} together",
                field="deferred_req_ids",
                value=f"{num_sampling} requests",
                fix=f"call WorkerGroup.sample_tokens for step {min(self._held)} first, even if its "
                "requests have finished",
            )

    def _check_sampled(
        self, steady: SteadyRequests | None, rows: _Rows, ended: Sequence[int]
    ) -> None:
        slots = rows.slots.tolist() + ([] if steady is None else steady.slots.tolist())
        waiting = self._unsampled.intersection(slots).difference(ended)
        if waiting:
            names = [req_id for req_id, slot in self._slot_of.items() if slot in waiting]
            message = "its last token waits for WorkerGroup.sample_tokens"
            raise wrong_ids(message, "num_scheduled_tokens, decode_req_ids", names)

    def _judge_admissions(
        self, new: Sequence[NewRequest], ended_ids: Sequence[str], ended: Sequence[int]
    ) -> list[int]:
        """Check new requests; return their slots, the lowest free ones."""
        if not new:
            return []
        check_admissions(new, self._limits)
        names = {request.req_id for request in new}
        if len(names) < len(new):
            twice = repeated(request.req_id for request in new)
            raise wrong_ids("it is new twice in one step", "scheduled_new_reqs", twice)
        gone = set(ended_ids)
        taken = [name for name in names if name in self._slot_of and name not in gone]
        if taken:
            raise wrong_ids("it is new, but has a slot", "scheduled_new_reqs", taken)
        is_free = self._is_free.copy()
        is_free[ended] = True
        slots: list[int] = np.flatnonzero(is_free)[: len(new)].tolist()
        if len(slots) < len(new):
            raise InvalidSchedulerOutput(
                f"only {len(slots)} of max_num_seqs = {self.capacity} slots are free",
                field="scheduled_new_reqs",
                value=f"{len(new)} requests",
                fix="admit some later",
            )
        return slots

    def _check_gone(
        self,
        output: SchedulerOutput,
        gone: set[str],
        ended: Sequence[int],
        steady: SteadyRequests | None,
        counts: Mapping[str, int],
    ) -> None:
        decodes_on = steady is not None and steady.bits[ended].any()
        if decodes_on or any(req_id in counts for req_id in gone):
            scheduled = {*counts, *output.decode_req_ids}
            message = "it is finished and scheduled in the same step"
            again = [name for name in output.decode_req_ids if self._slot_of.get(name) in ended]
            raise wrong_ids(message, "finished_req_ids", gone & scheduled or again)

    def _judge_rows(
        self, counts: Mapping[str, int], new: Sequence[NewRequest], slot_of_new: Mapping[str, int]
    ) -> _Rows:
        """Check the scheduled tokens of requests; return their rows' counts after the step."""
        req_ids = list(counts)
        num_scheduled = read_counts(counts)
        slots = self._slots(req_ids, slot_of_new)
        num_computed, num_tokens = self._num_computed[slots], self._num_tokens[slots]
        if new:
            place = {req_id: index for index, req_id in enumerate(req_ids)}
            begun = [request for request in new if request.req_id in place]
            at = [place[request.req_id] for request in begun]
            num_computed[at] = [request.num_computed_tokens for request in begun]
            num_tokens[at] = [len(request.token_ids) for request in begun]
        left = num_tokens - num_computed
        for at in np.flatnonzero((num_scheduled < 1) | (num_scheduled > left))[:1].tolist():
            fix = f"give 1 to {left[at]}: it has {left[at]} tokens left to compute"
            raise wrong_count(req_ids[at], int(num_scheduled[at]), fix)
        order = np.argsort(slots)
        scheduled = num_scheduled[order].astype(np.int32)
        num_computed, num_tokens = num_computed[order] + scheduled, num_tokens[order]
        samples: NDArray[np.bool_] = num_computed == num_tokens
        pooled = NONE_POOLED
        if self._output_bytes.any() or any(r.extensions and pools(r.extensions) for r in new):
            sizes = self._judge_outputs(slots[order], new, slot_of_new, scheduled, samples)
            ends = samples & (sizes > 0)
            samples &= sizes == 0
            names = [req_ids[at] for at in order[ends].tolist()]
            pooled = dict(zip(slots[order][ends].tolist(), names, strict=True))
        names = [req_ids[at] for at in order[samples].tolist()]
        num_tokens[samples] += 1
        return _Rows(slots[order], scheduled, num_computed, num_tokens, samples, names, pooled)

    def _judge_outputs(
        self,
        slots: Int32s,
        new: Sequence[NewRequest],
        slot_of_new: Mapping[str, int],
        scheduled: Int32s,
        is_last: NDArray[np.bool_],
    ) -> Int32s:
        """Return the bytes of each row's output, 0 where its request samples; check those of the
        rows whose last token the step computes."""
        by_slot = self._output_bytes.copy()
        for request in new:
            by_slot[slot_of_new[request.req_id]] = output_bytes(request, self._limits)
        sizes: Int32s = by_slot[slots]
        support = self._limits.pooling
        if support is not None and support.whole_prompts:
            for at in np.flatnonzero((sizes > 0) & ~is_last)[:1].tolist():
                name = next((r for r, s in slot_of_new.items() if s == slots[at]), "")
                fix = "give it all its tokens: the model computes a prompt in one step"
                raise wrong_count(name, int(scheduled[at]), fix)
        total = int(sizes[is_last].sum(dtype=np.int64))
        if total > MAX_POOLED_BYTES:
            raise InvalidSchedulerOutput(
                f"the outputs of the prompts that end take more than {MAX_POOLED_BYTES} bytes",
                field="num_scheduled_tokens",
                value=f"{total} bytes",
                fix="let fewer of them end in a step",
            )
        return sizes

    def _check_total(self, num_tokens: int) -> None:
        most = self._limits.max_num_batched_tokens
        if num_tokens > most:
            raise InvalidSchedulerOutput(
                f"the step has more tokens than max_num_batched_tokens = {most}",
                field="num_scheduled_tokens",
                value=num_tokens,
                fix=f"schedule at most {most} tokens, decodes included",
            )

    def _check_standing(
        self, given: Mapping[str, object], gone: set[str], slot_of_new: Mapping[str, int]
    ) -> None:
        """Check that blocks are appended only to requests that continue; new requests bring their
        own."""
        for req_id in given:
            if req_id in slot_of_new or req_id in gone or req_id not in self._slot_of:
                raise not_running(req_id, given[req_id])

    def _judge_blocks(
        self,
        appended: Sequence[Mapping[str, Sequence[int]]],
        new: Sequence[NewRequest],
        ended: Sequence[int],
        slot_of_new: Mapping[str, int],
    ) -> tuple[_Blocks, _Blocks, Sequence[Int32s]]:
        """Check the blocks that a step gives to requests. Return all of them, those that are
        written to, and those that each row of the new requests only reads. appended: for each
        group, the blocks of running requests."""
        given: list[dict[str, Sequence[int]]] = [{each.req_id: each.block_ids for each in new}]
        for group in range(1, len(self._limits.block_groups)):
            given.append({each.req_id: _of_group(each, group) for each in new})
        for own, added in zip(given, appended, strict=False):
            own.update(added)
        if not any(given):
            return _NO_BLOCKS, _NO_BLOCKS, ()
        by_group = [self._read_group(group, own, slot_of_new) for group, own in enumerate(given)]
        blocks = _joined(by_group)
        if self._holders is None:
            return blocks, blocks, ()
        written, prefixes = blocks, _NO_PREFIXES
        if any(request.num_computed_tokens for request in new):
            written, prefixes = self._split(by_group, new)
        self._holders.leave_behind(self._num_computed)
        with self._holders.without(ended) if ended else nullcontext():
            if prefixes:
                self._check_prefixes(self._holders, new, prefixes, frozenset(written.listed))
            self._check_written(self._holders, written, slot_of_new)
        for request in new:
            if request.num_computed_tokens:
                self._check_contents(self._holders, request)
        return blocks, written, prefixes

    def _check_prefixes(
        self,
        holders: BlockHolders,
        new: Sequence[NewRequest],
        prefixes: Sequence[Int32s],
        filled: frozenset[int],
    ) -> None:
        count = len(self._limits.block_groups)
        for index, request in enumerate(new):
            own = prefixes[count * index : count * (index + 1)]
            if any(prefix.size for prefix in own):
                self._check_prefix(holders, request, own, filled)

    def _check_contents(self, holders: BlockHolders, request: NewRequest) -> None:
        """Check that the blocks of a new request's computed tokens have contents."""
        for number, group in enumerate(self._limits.block_groups):
            num_filled = -(-request.num_computed_tokens // group.block_size)
            emptied = holders.first_emptied(_of_group(request, number)[:num_filled])
            if emptied is not None:
                fix = "begin at num_computed_tokens = 0: the KV cache has lost its contents since"
                raise wrong_block(request.req_id, emptied, fix)

    def _split(
        self, by_group: Sequence[_Blocks], new: Sequence[NewRequest]
    ) -> tuple[_Blocks, Sequence[Int32s]]:
        """Return the blocks to which the step's requests write, and for each row of the new ones
        those that it only reads."""
        split = [self._split_group(group, own, new) for group, own in enumerate(by_group)]
        # A slot's rows come one after the other, as BlockHolders.rows_of has them.
        prefixes = list(chain.from_iterable(zip(*(own for own, _ in split), strict=True)))
        return _joined([own for _, own in split]), prefixes

    def _split_group(
        self, group: int, blocks: _Blocks, new: Sequence[NewRequest]
    ) -> tuple[list[Int32s], _Blocks]:
        """Return the blocks of a group that each new request only reads (those full of computed
        tokens), and all others, to which the step's requests write."""
        ids = np.frombuffer(blocks.ids, "<i4")
        is_written = np.ones(ids.size, np.bool_)
        prefixes, first = [], 0
        for request in new:
            num_full = request.num_computed_tokens // self._limits.block_groups[group].block_size
            end = first + len(_of_group(request, group))
            prefix = slice(first, min(end, first + num_full))
            prefixes.append(ids[prefix])
            is_written[prefix] = False
            first = end
        slots, ids = np.frombuffer(blocks.slots, _UINT16)[is_written], ids[is_written]
        return prefixes, self._in_group(group, slots.tobytes(), ids.tobytes(), ids.tolist())

    def _check_prefix(
        self,
        holders: BlockHolders,
        request: NewRequest,
        prefixes: Sequence[Int32s],
        filled: frozenset[int],
    ) -> None:
        """Check the blocks of each group that a request only reads; `filled` are those that this
        step writes to."""
        for group, prefix in zip(self._limits.block_groups, prefixes, strict=True):
            try:
                holders.check_prefix(prefix, blocks_behind(request.num_computed_tokens, group))
            except BlockTaken as taken:
                raise self._outside(request.req_id, int(prefix[taken.index])) from None
        listed = [i for prefix in prefixes for i in prefix.tolist() if i != NULL_BLOCK]
        own = frozenset(listed)
        if len(own) < len(listed):
            fix = "name each block once: they hold different tokens"
            raise wrong_block(request.req_id, listed, fix)
        both = own & filled
        if both:
            fix = "begin with blocks that are full: from the step after the one that fills them"
            raise wrong_block(request.req_id, min(both), fix)

    def _check_written(
        self, holders: BlockHolders, blocks: _Blocks, slot_of_new: Mapping[str, int] = _NONE_NEW
    ) -> None:
        """Check that the blocks exist, and that no other request has them."""
        try:
            holders.check(blocks.rows, blocks.listed)
        except BlockTaken as taken:
            everybody = chain(self._slot_of.items(), slot_of_new.items())
            names = {slot: req_id for req_id, slot in everybody}
            slot = int(np.frombuffer(blocks.slots, _UINT16)[taken.index])
            block_id, who = blocks.listed[taken.index], "others read it"
            if not 1 <= block_id < self._limits.num_blocks:
                raise self._outside(names[slot], block_id) from None
            if taken.row is not None:
                who = f"request {names[taken.row % self.capacity]!r} writes to it"
            fix = f"give a block that no request holds: {who} until it is finished"
            raise wrong_block(names[slot], block_id, fix) from None

    def _outside(self, req_id: str, block_id: object) -> InvalidSchedulerOutput:
        most = self._limits.num_blocks - 1
        return wrong_block(req_id, block_id, f"give block ids from 1 to {most}")

    def _encode_change(
        self,
        output: SchedulerOutput,
        steady: SteadyRequests | None,
        change: _Change,
        resync: bytes | None,
        ids: tuple[int, int, int],
    ) -> list[Frame]:
        """Encode a checked step."""
        rows, new = change.rows, change.admitted
        bits = np.zeros(self.capacity, np.bool_) if steady is None else steady.bits.copy()
        bits[rows.slots] = True
        several = rows.num_scheduled != 1
        pairs = np.empty((int(np.count_nonzero(several)), 2), "<i4")
        pairs[:, 0], pairs[:, 1] = rows.slots[several], rows.num_scheduled[several]
        tokens = [read_tokens(new, self._limits).astype("<i4", copy=False).tobytes()] if new else []
        message = ExecuteModel(
            epoch=ids[0],
            link=ids[1],
            seq=ids[2],
            total_num_scheduled_tokens=change.total,
            scheduled=pack_bits(bits),
            num_scheduled_tokens=pairs.tobytes(),
            new_block_slots=change.blocks.slots,
            new_block_ids=change.blocks.ids,
            new_block_groups=change.blocks.groups,
            finished=b"" if resync is not None else array("H", change.ended).tobytes(),
            scheduled_new_reqs=tuple(
                _as_message(request, change.slot_of_new[request.req_id]) for request in new
            ),
            resync=resync,
            deferred=change.sampling.bitmap,
            extensions=change.sampling.extensions,
            corrections=self._corrections(change.ended) if self._refused else b"",
        )
        return encode_checked(message, [*tokens, *change.sampling.frames], new, self._limits)

    def count_refused(self, step: EncodedStep, refused: Mapping[str, int]) -> None:
        """Record tokens that a step counted for requests, but that they did not gain: a later step
        corrects the workers."""
        for req_id, count in refused.items():
            slot = self._slot_of.get(req_id)
            if slot is not None and self._admitted_at[slot] <= step.seq:
                self._refused[slot] = self._refused.get(slot, 0) + count

    def _corrections(self, ended: Sequence[int]) -> bytes:
        pairs = [pair for pair in self._refused.items() if pair[0] not in ended]
        return np.array(pairs, "<i4").tobytes()

    def _lower(self) -> None:
        """Clear the recorded refusals: the encoded step carries them to the workers."""
        slots, by = list(self._refused), np.array(list(self._refused.values()), np.int32)
        self._num_computed[slots] -= by
        self._num_tokens[slots] -= by
        self._refused.clear()

    def _apply(self, change: _Change, seq: int) -> None:
        """Account for a checked and encoded step; nothing here can fail."""
        self._release(change.ended_ids)
        if change.admitted:
            self._admit(change, seq)
        if change.blocks.rows:
            self._append(change.blocks.rows, change.written.rows, change.written.ids)
        rows = change.rows
        self._num_computed[rows.slots] = rows.num_computed
        self._num_tokens[rows.slots] = rows.num_tokens
        if self._must_resync:
            self._held.clear()
        if change.sampling.deferred:
            self._unsampled.update(change.sampling.deferred)
            self._held[seq] = len(change.sampling.deferred)
        if self._refused:
            self._lower()

    def _slots(self, req_ids: Sequence[str], slot_of_new: Mapping[str, int] = _NONE_NEW) -> Int32s:
        slot_of = self._slot_of
        if slot_of_new:
            slot_of = {req_id: slot_of[req_id] for req_id in req_ids if req_id in slot_of}
            slot_of.update(slot_of_new)
        try:
            return np.fromiter(map(slot_of.__getitem__, req_ids), np.int32, len(req_ids))
        except (KeyError, TypeError):
            unknown = next(r for r in req_ids if not isinstance(r, str) or r not in slot_of)
            raise unknown_request(unknown) from None

    def _known(self, *groups: Iterable[str]) -> list[str]:
        try:
            return list(dict.fromkeys(name for name in chain(*groups) if name in self._slot_of))
        except TypeError:
            wrong = [name for name in chain(*groups) if not isinstance(name, str)]
            raise wrong_ids("request ids are strings", "finished_req_ids", wrong) from None

    def _release(self, req_ids: Sequence[str]) -> None:
        """Free the slots of known requests, and drop the steady sets that name them. Call _flush()
        first: otherwise pending counts of rows and blocks would be lost, or would go to the slots'
        next requests."""
        if not req_ids:
            return
        slots = [self._slot_of.pop(req_id) for req_id in req_ids]
        if not self._reporting.keys().isdisjoint(req_ids):
            gone = set(req_ids)
            self._reporting = {k: v for k, v in self._reporting.items() if k not in gone}
        self._is_free[slots] = True
        self._output_bytes[slots] = 0
        for slot in slots if self._refused else ():
            self._refused.pop(slot, None)
        self._unsampled.difference_update(slots)
        if self._holders is not None:
            self._holders.release(slots)
        self._steady = [steady for steady in self._steady if not steady.bits[slots].any()]

    def _admit(self, change: _Change, seq: int) -> None:
        self._slot_of.update(change.slot_of_new)
        slots = list(change.slot_of_new.values())
        self._is_free[slots] = False
        self._num_computed[slots] = [new.num_computed_tokens for new in change.admitted]
        self._num_tokens[slots] = [len(new.token_ids) for new in change.admitted]
        self._num_blocks[:, slots] = 0
        self._admitted_at[slots] = seq
        for new in change.admitted:
            if new.extensions and pools(new.extensions):
                self._output_bytes[self._slot_of[new.req_id]] = output_bytes(new, self._limits)
            elif new.extensions and reports(new.extensions):
                self._reporting = {**self._reporting, new.req_id: new.extensions}
        if self._holders is not None:
            self._holders.admit(self._holders.rows_of(slots), change.prefixes)

    def _read_blocks(self, given: Sequence[Mapping[str, Sequence[int]]]) -> _Blocks:
        """Return blocks of each group for running requests as columns, not checked yet."""
        return _joined([self._read_group(group, own) for group, own in enumerate(given)])

    def _read_group(
        self,
        group: int,
        given: Mapping[str, Sequence[int]],
        slot_of_new: Mapping[str, int] = _NONE_NEW,
    ) -> _Blocks:
        """Return blocks of one group for requests as columns, not checked yet."""
        if not given:
            return _NO_BLOCKS
        listed, raw, lengths = read_blocks(given)
        try:
            if slot_of_new:
                own = [slot_of_new[n] if n in slot_of_new else self._slot_of[n] for n in given]
                slots = array("H", own).tobytes()
            else:
                slots = array("H", map(self._slot_of.__getitem__, given)).tobytes()
        except KeyError as error:
            raise not_running(error.args[0], given[error.args[0]]) from None
        if lengths:
            slots = np.repeat(np.frombuffer(slots, _UINT16), lengths).tobytes()
        return self._in_group(group, slots, raw.tobytes(), listed)

    def _append(self, rows: bytes, written_rows: bytes, written_ids: bytes) -> None:
        """Account for blocks of these rows, and for those of them that are written to."""
        numbers = np.frombuffer(rows, self._row_code)
        counts = np.bincount(numbers, minlength=self._num_blocks.size).astype(np.int32)
        self._num_blocks += counts.reshape(self._num_blocks.shape)
        if self._holders is not None:
            self._holders.hold(written_rows, written_ids)

    def _count_appended(self) -> None:
        rows, ids = bytes(self._appended_rows), bytes(self._appended_ids)
        self._append(rows, rows, ids)
        self._appended_rows.clear()
        self._appended_ids.clear()

    def _flush(self) -> None:
        for steady in self._steady:
            if steady.num_pending:
                self._num_computed[steady.slots] += steady.num_pending
                self._num_tokens[steady.slots] += steady.num_pending
                steady.num_pending = 0
        if self._appended_rows:
            self._count_appended()

    def _resync_rows(self, ended: Sequence[int]) -> bytes:
        is_live = ~self._is_free
        is_live[ended] = False
        slots = np.flatnonzero(is_live).astype(np.int32)
        columns = (
            slots,
            self._num_computed[slots],
            self._num_tokens[slots],
            *self._num_blocks[:, slots],
        )
        return np.stack(columns, axis=1).astype("<i4").tobytes()


def _of_group(request: NewRequest, group: int) -> Sequence[int]:
    """Return a new request's blocks of a group; it may have none of further groups."""
    by_group = request.blocks_by_group
    return by_group[group] if group < len(by_group) else ()


def _joined(by_group: Sequence[_Blocks]) -> _Blocks:
    """Return the blocks of all groups."""
    if len(by_group) == 1:
        return by_group[0]
    slots, groups, rows, ids, listed = zip(*map(astuple, by_group), strict=True)
    everything = list(chain.from_iterable(listed))
    return _Blocks(b"".join(slots), b"".join(groups), b"".join(rows), b"".join(ids), everything)


def _as_message(request: NewRequest, slot: int) -> NewRequestData:
    return NewRequestData(
        slot=slot,
        req_id=request.req_id,
        num_tokens=len(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=request.num_computed_tokens,
        extensions=tuple(request.extensions),
        note=request.note,
    )
