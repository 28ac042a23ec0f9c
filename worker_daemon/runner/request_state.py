"""The request rows: what every rank knows of every request, and the one judge of whether a step is
valid.

A row is a slot of the wire. A step is checked whole before any of it is applied, by its bytes and
by these rows alone, so that all ranks accept or refuse alike. Host memory is the source of truth;
device copies are input_batch.py's business.

Shapes: S rows (plus one spare row, which dummy steps use), B scheduled requests, U block-table
updates.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from rpc_schema.codec import Frame
from rpc_schema.sampling import MIN_TEMPERATURE, SamplingParams
from rpc_schema.step import ExecuteModel, NewRequestData
from worker_daemon.errors import InvalidStepError, PrecededByError

Int32s: TypeAlias = npt.NDArray[np.int32]
Int64s: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]

MAX_UNSAMPLED_STEPS = 16
"""Steps whose sampling may be deferred at a time: each keeps its hidden states on the device."""

FREE_ROW_BLOCKS = 1 << 30
"""The block count of a row without a request: no request reaches it, so that one comparison refuses
blocks for such a row and blocks beyond a request's last."""
MAX_BLOCK_COLUMNS = 64
"""Decoded columns of block updates that are remembered. Rows that decode side by side fill their
blocks together, so the same columns come back every block_size steps."""

MAX_TAKEN_BACK = 64
"""Steps that can be taken back: more than a driver may have under way."""

_FEW = 64
"""Values that Python's min and max look through faster than numpy's."""

_UINT16 = np.dtype("<u2")
_INT32 = np.dtype("<i4")
_ONE = np.array(1, np.int32)
MAX_BLOCK_UPDATES = 1 << 20
"""Entries of the block table that one step may write: they have a place in its packed buffer."""

_NO_BLOCKS = np.zeros(0, np.int32)
_NO_SLOTS = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The sizes that every step must keep to."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int

    @property
    def max_blocks_per_seq(self) -> int:
        return -(-self.max_model_len // self.block_size)


class RowCounts(NamedTuple):
    """How far a row is."""

    num_computed_tokens: int
    num_blocks: int


class BlockUpdates(NamedTuple):
    """Entries of the block table that a step writes. Aligned columns [U]."""

    slots: Int64s
    indices: Int32s
    block_ids: Int32s


_NO_UPDATES = BlockUpdates(_NO_SLOTS, _NO_BLOCKS, _NO_BLOCKS)


class ScheduledStep(NamedTuple):
    """An accepted step: what to run. Arrays are host memory; batch order is ascending slots."""

    seq: int
    slots: Int64s
    """[B]"""
    num_tokens: Int32s
    """[B] tokens of this step."""
    starts: Int32s
    """[B] position of each request's first token of this step."""
    ends: Int32s
    """[B] tokens of each context, this step's included."""
    total_num_tokens: int
    longest: int
    """Tokens of the longest context, this step's included; 0 without requests."""
    samples: Bools
    """[B] whether the request's last token of this step samples a new one."""
    new_requests: tuple[NewRequestData, ...]
    block_updates: BlockUpdates
    defer_sampling: bool


@dataclass(frozen=True, slots=True)
class _Counts:
    """Per-row counts, [S + 1] each; copied only by steps that change more than the scheduled
    rows."""

    live: Bools
    num_computed: Int32s
    num_tokens: Int32s
    num_blocks: Int32s
    """FREE_ROW_BLOCKS where no request is."""
    unsampled: Bools
    """The row's newest token waits for SampleTokens."""

    def copy(self) -> "_Counts":
        return _Counts(
            self.live.copy(),
            self.num_computed.copy(),
            self.num_tokens.copy(),
            self.num_blocks.copy(),
            self.unsampled.copy(),
        )

    def clear(self, slots: Int64s | Bools) -> None:
        self.live[slots] = False
        self.num_computed[slots] = 0
        self.num_tokens[slots] = 0
        self.num_blocks[slots] = FREE_ROW_BLOCKS
        self.unsampled[slots] = False


class _Accepted(NamedTuple):
    """A step that may have to be taken back."""

    number: int
    """Counted over all epochs."""
    epoch: int
    step: ScheduledStep


class _Batch(NamedTuple):
    """The rows that one bitmap names."""

    bitmap: bytes
    slots: Int64s
    rows: slice | Int64s
    """What indexes the slots fastest."""


@dataclass(slots=True)
class _Decoding:
    """Where the last step left its rows if all of them sampled: the next token of each is its last
    known one. Aligned with the batch's slots. Steps that only go on keep their counts here, which
    are the rows' own once `_note_decoded` has written them there."""

    num_computed: Int32s
    num_tokens: Int32s
    capacity: Int32s
    """Tokens that each row's blocks have room for."""
    longest: int
    """The highest num_tokens."""
    num_scheduled: Int32s
    """One for each row."""
    samples: Bools
    """True for each row."""


class _BlockColumn(NamedTuple):
    """A decoded column of new_block_slots. Aligned, [U]."""

    slots: Int64s
    occurrences: Int32s | None
    """How often the slot was named before in this column; None where none is named twice."""


class RequestState:
    """All rows of one rank. Owned by the model runner, used on the step thread only."""

    def __init__(self, limits: StepLimits) -> None:
        num_rows = limits.max_num_seqs + 1
        self.limits = limits
        self.known_tokens: list[Int32s] = [_NO_BLOCKS] * num_rows
        """Of each row, the tokens that came with its admission."""
        self.num_known_tokens = np.zeros(num_rows, np.int32)
        """Of each row, how many of its tokens came with its admission; later ones were sampled."""
        self.num_prompt_tokens = np.zeros(num_rows, np.int32)
        self.generation = np.zeros(num_rows, np.int64)
        """Of each row, how often it was admitted: tells a request from its slot's former ones."""
        self.req_ids = [""] * num_rows
        """Of each row, the request's id, and below what its scheduler noted with it."""
        self.notes = [b""] * num_rows
        self._deferred: dict[int, tuple[Int64s, Int64s]] = {}
        """Slots and generations that each step with deferred sampling is to sample."""
        self._counts = _Counts(
            np.zeros(num_rows, np.bool_),
            np.zeros(num_rows, np.int32),
            np.zeros(num_rows, np.int32),
            np.full(num_rows, FREE_ROW_BLOCKS, np.int32),
            np.zeros(num_rows, np.bool_),
        )
        self._failed_seq: int | None = None
        self._num_accepted = 0
        self._first_failed = 0
        """The number of the step that failed, or of the next one; meaningless without a failure."""
        self._accepted: deque[_Accepted] = deque(maxlen=MAX_TAKEN_BACK)
        """Since the last full resynchronisation."""
        self._batch = _Batch(b"", _NO_SLOTS, slice(0))
        self._decoding: _Decoding | None = None
        self._block_columns: dict[bytes, _BlockColumn] = {}
        # As arrays, because numpy compares these faster than its scalars and Python's.
        self._max_index = limits.max_blocks_per_seq - 1
        self._block_size = np.array(limits.block_size, np.int32)
        self._one_each = np.ones(num_rows, np.int32)

    @property
    def spare_slot(self) -> int:
        """A row that no request ever has; its block table is the null block's."""
        return self.limits.max_num_seqs

    @property
    def num_live(self) -> int:
        """Rows that hold a request."""
        return int(self._counts.live.sum())

    @property
    def has_failed(self) -> bool:
        """A step failed, and no resynchronisation has come since."""
        return self._failed_seq is not None

    def are_current(self, slots: Int64s, generations: Int64s) -> Bools:
        """Return for each slot [R] whether it still holds the request that it held in that
        generation."""
        current: Bools = self._counts.live[slots] & (self.generation[slots] == generations)
        return current

    def drop_all(self) -> None:
        """Free every row, and forget a failure: a new driver, or a new purpose, begins."""
        self._counts.clear(slice(None))  # type: ignore[arg-type]  # every row
        self._accepted.clear()
        self._decoding = None
        self._failed_seq = None
        self._deferred.clear()

    def mark_failed(self, seq: int) -> None:
        """A step failed after it was accepted: those behind it fail too, until a
        resynchronisation."""
        if self._failed_seq is None:
            self._failed_seq = seq
            newest = self._accepted[-1] if self._accepted else None
            is_newest = newest is not None and newest.step.seq == seq
            self._first_failed = self._num_accepted + (0 if is_newest else 1)

    def raise_if_failed(self) -> None:
        """Raises PrecededByError while an earlier step's failure stands."""
        if self._failed_seq is not None:
            raise PrecededByError(
                f"step {self._failed_seq} failed before this one",
                fix="send the next step with resync",
            )

    @property
    def live_slots(self) -> Int64s:
        """Slots that hold a request, ascending."""
        return np.flatnonzero(self._counts.live)

    def counts_of(self, slot: int) -> RowCounts:
        """Return where a row stands, as of take_back()."""
        counts = self._counts
        return RowCounts(int(counts.num_computed[slot]), int(counts.num_blocks[slot]))

    def take_back(self, has_ended_well: Callable[[int, int], bool]) -> None:
        """Undo what failed steps, and all from the first one that is not known to have ended well
        (by epoch and seq) on, did to rows that are still there: what they computed is not counted,
        what they appended is not theirs. Their tokens, and requests that ended, stay as they are.

        A failure stands, as before, until a resynchronisation.
        """
        if self._decoding is not None:
            self._note_decoded(self._decoding)
            self._decoding = None
        accepted = list(self._accepted)
        self._accepted.clear()
        good = 0
        while good < len(accepted) and self._is_good(accepted[good], has_ended_well):
            good += 1
        counts = self._counts = self._counts.copy()
        unknown = np.zeros(counts.live.size, np.bool_)
        if good == 0 and len(accepted) == MAX_TAKEN_BACK:
            unknown[:] = True  # steps before these are forgotten: who knows where they were
        for entry in reversed(accepted[good:]):
            step = entry.step
            counts.num_computed[step.slots] = step.starts
            _take_back(step.block_updates, counts)
            unknown[[request.slot for request in step.new_requests]] = True
        counts.num_computed[unknown] = 0
        counts.num_blocks[unknown] = 0
        counts.clear(~counts.live)

    def _is_good(self, entry: _Accepted, has_ended_well: Callable[[int, int], bool]) -> bool:
        if self._failed_seq is not None and entry.number >= self._first_failed:
            return False
        return has_ended_well(entry.epoch, entry.step.seq)

    def apply(self, step: ExecuteModel, arrays: Sequence[Frame]) -> ScheduledStep:
        """Check a step whole, then apply it to the rows.

        Raises:
            InvalidStepError: some value is out of range or disagrees with the rows. Nothing is
            applied, but the steps behind it
                fail as after any failed step.
        """
        try:
            scheduled = self._apply(step, arrays)
        except InvalidStepError:
            self.mark_failed(step.seq)
            raise
        if step.resync is not None:
            self._accepted.clear()
        self._num_accepted += 1
        self._accepted.append(_Accepted(self._num_accepted, step.epoch, scheduled))
        return scheduled

    def _apply(self, step: ExecuteModel, arrays: Sequence[Frame]) -> ScheduledStep:
        if self._decoding is not None:
            if self._only_goes_on(step, arrays):
                return self._decode(step, self._decoding)
            self._note_decoded(self._decoding)
        changes_rows = bool(step.finished or step.scheduled_new_reqs) or step.resync is not None
        counts = self._counts.copy() if changes_rows else self._counts
        if changes_rows:
            self._free(step, counts)
            tokens = self._admit(step, arrays, counts)
        elif arrays:
            raise _invalid("arrays", f"{len(arrays)} frames", "send no frame without new requests")
        updates = self._check_blocks(step, counts)
        if step.defer_sampling:
            self._check_deferral(step)
        slots = self._scheduled_slots(step)
        if self._deferred:
            self._check_sampled(slots, counts)
        num_tokens = self._scheduled_tokens(step, slots)
        rows = self._batch.rows
        starts = counts.num_computed[rows].copy()
        ends = starts + num_tokens
        known = counts.num_tokens[rows]
        _append(updates, counts)
        capacity = self._capacity(rows, counts)
        if np.count_nonzero(ends <= np.minimum(capacity, known)) < slots.size:
            try:
                raise self._misfit(slots, num_tokens, ends, counts)
            finally:
                _take_back(updates, counts)
        # Nothing has been changed up to here but block counts, and nothing can be refused from here
        # on.
        if changes_rows:
            self._counts = counts
            self._remember(step, tokens)
        if step.resync is not None:
            self._failed_seq = None
            self._deferred.clear()
        samples = ends == known
        known = known + samples
        counts.num_computed[rows] = ends
        counts.num_tokens[rows] = known
        self._decoding = None
        if step.defer_sampling:
            sampling = slots[samples]
            counts.unsampled[sampling] = True
            self._deferred[step.seq] = (sampling, self.generation[sampling])
        elif slots.size and np.count_nonzero(samples) == slots.size:
            self._decoding = _Decoding(
                ends, known, capacity, int(known.max()), self._one_each[: slots.size], samples
            )
        return ScheduledStep(
            seq=step.seq,
            slots=slots,
            num_tokens=num_tokens,
            starts=starts,
            ends=ends,
            total_num_tokens=step.total_num_scheduled_tokens,
            longest=int(ends.max(initial=0)),
            samples=samples,
            new_requests=step.scheduled_new_reqs,
            block_updates=updates,
            defer_sampling=step.defer_sampling,
        )

    def _only_goes_on(self, step: ExecuteModel, arrays: Sequence[Frame]) -> bool:
        """Whether a step gives one more token to each row of the step before, and does nothing else
        but append blocks."""
        return (
            step.scheduled == self._batch.bitmap
            and step.total_num_scheduled_tokens == self._batch.slots.size
            and step.resync is None
            and not (
                step.num_scheduled_tokens
                or step.finished
                or step.scheduled_new_reqs
                or step.defer_sampling
                or arrays
                or self._deferred
            )
        )

    def _decode(self, step: ExecuteModel, last: _Decoding) -> ScheduledStep:
        """Check and apply a step that only goes on. Its rows are live and at their last token, and
        as many as a batch holds, because the step before left them so: what remains to check is
        blocks and lengths."""
        counts, (_, slots, rows) = self._counts, self._batch
        starts, ends, capacity = last.num_computed, last.num_tokens, last.capacity
        updates = self._check_blocks(step, counts)
        if updates is not _NO_UPDATES:
            _append(updates, counts)
            capacity = counts.num_blocks[rows] * self._block_size
        longest = last.longest
        if longest > self.limits.max_model_len or _any(ends > capacity):
            try:
                self._note_decoded(last)
                raise self._misfit(slots, last.num_scheduled, ends, counts)
            finally:
                _take_back(updates, counts)
        last.num_computed, last.num_tokens, last.capacity = ends, ends + _ONE, capacity
        last.longest += 1
        # By position, in the order of the fields: names would cost as much as three of these lines.
        return ScheduledStep(
            step.seq,
            slots,
            last.num_scheduled,
            starts,
            ends,
            slots.size,
            longest,
            last.samples,
            (),
            updates,
            False,
        )

    def _note_decoded(self, last: _Decoding) -> None:
        """Write the counts of steps that only went on to their rows."""
        rows = self._batch.rows
        self._counts.num_computed[rows] = last.num_computed
        self._counts.num_tokens[rows] = last.num_tokens

    def take_unsampled(self, step_seq: int) -> None:
        """Note that a deferred step is sampled now.

        Raises:
            InvalidStepError: that step did not defer its sampling, or was sampled already.
        """
        if step_seq not in self._deferred:
            raise _invalid("step_seq", step_seq, f"one of {sorted(self._deferred)}")
        slots, generations = self._deferred.pop(step_seq)
        self._counts.unsampled[slots[self.are_current(slots, generations)]] = False

    def dummy_step(self, seq: int) -> ScheduledStep:
        """Return a step of one token on the spare row, which writes to the null block and samples
        nothing."""
        return ScheduledStep(
            seq=seq,
            slots=np.array([self.spare_slot], np.int64),
            num_tokens=np.ones(1, np.int32),
            starts=np.zeros(1, np.int32),
            ends=np.ones(1, np.int32),
            total_num_tokens=1,
            longest=1,
            samples=np.zeros(1, np.bool_),
            new_requests=(),
            block_updates=_NO_UPDATES,
            defer_sampling=False,
        )

    def _free(self, step: ExecuteModel, counts: _Counts) -> None:
        if step.finished:
            slots = _uint16s("finished", step.finished)
            self._check_live("finished", slots, counts)
            _check_unique("finished", slots)
            counts.clear(slots)
        if step.resync is not None:
            self._check_resync(step.resync, counts)

    def _check_resync(self, resync: bytes, counts: _Counts) -> None:
        values = _int32s("resync", resync)
        if values.size % 4:
            raise _invalid("resync", f"{values.size} values", "send rows of four int32")
        slots, computed, tokens, blocks = values.reshape(-1, 4).T.astype(np.int64)
        if slots.size and slots.min() < 0:
            raise _invalid("resync", int(slots.min()), self._known_slots)
        self._check_live("resync", slots, counts)
        _check_unique("resync", slots)
        wrong = np.flatnonzero(
            (counts.num_computed[slots] != computed)
            | (counts.num_tokens[slots] != tokens)
            | (counts.num_blocks[slots] != blocks)
            | counts.unsampled[slots]
        )
        if wrong.size:
            slot = int(slots[wrong[0]])
            raise _invalid(
                "resync",
                f"slot {slot}: {values.reshape(-1, 4)[wrong[0], 1:].tolist()}",
                f"this rank has {counts.num_computed[slot]} computed of "
                f"{counts.num_tokens[slot]} tokens, {counts.num_blocks[slot]} blocks, "
                f"unsampled {bool(counts.unsampled[slot])}: finish the request and admit it again",
            )
        dropped = counts.live.copy()
        dropped[slots] = False
        counts.clear(dropped)

    def _admit(self, step: ExecuteModel, arrays: Sequence[Frame], counts: _Counts) -> Int32s:
        """Write the new requests' counts and return the tokens of all of them, [sum of
        num_tokens]."""
        expected = sum(request.num_tokens for request in step.scheduled_new_reqs)
        if len(arrays) != (1 if step.scheduled_new_reqs else 0):
            raise _invalid(
                "arrays",
                f"{len(arrays)} frames",
                "send one frame of tokens with new requests, else none",
            )
        tokens = _int32s("tokens", arrays[0]) if arrays else _NO_BLOCKS
        if tokens.size != expected:
            raise _invalid("tokens", f"{tokens.size} values", f"the new requests have {expected}")
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.limits.vocab_size:
            raise _invalid(
                "tokens",
                f"{int(tokens.min())}..{int(tokens.max())}",
                f"token ids from 0 to {self.limits.vocab_size - 1}",
            )
        for request in step.scheduled_new_reqs:
            self._check_admission(request, counts)
            counts.live[request.slot] = True
            counts.num_computed[request.slot] = request.num_computed_tokens
            counts.num_tokens[request.slot] = request.num_tokens
            counts.num_blocks[request.slot] = 0
        return tokens

    def _check_admission(self, request: NewRequestData, counts: _Counts) -> None:
        name = f"scheduled_new_reqs[{request.req_id}]"
        if request.slot >= self.limits.max_num_seqs:
            raise _invalid(
                f"{name}.slot", request.slot, f"slots from 0 to {self.limits.max_num_seqs - 1}"
            )
        if counts.live[request.slot]:
            raise _invalid(f"{name}.slot", request.slot, "finish the slot's request first")
        if request.num_tokens > self.limits.max_model_len:
            raise _invalid(
                f"{name}.num_tokens",
                request.num_tokens,
                f"max_model_len is {self.limits.max_model_len}",
            )
        if request.num_prompt_tokens > request.num_tokens:
            raise _invalid(
                f"{name}.num_prompt_tokens",
                request.num_prompt_tokens,
                f"at most {request.num_tokens}",
            )
        if request.num_computed_tokens >= request.num_tokens:
            raise _invalid(
                f"{name}.num_computed_tokens",
                request.num_computed_tokens,
                "leave at least one token to compute",
            )
        self._check_sampling(name, request.sampling)

    def _check_sampling(self, name: str, sampling: SamplingParams) -> None:
        vocab_size = self.limits.vocab_size
        unknown = [token for token in sampling.stop_token_ids if token >= vocab_size]
        if unknown:
            raise _invalid(f"{name}.sampling.stop_token_ids", unknown[0], f"below {vocab_size}")
        if sampling.logprobs is not None and sampling.logprobs > vocab_size:
            raise _invalid(f"{name}.sampling.logprobs", sampling.logprobs, f"at most {vocab_size}")
        if 0 < sampling.temperature < MIN_TEMPERATURE:
            raise _invalid(
                f"{name}.sampling.temperature",
                sampling.temperature,
                f"0 for the most likely token, or at least {MIN_TEMPERATURE}",
            )

    def _check_blocks(self, step: ExecuteModel, counts: _Counts) -> BlockUpdates:
        if not (step.new_block_slots or step.new_block_ids):
            return _NO_UPDATES
        column = self._block_columns.get(step.new_block_slots)
        if column is None:
            column = self._read_block_column(step.new_block_slots)
        slots, occurrences = column
        block_ids = _int32s("new_block_ids", step.new_block_ids)
        if block_ids.size > MAX_BLOCK_UPDATES:
            raise _invalid(
                "new_block_ids",
                f"{block_ids.size} blocks",
                f"a step brings at most {MAX_BLOCK_UPDATES}: admit fewer requests at a time",
            )
        if slots.size != block_ids.size:
            raise _invalid(
                "new_block_slots", f"{slots.size} slots", f"one for each of {block_ids.size} blocks"
            )
        try:
            indices = counts.num_blocks[slots]
        except IndexError:
            raise self._unknown_slot("new_block_slots", slots) from None
        if occurrences is not None:
            indices += occurrences
        is_inside = _within(block_ids, 1, self.limits.num_blocks - 1)
        if not (is_inside and _within(indices, 0, self._max_index)):
            raise self._bad_blocks(slots, block_ids, indices, counts)
        return BlockUpdates(slots, indices, block_ids)

    def _read_block_column(self, raw: bytes) -> _BlockColumn:
        slots = _uint16s("new_block_slots", raw)
        occurrences = _occurrence(slots)
        column = _BlockColumn(slots, occurrences if occurrences.any() else None)
        slots.flags.writeable = False  # every step with this column shares it
        if len(self._block_columns) == MAX_BLOCK_COLUMNS:
            self._block_columns.clear()
        self._block_columns[raw] = column
        return column

    def _bad_blocks(
        self, slots: Int64s, block_ids: Int32s, indices: Int32s, counts: _Counts
    ) -> InvalidStepError:
        """Say what is wrong with block updates."""
        outside = (block_ids < 1) | (block_ids >= self.limits.num_blocks)
        beyond = indices > self._max_index
        self._check_live("new_block_slots", slots, counts)
        if outside.any():
            return _invalid(
                "new_block_ids",
                int(block_ids[int(outside.argmax())]),
                f"block ids from 1 to {self.limits.num_blocks - 1}",
            )
        return _invalid(
            "new_block_slots",
            int(slots[int(beyond.argmax())]),
            f"a request has at most {self.limits.max_blocks_per_seq} blocks",
        )

    def _capacity(self, rows: slice | Int64s, counts: _Counts) -> Int32s:
        """Return the tokens that each row's blocks and max_model_len have room for; any number for
        a row without a request."""
        capacity: Int32s = np.minimum(
            counts.num_blocks[rows] * self._block_size, self.limits.max_model_len
        )
        return capacity

    def _check_deferral(self, step: ExecuteModel) -> None:
        waiting = {} if step.resync is not None else self._deferred
        if len(waiting) == MAX_UNSAMPLED_STEPS:
            raise _invalid("defer_sampling", True, f"sample step {min(waiting)} first")

    def _check_sampled(self, slots: Int64s, counts: _Counts) -> None:
        unsampled = counts.unsampled[slots]
        if unsampled.any():
            slot = int(slots[int(unsampled.argmax())])
            raise _invalid("scheduled", slot, "send SampleTokens for its last step first")

    def _scheduled_slots(self, step: ExecuteModel) -> Int64s:
        """Unpack the bitmap, or keep the last step's slots where it is the same."""
        if step.scheduled != self._batch.bitmap:
            bits = np.frombuffer(step.scheduled, np.uint8)
            slots = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
            if slots.size and slots[-1] >= self.limits.max_num_seqs:
                raise _invalid("scheduled", int(slots[-1]), self._known_slots)
            self._batch = _Batch(step.scheduled, slots, _as_rows(slots))
            self._decoding = None
        return self._batch.slots

    def _scheduled_tokens(self, step: ExecuteModel, slots: Int64s) -> Int32s:
        num_tokens, total = self._one_each[: slots.size], slots.size
        if step.num_scheduled_tokens:
            num_tokens = self._read_exceptions(step.num_scheduled_tokens, slots)
            total = int(num_tokens.sum(dtype=np.int64))
        if total != step.total_num_scheduled_tokens:
            raise _invalid(
                "total_num_scheduled_tokens",
                step.total_num_scheduled_tokens,
                f"the scheduled slots have {total}",
            )
        if total > self.limits.max_num_batched_tokens:
            raise _invalid(
                "total_num_scheduled_tokens",
                total,
                f"max_num_batched_tokens is {self.limits.max_num_batched_tokens}",
            )
        return num_tokens

    def _read_exceptions(self, raw: bytes, slots: Int64s) -> Int32s:
        """Return the tokens of each slot: one, but for the (slot, tokens) pairs of raw."""
        pairs = _int32s("num_scheduled_tokens", raw)
        if pairs.size % 2:
            raise _invalid(
                "num_scheduled_tokens", f"{pairs.size} values", "send pairs (slot, tokens)"
            )
        named, tokens = pairs.reshape(-1, 2).T
        positions = np.searchsorted(slots, named)
        if not ((positions < slots.size).all() and (slots[positions] == named).all()):
            raise _invalid("num_scheduled_tokens", named.tolist()[:8], "name scheduled slots only")
        _check_unique("num_scheduled_tokens", named)
        low, high = int(tokens.min()), int(tokens.max())
        if low < 1 or high > self.limits.max_model_len:
            raise _invalid(
                "num_scheduled_tokens",
                low if low < 1 else high,
                f"1 to {self.limits.max_model_len}; leave slots without tokens out",
            )
        num_tokens = np.ones(slots.size, np.int32)
        num_tokens[positions] = tokens
        return num_tokens

    def _misfit(
        self, slots: Int64s, num_tokens: Int32s, ends: Int32s, counts: _Counts
    ) -> InvalidStepError:
        """Say why a scheduled slot cannot have its tokens."""
        self._check_live("scheduled", slots, counts)
        capacity = self._capacity(slots, counts)
        position = int((ends > np.minimum(counts.num_tokens[slots], capacity)).argmax())
        slot = int(slots[position])
        return _invalid(
            "num_scheduled_tokens",
            f"slot {slot}: {int(num_tokens[position])}",
            f"it has {counts.num_computed[slot]} of {counts.num_tokens[slot]} tokens computed, "
            f"blocks for {capacity[position]}, and max_model_len is {self.limits.max_model_len}",
        )

    @property
    def _known_slots(self) -> str:
        return f"slots from 0 to {self.limits.max_num_seqs - 1}"

    def _check_live(self, field: str, slots: Int64s, counts: _Counts) -> None:
        try:
            live = counts.live[slots]
        except IndexError:
            raise self._unknown_slot(field, slots) from None
        if np.count_nonzero(live) < slots.size:
            raise _invalid(
                field, int(slots[int(live.argmin())]), "admit a request to the slot first"
            )

    def _unknown_slot(self, field: str, slots: Int64s) -> InvalidStepError:
        return _invalid(field, int(slots.max()), self._known_slots)

    def _remember(self, step: ExecuteModel, tokens: Int32s) -> None:
        first = 0
        for request in step.scheduled_new_reqs:
            self.known_tokens[request.slot] = tokens[first : first + request.num_tokens].copy()
            self.num_known_tokens[request.slot] = request.num_tokens
            self.num_prompt_tokens[request.slot] = request.num_prompt_tokens
            self.req_ids[request.slot] = request.req_id
            self.notes[request.slot] = request.note
            self.generation[request.slot] += 1
            first += request.num_tokens


def _invalid(field: str, value: object, fix: str) -> InvalidStepError:
    return InvalidStepError(
        "the step is refused, nothing of it was applied", field=field, value=value, fix=fix
    )


def _any(conditions: Bools) -> bool:
    """Whether one of them holds; for the few and the small a third of what numpy's own takes."""
    return 1 in conditions.tobytes()


def _within(values: Int32s, low: int, high: int) -> bool:
    """Whether none is outside; without numpy for the few, where it is mostly overhead."""
    if values.size <= _FEW:
        few = values.tolist()
        return not few or (low <= min(few) and max(few) <= high)
    return bool(low <= values.min() and values.max() <= high)


def _append(updates: BlockUpdates, counts: _Counts) -> None:
    if updates.slots.size:
        counts.num_blocks[updates.slots] = updates.indices + _ONE


def _take_back(updates: BlockUpdates, counts: _Counts) -> None:
    """Undo _append: a row's first index in the updates is what it had before."""
    np.minimum.at(counts.num_blocks, updates.slots, updates.indices)


def _as_rows(slots: Int64s) -> slice | Int64s:
    """Return what indexes these ascending slots fastest: a slice where they have no gap."""
    if slots.size and int(slots[-1]) - int(slots[0]) + 1 == slots.size:
        return slice(int(slots[0]), int(slots[-1]) + 1)
    return slots


def _int32s(field: str, raw: Frame) -> Int32s:
    if len(raw) % 4:
        raise _invalid(field, f"{len(raw)} bytes", "send little-endian int32 values")
    return np.frombuffer(raw, _INT32)


def _uint16s(field: str, raw: bytes) -> Int64s:
    if len(raw) % 2:
        raise _invalid(field, f"{len(raw)} bytes", "send little-endian uint16 values")
    return np.frombuffer(raw, _UINT16).astype(np.int64)


def _check_unique(field: str, slots: Int64s | Int32s) -> None:
    values, counts = np.unique(slots, return_counts=True)
    if values.size < slots.size:
        raise _invalid(field, int(values[int(counts.argmax())]), "name each slot once")


def _occurrence(slots: Int64s) -> Int32s:
    """Return how often each element's value has come before it: [7, 3, 7, 7] -> [0, 0, 1, 2]."""
    if np.count_nonzero(slots[1:] <= slots[:-1]) == 0:
        return np.zeros(slots.size, np.int32)
    order = np.argsort(slots, kind="stable")
    ordered = slots[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    run_lengths = np.diff(np.r_[starts, ordered.size])
    result = np.empty(slots.size, np.int32)
    result[order] = np.arange(slots.size) - np.repeat(starts, run_lengths)
    return result
