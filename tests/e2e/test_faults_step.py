"""Steps that fail on one rank or never reach it: the driver learns rank and cause, continues, and
every request ends with the tokens of an undisturbed run."""

import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from rpc_schema.codec import decode_step
from rpc_schema.errors import ErrorCode, GapError
from rpc_schema.step import ExecuteModel
from tests.support.command_line import probe, short_directory, start_daemon, wait_for_daemons
from tests.support.driving import RecordingGroup, assert_serves, random_cases
from tests.support.exhaustive import exhaustively
from tests.support.faulty_daemon import INJECTED, Fault, FaultyDaemons
from tests.support.forked_processes import ForkedPopen
from tests.support.serving import connect, generate, worker_config
from tests.support.waiting import wait_until
from worker_client.errors import DeadlineExceeded, StepFailed, WorkerDied
from worker_client.scheduler_output import SchedulerOutput
from worker_client.worker_group import WorkerGroup

STEP_DEADLINE_MS = 2000
"""gloo ends a wait for a missing peer one second after this."""
LONG_STEP_DEADLINE_MS = 20_000


@pytest.fixture
def serving(faulty, checkpoint):
    """serving(pp, tp): the group of the first pp * tp faulty daemons, ready."""

    @contextmanager
    def open_group(pp, tp=1, step_deadline_ms=STEP_DEADLINE_MS):
        config = worker_config(checkpoint().path, pp, tp, step_deadline_ms=step_deadline_ms)
        with connect(faulty.endpoints[: pp * tp], config) as (group, loaded):
            yield RecordingGroup(group), loaded

    return open_group


def deadline_ms(num_ranks: int) -> int:
    """Return the step deadline, which is short where ranks may wait for each other until then."""
    return STEP_DEADLINE_MS if num_ranks > 1 else LONG_STEP_DEADLINE_MS


def injected(group: RecordingGroup) -> list[StepFailed]:
    """The failures by faults. Where there are others, a busy host has kept a rank from running for
    as long as a step may take."""
    own = [failure for failure in group.failures if INJECTED in failure.remote_traceback]
    others = [failure for failure in group.failures if failure not in own]
    assert all(took_too_long(failure) for failure in others), others
    return own


def took_too_long(failure: StepFailed) -> bool:
    late = (ErrorCode.COMM, ErrorCode.UPSTREAM_FAILED)
    return failure.code in late or isinstance(failure.__cause__, DeadlineExceeded)


def links(group: WorkerGroup) -> set[int]:
    return {status.link for status in group.get_status()}


def drop_call(group: WorkerGroup, rank: int, number: int) -> SimpleNamespace:
    """Lose the step that is sent to `rank` as its number-th from now."""
    client = group.clients[rank]
    send, state = client.send, SimpleNamespace(calls=0, dropped=False)

    def send_or_drop(frames: Sequence[bytes]) -> None:
        state.calls += isinstance(decode_step(frames), ExecuteModel)
        if state.calls == number and not state.dropped:
            state.dropped = True
        else:
            send(frames)

    client.send = send_or_drop
    return state


@pytest.mark.parametrize(
    ("pp", "tp", "rank", "where", "calls_before"),
    [
        exhaustively(1, 1, 0, "forward", 0),
        exhaustively(1, 1, 0, "argmax_tokens", 9),
        exhaustively(2, 1, 0, "forward", 0),
        exhaustively(2, 1, 0, "forward", 7),
        exhaustively(2, 1, 1, "forward", 0),
        exhaustively(2, 1, 1, "forward", 8),
        (2, 1, 1, "argmax_tokens", 5),
        exhaustively(1, 2, 0, "forward", 6),
        (1, 2, 1, "forward", 0),
        # Before the runner has the step: it settles nothing, and the others are in it.
        (1, 1, 0, "execute_model", 5),
        exhaustively(2, 1, 0, "execute_model", 4),
        exhaustively(2, 1, 1, "execute_model", 7),
        exhaustively(1, 2, 0, "execute_model", 7),
        exhaustively(1, 2, 1, "execute_model", 6),
    ],
)
def test_rank_that_raises_is_named_and_costs_no_token(
    faulty, serving, checkpoint, pp, tp, rank, where, calls_before
):
    cases = random_cases(checkpoint(), seed=calls_before)
    with serving(pp, tp, deadline_ms(pp * tp)) as (group, loaded):
        faulty.faults[rank].put(Fault(where, "raise", calls_before))
        run = generate(group, loaded, cases.requests)
        again = generate(group, loaded, cases.requests)
    assert run.tokens == again.tokens == cases.expected
    assert not faulty.faults[rank].armed
    (failure,) = injected(group)
    assert failure.rank == rank
    assert f"rank {rank}" in str(failure)
    assert f"{INJECTED} in {where}" in failure.remote_traceback
    assert "Traceback (most recent call last)" in failure.remote_traceback
    assert failure.lost_req_ids <= set(cases.expected)


def test_failures_of_several_ranks_one_after_the_other(faulty, serving, checkpoint):
    cases = random_cases(checkpoint(), seed=3, count=8, max_tokens=24)
    with serving(2) as (group, loaded):
        faulty.faults[0].put(Fault("forward", "raise", 4))
        faulty.faults[1].put(Fault("argmax_tokens", "raise", 13))
        run = generate(group, loaded, cases.requests)
    assert run.tokens == cases.expected
    assert [failure.rank for failure in injected(group)] == [0, 1]


def test_same_rank_failing_again_and_again_is_given_up_with_the_cause(faulty, serving, checkpoint):
    cases = random_cases(checkpoint(), seed=4, count=2)
    with serving(1) as (group, loaded):
        faulty.faults[0].put(Fault("forward", "raise", times=1000))
        with pytest.raises(StepFailed, match=INJECTED):
            generate(group, loaded, cases.requests)
        wait_until(lambda: group.get_status()[0].phase == "IDLE", "no step runs any more")
    faulty.faults[0].path.unlink()
    assert_serves(faulty.endpoints[:1], checkpoint())


def test_hung_step_ends_at_its_deadline(faulty, serving, checkpoint):
    cases = random_cases(checkpoint(), seed=5)
    with serving(2) as (group, loaded):
        before = links(group)
        faulty.faults[0].put(Fault("forward", "hang", 5, seconds=5.0))
        run = generate(group, loaded, cases.requests)
        assert links(group) > set() and not links(group) & before
    assert run.tokens == cases.expected
    assert group.failures[0].code in (ErrorCode.COMM, ErrorCode.UPSTREAM_FAILED)


def test_daemon_that_hangs_is_not_live(faulty, serving, checkpoint):
    cases, directory = random_cases(checkpoint(), seed=6), short_directory()
    with serving(1) as (group, loaded), ThreadPoolExecutor(1) as pool:
        faulty.faults[0].put(Fault("forward", "hang", 5, seconds=4.0, is_ended_by_test=True))
        run = pool.submit(generate, group, loaded, cases.requests)
        try:
            wait_until(
                lambda: probe(directory, faulty.endpoints[0], "live").returncode == 1,
                "it hangs",
                60,
            )
        finally:
            faulty.faults[0].end_hang()
        run.exception()  # its driver may have given up: the hang outlasts three deadlines
        wait_until(
            lambda: probe(directory, faulty.endpoints[0], "ready").returncode == 0, "it is over", 60
        )
    shutil.rmtree(directory)
    assert_serves(faulty.endpoints[:1], checkpoint())


@pytest.mark.parametrize(
    ("pp", "tp", "rank", "number"),
    [
        (1, 1, 0, 6),
        exhaustively(1, 1, 0, 1),
        exhaustively(2, 1, 0, 1),
        (2, 1, 1, 6),
        exhaustively(1, 2, 1, 4),
    ],
)
def test_lost_step_is_repaired_by_a_full_resynchronisation(
    serving, checkpoint, pp, tp, rank, number
):
    cases = random_cases(checkpoint(), seed=10 + number)
    with serving(pp, tp, deadline_ms(pp * tp)) as (group, loaded):
        before = links(group)
        loss = drop_call(group, rank, number)
        run = generate(group, loaded, cases.requests)
        after = links(group)
    assert loss.dropped
    assert run.tokens == cases.expected
    assert len(group.failures) == 1
    if pp * tp == 1:
        assert after == before
        assert isinstance(group.failures[0].__cause__, GapError)
    else:
        assert min(after) > max(before)


def test_lost_last_step_is_noticed_by_its_deadline(serving, checkpoint):
    """No later step reveals the gap."""
    cases = random_cases(checkpoint(), seed=20, count=1, max_tokens=1)
    with serving(1) as (group, loaded):
        loss = drop_call(group, 0, 1)
        run = generate(group, loaded, cases.requests)
    assert loss.dropped
    assert run.tokens == cases.expected
    assert isinstance(group.failures[0].__cause__, DeadlineExceeded)


@pytest.mark.parametrize("rank", [exhaustively(0), 1])
def test_daemon_killed_in_a_step_is_named(model_root, tmp_path, checkpoint, rank):
    config = worker_config(checkpoint().path, 2, step_deadline_ms=100_000)
    cases = random_cases(checkpoint(), seed=30)
    with FaultyDaemons(2, model_root, tmp_path) as daemons:
        with connect(daemons.endpoints, config) as (group, loaded):
            daemons.faults[rank].put(Fault("forward", "kill", 6))
            with pytest.raises(WorkerDied) as died:
                generate(group, loaded, cases.requests)
            survivor = group.clients[1 - rank]
            assert survivor.check_health().phase
            assert survivor.get_status().load == "READY"
            with pytest.raises(WorkerDied):
                group.execute_model(SchedulerOutput())
        assert died.value.rank == rank
        assert died.value.endpoint == daemons.endpoints[rank]
        assert daemons.endpoints[rank] in str(died.value)
        assert_serves([daemons.endpoints[1 - rank]], checkpoint())


def test_new_daemon_takes_a_dead_one_s_place(model_root, checkpoint):
    directory = short_directory()
    endpoints = [f"ipc://{directory}/{rank}/w" for rank in range(2)]
    config = worker_config(checkpoint().path, 2, step_deadline_ms=STEP_DEADLINE_MS)
    cases = random_cases(checkpoint(), seed=31)

    def start(endpoint: str):
        options = ("--endpoint", endpoint, "--device", "cpu", "--model-root", str(model_root))
        return start_daemon(directory, *options, start=ForkedPopen)

    processes = [start(endpoint) for endpoint in endpoints]
    try:
        wait_for_daemons(endpoints, processes)
        with connect(endpoints, config) as (group, loaded):
            assert generate(group, loaded, cases.requests).tokens == cases.expected
            processes[1].kill()
            processes[1].wait()
        processes[1] = start(endpoints[1])
        wait_for_daemons(endpoints, processes)
        with connect(endpoints, config, reload=False) as (group, loaded):
            assert not loaded.was_loaded
            assert generate(group, loaded, cases.requests).tokens == cases.expected
            assert [status.pid for status in group.get_status()] == [p.pid for p in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        shutil.rmtree(directory)
