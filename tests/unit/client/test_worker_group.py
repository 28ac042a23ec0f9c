"""A group on fake daemons: attach, load, steps, and each failure of a step or a daemon."""

import threading
import time

import numpy as np
import pytest

from rpc_schema.config import ParallelConfig
from rpc_schema.error_replies import ErrorReply
from rpc_schema.errors import (
    CapacityError,
    ErrorCode,
    ErrorScope,
    FencedError,
    IncompatibleError,
    InvalidStepError,
    TooLargeError,
)
from rpc_schema.lifecycle import MemoryChange
from tests.support.fake_daemon import HELD, FakeDaemon, Fault, next_token
from tests.support.waiting import PATIENCE_S, wait_until
from tests.unit.client.conftest import worker_config
from worker_client.cli.run_options import build_run_options
from worker_client.driver import Driver
from worker_client.errors import (
    ClientConfigError,
    ClientError,
    ConfigMismatchError,
    DeadlineExceeded,
    EndpointError,
    InvalidSchedulerOutput,
    KVPlanError,
    LinkGivenUp,
    StepFailed,
    TooManyStepsInFlight,
    WorkerDied,
)
from worker_client.group.group_channel import Links, link_timeout_s
from worker_client.group.loading import PROFILE_ATTEMPTS
from worker_client.group.outcomes import STEP_SLACK_S
from worker_client.requests import GenerationRequest
from worker_client.scheduler import Scheduler, SchedulerLimits
from worker_client.scheduler_output import NewRequest, SchedulerOutput
from worker_client.steps.masks import StepMasks
from worker_client.worker_group import WorkerGroup


def admit(req_id: str, num_tokens: int = 3, first_block: int = 1) -> SchedulerOutput:
    request = NewRequest(
        req_id,
        np.arange(num_tokens, dtype=np.int32),
        num_tokens,
        0,
        [first_block],
    )
    return SchedulerOutput({req_id: num_tokens}, scheduled_new_reqs=[request])


def serve(group: WorkerGroup, model, count: int = 10, pp: int = 1) -> Driver:
    """Run requests to their end and check their tokens."""
    limits = SchedulerLimits(4, 32, model.max_model_len, model.num_blocks, model.block_size, pp)
    driver = Driver(group, Scheduler(limits))
    for i in range(count):
        prompt = np.arange(i + 1, dtype=np.int32)
        driver.add_request(GenerationRequest(id=str(i), prompt=prompt, max_tokens=12))
    outputs = {output.req_id: output.token_ids for output in driver.run()}
    for i in range(count):
        tokens = list(range(i + 1))
        for _ in range(12):
            tokens.append(next_token(tokens))
        assert outputs[str(i)] == tokens[i + 1 :]
    return driver


def ready(fakes, connect, pp=1, tp=1, **fields):
    daemons = fakes(pp * tp)
    group = connect(daemons, pp, tp)
    group.attach()
    model = group.prepare(worker_config(pp, tp, **fields))
    return daemons, group, model


@pytest.mark.parametrize(
    "endpoint", ["tcp://127.0.0.1:5555", "ipc://relative/w0", "/tmp/w0", f"ipc:///tmp/{'x' * 100}"]
)
def test_endpoints_that_cannot_be_are_refused(endpoint):
    with pytest.raises(EndpointError, match="fix: use"):
        WorkerGroup([endpoint], ParallelConfig())


def test_the_number_of_endpoints_is_checked():
    with pytest.raises(ClientConfigError, match="needs 2 daemons"):
        WorkerGroup(["ipc:///tmp/w0"], ParallelConfig(pipeline_parallel_size=2))


def test_load_walks_down_the_chain_and_takes_the_smallest_rank(fakes, connect):
    daemons = fakes(4)
    daemons.daemons[2].available_bytes = 32 * 4 * 50
    group = connect(daemons, 2, 2)
    group.attach()
    seen = []
    model = group.prepare(worker_config(2, 2, max_model_len=100), on_progress=seen.append)
    assert (model.num_blocks, model.max_model_len, model.was_loaded) == (50, 100, False)
    assert {daemon.kv_cache.num_blocks for daemon in daemons.daemons} == {50}
    assert [daemon.rank for daemon in daemons.daemons] == [0, 1, 2, 3]
    assert [status.load for status in group.get_status()] == ["READY"] * 4
    assert {"load_model", "determine_available_memory"} < model.seconds.keys()
    serve(group, model, pp=2)


def test_too_small_a_cache_is_refused_or_fitted(fakes, connect):
    daemons = fakes(1, available_bytes=32 * 4 * 11)
    group = connect(daemons)
    group.attach()
    with pytest.raises(KVPlanError, match="max_model_len"):
        group.prepare(worker_config(max_model_len=100))
    with pytest.raises(KVPlanError, match="num_gpu_blocks"):
        group.attach()
        group.prepare(worker_config(max_model_len=40), num_gpu_blocks=12)
    group.attach()
    model = group.prepare(worker_config(max_model_len=100), fit_max_model_len=True)
    assert model.max_model_len == 40 == daemons.daemons[0].max_len


def test_a_context_length_of_minus_one_is_fitted(fakes, connect, tmp_path):
    """As the command line has it."""
    for more, expected in ((11, 40), (200, None)):
        daemons = fakes(1, available_bytes=32 * 4 * more)
        options = build_run_options(
            model=tmp_path,
            endpoints=daemons.endpoints[0],
            max_model_len=-1,
            block_size=4,
            device=None,
        )
        assert options.plan.config.model.max_model_len is None
        group = connect(daemons)
        group.attach()
        model = group.prepare(options.plan.config, fit_max_model_len=options.plan.fit_max_model_len)
        fake = daemons.daemons[0]
        assert model.max_model_len == fake.max_len == (expected or fake.model_max_len)
        assert ("UpdateMaxModelLen" in fake.operations) == (expected is not None)
    with pytest.raises(ClientConfigError, match="max_model_len = 0"):
        build_run_options(model=tmp_path, max_model_len=0, device=None)


TOOK = MemoryChange(pid=4711, num_bytes=5 << 30)
FREED = MemoryChange(pid=0, num_bytes=-(6 << 30))


def test_memory_is_profiled_again_by_all_ranks_while_others_move(fakes, connect, caplog):
    daemons = fakes(2)
    daemons.daemons[1].profiles = [(32 * 4 * 30, (TOOK,)), (32 * 4 * 40, ()), (1, ())]
    group = connect(daemons, 2)
    group.attach()
    assert group.prepare(worker_config(2, max_model_len=32)).num_blocks == 40
    for daemon in daemons.daemons:
        assert daemon.operations.count("DetermineAvailableMemory") == 2
    assert caplog.messages == [
        f"while rank 1 profiled its memory, process 4711 took {5 << 30} bytes of it"
    ]


def test_where_others_do_not_stop_moving_the_least_counts(fakes, connect, caplog):
    daemons = fakes(2)
    daemons.daemons[0].profiles = [(32 * 4 * count, (FREED,)) for count in (70, 50, 60, 10)]
    daemons.daemons[1].profiles = [(32 * 4 * count, ()) for count in (80, 90, 55, 10)]
    group = connect(daemons, 2)
    group.attach()
    assert group.prepare(worker_config(2, max_model_len=32)).num_blocks == 50
    assert daemons.daemons[0].operations.count("DetermineAvailableMemory") == PROFILE_ATTEMPTS == 3
    assert "an unknown process freed" in caplog.text


def test_a_second_driver_goes_on_with_what_is_loaded(fakes, connect):
    daemons, group, model = ready(fakes, connect, 2)
    serve(group, model, pp=2)
    first, second = daemons.daemons
    wait_until(lambda: first.last_seq == second.last_seq, "rank 0, which owes no outcome")
    other = connect(daemons, 2)
    other.attach(force=True)
    again = other.prepare(worker_config(2))
    assert again.was_loaded and again.num_blocks == model.num_blocks
    assert daemons.daemons[0].operations.count("LoadModel") == 1
    assert daemons.daemons[0].operations.count("Relink") == 0
    serve(other, again, pp=2)
    with pytest.raises(FencedError):
        group.execute_model(admit("late")).result()


def test_another_configuration_is_refused_by_field_or_loaded_anew(fakes, connect):
    daemons, _, _ = ready(fakes, connect)
    other = connect(daemons)
    other.attach(force=True)
    with pytest.raises(ConfigMismatchError, match=r"scheduler\.max_num_seqs: 4 != 8"):
        other.prepare(worker_config(max_num_seqs=4))
    with pytest.raises(ConfigMismatchError, match="num_gpu_blocks: 200"):
        other.prepare(worker_config(), num_gpu_blocks=200)
    serve(other, other.prepare(worker_config(max_num_seqs=4), reload=True))


def test_ranks_at_different_steps_are_linked_anew(fakes, connect):
    daemons, group, _ = ready(fakes, connect, 2)
    daemons.daemons[1].faults = [Fault(0, "swallow")]
    group.execute_model(admit("a"))
    for daemon in daemons.daemons:
        wait_until(lambda daemon=daemon: daemon.num_executes == 1, "the step is there")
    other = connect(daemons, 2)
    other.attach(force=True)
    again = other.prepare(worker_config(2))
    assert again.was_loaded
    assert [daemon.operations.count("Relink") for daemon in daemons.daemons] == [1, 1]
    serve(other, again, pp=2)


def test_half_loaded_daemons_are_reset(fakes, connect):
    daemons = fakes(2)
    group = connect(daemons, 2)
    group.attach()
    config = worker_config(2)
    group.load_chain.init_device(config)
    group.load_chain.load_model(config)
    other = connect(daemons, 2)
    other.attach(force=True)
    serve(other, other.prepare(worker_config(2, max_num_seqs=5)), pp=2)


def test_versions_must_match(fakes, connect):
    group = connect(fakes(1, version=99))
    with pytest.raises(IncompatibleError, match="99"):
        group.attach()


def test_a_silent_daemon_runs_into_the_deadline(fakes, connect):
    daemons = fakes(1)
    daemons.daemons[0].mute = True
    with pytest.raises(DeadlineExceeded, match="Hello"):
        connect(daemons).attach(timeout_s=0.3)


def test_at_most_pp_plus_one_steps_in_flight(fakes, connect):
    _, group, _ = ready(fakes, connect, 2)
    futures = [group.execute_model(admit(name, first_block=i + 1)) for i, name in enumerate("abc")]
    with pytest.raises(TooManyStepsInFlight):
        group.execute_model(admit("d", first_block=4))
    assert [future.result().sampled for future in futures] == [
        {name: next_token(range(3))} for name in "abc"
    ]
    assert group.num_in_flight == 0


def test_a_refused_operation_names_the_rank(fakes, connect):
    daemons, group, _ = ready(fakes, connect, 2)
    daemons.daemons[1].load = "KV_READY"
    daemons.daemons[0].load = "DEVICE_READY"
    with pytest.raises(Exception, match=f"rank 1 at {daemons.endpoints[1]}: ILLEGAL_STATE"):
        group.load_chain.load_model(worker_config(2))


def test_a_failed_step_fails_those_behind_it_and_is_repaired(fakes, connect):
    daemons, group, _ = ready(fakes, connect, 2)
    group.execute_model(admit("stays")).result()
    for daemon in daemons.daemons:
        daemon.faults = [Fault(1, code=ErrorCode.CAPACITY, traceback="Traceback: rank")]
    first = group.execute_model(admit("a", first_block=2))
    second = group.execute_model(admit("b", first_block=3))
    with pytest.raises(StepFailed, match="Traceback: rank") as caught:
        second.result()
    assert caught.value.code is ErrorCode.CAPACITY
    assert isinstance(caught.value.__cause__, CapacityError)
    assert caught.value.lost_req_ids == {"a", "b"}
    with pytest.raises(StepFailed):
        first.result()
    output = SchedulerOutput(
        {"stays": 1, "a": 3}, scheduled_new_reqs=admit("a", first_block=2).scheduled_new_reqs
    )
    assert group.execute_model(output).result().sampled.keys() == {"stays", "a"}
    answered = daemons.daemons[1]  # the other one may not have got it yet
    resync = np.frombuffer(answered.executes[-1].resync, "<i4").tolist()
    assert resync == [0, 3, 4, 1]


def test_a_step_sent_before_the_failure_was_heard_of_fails_with_it(fakes, connect):
    daemons, group, _ = ready(fakes, connect, 2)
    daemons.daemons[0].faults = [Fault(1)]
    daemons.daemons[1].faults = [Fault(1, delay_s=0.5)]
    first = group.execute_model(admit("a"))
    group.execute_model(admit("b", first_block=2))
    first.result()
    deadline = time.monotonic() + 5
    while group.num_in_flight and time.monotonic() < deadline:
        group._channel.take_reply(0.0)
    third = group.execute_model(SchedulerOutput({"a": 1}))
    with pytest.raises(StepFailed) as caught:
        third.result()
    assert caught.value.lost_req_ids == {"a", "b"}
    assert group.slots.req_ids == []


def test_the_root_cause_is_preferred_to_its_consequence(fakes, connect, monkeypatch):
    monkeypatch.setattr("worker_client.group.outcomes.ROOT_CAUSE_WAIT_S", 20.0)
    daemons, group, _ = ready(fakes, connect, 2)
    daemons.daemons[0].faults = [Fault(0, code=ErrorCode.DEVICE, message="cause", delay_s=0.2)]
    daemons.daemons[1].faults = [Fault(0, code=ErrorCode.UPSTREAM_FAILED)]
    with pytest.raises(StepFailed, match="cause") as caught:
        group.execute_model(admit("a")).result()
    assert (caught.value.rank, caught.value.code) == (0, ErrorCode.DEVICE)


def test_a_consequence_alone_is_told_after_a_while(fakes, connect):
    daemons, group, _ = ready(fakes, connect, 2)
    daemons.daemons[0].faults = [Fault(0, "hang")]
    daemons.daemons[1].faults = [Fault(0, code=ErrorCode.UPSTREAM_FAILED)]
    with pytest.raises(StepFailed) as caught:
        group.execute_model(admit("a")).result()
    assert caught.value.code is ErrorCode.UPSTREAM_FAILED


@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_step_shows_as_a_gap_and_is_sent_again(fakes, connect, rank):
    daemons, group, _ = ready(fakes, connect, 2)
    daemons.daemons[rank].faults = [Fault(0, "swallow")]
    futures = [group.execute_model(admit(name, first_block=i + 1)) for i, name in enumerate("abc")]
    for future, name in zip(futures, "abc", strict=True):
        assert future.result().sampled == {name: next_token(range(3))}

    def all_have_all() -> bool:
        group._channel.take_reply(0.0)  # rank 0 may complain after rank 1 has answered all
        return all(len(daemon.executes) == 3 for daemon in daemons.daemons)

    wait_until(all_have_all, "three steps")
    for daemon in daemons.daemons:
        assert [step.seq for step in daemon.executes] == [future.seq for future in futures]


def test_a_step_that_never_arrives_fails_and_is_repaired(fakes, connect):
    daemons, group, model = ready(fakes, connect, step_deadline_ms=1000)
    daemons.daemons[0].faults = [Fault(n, "swallow") for n in range(1000)]
    first = group.execute_model(admit("a"))
    group.execute_model(admit("b", first_block=2))
    with pytest.raises(StepFailed) as caught:
        first.result()
    assert caught.value.lost_req_ids == {"a", "b"}
    assert daemons.daemons[0].executes == []
    daemons.daemons[0].faults = []
    serve(group, model)


def test_deadline_that_a_busy_host_would_miss_is_refused(fakes, connect):
    group = connect(fakes(2), 2)
    group.attach()
    with pytest.raises(ClientConfigError) as refused:
        group.prepare(worker_config(2, step_deadline_ms=999))
    assert (refused.value.field, refused.value.value) == ("scheduler.step_deadline_ms", 999)
    assert refused.value.fix == "use at least 1000"
    serve(group, group.prepare(worker_config(2, step_deadline_ms=1000)), pp=2)


def test_a_hung_step_runs_into_its_own_deadline(fakes, connect):
    daemons, group, model = ready(fakes, connect, 2, step_deadline_ms=60_000)
    for daemon in daemons.daemons:
        daemon.faults = [Fault(0, "hang")]
    began = time.monotonic()
    future = group.execute_model(admit("a"))
    assert began <= future.deadline - 60.0 - STEP_SLACK_S <= time.monotonic()
    with pytest.raises(DeadlineExceeded):
        future.result(timeout_s=0.05)
    assert not future.done()
    future.deadline = time.monotonic() + 0.3  # a busy host might miss a short one of later steps
    with pytest.raises(StepFailed, match="no answer") as caught:
        future.result()
    assert caught.value.lost_req_ids == {"a"}
    serve(group, model, pp=2)
    assert [daemon.operations.count("Relink") for daemon in daemons.daemons] == [1, 1]


def test_a_driver_that_was_stopped_past_a_deadline_takes_the_answer_that_came(fakes, connect):
    daemons, group, model = ready(fakes, connect)
    future = group.execute_model(admit("a"))
    assert group._channel.daemons.results._socket.poll(10_000)
    future.deadline = time.monotonic() - 1.0
    assert future.result().sampled == {"a": next_token(range(3))}
    daemons.daemons[0].faults = [Fault(1, "hang")]
    late = group.execute_model(admit("b", first_block=2))
    late.deadline = time.monotonic() - 1.0
    with pytest.raises(StepFailed, match="no answer"):
        late.result()
    serve(group, model)


@pytest.mark.parametrize("code", [ErrorCode.COMM, ErrorCode.CAPACITY, ErrorCode.INTERNAL])
@pytest.mark.parametrize("pp", [1, 2, 3])
def test_requests_survive_failures_of_any_step(fakes, connect, pp, code):
    daemons, group, model = ready(fakes, connect, pp)
    scope = ErrorScope.GROUP if code is ErrorCode.COMM else ErrorScope.STEP
    for daemon in daemons.daemons:
        daemon.faults = [Fault(n, code=code, scope=scope) for n in (0, 7, 15, 16)]
    driver = serve(group, model, count=20, pp=pp)
    assert driver.num_failures >= 3
    relinks = daemons.daemons[0].operations.count("Relink")
    assert relinks >= 2 if code is ErrorCode.COMM and pp > 1 else relinks == 0


def test_steps_ask_for_nothing_else(fakes, connect):
    daemons, group, _ = ready(fakes, connect, 2)
    for daemon in daemons.daemons:
        daemon.operations.clear()
    futures = [group.execute_model(admit(name, 3, block)) for block, name in enumerate("ab", 1)]
    wait_until(futures[1].done, "both steps are over")
    assert futures[0].done()
    for daemon in daemons.daemons:
        assert set(daemon.operations) <= {"ExecuteModel", "RenewLease"}


@pytest.mark.parametrize("detaches", [False, True])
def test_no_rank_is_told_of_the_end_before_it_has_read_the_last_step(
    fakes, connect, monkeypatch, detaches
):
    """Rank 0 alone answers steps; rank 1 reads its own late."""
    monkeypatch.setattr("worker_client.group.group_channel.RANKS_WAIT_S", PATIENCE_S)
    daemons = fakes(2)
    late = daemons.daemons[1]
    with WorkerGroup(daemons.endpoints, ParallelConfig(tensor_parallel_size=2)) as group:
        group.attach()
        group.prepare(worker_config(1, 2))
        kept, arrive, flush, read_at = [], late._arrive, late._flush, time.monotonic() + 0.4

        def read_late() -> None:
            while kept and time.monotonic() >= read_at:
                arrive(kept.pop(0))
            flush()

        late._arrive, late._flush = kept.append, read_late
        group.execute_model(admit("a")).result()
        if detaches:
            group.detach()
    assert late.last_seq == daemons.daemons[0].last_seq
    again = connect(daemons, 1, 2)
    again.attach()
    serve(again, again.prepare(worker_config(1, 2)))
    assert late.link == 1, "they were linked anew"


def test_a_rank_that_never_reads_the_last_step_does_not_keep_the_driver(
    fakes, connect, monkeypatch
):
    monkeypatch.setattr("worker_client.group.group_channel.RANKS_WAIT_S", 0.3)
    daemons, group, _ = ready(fakes, connect, 1, 2)
    daemons.daemons[1]._arrive = lambda frames: None
    group.execute_model(admit("a")).result()
    group.detach()
    assert daemons.daemons[1].operations[-1] == "Detach"


def test_a_greeting_that_is_lost_with_its_connection_is_not_waited_for(fakes, connect):
    daemons = fakes(2)
    depart, lost = daemons.daemons[1]._depart, []

    def lose_the_first(*reply) -> None:
        if lost:
            depart(*reply)
        else:
            lost.append(reply)

    daemons.daemons[1]._depart = lose_the_first
    group = connect(daemons, 2)
    group.attach(timeout_s=10.0)
    assert lost
    serve(group, group.prepare(worker_config(2)), pp=2)


@pytest.mark.parametrize("code", [ErrorCode.DEVICE, ErrorCode.INTERNAL])
def test_a_daemon_that_tells_of_its_end_is_not_sent_another_step(fakes, connect, monkeypatch, code):
    """It refuses all that comes, as fast as a driver can send it, until it is gone."""
    monkeypatch.setattr("worker_client.group.group_channel.ANNOUNCED_END_WAIT_S", 60.0)
    daemons, group, model = ready(fakes, connect, 2)
    doomed = daemons.daemons[1]
    doomed.faults = [Fault(n, code=code, scope=ErrorScope.WORKER) for n in range(50)]
    end = threading.Timer(0.3, doomed.kill)
    end.start()
    with pytest.raises(WorkerDied) as caught:
        serve(group, model, pp=2)
    end.join()
    assert caught.value.rank == 1
    assert len(doomed.executes) <= 3, "more than were in flight"


def test_steps_that_fail_for_ever_end_the_driver(fakes, connect):
    daemons, group, model = ready(fakes, connect)
    daemons.daemons[0].faults = [Fault(n) for n in range(50)]
    with pytest.raises(StepFailed, match="scripted"):
        serve(group, model)


def test_a_refusal_by_the_daemon_is_typed(fakes, connect):
    _, group, model = ready(fakes, connect)
    with pytest.raises(StepFailed) as caught:  # one block has no room for these
        group.execute_model(admit("a", num_tokens=model.block_size + 1)).result()
    assert isinstance(caught.value.__cause__, InvalidStepError)


def test_refusal_of_no_known_step_costs_no_step(fakes, connect, monkeypatch):
    handle = FakeDaemon._handle

    def refuse_first(daemon, request, *others):
        unread = ErrorReply(
            epoch=request.epoch,
            seq=0,
            rank=daemon.rank,
            code=ErrorCode.BAD_FRAME,
            scope=ErrorScope.STEP,
            message="no known message",
        )
        daemon._reply(unread, keep=False)
        handle(daemon, request, *others)

    _, group, model = ready(fakes, connect, 2)
    monkeypatch.setattr(FakeDaemon, "_handle", refuse_first)
    assert serve(group, model, pp=2).num_failures == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_daemons_death_is_known_at_once(fakes, connect, rank):
    daemons, group, _ = ready(fakes, connect, 2, step_deadline_ms=60_000)
    daemons.daemons[rank].faults = [Fault(0, "die")]
    daemons.daemons[1 - rank].faults = [Fault(0, "hang")]
    future = group.execute_model(admit("a"))
    start = time.monotonic()
    with pytest.raises(WorkerDied) as caught:
        future.result()
    assert (caught.value.rank, caught.value.endpoint) == (rank, daemons.endpoints[rank])
    assert time.monotonic() - start < 30
    with pytest.raises(WorkerDied):
        group.execute_model(admit("b"))


def test_deferred_sampling(fakes, connect):
    _, group, _ = ready(fakes, connect)
    output = admit("a")
    output.extensions = (StepMasks(deferred=["a"]),)
    deferred = group.execute_model(output)
    with pytest.raises(InvalidSchedulerOutput, match="sample_tokens"):
        group.execute_model(SchedulerOutput(decode_req_ids=("a",)))
    sampled = group.sample_tokens(deferred, (StepMasks({"a": np.full(32, -1, np.int32)}),))
    with pytest.raises(ClientError, match="nothing left"):
        group.sample_tokens(deferred)
    assert deferred.result().sampled == {}
    assert sampled.result().sampled == {"a": next_token(range(3))}
    assert group.execute_dummy_batch().result().sampled == {}


def test_some_rows_of_a_step_are_deferred_and_sampled_in_parts(fakes, connect):
    daemons, group, _ = ready(fakes, connect)
    token = next_token(range(3))
    names = "abcd"
    requests = [admit(n, first_block=1 + i).scheduled_new_reqs[0] for i, n in enumerate(names)]
    output = SchedulerOutput(dict.fromkeys(names, 3), scheduled_new_reqs=requests)
    mask = np.full(32, -1, np.int32)
    output.extensions = (StepMasks({"c": mask}, {"b", "d", "a", "nobody"}),)
    step = group.execute_model(output)
    parts = [group.sample_tokens(step, (StepMasks({"d": mask}),), ["d"])]
    with pytest.raises(InvalidSchedulerOutput, match="'d'"):
        group.sample_tokens(step, (), ["d"])
    others = group.execute_model(SchedulerOutput(decode_req_ids=("c", "d")))
    assert group.num_in_flight == 2
    parts.append(group.sample_tokens(step, (StepMasks({"a": mask}),)))
    assert step.result().sampled == {"c": token}
    assert [part.result().sampled for part in parts] == [{"d": token}, {"a": token, "b": token}]
    assert others.result().sampled.keys() == {"c", "d"}
    sent = daemons.daemons[0].executes[-2]
    assert sent.deferred == b"\x0b" and len(sent.extensions) == 1
    assert group.execute_model(SchedulerOutput(decode_req_ids=("a", "b"))).result().sampled


def test_rows_that_wait_for_their_sampling_are_lost_with_a_failed_step(fakes, connect):
    daemons, group, _ = ready(fakes, connect)
    requests = [admit(n, first_block=1 + i).scheduled_new_reqs[0] for i, n in enumerate("abc")]
    output = SchedulerOutput(dict.fromkeys("abc", 3), scheduled_new_reqs=requests)
    output.extensions = (StepMasks(deferred=["a"]),)
    step = group.execute_model(output)
    assert step.result().sampled.keys() == {"b", "c"}
    daemons.daemons[0].faults = [Fault(1)]
    with pytest.raises(StepFailed) as failed:
        group.execute_model(SchedulerOutput(decode_req_ids=("b",))).result()
    assert failed.value.lost_req_ids == {"a", "b"}
    with pytest.raises(ClientError, match="nothing left"):
        group.sample_tokens(step)
    assert group.execute_model(SchedulerOutput(decode_req_ids=("c",))).result().sampled


def test_long_prompts_are_sent_whole(fakes, connect):
    daemons = fakes(1, available_bytes=1 << 24)
    group = connect(daemons)
    group.attach()
    config = worker_config(
        max_model_len=140_000,
        block_size=1024,
        max_num_batched_tokens=70_000,
        step_deadline_ms=60_000,
    )
    model = group.prepare(config)
    limits = SchedulerLimits(8, 70_000, model.max_model_len, model.num_blocks, 1024)
    driver = Driver(group, Scheduler(limits))
    prompt = np.arange(139_000, dtype=np.int32) % 1000
    driver.add_request(GenerationRequest(id="long", prompt=prompt, max_tokens=2))
    (output,) = driver.run()
    assert output.token_ids[0] == next_token(prompt)


def live(group, *names):
    """Admit requests and take their first tokens."""
    for index, name in enumerate(names):
        group.execute_model(admit(name, first_block=index + 1)).result()


def test_no_request_survives_a_broken_link(fakes, connect):
    daemons, group, model = ready(fakes, connect, 2)
    live(group, "stays", "waits")
    for daemon in daemons.daemons:
        daemon.faults = [Fault(2, code=ErrorCode.COMM, scope=ErrorScope.GROUP)]
    with pytest.raises(StepFailed) as caught:
        group.execute_model(SchedulerOutput({"stays": 1})).result()
    assert caught.value.lost_req_ids == {"stays", "waits"}
    with pytest.raises(InvalidSchedulerOutput, match="'waits': it has no slot"):
        group.execute_model(SchedulerOutput({"waits": 1}))
    assert [daemon.operations.count("Relink") for daemon in daemons.daemons] == [1, 1]
    serve(group, model, pp=2)


def test_an_explicit_relink_tells_of_the_requests_that_it_costs(fakes, connect):
    daemons, group, model = ready(fakes, connect, 2)
    live(group, "a", "b")
    group.relink()
    with pytest.raises(StepFailed, match="relinked") as caught:
        group.execute_model(admit("c", first_block=3)).result()
    assert caught.value.lost_req_ids == {"a", "b", "c"}
    assert group.execute_model(admit("a")).result().sampled == {"a": next_token(range(3))}
    while daemons.daemons[0].rows.keys() - {0}:  # the other rank has answered
        time.sleep(0.01)
    group.execute_model(SchedulerOutput(finished_req_ids=["a"])).result()
    serve(group, model, pp=2)
    group.relink()
    serve(group, model, pp=2)


def test_a_later_failure_of_an_earlier_step_keeps_what_the_first_one_lost(fakes, connect):
    daemons, group, _ = ready(fakes, connect, 2)
    live(group, "stays")
    daemons.daemons[0].faults = [Fault(1, code=ErrorCode.CAPACITY, delay_s=HELD)]
    daemons.daemons[1].faults = [Fault(1, "hang")]
    first = group.execute_model(admit("a", first_block=2))
    second = group.execute_model(admit("b", first_block=3))
    while not second.done():
        time.sleep(0.01)
    assert not first.settled
    refused = group.execute_model(admit("c", first_block=4))
    daemons.daemons[0].let_go.set()
    while not first.done():
        time.sleep(0.01)
    for future in (refused, second, first):
        with pytest.raises(StepFailed) as caught:
            future.result()
        assert caught.value.code is ErrorCode.CAPACITY
        assert caught.value.lost_req_ids == {"a", "b", "c"}


@pytest.mark.parametrize("kind", ["error", "hang"])
def test_a_relink_that_fails_fails_the_step_that_it_was_for(fakes, connect, monkeypatch, kind):
    daemons, group, model = ready(fakes, connect, 2)
    limits = iter([2.5 if kind == "hang" else 60.0])  # of the first relink alone
    monkeypatch.setattr(Links, "timeout_s", property(lambda links: next(limits, 60.0)))
    for daemon in daemons.daemons:
        daemon.faults = [Fault(5, code=ErrorCode.COMM, scope=ErrorScope.GROUP)]
    daemons.daemons[1].relink_faults = [Fault(0, kind, code=ErrorCode.COMM)]
    driver = serve(group, model, pp=2)
    assert driver.num_failures == 2
    assert [daemon.operations.count("Relink") for daemon in daemons.daemons] == [2, 2]


def break_the_link_for_ever(daemons):
    for daemon in daemons.daemons:
        daemon.faults = [Fault(5, code=ErrorCode.COMM, scope=ErrorScope.GROUP)]
    daemons.daemons[1].relink_faults = [Fault(number, code=ErrorCode.COMM) for number in range(9)]


def test_rank_that_ends_as_the_link_is_given_up_is_what_is_told(fakes, connect, monkeypatch):
    """A rank ends itself where it hangs on one link after the other: it can be replaced."""
    monkeypatch.setattr("worker_client.group.group_channel.ANNOUNCED_END_WAIT_S", 60.0)
    daemons, group, model = ready(fakes, connect, 2)
    break_the_link_for_ever(daemons)
    tried = daemons.daemons[0].operations

    def end_after_the_last_try() -> None:
        wait_until(lambda: tried.count("Relink") == 2, "the last try", 30.0)
        time.sleep(0.3)
        daemons.daemons[1].kill()

    ends = threading.Thread(target=end_after_the_last_try)
    ends.start()
    with pytest.raises(WorkerDied) as died:
        serve(group, model, pp=2)
    ends.join()
    assert died.value.rank == 1
    with pytest.raises(WorkerDied):
        group.execute_model(admit("a"))


def test_link_that_fails_again_and_again_is_given_up_until_attached_anew(
    fakes, connect, monkeypatch
):
    monkeypatch.setattr("worker_client.group.group_channel.ANNOUNCED_END_WAIT_S", 0.2)
    daemons, group, model = ready(fakes, connect, 2)
    break_the_link_for_ever(daemons)
    with pytest.raises(LinkGivenUp, match="3 times in a row") as given_up:
        serve(group, model, pp=2)
    assert 1 in given_up.value.ranks and given_up.value.num_failures == 3
    tried = [daemon.operations.count("Relink") for daemon in daemons.daemons]
    with pytest.raises(LinkGivenUp):
        group.execute_model(admit("a"))
    assert [daemon.operations.count("Relink") for daemon in daemons.daemons] == tried == [2, 2]
    for daemon in daemons.daemons:
        daemon.relink_faults.clear()
    group.attach()
    group.prepare(worker_config(2))
    serve(group, model, pp=2)


def test_link_failures_with_steps_between_them_are_not_given_up(fakes, connect):
    daemons, group, model = ready(fakes, connect, 2)
    for daemon in daemons.daemons:
        daemon.faults = [
            Fault(seq, code=ErrorCode.COMM, scope=ErrorScope.GROUP) for seq in (5, 9, 13, 17)
        ]
    assert serve(group, model, pp=2).num_failures == 4


def test_ranks_get_the_time_that_they_may_take_to_meet(fakes, connect, monkeypatch):
    for deadline_s in (0.1, 60.0, 3600.0):
        assert link_timeout_s(deadline_s) > 2 * (deadline_s + 1) + 5
    daemons, group, _ = ready(fakes, connect, 2, step_deadline_ms=1000)
    monkeypatch.setattr("worker_client.group.group_channel.LINK_SLACK_S", -7.3)
    daemons.daemons[0].relink_faults = [Fault(0, "hang")]
    with pytest.raises(DeadlineExceeded, match="relink") as caught:
        group.relink()
    assert caught.value.timeout_s == link_timeout_s(1.0)


def test_all_ranks_are_told_to_attach_before_one_is_waited_for(fakes, connect, monkeypatch):
    """Rank 0 lets go of its step only once rank 1 does; and that may take longer than agreeing."""
    daemons, _, _ = ready(fakes, connect, 2)
    first, second = daemons.daemons
    first.attach_gate.clear()
    second.operations.clear()
    agree_s = 2.0

    def release() -> None:
        while "CommitAttach" not in second.operations:
            time.sleep(0.01)
        time.sleep(agree_s + 0.2)
        first.attach_gate.set()

    thread = threading.Thread(target=release)
    thread.start()
    monkeypatch.setattr("worker_client.group.attaching.ATTACH_TIMEOUT_S", agree_s)
    monkeypatch.setattr("worker_client.group.attaching.ATTACH_SLACK_S", 60.0)
    other = connect(daemons, 2)
    other.attach(force=True)
    thread.join()
    serve(other, other.prepare(worker_config(2)), pp=2)


def test_prepare_goes_by_what_is_loaded_now(fakes, connect):
    daemons, group, model = ready(fakes, connect)
    live(group, "before")
    again = group.prepare(worker_config())
    assert (again.was_loaded, again.num_blocks) == (True, model.num_blocks)
    assert daemons.daemons[0].operations.count("LoadModel") == 1
    serve(group, again)
    with pytest.raises(ConfigMismatchError, match="max_num_seqs"):
        group.prepare(worker_config(max_num_seqs=4))


def test_attaching_again_starts_from_nothing(fakes, connect):
    daemons, group, _ = ready(fakes, connect, step_deadline_ms=60_000)
    daemons.daemons[0].faults = [Fault(0), Fault(1, "hang")]
    with pytest.raises(StepFailed):
        group.execute_model(admit("a")).result()
    hanging = group.execute_model(admit("b"))
    group.attach()
    assert (group.num_in_flight, group.slots.req_ids) == (0, [])
    with pytest.raises(StepFailed, match="attached again") as caught:
        hanging.result()
    assert caught.value.lost_req_ids == {"b"}
    serve(group, group.prepare(worker_config(step_deadline_ms=60_000)))


def test_a_fenced_driver_may_attach_again_but_a_dead_group_may_not(fakes, connect):
    daemons, group, _ = ready(fakes, connect)
    connect(daemons).attach(force=True)
    with pytest.raises(FencedError):
        group.execute_model(admit("a")).result()
    with pytest.raises(FencedError):
        group.execute_model(admit("a"))
    group.attach(force=True)
    serve(group, group.prepare(worker_config()))
    daemons.daemons[0].kill()
    with pytest.raises(WorkerDied):
        group.execute_model(admit("a")).result()
    with pytest.raises(WorkerDied):
        group.attach()


def test_requests_may_finish_before_their_deferred_sampling(fakes, connect):
    _, group, _ = ready(fakes, connect)
    requests = [admit(name, first_block=i + 1).scheduled_new_reqs[0] for i, name in enumerate("ab")]
    output = SchedulerOutput(
        {"a": 3, "b": 3}, scheduled_new_reqs=requests, extensions=(StepMasks(deferred=("a", "b")),)
    )
    deferred = group.execute_model(output)
    deferred.result()
    group.execute_model(
        SchedulerOutput(
            {"c": 3},
            scheduled_new_reqs=admit("c", first_block=3).scheduled_new_reqs,
            finished_req_ids=["a"],
        )
    ).result()
    mask = np.full(32, -1, np.int32)
    with pytest.raises(InvalidSchedulerOutput, match="'c'"):
        group.sample_tokens(deferred, (StepMasks({"c": mask}),))
    with pytest.raises(InvalidSchedulerOutput, match="extensions"):
        group.sample_tokens(deferred, {"a": mask})
    with pytest.raises(InvalidSchedulerOutput, match="length"):
        group.sample_tokens(deferred, (StepMasks({"a": mask, "b": mask[1:]}),))
    with pytest.raises(TooLargeError):
        group.sample_tokens(deferred, (StepMasks({"b": np.zeros(1 << 22, np.int32)}),))
    assert group.num_in_flight == 0
    sampled = group.sample_tokens(deferred, (StepMasks({"a": mask, "b": mask}),)).result()
    assert sampled.sampled == {"b": next_token(range(3))}


def test_events_are_cleared_away_while_steps_run(fakes, connect, monkeypatch):
    _, group, model = ready(fakes, connect)
    monkeypatch.setattr("worker_client.group.group_events.EVENTS_INTERVAL_S", 0.0)
    monkeypatch.setattr(group._channel.events, "_due", 0.0)
    discarded = []
    receive_all = group._channel.daemons.events.receive_all
    monkeypatch.setattr(
        group._channel.daemons.events,
        "receive_all",
        lambda: discarded.append(True) or receive_all(),
    )
    serve(group, model)
    assert discarded
