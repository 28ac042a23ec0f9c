"""Request ids <-> slots: SchedulerOutput to rpc_schema.step.ExecuteModel and ModelRunnerOutput
back. Mirrors the counts of the workers' rows, so that it can send a step in full; knows no socket
and no scheduling.

A pure decode step with an unchanged set costs nothing per request: bitmap, slots and the ids of the
reply are kept in a plan, and its rows' counts are brought up to date only when somebody needs them.
"""

import heapq
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from client.errors import InvalidSchedulerOutput
from client.scheduler_output import Logprobs, NewRequest, SchedulerOutput, StepResult
from rpc_schema.codec import MAX_STEP_BYTES, Frame, encode_step
from rpc_schema.errors import BadFrameError, TooLargeError
from rpc_schema.step import ExecuteModel, ModelRunnerOutput, NewRequestData

MAX_PLANS = 16
MAX_NOTE_BYTES = 1024
MESSAGE_RESERVE_BYTES = 4 << 20
"""Of a step's bound, what columns other than prompts may take."""

MAX_UNCOUNTED_BYTES = 1 << 16
"""Of appended blocks, two bytes each, before they are counted; their counting is vectorised."""

MAX_ADMITTED_TOKENS = (MAX_STEP_BYTES - MESSAGE_RESERVE_BYTES) // 4
"""Tokens of all new requests of one step together."""

Int32s = NDArray[np.int32]
_UINT16 = np.dtype("<u2")
_INT32 = np.dtype("<i4")


class DecodePlan:
    """A set of requests that all decode one token a step, with everything that stays the same from
    step to step."""

    __slots__ = (
        "bitmap",
        "bits",
        "num_pending",
        "req_ids",
        "slots",
        "slots_bytes",
        "sorted_req_ids",
    )

    def __init__(self, req_ids: tuple[str, ...], slots: Int32s, capacity: int) -> None:
        order = np.argsort(slots)
        self.req_ids = req_ids
        self.slots: Int32s = slots[order]
        self.slots_bytes = self.slots.astype("<u2").tobytes()
        self.sorted_req_ids = tuple(req_ids[i] for i in order.tolist())
        self.bits = np.zeros(capacity, np.bool_)
        self.bits[slots] = True
        self.bitmap = _pack(self.bits)
        self.num_pending = 0
        """Steps whose effect on the rows' counts is not in the arrays yet."""


class EncodedStep:
    """A step as sent: its frames, and what is needed to read its reply or to undo it."""

    __slots__ = (
        "extra_req_ids",
        "extra_slots",
        "frames",
        "num_logprobs",
        "output",
        "plan",
        "resync",
        "seq",
    )

    def __init__(
        self,
        seq: int,
        output: SchedulerOutput,
        frames: list[Frame],
        plan: DecodePlan | None,
        extra_slots: Sequence[int],
        extra_req_ids: Sequence[str],
        num_logprobs: Mapping[str, int],
        *,
        resync: bool = False,
    ) -> None:
        self.seq = seq
        self.output = output
        self.frames = frames
        self.plan = plan
        self.extra_slots = extra_slots
        """Slots outside the plan that sample in this step."""
        self.extra_req_ids = extra_req_ids
        self.num_logprobs = num_logprobs
        """Of the requests that asked for any, as of this step."""
        self.resync = resync
        """Sent in full: if this one fails, the rows it names cannot be trusted either."""

    def sampled_bitmap(self) -> tuple[bytes, Sequence[str]]:
        """Return the slots that sample as a bitmap, and their request ids, slots ascending."""
        plan = self.plan
        if plan is not None and not self.extra_slots:
            return plan.bitmap, plan.sorted_req_ids
        slots, req_ids = self.sampled()
        return _bitmap(slots), req_ids

    def sampled(self) -> tuple[bytes, Sequence[str]]:
        """Return the slots that sample, ascending, as little-endian uint16, and their request
        ids."""
        plan = self.plan
        if plan is not None and not self.extra_slots:
            return plan.slots_bytes, plan.sorted_req_ids
        pairs = list(zip(self.extra_slots, self.extra_req_ids, strict=True))
        if plan is not None:
            pairs += zip(plan.slots.tolist(), plan.sorted_req_ids, strict=True)
        pairs.sort()
        return array("H", [slot for slot, _ in pairs]).tobytes(), [req_id for _, req_id in pairs]


class _Saved(NamedTuple):
    """A SlotTable's state, for a step that turns out not to fit into a message."""

    slot_of: dict[str, int]
    free: list[int]
    num_computed: Int32s
    num_tokens: Int32s
    num_blocks: Int32s
    num_logprobs: Mapping[str, int]
    plans: dict[int, DecodePlan]


class SlotTable:
    """Who has which slot, and how far each row is. One thread; `max_num_seqs` slots, the lowest
    free one first."""

    def __init__(self, max_num_seqs: int) -> None:
        self.capacity = max_num_seqs
        self._slot_of: dict[str, int] = {}
        self._free: list[int] = list(range(max_num_seqs))
        self._num_computed = np.zeros(max_num_seqs, np.int32)
        self._num_tokens = np.zeros(max_num_seqs, np.int32)
        self._num_blocks = np.zeros(max_num_seqs, np.int32)
        self._appended = bytearray()
        """Slots (uint16) of blocks that are not counted in _num_blocks yet, one each."""
        self._num_logprobs: Mapping[
            str, int
        ] = {}  # replaced, never changed: steps in flight share it
        self._plans: dict[int, DecodePlan] = {}
        self._must_resync = False

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
        """Encode a step and account for it as applied.

        Raises:
            InvalidSchedulerOutput: the output breaks a rule; nothing has changed.
        """
        plan, counts = self._plan(output), output.num_scheduled_tokens
        if plan is None and output.decode_req_ids:
            counts = {**dict.fromkeys(output.decode_req_ids, 1), **counts}
            if len(counts) != len(output.decode_req_ids) + len(output.num_scheduled_tokens):
                raise InvalidSchedulerOutput(
                    "a request is in decode_req_ids twice, or in num_scheduled_tokens too"
                )
        steady = not (
            counts or output.finished_req_ids or output.preempted_req_ids
            or output.scheduled_new_reqs or self._must_resync
        )  # fmt: skip
        if steady and plan is not None:
            return self._encode_steady(output, plan, epoch, link, seq)
        return self._encode_changed(output, plan, counts, (epoch, link, seq))

    def encode_masks(
        self, step: EncodedStep, masks: Mapping[str, NDArray[np.int32]]
    ) -> tuple[bytes, list[Frame]]:
        """Return mask_slots and frames of a SampleTokens for `step`; masks of requests that have
        left their slots since are left out.

        Raises:
            InvalidSchedulerOutput: the step does not sample a request, or masks differ in shape.
        """
        packed, req_ids = step.sampled()
        slot_of = dict(zip(req_ids, np.frombuffer(packed, "<u2").tolist(), strict=True))
        for req_id in masks:
            if req_id not in slot_of:
                raise InvalidSchedulerOutput(f"masks: step {step.seq} does not sample {req_id!r}")
        if len({mask.shape for mask in masks.values()}) > 1:
            raise InvalidSchedulerOutput("masks: they differ in length")
        staying = [name for name in req_ids if self._slot_of.get(name) == slot_of[name]]
        rows = [(slot_of[req_id], masks[req_id]) for req_id in staying if req_id in masks]
        if not rows:
            return b"", []
        frame = np.stack([mask for _, mask in rows]).astype("<i4").tobytes()
        return array("H", [slot for slot, _ in rows]).tobytes(), [frame]

    @staticmethod
    def decode(step: EncodedStep, reply: ModelRunnerOutput, arrays: Sequence[Frame]) -> StepResult:
        """Turn a reply to `step` into request ids. Requests that finished before the deferred
        sampling of their step may be missing.

        Raises:
            BadFrameError: the reply does not fit the step.
        """
        slots, req_ids = step.sampled_bitmap()
        if step.output.defer_sampling and reply.slots != slots:
            slots, req_ids = _those_left(*step.sampled(), reply.slots)
        if reply.slots != slots or len(reply.sampled_token_ids) != 4 * len(req_ids):
            raise BadFrameError(
                f"step {step.seq} was to sample {len(req_ids)} slots; the reply's columns differ"
            )
        token_ids: list[int] = np.frombuffer(reply.sampled_token_ids, _INT32).tolist()
        if reply.num_logprobs < 0:
            return StepResult(req_ids, token_ids)
        logprobs = _logprobs(req_ids, step.num_logprobs, reply.num_logprobs, arrays)
        return StepResult(req_ids, token_ids, logprobs)

    def fail(self, outputs: Iterable[SchedulerOutput]) -> frozenset[str]:
        """Undo failed steps: forget every request that took part or was to end in them, and send
        the next step in full.

        Return the ids of those that took part.
        """
        self._flush()
        lost: set[str] = set()
        for output in outputs:
            lost.update(output.decode_req_ids, output.num_scheduled_tokens, output.new_block_ids)
            lost.update(new.req_id for new in output.scheduled_new_reqs)
            self._release(self._known(output.finished_req_ids, output.preempted_req_ids))
        self._release(self._known(lost))
        self._must_resync = True
        return frozenset(lost)

    def drop_all(self) -> frozenset[str]:
        """Forget every request; the next step is sent in full, with no rows. Return their ids."""
        dropped = frozenset(self._slot_of)
        self._release(list(dropped))
        self._must_resync = True
        return dropped

    def require_resync(self) -> None:
        """Send the next step in full."""
        self._must_resync = True

    def _plan(self, output: SchedulerOutput) -> DecodePlan | None:
        """The plan of output.decode_req_ids; None where not all of them are at their last token."""
        req_ids = output.decode_req_ids
        plan = self._plans.get(id(req_ids))
        if plan is not None and plan.req_ids is req_ids:
            return plan
        if not req_ids:
            return None
        self._flush()
        slots = self._slots(req_ids)
        if np.any(self._num_computed[slots] + 1 != self._num_tokens[slots]):
            return None
        plan = DecodePlan(req_ids, slots, self.capacity)
        if int(np.count_nonzero(plan.bits)) != len(req_ids):
            raise InvalidSchedulerOutput("a request is in decode_req_ids twice")
        if len(self._plans) == MAX_PLANS:
            self._plans.clear()
        self._plans[id(req_ids)] = plan
        return plan

    def _encode_steady(
        self, output: SchedulerOutput, plan: DecodePlan, epoch: int, link: int, seq: int
    ) -> EncodedStep:
        block_slots, block_ids = self._append_blocks(output.new_block_ids)
        plan.num_pending += 1
        message = ExecuteModel(
            epoch=epoch,
            link=link,
            seq=seq,
            total_num_scheduled_tokens=len(plan.req_ids),
            scheduled=plan.bitmap,
            new_block_slots=block_slots,
            new_block_ids=block_ids,
            defer_sampling=output.defer_sampling,
        )
        try:
            frames = encode_step(message)
        except TooLargeError as error:
            plan.num_pending -= 1
            self._count_blocks()
            np.subtract.at(self._num_blocks, np.frombuffer(block_slots, _UINT16), 1)
            raise _too_large(error) from None
        return EncodedStep(seq, output, frames, plan, (), (), self._num_logprobs)

    def _encode_changed(
        self,
        output: SchedulerOutput,
        plan: DecodePlan | None,
        counts: Mapping[str, int],
        ids: tuple[int, int, int],
    ) -> EncodedStep:
        self._flush()
        ending = self._known(output.finished_req_ids, output.preempted_req_ids)
        self._check(output, plan, counts, ending)
        saved = self._save()
        finished = self._release(ending)
        rows = self._resync_rows() if self._must_resync else None
        new_reqs = tuple(self._admit(new) for new in output.scheduled_new_reqs)
        blocks = {new.req_id: new.block_ids for new in output.scheduled_new_reqs}
        block_slots, block_ids = self._append_blocks({**blocks, **output.new_block_ids})
        slots, num_tokens, sampled = self._advance(counts)
        bits = np.zeros(self.capacity, np.bool_) if plan is None else plan.bits.copy()
        bits[slots] = True
        num_decodes = 0
        if plan is not None:
            plan.num_pending += 1
            num_decodes = len(plan.req_ids)
        several = num_tokens != 1
        message = ExecuteModel(
            epoch=ids[0],
            link=ids[1],
            seq=ids[2],
            total_num_scheduled_tokens=num_decodes + int(num_tokens.sum()),
            scheduled=_pack(bits),
            num_scheduled_tokens=np.stack([slots[several], num_tokens[several]], axis=1)
            .astype("<i4")
            .tobytes(),
            new_block_slots=block_slots,
            new_block_ids=block_ids,
            finished=b"" if rows is not None else array("H", finished).tobytes(),
            scheduled_new_reqs=new_reqs,
            resync=rows,
            defer_sampling=output.defer_sampling,
        )
        try:
            frames = encode_step(message, _token_frames(output.scheduled_new_reqs))
        except TooLargeError as error:
            self._restore(saved)
            if plan is not None:
                plan.num_pending -= 1
            raise _too_large(error) from None
        self._must_resync = False
        extra_slots = slots[sampled].tolist()
        names = {self._slot_of[req_id]: req_id for req_id in counts}
        extra_req_ids = [names[slot] for slot in extra_slots]
        return EncodedStep(
            ids[2],
            output,
            frames,
            plan,
            extra_slots,
            extra_req_ids,
            self._num_logprobs,
            resync=rows is not None,
        )

    def _save(self) -> _Saved:
        return _Saved(
            self._slot_of.copy(),
            self._free.copy(),
            self._num_computed.copy(),
            self._num_tokens.copy(),
            self._num_blocks.copy(),
            self._num_logprobs,
            self._plans,
        )

    def _restore(self, saved: _Saved) -> None:
        self._slot_of, self._free = saved.slot_of, saved.free
        self._num_computed, self._num_tokens = saved.num_computed, saved.num_tokens
        self._num_blocks, self._num_logprobs = saved.num_blocks, saved.num_logprobs
        self._appended.clear()  # of the step that is undone: those before were counted at its start
        self._plans = saved.plans

    def _check(
        self,
        output: SchedulerOutput,
        plan: DecodePlan | None,
        counts: Mapping[str, int],
        ending: list[str],
    ) -> None:
        gone = set(ending)
        new = {request.req_id: request for request in output.scheduled_new_reqs}
        self._check_admissions(output.scheduled_new_reqs, new, gone)
        standing = [req_id for req_id in counts if req_id not in new] if new else list(counts)
        if gone and not gone.isdisjoint(chain(standing, output.decode_req_ids)):
            raise InvalidSchedulerOutput("a request is finished and scheduled in the same step")
        slots = self._slots(standing)
        if plan is not None and plan.bits[slots].any():
            raise InvalidSchedulerOutput("a request is in decode_req_ids and num_scheduled_tokens")
        num_tokens = np.fromiter((counts[req_id] for req_id in standing), np.int64, len(standing))
        left = self._num_tokens[slots] - self._num_computed[slots]
        for i in np.flatnonzero((num_tokens < 1) | (num_tokens > left))[:1].tolist():
            raise _wrong_count(standing[i], int(num_tokens[i]), int(left[i]))
        for req_id in output.new_block_ids:
            if req_id in new or req_id in gone or req_id not in self._slot_of:
                raise InvalidSchedulerOutput(
                    f"new_block_ids[{req_id!r}]: not a request that runs on (a new one has its own)"
                )
        for req_id in counts.keys() & new.keys():
            left_of_new = len(new[req_id].token_ids) - new[req_id].num_computed_tokens
            if not 1 <= counts[req_id] <= left_of_new:
                raise _wrong_count(req_id, counts[req_id], left_of_new)

    def _check_admissions(
        self, requests: Sequence[NewRequest], by_id: Mapping[str, NewRequest], gone: set[str]
    ) -> None:
        if len(by_id) != len(requests):
            raise InvalidSchedulerOutput("a request is new twice in one step")
        num_free = len(self._free) + len(gone)
        if len(requests) > num_free:
            raise InvalidSchedulerOutput(
                f"{len(requests)} new requests, but only {num_free} of max_num_seqs = "
                f"{self.capacity} slots are free"
            )
        if sum(len(request.token_ids) for request in requests) > MAX_ADMITTED_TOKENS:
            raise InvalidSchedulerOutput(
                f"the new requests of one step may have {MAX_ADMITTED_TOKENS} tokens together: "
                "admit some later"
            )
        for request in requests:
            if request.req_id in self._slot_of and request.req_id not in gone:
                raise InvalidSchedulerOutput(f"request {request.req_id!r} is new, but has a slot")
            if not 1 <= len(request.req_id) <= 256:
                raise InvalidSchedulerOutput("a request id has 1 to 256 characters")
            if len(request.note) > MAX_NOTE_BYTES:
                raise InvalidSchedulerOutput(
                    f"request {request.req_id!r}: its note has {len(request.note)} bytes; "
                    f"at most {MAX_NOTE_BYTES}"
                )
            if not 0 <= request.num_computed_tokens < len(request.token_ids):
                raise InvalidSchedulerOutput(
                    f"request {request.req_id!r}: num_computed_tokens = "
                    f"{request.num_computed_tokens} leaves none of its "
                    f"{len(request.token_ids)} tokens to compute"
                )

    def _slots(self, req_ids: Sequence[str]) -> Int32s:
        try:
            return np.fromiter(map(self._slot_of.__getitem__, req_ids), np.int32, len(req_ids))
        except KeyError as error:
            raise InvalidSchedulerOutput(
                f"request {error.args[0]!r} has no slot: put it into scheduled_new_reqs first"
            ) from None

    def _known(self, *groups: Iterable[str]) -> list[str]:
        return list(dict.fromkeys(req_id for req_id in chain(*groups) if req_id in self._slot_of))

    def _release(self, req_ids: Sequence[str]) -> list[int]:
        """Free the slots of known requests, and drop the plans that name them; return the slots,
        ascending."""
        slots = sorted(self._slot_of.pop(req_id) for req_id in req_ids)
        if not self._num_logprobs.keys().isdisjoint(req_ids):
            gone = set(req_ids)
            self._num_logprobs = {k: v for k, v in self._num_logprobs.items() if k not in gone}
        for slot in slots:
            heapq.heappush(self._free, slot)
        if slots:
            self._flush()
            self._plans = {
                key: plan for key, plan in self._plans.items() if not plan.bits[slots].any()
            }
        return slots

    def _admit(self, request: NewRequest) -> NewRequestData:
        slot = heapq.heappop(self._free)
        self._slot_of[request.req_id] = slot
        self._num_computed[slot] = request.num_computed_tokens
        self._num_tokens[slot] = len(request.token_ids)
        self._num_blocks[slot] = 0
        if request.sampling.logprobs is not None:
            asked = {request.req_id: request.sampling.logprobs}
            self._num_logprobs = {**self._num_logprobs, **asked}
        return NewRequestData(
            slot=slot,
            req_id=request.req_id,
            num_tokens=len(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_computed_tokens,
            sampling=request.sampling,
            note=request.note,
        )

    def _append_blocks(self, blocks: Mapping[str, Sequence[int]]) -> tuple[bytes, bytes]:
        if not blocks:
            return b"", b""
        try:
            slots = array("H", map(self._slot_of.__getitem__, blocks)).tobytes()
        except KeyError as error:
            raise InvalidSchedulerOutput(f"new_block_ids: {error.args[0]!r} has no slot") from None
        try:
            block_ids = [block_id for (block_id,) in blocks.values()]
        except ValueError:  # not one block each
            counts = [len(ids) for ids in blocks.values()]
            slots = np.repeat(np.frombuffer(slots, _UINT16), counts).tobytes()
            block_ids = list(chain.from_iterable(blocks.values()))
        self._appended += slots
        if len(self._appended) > MAX_UNCOUNTED_BYTES:
            self._count_blocks()
        return slots, array("i", block_ids).tobytes()

    def _count_blocks(self) -> None:
        slots = np.frombuffer(bytes(self._appended), _UINT16)
        self._num_blocks += np.bincount(slots, minlength=self.capacity).astype(np.int32)
        self._appended.clear()

    def _advance(self, counts: Mapping[str, int]) -> tuple[Int32s, Int32s, NDArray[np.bool_]]:
        """Apply scheduled tokens to the rows; return slots (ascending), tokens of each, and which
        of them sample."""
        slots = self._slots(list(counts))
        num_tokens = np.fromiter(counts.values(), np.int32, len(counts))
        order = np.argsort(slots)
        slots, num_tokens = slots[order], num_tokens[order]
        self._num_computed[slots] += num_tokens
        sampled: NDArray[np.bool_] = self._num_computed[slots] == self._num_tokens[slots]
        self._num_tokens[slots] += sampled
        return slots, num_tokens, sampled

    def _flush(self) -> None:
        for plan in self._plans.values():
            if plan.num_pending:
                self._num_computed[plan.slots] += plan.num_pending
                self._num_tokens[plan.slots] += plan.num_pending
                plan.num_pending = 0
        if self._appended:
            self._count_blocks()

    def _resync_rows(self) -> bytes:
        slots = np.sort(np.fromiter(self._slot_of.values(), np.int32, len(self._slot_of)))
        columns = (
            slots,
            self._num_computed[slots],
            self._num_tokens[slots],
            self._num_blocks[slots],
        )
        return np.stack(columns, axis=1).astype("<i4").tobytes()


def _wrong_count(req_id: str, count: int, left: int) -> InvalidSchedulerOutput:
    return InvalidSchedulerOutput(
        f"num_scheduled_tokens[{req_id!r}] = {count}; it has {left} tokens left to compute"
    )


def _too_large(error: TooLargeError) -> InvalidSchedulerOutput:
    return InvalidSchedulerOutput(f"the step does not fit into a message: {error}")


def _those_left(slots: bytes, req_ids: Sequence[str], named: bytes) -> tuple[bytes, Sequence[str]]:
    """Those of a step's slots that the bitmap names, as a bitmap too, and their requests."""
    pairs = zip(np.frombuffer(slots, "<u2").tolist(), req_ids, strict=True)
    left = [
        (slot, req_id)
        for slot, req_id in pairs
        if slot // 8 < len(named) and named[slot // 8] >> slot % 8 & 1
    ]
    return _bitmap(array("H", [slot for slot, _ in left]).tobytes()), [r for _, r in left]


def _bitmap(slots: bytes) -> bytes:
    """Slots, as little-endian uint16, to a bitmap without zero bytes at its end."""
    numbers = np.frombuffer(slots, "<u2")
    if not numbers.size:
        return b""
    bits = np.zeros(int(numbers.max()) + 1, np.bool_)
    bits[numbers] = True
    return _pack(bits)


def _pack(bits: NDArray[np.bool_]) -> bytes:
    """Slots to a bitmap without its trailing zero bytes."""
    return np.packbits(bits, bitorder="little").tobytes().rstrip(b"\0")


def _token_frames(requests: Sequence[NewRequest]) -> list[Frame]:
    if not requests:
        return []
    tokens = np.concatenate([request.token_ids for request in requests])
    return [tokens.astype("<i4", copy=False).tobytes()]


def _logprobs(
    req_ids: Sequence[str], asked: Mapping[str, int], width: int, arrays: Sequence[Frame]
) -> dict[str, Logprobs]:
    """Split the reply's logprob frames over the requests that asked for them, each as wide as it
    asked."""
    rows = len(req_ids)
    if [len(frame) for frame in arrays] != [4 * rows * (width + 1)] * 2 + [4 * rows]:
        raise BadFrameError(f"the logprobs of {rows} rows, {width} wide, have other frames")
    token_ids = np.frombuffer(arrays[0], "<i4").reshape(rows, width + 1)
    logprobs = np.frombuffer(arrays[1], "<f4").reshape(rows, width + 1)
    ranks = np.frombuffer(arrays[2], "<i4").tolist()
    result = {}
    for row, req_id in enumerate(req_ids):
        if req_id in asked:
            end = asked[req_id] + 1
            result[req_id] = Logprobs(token_ids[row, :end], logprobs[row, :end], ranks[row])
    return result
