"""Blocks that are stored in host memory before they are evicted: when, how many, and what becomes
of host memory by it."""

import random

from tests.support.serving import greedy_request
from worker_client.scheduler import Scheduler, SchedulerLimits
from worker_client.scheduler_output import StepResult
from worker_client.steps.block_moves import HostMoves

BLOCK = 4
PROMPT_BLOCKS = 16
NUM_BLOCKS = 8 * PROMPT_BLOCKS
MOST = 3


def fresh_prompt():
    return [random.randrange(1 << 30) for _ in range(BLOCK * PROMPT_BLOCKS)]


class Served:
    """A scheduler whose requests get a token in each step, one step after the other."""

    def __init__(self, **fields):
        limits = {"num_host_blocks": 8 * NUM_BLOCKS, "max_stored_ahead": MOST, **fields}
        length = BLOCK * (PROMPT_BLOCKS + 2)
        self.scheduler = Scheduler(SchedulerLimits(8, 512, length, NUM_BLOCKS, BLOCK, **limits))
        self.stored, self.slots, self.num_stored = [], [], []
        """Keys and their slots so far, and their number by step."""
        self.loaded, self.num_requests = [], 0

    def step(self):
        output = self.scheduler.schedule()
        moves = [each for each in output.extensions if isinstance(each, HostMoves)]
        stored = [key for each in moves for key in each.stored.hashes]
        self.stored += stored
        self.slots += [slot for each in moves for slot in each.stored.slots]
        self.num_stored.append(len(stored))
        self.loaded += [key for each in moves for key in each.loaded.hashes]
        ids = dict.fromkeys([*output.decode_req_ids, *output.num_scheduled_tokens])
        result = StepResult([*ids], [7] * len(ids), weights_version=0)
        return output, self.scheduler.update_from_output(output, result)

    def run(self, prompt, num_tokens=1):
        """Run a request; return how many blocks its first step stores."""
        self.num_requests += 1
        self.scheduler.add_request(greedy_request(f"{self.num_requests}", prompt, num_tokens))
        first = len(self.num_stored)
        while self.scheduler.has_unfinished_requests():
            self.step()
        return self.num_stored[first]

    def fill(self):
        """Fill the KV cache with prompts, which are returned."""
        prompts = [fresh_prompt() for _ in range(NUM_BLOCKS // PROMPT_BLOCKS)]
        for prompt in prompts:
            self.run(prompt)
        return prompts

    def idle(self):
        """Let a short request decode, whose steps have room for stores."""
        self.run(fresh_prompt()[: BLOCK - 1], 2 * PROMPT_BLOCKS)


def test_an_admission_stores_nothing_that_steps_had_time_to_store():
    served = Served()
    served.fill()
    served.idle()
    assert max(served.num_stored[-PROMPT_BLOCKS:]) <= MOST
    num_before = len(served.stored)
    assert served.run(fresh_prompt()) <= MOST
    assert num_before >= PROMPT_BLOCKS
    without = Served(max_stored_ahead=0)
    without.fill()
    without.idle()
    assert without.run(fresh_prompt()) >= PROMPT_BLOCKS - 1


def test_no_block_is_stored_twice_and_all_that_is_evicted_is_there():
    served = Served()
    prompts = served.fill()
    for _ in range(6):
        served.idle()
        prompts.append(fresh_prompt())
        served.run(prompts[-1])
    assert len(served.stored) == len({*served.stored})
    assert not served.loaded
    served.run(prompts[0])
    assert len(served.loaded) == PROMPT_BLOCKS - 1


def test_only_what_takes_the_place_of_the_next_blocks_is_stored():
    served = Served()
    served.fill()
    served.idle()
    served.idle()
    num_taken = 2 * PROMPT_BLOCKS // BLOCK + 1
    assert sum(served.num_stored[-2 * PROMPT_BLOCKS :]) <= num_taken


def test_copies_of_what_is_used_again_are_the_first_to_make_room():
    served = Served(num_host_blocks=NUM_BLOCKS)
    served.fill()
    _, used, *_ = served.fill()  # host memory is full of the first ones now
    num_before = len(served.slots)
    served.idle()
    ahead = served.slots[num_before:]
    served.run(used)
    assert not served.loaded
    num_before = len(served.slots)
    served.idle()
    assert {*served.slots[num_before:][:MOST]} <= {*ahead}


def test_what_a_failed_step_has_stored_is_not_loaded():
    served = Served()
    prompts = served.fill()
    served.scheduler.add_request(greedy_request("a", fresh_prompt()[:5], 2 * PROMPT_BLOCKS))
    served.step()
    kept = {*served.stored}
    failed = [served.scheduler.schedule() for _ in range(PROMPT_BLOCKS)]
    assert sum(len(moves.stored.hashes) for each in failed for moves in each.extensions) > MOST
    served.scheduler.step_failed(failed, frozenset(["a"]))
    for prompt in prompts:
        served.run(prompt)
    assert {*served.loaded} <= kept
