"""A group whose lost steps are reported, not raised; on fake daemons."""

import threading
import time

import msgspec
import numpy as np
import pytest

from rpc_schema.config import ParallelConfig
from rpc_schema.errors import DrainingError, ErrorCode, ErrorScope, WorkerDaemonError
from tests.support.fake_daemon import HELD, VOCAB_SIZE, FakeDaemon, Fault, reference_tokens
from tests.support.waiting import wait_until
from tests.unit.client.conftest import worker_config
from worker_client.errors import ReplacementFailed, StepFailed, WorkerDied, WorkerShutsDown
from worker_client.scheduler_output import NewRequest, SchedulerOutput
from worker_client.steps.masks import StepMasks
from worker_client.vllm.settings import Settings
from worker_client.vllm.workers import MAX_IN_A_ROW, LostStep, Workers
from worker_client.wire.lease import LeaseTerms
from worker_client.worker_group import WorkerGroup

PROMPT = [3, 1, 4, 1, 5]
ALLOW_ALL = np.full(-(-VOCAB_SIZE // 32), -1, np.int32)


def begin(req_id="a", block=1, **fields) -> SchedulerOutput:
    """Return the step that computes a request's prompt."""
    new = NewRequest(req_id, np.array(PROMPT, np.int32), 5, 0, [block, block + 1, block + 2])
    return SchedulerOutput({req_id: 5}, scheduled_new_reqs=[new], **fields)


def go_on(req_id="a", **fields) -> SchedulerOutput:
    return SchedulerOutput(decode_req_ids=(req_id,), **fields)


@pytest.fixture
def opened(fakes):
    """opened(pp, settings) -> (workers, fake daemons)"""
    groups = []

    def make(pp=1, **settings):
        daemons = fakes(pp)
        parallel = ParallelConfig(pipeline_parallel_size=pp)
        group = WorkerGroup(daemons.endpoints, parallel, lease=LeaseTerms(ttl_s=15.0))
        groups.append(group)
        settings = Settings(**{"replace_within_s": 20.0, **settings})
        workers = Workers(group, worker_config(pp, max_model_len=64), settings)
        workers.open()
        return workers, daemons.daemons

    yield make
    for group in groups:
        group.close()


def tokens(workers, *steps):
    """Send steps one by one; return what they sample, None where one is lost."""
    found = []
    for step in steps:
        outcome = workers.outcome([workers.send(step)])
        lost = isinstance(outcome, LostStep)
        found.append(None if lost else outcome.sampled)
    return found


def expected(count):
    return [{"a": token} for token in reference_tokens(PROMPT, count, frozenset())]


def test_results_are_those_of_the_group(opened):
    workers, _ = opened()
    assert tokens(workers, begin(), go_on(), go_on()) == expected(3)


def test_parts_of_a_step_are_one_result(opened):
    workers, _ = opened()
    both = [workers.send(begin("a")), workers.send(begin("b", 11))]
    sampled = workers.outcome(both).sampled
    assert sampled == {name: expected(1)[0]["a"] for name in "ab"}


def test_deferred_requests_are_sampled_in_messages_that_hold_their_masks(opened, monkeypatch):
    workers, daemons = opened()
    monkeypatch.setattr("worker_client.vllm.workers.MAX_MASK_BYTES", 2 * ALLOW_ALL.nbytes)
    new = [each for i in range(5) for each in begin(f"r{i}", 1 + 3 * i).scheduled_new_reqs]
    names = [each.req_id for each in new]
    step = SchedulerOutput(
        dict.fromkeys(names, 5), scheduled_new_reqs=new, extensions=(StepMasks(deferred=names[1:]),)
    )
    sent = workers.send(step)
    later = workers.sample(sent, {name: [ALLOW_ALL] for name in names[:3]})
    assert len(later) == 2
    assert workers.sample(sent, {}) == []
    assert workers.outcome([sent, *later]).sampled.keys() == {*names}
    assert daemons[0].operations.count("SampleTokens") == 2


def test_step_that_defers_nothing_is_sampled_already(opened):
    workers, _ = opened()
    sent = workers.send(begin())
    assert workers.sample(sent, {"gone": [ALLOW_ALL]}) == []
    assert workers.outcome([sent]).sampled == expected(1)[0]


def test_more_steps_than_may_be_in_flight_wait_for_credit(opened):
    workers, _ = opened()
    sent = [workers.send(step) for step in (begin(), *[go_on()] * 6)]
    assert [workers.outcome([each]).sampled for each in sent] == expected(7)


def test_lost_step_is_told_once_and_the_request_begins_again(opened):
    workers, (daemon,) = opened()
    daemon.faults = [Fault(1)]
    sent = [workers.send(begin()), workers.send(go_on())]
    assert workers.outcome(sent[:1]).sampled == expected(1)[0]
    assert workers.outcome(sent[1:]) == LostStep("scripted", is_known=False)
    assert workers.group.slots.req_ids == []
    assert tokens(workers, begin(), go_on()) == expected(2)


@pytest.mark.parametrize(("pp", "rank"), [(1, 0), (2, 1), (4, 0), (4, 2)])
def test_steps_in_flight_that_one_failure_loses_count_once(opened, pp, rank):
    workers, daemons = opened(pp)
    daemons[rank].faults = [Fault(1)]
    if rank != pp - 1:  # its successors wait for what it does not send
        daemons[-1].faults = [Fault(1, code=ErrorCode.UPSTREAM_FAILED)]
    steps = [begin("a"), *(begin(f"r{i}", 3 * i + 7) for i in range(pp))]
    sent = [workers.send(step) for step in steps]
    outcomes = [workers.outcome([each]) for each in sent]
    assert outcomes[0].sampled == expected(1)[0]
    assert [each.is_known for each in outcomes[1:]] == [False] + [True] * (pp - 1)
    left = workers.group.slots.req_ids
    assert tokens(workers, begin(finished_req_ids=left), go_on()) == expected(2)


def test_step_sent_before_a_loss_was_told_is_covered_by_it(opened):
    workers, (daemon,) = opened()
    daemon.faults = [Fault(0)]
    first = workers.send(begin())
    with pytest.raises(StepFailed):
        first.future.result()  # as the group learns of it
    second = workers.send(go_on())  # names a request that has no row any more
    assert second.future is None
    assert not workers.outcome([first]).is_known
    assert workers.outcome([second]).is_known


def test_masks_of_a_lost_step_are_not_sent(opened):
    workers, (daemon,) = opened()
    daemon.faults = [Fault(0)]
    sent = workers.send(begin(extensions=(StepMasks(deferred=["a"]),)))
    wait_until(lambda: sent.future.done(), "the step fails")
    assert workers.sample(sent, {"a": [ALLOW_ALL]}) == []
    assert isinstance(workers.outcome([sent]), LostStep)


def test_step_and_its_masks_that_one_failure_loses_count_once(opened):
    workers, (daemon,) = opened()
    daemon.faults = [Fault(0, delay_s=HELD)]
    sent = workers.send(begin(extensions=(StepMasks(deferred=["a"]),)))
    later = workers.sample(sent, {"a": [ALLOW_ALL]})
    after = workers.send(begin("b", 11))
    daemon.let_go.set()
    assert not workers.outcome([sent, *later]).is_known
    assert workers.outcome([after]).is_known
    assert tokens(workers, begin()) == expected(1)


@pytest.mark.parametrize(
    "step",
    [
        go_on("unknown"),
        begin(new_block_ids={"unknown": [4]}),
        SchedulerOutput({"a": 9}, scheduled_new_reqs=begin().scheduled_new_reqs),
        begin(block=10**6),
        SchedulerOutput(
            {"a": 1}, scheduled_new_reqs=[NewRequest("", np.zeros(1, "i4"), 1, 0, [1])]
        ),
    ],
)
def test_step_that_the_table_of_slots_refuses_is_lost(opened, step):
    workers, _ = opened()
    assert tokens(workers, begin("b", 11), step, begin()) == [
        {"b": expected(1)[0]["a"]},
        None,
        expected(1)[0],
    ]


def test_losses_in_a_row_end_it(opened):
    workers, (daemon,) = opened()
    daemon.faults = [Fault(index) for index in range(9)]
    assert tokens(workers, *[begin()] * (MAX_IN_A_ROW - 1)) == [None] * (MAX_IN_A_ROW - 1)
    with pytest.raises(StepFailed, match="scripted"):
        tokens(workers, begin())


def test_success_between_losses_forgives_them(opened):
    workers, (daemon,) = opened()
    daemon.faults = [Fault(index) for index in range(0, 12, 2)]
    first, lost = expected(1)[0], None
    steps = [begin("a", finished_req_ids=["a"]) for _ in range(12)]
    assert tokens(workers, *steps) == [lost, first] * 6


# ------------------------------------------------------------------ dead daemons


def follow(daemons, rank, **fields):
    """Start a successor of a daemon that has ended."""
    daemons[rank].stop()
    successor = FakeDaemon(daemons[rank].endpoint)
    for name, value in fields.items():
        setattr(successor, name, value)
    daemons[rank] = successor.start()


@pytest.mark.parametrize(("pp", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_dead_daemon_is_replaced(opened, pp, rank):
    workers, daemons = opened(pp)
    daemons[-1].faults = [Fault(1, "swallow")]  # it would wait for the other
    daemons[rank].faults = [Fault(1, "die")]
    assert tokens(workers, begin()) == expected(1)
    timer = threading.Timer(0.3, follow, (daemons, rank))
    sent = workers.send(go_on())
    timer.start()
    lost = workers.outcome([sent])
    timer.join()
    assert isinstance(lost, LostStep)
    assert not lost.is_known
    assert tokens(workers, begin(), go_on()) == expected(2)
    assert daemons[rank].operations.count("LoadModel") == 1


def test_daemon_that_died_between_steps_is_replaced_with_the_next(opened):
    workers, daemons = opened(2)
    tokens(workers, begin())
    daemons[1].stop()
    with pytest.raises(WorkerDied):
        while True:
            workers.group.look()
    follow(daemons, 1)
    outcome = workers.outcome([workers.send(go_on())])
    assert isinstance(outcome, LostStep)
    assert tokens(workers, begin(), go_on()) == expected(2)


def test_dead_daemon_is_replaced_once_the_drain_of_another_is_undone(opened):
    workers, daemons = opened(2)
    tokens(workers, begin())
    daemons[1].shut_down()
    with pytest.raises(WorkerShutsDown):
        workers.group.profiling.start()
    daemons[0].gate.draining = True
    follow(daemons, 1)
    timer = threading.Timer(0.5, lambda: setattr(daemons[0].gate, "draining", False))
    timer.start()
    assert isinstance(workers.outcome([workers.send(go_on())]), LostStep)
    timer.join()
    assert tokens(workers, begin(), go_on()) == expected(2)


def test_daemons_that_die_while_nothing_runs_are_replaced_when_asked_for(opened):
    """However often: no step could succeed in between."""
    workers, daemons = opened(2)
    tokens(workers, begin())
    for _ in range(MAX_IN_A_ROW + 1):
        workers.replace_dead()  # none is
        daemons[1].stop()
        follow(daemons, 1)
        assert daemons[1].load == "CREATED"

        def is_ready():
            workers.replace_dead()
            return daemons[1].load == "READY"

        wait_until(is_ready, "it is replaced")
    assert isinstance(workers.outcome([workers.send(go_on())]), LostStep)
    assert tokens(workers, begin(), go_on()) == expected(2)


def test_daemon_without_a_successor_ends_it(opened):
    workers, daemons = opened(replace_within_s=0.5)
    daemons[0].faults = [Fault(0, "die")]
    with pytest.raises(ReplacementFailed):
        tokens(workers, begin())


def test_daemons_that_die_one_after_the_other_end_it(opened):
    workers, daemons = opened()
    stop = threading.Event()

    def supervise():
        while not stop.wait(0.05):
            if daemons[0]._stop.is_set():
                follow(daemons, 0, faults=[Fault(0, "die")])

    daemons[0].faults = [Fault(0, "die")]
    thread = threading.Thread(target=supervise)
    thread.start()
    try:
        with pytest.raises(WorkerDaemonError):
            tokens(workers, *[begin()] * (MAX_IN_A_ROW + 1))
    finally:
        stop.set()
        thread.join()


# ------------------------------------------------------------------ leases, drains


def expire(workers, daemon):
    """Let the lease expire, as in a process that is stopped for a while."""
    workers.group._channel.lease.stop()

    def is_orphan():
        daemon.lease._ends = 0.0  # again, if a renewal was on its way
        return daemon.lease.status().state == "orphan"

    wait_until(is_orphan, "the lease expires")


def test_expired_lease_is_taken_again(opened):
    workers, (daemon,) = opened()
    assert tokens(workers, begin()) == expected(1)
    epoch = workers.group.get_status()[0].epoch
    expire(workers, daemon)
    lost = workers.outcome([workers.send(go_on())])
    assert isinstance(lost, LostStep)
    assert not lost.is_known
    assert tokens(workers, begin(), go_on()) == expected(2)
    assert workers.group.get_status()[0].epoch > epoch
    assert daemon.operations.count("LoadModel") == 1


def test_steps_in_flight_when_the_lease_expires_count_once(opened):
    workers, (daemon,) = opened()
    expire(workers, daemon)
    sent = [workers.send(begin()), workers.send(begin("b", 11))]
    assert [workers.outcome([each]).is_known for each in sent] == [False, True]
    assert tokens(workers, begin()) == expected(1)


def drain(daemon, *, on):
    def heartbeat():
        beat = FakeDaemon._heartbeat(daemon)
        return msgspec.structs.replace(beat, drains=on)

    daemon._heartbeat = heartbeat


def know_drained(workers):
    def is_drained():
        try:
            workers.group._channel.check_serving()
        except DrainingError:
            return True
        return False

    wait_until(is_drained, "the group knows that it is drained")


def test_drained_group_is_waited_for(opened):
    workers, (daemon,) = opened()
    assert tokens(workers, begin()) == expected(1)
    drain(daemon, on=True)
    know_drained(workers)
    timer = threading.Timer(0.5, drain, (daemon,), {"on": False})
    timer.start()
    assert tokens(workers, go_on(), go_on()) == expected(3)[1:]
    timer.join()


def test_group_that_stays_drained_ends_it(opened):
    workers, (daemon,) = opened(drained_for_s=0.4)
    drain(daemon, on=True)
    know_drained(workers)
    began = time.monotonic()
    with pytest.raises(DrainingError):
        workers.send(begin())
    assert time.monotonic() - began >= 0.4


@pytest.mark.parametrize("is_told", [True, False])
def test_step_that_met_a_drain_on_its_way_is_lost(opened, is_told):
    """It was refused before a heartbeat told of the drain, which is undone soon."""
    workers, (daemon,) = opened()
    assert tokens(workers, begin()) == expected(1)
    daemon.faults = [Fault(1, code=ErrorCode.DRAINING, scope=ErrorScope.STEP)]
    sent = [workers.send(go_on())]
    if is_told:
        assert isinstance(workers.outcome(sent), LostStep)
    else:
        wait_until(sent[0].future.done, "the step fails")
    sent.append(workers.send(begin("b", 11)))
    last = [workers.outcome([each]) for each in sent][-1]
    assert not isinstance(last, LostStep) if is_told else last.is_known
    assert tokens(workers, begin(), go_on()) == expected(2)
