"""What another group gets of prompts while they are computed: nothing but the blocks of their
tokens, whatever happens to their requests."""

import random
from collections import deque
from dataclasses import replace

import pytest

from tests.support.exhaustive import seeds
from tests.support.flat_requests import flat_request
from worker_client.scheduler import Scheduler, SchedulerLimits
from worker_client.scheduler_output import StepResult

SIZE, NUM_SLOTS, NUM_REQUESTS = 4, 14, 12
LIMITS = SchedulerLimits(
    max_num_seqs=4,
    max_num_batched_tokens=12,
    max_model_len=64,
    num_blocks=30,
    block_size=SIZE,
    num_host_blocks=NUM_SLOTS,
)


class ModelledRank:
    """Does what steps say. A block has, for each place, all tokens up to it."""

    def __init__(self):
        self.blocks, self.slots, self.rows = {}, {}, {}
        self.num_filled = 0
        """Stores of blocks that the same step has filled."""

    def run(self, output):
        """Do a step; return the requests that sample, and the blocks and slots it has changed."""
        changed, sampled, filled = [], [], []
        for moves in output.extensions:
            stored = [*zip(*moves.stored, strict=True)]
            num_before = len(stored) - moves.num_filled
            filled += stored[num_before:]
            for block, slot, _ in stored[:num_before]:
                self.slots[slot] = dict(self.blocks[block])
                changed.append((self.slots, slot))
            for block, slot, _ in zip(*moves.loaded, strict=True):
                self.blocks[block] = dict(self.slots[slot])
                changed.append((self.blocks, block))
        for req_id in (*output.finished_req_ids, *output.preempted_req_ids):
            self.rows.pop(req_id, None)
        for new in output.scheduled_new_reqs:
            tokens, blocks = new.token_ids.tolist(), list(new.block_ids)
            self.rows[new.req_id] = [tokens, blocks, new.num_computed_tokens]
        for req_id, blocks in output.new_block_ids.items():
            self.rows[req_id][1] += blocks
        for req_id, count in output.num_scheduled_tokens.items():
            tokens, blocks, begin = row = self.rows[req_id]
            for place in range(begin, begin + count):
                own = self.blocks.setdefault(blocks[place // SIZE], {})
                own[place % SIZE] = tuple(tokens[: place + 1])
                changed.append((self.blocks, blocks[place // SIZE]))
            row[2] = begin + count
            if row[2] == len(tokens):
                sampled.append(req_id)
        for block, slot, _ in filled:
            self.slots[slot] = dict(self.blocks[block])
            changed.append((self.slots, slot))
        self.num_filled += len(filled)
        return sampled, changed


class PrefillLoop:
    """A scheduler and its rank, with two steps in flight, which may fail."""

    def __init__(self, rng):
        self.rng = rng
        self.scheduler, self.rank, self.flying = Scheduler(LIMITS), ModelledRank(), deque()
        self.outgoing = self.scheduler.exchange.outgoing
        self.wanted, self.taken, self.ended, self.num_early = {}, [], set(), 0
        self.unconfirmed, self.num_unconfirmed, self.num_failures = deque(), 0, 0
        """What may be sent before the steps that fill it have succeeded, with the first step that
        does not matter."""
        stem = [rng.randrange(9) for _ in range(18)]
        for number in range(NUM_REQUESTS):
            tokens = stem[: rng.choice([0, 18])] + [rng.randrange(9) for _ in range(20)]
            name = f"r{number}"
            self.scheduler.add_request(flat_request(name, tokens, max_tokens=1))
            names = self.scheduler.exchange.lacking(name)
            ends = range(SIZE, len(tokens), SIZE)
            prefixes = [tuple(tokens[:end]) for end in ends]
            self.wanted[number] = deque(zip(names, prefixes, strict=True))
            self.outgoing.want(number, names)

    def send(self):
        output = self.scheduler.schedule()
        if output is not None:
            self.flying.append((output, *self.rank.run(output)))
            self.check()

    def settle(self):
        output, sampled, _ = self.flying.popleft()
        result = StepResult(sampled, [7] * len(sampled))
        self.ended |= {each.req_id for each in self.scheduler.update_from_output(output, result)}

    def fail(self):
        """All steps in flight fail, and change what they have filled."""
        outputs = [output for output, _, _ in self.flying]
        lost = frozenset(self.rank.rows)
        for place, key in [each for _, _, changed in self.flying for each in changed]:
            place[key] = {}
        self.rank.rows.clear()
        self.flying.clear()
        self.scheduler.step_failed(outputs, lost)
        self.num_failures += 1
        assert self.outgoing.num_failures == self.num_failures
        lost = [contents for _, contents, _ in self.unconfirmed]
        lost += [contents for contents, _ in self.taken if not self.outgoing._is_kept(contents)]
        self.outgoing.release(lost)
        self.taken = [each for each in self.taken if each[0] not in lost]
        self.unconfirmed.clear()

    def disturb(self):
        """Preempt a request, or end it."""
        name = f"r{self.rng.randrange(NUM_REQUESTS)}"
        if self.rng.randrange(3):
            self.scheduler.pause_request(name)
            self.scheduler.release_request(name)
        else:
            self.scheduler.abort_request(name)

    def take(self):
        for number, wanted in self.wanted.items():
            for _, contents, end in self.outgoing.take(number):
                name, prefix = wanted.popleft()
                assert contents.name == name
                self.num_early += f"r{number}" not in self.ended
                self.unconfirmed.append((end, contents, prefix))
        while self.unconfirmed and self.outgoing.are_filled(self.unconfirmed[0][0]):
            self.taken.append(self.unconfirmed.popleft()[1:])
        self.num_unconfirmed += len(self.unconfirmed)
        self.check()

    def check(self):
        """What was taken is in its slots: the step that was sent last has stored it at the
        latest."""
        unconfirmed = [own for _, *own in self.unconfirmed]
        for contents, prefix in [*self.taken, *unconfirmed]:
            ends = range(len(prefix) - SIZE + 1, len(prefix) + 1)
            expected = {place: prefix[:end] for place, end in enumerate(ends)}
            assert [self.rank.slots[slot] for slot in contents.slots] == [expected]

    def release(self):
        if self.taken:
            place = self.rng.randrange(len(self.taken))
            self.outgoing.release([self.taken.pop(place)[0]])


@pytest.mark.parametrize("seed", seeds(8, of=300))
def test_only_blocks_of_steps_that_have_succeeded_are_used(seed):
    loop = PrefillLoop(random.Random(seed))
    for _ in range(300):
        event = loop.rng.random()
        if event < 0.02:
            loop.fail()
        elif event < 0.06:
            loop.disturb()
        elif event < 0.5 and len(loop.flying) < 2:
            loop.send()
        elif event < 0.8 and loop.flying:
            loop.settle()
        loop.take()
        if event > 0.7:
            loop.release()
    assert loop.num_early > 5 and loop.num_unconfirmed > 0, seed
    assert loop.rank.num_filled > 5, seed
    for number in loop.wanted:
        loop.outgoing.drop(number)
    loop.outgoing.release(contents for contents, _ in loop.taken)
    loop.outgoing.release(contents for _, contents, _ in loop.unconfirmed)
    assert loop.scheduler.exchange.num_slots == 0, seed


@pytest.mark.parametrize("is_wanted", [True, False])
def test_the_step_that_fills_blocks_stores_them_if_another_group_waits(is_wanted):
    scheduler = Scheduler(LIMITS)
    scheduler.add_request(flat_request("r", list(range(10)), max_tokens=1))
    outgoing, names = scheduler.exchange.outgoing, scheduler.exchange.lacking("r")
    if is_wanted:
        outgoing.want(1, names)
    first = scheduler.schedule()
    assert scheduler.schedule() is None
    assert bool(first.extensions) == is_wanted
    if not is_wanted:
        return
    taken = outgoing.take(1)
    assert [each.contents.name for each in taken] == names
    assert not any(outgoing.are_filled(each.filled_before) for each in taken)
    (moves,) = first.extensions
    assert moves.num_filled == len(moves.stored.slots) == len(names) == 2
    assert len(scheduler.update_from_output(first, StepResult(["r"], [7]))) == 1
    assert all(outgoing.are_filled(each.filled_before) for each in taken)


def test_a_block_that_the_step_loads_is_not_stored_by_it():
    """From files, say: its contents are not in host memory."""
    scheduler = Scheduler(LIMITS)
    scheduler.add_request(flat_request("r", list(range(10)), max_tokens=1))
    outgoing, names = scheduler.exchange.outgoing, scheduler.exchange.lacking("r")
    first = scheduler.schedule()
    scheduler.update_from_output(first, StepResult(["r"], [7]))
    outgoing.want(1, names)
    blocks = range(1, LIMITS.num_blocks)
    outgoing.keep_filling({}, blocks)
    assert not outgoing.has_kept(1) and not scheduler.exchange.num_slots
    outgoing.keep_filling({}, ())
    assert outgoing.has_kept(1) and scheduler.exchange.num_slots == 2


def test_blocks_that_find_no_slot_in_their_step_are_stored_by_a_step_without_tokens():
    scheduler = Scheduler(replace(LIMITS, num_host_blocks=2))
    outgoing = scheduler.exchange.outgoing
    for number in range(2):
        tokens = [number, *range(9)]
        scheduler.add_request(flat_request(f"r{number}", tokens, max_tokens=1))
        outgoing.want(number, scheduler.exchange.lacking(f"r{number}"))
    outputs = [scheduler.schedule(), scheduler.schedule()]
    (taken, others) = (outgoing.take(number) for number in range(2))
    assert len(taken) == 2 and not others
    assert scheduler.schedule() is None
    outgoing.release(each.contents for each in taken)
    later = scheduler.schedule()
    assert not later.num_scheduled_tokens
    assert len(later.extensions[0].stored.slots) == 2 and not later.extensions[0].num_filled
    others = outgoing.take(1)
    assert len(others) == 2
    for number, output in enumerate(outputs):
        assert not any(outgoing.are_filled(each.filled_before) for each in others)
        scheduler.update_from_output(output, StepResult([f"r{number}"], [7]))
    assert all(outgoing.are_filled(each.filled_before) for each in others)
