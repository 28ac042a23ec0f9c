"""A group of daemons without daemons: in place of a model it has the contents of each place of the
KV cache. It stands behind vLLM's engine core, our scheduler, executor and translation, and behind
the driver library's own table of slots and its account of failures.

Each step checks what it reads. Whatever vLLM's scheduler and our translation decide, a request
reads what its own tokens have to leave there, and nothing that the same step writes."""

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from rpc_schema.error_replies import ErrorReply
from rpc_schema.errors import ErrorCode, ErrorScope, error_of_rank
from rpc_schema.kv_cache import NULL_BLOCK, BlockGroup
from rpc_schema.pooling import NO_POOLING
from rpc_schema.step import NO_TOKEN, ModelRunnerOutput
from tests.support.structured import VOCAB_SIZE
from worker_client.errors import InvalidSchedulerOutput, WorkerDied, remote_error
from worker_client.group.drafts import DraftTokenIds
from worker_client.group.failure_state import Change, FailureState, GroupRequest
from worker_client.group.loading import group_limits
from worker_client.group.outcomes import StepFuture, StepsInFlight
from worker_client.requests import SamplingParams
from worker_client.scheduler_output import SchedulerOutput
from worker_client.steps.block_moves import HostMoves
from worker_client.steps.cached_blocks import CachedBlocks
from worker_client.steps.encoded_step import EncodedStep, bitmap_of
from worker_client.steps.masks import StepMasks

POISON = 5
"""A token whose keys and values are no numbers, like all that are written together with them."""
NO_NUMBER = b"NaN"
GARBAGE = b"garbage"


def next_token(tokens: Sequence[int], seed: int, allowed: Sequence[int] | None = None) -> int:
    """Return the token after `tokens`; never POISON."""
    digest = _digests(tokens)[-1] if tokens else b""
    return _choose(digest, seed, allowed)


def _choose(digest: bytes, seed: int, allowed: Sequence[int] | None) -> int:
    mixed = blake2b(digest + seed.to_bytes(8, "little"), digest_size=4).digest()
    number = int.from_bytes(mixed, "little")
    if allowed is not None:
        return allowed[number % len(allowed)]
    return POISON + 1 + number % (VOCAB_SIZE - POISON - 1)


def _digests(tokens: Sequence[int], before: bytes = b"") -> list[bytes]:
    """Return the contents of each position: they follow from its token and all before it."""
    found = []
    for token in tokens:
        before = blake2b(before + token.to_bytes(4, "little", signed=True), digest_size=8).digest()
        found.append(before)
    return found


def _bits(packed: np.ndarray | bytes) -> np.ndarray:
    return np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")


@dataclass(eq=False)
class Row:
    """A request of the workers."""

    tokens: list[int]
    num_computed: int
    seed: int
    blocks: list[list[int]]
    """For each KV group."""
    drafts: list[int] = field(default_factory=list)
    """Guesses of the tokens behind those, in the step that runs."""
    digests: list[bytes] = field(default_factory=list)

    def content(self, position: int) -> bytes:
        """Return what has to be at a position."""
        own = self.digests
        if position >= len(self.tokens):
            guessed = self.drafts[: position + 1 - len(self.tokens)]
            return _digests(guessed, self.content(len(self.tokens) - 1))[-1]
        if len(own) < len(self.tokens):
            own += _digests(self.tokens[len(own) :], own[-1] if own else b"")
        return own[position]


class Place(NamedTuple):
    """A token's place in the KV cache."""

    block: int
    offset: int


@dataclass(frozen=True)
class Faults:
    """How often steps are lost, as probabilities."""

    fails: float = 0.0
    dies: float = 0.0
    """A daemon dies; its successor has an empty cache."""
    expires: float = 0.0
    """The lease expires."""
    flips: float = 0.0
    """A block that a step loads has changed in host memory."""


class HostSlot(NamedTuple):
    """A block in host memory."""

    tag: bytes
    name: bytes
    places: dict[int, tuple[int, bytes]]
    """KV group and content at each offset."""


class ModelledDaemons:
    """What outlives a driver: the KV cache, and the notes of its blocks."""

    def __init__(
        self,
        groups: Sequence[BlockGroup],
        num_blocks: int,
        source: random.Random,
        faults: Faults,
        num_host_blocks: int = 0,
    ) -> None:
        self.host: list[HostSlot | None] = [None] * num_host_blocks
        """Host memory: what was stored in each slot, by steps that have succeeded."""
        self.num_loaded = self.num_invalid = 0
        self.groups = tuple(groups)
        self.num_blocks = num_blocks
        self.source = source
        self.faults = faults
        self.losses = 0
        """Faults that have happened."""
        self.num_shared = 0
        """Positions with which requests began."""
        self.num_accepted = self.num_refused = 0
        """Drafts."""
        self.allowed_next: Callable[[int, Sequence[int]], list[int] | None] = lambda *_: None
        """Returns what a grammar allows after the tokens of the row of a seed, for drafts that are
        right; None: there is no grammar."""
        self.kv: dict[Place, tuple[int, bytes]] = {}
        """KV group and content of each place that a step has written."""
        self.tag = b""
        self.notes: dict[int, bytes] = {}
        self._given_at: dict[int, int] = {}
        """The step that has last given each block to a request that writes to it."""
        self.rows: dict[str, Row] = {}
        self.invalid: list[int] = []
        """Blocks that the last step was to load and that it has filled with NaN."""
        self._unsampled: dict[int, dict[str, tuple[Row, bool]]] = {}
        """Deferred requests of each step, and whether their logits are no numbers."""

    def drop_rows(self) -> None:
        """Forget all requests."""
        self.rows.clear()
        self._unsampled.clear()

    def lose_contents(self) -> None:
        """As a successor's: the cache is empty, and nothing is noted."""
        self.kv.clear()
        self.notes.clear()
        self.host = [None] * len(self.host)

    def note(self, tag: bytes, blocks: CachedBlocks, after: int, distrusted: Sequence[int]) -> None:
        """Note blocks, but those that a later step has given away."""
        if tag != self.tag:
            self.tag = tag
            self.notes.clear()
        for block in distrusted:
            self.notes.pop(block, None)
        for block, row in zip(blocks.block_ids.tolist(), blocks.hashes, strict=True):
            if self._given_at.get(block, 0) <= after:
                self.notes[block] = row.tobytes()

    # ------------------------------------------------------------------ steps

    def run(self, seq: int, output: SchedulerOutput, *, is_void: bool) -> dict[str, list[int]]:
        """Run a step; return what it samples. A void one may read anything."""
        self._move(seq, output)
        counts = self._apply(seq, output)
        reads, writes = self._places(counts, is_void=is_void)
        assert reads.isdisjoint(writes), f"read in the step that writes: {reads & writes.keys()}"
        if is_void:
            writes = dict.fromkeys(writes, (0, GARBAGE))
        self.kv |= writes
        sampled = {}
        for req_id, count in counts.items():
            row = self.rows[req_id]
            first = row.num_computed
            row.num_computed += count
            if row.num_computed < len(row.tokens):
                continue
            fails = writes[self._place(row, 0, first)][1] == NO_NUMBER
            if req_id in output.deferred_req_ids:
                self._unsampled.setdefault(seq, {})[req_id] = row, fails
            else:
                sampled[req_id] = self._verify(row, fails, [None] * (1 + len(row.drafts)))
        return sampled

    def _guess(self, row: Row, num: int) -> list[int]:
        """Return drafts of a row, most of them right."""
        drafts: list[int] = []
        for _ in range(num):
            tokens = [*row.tokens, *drafts]
            token = next_token(tokens, row.seed, self.allowed_next(row.seed, tokens))
            is_wrong = self.source.random() < 0.3
            drafts.append(POISON + 1 if is_wrong else token)
        return drafts

    def _verify(self, row: Row, fails: bool, allowed: Sequence[Sequence[int] | None]) -> list[int]:
        """Sample after a row's tokens, and after each draft as long as they are right. allowed: the
        tokens of each sample; None: all."""
        drafts, row.drafts = row.drafts, []
        gained = [self._sample(row, fails, allowed[0])]
        for draft, own in zip(drafts, allowed[1:], strict=True):
            if gained[-1] != draft:
                break
            gained.append(self._sample(row, fails, own))
        row.num_computed = len(row.tokens) - 1
        self.num_accepted += len(gained) - 1
        self.num_refused += 1 + len(drafts) - len(gained)
        return gained

    def unsampled_drafts(self, seq: int) -> dict[str, list[int]]:
        """Return the drafts of a step's deferred requests."""
        rows = self._unsampled.get(seq, {})
        return {req_id: list(row.drafts) for req_id, (row, _) in rows.items()}

    def sample(
        self, seq: int, req_ids: Sequence[str], masks: Mapping[str, Sequence[np.ndarray]]
    ) -> dict[str, list[int]]:
        """Sample deferred requests of a step; those that have left meanwhile are left out."""
        sampled = {}
        for req_id in req_ids:
            row, fails = self._unsampled[seq].pop(req_id)
            if self.rows.get(req_id) is row:
                allowed: list[list[int] | None] = [None] * (1 + len(row.drafts))
                if req_id in masks:
                    allowed = [_bits(mask)[:VOCAB_SIZE] for mask in masks[req_id]]
                    allowed = [np.flatnonzero(own).tolist() for own in allowed]
                sampled[req_id] = self._verify(row, fails, allowed)
        return sampled

    def lose(self, seq: int, output: SchedulerOutput) -> None:
        """Lose a step: nobody knows which of its places it has written, nor what it has stored in
        host memory."""
        for moves in self._moves(output):
            for slot in moves.stored.slots:
                self.host[slot] = None
        counts = self._apply(seq, output)
        _, writes = self._places(counts, is_void=True)
        for place, content in writes.items():
            lost = self.source.choice([content, (content[0], GARBAGE), self.kv.get(place)])
            if lost is not None:
                self.kv[place] = lost
        self.losses += 1

    @staticmethod
    def _moves(output: SchedulerOutput) -> list[HostMoves]:
        return [each for each in output.extensions if isinstance(each, HostMoves)]

    def _move(self, seq: int, output: SchedulerOutput) -> None:
        """Store and load blocks, as the daemons do before a step."""
        self.invalid = []
        size = max(group.block_size for group in self.groups)
        for moves in self._moves(output):
            stored, loaded = moves.stored, moves.loaded
            assert len({*stored.block_ids}) == len(stored.block_ids)
            assert len({*stored.slots}) == len(stored.slots)
            assert {*stored.slots}.isdisjoint(loaded.slots)
            for block, slot, name in zip(*stored, strict=True):
                found = ((offset, self.kv.get(Place(block, offset))) for offset in range(size))
                places = {offset: own for offset, own in found if own is not None}
                self.host[slot] = HostSlot(moves.tag, name, places)
            for block, slot, name in zip(*loaded, strict=True):
                self.num_loaded += 1
                self._given_at[block] = seq
                self.notes.pop(block, None)
                own = self.host[slot]
                is_known = own is not None and (own.tag, own.name) == (moves.tag, name)
                is_known = is_known and self.source.random() >= self.faults.flips
                group = int.from_bytes(name[-4:], "big")
                places = dict.fromkeys(range(size), (group, NO_NUMBER))
                if is_known:
                    places = own.places
                else:
                    self.num_invalid += 1
                    self.invalid.append(block)
                for offset in range(size):
                    self.kv.pop(Place(block, offset), None)
                self.kv |= {Place(block, offset): own for offset, own in places.items()}

    def _apply(self, seq: int, output: SchedulerOutput) -> dict[str, int]:
        """Apply a step's changes of rows; return the tokens of each request."""
        for req_id in (*output.finished_req_ids, *output.preempted_req_ids):
            self.rows.pop(req_id, None)
        for new in output.scheduled_new_reqs:
            assert new.req_id not in self.rows
            blocks = [list(own) for own in new.blocks_by_group]
            seed, first = SamplingParams.of(new.extensions).seed or 0, new.num_computed_tokens
            self.rows[new.req_id] = Row(new.token_ids.tolist(), first, seed, blocks)
            self.num_shared += first
            for group, own in zip(self.groups, blocks, strict=True):
                self._give(seq, own[first // group.block_size :], first % group.block_size)
        for group, given in enumerate((output.new_block_ids, *output.more_new_block_ids)):
            for req_id, own in given.items():
                self.rows[req_id].blocks[group] += own
                self._give(seq, own)
        for req_id, num in output.num_drafts.items():
            self.rows[req_id].drafts = self._guess(self.rows[req_id], num)
        return {**dict.fromkeys(output.decode_req_ids, 1), **output.num_scheduled_tokens}

    def _give(self, seq: int, block_ids: Sequence[int], num_kept: int = 0) -> None:
        """Give blocks to a request that writes to them. Of the first, it keeps some places."""
        size = max(group.block_size for group in self.groups)
        for index, block in enumerate(block_ids):
            assert 0 < block < self.num_blocks
            self._given_at[block] = seq
            self.notes.pop(block, None)
            for offset in range(0 if index else num_kept, size):
                self.kv.pop(Place(block, offset), None)

    def _places(
        self, counts: Mapping[str, int], *, is_void: bool
    ) -> tuple[set[Place], dict[Place, tuple[int, bytes]]]:
        """Return the places that a step reads as others have left them, and those that it writes;
        check what is read."""
        reads: set[Place] = set()
        writes: dict[Place, tuple[int, bytes]] = {}
        for req_id, count in counts.items():
            row = self.rows[req_id]
            first, end = row.num_computed, row.num_computed + count
            left = len(row.tokens) - first
            assert count == left + len(row.drafts) if row.drafts else 1 <= count <= left
            fails = not {POISON, NO_TOKEN}.isdisjoint(row.tokens[first:end])
            for number, group in enumerate(self.groups):
                seen = 0 if group.window is None else max(0, first - group.window + 1)
                for position in range(seen, first):
                    place = self._place(row, number, position)
                    found = self.kv.get(place)
                    fails = fails or found == (number, NO_NUMBER)
                    expected = number, row.content(position)
                    if not is_void and found not in (expected, (number, NO_NUMBER)):
                        raise AssertionError(
                            f"{req_id}, position {position}, {place}: {found}, not {expected}"
                        )
                    reads.add(place)
            for number, position in self._positions(first, end):
                place = self._place(row, number, position)
                assert place not in writes, f"{place} is written twice in a step"
                writes[place] = number, NO_NUMBER if fails else row.content(position)
        return reads, writes

    def _positions(self, first: int, end: int) -> list[tuple[int, int]]:
        return [(g, p) for g in range(len(self.groups)) for p in range(first, end)]

    def _row_places(self, row: Row, first: int, end: int) -> list[Place]:
        return [self._place(row, g, p) for g, p in self._positions(first, end)]

    def _place(self, row: Row, number: int, position: int) -> Place:
        size = self.groups[number].block_size
        block = row.blocks[number][position // size]
        assert block != NULL_BLOCK
        return Place(block, position % size)

    def _sample(self, row: Row, fails: bool, allowed: Sequence[int] | None = None) -> int:
        context = row.content(len(row.tokens) - 1)
        token = NO_TOKEN if fails else _choose(context, row.seed, allowed)
        row.tokens.append(token)
        return token


class _Sent(NamedTuple):
    """A message to the workers."""

    future: StepFuture
    step: EncodedStep
    kept: frozenset[str] | None
    """A step in full: the requests that the workers keep. None: it is none."""
    masks: Mapping[str, Sequence[np.ndarray]]
    is_void: bool = False
    """Nobody uses its result."""


class ModelledGroup:
    """Stands in for a WorkerGroup. Workers run messages, and replies arrive, at random times."""

    def __init__(
        self, daemons: ModelledDaemons, pipeline_parallel_size: int, max_model_len: int
    ) -> None:
        self._daemons = daemons
        self._source = daemons.source
        self._max_model_len = max_model_len
        self.max_in_flight = pipeline_parallel_size + 1
        self._output_rank = pipeline_parallel_size - 1
        self._state = FailureState(pipeline_parallel_size)
        self._steps = StepsInFlight(self._state, [self._output_rank])
        self._sent: deque[_Sent] = deque()
        self._replies: deque[tuple[StepFuture, object]] = deque()
        self._has_failed = False
        """The workers take only a step in full."""
        self._seq = 0
        self._epoch = 0
        self._lost_link = False
        self.is_loss_unreported = False
        """The group was attached again, of which the scheduler does not know: its steps are of no
        use, whether the driver library takes them or not."""
        self.loras = SimpleNamespace(known={})
        self.weights = SimpleNamespace(on_version=None)
        self.prefixes = self.drafts = self

    @property
    def slots(self):
        return self._steps.slots

    # ------------------------------------------------------------------ life

    def attach(self, **_: object) -> None:
        """Attach; requests are dropped."""
        self.is_loss_unreported = self._epoch > 0
        self._epoch += 1
        self._steps.abandon()
        self._state.apply(Change.GROUP_ATTACHED)
        self._drop()

    def prepare(self, config, **_: object) -> SimpleNamespace:
        """Return the group as loaded."""
        first = self._daemons.groups[0]
        metadata = SimpleNamespace(
            vocab_size=VOCAB_SIZE,
            hidden_size=64,
            generates=True,
            pooling=NO_POOLING,
            routed_experts=None,
        )
        loaded = SimpleNamespace(
            metadata=metadata,
            max_model_len=self._max_model_len,
            num_blocks=self._daemons.num_blocks,
            num_host_blocks=len(self._daemons.host),
            block_size=first.block_size,
            groups=self._daemons.groups,
            keeps_state=False,
            checkpoint_blocks=0,
        )
        self._steps.start(config.scheduler.max_num_seqs, group_limits(config, loaded), 1e6)
        return loaded

    def replace(self, rank: int, within_s: float) -> SimpleNamespace:
        """Put a successor in the place of the daemon that has died."""
        self._state.apply(Change.REPLACE_BEGUN)
        self._steps.revive()
        self._drop()
        return SimpleNamespace(ranks=(rank,), seconds={})

    def close(self) -> None:
        """Drop all requests."""
        self._drop()

    def _drop(self) -> None:
        self._sent.clear()
        self._replies.clear()
        self._daemons.drop_rows()
        self._has_failed = False

    # ------------------------------------------------------------------ steps

    @property
    def num_in_flight(self) -> int:
        return sum(not future.step.is_later for future in self._steps.pending)

    def await_credit(self) -> None:
        """Wait until another step may be sent."""
        while self.num_in_flight >= self.max_in_flight:
            self.wait_for(self._steps.pending[0], 0.0)

    def execute_model(self, output: SchedulerOutput) -> StepFuture:
        """Send a step."""
        self._proceed()
        self._state.check(GroupRequest.STEP)
        if self._state.needs_relink:
            self._state.apply(Change.LINK_MADE)
            self._drop()
            self._has_failed = True
        failure = self._steps.unreported_failure
        if failure is not None:
            failure.lost |= self.slots.fail([output])
            return failure.refuse(self)
        assert self.num_in_flight < self.max_in_flight
        kept = frozenset(self.slots.req_ids)
        self._seq += 1
        try:
            step = self.slots.encode(output, epoch=self._epoch, link=1, seq=self._seq)
        except InvalidSchedulerOutput as invalid:
            if self.is_loss_unreported:
                raise
            raise AssertionError(f"the driver library refuses a step: {invalid}") from invalid
        future = self._steps.expect(self, self._epoch, self._seq, step)
        in_full = kept if step.resync else None
        self._sent.append(_Sent(future, step, in_full, {}, self.is_loss_unreported))
        return future

    def sample_tokens(
        self, deferred: StepFuture, extensions: tuple[StepMasks, ...], req_ids: Sequence[str]
    ) -> StepFuture:
        """Sample deferred requests of a step."""
        self._proceed()
        self._state.check(GroupRequest.OPERATION)
        failure = deferred.failure or self._steps.unreported_failure
        if failure is not None:
            return failure.refuse(self)
        self._seq += 1
        step = self.slots.encode_sampling(
            deferred.step, extensions, req_ids, epoch=self._epoch, link=1, seq=self._seq
        )
        future = self._steps.expect(self, self._epoch, self._seq, step)
        (values,) = extensions
        # vLLM fills them anew.
        copied = {r: [mask.copy() for mask in own] for r, own in values.masks.items()}
        self._sent.append(_Sent(future, step, None, copied))
        return future

    def take_token_ids(self, deferred: StepFuture) -> DraftTokenIds:
        """Return the drafts of a step's deferred requests, once the workers have run it."""
        while any(sent.future is deferred for sent in self._sent):
            self._proceed(1)
        found = self._daemons.unsampled_drafts(deferred.seq)
        return DraftTokenIds([*found], [*found.values()])

    def withdraw(self, output: SchedulerOutput) -> frozenset[str]:
        return self.slots.withdraw(output)

    def take_replies(self, future: StepFuture) -> None:
        """Process the replies that are here."""
        self._proceed()

    def wait_for(self, future: StepFuture, until: float) -> None:
        """Process replies until the future is settled."""
        while not future.settled:
            assert self._sent or self._replies, "it would wait for ever"
            self._proceed(1)

    def _proceed(self, least: int = 0) -> None:
        for _ in range(self._source.randint(least, 3)):
            if self._sent and (not self._replies or self._source.random() < 0.6):
                self._run(self._sent.popleft())
            elif self._replies:
                self._take(*self._replies.popleft())

    def _run(self, sent: _Sent) -> None:
        """Let the workers run a message."""
        daemons, source, faults = self._daemons, self._source, self._daemons.faults
        if self._has_failed and sent.kept is None:
            return  # refused: its future fails with that of the step that failed
        self._has_failed = False
        if sent.kept is not None:
            daemons.rows = {r: row for r, row in daemons.rows.items() if r in sent.kept}
        chance = source.random()
        if chance < faults.fails + faults.dies + faults.expires:
            self._lose(sent, chance)
            return
        step, invalid = sent.step, b""
        if step.is_later:
            sampled = daemons.sample(step.seq, step.extra_req_ids, sent.masks)
        else:
            sampled = daemons.run(step.seq, step.output, is_void=sent.is_void)
            # Of several ranks, only one tells what it could not load.
            if source.random() < 0.5:
                invalid = np.array(daemons.invalid, "<i4").tobytes()
        bitmap, req_ids = step.sampled_bitmap()
        pairs = zip(np.flatnonzero(_bits(bitmap)).tolist(), req_ids, strict=True)
        slots = {req_id: slot for slot, req_id in pairs if req_id in sampled}
        assert slots.keys() == sampled.keys()
        assert step.is_later or len(slots) == len(req_ids)
        reply = ModelRunnerOutput(
            epoch=self._epoch,
            seq=sent.future.seq,
            rank=self._output_rank,
            slots=bitmap_of(np.array(list(slots.values()), "<u2").tobytes()),
            sampled_token_ids=np.array([t for r in slots for t in sampled[r]], "<i4").tobytes(),
            invalid_blocks=invalid,
            num_sampled=bytes(len(sampled[r]) for r in slots) if step.num_drafts else b"",
        )
        self._replies.append((sent.future, reply))

    def _lose(self, sent: _Sent, chance: float) -> None:
        daemons, faults = self._daemons, self._daemons.faults
        self._has_failed = True
        if sent.step.is_later:
            daemons.losses += 1
        else:
            daemons.lose(sent.step.seq, sent.step.output)
        if chance < faults.dies:
            daemons.lose_contents()
            reply: object = WorkerDied(0, "ipc:///nowhere")
        elif chance < faults.dies + faults.expires:
            code = ErrorCode.LEASE_EXPIRED
            reply = error_of_rank(code, "expired", rank=0, endpoint="ipc:///nowhere")
        else:
            self._lost_link = not self._lost_link and self._source.random() < 0.2
            reply = ErrorReply(
                epoch=self._epoch,
                seq=sent.future.seq,
                rank=self._output_rank,
                code=ErrorCode.COMM if self._lost_link else ErrorCode.INTERNAL,
                scope=ErrorScope.STEP,
                message="scripted",
                traceback="",
            )
        self._replies.append((sent.future, reply))

    def _take(self, future: StepFuture, reply: object) -> None:
        if isinstance(reply, ModelRunnerOutput):
            self._steps.take_outcome(reply, [])
        elif isinstance(reply, ErrorReply):
            self._steps.take_error(reply, remote_error(reply, rank=0, endpoint="ipc:///nowhere"))
        elif not future.settled:
            self._steps.die(reply)

    # ------------------------------------------------------------------ notes

    def get(self, tag: bytes, *, in_host_tier: bool = False) -> CachedBlocks:
        """Return the blocks that were noted, or what is in host memory."""
        if in_host_tier:
            slots = enumerate(self._daemons.host)
            held = {n: own.name for n, own in slots if own is not None and own.tag == tag}
            return CachedBlocks.of(list(held), list(held.values()))
        notes = self._daemons.notes if tag == self._daemons.tag else {}
        return CachedBlocks.of(list(notes), list(notes.values()))

    def note(
        self, tag: bytes, blocks: CachedBlocks, after: StepFuture, *, distrusted: Sequence[int]
    ) -> bool:
        """Note blocks, as a WorkerGroup does."""
        if self._source.random() < 0.3:
            return False
        chosen = self.slots.with_contents(blocks)
        if after.failure is not None or after.epoch != self._epoch:
            chosen = CachedBlocks.of([], [])
        self._daemons.note(tag, chosen, after.seq, distrusted)
        return True
