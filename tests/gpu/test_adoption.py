"""Adoption on a GPU: rows continue from the existing KV cache, in graphs that were captured before,
and a killed driver's requests are finished by the next one.

Inputs are fixed, and float32: the step that admits rows again computes as a step of prompts, whose
roundings differ from a decode's, so that a near tie could turn out differently.
"""

import json

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from benchmarks.stage_driver import BLOCK_SIZE, StageDriver, bitmap
from rpc_schema.adoption import AdoptRequests
from rpc_schema.config import ParallelConfig
from rpc_schema.kv_cache import BlockGroup, blocks_for
from rpc_schema.step import ExecuteModel, NewRequestData
from tests.support.gpu_generation import SHARED_CACHE, worker_config
from tests.support.killed_driver import DriverNursery, Plan, begin
from worker_client.group.adoption import merge, read_page
from worker_client.launcher import LocalDaemons
from worker_client.requests import SamplingParams
from worker_client.worker_group import WorkerGroup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NUM_SLOTS = 8
PROMPT_LEN = 60
NUM_TOKENS = 40
NUM_LATE = 2
"""Steps that ran, but whose results nobody has taken: they must not count."""
SAMPLING = (SamplingParams(), SamplingParams(temperature=0.8, top_k=40, seed=11))


@pytest.fixture(scope="module")
def driver(qwen3):
    driver = StageDriver(
        qwen3,
        "cuda:0",
        max_model_len=1024,
        dtype="float32",
        num_blocks=1024,
        cache=SHARED_CACHE,
    )
    driver.start()
    yield driver
    driver.leave()


def own_blocks(slot):
    count = blocks_for(PROMPT_LEN + NUM_TOKENS, BLOCK_SIZE)
    return list(range(1 + slot * count, 1 + (slot + 1) * count))


def admission(slot, sampling, tokens, num_computed, blocks):
    return NewRequestData(
        slot=slot,
        req_id=f"request-{slot}",
        num_tokens=len(tokens),
        num_prompt_tokens=PROMPT_LEN,
        num_computed_tokens=num_computed,
        extensions=sampling.extensions(),
        note=str(slot).encode(),
    ), (len(tokens) - num_computed, tokens, blocks)


def admit(driver, entries):
    """Run a step that drops all rows and admits these, each to its last token."""
    counts = [[new.slot, count] for new, (count, _, _) in entries if count != 1]
    message = ExecuteModel(
        **driver.ids(),
        total_num_scheduled_tokens=sum(count for _, (count, _, _) in entries),
        scheduled=bitmap(np.arange(len(entries))),
        num_scheduled_tokens=np.array(counts, "<i4").tobytes(),
        new_block_slots=np.array(
            [new.slot for new, (_, _, blocks) in entries for _ in blocks], "<u2"
        ).tobytes(),
        new_block_ids=np.array(
            [b for _, (_, _, blocks) in entries for b in blocks], "<i4"
        ).tobytes(),
        scheduled_new_reqs=tuple(new for new, _ in entries),
        resync=b"",
    )
    tokens = np.concatenate([tokens for _, (_, tokens, _) in entries])
    return driver.worker.execute_model(message, [tokens.astype("<i4").tobytes()])


def decode(driver, steps):
    bits = bitmap(np.arange(NUM_SLOTS))
    replies = []
    for _ in range(steps):
        message = ExecuteModel(**driver.ids(), total_num_scheduled_tokens=NUM_SLOTS, scheduled=bits)
        replies.append(driver.worker.execute_model(message, []))
    return replies


def start(driver, prompts, steps):
    entries = [
        admission(slot, SAMPLING[slot % len(SAMPLING)], prompts[slot], 0, own_blocks(slot))
        for slot in range(NUM_SLOTS)
    ]
    return [admit(driver, entries), *decode(driver, steps - 1)]


def read(replies):
    """[steps][slots]"""
    return [np.frombuffer(reply.result()[0].sampled_token_ids, "<i4").tolist() for reply in replies]


@pytest.mark.parametrize("num_taken", [1, 5, 17])
def test_rows_go_on_where_their_last_result_left_them(driver, monkeypatch, num_taken):
    prompts = np.random.default_rng(num_taken).integers(3, 1000, (NUM_SLOTS, PROMPT_LEN))
    driver.worker.on_attach()
    expected = read(start(driver, prompts, NUM_TOKENS))
    driver.worker.on_attach()
    replies = start(driver, prompts, num_taken + NUM_LATE)
    assert read(replies[:num_taken]) == expected[:num_taken]

    driver.worker.on_attach(keep_requests=True)
    page = driver.worker.adopt_requests(AdoptRequests(**driver.ids()))
    adopted = merge([list(read_page(page))], 0, [BlockGroup(BLOCK_SIZE)])
    entries = []
    for slot, request in enumerate(adopted):
        known = [*prompts[slot], *(step[slot] for step in expected[:num_taken])]
        assert request.token_ids.tolist() == known
        assert request.num_computed_tokens == len(known) - 1
        own = own_blocks(slot)
        assert list(request.block_ids) == own[: len(request.block_ids)]
        assert (request.req_id, request.note) == (f"request-{slot}", str(slot).encode())
        computed = request.num_computed_tokens
        sampling = SamplingParams.of(request.extensions)
        entries.append(admission(slot, sampling, request.token_ids, computed, own))

    graphed, replay = [], torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(
        torch.cuda.CUDAGraph, "replay", lambda self: (graphed.append(1), replay(self))
    )
    left = NUM_TOKENS - num_taken
    assert read([admit(driver, entries), *decode(driver, left - 1)]) == expected[num_taken:]
    assert len(graphed) >= left - 1


def test_killed_driver_s_requests_are_finished_by_the_next(llama):
    rng = np.random.default_rng(2)
    lines = [
        json.dumps(
            {
                "prompt_token_ids": rng.integers(3, 8192, 20 + 30 * index).tolist(),
                "max_tokens": 200,
                "ignore_eos": True,
                "temperature": index % 2,
                "seed": index,
            }
        )
        for index in range(4)
    ]
    config = worker_config(llama, ParallelConfig(), "float32")
    with LocalDaemons(["cuda:0"], llama.parent) as daemons:
        plan = Plan(daemons.endpoints, config, lines)
        nursery = DriverNursery()
        try:
            expected = serve(plan, keep=False)[1]
            nursery.live(replace(plan, num_results=60, num_gpu_blocks=None))
            adopted, tokens = serve(replace(plan, adopt=True), keep=True)
        finally:
            nursery.close()
    assert len(adopted) == 4
    assert all(request.num_computed_tokens for request in adopted)
    assert tokens == expected


def serve(plan, *, keep):
    with WorkerGroup(plan.endpoints, plan.config.parallel) as group:
        group.attach(keep_requests=keep)
        serving = begin(group, group.prepare(plan.config), plan)
        outputs = [*serving.done, *serving.driver.run()]
        return serving.adopted, {output.req_id: output.token_ids for output in outputs}
