"""Rows 23 and 42 of the fault matrix, daemons that do not match: different protocol versions,
exchanged places in the group, or different models under one name."""

import json
import shutil
import sys
import time
from importlib import metadata

import pytest

from rpc_schema import lifecycle as lc
from rpc_schema.config import ParallelConfig
from rpc_schema.error_replies import ControlErrorReply
from rpc_schema.errors import CommError, ErrorCode, IncompatibleError
from rpc_schema.version import PROTOCOL_VERSION
from tests.support.driving import random_cases
from tests.support.forked_daemons import ForkedDaemons
from tests.support.serving import LONG_LEASE, connect, generate, worker_config
from tests.unit.server.driver import DaemonProcess
from tests.unit.server.driver import Driver as BareDriver
from worker_client.errors import ConfigMismatchError, ContentMismatchError
from worker_client.worker_group import WorkerGroup

OTHER_VERSION = PROTOCOL_VERSION + 1


@pytest.fixture(scope="module")
def copies(checkpoint, tmp_path_factory):
    """Two directories of models, as on two hosts, each with its copy of one checkpoint as `m`."""
    roots = [tmp_path_factory.mktemp(f"host{rank}") for rank in range(2)]
    for root in roots:
        shutil.copytree(checkpoint().path, root / "m")
    return roots


@pytest.fixture(scope="module")
def pair(copies):
    """A daemon for each of them."""
    roots = iter(copies)

    def command(endpoint, device, pipe):
        words = ("serve", "--endpoint", endpoint, "--device", device)
        options = ("--model-root", str(next(roots)), "--exit-with-parent-fd", str(pipe))
        return (sys.executable, "-m", "worker_daemon", *words, *options)

    with ForkedDaemons(["cpu", "cpu"], copies[0], command=command) as daemons:
        yield daemons


def set_dtype(root, dtype):
    path = root / "m" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": dtype}))


def test_row_42_neighbours_with_different_dtypes_are_refused(
    pair, copies, checkpoint, detection, monkeypatch
):
    """By the driver, which compares files; and by the daemons of one that does not: the hop carries
    the expected number of bytes, with another meaning."""
    mixed = worker_config("m", 2, dtype="auto", step_deadline_ms=5000)
    for root, dtype in zip(copies, ("float16", "bfloat16"), strict=True):
        set_dtype(root, dtype)
    with pytest.raises(ContentMismatchError), connect(pair.endpoints, mixed):
        pass
    monkeypatch.setattr("worker_client.group.loading.check_same_weights", lambda *_: None)
    began = time.monotonic()
    with pytest.raises(CommError, match="PP_MISMATCH") as refused, connect(pair.endpoints, mixed):
        pass  # the first step is the profile's
    took_s = time.monotonic() - began
    assert refused.value.rank == 1
    detection(42, "neighbors with different dtypes", 2.0, took_s, "the hop's trailer")
    monkeypatch.undo()
    for root in copies:
        set_dtype(root, "float32")
    cases = random_cases(checkpoint(), seed=90, count=3, max_tokens=8)
    with connect(pair.endpoints, worker_config("m", 2)) as (group, loaded):
        assert generate(group, loaded, cases.requests).tokens == cases.expected


def test_row_42_ranks_in_another_order_are_refused_by_name(pair, checkpoint, detection):
    config = worker_config("m", 2)
    with connect(pair.endpoints, config):
        pass
    began = time.monotonic()
    with WorkerGroup(pair.endpoints[::-1], config.parallel, lease=LONG_LEASE) as group:
        group.attach()
        with pytest.raises(ConfigMismatchError, match=r"rank of .*: 0 != 1"):
            group.prepare(config, num_gpu_blocks=256)
        detection(42, "ranks in another order", 1.0, time.monotonic() - began, "status")
    cases = random_cases(checkpoint(), seed=91, count=2, max_tokens=8)
    with connect(pair.endpoints[::-1], config) as (group, loaded):  # loads anew
        assert generate(group, loaded, cases.requests).tokens == cases.expected


OTHER_LINK = "torch 9.9.9, nvidia-nccl-cu99 1.2.3"


@pytest.fixture(params=[f"protocol={OTHER_VERSION}"])
def releases(tmp_path, request):
    """A daemon of this release, and one that differs in some way."""
    module = ("-m", "tests.support.versioned_serve", request.param, "serve", "--device", "cpu")
    own = DaemonProcess(tmp_path / "own")
    other = DaemonProcess(tmp_path / "other", serve=(sys.executable, *module))
    yield own, other
    for daemon in (own, other):
        daemon.stop()


def test_row_23_daemon_of_another_version_is_refused_with_both_named(releases, detection):
    own, other = releases
    drivers = [BareDriver(daemon.endpoint) for daemon in releases]
    before = [driver.status() for driver in drivers]  # both are up
    began = time.monotonic()
    with (
        WorkerGroup(
            [own.endpoint, other.endpoint], ParallelConfig(pipeline_parallel_size=2)
        ) as group,
        pytest.raises(IncompatibleError) as refused,
    ):
        group.attach()
    took_s = time.monotonic() - began
    assert refused.value.rank == 1
    assert f"version {OTHER_VERSION}" in str(refused.value)
    assert f"this driver {PROTOCOL_VERSION}" in str(refused.value)
    detection(23, "another protocol version", 1.0, took_s, "hello")
    assert drivers[1].hello().protocol_version == OTHER_VERSION
    ids = {"driver_id": drivers[1].driver_id, "epoch": before[1].epoch + 1}
    reply = drivers[1].call(lc.PrepareAttach, **ids)  # as one that did not look
    assert isinstance(reply, ControlErrorReply)
    assert reply.code is ErrorCode.INCOMPATIBLE
    assert str(PROTOCOL_VERSION) in reply.message and str(OTHER_VERSION) in reply.message
    after = [driver.status() for driver in drivers]
    assert [status.epoch for status in after] == [status.epoch for status in before]
    assert {status.lease.state for status in after} == {"free"}
    drivers[0].attach()  # the other one serves on
    for driver in drivers:
        driver.close()


@pytest.mark.parametrize("releases", [f"link={OTHER_LINK}"], indirect=True)
def test_row_23_ranks_beside_another_torch_are_refused_with_both_named(releases, detection):
    endpoints = [daemon.endpoint for daemon in releases]
    drivers = [BareDriver(endpoint) for endpoint in endpoints]
    before = [driver.status() for driver in drivers]  # both are up
    began = time.monotonic()
    with (
        WorkerGroup(endpoints, ParallelConfig(pipeline_parallel_size=2), lease=LONG_LEASE) as group,
        pytest.raises(IncompatibleError) as refused,
    ):
        group.attach()
    took_s = time.monotonic() - began
    assert refused.value.rank == 1
    assert OTHER_LINK in str(refused.value)
    assert f"torch {metadata.version('torch')}" in str(refused.value)
    detection(23, "another version of torch", 1.0, took_s, "hello")
    assert [driver.status().epoch for driver in drivers] == [status.epoch for status in before]
    for endpoint, driver in zip(endpoints, drivers, strict=True):
        with WorkerGroup([endpoint], ParallelConfig(), lease=LONG_LEASE) as group:
            group.attach()  # alone each may serve
        driver.close()
