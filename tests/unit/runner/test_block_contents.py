"""The rule for notes of blocks' contents, against a KV cache of plain lists: in any order of steps,
notes, failures and kills, a block is offered only if it holds what its hash says."""

import random
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import pytest
from row_steps import bitmap, int32s, request_state, uint16s

from rpc_schema.errors import InvalidStepError, PrecededByError
from rpc_schema.step import ExecuteModel, NewRequestData
from tests.support.exhaustive import seeds
from worker_daemon.runner.block_contents import BlockContents
from worker_daemon.runner.scheduled_step import StepLimits

LIMITS = StepLimits(
    max_num_seqs=4,
    max_num_batched_tokens=32,
    max_model_len=40,
    vocab_size=3,
    block_size=4,
    num_blocks=24,
)
SIZE = LIMITS.block_size
TAG = b"test"
NEWEST = 2**40


def prefix_hash(tokens):
    """The hash of the block that ends with these tokens: here, the tokens themselves."""
    return bytes(tokens).ljust(LIMITS.max_model_len, b"\xff")


@dataclass
class Step:
    """A step as sent, and what it writes: (block, offset, tokens up to there)."""

    message: ExecuteModel
    arrays: list
    writes: list


@dataclass
class Running:
    tokens: list
    blocks: list
    computed: int
    admitted: bool = False


@dataclass
class Note:
    epoch: int
    blocks: list
    hashes: list
    after_seq: int


class Rank:
    """Rows of one rank, and a KV cache whose cells hold the tokens that they were computed from."""

    def __init__(self, rng):
        self.rng = rng
        self.state = request_state(LIMITS)
        self.cells = [[None] * SIZE for _ in range(LIMITS.num_blocks)]
        self.good = set()

    def run(self, step):
        if self.state.has_failed and step.message.resync is None:
            self.run_in_vain(step)
            return False
        self.state.apply(step.message, step.arrays)
        if self.rng.random() < 0.03:
            for block, offset, tokens in step.writes:
                self.cells[block][offset] = self.rng.choice((tokens, None))
            self.state.mark_failed(step.message.seq)
            return False
        for block, offset, tokens in step.writes:
            self.cells[block][offset] = tokens
        if self.rng.random() < 0.97:  # otherwise its result has not come yet
            self.good.add((step.message.epoch, step.message.seq))
        return True

    def run_in_vain(self, step):
        """Run a step after a failed one, if it is valid without that."""
        with suppress(InvalidStepError):
            self.state.apply(step.message, step.arrays)
            for block in self.rng.sample(range(1, LIMITS.num_blocks), 3):
                self.cells[block] = [None] * SIZE  # its block table is an old one
            if self.rng.random() < 0.5:
                self.state.mark_failed(step.message.seq)
            else:
                with pytest.raises(PrecededByError):
                    self.state.raise_if_failed()

    def take_note(self, note):
        hashes = np.frombuffer(b"".join(note.hashes), np.uint8).reshape(len(note.hashes), -1)
        block_ids = np.array(note.blocks, np.int32)
        return self.state.contents.note(TAG, block_ids, hashes, note.after_seq)

    def attach(self):
        has_confirmed = lambda epoch, seq: (epoch, seq) in self.good  # noqa: E731
        self.state.contents.end_epoch(self.state.last_good_seq(has_confirmed))
        self.state.drop_all()

    def offers(self, last_seq=NEWEST):
        noted = self.state.contents.noted(TAG, 0, LIMITS.num_blocks, last_seq)
        offered = {
            block: noted.hashes[i].tobytes() for i, block in enumerate(noted.block_ids.tolist())
        }
        for block, name in offered.items():
            cells = self.cells[block]
            assert all(cell is not None for cell in cells), block
            assert prefix_hash(cells[-1]) == name, block
            assert [len(cell) for cell in cells] == [len(cells[-1]) - k for k in (3, 2, 1, 0)]
        return offered


@dataclass
class SimpleDriver:
    """Schedules random prompts over the cached prefixes that it knows."""

    rng: random.Random
    epoch: int
    cached: dict
    """Hash -> block."""
    running: dict = field(default_factory=dict)
    seq: int = 0
    fresh: dict = field(default_factory=dict)
    resync: bool = True
    finished: list = field(default_factory=list)

    def free_blocks(self):
        held = {block for each in self.running.values() for block in each.blocks}
        return [block for block in range(1, LIMITS.num_blocks) if block not in held]

    def allocate(self, count):
        free = self.free_blocks()
        if len(free) < count:
            return None
        taken = self.rng.sample(free, count)
        self.cached = {name: block for name, block in self.cached.items() if block not in taken}
        return taken

    def step(self):
        """The next step."""
        rng = self.rng
        self.seq += 1
        for slot in [s for s, r in self.running.items() if r.computed == len(r.tokens)]:
            del self.running[slot]
            self.finished.append(slot)
        for slot in set(range(LIMITS.max_num_seqs)) - self.running.keys():
            if rng.random() < 0.5:
                self.admit(slot)
        new, scheduled, step_values, writes, budget = [], {}, [], [], LIMITS.max_num_batched_tokens
        for slot, request in self.running.items():
            count = min(budget, rng.randint(1, len(request.tokens) - request.computed))
            end = request.computed + count
            lacking = self.allocate(max(0, -(-end // SIZE) - len(request.blocks)))
            if not count or lacking is None:
                if not request.admitted:
                    continue
                count, lacking, end = 0, [], request.computed
            budget -= count
            before = [] if request.admitted else list(request.blocks)
            request.blocks += lacking
            step_values += [(slot, block) for block in (*before, *lacking)]
            if not request.admitted:
                new.append((slot, request, request.computed))
                request.admitted = True
            if count:
                scheduled[slot] = count
            for place in range(request.computed, end):
                block = request.blocks[place // SIZE]
                writes.append((block, place % SIZE, request.tokens[: place + 1]))
            request.computed = end
        self.running = {s: r for s, r in self.running.items() if r.admitted}
        finished, self.finished = ([], []) if self.resync else (self.finished, [])
        pairs = [v for s in sorted(scheduled) if scheduled[s] != 1 for v in (s, scheduled[s])]
        message = ExecuteModel(
            epoch=self.epoch,
            link=1,
            seq=self.seq,
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled=bitmap(scheduled),
            num_scheduled_tokens=int32s(*pairs),
            new_block_slots=uint16s(*(slot for slot, _ in step_values)),
            new_block_ids=int32s(*(block for _, block in step_values)),
            finished=uint16s(*finished),
            scheduled_new_reqs=tuple(
                NewRequestData(
                    slot=slot,
                    req_id=f"r{self.seq}-{slot}",
                    num_tokens=len(request.tokens),
                    num_prompt_tokens=len(request.tokens),
                    num_computed_tokens=computed,
                )
                for slot, request, computed in new
            ),
            resync=b"" if self.resync else None,
        )
        self.resync, self.finished = False, []
        arrays = [int32s(*(t for _, r, _ in new for t in r.tokens))] if new else []
        return Step(message, arrays, writes)

    def admit(self, slot):
        """Begin a random prompt with the longest prefix that is cached."""
        tokens = [self.rng.randrange(2) for _ in range(self.rng.randint(2, LIMITS.max_model_len))]
        tokens[:6] = [1] * len(tokens[:6])
        blocks = []
        while (len(blocks) + 1) * SIZE < len(tokens):
            block = self.cached.get(prefix_hash(tokens[: (len(blocks) + 1) * SIZE]))
            if block is None:
                break
            blocks.append(block)
        self.running[slot] = Running(tokens, blocks, len(blocks) * SIZE)

    def remember(self):
        """After a step was sent: cache what is full now."""
        for request in self.running.values():
            for index in range(request.computed // SIZE):
                name = prefix_hash(request.tokens[: (index + 1) * SIZE])
                if self.cached.setdefault(name, request.blocks[index]) == request.blocks[index]:
                    self.fresh[request.blocks[index]] = name

    def take_note(self):
        """What is cached, as of the last step sent."""
        valid = {block: name for name, block in self.cached.items()}
        fresh = {b: name for b, name in self.fresh.items() if valid.get(b) == name}
        self.fresh = {}
        return Note(self.epoch, list(fresh), list(fresh.values()), self.seq)

    def lose(self):
        """After a failed step: begin anew."""
        self.running, self.cached, self.fresh, self.resync = {}, {}, {}, True


@pytest.mark.parametrize("seed", seeds(5, of=20))
def test_offered_blocks_hold_what_their_hashes_say(seed):
    rng = random.Random(seed)
    rank, num_offered, num_restored = Rank(rng), 0, 0
    restored = {}
    for epoch in range(1, 16):
        driver = SimpleDriver(rng, epoch, {name: block for block, name in restored.items()})
        sent, notes = deque(), []
        for _ in range(rng.randint(1, 40)):
            if len(sent) < 3:
                sent.append(driver.step())
                driver.remember()
            if rng.random() < 0.3:
                note = driver.take_note()
                if note.blocks:
                    notes.append(note)
            if notes and rng.random() < 0.5:  # in any order, before or after their steps
                rank.take_note(notes.pop(rng.randrange(len(notes))))
            if sent and rng.random() < 0.8 and not rank.run(sent.popleft()):
                while sent:
                    rank.run(sent.popleft())
                driver.lose()
            if rng.random() < 0.02:  # new weights
                while sent:
                    rank.run(sent.popleft())
                rank.state.contents.forget()
                rank.state.drop_all()
                rank.cells = [[None] * SIZE for _ in range(LIMITS.num_blocks)]
                driver.lose()
            done = sent[0].message.seq - 1 if sent else driver.seq
            num_offered += len(rank.offers(last_seq=done))
        # Killed: any number of the steps and notes that were sent still arrive.
        for _ in range(rng.randint(0, len(sent))):
            rank.run(sent.popleft())
        for note in rng.sample(notes, rng.randint(0, len(notes))):
            rank.take_note(note)
        rank.attach()
        restored = rank.offers()
        num_restored += len(restored)
    assert num_offered > 300 and num_restored > 5, seed


def hashes_of(*names):
    return np.frombuffer(b"".join(names), np.uint8).reshape(len(names), -1)


def ids(*block_ids):
    return np.array(block_ids, np.int32)


def offered(contents, tag=TAG, last_seq=NEWEST):
    noted = contents.noted(tag, 0, contents.num_blocks, last_seq)
    return dict(zip(noted.block_ids.tolist(), map(bytes, noted.hashes), strict=True))


def test_notes_hold_until_a_later_step_writes_to_the_block():
    contents = BlockContents(10)
    assert contents.note(TAG, ids(3), hashes_of(b"aa"), 9) == 0  # nothing was written to it
    contents.write(ids(3, 4), 5)
    assert contents.note(TAG, ids(3, 4, 5), hashes_of(b"aa", b"bb", b"cc"), 4) == 0
    assert contents.note(TAG, ids(3, 4, 5), hashes_of(b"aa", b"bb", b"cc"), 5) == 2
    assert offered(contents) == {3: b"aa", 4: b"bb"}
    assert offered(contents, last_seq=4) == {}
    contents.write(ids(4), 7)
    assert offered(contents) == {3: b"aa"}
    assert contents.note(TAG, ids(4), hashes_of(b"bb"), 6) == 0  # late: it is another's by now
    assert contents.note(TAG, ids(4), hashes_of(b"dd"), 8) == 1
    contents.end_epoch(7)  # step 8 has not run here
    assert offered(contents) == {3: b"aa"}
    contents.write(ids(3), 1)
    assert offered(contents) == {}


def test_failed_step_costs_the_notes_as_of_it_and_the_blocks_without_notes():
    contents = BlockContents(10)
    contents.write(ids(1, 2, 3, 4), 5)
    contents.note(TAG, ids(1), hashes_of(b"aa"), 6)
    contents.note(TAG, ids(2), hashes_of(b"bb"), 7)
    contents.write(ids(3), 7)
    contents.fail(7)
    assert offered(contents) == {1: b"aa"}
    assert contents.note(TAG, ids(1, 2, 3, 4), hashes_of(b"aa", b"bb", b"cc", b"dd"), 8) == 1
    contents.write(ids(2), 9)
    assert contents.note(TAG, ids(2), hashes_of(b"ee"), 9) == 1
    assert offered(contents) == {1: b"aa", 2: b"ee"}
    contents.forget()
    assert offered(contents) == {}


def test_notes_of_another_tag_or_length_replace_all_others():
    contents = BlockContents(10)
    contents.write(ids(1, 2, 3), 1)
    contents.note(TAG, ids(1), hashes_of(b"aa"), 1)
    assert offered(contents, b"other") == {}
    contents.note(b"other", ids(), np.zeros((0, 1), np.uint8), 1)  # names no block
    assert offered(contents) == {1: b"aa"}
    contents.note(b"other", ids(2), hashes_of(b"bb"), 1)
    assert offered(contents) == {} and offered(contents, b"other") == {2: b"bb"}
    contents.note(b"other", ids(3), hashes_of(b"ccc"), 1)
    assert offered(contents, b"other") == {3: b"ccc"}
    contents.distrust(ids(3))
    assert offered(contents, b"other") == {}


def test_of_many_writes_to_a_block_the_last_counts_while_others_read():
    contents = BlockContents(30)
    seed = int(np.random.default_rng().integers(1 << 30))
    rng = np.random.default_rng(seed)
    steps = [rng.integers(1, 30, rng.integers(0, 9)).astype(np.int32) for _ in range(20_000)]
    last = {}
    for seq, block_ids in enumerate(steps, 1):
        last.update(dict.fromkeys(block_ids.tolist(), seq))

    def write():
        for seq, block_ids in enumerate(steps, 1):
            contents.write(block_ids, seq)

    writer = threading.Thread(target=write)
    writer.start()
    everything = ids(*range(30))
    while writer.is_alive():
        contents.noted(TAG, 0, 30, NEWEST)
        contents.note(TAG, everything, np.zeros((30, 2), np.uint8), 0)
    writer.join()
    for block, seq in last.items():
        assert contents.note(TAG, ids(block), hashes_of(b"aa"), seq - 1) == 0, (seed, block)
        assert contents.note(TAG, ids(block), hashes_of(b"aa"), seq) == 1, (seed, block)
    assert set(offered(contents)) == set(last)
