"""Faults while experts move beside the steps: a mover that hangs, a rank that is stopped or killed,
operations that come in between. Steps go on, no rank has another placement than the others, tokens
stay the same, and the next move works."""

import os
import random
import signal

import numpy as np
import pytest

from rpc_schema.errors import CommError, StateError, WorkerError
from tests.support.exhaustive import exhaustively
from tests.support.faulty_daemon import Fault, FaultyDaemons
from tests.support.moved_experts import (
    ARCHITECTURE,
    FIELDS,
    NUM_BLOCKS,
    begin_rebalance,
    clear_case,
    finish,
    links,
    new_scheduler,
    placements,
    rebalance,
    worker_config,
)
from tests.support.serving import kill_and_wait
from tests.support.waiting import wait_until
from worker_client.driver import Driver
from worker_client.errors import ClientConfigError, WorkerDied
from worker_client.scheduler import scheduler_limits
from worker_client.trainer.sender import WeightSender
from worker_client.worker_group import WorkerGroup

STEPS_BESIDE = 5
SEED = random.randrange(1 << 30)
print(f"seed {SEED}")


@pytest.fixture(scope="module")
def model(checkpoint):
    return checkpoint(ARCHITECTURE, seed=SEED % 1000, **FIELDS)


@pytest.fixture(scope="module")
def case(model):
    return clear_case(model, SEED)


@pytest.fixture(scope="module")
def faulty(model_root, tmp_path_factory):
    """Two daemons that fail on demand."""
    with FaultyDaemons(2, model_root, tmp_path_factory.mktemp("faults")) as daemons:
        yield daemons


@pytest.fixture(scope="module")
def loaded(faulty, model):
    """Two replicas that share experts: (group, limits)."""
    config = worker_config(model.path, 2, 1, 1, enable_sleep_mode=True)
    with WorkerGroup(faulty.endpoints, config.parallel) as group:
        group.attach()
        loaded = group.prepare(config, num_gpu_blocks=NUM_BLOCKS)
        yield group, scheduler_limits(loaded, config)


@pytest.fixture
def serving(loaded):
    """The same, with a scheduler that knows no requests: (group, scheduler)."""
    group, limits = loaded
    return group, new_scheduler(2, limits)


def begin_and_hang(group, faults, **options):
    """Begin a move whose weights rank 1 holds back, until end_hang()."""
    hang = Fault("exchange", "hang", calls_before=1, seconds=0.0, is_ended_by_test=True)
    faults.put(hang)
    begun = begin_rebalance(group, random.Random(SEED), **options)
    begun.advance()
    assert begun.is_moving
    wait_until(lambda: not faults.armed, "a mover that hangs")
    return begun


def begin_and_arrive(group):
    """Begin a move, and wait until its weights are there."""
    begun = begin_rebalance(group, random.Random(SEED))
    begun.advance()

    def are_there():
        return all(any(e.moved for e in s.expert_placements) for s in group.get_status())

    wait_until(are_there, "weights that come")
    return begun


def advance(begun):
    """Go on until something happens."""
    while begun.is_moving:
        begun.advance()


def drive(group, scheduler, requests, **options):
    driver = Driver(group, scheduler, **options)
    for request in requests:
        driver.add_request(request)
    return driver


def tokens_of(outputs):
    return {each.req_id: each.token_ids for each in outputs}


def given_up(group):
    """Return the moves that each rank has dropped, and those that failed."""
    counts = [status.expert_moves for status in group.get_status()]
    return np.array([(each.num_dropped, each.num_failed) for each in counts])


def test_steps_go_on_while_weights_are_on_their_way(serving, faulty, case):
    """For as long as they are, with the old placement; then all ranks switch before a step."""
    (group, scheduler), (requests, expected) = serving, case
    driver, before, link = drive(group, scheduler, requests), placements(group), links(group)
    outputs = [*driver.step()]
    begun = begin_and_hang(group, faulty.faults[1])
    for _ in range(STEPS_BESIDE):
        outputs += driver.step()
        begun.advance()
        assert begun.is_moving and placements(group) == before
    faulty.faults[1].end_hang()
    assert finish(begun, lambda: outputs.extend(driver.step() if driver.busy else []))
    after = placements(group)
    assert all(len(each) == 1 and each != before[layer] for layer, each in after.items())
    assert tokens_of([*outputs, *driver.run()]) == expected, f"seed {SEED}"
    assert (driver.num_failures, links(group)) == (0, link)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_stalled_mover_is_given_up_and_steps_go_on(serving, faulty, case, is_stopped):
    """At the move's limit, with an event and a count: if only the mover hangs, and if its process
    is stopped too. The link and its requests are as before."""
    (group, scheduler), (requests, expected) = serving, case
    driver, before, link = drive(group, scheduler, requests), placements(group), links(group)
    outputs = [*driver.step()]
    pid = group.clients[1].get_status().pid
    counted = given_up(group)
    begun = begin_and_hang(group, faulty.faults[1], timeout_s=0.5)
    if is_stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        status, (_, num_failed) = group.clients[0].get_status, counted[0]
        wait_until(lambda: status().expert_moves.num_failed > num_failed, "a move given up")
    finally:
        os.kill(pid, signal.SIGCONT)
    with pytest.raises(CommError, match="rank 0"):
        advance(begun)
    assert begun.is_done
    for _ in range(STEPS_BESIDE):
        outputs += driver.step()
    assert any(e.kind == "move_failed" and e.rank == 0 for e in group.watch.events)
    faulty.faults[1].end_hang()
    assert placements(group) == before
    assert rebalance(group, random.Random(SEED + 1))
    assert tokens_of([*outputs, *driver.run()]) == expected
    assert (driver.num_failures, links(group)) == (0, link)


def test_a_killed_mover_is_replaced(serving, faulty, case):
    """The old placement serves on; the successor gets it, and takes part in the next move."""
    (group, scheduler), (requests, expected) = serving, case
    reports = []

    def recover(died):
        faulty.restart_dead()
        reports.append(group.replace(died.rank))

    driver, before = drive(group, scheduler, requests, recover=recover), placements(group)
    outputs = [*driver.step()]
    counted = given_up(group)[0]
    begun = begin_and_hang(group, faulty.faults[1])
    kill_and_wait(faulty.pids[1])
    with pytest.raises((WorkerDied, WorkerError)):
        advance(begun)
    outputs += driver.run()
    assert tokens_of(outputs) == expected
    assert [report.loaded_ranks for report in reports] == [(1,)]
    assert placements(group) == before
    assert (given_up(group)[0] - counted).sum() == 1
    assert rebalance(group, random.Random(SEED + 1))


def update(group, model):
    with WeightSender(group, "gloo", timeout_s=20.0) as sender:
        sender.send(dict(model.model.state_dict()))


def sleep(group, model):
    group.memory.sleep(1)
    group.memory.wake_up()


def reload(group, model):
    group.weights.reload(str(model.path))


@pytest.mark.parametrize(
    ("operation", "has_come"),
    [
        (update, True),
        (sleep, False),
        *(exhaustively(*each) for each in ((update, False), (sleep, True))),
        *(exhaustively(reload, each) for each in (False, True)),
    ],
)
def test_another_operation_drops_a_move(serving, faulty, model, case, operation, has_come):
    """Also one whose weights have come. Nothing of it is applied, then or later."""
    (group, scheduler), (requests, expected) = serving, case
    before, link, counted = placements(group), links(group), given_up(group)
    begun = begin_and_arrive(group) if has_come else begin_and_hang(group, faulty.faults[1])
    operation(group, model)
    if not has_come:
        faulty.faults[1].end_hang()
    with pytest.raises((StateError, CommError)):  # a peer may see the end of connections first
        advance(begun)
    assert begun.is_done
    counted = given_up(group) - counted
    assert counted.sum(axis=1).tolist() == [1, 1]
    assert counted[:, 0].any()
    assert (placements(group), links(group)) == (before, link)
    assert tokens_of(drive(group, scheduler, requests).run()) == expected
    assert rebalance(group, random.Random(SEED + 1))


@pytest.mark.parametrize("way", ["relink", "attach"])
def test_a_new_link_or_driver_drops_a_move(serving, faulty, model, case, way):
    """The ranks meet anew for the next one."""
    (group, scheduler), (requests, expected) = serving, case
    before, counted = placements(group), given_up(group)
    begun = begin_and_hang(group, faulty.faults[1])
    if way == "relink":
        group.relink()
        with pytest.raises((StateError, CommError)):
            advance(begun)
    else:
        group.detach()
        group.attach(force=True)
    faulty.faults[1].end_hang()
    assert placements(group) == before
    assert (given_up(group) - counted).sum(axis=1).tolist() == [1, 1]
    if way == "attach":
        config = worker_config(model.path, 2, 1, 1, enable_sleep_mode=True)
        group.prepare(config, num_gpu_blocks=NUM_BLOCKS)
    assert tokens_of(drive(group, scheduler, requests).run()) == expected
    assert rebalance(group, random.Random(SEED + 1))


def test_a_switch_that_fails_on_one_rank_is_finished_before_the_next_step(serving, case):
    """Over the next link."""
    (group, scheduler), (requests, expected) = serving, case
    driver, before, link = drive(group, scheduler, requests), placements(group), links(group)
    outputs = [*driver.step()]
    begun, ask = begin_and_arrive(group), group.experts._ask

    def fail(build, ranks):
        ask(build, frozenset([0]))
        raise CommError("lost")

    group.experts._ask = fail
    with pytest.raises(CommError):
        advance(begun)
    group.experts._ask = ask
    assert sorted(map(len, placements(group).values())) == [1, 2]
    outputs += driver.run()
    assert tokens_of(outputs) == expected
    assert all(len(each) == 1 for each in placements(group).values())
    assert placements(group) != before and links(group) != link


def test_a_limit_that_is_none_is_refused(serving):
    group, _ = serving
    for timeout_s in (0.0, -1.0, 4000.0, float("nan")):
        with pytest.raises(ClientConfigError, match="timeout_s"):
            group.experts.rebalance(timeout_s=timeout_s)
