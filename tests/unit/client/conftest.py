"""Fake daemons, and groups loaded on them."""

import contextlib
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from rpc_schema.config import (
    CacheConfig,
    GraphConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    WorkerConfig,
)
from tests.support.fake_daemon import FakeDaemon, FakeGroup
from worker_client.__main__ import main
from worker_client.driver import Driver
from worker_client.replicas.group import DataParallelGroup
from worker_client.scheduler import Scheduler, scheduler_limits
from worker_client.worker_group import WorkerGroup


def worker_config(pp: int = 1, tp: int = 1, **fields) -> WorkerConfig:
    return WorkerConfig(
        parallel=ParallelConfig(
            pipeline_parallel_size=pp,
            tensor_parallel_size=tp,
            data_parallel_size=fields.get("dp", 1),
            data_parallel_lockstep=fields.get("dp", 1) > 1,
        ),
        model=ModelConfig(model="/models/fake", max_model_len=fields.get("max_model_len")),
        scheduler=SchedulerConfig(
            max_num_seqs=fields.get("max_num_seqs", 8),
            max_num_batched_tokens=fields.get("max_num_batched_tokens", 32),
            step_deadline_ms=fields.get("step_deadline_ms", 5000),
        ),
        cache=CacheConfig(block_size=fields.get("block_size", 4)),
        graph=GraphConfig(),
    )


@pytest.fixture
def directory():
    path = Path(tempfile.mkdtemp(prefix="fd-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def fakes(directory):
    """Make a group of fake daemons: fakes(world_size, **options)."""
    groups = []

    def make(world_size: int = 1, **options) -> FakeGroup:
        groups.append(FakeGroup(directory, world_size, **options))
        return groups[-1]

    yield make
    for group in groups:
        group.stop()


@pytest.fixture
def connect():
    """Make a WorkerGroup on fake daemons: connect(fakes, pp, tp, dp), with dp replicas in
    lockstep."""
    groups = []

    def make(daemons: FakeGroup, pp: int = 1, tp: int = 1, dp: int = 1) -> WorkerGroup:
        groups.append(WorkerGroup(daemons.endpoints, worker_config(pp, tp, dp=dp).parallel))
        return groups[-1]

    yield make
    for group in groups:
        group.close()


@pytest.fixture
def run(monkeypatch, capsys):
    """Run worker-client; returns exit code, standard output, standard error."""
    handlers = []
    monkeypatch.setattr("signal.signal", lambda *arguments: handlers.append(arguments))

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["worker-client", *map(str, words)])
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        return caught.value.code or 0, captured.out, captured.err

    return call


def options(daemons, directory):
    pp = len(daemons.endpoints)
    endpoints = ",".join(daemons.endpoints)
    return [
        "--endpoints", endpoints, "--model", directory, "--pipeline-parallel-size", pp,
        "--max-num-seqs", 8, "--max-num-batched-tokens", 32,
    ]  # fmt: skip


@dataclass
class Replicas:
    """Replicas that are ready, and what becomes of their losses."""

    daemons: list[FakeDaemon]
    group: DataParallelGroup
    loaded: list
    config: WorkerConfig
    schedulers: list[Scheduler] = field(default_factory=list)

    def opening(self, recover):
        """Functions that open the drivers; recover(replica, died) on their threads."""

        @contextlib.contextmanager
        def open_driver(replica, model):
            scheduler = Scheduler(scheduler_limits(model, self.config))
            self.schedulers.append(scheduler)
            yield Driver(replica, scheduler, recover=lambda died: recover(replica, died))

        pairs = zip(self.group.replicas, self.loaded, strict=True)
        return [partial(open_driver, *pair) for pair in pairs]


@pytest.fixture
def replicas(fakes):
    """Make so many replicas of one daemon each."""
    with contextlib.ExitStack() as opened:

        def make(count: int) -> Replicas:
            daemons = fakes(count)
            config = replace(worker_config(), parallel=ParallelConfig(data_parallel_size=count))
            group = DataParallelGroup(daemons.endpoints, config.parallel)
            opened.enter_context(group).attach()
            return Replicas(daemons.daemons, group, group.prepare(config), config)

        yield make
