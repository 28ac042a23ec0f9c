"""The upload store: chunks in any order, repeated chunks, refusals, and the memory it holds."""

import itertools
import random
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from rpc_schema.errors import CapacityError, ConfigError
from rpc_schema.uploads import CHUNK_BYTES, MAX_UPLOAD_BYTES, UploadChunk
from tests.support.uploads import chunks_of, reference_hash
from tests.support.waiting import PATIENCE_S
from worker_daemon.worker.uploads import MAX_UNFINISHED, MAX_UPLOADS, Uploads

ROOM = 64 << 20
PAGE = resource.getpagesize()


def changed(chunk: UploadChunk, **fields: object) -> UploadChunk:
    return UploadChunk(**{name: getattr(chunk, name) for name in chunk.__struct_fields__} | fields)


def bytes_of(source: random.Random, count: int) -> list[UploadChunk]:
    """A random tensor of this many bytes."""
    return chunks_of("uint8", (count,), source.randbytes(count))


def put_all(uploads: Uploads, chunks: list[UploadChunk]) -> bool:
    return [uploads.put(chunk) for chunk in chunks][-1]


def refused(uploads: Uploads, chunk: UploadChunk, field: str, *words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        uploads.put(chunk)
    assert caught.value.field == field
    assert all(word in str(caught.value) for word in ("fix: ", *words))


@pytest.mark.parametrize("seed", range(8))
def test_chunks_make_the_tensor_in_any_order_and_any_number(seed: int) -> None:
    source = random.Random(seed)
    rows = source.choice((1, 3, CHUNK_BYTES // 256, CHUNK_BYTES // 256 + 1, 9000))
    made = torch.randn(rows, 2, 32, generator=torch.Generator().manual_seed(seed))
    kind = source.choice(("float32", "bfloat16", "float16", "int64"))
    tensor = made.mul(1000).to(getattr(torch, kind))
    data = tensor.view(torch.uint8).numpy().tobytes()
    chunks = chunks_of(kind, (rows, 2, 32), data)
    name = chunks[0].content_hash
    order = chunks + source.choices(chunks, k=source.randrange(4))
    source.shuffle(order)
    uploads, come = Uploads(ROOM), set()
    for chunk in order:
        assert (uploads.get(name) is not None) == (len(come) == len(chunks))
        come.add(chunk.offset)
        assert uploads.put(chunk) == (len(come) == len(chunks))
    upload = uploads.get(name)
    assert upload is not None
    assert (upload.dtype, upload.array.shape) == (kind, (rows, 2, 32))
    assert not upload.array.flags.writeable
    again = torch.from_numpy(upload.array.copy()).view(tensor.dtype)
    assert torch.equal(again, tensor)
    assert uploads.num_bytes == -(-len(data) // PAGE) * PAGE


def test_hash_tells_dtype_shape_and_content_apart() -> None:
    data = bytes(range(24)) * 2
    kinds = [("uint8", (48,)), ("uint8", (4, 12)), ("uint8", (4, 1, 12)), ("float32", (12,))]
    kinds += [("int32", (12,)), ("bfloat16", (24,)), ("float16", (24,))]
    assert len({reference_hash(*kind, data) for kind in kinds}) == len(kinds)
    uploads = Uploads(ROOM)
    for dtype, shape in kinds:
        assert put_all(uploads, chunks_of(dtype, shape, data))


def test_hostile_chunks_change_nothing() -> None:
    source, uploads = random.Random(3), Uploads(ROOM)
    first, second, last = bytes_of(source, 2 * CHUNK_BYTES + 100)
    hostile = [
        (changed(first, offset=1), "offset", f"multiples of {CHUNK_BYTES}"),
        (changed(second, offset=CHUNK_BYTES - 4096), "offset", "multiples"),
        (changed(last, offset=3 * CHUNK_BYTES), "offset", "below 1048676"),
        (changed(last, offset=2**63 - 1), "offset", "fix"),
        (changed(last, offset=2**62), "offset", "fix"),
        (changed(first, data=first.data[:-1]), "data", f"send {CHUNK_BYTES} bytes"),
        (changed(last, data=last.data + b"x"), "data", "send 100 bytes"),
        (changed(first, shape=(2**31 - 1,) * 8), "shape", "parts of at most"),
        (changed(first, shape=(MAX_UPLOAD_BYTES + 1,)), "shape", "parts of at most"),
    ]
    for chunk, field, words in hostile:
        refused(uploads, chunk, field, words)
        assert uploads.num_bytes == 0, "a refused chunk began an upload"
    assert not uploads.put(first)
    hostile += [
        (changed(first, data=bytes(CHUNK_BYTES)), "offset", "earlier chunk"),
        (changed(second, dtype="int32", shape=(262169,)), "dtype", "send uint8"),
        (changed(second, shape=(2, 524338)), "shape", "send (1048676,)"),
    ]
    for chunk, field, words in hostile:
        refused(uploads, chunk, field, words)
    assert put_all(uploads, [last, second])
    for chunk, field, words in hostile:
        refused(uploads, chunk, field, words)
    upload = uploads.get(first.content_hash)
    assert upload is not None
    assert upload.array.tobytes() == first.data + second.data + last.data


@pytest.mark.parametrize("count", [1, 100, CHUNK_BYTES, 2 * CHUNK_BYTES + 1])
def test_tensor_of_another_hash_is_thrown_away_whole(count: int) -> None:
    source, uploads = random.Random(count), Uploads(ROOM)
    data, name = source.randbytes(count), source.randbytes(32)
    wrong = chunks_of("uint8", (count,), data, name)
    source.shuffle(wrong)
    for chunk in wrong[:-1]:
        assert not uploads.put(chunk)
    refused(uploads, wrong[-1], "content_hash", name.hex())
    assert uploads.get(name) is None
    assert uploads.num_bytes == 0
    assert put_all(uploads, chunks_of("uint8", (count,), data))


def test_room_is_taken_as_an_upload_begins_and_given_back() -> None:
    source, uploads = random.Random(5), Uploads(4 * CHUNK_BYTES)
    one, two = bytes_of(source, 2 * CHUNK_BYTES), bytes_of(source, 2 * CHUNK_BYTES - 5)
    small = bytes_of(source, 1)
    assert not uploads.put(one[0])
    assert not uploads.put(two[0])
    for _ in range(3):
        with pytest.raises(CapacityError, match=r"--upload-memory-bytes") as caught:
            uploads.put(small[0])
        assert (caught.value.field, caught.value.value) == ("shape", (1,))
    assert uploads.put(one[1])
    assert uploads.put(two[1]), "an upload that began always has room"
    uploads.drop([two[0].content_hash, bytes(32)])
    assert uploads.num_bytes == 2 * CHUNK_BYTES
    assert uploads.get(two[0].content_hash) is None
    assert uploads.put(small[0])
    assert put_all(uploads, one)
    uploads.drop_all()
    assert uploads.num_bytes == 0
    assert uploads.get(one[0].content_hash) is None
    assert put_all(uploads, two)


def test_numbers_are_bounded() -> None:
    source, uploads = random.Random(6), Uploads(1 << 40)
    begun = [bytes_of(source, CHUNK_BYTES + 1) for _ in range(MAX_UNFINISHED)]
    for chunks in begun:
        assert not uploads.put(chunks[0])
    with pytest.raises(CapacityError, match=f"{MAX_UNFINISHED} uploads are unfinished"):
        uploads.put(bytes_of(source, 1)[0])
    for chunks in begun:
        assert uploads.put(chunks[1])
    for number in range(MAX_UPLOADS - MAX_UNFINISHED):
        uploads.put(chunks_of("int32", (1,), number.to_bytes(4, "little"))[0])
    with pytest.raises(CapacityError, match=f"{MAX_UPLOADS} uploads are there"):
        uploads.put(bytes_of(source, 2)[0])
    assert uploads.put(begun[0][0]), "a known upload needs no new slot"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def test_claims_alone_take_no_memory_and_all_of_it_goes_back() -> None:
    uploads, data = Uploads(1 << 40), bytes(range(256)) * (CHUNK_BYTES // 256)
    before = resident_bytes()
    for number in range(16):
        claim = UploadChunk(
            call=1,
            epoch=1,
            content_hash=bytes([number]) * 32,
            dtype="uint8",
            shape=(MAX_UPLOAD_BYTES,),
            offset=number * CHUNK_BYTES,
            data=data,
        )
        assert not uploads.put(claim)
    assert resident_bytes() - before < 16 * (CHUNK_BYTES + (1 << 20))
    source = np.random.default_rng(1)
    whole = chunks_of("uint8", (32 << 20,), source.bytes(32 << 20))
    assert put_all(uploads, whole)
    held = uploads.get(whole[0].content_hash)
    assert held is not None
    filled = resident_bytes()
    uploads.drop_all()
    assert filled - resident_bytes() < 24 << 20, "holders keep a dropped tensor"
    assert held.array.tobytes() == b"".join(chunk.data for chunk in whole)
    held = None
    assert filled - resident_bytes() > 32 << 20


def test_readers_on_another_thread_see_whole_tensors_or_none() -> None:
    uploads, over = Uploads(ROOM), threading.Event()
    source = np.random.default_rng(2)
    tensors = [chunks_of("uint8", (CHUNK_BYTES + 7,), source.bytes(CHUNK_BYTES + 7)) for _ in "abc"]
    wholes = {chunks[0].content_hash: b"".join(c.data for c in chunks) for chunks in tensors}
    seen: list[bool] = []

    def read() -> None:
        """Drop all at any moment, but not so often that no tensor is ever whole."""
        choices, drops_at = random.Random(3), 0.0
        while not over.is_set():
            for name, content in wholes.items():
                upload = uploads.get(name)
                if upload is not None:
                    seen.append(upload.array.tobytes() == content)
            if time.monotonic() > drops_at:
                uploads.drop_all()
                drops_at = time.monotonic() + choices.uniform(0.0, 0.2)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        give_up = time.monotonic() + PATIENCE_S
        for chunks in itertools.cycle(tensors):
            for chunk in chunks:
                try:
                    uploads.put(chunk)
                except Exception as error:
                    assert "a reset dropped the upload" in str(error)
            if len(seen) > 20 or time.monotonic() > give_up:
                break
    finally:
        over.set()
        reader.join()
    assert seen
    assert all(seen)


def test_all_but_some_complete_ones_are_dropped() -> None:
    source, uploads = random.Random(5), Uploads(ROOM)
    kept, other, unfinished = (bytes_of(source, count) for count in (9, 10, CHUNK_BYTES + 1))
    for chunk in (*kept, *other, unfinished[0]):
        uploads.put(chunk)
    names = frozenset((kept[0].content_hash, unfinished[0].content_hash, bytes(32)))
    uploads.keep_only(names)
    assert uploads.get(kept[0].content_hash) is not None
    assert uploads.get(other[0].content_hash) is None
    assert uploads.num_bytes == PAGE
    assert not uploads.put(unfinished[1]), "its other chunk is gone"


FULL_HOST = """
import resource
import subprocess
import sys
from pathlib import Path
from rpc_schema.uploads import CHUNK_BYTES, MAX_UPLOAD_BYTES, UploadChunk
from worker_daemon.errors import CapacityError
from worker_daemon.worker.uploads import Uploads

pages = int(Path("/proc/self/statm").read_text().split()[0])
most = pages * resource.getpagesize() + (64 << 20)
resource.setrlimit(resource.RLIMIT_AS, (most, most))
uploads = Uploads(4 << 30)
chunk = UploadChunk(
    call=0, epoch=1, content_hash=bytes(32), dtype="uint8", shape=(MAX_UPLOAD_BYTES,), offset=0,
    data=bytes(CHUNK_BYTES),
)
try:
    uploads.put(chunk)
except CapacityError as error:
    print("refused", error.field, uploads.num_bytes)
"""


def test_host_without_memory_refuses_and_says_nothing_else() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FULL_HOST],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (ended.stdout, ended.stderr) == ("refused shape 0\n", "")
