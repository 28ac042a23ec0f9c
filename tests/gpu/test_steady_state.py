"""A warm step path never waits for the device, allocates on it, compiles or captures; and graphs do
not change tokens."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.stage_driver import StageDriver
from rpc_schema.step import ExecuteModel, NewRequestData
from tests.support.gpu_generation import SHARED_CACHE
from worker_client.requests import SamplingParams
from worker_daemon.runner.cuda_graph import GraphedProgram

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MODEL = Path(__file__).parents[2] / "benchmarks" / "models" / "qwen3-0.6b"
BLOCKS_PER_SLOT = 128
BLOCK_SIZE = 16
MAX_TOKENS = BLOCKS_PER_SLOT * BLOCK_SIZE
NUM_SLOTS = 64
MAX_STEP_TOKENS = 4096
GREEDY = SamplingParams()


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "qwen3"
    shutil.copytree(MODEL, directory)
    num_blocks = 1 + NUM_SLOTS * BLOCKS_PER_SLOT
    driver = StageDriver(
        directory, "cuda:0", max_model_len=MAX_TOKENS, num_blocks=num_blocks, cache=SHARED_CACHE
    )
    driver.start()
    yield driver
    driver.worker.close()


class RandomServing:
    """Requests that come and go at random; each slot has its own blocks, given out as needed."""

    def __init__(self, driver, seed, sampling=(GREEDY,)):
        self.rng = np.random.default_rng(seed)
        self.sampling = sampling
        self.driver = driver
        self.lengths = {}
        self.computed = {}
        self.known = {}

    def step(self):
        rng = self.rng
        finished = [s for s in self.lengths if self.computed[s] + 40 > self.lengths[s]]
        for slot in finished:
            del self.lengths[slot]
        admissions = []
        budget = MAX_STEP_TOKENS - len(self.lengths)
        for slot in range(NUM_SLOTS):
            if slot in self.lengths or rng.random() > 0.04:
                continue
            prompt = int(rng.choice([1, 3, 30, 200, 1500]))
            if prompt > budget:
                continue
            budget -= prompt
            admissions.append((slot, prompt))
            self.known[slot], self.computed[slot] = prompt, 0
            self.lengths[slot] = min(prompt + int(rng.integers(41, 500)), MAX_TOKENS)
        scheduled = {s: max(1, self.known[s] - self.computed[s]) for s in sorted(self.lengths)}
        new_blocks = []
        for slot, count in scheduled.items():
            before = -(-self.computed[slot] // BLOCK_SIZE)
            self.computed[slot] += count
            after = -(-self.computed[slot] // BLOCK_SIZE)
            new_blocks += [(slot, 1 + slot * BLOCKS_PER_SLOT + i) for i in range(before, after)]
        return self.message(finished, admissions, scheduled, new_blocks)

    def message(self, finished, admissions, scheduled, new_blocks):
        tokens = self.rng.integers(3, 1000, sum(length for _, length in admissions))
        bits = np.zeros(NUM_SLOTS, np.bool_)
        bits[list(scheduled)] = True
        counts = [[s, n] for s, n in scheduled.items() if n != 1]
        return ExecuteModel(
            **self.driver.ids(),
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled=np.packbits(bits, bitorder="little").tobytes(),
            num_scheduled_tokens=np.array(counts, "<i4").tobytes(),
            new_block_slots=np.array([s for s, _ in new_blocks], "<u2").tobytes(),
            new_block_ids=np.array([b for _, b in new_blocks], "<i4").tobytes(),
            finished=np.array(finished, "<u2").tobytes(),
            scheduled_new_reqs=tuple(
                NewRequestData(
                    slot=slot,
                    req_id=f"request-{slot}",
                    num_tokens=length,
                    num_prompt_tokens=length,
                    num_computed_tokens=0,
                    extensions=self.sampling[slot % len(self.sampling)].extensions(),
                )
                for slot, length in admissions
            ),
        ), [tokens.astype("<i4").tobytes()] if admissions else []

    def run(self, steps):
        in_flight = []
        for _ in range(steps):
            message, arrays = self.step()
            if not message.total_num_scheduled_tokens:
                continue
            in_flight.append(self.driver.worker.execute_model(message, arrays))
            if len(in_flight) == 2:
                in_flight.pop(0).result()
        for reply in in_flight:
            reply.result()


def test_a_thousand_mixed_steps_neither_wait_nor_allocate_nor_compile(driver, monkeypatch):
    import triton

    serving = RandomServing(driver, seed=int(np.random.default_rng().integers(1 << 30)))
    driver.worker.on_attach()
    serving.run(100)  # torch's host and device caches reach their sizes
    torch.cuda.synchronize()
    compiled, captured, graphed = [], [], []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **kwargs: compiled.append(kwargs)
    )
    monkeypatch.setattr(GraphedProgram, "_record", lambda *args: captured.append(args))
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(
        torch.cuda.CUDAGraph, "replay", lambda self: (graphed.append(1), replay(self))
    )
    allocations = torch.cuda.memory_stats()["num_device_alloc"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        serving.run(1000)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["num_device_alloc"] == allocations
    assert not compiled
    assert not captured
    assert len(graphed) > 50


EVERY_WAY = (
    SamplingParams(),
    SamplingParams(temperature=1.0, top_p=0.9, seed=1),
    SamplingParams(temperature=0.7, top_k=20, seed=2),
    SamplingParams(temperature=1.0, min_p=0.05, logprobs=3, seed=3),
    SamplingParams(min_tokens=30, stop_token_ids=(5, 6)),
    SamplingParams(presence_penalty=0.5, logit_bias={7: 1.0}, allowed_token_ids=tuple(range(999))),
)


def test_every_way_of_sampling_works_beside_padding(driver):
    driver.worker.on_attach()
    RandomServing(driver, seed=7, sampling=EVERY_WAY).run(150)
    torch.cuda.synchronize()


def test_a_replay_leaves_the_logits_of_its_hidden_states_for_the_sampler(driver, monkeypatch):
    """For every padded size, and until the next step: no part changes them in place."""
    program, stage = driver.worker._serving.runner._program, driver.worker._model.stage
    run, sizes, last = program.run, set(), []

    def checking(inputs, arrived):
        for logits, expected in last:
            assert torch.equal(logits, expected)
        output = run(inputs, arrived)
        logits = stage.gather_logits(output.chosen.logits)
        rows = output.hidden.index_select(0, inputs.columns.sample_tokens)
        last[:] = [(logits, stage.compute_logits(rows))]
        assert torch.equal(*last[0])
        if inputs.plan in program._graphs:
            sizes.add((inputs.plan.max_query_len > 1, logits.shape[0]))
        return output

    monkeypatch.setattr(program, "run", checking)
    driver.worker.on_attach()
    RandomServing(driver, seed=8, sampling=EVERY_WAY).run(150)
    for num_requests in (1, 3, 5, 33, 64):
        prefill_and_decode(driver, num_requests, 4)
    buffers = {each.output.chosen.logits.data_ptr() for each in program._graphs.values()}
    assert len(buffers) == 1
    assert sizes > {(False, size) for size in (1, 4, 8, 40, 64)}
    assert any(is_mixed for is_mixed, _ in sizes)


@pytest.mark.parametrize("num_requests", [1, 4, 5, 33, 64])
def test_graphs_give_the_tokens_of_the_same_kernels_launched_one_by_one(
    driver, num_requests, monkeypatch
):
    replayed = prefill_and_decode(driver, num_requests, 60)
    program = driver.worker._serving.runner._program
    assert isinstance(program, GraphedProgram)
    monkeypatch.setattr(program, "_graphs", {})  # plans stay padded, nothing is replayed
    assert prefill_and_decode(driver, num_requests, 60) == replayed


def prefill_and_decode(driver, num_requests, num_decodes):
    """The tokens of each step of greedy requests."""
    driver.worker.on_attach()
    message, _ = driver.prefill(np.arange(num_requests), 100, 80)
    tokens = np.random.default_rng(num_requests).integers(3, 1000, 100 * num_requests)
    replies = [driver.worker.execute_model(message, [tokens.astype("<i4").tobytes()])]
    bits = np.packbits(np.ones(num_requests, np.bool_), bitorder="little").tobytes()
    for _ in range(num_decodes):
        decode = ExecuteModel(
            **driver.ids(), total_num_scheduled_tokens=num_requests, scheduled=bits
        )
        replies.append(driver.worker.execute_model(decode, []))
    return [reply.result()[0].sampled_token_ids for reply in replies]
