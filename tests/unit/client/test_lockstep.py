"""Replicas in lockstep, on fake daemons: one step for all of them under one seq, with a part for
each; idle replicas, failures of a replica's rank, and refusals. Real daemons:
tests/e2e/test_replicas.py."""

import asyncio
import contextlib
import random
import re
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from rpc_schema.config import ParallelConfig
from rpc_schema.errors import ErrorCode, WorkerError
from tests.support.fake_daemon import FakeDaemon, Fault, reference_tokens
from tests.support.waiting import PATIENCE_S, wait_until
from tests.unit.client.conftest import worker_config
from worker_client.async_driver import AsyncDriver
from worker_client.driver import Driver
from worker_client.errors import (
    ClientConfigError,
    InvalidSchedulerOutput,
    ReplacementFailed,
    RequestError,
    StepFailed,
    WorkerDied,
)
from worker_client.replicas.group import DataParallelGroup
from worker_client.replicas.lockstep import LockstepScheduler
from worker_client.requests import GenerationRequest, SamplingParams
from worker_client.scheduler import Scheduler, scheduler_limits
from worker_client.scheduler_output import LockstepOutput, NewRequest, SchedulerOutput
from worker_client.steps.masks import StepMasks
from worker_client.worker_group import WorkerGroup

EOS = frozenset({7})


def parallel_config(dp: int, pp: int = 1, tp: int = 1) -> ParallelConfig:
    return ParallelConfig(
        pipeline_parallel_size=pp,
        tensor_parallel_size=tp,
        data_parallel_size=dp,
        data_parallel_lockstep=True,
    )


@pytest.fixture
def loaded(fakes):
    """Make a loaded group of replicas in lockstep on new fake daemons: (group, scheduler,
    daemons)."""
    with contextlib.ExitStack() as opened:

        def make(dp: int, pp: int = 1, tp: int = 1):
            found = fakes(dp * pp * tp)
            parallel = parallel_config(dp, pp, tp)
            config = replace(worker_config(pp, tp), parallel=parallel)
            group = opened.enter_context(WorkerGroup(found.endpoints, parallel))
            group.attach()
            limits = scheduler_limits(group.prepare(config), config)
            scheduler = LockstepScheduler([Scheduler(limits) for _ in range(dp)])
            return group, scheduler, found.daemons

        yield make


def request_of(number: int, max_tokens: int = 8) -> GenerationRequest:
    prompt = np.arange(number + 1, dtype=np.int32)
    return GenerationRequest(f"r{number}", prompt, max_tokens=max_tokens)


def expected(number: int, max_tokens: int = 8) -> list[int]:
    return reference_tokens(range(number + 1), max_tokens, EOS)


def check(outputs, numbers, max_tokens: int = 8) -> None:
    """Each request ended once, with its tokens."""
    outputs = list(outputs)
    assert sorted(each.req_id for each in outputs) == sorted(f"r{number}" for number in numbers)
    tokens = {each.req_id: each.token_ids for each in outputs}
    assert tokens == {f"r{number}": expected(number, max_tokens) for number in numbers}


def follow(daemons: list[FakeDaemon], rank: int) -> None:
    """Put a new daemon in the place of one that has ended."""
    daemons[rank].kill()
    daemons[rank] = FakeDaemon(daemons[rank].endpoint).start()


def new(req_id: str, block: int, length: int = 3) -> NewRequest:
    return NewRequest(req_id, np.arange(length, dtype=np.int32), length, 0, [block])


def admission(req_id: str, **fields) -> SchedulerOutput:
    return SchedulerOutput({req_id: 3}, scheduled_new_reqs=[new(req_id, 1)], **fields)


@pytest.mark.parametrize(("dp", "pp", "tp"), [(2, 1, 1), (2, 2, 1), (3, 1, 2)])
def test_all_replicas_take_each_step_under_one_seq(loaded, dp, pp, tp):
    group, scheduler, daemons = loaded(dp, pp, tp)
    size = pp * tp
    assert [daemon.rank for daemon in daemons] == list(range(dp * size))
    assert len({daemon.link for daemon in daemons}) == 1
    driver = Driver(group, scheduler)
    numbers = range(2 * dp + 1)
    for number in numbers:
        driver.add_request(request_of(number))
    check(driver.run(), numbers)
    wait_until(lambda: len({daemon.last_seq for daemon in daemons}) == 1, "all ranks")
    assert len({daemon.num_executes for daemon in daemons}) == 1
    counts = daemons[0].replica_counts
    assert all(daemon.replica_counts == counts for daemon in daemons)
    admitted = [sum(len(each.scheduled_new_reqs) for each in d.executes) for d in daemons]
    assert admitted == [3] * size + [2] * (dp - 1) * size
    for rank, daemon in enumerate(daemons):
        assert [each.seq for each in daemon.executes] == [e.seq for e in daemons[0].executes]
        own = [step[rank // size][1] for step in counts]
        assert own == [each.total_num_scheduled_tokens for each in daemon.executes]


def test_idle_replicas_take_empty_steps(loaded):
    """One request at a time, then none, then all: the seqs of the replicas stay the same."""
    group, scheduler, daemons = loaded(3)
    driver = Driver(group, scheduler)
    chance = random.Random(3)
    begun, outputs = 0, []
    for _ in range(30):
        for _ in range(chance.choice([0, 0, 0, 1, 2, 5])):
            driver.add_request(request_of(begun))
            begun += 1
        for _ in range(chance.randrange(6)):
            if driver.busy:
                outputs += driver.step()
    outputs += driver.run()
    check(outputs, range(begun))
    shares = [[tokens for _, tokens in step] for step in daemons[0].replica_counts]
    assert any(0 in own and any(own) for own in shares), "some, but not all, were idle"
    wait_until(lambda: len({daemon.last_seq for daemon in daemons}) == 1, "all ranks")


def test_failure_of_a_replica_fails_the_step_for_all(loaded):
    """Replica 0 has replied to the step that replica 1 fails: its tokens do not count, since the
    step is not done. The step before counts."""
    group, scheduler, daemons = loaded(2)
    daemons[1].faults = [Fault(3, code=ErrorCode.CAPACITY, message="full")]
    failed = []

    class Noting(LockstepScheduler):
        def step_failed(self, outputs, lost_req_ids):
            failed.append((len(outputs), lost_req_ids))
            super().step_failed(outputs, lost_req_ids)

    driver = Driver(group, Noting(scheduler._schedulers))
    for number in range(4):
        driver.add_request(request_of(number))
    check(driver.run(), range(4))
    assert driver.num_failures == 1
    assert failed == [(2, frozenset({"r0", "r1", "r2", "r3"}))]


def test_rows_of_a_replica_that_took_no_part_stay(loaded):
    group, _, daemons = loaded(2)
    first = LockstepOutput.of([admission("a"), admission("b")])
    assert {*group.execute_model(first).result().sampled} == {"a", "b"}
    daemons[1].faults = [Fault(daemons[1].num_executes, code=ErrorCode.CAPACITY)]
    second = LockstepOutput.of([SchedulerOutput(), SchedulerOutput({"b": 1})])
    with pytest.raises(StepFailed) as caught:
        group.execute_model(second).result()
    assert (caught.value.rank, caught.value.lost_req_ids) == (1, {"b"})
    assert group.slots.req_ids == ["a"]
    third = LockstepOutput.of([SchedulerOutput({"a": 1}), admission("c")])
    result = group.execute_model(third).result()
    assert result.sampled["a"] == reference_tokens(range(3), 2, frozenset())[1]


@pytest.mark.parametrize(("dp", "pp", "tp", "rank"), [(2, 1, 1, 1), (2, 2, 1, 0), (2, 1, 2, 3)])
def test_rank_of_a_replica_dies_and_is_replaced(loaded, dp, pp, tp, rank):
    group, scheduler, daemons = loaded(dp, pp, tp)
    daemons[rank].faults = [Fault(4, "die")]
    died = []

    def recover(error: WorkerDied) -> None:
        died.append(error.rank)
        follow(daemons, rank)
        report = group.replace(error.rank)
        assert report.loaded_ranks == (rank,)

    driver = Driver(group, scheduler, recover=recover)
    while not died:  # nobody waits for a rank that owes no outcome: it may die later
        for number in range(5):
            driver.add_request(request_of(number))
        check(driver.run(), range(5))
    assert died == [rank]
    assert len({(daemon.epoch, daemon.link) for daemon in daemons}) == 1
    own = [daemon for number, daemon in enumerate(daemons) if number != rank]
    assert all(daemon.operations.count("LoadModel") == 1 for daemon in own)


def test_all_go_on_once_a_late_successor_has_come(loaded):
    """Each attempt that fails is the step's error; steps that were done stay so."""
    group, scheduler, daemons = loaded(2)
    may_come = []

    def recover(died):
        if may_come:
            daemons[1] = FakeDaemon(daemons[1].endpoint).start()
        group.replace(died.rank, within_s=PATIENCE_S if may_come else 0.1)

    driver = Driver(group, scheduler, recover=recover)
    for number in range(4):
        driver.add_request(request_of(number))
    outputs = [*driver.step(), *driver.step(), *driver.step()]
    daemons[1].kill()
    for _ in range(2):
        with pytest.raises(ReplacementFailed):
            for _ in range(20):
                outputs += driver.step()
    may_come.append(True)
    check([*outputs, *driver.run()], range(4))


def test_lost_reply_of_one_replica_comes_again(loaded):
    group, scheduler, daemons = loaded(2)
    dropped = []
    depart = daemons[1]._depart

    def lose_one(epoch, frames, delay_s=0.0):
        if daemons[1].num_executes == 3 and not dropped:
            dropped.append(frames)
        else:
            depart(epoch, frames, delay_s)

    daemons[1]._depart = lose_one
    driver = Driver(group, scheduler)
    for number in range(4):
        driver.add_request(request_of(number))
    check(driver.run(), range(4))
    assert dropped and not driver.num_failures
    assert daemons[0].num_executes == daemons[1].num_executes


@pytest.mark.parametrize("wrong", [0, 1])
def test_wrong_part_changes_nothing_in_any_replica(loaded, wrong):
    group, _, daemons = loaded(2)
    good = [admission("a"), admission("b")]
    bad = list(good)
    bad[wrong] = SchedulerOutput({"nobody": 1})
    with pytest.raises(InvalidSchedulerOutput, match="nobody"):
        group.execute_model(LockstepOutput.of(bad))
    assert not group.slots.req_ids and not any(daemon.num_executes for daemon in daemons)
    assert {*group.execute_model(LockstepOutput.of(good)).result().sampled} == {"a", "b"}
    steady = ("a",), ("b",)
    output = LockstepOutput.of([SchedulerOutput(decode_req_ids=own) for own in steady])
    group.execute_model(output).result()
    parts = [SchedulerOutput(decode_req_ids=own, new_block_ids={own[0]: [2]}) for own in steady]
    given, parts[wrong].new_block_ids = parts[wrong].new_block_ids, {"nobody": [2]}
    with pytest.raises(InvalidSchedulerOutput, match="nobody"):
        group.execute_model(LockstepOutput.of(parts))
    parts[wrong].new_block_ids = given
    result = group.execute_model(LockstepOutput.of(parts)).result()
    token = reference_tokens(range(3), 3, frozenset())[2]
    assert result.sampled == {"a": token, "b": token}


def test_step_without_a_part_for_each_replica_is_refused(loaded):
    group, _, _ = loaded(2)
    outputs = [
        admission("a"),
        LockstepOutput.of([admission("a")]),
        LockstepOutput.of([admission("a")] * 3),
        LockstepOutput(replicas=(admission("a"), None)),
        LockstepOutput(replicas=None),
    ]
    for output in outputs:
        with pytest.raises(InvalidSchedulerOutput, match="lockstep") as caught:
            group.execute_model(output)
        assert caught.value.field == "replicas"
    twice = LockstepOutput.of([admission("a"), admission("a")])
    with pytest.raises(InvalidSchedulerOutput, match="another replica"):
        group.execute_model(twice)
    group.execute_model(LockstepOutput.of([admission("a"), SchedulerOutput()])).result()
    moved = LockstepOutput.of([SchedulerOutput(), admission("a")])
    with pytest.raises(InvalidSchedulerOutput, match="another replica"):
        group.execute_model(moved)
    moved = LockstepOutput.of([SchedulerOutput(finished_req_ids=["a"]), admission("a")])
    assert {*group.execute_model(moved).result().sampled} == {"a"}


def test_deferred_sampling_of_one_replica_is_a_step_of_all(loaded):
    group, _, daemons = loaded(2)
    parts = [admission("a"), admission("b")]
    output = LockstepOutput.of(parts)
    output.extensions = (StepMasks(deferred=("a", "b")),)
    future = group.execute_model(output)
    assert not future.result().sampled
    for req_id in "ba":
        later = group.sample_tokens(future, req_ids=[req_id])
        assert {*later.result().sampled} == {req_id}
    with pytest.raises(InvalidSchedulerOutput, match="has not deferred"):
        group.sample_tokens(future, req_ids=["a"])
    wait_until(lambda: daemons[0].last_seq == daemons[1].last_seq, "both replicas")
    kinds = [each for each in daemons[0].operations if each in ("ExecuteModel", "SampleTokens")]
    assert kinds == ["ExecuteModel", "ExecuteModel", "SampleTokens"]


def test_dummy_batch_and_operations_reach_all_replicas(loaded):
    group, _, daemons = loaded(2)
    group.execute_dummy_batch().result()
    group.memory.sleep()
    group.memory.wake_up()
    wait_until(lambda: daemons[0].last_seq == daemons[1].last_seq, "both replicas")
    for daemon in daemons:
        assert [daemon.operations.count(each) for each in ("ExecuteDummyBatch", "Sleep")] == [1, 1]


def test_operation_fails_for_all_replicas_if_one_fails(loaded):
    group, _, daemons = loaded(2)
    daemons[1].warm_up_faults = [Fault(0, code=ErrorCode.CAPACITY, message="full")]
    with pytest.raises(WorkerError, match="full") as caught:
        group.load_chain.compile_or_warm_up_model()
    assert caught.value.rank == 1
    group.execute_model(LockstepOutput.of([admission("a"), admission("b")])).result()


def test_samples_of_a_prompt_are_on_one_replica(loaded):
    group, scheduler, daemons = loaded(2)
    driver = Driver(group, scheduler)
    prompt = np.arange(6, dtype=np.int32)
    sampling = SamplingParams(n=3, temperature=0.5, seed=1)
    driver.add_request(GenerationRequest("r5", prompt, max_tokens=8, sampling=sampling))
    driver.add_request(request_of(1))
    assert len(list(driver.run())) == 4
    admitted = [
        {each.req_id for step in daemon.executes for each in step.scheduled_new_reqs}
        for daemon in daemons
    ]
    assert admitted == [{"r5#0", "r5#1", "r5#2"}, {"r1"}]


def test_an_id_in_use_is_refused_whatever_its_replica(loaded):
    _, scheduler, _ = loaded(2)
    scheduler.add_request(request_of(3))
    for length in (1, 60):
        other = GenerationRequest("r3", np.zeros(length, np.int32))
        with pytest.raises(RequestError, match="r3"):
            scheduler.add_request(other)
    scheduler.add_request(request_of(4))
    assert [each.has_unfinished_requests() for each in scheduler._schedulers] == [True, True]
    scheduler.abort_request("r3")
    assert [each.has_unfinished_requests() for each in scheduler._schedulers] == [False, True]


def test_aborted_requests_leave_their_replica(loaded):
    group, scheduler, _ = loaded(2)
    driver = Driver(group, scheduler)
    for number in range(4):
        driver.add_request(request_of(number))
    driver.step()
    driver.abort_request("r1")
    driver.abort_request("nobody")
    check(driver.run(), [0, 2, 3])
    assert not group.slots.req_ids


def test_the_documented_example_runs(fakes):
    text = (Path(__file__).parents[3] / "docs" / "scheduler-cookbook.md").read_text()
    (source,) = (
        block
        for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        if "LockstepScheduler" in block
    )
    parallel = parallel_config(2)
    names = globals() | {
        "config": replace(worker_config(), parallel=parallel),
        "endpoints": fakes(2).endpoints,
        "requests": [request_of(number) for number in range(4)],
    }
    exec(compile(source, "docs/scheduler-cookbook.md", "exec"), names)  # noqa: S102
    check(names["outputs"], range(4))


@pytest.mark.parametrize(
    ("make", "field", "message"),
    [
        (
            lambda: WorkerGroup(["ipc:///tmp/a"], parallel_config(1)),
            "parallel.data_parallel_lockstep",
            "there is one replica",
        ),
        (
            lambda: WorkerGroup(["ipc:///tmp/a"], parallel_config(2), dp_rank=0),
            "dp_rank",
            "one group",
        ),
        (
            lambda: WorkerGroup(["ipc:///tmp/a"], parallel_config(2)),
            "endpoints",
            "data_parallel_size 2 x pipeline_parallel_size 1 x tensor_parallel_size 1 needs 2",
        ),
        (
            lambda: DataParallelGroup(["ipc:///tmp/a", "ipc:///tmp/b"], parallel_config(2)),
            "parallel.data_parallel_lockstep",
            "use WorkerGroup",
        ),
        (lambda: LockstepScheduler([]), "schedulers", "no replica"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(make, field, message):
    with pytest.raises(ClientConfigError, match=message) as caught:
        make()
    assert caught.value.field == field


def test_one_replica_writes_the_files(loaded):
    group, _, daemons = loaded(2, 1, 2)
    replies = group.weights.save_sharded_state("saved")
    assert [reply.rank for reply in replies] == [0, 1]
    for daemon in daemons[:2]:
        assert daemon.operations.count("SaveShardedState") == 1
        assert daemon.operations.count("FinishShardedState") == 1
    for daemon in daemons[2:]:
        assert not {"SaveShardedState", "FinishShardedState"} & {*daemon.operations}
    wait_until(lambda: len({daemon.last_seq for daemon in daemons}) == 1, "all ranks")


def test_withdrawn_step_names_the_requests_of_all_parts(loaded):
    group, _, _ = loaded(2)
    group.execute_model(LockstepOutput.of([admission("a"), admission("b")])).result()
    unsent = LockstepOutput(replicas=(admission("c"), SchedulerOutput({"b": 1})))
    assert group.withdraw(unsent) == {"a", "b", "c"}
    assert group.withdraw(LockstepOutput(replicas=None)) == frozenset()
    group.execute_model(LockstepOutput.of([admission("a"), admission("b")])).result()


def test_tokens_are_streamed_from_every_replica(loaded):
    group, scheduler, _ = loaded(2)

    async def collect(driver: AsyncDriver, number: int) -> tuple[int, list[int]]:
        parts = [each.token_ids async for each in driver.generate(request_of(number))]
        return len(parts), [token for part in parts for token in part]

    async def main() -> None:
        opened = Driver(group, scheduler)
        async with AsyncDriver(lambda: contextlib.nullcontext(opened)) as driver:
            found = await asyncio.gather(*(collect(driver, number) for number in range(4)))
        assert [tokens for _, tokens in found] == [expected(number) for number in range(4)]
        assert all(num_parts > 2 for num_parts, _ in found), "as they come"

    asyncio.run(main())


def test_wrong_step_after_a_failure_reports_the_failure(loaded):
    """It was planned before the failure was known, as any step that is given then."""
    group, _, daemons = loaded(2)
    daemons[0].faults = [Fault(0, code=ErrorCode.CAPACITY), Fault(1, code=ErrorCode.CAPACITY)]
    for wrong in (LockstepOutput(replicas=None), SchedulerOutput(), LockstepOutput.of([])):
        future = group.execute_model(LockstepOutput.of([admission("a"), admission("b")]))
        wait_until(future.done, "the failure")
        with pytest.raises(StepFailed) as caught:
            group.execute_model(wrong).result()
        assert caught.value.lost_req_ids == {"a", "b"}
        if daemons[0].num_executes == 2:
            break
    group.execute_model(LockstepOutput.of([admission("a"), admission("b")])).result()
