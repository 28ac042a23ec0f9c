"""The profiled memory for a KV cache on a simulated device, and cases that are easy to get
wrong."""

import contextlib
import logging
import time

import numpy as np
import pytest
import torch
from worker_driver import GREEDY, WorkerDriver

from rpc_schema import config
from rpc_schema.errors import CapacityError, ConfigError
from tests.support.driven_memory import GIB, MIB, DrivenMemory
from worker_daemon.device.memory_sources import HOST_KV_CACHE_LIMIT_BYTES, HostMemory
from worker_daemon.runner.cuda_graph import StepGraphs
from worker_daemon.worker.memory_ledger import CUSHION_BYTES
from worker_daemon.worker.resolve import check_deadline
from worker_daemon.worker.worker import Worker

CONTEXT = 500 * MIB
WEIGHTS = 16 * GIB
STEP = 3 * GIB
REQUEST = 72 * GIB  # 0.9 of 80


class Start:
    """A worker that starts on a driven device; the test says what it takes there."""

    def __init__(self, model_root, memory, **cache):
        self.memory = memory
        self.during_step = lambda: memory.step(STEP)
        self.worker = Worker("cpu", [model_root], lambda *_, **__: None, open_memory=self.open)
        self.driver = WorkerDriver(self.worker)
        self.driver.cache = config.CacheConfig(block_size=16, **cache)
        self.steps = 0

    def open(self, device):
        self.memory.context += CONTEXT
        return self.memory

    def load(self):
        self.driver.init_device()
        self.driver.load_model("llama")
        self.memory.take(WEIGHTS)
        stage = self.worker._model.stage
        forward = stage.forward

        def stepping(*args):
            self.steps += 1
            self.during_step()
            return forward(*args)

        stage.forward = stepping
        return self

    def profile(self):
        return self.driver.profile()


@pytest.fixture
def start(model_root, llama):
    """(memory, **CacheConfig) -> a Start; closed at the end."""
    started = []

    def make(memory, **cache):
        started.append(Start(model_root, memory, **cache))
        return started[-1]

    yield make
    for entry in started:
        entry.worker.close()


def burn(seconds):
    """Compute for so long."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_deadline_that_the_longest_step_would_miss_is_refused(start):
    slow = start(DrivenMemory())
    slow.during_step = lambda: burn(0.51)
    slow.driver.scheduler = config.SchedulerConfig(max_num_seqs=4, step_deadline_ms=1000)
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"field scheduler.step_deadline_ms = 1000") as refused:
        slow.load().profile()
    took_ms = int(1000 * (time.monotonic() - began))
    assert int(refused.value.fix.split()[2].rstrip(",")) in range(1020, 3000 + 2 * took_ms)
    slow.driver.scheduler = config.SchedulerConfig(step_deadline_ms=999)
    with pytest.raises(ConfigError, match="at least 1000"):
        slow.driver.load_model("llama")


@pytest.mark.parametrize(("num_stages", "refused"), [(1, False), (2, True), (4, True)])
def test_stages_wait_for_each_other(num_stages, refused):
    with pytest.raises(ConfigError) if refused else contextlib.nullcontext():
        check_deadline(1000, 0.4, num_stages)


def test_weights_and_the_largest_step_come_out_of_the_request(start):
    found = start(DrivenMemory()).load().profile()
    assert found.available_bytes == REQUEST - WEIGHTS - STEP
    assert found.activation_peak_bytes == STEP
    assert found.requested_bytes == REQUEST
    assert found.changes == ()


def test_ballast_before_the_baseline_changes_nothing_until_the_request_is_not_free(start):
    expected = start(DrivenMemory()).load().profile().available_bytes
    most = 80 * GIB - CONTEXT - REQUEST
    for ballast in (1, 5 * GIB, most):
        memory = DrivenMemory()
        memory.take(ballast)
        assert start(memory).load().profile().available_bytes == expected
    memory = DrivenMemory()
    memory.others = {4711: most + 1}
    with pytest.raises(CapacityError, match=f"process 4711 has {most + 1}") as caught:
        start(memory).load()
    assert caught.value.field == "gpu_memory_utilization"


def test_what_the_process_takes_after_the_baseline_is_missing_to_the_byte(start):
    expected = start(DrivenMemory()).load().profile().available_bytes
    taken = int(np.random.default_rng().integers(1, 20 * GIB))
    begun = start(DrivenMemory()).load()
    begun.memory.take(taken)
    assert begun.profile().available_bytes == expected - taken
    begun.memory.give(taken)
    assert begun.profile().available_bytes == expected


@pytest.mark.parametrize("change", [-6 * GIB, 6 * GIB])
def test_a_process_that_moves_while_it_is_measured_is_named_and_not_counted(start, change):
    memory = DrivenMemory()
    memory.others = {12: 6 * GIB, 13: MIB}
    begun = start(memory, gpu_memory_utilization=0.6).load()
    expected = begun.profile()
    assert expected.changes == ()

    def move():
        memory.step(STEP)
        memory.others = {12: 6 * GIB + change, 13: 2 * MIB}

    begun.during_step = move
    found = begun.profile()
    assert found.available_bytes == expected.available_bytes
    assert [(c.pid, c.num_bytes) for c in found.changes] == [(12, change)]
    begun.during_step = lambda: memory.step(STEP)
    assert begun.profile() == type(expected)(
        epoch=1,
        seq=expected.seq + 2,
        rank=0,
        available_bytes=expected.available_bytes,
        weights_bytes=expected.weights_bytes,
        activation_peak_bytes=expected.activation_peak_bytes,
        requested_bytes=expected.requested_bytes,
    )


def test_where_nobody_names_processes_memory_freed_is_no_room_for_the_request(start):
    memory = DrivenMemory(names_others=False)
    memory.others = {12: 6 * GIB}
    begun = start(memory, gpu_memory_utilization=0.6).load()
    expected = begun.profile().available_bytes

    def vanish():
        memory.step(STEP)
        memory.others = {}

    begun.during_step = vanish
    found = begun.profile()
    assert found.available_bytes == expected
    assert [(c.pid, c.num_bytes) for c in found.changes] == [(0, -6 * GIB)]


def test_what_others_took_is_not_promised_twice(start):
    """The requested share stays, but the device has less."""
    memory = DrivenMemory()
    begun = start(memory).load()
    memory.others = {12: 30 * GIB}
    found = begun.profile()
    assert found.available_bytes == memory.free - STEP
    assert memory.free == 80 * GIB - CONTEXT - WEIGHTS - 30 * GIB


def test_others_that_leave_nothing_are_the_drivers_to_wait_for(start):
    """Return 0 with the reason while other processes change memory; raise an error if none does."""
    memory = DrivenMemory()
    begun = start(memory).load()

    def crowd():
        memory.step(STEP)
        memory.others = {12: memory.free + sum(memory.others.values())}

    begun.during_step = crowd
    found = begun.profile()
    assert found.available_bytes == 0
    assert [c.pid for c in found.changes] == [12]
    begun.during_step = lambda: None
    memory.others = {12: memory.others[12] + memory.free}
    with pytest.raises(CapacityError, match="0 are free: nothing is left"):
        begun.profile()


def test_two_workers_on_one_device_get_their_shares_in_any_order(start):
    """Use two sources over one device, each the other's `others`."""

    class Shared(DrivenMemory):
        neighbour = None

        @property
        def free(self):
            self.others = {1: self.neighbour.context + self.neighbour.reserved}
            return super().free

        def snapshot(self):
            assert self.free >= 0
            return super().snapshot()

    first, second = Shared(), Shared()
    first.neighbour, second.neighbour = second, first
    one = start(first, gpu_memory_utilization=0.4)
    two = start(second, gpu_memory_utilization=0.5)
    one.driver.init_device()
    two.load()
    one.driver.init_device = lambda: None
    one.load()
    share = one.profile().available_bytes
    first.take(share)
    other = two.profile().available_bytes
    assert share == 32 * GIB - WEIGHTS - STEP
    assert other == 40 * GIB - WEIGHTS - STEP
    second.take(other)
    first.step(STEP)
    second.step(STEP)
    third = start(first, gpu_memory_utilization=0.4)
    with pytest.raises(CapacityError, match="process 1 has"):
        third.driver.init_device()


def test_an_override_is_returned_untouched_after_the_profile_has_run(start):
    begun = start(DrivenMemory(), kv_cache_memory_bytes=123 * GIB)
    begun.driver.init_device()
    begun.driver.load_model("llama", cache=begun.driver.cache)
    ran = []
    begun.during_step = lambda: ran.append(1)
    stage = begun.worker._model.stage
    forward = stage.forward
    stage.forward = lambda *args: (begun.during_step(), forward(*args))[1]
    assert begun.profile().available_bytes == 123 * GIB
    assert ran


def test_nothing_left_is_an_error_that_says_what_took_it(start):
    memory = DrivenMemory()
    begun = start(memory).load()
    memory.take(REQUEST - WEIGHTS - STEP - 1)
    assert begun.profile().available_bytes == 1
    memory.take(1)
    with pytest.raises(CapacityError, match=f"a step takes {STEP}") as caught:
        begun.profile()
    assert caught.value.field == "gpu_memory_utilization"
    assert caught.value.fix
    memory.give(1)
    assert begun.profile().available_bytes == 1


class DrivenGraphs(StepGraphs):
    """Graphs that take memory of a driven device, a part of which the driver keeps for the next
    ones when they go."""

    count = 3

    def __init__(self, memory, pool, kept):
        self.memory, self.pool, self.kept, self.has_kept = memory, pool, kept, False

    def estimate_bytes(self, runner, used_bytes):
        before = used_bytes()
        self.capture(runner)
        grown = used_bytes() - before
        self.memory.pinned -= self.pool
        return grown

    def capture(self, runner):
        self.memory.pinned += self.pool  # cached memory is not a pool's
        if not self.has_kept:
            self.memory.context += self.kept
            self.has_kept = True


def test_what_graphs_will_take_is_subtracted_once(start, monkeypatch):
    memory = DrivenMemory()
    graphs = DrivenGraphs(memory, GIB, kept=100 * MIB)
    monkeypatch.setattr("worker_daemon.worker.serving.step_graphs", lambda *_, **__: graphs)
    begun = start(memory).load()
    for estimate in (GIB + 100 * MIB, GIB):
        found = begun.profile()
        assert found.graph_bytes == estimate
        assert found.available_bytes == REQUEST - WEIGHTS - STEP - GIB - 100 * MIB
    begun.driver.allocate()
    begun.driver.warm_up()
    assert begun.worker.describe().memory_bytes["graphs"] == GIB


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), CapacityError),
        (torch.AcceleratorError("CUDA error: out of memory", 2), CapacityError),
        (torch.AcceleratorError("CUDA error: unspecified launch failure", 719), None),
    ],
    ids=["allocator", "driver", "device"],
)
def test_graphs_that_do_not_fit_are_a_typed_error(start, monkeypatch, raised, expected):
    class Failing(StepGraphs):
        def estimate_bytes(self, runner, used_bytes):
            raise raised

        def capture(self, runner):
            raise raised

    begun = start(DrivenMemory()).load()
    found = begun.profile()
    monkeypatch.setattr("worker_daemon.worker.serving.step_graphs", lambda *_, **__: Failing())
    with pytest.raises(expected or torch.AcceleratorError):
        begun.profile()
    begun.driver.allocate()
    with pytest.raises(expected or torch.AcceleratorError):
        begun.driver.warm_up()
    monkeypatch.setattr("worker_daemon.worker.serving.step_graphs", lambda *_, **__: StepGraphs())
    begun.driver.reset("MODEL_LOADED")
    assert begun.profile().available_bytes == found.available_bytes


def test_memory_that_the_allocator_cannot_give_back_is_counted_and_said(start, caplog):
    """A small tensor keeps a large block."""
    memory = DrivenMemory()
    begun = start(memory).load()

    def pin():
        memory.step(STEP)
        memory.pinned = 2 * GIB

    begun.during_step = pin
    with caplog.at_level(logging.INFO):
        found = begun.profile()
    assert found.available_bytes == REQUEST - WEIGHTS - STEP - 2 * GIB
    assert "2.147 GB of it kept by the allocator" in caplog.text


def test_gaps_between_tensors_count_to_the_step(start):
    """During the step, the allocator holds more than the tensors."""
    memory = DrivenMemory()
    begun = start(memory).load()
    begun.during_step = lambda: memory.step(STEP, gaps=GIB)
    found = begun.profile()
    assert found.available_bytes == REQUEST - WEIGHTS - STEP - GIB
    assert found.activation_peak_bytes == STEP + GIB


def test_a_driver_that_reports_late_is_overruled_by_the_allocator(start):
    memory = DrivenMemory()
    begun = start(memory).load()
    memory.lag = WEIGHTS
    assert begun.profile().available_bytes == REQUEST - WEIGHTS - STEP


def test_logits_of_all_rows_are_in_the_profile(make_worker, copy_config):
    """Measured in host memory: more than one float32 per row and vocabulary token. They
    are larger than what the C library keeps for later."""
    num_rows, vocab_size = 64, 150_000
    copy_config("wide", vocab_size=vocab_size, hidden_size=16, head_dim=8)
    scheduler = config.SchedulerConfig(max_num_seqs=num_rows, max_num_batched_tokens=num_rows)
    driver = WorkerDriver(make_worker(), scheduler=scheduler)
    driver.init_device()
    driver.load_model("wide", load_format="dummy")
    assert driver.profile().activation_peak_bytes >= num_rows * vocab_size * 4


def test_a_host_has_the_number_and_loses_what_is_taken(make_worker, llama):
    driver = WorkerDriver(make_worker())
    share = 2 * GIB / HostMemory().snapshot().free
    driver.cache = config.CacheConfig(block_size=16, gpu_memory_utilization=share)
    driver.init_device()
    driver.load_model("llama")
    # The C library may give back what other tests have left behind: less than this.
    held = np.ones(GIB // 2, np.uint8)
    driver.profile()
    before = driver.profile().available_bytes
    assert 0 < before < HOST_KV_CACHE_LIMIT_BYTES
    ballast = np.ones(GIB // 2, np.uint8)
    after = driver.profile().available_bytes
    assert before - after == pytest.approx(ballast.nbytes, rel=0.3)
    del ballast
    assert driver.profile().available_bytes > after + GIB // 4
    del held

    layers = driver.plan().size_bytes // driver.num_blocks
    driver.num_blocks = after // layers
    driver.allocate()
    driver.warm_up()
    lengths = dict.fromkeys(range(8), 8)  # as many tokens and rows as a step may have
    new = [(slot, [1] * 8, GREEDY) for slot in lengths]
    driver.blocks, driver.free_blocks = {}, list(range(1, 64))
    assert len(driver.execute(lengths, new)) == 8


def test_a_warm_worker_says_what_is_used_for_what_and_what_would_fit(start, caplog):
    memory = DrivenMemory()
    memory.others = {9: 2 * GIB}
    begun = start(memory).load()
    found = begun.profile()
    begun.driver.allocate()
    assert begun.worker.describe().kv_cache_advice is None
    with caplog.at_level(logging.INFO):
        begun.driver.warm_up()
    described = begun.worker.describe()
    kinds = dict(described.memory_bytes)
    assert kinds.pop("activations_peak") == STEP
    assert kinds["others"] == 2 * GIB
    total, free = kinds.pop("total"), kinds.pop("free")
    assert sum(kinds.values()) == total - free
    advice = described.kv_cache_advice
    assert advice.request_bytes == found.available_bytes
    assert advice.card_bytes == memory.free - CUSHION_BYTES
    assert f"{advice.request_bytes} would fit the request" in caplog.text
    begun.driver.reset("MODEL_LOADED")
    assert begun.worker.describe().kv_cache_advice is None
