"""Replicas on fake daemons: attaching, loading and operating them together, and steps, failures and
replacements of one that leave the others alone. Real daemons: tests/e2e/test_replicas.py."""

import asyncio
import contextlib
import re
import threading
import time
from functools import partial
from itertools import repeat
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from rpc_schema.config import ModelConfig, ParallelConfig, WorkerConfig
from rpc_schema.errors import (
    DrainingError,
    ErrorCode,
    LeaseHeldError,
    WorkerError,
)
from rpc_schema.identity import ContentIdentity
from rpc_schema.weight_transfer import WeightsStatus
from tests.support.fake_daemon import HELD, FakeDaemon, Fault, reference_tokens
from tests.support.waiting import wait_until
from tests.unit.client.conftest import worker_config
from worker_client.driver import Driver
from worker_client.errors import (
    ClientConfigError,
    ConfigMismatchError,
    ContentMismatchError,
    KVPlanError,
    ReplicasMissing,
    WorkerDied,
)
from worker_client.group.failure_state import DrainState, Ownership
from worker_client.replicas.driver import DataParallelDriver
from worker_client.replicas.group import DataParallelGroup
from worker_client.replicas.lockstep import LockstepScheduler
from worker_client.replicas.placement import PREFIX_TOKENS
from worker_client.requests import GenerationRequest
from worker_client.scheduler import Scheduler, scheduler_limits
from worker_client.wire.lease import OWNER_CHECK_S, LeaseTerms
from worker_client.worker_group import WorkerGroup

NUM_TOKENS = 12


def parallel_config(dp: int, pp: int = 1, tp: int = 1) -> ParallelConfig:
    return ParallelConfig(pipeline_parallel_size=pp, tensor_parallel_size=tp, data_parallel_size=dp)


@pytest.fixture
def connected(fakes):
    """Make a group of replicas on new fake daemons, not attached: connected(dp, pp, tp)."""
    with contextlib.ExitStack() as opened:

        def make(dp: int, pp: int = 1, tp: int = 1, **options):
            daemons = fakes(dp * pp * tp)
            parallel = parallel_config(dp, pp, tp)
            group = DataParallelGroup(daemons.endpoints, parallel, **options)
            config = replace(worker_config(pp, tp), parallel=parallel)
            return opened.enter_context(group), config, daemons.daemons

        yield make


@pytest.fixture
def served(connected):
    """Make replicas that are ready, each with a driver: (group, drivers, daemons)."""

    def make(dp: int, pp: int = 1, tp: int = 1):
        group, config, daemons = connected(dp, pp, tp)
        group.attach()
        loaded = group.prepare(config)
        assert not any(model.was_loaded for model in loaded)
        drivers = [
            Driver(replica, Scheduler(scheduler_limits(model, config)))
            for replica, model in zip(group.replicas, loaded, strict=True)
        ]
        return group, drivers, daemons

    return make


def request_of(number: int) -> GenerationRequest:
    prompt = np.arange(number + 1, dtype=np.int32)
    return GenerationRequest(f"r{number}", prompt, max_tokens=NUM_TOKENS)


def expected(number: int) -> list[int]:
    return reference_tokens(range(number + 1), NUM_TOKENS, frozenset({7}))


def run(driver: Driver, *numbers: int) -> None:
    """Run requests to their end, and check their tokens."""
    for number in numbers:
        driver.add_request(request_of(number))
    assert {each.req_id: each.token_ids for each in driver.run()} == {
        f"r{number}": expected(number) for number in numbers
    }


def hold(daemon: FakeDaemon) -> None:
    """Keep a daemon's replies back until its `let_go` is set."""
    daemon._depart = lambda epoch, frames, delay_s=0.0: FakeDaemon._depart(
        daemon, epoch, frames, HELD
    )


def beside(call) -> threading.Thread:
    """Start a call on another thread."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def follow(daemons: list[FakeDaemon], rank: int) -> None:
    """Put a new daemon in the place of one that has ended."""
    daemons[rank].kill()
    daemons[rank] = FakeDaemon(daemons[rank].endpoint).start()


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (2, 1), (1, 2)])
def test_replicas_take_steps_of_their_own_under_one_epoch(served, pp, tp):
    group, drivers, daemons = served(3, pp, tp)
    assert [daemon.rank for daemon in daemons] == list(range(3 * pp * tp))
    assert [status.rank for status in group.get_status()] == list(range(3 * pp * tp))
    assert [daemon.link % 3 for daemon in daemons] == [0] * pp * tp + [1] * pp * tp + [2] * pp * tp
    run(drivers[0], 1, 2, 3)
    run(drivers[1], 4)
    assert len({daemon.epoch for daemon in daemons}) == 1
    assert [replica.output_rank for replica in group.replicas] == [
        daemons.index(next(d for d in own if d._is_output))
        for own in (daemons[pp * tp * n : pp * tp * (n + 1)] for n in range(3))
    ]

    def steps_of(dp_rank: int) -> list[int]:
        return [daemons[rank].num_executes for rank in group.replicas[dp_rank].ranks]

    for dp_rank in (0, 1):
        wait_until(lambda own=dp_rank: len({*steps_of(own)}) == 1, "all ranks of the replica")
        assert min(steps_of(dp_rank)) >= NUM_TOKENS
    assert not any(steps_of(2))
    run(drivers[2], 5)
    run(drivers[0], 6)


def test_steps_are_in_flight_on_all_replicas_at_once(served):
    group, drivers, daemons = served(2)
    for daemon in daemons:
        hold(daemon)
    for number, driver in enumerate(drivers):
        driver.add_request(request_of(number))
    threads = [beside(driver.step) for driver in drivers]
    wait_until(lambda: [replica.num_in_flight for replica in group.replicas] == [2, 2], "steps")
    daemons[1].let_go.set()
    threads[1].join()
    assert group.replicas[0].num_in_flight == 2, "the other replica's are still out"
    daemons[0].let_go.set()
    threads[0].join()
    for number, driver in enumerate(drivers):
        (output,) = driver.run()
        assert output.token_ids == expected(number)


@pytest.mark.parametrize(
    ("endpoints", "dp", "message"),
    [
        (3, 2, "data_parallel_size 2 x pipeline_parallel_size 2 x tensor_parallel_size 1 needs 4"),
        (5, 2, "needs 4 daemons"),
        (0, 1, "needs 2 daemons"),
    ],
)
def test_endpoints_that_do_not_fit_the_sizes_are_refused(endpoints, dp, message):
    names = [f"ipc:///tmp/w{number}" for number in range(endpoints)]
    with pytest.raises(ClientConfigError, match=message) as caught:
        DataParallelGroup(names, parallel_config(dp, 2))
    assert caught.value.field == "endpoints"


@pytest.mark.parametrize("name", ["data", "pipeline", "tensor"])
@pytest.mark.parametrize("size", [0, -1, "2", 1.5, True, None, 2**70])
def test_sizes_that_are_none_are_refused(name, size):
    field = f"{name}_parallel_size"
    parallel = replace(ParallelConfig(data_parallel_size=2), **{field: size})
    for kind in (DataParallelGroup, WorkerGroup):
        with pytest.raises(ClientConfigError) as caught:
            kind(["ipc:///tmp/w0", "ipc:///tmp/w1"], parallel)
        assert (caught.value.field, caught.value.value) == (f"parallel.{field}", size)
        assert caught.value.fix


@pytest.mark.parametrize(
    "endpoints",
    [None, "ipc:///tmp/w0", 5, [1, 2], [None, None], ["ipc:///tmp/w0", b"x"], ["", "a"]],
)
def test_endpoints_that_are_none_are_refused(endpoints):
    with pytest.raises(ClientConfigError, match="fix") as caught:
        DataParallelGroup(endpoints, parallel_config(2))
    assert caught.value.field.startswith("endpoint")


@pytest.mark.parametrize("parallel", [None, 2, WorkerConfig])
def test_sizes_of_another_type_are_refused(parallel):
    for kind in (DataParallelGroup, WorkerGroup):
        with pytest.raises(ClientConfigError, match="give a ParallelConfig") as caught:
            kind(["ipc:///tmp/w0"], parallel)
        assert caught.value.field == "parallel"


def test_replica_with_another_model_is_refused_before_any_loads(connected):
    """The daemons keep what they have, and serve the next driver."""
    group, config, daemons = connected(3)
    own = replace(worker_config(), model=ModelConfig(model="/models/other"))
    with WorkerGroup([daemons[1].endpoint], ParallelConfig()) as other:
        other.attach()
        other.prepare(own)
    group.attach()
    with pytest.raises(ConfigMismatchError, match="/models/other") as caught:
        group.prepare(config)
    assert daemons[1].endpoint in str(caught.value) and caught.value.field == "config"
    assert [daemon.load for daemon in daemons] == ["CREATED", "READY", "CREATED"]
    group.close()
    with WorkerGroup([daemons[1].endpoint], ParallelConfig()) as other:
        other.attach(wait_for_lease_s=0.0)
        loaded = other.prepare(own)
        assert loaded.was_loaded
        run(Driver(other, Scheduler(scheduler_limits(loaded, own))), 1)
    with DataParallelGroup([each.endpoint for each in daemons], group.parallel) as following:
        following.attach(wait_for_lease_s=0.0)
        loaded = following.prepare(config, reload=True)
        for replica, model in zip(following.replicas, loaded, strict=True):
            run(Driver(replica, Scheduler(scheduler_limits(model, config))), 2)


def test_replica_that_cannot_load_is_not_left_half_loaded(connected):
    group, config, daemons = connected(2)
    group.attach()
    daemons[1].available_bytes = 100
    with pytest.raises(KVPlanError, match="fix"):
        group.prepare(config)
    assert [daemon.load for daemon in daemons] == ["READY", "CREATED"]
    daemons[1].available_bytes = daemons[0].available_bytes
    assert [model.was_loaded for model in group.prepare(config)] == [True, False]


@pytest.mark.parametrize("config", [None, {}, ParallelConfig()])
def test_configuration_of_another_type_is_refused(connected, config):
    group, _, daemons = connected(2)
    group.attach()
    with pytest.raises(ClientConfigError, match="give a WorkerConfig") as caught:
        group.prepare(config)
    assert caught.value.field == "config"
    assert [daemon.load for daemon in daemons] == ["CREATED"] * 2


def test_daemon_of_two_replicas_is_refused():
    with pytest.raises(ClientConfigError, match="named twice"):
        DataParallelGroup(["ipc:///tmp/w0", "ipc:///tmp/w0"], parallel_config(2))


def test_group_of_one_replica_says_which(directory):
    endpoints = [f"ipc://{directory}/w0"]
    with pytest.raises(ClientConfigError, match="DataParallelGroup") as caught:
        WorkerGroup(endpoints, parallel_config(2))
    assert caught.value.field == "parallel.data_parallel_size"
    for dp_rank in (-1, 2):
        with pytest.raises(ClientConfigError, match="0 to 1") as caught:
            WorkerGroup(endpoints, parallel_config(2), dp_rank=dp_rank)
        assert caught.value.field == "dp_rank"


def test_lease_is_taken_of_all_replicas_or_none(connected):
    group, _, daemons = connected(2)
    with WorkerGroup([daemons[1].endpoint], ParallelConfig()) as other:
        other.attach()
        with pytest.raises(LeaseHeldError):
            group.attach(wait_for_lease_s=0.0)
        assert daemons[0].epoch == 0
        with WorkerGroup([daemons[0].endpoint], ParallelConfig()) as third:
            third.attach(wait_for_lease_s=0.0)  # nothing of the attempt is left
    group.attach()
    assert daemons[0].epoch == daemons[1].epoch > 1
    assert {replica.driver_id for replica in group.replicas} == {group.driver_id}


def test_attach_names_the_replicas_that_lack_a_daemon(connected):
    group, _, daemons = connected(4, 2)
    daemons[3].kill()
    for rank in (6, 7):
        daemons[rank].kill()
    with pytest.raises(ReplicasMissing) as caught:
        group.attach(wait_s=0.2)
    found = {dp_rank: died.rank for dp_rank, died in caught.value.by_replica.items()}
    assert found == {1: 3, 3: 6}
    lines = str(caught.value).splitlines()
    for line, dp_rank, rank in zip(lines, (1, 3), (3, 6), strict=True):
        assert line.startswith(f"replica {dp_rank} lacks rank {rank} at {daemons[rank].endpoint}")
        assert "nothing listens" in line
    assert not any(daemon.epoch or daemon.granted for daemon in daemons)


def test_replica_that_hangs_keeps_no_other_one_from_attaching(connected):
    group, _, daemons = connected(3)
    daemons[0].attach_gate.clear()
    thread = beside(group.attach)
    wait_until(lambda: daemons[1].epoch and daemons[2].epoch, "the other replicas")
    assert not daemons[0].epoch and thread.is_alive()
    daemons[0].attach_gate.set()
    thread.join()
    assert len({daemon.epoch for daemon in daemons}) == 1


def test_daemon_that_fails_to_attach_leaves_no_replica_attached(connected):
    group, _, daemons = connected(3, lease=LeaseTerms(ttl_s=20.0))
    original = daemons[1]._control_reply

    def refuse(message):
        if type(message).__name__ == "CommitAttach":
            raise WorkerError("scripted")
        return original(message)

    daemons[1]._control_reply = refuse
    with pytest.raises(WorkerError, match="scripted"):
        group.attach()
    daemons[1]._control_reply = original
    with DataParallelGroup([daemon.endpoint for daemon in daemons], group.parallel) as other:
        other.attach(wait_for_lease_s=0.0)


def test_death_leaves_the_other_replicas_alone(served):
    """Their steps in flight succeed, and they serve on under the same epoch, link and lease, while
    the lost rank's replica refuses steps and is replaced."""
    group, drivers, daemons = served(2, 2)
    run(drivers[1], 1)
    before = daemons[0].epoch, daemons[0].link
    hold(daemons[1])
    drivers[0].add_request(request_of(2))
    thread = beside(drivers[0].step)
    wait_until(lambda: daemons[1].num_executes == 3, "steps")
    daemons[3].kill()
    with pytest.raises(WorkerDied) as caught:
        run(drivers[1], 3)
    assert caught.value.rank == 3
    with pytest.raises(WorkerDied):
        group.on_all(lambda replica: replica.execute_dummy_batch())
    daemons[1].let_go.set()
    thread.join()
    (output,) = drivers[0].run()
    assert output.token_ids == expected(2) and not drivers[0].num_failures
    follow(daemons, 3)
    report = group.replace(3)
    assert report.ranks == report.loaded_ranks == (3,)
    (output,) = drivers[1].run()
    assert output.token_ids == expected(3)
    run(drivers[0], 4)
    assert (daemons[0].epoch, daemons[0].link) == (daemons[1].epoch, daemons[1].link) == before
    assert daemons[2].epoch == daemons[3].epoch > before[0]
    assert daemons[2].link % 2 == daemons[3].link % 2 == 1
    assert daemons[0].operations.count("CommitAttach") == 1, "never attached again"


@pytest.mark.parametrize("end", [FakeDaemon.kill, FakeDaemon.shut_down])
def test_replica_serves_while_another_is_replaced(served, end):
    group, drivers, daemons = served(2)
    end(daemons[1])
    with pytest.raises(WorkerDied):
        run(drivers[1], 1)
    thread = beside(partial(group.replace, 1))
    owner = group.replicas[1]._state
    wait_until(lambda: owner.state.ownership is Ownership.REPLACING, "the replacement")
    run(drivers[0], 2, 3)
    assert thread.is_alive(), "it waits for a daemon"
    follow(daemons, 1)
    thread.join()
    assert [each.token_ids for each in drivers[1].run()] == [expected(1)]
    time.sleep(3 * OWNER_CHECK_S)
    other = WorkerGroup([daemons[1].endpoint], ParallelConfig())
    with other, pytest.raises(LeaseHeldError):  # it is the attaching thread's, which lives
        other.attach(wait_for_lease_s=0.0)


def test_rank_of_another_replica_is_not_replaced(served):
    group, drivers, _ = served(2)
    for rank in (0, 2, -1):
        with pytest.raises(ClientConfigError, match="no such rank") as caught:
            group.replicas[1].replace(rank)
        assert caught.value.field == "rank"
    with pytest.raises(ClientConfigError, match="use 0 to 1"):
        group.replace(2)
    assert group.replicas[0].watch.liveness == group.replicas[1].watch.liveness == ["alive"]
    run(drivers[0], 1)


def test_drained_daemon_drains_its_replica_alone(served):
    """Whatever rank it reports: it is known by its identity."""
    group, drivers, daemons = served(2)
    daemon, owner = daemons[1], group.replicas[1]._state
    daemon._heartbeat = lambda: replace(FakeDaemon._heartbeat(daemon), rank=0, drains=True)

    def is_known() -> bool:
        group.replicas[1].look()
        return owner.state.drain is DrainState.DRAINING

    wait_until(is_known, "the drain")
    with pytest.raises(DrainingError, match=re.escape(f"rank 1 at {daemon.endpoint}")):
        run(drivers[1], 1)
    run(drivers[0], 2)


def test_failure_before_a_daemon_knows_its_rank_names_it(connected):
    """It reports rank 0, as every daemon does that was not loaded."""
    group, config, daemons = connected(2)
    group.attach()
    daemons[1].load = "READY"
    with pytest.raises(WorkerError) as caught:
        group.replicas[1].load_chain.load_model(config)
    assert (caught.value.rank, caught.value.endpoint) == (1, daemons[1].endpoint)


def test_operation_begins_on_no_replica_if_one_refuses(served):
    group, _, daemons = served(2)
    daemons[1].kill()
    with pytest.raises(WorkerDied):
        while True:
            group.replicas[1].look()
    with pytest.raises(WorkerDied):
        group.on_all(lambda replica: replica.reset("MODEL_LOADED"))
    assert daemons[0].load == "READY" and "Reset" not in daemons[0].operations


def test_operation_that_fails_on_a_replica_ends_on_all(served):
    group, drivers, daemons = served(3)
    for rank in (1, 2):
        fault = Fault(0, code=ErrorCode.CAPACITY, message=f"full {rank}")
        daemons[rank].warm_up_faults = [fault]
    with pytest.raises(WorkerError, match="full 1") as caught:
        group.on_all(lambda replica: replica.load_chain.compile_or_warm_up_model())
    assert "full 2" in str(caught.value.__notes__)
    assert daemons[0].operations.count("CompileOrWarmUpModel") == 2
    run(drivers[0], 1)


def test_replicas_of_different_files_are_refused(connected):
    group, config, daemons = connected(2, 2)
    group.attach()

    def holding(daemon: FakeDaemon, content: bytes) -> None:
        weights = WeightsStatus(
            state="whole",
            num_tensors=1,
            version=0,
            num_dirty=0,
            dirty=(),
            num_missing=0,
            missing=(),
            identity=ContentIdentity(content=content * 32, stamps=b"files"),
        )
        daemon.status = lambda: replace(FakeDaemon.status(daemon), weights=weights)

    for rank, content in enumerate([b"a", b"a", b"b", b"b"]):
        holding(daemons[rank], content)
    message = "rank 0 .* and rank 2 .* hold different weights"
    with pytest.raises(ContentMismatchError, match=message) as caught:
        group.prepare(config)
    assert caught.value.field == "model.model"
    for rank in (2, 3):
        holding(daemons[rank], b"a")
    assert all(model.was_loaded for model in group.prepare(config))


def test_next_driver_finds_the_replicas_at_their_own_seqs(served):
    group, drivers, daemons = served(2, 1, 2)
    run(drivers[0], 1)
    run(drivers[0], 2)
    run(drivers[1], 3)
    first, second, third, fourth = daemons
    wait_until(lambda: first.last_seq == second.last_seq, "the rank that owes no outcome")
    wait_until(lambda: third.last_seq == fourth.last_seq, "the rank that owes no outcome")
    assert first.last_seq != third.last_seq
    links, epoch = [daemon.link for daemon in daemons], daemons[0].epoch
    config = replace(worker_config(1, 2), parallel=group.parallel)
    group.close()
    endpoints = [daemon.endpoint for daemon in daemons]
    with DataParallelGroup(endpoints, group.parallel) as following:
        following.attach()
        loaded = following.prepare(config)
        assert all(model.was_loaded for model in loaded)
        assert [daemon.link for daemon in daemons] == links, "nothing had to relink"
        assert {daemon.epoch for daemon in daemons} == {epoch + 1}
        for number, (replica, model) in enumerate(zip(following.replicas, loaded, strict=True)):
            run(Driver(replica, Scheduler(scheduler_limits(model, config))), number)


def test_epochs_that_differ_after_a_replacement_are_one_again(served):
    group, drivers, daemons = served(2, 2)
    follow(daemons, 3)
    group.replace(3)
    assert daemons[3].epoch == daemons[2].epoch > daemons[1].epoch == daemons[0].epoch
    group.attach()
    assert len({daemon.epoch for daemon in daemons}) == 1
    run(drivers[0], 1)
    run(drivers[1], 2)


def test_requests_go_to_the_replica_with_the_least_to_do(served):
    _, drivers, daemons = served(2)

    async def collect(driver: DataParallelDriver, number: int) -> list[int]:
        return [t async for each in driver.generate(request_of(number)) for t in each.token_ids]

    async def main() -> None:
        opened = [partial(contextlib.nullcontext, driver) for driver in drivers]
        async with DataParallelDriver(opened) as driver:
            found = await asyncio.gather(*(collect(driver, number) for number in range(8)))
            assert found == [expected(number) for number in range(8)]
            admitted = [sum(len(e.scheduled_new_reqs) for e in d.executes) for d in daemons]
            assert admitted == [4, 4]
            daemons[0].kill()
            assert await collect(driver, 9) == expected(9)
            assert await collect(driver, 10) == expected(10)
            daemons[1].kill()
            for _ in range(2):
                with pytest.raises(WorkerDied):
                    await collect(driver, 11)

    asyncio.run(main())


def test_a_prompt_returns_to_the_replica_that_has_computed_it(served):
    _, drivers, daemons = served(2)
    prompt = np.random.default_rng().integers(0, 50, 3 * PREFIX_TOKENS).astype(np.int32)

    async def main() -> None:
        opened = [partial(contextlib.nullcontext, driver) for driver in drivers]
        async with DataParallelDriver(opened) as driver:

            async def generate(name: str, tokens, max_tokens: int = 1) -> None:
                async for _ in driver.generate(GenerationRequest(name, tokens, max_tokens)):
                    pass

            await asyncio.gather(generate("other", prompt[:5], 9), generate("first", prompt))
            await generate("again", prompt)
            await generate("longer", np.append(prompt, prompt[:5]))
            await generate("short", prompt[:9])

    asyncio.run(main())
    admitted = [
        [each.req_id.split(":")[1] for step in d.executes for each in step.scheduled_new_reqs]
        for d in daemons
    ]
    assert admitted == [["other", "short"], ["first", "again", "longer"]]


def test_the_documented_example_runs(connected):
    """Also while a daemon dies: its replica's requests wait for the next one, and end."""
    _, config, daemons = connected(2)
    text = (Path(__file__).parents[3] / "docs" / "scheduler-cookbook.md").read_text()
    (source,) = (
        block
        for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        if "DataParallelDriver" in block
    )
    found: dict[str, list[int]] = {}

    async def show(driver: DataParallelDriver, request: GenerationRequest) -> None:
        async for progress in driver.generate(request):
            found.setdefault(request.id, []).extend(progress.token_ids)
            if request.id == "r3" and len(found["r3"]) == 2:
                daemons[1].kill()
                threading.Timer(0.5, follow, (daemons, 1)).start()

    names = globals() | {
        "repeat": repeat,
        "show": show,
        "config": config,
        "endpoints": [daemon.endpoint for daemon in daemons],
    }
    exec(compile(source, "docs/scheduler-cookbook.md", "exec"), names)  # noqa: S102
    asyncio.run(names["serve"]([request_of(number) for number in range(6)]))
    assert found == {f"r{number}": expected(number) for number in range(6)}
    assert daemons[1].operations.count("LoadModel") == 1, "the successor, for its replica"


@pytest.mark.parametrize("given", [[], None, 5, [None], "ab", [contextlib.nullcontext, 1]])
def test_drivers_that_are_none_are_refused(given):
    with pytest.raises(ClientConfigError, match="fix") as caught:
        DataParallelDriver(given)
    assert caught.value.field in ("open_drivers", "open_driver")
    with pytest.raises(ClientConfigError, match="fix") as caught:
        LockstepScheduler(given)
    assert caught.value.field == "schedulers"


@pytest.mark.parametrize("given", [0, -1, "3", None, 1.5, True])
def test_bounds_that_are_none_are_refused(given):
    with pytest.raises(ClientConfigError, match="use at least 1") as caught:
        DataParallelDriver([contextlib.nullcontext], max_requests=given)
    assert caught.value.field == "max_requests"
