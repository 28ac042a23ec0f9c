"""vLLM's scheduler lets a request begin with blocks that another fills in the same step. The steps
that are sent fill them first: a real SlotTable, which knows the blocks, takes each."""

import random
from types import SimpleNamespace

from rpc_schema.kv_cache import BlockGroup
from worker_client.slots import SlotTable
from worker_client.step_checks import GroupLimits
from worker_client.vllm.requests import KnownRequest
from worker_client.vllm.steps import StepWriter

BLOCK_SIZE = 4
VOCAB_SIZE = 1000


class Bench:
    """A writer before a table of slots, as one scheduler uses them."""

    def __init__(self) -> None:
        limits = GroupLimits(
            num_blocks=256,
            block_size=BLOCK_SIZE,
            groups=(BlockGroup(BLOCK_SIZE),),
            vocab_size=VOCAB_SIZE,
        )
        self.table = SlotTable(32, limits)
        params = SimpleNamespace(structured_outputs=None)
        self._known = KnownRequest(params, "", ())
        self.writer = StepWriter(self, lambda _: None, lambda r: r in self.table, [BLOCK_SIZE])
        self._seq = 0

    def __getitem__(self, req_id):
        return KnownRequest(self._known.params, req_id, ())

    def forget(self, req_ids) -> None:
        """As Requests has it."""

    def write(self, new, counts, cached=((), (), ()), deferred=False):
        """Write a step, and let the table take what it becomes; return the requests of each."""
        req_ids, computed, blocks = cached
        output = SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=req_ids, num_computed_tokens=computed, new_block_ids=blocks
            ),
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            finished_req_ids=set(),
            preempted_req_ids=None,
            has_structured_output_requests=deferred,
        )
        steps = self.writer.write(output)
        for step in steps:
            self._seq += 1
            self.table.encode(step, epoch=1, link=1, seq=self._seq)
        return [{*step.num_scheduled_tokens, *step.decode_req_ids} for step in steps]


def new(req_id, num_tokens, blocks, computed=0):
    """Return vLLM's data of a new request."""
    return SimpleNamespace(
        req_id=req_id,
        prompt_token_ids=[7] * num_tokens,
        prefill_token_ids=None,
        num_computed_tokens=computed,
        block_ids=(blocks,),
    )


def test_readers_of_a_prompt_come_after_it():
    steps = Bench().write(
        [new("b", 10, [1, 2, 4], 8), new("a", 10, [1, 2, 3]), new("c", 6, [5, 6])],
        {"a": 10, "b": 2, "c": 6},
    )
    assert steps == [{"a", "c"}, {"b"}]


def test_reader_of_a_reader_comes_last():
    steps = Bench().write(
        [new("a", 5, [1, 2]), new("b", 9, [1, 3, 4], 4), new("c", 13, [1, 3, 5, 6], 8)],
        {"a": 5, "b": 5, "c": 5},
    )
    assert steps == [{"a"}, {"b"}, {"c"}]


def test_reader_of_what_a_running_request_gets():
    bench = Bench()
    bench.write([new("a", 16, [1])], {"a": 4})
    steps = bench.write([new("b", 9, [1, 2, 3], 8)], {"a": 6, "b": 1}, (["a"], [4], [([2, 4],)]))
    assert steps == [{"a"}, {"b"}]


def test_blocks_of_earlier_steps_need_no_turn():
    bench = Bench()
    bench.write([new("a", 9, [1, 2, 3])], {"a": 9})
    steps = bench.write([new("b", 12, [1, 2, 4], 8), new("c", 5, [5, 6])], {"b": 4, "c": 5})
    assert steps == [{"b", "c"}]


def test_random_prefixes_are_taken():
    """Each request begins with full blocks of any earlier one of its step."""
    source = random.Random(7)
    for _ in range(200):
        chains, requests, counts, block = [[]], [], {}, 1
        for number in range(source.randrange(2, 9)):
            shared = source.choice(chains)
            shared = shared[: source.randrange(len(shared) + 1)]
            own = [*range(block, block + source.randrange(1, 4))]
            block += len(own)
            blocks, computed = [*shared, *own], len(shared) * BLOCK_SIZE
            num_tokens = len(blocks) * BLOCK_SIZE - source.randrange(BLOCK_SIZE)
            chains.append(blocks[: num_tokens // BLOCK_SIZE])
            counts[f"r{number}"] = num_tokens - computed
            requests.append(new(f"r{number}", num_tokens, blocks, computed))
        source.shuffle(requests)
        steps = Bench().write(requests, counts)
        assert sorted(req_id for own in steps for req_id in own) == sorted(counts)
