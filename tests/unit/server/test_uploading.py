"""Uploads through a real daemon process around the fake worker: roles, states, what drops them, and
a group that sends them."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rpc_schema import lifecycle as lc
from rpc_schema import uploads as up
from rpc_schema.codec import ControlReplyMessage
from rpc_schema.config import ParallelConfig
from rpc_schema.error_replies import (
    ControlErrorReply,
)
from rpc_schema.errors import (
    CapacityError,
    ConfigError,
    ErrorCode,
    FencedError,
    StateError,
)
from rpc_schema.step import Done, ModelRunnerOutput
from tests.support.leased_driver import make_ready
from tests.support.uploads import chunks_of
from tests.unit.server.driver import DaemonProcess, Driver, wait_for
from worker_client.errors import (
    ClientConfigError,
    ClientError,
)
from worker_client.group.uploads import HostTensor
from worker_client.worker_group import WorkerGroup

ROOM = 8 << 20
SIZE = 2 * up.CHUNK_BYTES + 1000


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[DaemonProcess]]:
    """Two for all tests."""
    made = []
    for name in ("d", "e"):
        directory = tmp_path_factory.mktemp(name)
        directory.chmod(0o700)
        made.append(DaemonProcess(directory, "--upload-memory-bytes", str(ROOM)))
    yield made
    for daemon in made:
        assert daemon.process.poll() is None, daemon.stderr()
        daemon.stop()


@pytest.fixture
def driver(daemons: list[DaemonProcess]) -> Iterator[Driver]:
    """An attached driver, in READY."""
    driver = Driver(daemons[0].endpoint)
    driver.attach()
    driver.make_ready()
    yield driver
    driver.close()


@pytest.fixture
def group(daemons: list[DaemonProcess]) -> Iterator[WorkerGroup]:
    """A group of the first daemon, in READY."""
    with WorkerGroup([daemons[0].endpoint], ParallelConfig()) as group:
        group.attach(force=True)
        make_ready(group)
        yield group


def tensor_chunks(count: int = SIZE) -> list[up.UploadChunk]:
    return chunks_of("uint8", (count,), os.urandom(count))


def put(driver: Driver, chunk: up.UploadChunk, **changes: object) -> ControlReplyMessage:
    names = [name for name in chunk.__struct_fields__ if name != "call"]
    fields = {name: getattr(chunk, name) for name in names} | {"epoch": driver.epoch}
    return driver.call(up.UploadChunk, **{**fields, **changes})


def put_all(driver: Driver, chunks: list[up.UploadChunk]) -> bool:
    replies = [put(driver, chunk) for chunk in chunks]
    assert all(isinstance(reply, up.UploadChunkReply) for reply in replies), replies
    return [reply.is_complete for reply in replies] == [*[False] * (len(chunks) - 1), True]


def has(driver: Driver, *names: bytes) -> tuple[bool, ...]:
    reply = driver.call(up.FindUploads, epoch=driver.epoch, content_hashes=names)
    assert isinstance(reply, up.FindUploadsReply), reply
    return reply.are_complete


def refused(reply: ControlReplyMessage, code: ErrorCode, words: str = "") -> None:
    assert isinstance(reply, ControlErrorReply), reply
    assert reply.code is code
    assert words in reply.message


def test_upload_is_found_and_dropped(driver: Driver) -> None:
    chunks = tensor_chunks()
    name = chunks[0].content_hash
    assert has(driver, name, bytes(32)) == (False, False)
    assert put_all(driver, chunks)
    assert has(driver, bytes(32), name) == (False, True)
    assert SIZE <= driver.status().upload_bytes <= driver.status().max_upload_bytes
    for _ in range(2):
        dropped = driver.call(up.DropUploads, epoch=driver.epoch, content_hashes=(name,))
        assert isinstance(dropped, lc.Acknowledged)
        assert has(driver, name) == (False,)
    assert driver.status().upload_bytes == 0


def test_complete_uploads_are_read_back(driver: Driver) -> None:
    chunks = tensor_chunks()
    name = chunks[0].content_hash

    def read(offset: int, name: bytes = name) -> ControlReplyMessage:
        return driver.call(up.ReadUpload, epoch=driver.epoch, content_hash=name, offset=offset)

    for chunk in chunks:
        refused(read(0), ErrorCode.CONFIG, "no complete upload")
        put(driver, chunk)
    for chunk in chunks:
        reply = read(chunk.offset)
        assert isinstance(reply, up.ReadUploadReply), reply
        assert (reply.dtype, reply.shape, reply.data) == ("uint8", (SIZE,), chunk.data)
    refused(read(1), ErrorCode.CONFIG, "has no chunk at this offset")
    refused(read(len(chunks) * up.CHUNK_BYTES), ErrorCode.CONFIG, "no chunk at this offset")
    refused(read(0, bytes(32)), ErrorCode.CONFIG, "no complete upload")


def test_chunks_are_taken_while_a_step_runs(driver: Driver, tmp_path: Path) -> None:
    driver.send_step_until(tmp_path / "over")
    chunks = tensor_chunks()
    assert put_all(driver, chunks)
    assert driver.status().phase == "ExecuteModel"
    (tmp_path / "over").touch()
    assert isinstance(driver.reply(), ModelRunnerOutput)
    assert has(driver, chunks[0].content_hash) == (True,)


def test_only_the_holder_of_the_lease_uploads(daemons: list[DaemonProcess], driver: Driver) -> None:
    (chunk,) = tensor_chunks(5)
    stranger = Driver(daemons[0].endpoint)
    asks = {
        up.UploadChunk: lambda epoch: put(stranger, chunk, epoch=epoch),
        up.FindUploads: lambda epoch: stranger.call(
            up.FindUploads, epoch=epoch, content_hashes=(chunk.content_hash,)
        ),
        up.ReadUpload: lambda epoch: stranger.call(
            up.ReadUpload, epoch=epoch, content_hash=chunk.content_hash, offset=0
        ),
        up.DropUploads: lambda epoch: stranger.call(
            up.DropUploads, epoch=epoch, content_hashes=(chunk.content_hash,)
        ),
    }
    for ask in asks.values():
        refused(ask(driver.epoch - 1), ErrorCode.FENCED)
        refused(ask(driver.epoch + 1), ErrorCode.NOT_ATTACHED)
        refused(ask(0), ErrorCode.FENCED)
    stranger.close()
    assert driver.status().upload_bytes == 0


def test_model_is_loaded_before_anything_is_uploaded(driver: Driver) -> None:
    (chunk,) = tensor_chunks(5)
    driver.run(lc.Reset, to="CREATED")
    refused(put(driver, chunk), ErrorCode.ILLEGAL_STATE, "the state is CREATED")
    driver.init_device()
    refused(put(driver, chunk), ErrorCode.ILLEGAL_STATE, "the state is DEVICE_READY")
    driver.load()
    assert put_all(driver, [chunk])


@pytest.mark.parametrize("to", ["CREATED", "DEVICE_READY", "MODEL_LOADED"])
def test_reset_drops_all(driver: Driver, to: str) -> None:
    chunks, (small,) = tensor_chunks(), tensor_chunks(9)
    assert put_all(driver, [small])
    put(driver, chunks[0])
    assert isinstance(driver.run(lc.Reset, to=to), Done)
    assert has(driver, small.content_hash) == (False,)
    assert driver.status().upload_bytes == 0


def test_detach_drops_all(driver: Driver) -> None:
    (chunk,) = tensor_chunks(9)
    assert put_all(driver, [chunk])
    assert driver.status().upload_bytes > 0
    driver.call(lc.Detach, epoch=driver.epoch)
    assert driver.status().upload_bytes == 0
    refused(put(driver, chunk), ErrorCode.NOT_ATTACHED)


def test_next_driver_begins_without_any(daemons: list[DaemonProcess], driver: Driver) -> None:
    chunks, (small,) = tensor_chunks(), tensor_chunks(9)
    assert put_all(driver, [small])
    put(driver, chunks[0])
    other = Driver(daemons[0].endpoint)
    assert other.attach().status.upload_bytes == 0
    assert has(other, small.content_hash) == (False,)
    refused(put(driver, chunks[1]), ErrorCode.FENCED)
    assert put_all(other, chunks)
    other.close()


def test_expired_lease_drops_all(driver: Driver) -> None:
    (chunk,) = tensor_chunks(9)
    driver.attach(lease_ttl_ms=2000)
    assert put_all(driver, [chunk])
    wait_for(lambda: driver.status().upload_bytes == 0)
    assert driver.status().lease.state == "orphan"
    refused(put(driver, chunk), ErrorCode.LEASE_EXPIRED)


def test_drain_takes_no_uploads(driver: Driver) -> None:
    (chunk,), (other,) = tensor_chunks(9), tensor_chunks(9)
    assert put_all(driver, [chunk])
    driver.call(lc.Drain)
    refused(put(driver, other), ErrorCode.DRAINING)
    assert has(driver, chunk.content_hash) == (True,)
    driver.call(lc.Drain, undo=True)
    assert put_all(driver, [other])


# Through a group.


def test_group_uploads_once(group: WorkerGroup) -> None:
    source = np.random.default_rng(0)
    tensors = [
        HostTensor.from_array(source.standard_normal((300, 1000), np.float32)),
        HostTensor.from_array(source.integers(0, 99, (7, 3)).T),
        HostTensor.from_array(source.integers(0, 99, (50, 4), np.int32).astype(">i4")[::2]),
        HostTensor.from_bytes("bfloat16", (3, 5), os.urandom(30)),
    ]
    names = group.uploads.put(tensors)
    assert names == [tensor.content_hash for tensor in tensors]
    for tensor in tensors:
        (expected, *_) = chunks_of(tensor.dtype, tensor.shape, tensor.data.tobytes())
        assert tensor.content_hash == expected.content_hash
    assert group.uploads.find([*names, bytes(32)]) == [True] * 4 + [False]
    assert not group.uploads.begin([*tensors, tensors[0]]).proceed(), "nothing is sent twice"
    for ask in (group.uploads.find, group.uploads.drop):
        with pytest.raises(ClientConfigError, match="field content_hashes"):
            ask([*names, b"short"])
    assert group.uploads.find(names) == [True] * 4
    group.uploads.drop(names[1:2])
    assert group.uploads.find(names) == [True, False, True, True]
    again = group.uploads.begin(tensors)
    assert again.proceed()
    assert not again.proceed()
    assert group.uploads.find(names * 300, ranks=[0]) == [True] * 1200


def test_full_daemon_refuses_and_goes_on_when_there_is_room(group: WorkerGroup) -> None:
    large, other = (
        HostTensor.from_bytes("uint8", (size,), os.urandom(size))
        for size in (ROOM - up.CHUNK_BYTES, 2 * up.CHUNK_BYTES)
    )
    group.uploads.put([large])
    uploading = group.uploads.begin([other])
    for _ in range(2):
        with pytest.raises(CapacityError, match="--upload-memory-bytes"):
            uploading.proceed()
    group.uploads.drop([large.content_hash])
    assert uploading.finish() == [other.content_hash]
    assert group.uploads.find([large.content_hash, other.content_hash]) == [False, True]


def test_uploading_that_is_cut_off_says_so(group: WorkerGroup) -> None:
    tensor = HostTensor.from_bytes("uint8", (SIZE,), os.urandom(SIZE))
    uploading = group.uploads.begin([tensor])
    assert uploading.proceed()
    group.reset("MODEL_LOADED")
    assert uploading.proceed()
    with pytest.raises(ClientError, match="dropped while they were sent"):
        uploading.finish()
    old = group.uploads.begin([tensor])
    assert old.proceed()
    group.attach()
    with pytest.raises(FencedError):
        old.proceed()
    assert group.uploads.put([tensor]) == [tensor.content_hash]
    group.reset("DEVICE_READY")
    with pytest.raises(StateError, match="load it first"):
        group.uploads.put([tensor])


def test_changed_array_is_no_upload(group: WorkerGroup) -> None:
    array = np.arange(400_000, dtype=np.int32)
    tensor = HostTensor.from_array(array)
    array[-1] = 0
    with pytest.raises(ConfigError, match="another hash"):
        group.uploads.put([tensor])
    assert group.get_status()[0].upload_bytes == 0


def test_only_the_ranks_that_were_named_have_it(daemons: list[DaemonProcess]) -> None:
    parallel = ParallelConfig(pipeline_parallel_size=2)
    tensors = [HostTensor.from_bytes("uint8", (SIZE,), random.randbytes(SIZE)) for _ in range(2)]
    with WorkerGroup([daemon.endpoint for daemon in daemons], parallel) as group:
        group.attach(force=True)
        make_ready(group)
        names = group.uploads.put(tensors[:1], ranks=[0]) + group.uploads.put(tensors[1:])
        assert [group.uploads.find(names, ranks=[rank]) for rank in (0, 1)] == [
            [True, True],
            [False, True],
        ]
        assert group.uploads.find(names) == [False, True]
        group.uploads.put(tensors)
        assert group.uploads.find(names) == [True, True]
        group.uploads.drop(names, ranks=[1])
        assert group.uploads.find(names, ranks=[0]) == [True, True]
        assert group.get_status()[1].upload_bytes == 0
        for ranks in ([], [2], [0, -1]):
            with pytest.raises(ClientConfigError) as caught:
                group.uploads.put(tensors, ranks)
            assert caught.value.field == "ranks"


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: HostTensor.from_array(np.zeros(3)), "dtype"),
        (lambda: HostTensor.from_array(np.array(["x", None])), "dtype"),
        (lambda: HostTensor.from_array(np.float32(1)[()]), "shape"),
        (lambda: HostTensor.from_array(np.zeros((3, 0), np.float32)), "shape"),
        (lambda: HostTensor.from_array(np.zeros((1,) * 9, np.float32)), "shape"),
        (lambda: HostTensor.from_bytes("uint8", ((1 << 30) + 1,), b""), "shape"),
        (lambda: HostTensor.from_bytes("bfloat16", (2, 2), bytes(7)), "data"),
        (lambda: HostTensor.from_bytes("uint8", (4,), memoryview(bytes(8))[::2]), "data"),
        (lambda: HostTensor.from_bytes("complex64", (2,), bytes(16)), "dtype"),
    ],
)
def test_tensor_that_cannot_be_uploaded_is_refused_here(make: object, field: str) -> None:
    with pytest.raises(ClientConfigError, match="fix: ") as caught:
        make()  # type: ignore[operator]
    assert caught.value.field == field
