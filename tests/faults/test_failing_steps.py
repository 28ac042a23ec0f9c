"""Failing steps and their effects: out of memory (rows 11 and 12 of the fault matrix), a lost
device (row 14), and NaN logits (row 41)."""

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rpc_schema.errors import CapacityError, ErrorCode
from tests.e2e.conftest import checkpoint, model_root
from tests.support.checkpoints import Checkpoint, NearTie, decisive_prompts
from tests.support.driving import assert_serves, random_cases
from tests.support.faulty_daemon import Fault, FaultyDaemons
from tests.support.forked_daemons import ForkedDaemons
from tests.support.serving import (
    LONG_LEASE,
    connect,
    generate,
    greedy_request,
    scheduler_limits,
    worker_config,
)
from tests.support.waiting import wait_until
from worker_client.driver import Driver
from worker_client.errors import LaunchError, StepFailed, WorkerDied
from worker_client.launcher import LocalDaemons
from worker_client.requests import GenerationRequest
from worker_client.scheduler import Scheduler
from worker_client.worker_group import WorkerGroup
from worker_host.exit_codes import ExitCode

__all__ = ["checkpoint", "model_root"]

LONG = 1100
SHORT = 9
INNER = 8192
MLP_BYTES = (LONG + SHORT) * 2 * INNER * 4
"""The largest intermediate result of a step of both prompts: large enough for its own mapping."""
SPARE_BYTES = 24 << 20


@pytest.fixture(scope="module")
def pair(model_root) -> Iterator[LocalDaemons]:
    """Two daemons as shipped."""
    with ForkedDaemons(["cpu"] * 2, model_root) as daemons:
        yield daemons


@contextmanager
def starved(pid: int, spare_bytes: int = SPARE_BYTES) -> Iterator[None]:
    """Limits a process's memory for a while."""
    before = resource.prlimit(pid, resource.RLIMIT_DATA)
    taken = int(_status(pid, "VmData"))
    resource.prlimit(pid, resource.RLIMIT_DATA, (taken + spare_bytes, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_DATA, before)


def _status(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def wide(checkpoint: Callable[..., Checkpoint]) -> Checkpoint:
    """A model whose steps take far more memory than its weights."""
    return checkpoint(
        intermediate_size=INNER, num_hidden_layers=2, max_position_embeddings=2 * LONG
    )


def fail_once(group: WorkerGroup, scheduler: Scheduler) -> StepFailed:
    """Send as many steps as may be in flight; all fail, and the scheduler receives the failures."""
    outputs, futures = [], []
    while len(outputs) < group.max_in_flight and (output := scheduler.schedule()) is not None:
        outputs.append(output)
        futures.append(group.execute_model(output))
    failures = []
    for future in futures:
        with pytest.raises(StepFailed) as failed:
            future.result()
        failures.append(failed.value)
    scheduler.step_failed(outputs, failures[0].lost_req_ids)
    assert len(failures) > 1
    return failures[0]


@pytest.mark.parametrize(
    ("pp", "rank", "rounds"),
    [
        pytest.param(1, 0, 100, marks=pytest.mark.exhaustive),
        pytest.param(2, 0, 10, marks=pytest.mark.exhaustive),
        (2, 1, 10),
    ],
)
def test_step_without_memory_costs_nothing_but_itself(
    pair, checkpoint, detection, pp, rank, rounds
):
    model = wide(checkpoint)
    long, short = decisive_prompts(model, rank + rounds, (LONG, SHORT), 6)
    requests = [greedy_request("long", long, 6), greedy_request("short", short, 6)]
    expected = {request.id: model.greedy(request.prompt, 6) for request in requests}
    config = worker_config(model.path, pp, max_num_batched_tokens=LONG + 16, block_size=16)
    pid = pair.pids[rank]
    with connect(pair.endpoints[:pp], config) as (group, loaded):
        assert generate(group, loaded, requests).tokens == expected
        scheduler = Scheduler(scheduler_limits(group, loaded))
        for request in reversed(requests):
            scheduler.add_request(request)
        sizes, times = [], []
        with starved(pid):
            for _ in range(rounds):
                began = time.monotonic()
                failure = fail_once(group, scheduler)
                times.append(time.monotonic() - began)
                assert (failure.code, failure.rank) == (ErrorCode.OUT_OF_MEMORY, rank)
                assert f"{MLP_BYTES} bytes are needed" in failure.message
                assert "bytes are free; fix: " in failure.message
                sizes.append(_status(pid, "VmData"))
        outputs = {output.req_id: output for output in Driver(group, scheduler).run()}
        assert {name: output.token_ids for name, output in outputs.items()} == expected
    detection(11, f"out of memory in a forward, pp={pp}", 0.5, max(times), "reply")
    assert max(sizes) - sizes[0] < 12 << 20  # the heap's first growth, a thread's stack
    assert sizes[-1] - sizes[rounds // 2] < 10 << 20  # a MiB now and then, and a stack again


def test_load_without_memory_leaves_all_as_it_was(pair, checkpoint, detection):
    model = checkpoint(intermediate_size=4 * INNER, num_hidden_layers=2)
    config = worker_config(model.path)
    endpoints = pair.endpoints[:1]
    assert_serves(endpoints, checkpoint())
    began = time.monotonic()
    with (
        starved(pair.pids[0], 4 << 20),
        pytest.raises(CapacityError, match=r"the weights do not fit.*fix: ") as refused,
        connect(endpoints, config),
    ):
        began = time.monotonic()
    detection(12, "out of memory at load", 5.0, time.monotonic() - began, "reply")
    assert refused.value.code is ErrorCode.OUT_OF_MEMORY
    with WorkerGroup(endpoints, config.parallel, lease=LONG_LEASE) as group:
        group.attach()
        status = group.get_status()[0]
        assert (status.load, status.config, status.serving) == ("DEVICE_READY", None, "SERVING")
    assert_serves(endpoints, model)


POISON = 7


@pytest.fixture(scope="module")
def poisoned(checkpoint) -> Checkpoint:
    """A model in which one token's embedding is NaN; not so in the reference."""
    model = checkpoint(seed=99)
    for path in model.path.glob("*.safetensors"):
        tensors = load_file(path)
        if "model.embed_tokens.weight" in tensors:
            tensors["model.embed_tokens.weight"][POISON] = torch.nan
        save_file(tensors, path, {"format": "pt"})
    return model


@pytest.mark.parametrize(
    ("pp", "tp"),
    [
        pytest.param(1, 1, marks=pytest.mark.exhaustive),
        (2, 1),
        pytest.param(1, 2, marks=pytest.mark.exhaustive),
    ],
)
def test_request_whose_logits_are_no_numbers_fails_alone(pair, poisoned, pp, tp):
    """A small cache: blocks that held NaN are used again, by requests that must not see it."""
    rng = np.random.default_rng()
    stem = rng.integers(8, 331, 13)
    while expected_tokens(poisoned, [*stem, *(first := rng.integers(8, 331, 1))]) is None:
        stem = rng.integers(8, 331, 13)
    kinds = [{}, {}, {}, {"logprobs": 2}, {"temperature": 0.9}, {"temperature": 0.9, "top_k": 9}]

    def request(name: str, tail: list[int], index: int) -> GenerationRequest:
        return greedy_request(name, [*stem, *tail], 12, seed=index, **kinds[index % len(kinds)])

    tails = [first, *(rng.integers(8, 331, 1 + i) for i in range(1, 9))]
    good = [request(f"good {i}", tail.tolist(), i) for i, tail in enumerate(tails)]
    bad = [request(f"bad {i}", [5] * i + [POISON] + [9] * i, i) for i in range(6)]
    config = worker_config(
        poisoned.path, pp, tp, max_num_seqs=4, max_num_batched_tokens=24, max_model_len=64
    )
    with connect(pair.endpoints[: pp * tp], config, num_gpu_blocks=40) as (group, loaded):
        alone = generate(group, loaded, good)
        run = generate(group, loaded, [*bad[:2], *good[:4], *bad[2:], *good[4:]])
    for entry in good:
        output = alone.outputs[entry.id]
        assert run.tokens[entry.id] == output.token_ids, entry.id
        assert run.outputs[entry.id].finish_reason == output.finish_reason
        if output.finish_reason == "error":  # it has sampled the token itself
            assert output.token_ids[-1] == POISON
    for entry in good[:3]:
        expected = expected_tokens(poisoned, entry.prompt.tolist())
        assert expected in (None, run.tokens[entry.id])
    for entry in bad:
        output = run.outputs[entry.id]
        assert (output.token_ids, output.finish_reason) == ([], "error")
        assert "is NaN or infinite" in output.error
    assert run.driver.num_failures == 0


def expected_tokens(model: Checkpoint, prompt: list[int]) -> list[int] | None:
    """Return the tokens of transformers, whose model is whole; None if rounding could change them,
    or if the model itself is led to the poison."""
    try:
        expected = model.greedy(prompt, 12)
    except NearTie:
        return None
    return None if POISON in expected else expected


def await_exit(daemons: LocalDaemons, began: float) -> tuple[int | None, float]:
    """The exit code of the first daemon that has ended, and how long after `began` it was there."""
    ended: list[int | None] = []

    def has_ended() -> bool:
        try:
            daemons.check_alive()
        except LaunchError as error:
            ended.append(error.exit_code)
        return bool(ended)

    wait_until(has_ended, "a daemon has ended")
    return ended[0], time.monotonic() - began


@pytest.mark.parametrize(
    ("pp", "where"),
    [(1, "argmax_tokens"), pytest.param(2, "forward", marks=pytest.mark.exhaustive)],
)
def test_lost_device_gives_no_token_and_ends_the_process(
    model_root, tmp_path, checkpoint, detection, pp, where
):
    cases = random_cases(checkpoint(), seed=pp)
    config = worker_config(checkpoint().path, pp, step_deadline_ms=100_000)
    with FaultyDaemons(pp, model_root, tmp_path) as daemons:
        with connect(daemons.endpoints, config) as (group, loaded):
            driver = Driver(group, Scheduler(scheduler_limits(group, loaded)))
            for request in cases.requests:
                driver.add_request(request)
            began = time.monotonic()
            daemons.faults[0].put(Fault(where, "lost", 8, times=1000))
            with pytest.raises(WorkerDied) as raised:
                finished = list(driver.run())
                assert not finished, "the device was lost before anybody could finish"
        exit_code, took_s = await_exit(daemons, began)
        log = daemons.log_tail(0)
    assert exit_code == ExitCode.CONTEXT_LOST
    detection(14, "device lost", 2.0, took_s, "the reply, then exit code 86", injected=True)
    assert raised.value.rank == 0
    assert log.count("the process ends with 86: the device is lost") == 1


@pytest.mark.parametrize(("xid", "row"), [(48, 15), (79, 16)])
def test_gpu_that_must_not_be_used_ends_the_process(
    model_root, tmp_path, checkpoint, detection, xid, row
):
    """Idle: nobody has called the device since."""
    with FaultyDaemons(1, model_root, tmp_path) as daemons:
        daemons.faults[0].put_xid(94)  # contained: the process that it hit sees it
        wait_until(lambda: not daemons.faults[0].xids.exists(), "the first XID is taken")
        assert_serves(daemons.endpoints, checkpoint())
        began = time.monotonic()
        daemons.faults[0].put_xid(xid)
        exit_code, took_s = await_exit(daemons, began)
        log = daemons.log_tail(0)
    detection(row, f"XID {xid}", 2.0, took_s, "NVML event, then exit code 87", injected=True)
    assert exit_code == ExitCode.GPU_LOST
    assert "XID 94" in log and f"XID {xid}: " in log and "NVIDIA's advice: re" in log
