"""Floors compared with sums written out by hand, with the reference scheduler's schedule, and with
properties of any workload."""

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import workloads
from benchmarks.floors import (
    Ceilings,
    ModelShape,
    StepWork,
    schedule,
    step_floor_s,
    workload_floor_s,
)
from worker_client.requests import GenerationRequest, SamplingParams
from worker_client.scheduler import Scheduler, SchedulerLimits
from worker_client.scheduler_output import StepResult
from worker_daemon.distributed.tp import SingleRank
from worker_daemon.layers.attention import NullAttention
from worker_daemon.layers.torch_ops import TorchOps
from worker_daemon.models.config import read_model_config
from worker_daemon.models.decoder import build_stage

MODELS = Path(__file__).parents[3] / "benchmarks" / "models"
CEILINGS = Ceilings(read_bytes=4.5e12, matmul_flop=670e12, attention_flop=560e12)


@pytest.mark.parametrize("name", ["llama-8b", "qwen3-0.6b"])
def test_weights_are_those_of_the_stage_that_we_build(name):
    config = read_model_config(MODELS / name)
    stage = build_stage(
        config, range(config.num_hidden_layers), True, True, SingleRank(), torch.bfloat16,
        torch.device("meta"), 16, NullAttention(), TorchOps(),
    )  # fmt: skip
    matrices = [p for parameter in stage.parameters() for p in parameter.pieces]
    embedding = {"model.embed_tokens.weight"} if name == "llama-8b" else set()
    sizes = [
        np.prod(p.full_shape)
        for p in matrices
        if p.name not in embedding and len(p.full_shape) == 2
    ]
    shape = ModelShape.read(MODELS / name)
    assert shape.decode_weight_bytes == 2 * sum(sizes)


def test_a_step_is_the_sum_of_its_parts():
    shape = ModelShape(8, 3, 4, 2, 2, 16, 100)
    layers = 3 * (8 * 8 + 8 * 4 * 2 + 8 * 8 + 3 * 8 * 16)
    assert shape.layer_weights == layers
    ceilings = Ceilings(read_bytes=10.0, matmul_flop=100.0, attention_flop=7.0, all_reduce_s=0.5)
    one = step_floor_s(shape, ceilings, StepWork(1, 1, 5, 0))
    kv = 5 * 2 * 2 * 3 * 2 * 2
    assert one == pytest.approx((2 * layers + 2 * 800 + kv) / 10)
    many = step_floor_s(shape, ceilings, StepWork(1000, 2, 0, 11), tp=2)
    compute, head = 2 * layers * 1000 / 100, 2 * 800 / 10
    pairs = 11 * 4 * 3 * 4 * 2 / 7
    assert many == pytest.approx((compute + head + pairs) / 2 + 2 * 3 * 0.5)
    assert step_floor_s(shape, ceilings, StepWork(0, 0, 0, 0)) == 0


@pytest.mark.parametrize("seed", range(4))
def test_steps_are_those_of_the_reference_scheduler(seed):
    rng = np.random.default_rng(seed)
    requests = [
        (int(rng.integers(1, 40)), int(rng.integers(1, 30))) for _ in range(rng.integers(1, 20))
    ]
    limits = SchedulerLimits(
        max_num_seqs=7, max_num_batched_tokens=32, max_model_len=128, num_blocks=2000,
        block_size=4, pipeline_parallel_size=1, eos_token_ids=(),
    )  # fmt: skip
    scheduler = Scheduler(limits)
    for index, (num_in, num_out) in enumerate(requests):
        prompt = rng.integers(0, 50, num_in).astype(np.int32)
        scheduler.add_request(
            GenerationRequest(
                str(index), prompt, max_tokens=num_out, sampling=SamplingParams(ignore_eos=True)
            )
        )
    computed, rows = dict.fromkeys(map(str, range(len(requests))), 0), []
    while (output := scheduler.schedule()) is not None:
        counts = dict.fromkeys(output.decode_req_ids, 1) | dict(output.num_scheduled_tokens)
        for req_id, count in counts.items():
            computed[req_id] += count
        done = [r for r in counts if computed[r] >= requests[int(r)][0]]
        rows.append(output.total_num_scheduled_tokens)
        scheduler.update_from_output(output, StepResult(done, [1] * len(done)))
    steps = list(schedule(requests, max_num_seqs=7, max_num_batched_tokens=32))
    assert [step.rows for step in steps] == [count for count in rows if count]
    assert sum(step.sampled for step in steps) == sum(o for _, o in requests)
    keys = sum(sum(range(num_in + 1, num_in + num_out)) for num_in, num_out in requests)
    assert sum(step.decode_keys for step in steps) == keys
    pairs = sum(num_in * (num_in + 1) // 2 for num_in, _ in requests)
    assert sum(step.prefill_pairs for step in steps) == pairs


@pytest.mark.parametrize("name", workloads.NAMES)
def test_more_devices_never_raise_a_floor_and_slower_ones_do(name):
    shape = ModelShape.read(MODELS / "llama-8b")
    requests = [(len(prompt), count) for prompt, count in workloads.make(name, 1000)]
    floor = workload_floor_s(shape, CEILINGS, requests)
    assert workload_floor_s(shape, CEILINGS, requests, pp=2) <= floor
    assert workload_floor_s(shape, CEILINGS, requests, tp=2) == pytest.approx(floor / 2)
    slower = Ceilings(4e12, 600e12, 500e12)
    assert workload_floor_s(shape, slower, requests) > floor


def test_known_floors_come_out():
    shape = ModelShape.read(MODELS / "llama-8b")
    assert shape.decode_weight_bytes == pytest.approx(15.0e9, rel=1e-3)
    assert 1 / workload_floor_s(shape, CEILINGS, [(1, 1000)]) * 1000 == pytest.approx(299, rel=1e-2)
    assert workload_floor_s(shape, CEILINGS, [(8192, 1)]) == pytest.approx(0.2023, rel=1e-2)
