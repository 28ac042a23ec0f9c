"""Sleep over the wire: real daemons that release and restore, or lose, weights and KV cache."""

import contextlib
import resource
from pathlib import Path

import numpy as np
import pytest

from rpc_schema.errors import (
    CapacityError,
    ConfigError,
    ErrorCode,
    StateError,
)
from tests.support.checkpoints import decisive_prompts
from tests.support.command_line import run_client
from tests.support.exhaustive import exhaustively
from tests.support.serving import (
    LONG_LEASE,
    assert_greedy,
    generate,
    greedy_request,
    scheduler_limits,
)
from worker_client.driver import Driver
from worker_client.errors import (
    InvalidSchedulerOutput,
    StepFailed,
)
from worker_client.scheduler import Scheduler
from worker_client.scheduler_output import NewRequest, SchedulerOutput
from worker_client.worker_group import WorkerGroup

AWAKE = {"weights": "awake", "kv_cache": "awake"}
ASLEEP = {"weights": "asleep", "kv_cache": "asleep"}
KINDS = ("weights", "buffers", "kv_cache", "host_backup")


@pytest.fixture
def model(checkpoint):
    return checkpoint("Qwen3ForCausalLM", tie_word_embeddings=True, seed=91)


@pytest.fixture
def requests(model):
    prompts = decisive_prompts(model, 92, [6, 21], 8)
    return [greedy_request(f"r{index}", prompt, 8) for index, prompt in enumerate(prompts)]


def tags(group):
    return [status.memory_tags for status in group.get_status()]


def memory(group):
    """Return each rank's memory by kind."""
    return [[status.memory_bytes[kind] for kind in KINDS] for status in group.get_status()]


def refused(group, loaded, requests):
    with pytest.raises(StepFailed) as raised:
        generate(group, loaded, requests)
    assert raised.value.code == ErrorCode.ILLEGAL_STATE
    return raised.value.message


def admission(req_id):
    """A step that begins a request of four tokens."""
    request = NewRequest(
        req_id=req_id,
        token_ids=np.arange(1, 5, dtype=np.int32),
        num_prompt_tokens=4,
        num_computed_tokens=0,
        block_ids=(1,),
    )
    return SchedulerOutput(num_scheduled_tokens={req_id: 4}, scheduled_new_reqs=(request,))


@pytest.mark.usefixtures("each_drafter")
@pytest.mark.parametrize(("pp", "tp"), [(1, 2), exhaustively(2, 1)])
def test_a_group_sleeps_and_generates_the_same_tokens(serve, model, requests, pp, tp):
    with serve(model.path, pp, tp, enable_sleep_mode=True) as (group, loaded):
        assert tags(group) == [AWAKE] * (pp * tp)
        assert_greedy(generate(group, loaded, requests), model, requests)
        before = memory(group)
        replies = group.memory.sleep(1)
        assert [reply.memory_tags for reply in replies] == [ASLEEP] * (pp * tp)
        assert tags(group) == [ASLEEP] * (pp * tp)
        assert all(kinds[:3] == [0, 0, 0] and kinds[3] > 0 for kinds in memory(group))
        assert "wake_up" in refused(group, loaded, requests)
        with pytest.raises(StateError, match="ComputeWeightChecksums"):
            group.weights.compute_checksums()
        group.memory.wake_up(["kv_cache"])
        assert "wake_up(['weights'])" in refused(group, loaded, requests)
        group.memory.wake_up()
        assert [kinds[:3] for kinds in memory(group)] == [kinds[:3] for kinds in before]
        assert_greedy(generate(group, loaded, requests), model, requests)


def test_level_2_loses_the_weights_and_says_so(serve, model, requests):
    with serve(model.path, enable_sleep_mode=True) as (group, loaded):
        group.memory.sleep(2)
        assert tags(group) == [{"weights": "discarded", "kv_cache": "asleep"}]
        assert "load the weights again" in refused(group, loaded, requests)
        group.memory.wake_up()
        assert tags(group) == [{"weights": "lost", "kv_cache": "awake"}]
        assert "fix: load the weights again" in refused(group, loaded, requests)
    with serve(model.path, enable_sleep_mode=True, reload=True) as (group, loaded):
        assert_greedy(generate(group, loaded, requests), model, requests)


@pytest.mark.usefixtures("each_drafter")
def test_discarded_kv_cache_comes_back_empty_and_serves(serve, model, requests):
    with serve(model.path, enable_sleep_mode=True) as (group, loaded):
        generate(group, loaded, requests)
        group.memory.discard(["kv_cache"])
        assert tags(group) == [{"weights": "awake", "kv_cache": "discarded"}]
        refused(group, loaded, requests)
        group.memory.wake_up(["kv_cache"])
        assert_greedy(generate(group, loaded, requests), model, requests)


def test_fifty_cycles_leave_every_byte_where_it_was(serve, model, requests):
    with serve(model.path, enable_sleep_mode=True) as (group, loaded):
        figures = []
        for _ in range(50):
            group.memory.sleep(1)
            asleep = memory(group)
            group.memory.wake_up()
            figures.append((asleep, memory(group)))
        assert figures[1] == figures[-1]
        assert_greedy(generate(group, loaded, requests), model, requests)


@contextlib.contextmanager
def short_of_memory(pid, spare_bytes):
    """Limit the process to that many more bytes of memory, as counted by Linux."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    taken = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))
    before = resource.prlimit(pid, resource.RLIMIT_DATA)
    resource.prlimit(pid, resource.RLIMIT_DATA, (taken + spare_bytes, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_DATA, before)


@pytest.mark.parametrize("kept", [ASLEEP, {"weights": "awake", "kv_cache": "asleep"}])
def test_waking_without_memory_leaves_all_asleep(serve, model, requests, kept):
    """The weights would still fit, but not the KV cache of 128 MiB after them."""
    blocks = 32768
    with serve(model.path, enable_sleep_mode=True, num_gpu_blocks=blocks) as (group, loaded):
        (status,) = group.get_status()
        assert status.memory_bytes["kv_cache"] >= 128 << 20
        group.memory.sleep(1)
        if kept != ASLEEP:
            group.memory.wake_up(["weights"])
        held = memory(group)
        with short_of_memory(status.pid, 64 << 20):
            for _ in range(2):
                with pytest.raises(CapacityError, match="host memory"):
                    group.memory.wake_up()
                assert (tags(group), memory(group)) == ([kept], held)
            refused(group, loaded, requests)
        group.memory.wake_up()
        assert_greedy(generate(group, loaded, requests), model, requests)


@pytest.mark.usefixtures("each_drafter")
def test_running_requests_are_lost_by_name(serve, model, requests):
    with serve(model.path, enable_sleep_mode=True) as (group, loaded):
        assert_greedy(generate(group, loaded, requests), model, requests)
        group.memory.sleep(1)
        group.memory.wake_up()
        group.execute_model(admission("a")).result()
        group.memory.discard(["weights"])  # its keys and values are there still
        group.memory.wake_up()
        group.memory.sleep(1)
        group.memory.wake_up()
        with pytest.raises(StepFailed) as raised:
            group.execute_model(admission("b")).result()
        assert raised.value.lost_req_ids == {"a", "b"}
    with serve(model.path, enable_sleep_mode=True) as (group, loaded):
        assert_greedy(generate(group, loaded, requests), model, requests)


@pytest.mark.parametrize("forgets", [True, False])
def test_adopted_requests_whose_cache_is_lost_before_their_first_step(
    serve, model, requests, forgets
):
    """A scheduler that is told begins them again; one that is not is refused."""
    with serve(model.path, 2, enable_sleep_mode=True) as (group, loaded):
        config, limits = group.get_status()[0].config, scheduler_limits(group, loaded)
        driver = Driver(group, Scheduler(limits))
        for request in requests:
            driver.add_request(request)
        for _ in range(5):
            assert not driver.step()
    with WorkerGroup(serve.pool.endpoints(2), config.parallel, lease=LONG_LEASE) as group:
        group.attach(keep_requests=True)
        group.prepare(config)
        scheduler = Scheduler(limits)
        adopted = group.adopt_requests()
        assert any(request.num_computed_tokens for request in adopted)
        scheduler.adopt_requests(adopted)
        group.memory.sleep(1)
        group.memory.wake_up()
        driver = Driver(group, scheduler)
        if forgets:
            scheduler.forget_prefixes()
            outputs = {output.req_id: output.token_ids for output in driver.run()}
            assert outputs == {r.id: model.greedy(r.prompt, 8) for r in requests}
        else:
            with pytest.raises(InvalidSchedulerOutput, match="has lost its contents"):
                list(driver.run())


def test_a_new_driver_finds_a_group_asleep_and_wakes_it(serve, model, requests, tmp_path):
    with serve(model.path, enable_sleep_mode=True) as (group, _):
        group.memory.sleep(1)
    with serve(model.path, enable_sleep_mode=True, reload=False) as (group, loaded):
        assert loaded.was_loaded
        assert tags(group) == [ASLEEP]
        status = run_client(tmp_path, "status", "--endpoints", group.clients[0].endpoint.control)
        assert "asleep     weights asleep, kv_cache asleep\n" in status.stdout
        refused(group, loaded, requests)
        group.memory.wake_up()
        assert_greedy(generate(group, loaded, requests), model, requests)


def test_a_group_without_sleep_mode_refuses_and_serves_on(serve, model, requests):
    with serve(model.path) as (group, loaded):
        assert tags(group) == [{}]
        for change in (
            group.memory.sleep,
            group.memory.wake_up,
            lambda: group.memory.discard(["weights"]),
        ):
            with pytest.raises(ConfigError, match="enable_sleep_mode"):
                change()
        assert_greedy(generate(group, loaded, requests), model, requests)
