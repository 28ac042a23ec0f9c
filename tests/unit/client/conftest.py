"""Fake daemons, and groups loaded on them."""

import shutil
import tempfile
from pathlib import Path

import pytest

from client.worker_group import WorkerGroup
from rpc_schema.config import (
    CacheConfig,
    GraphConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    WorkerConfig,
)
from tests.support.fake_daemon import FakeGroup


def worker_config(pp: int = 1, tp: int = 1, **fields) -> WorkerConfig:
    return WorkerConfig(
        parallel=ParallelConfig(pipeline_parallel_size=pp, tensor_parallel_size=tp),
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
    """Make a WorkerGroup on fake daemons: connect(fakes, pp, tp)."""
    groups = []

    def make(daemons: FakeGroup, pp: int = 1, tp: int = 1) -> WorkerGroup:
        groups.append(
            WorkerGroup(
                daemons.endpoints,
                ParallelConfig(pipeline_parallel_size=pp, tensor_parallel_size=tp),
            )
        )
        return groups[-1]

    yield make
    for group in groups:
        group.close()
