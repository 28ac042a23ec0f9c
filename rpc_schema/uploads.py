"""Tensors that do not fit into a message, uploaded into a daemon's host memory in chunks, and named
by the hash of their content. They are dropped with the lease, unless kept requests name them.
Defines chunks and hashes for both sides.

They are sent over the control socket, outside the order of seqs, to a thread that steps do not wait
for. So a chunk never delays a step, and is not kept for resending. Its size bounds the delay of
other control requests and heartbeats. For the same reason, ranks may temporarily differ in their
uploads: a step that names a missing one is not refused, but fails.
"""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from math import prod
from types import MappingProxyType
from typing import Annotated, Final, Literal, TypeAlias

from msgspec import Meta

from rpc_schema.base import (
    HASH_BYTES,
    ContentHash,
    ControlReply,
    ControlRequest,
    Positive,
    Unsigned,
)
from rpc_schema.lifecycle import Acknowledged

CHUNK_BYTES: Final = 512 << 10
MAX_UPLOAD_BYTES: Final = 1 << 30
"""Bound for one tensor."""
MAX_NAMED_UPLOADS: Final = 1024
"""Bound for one request."""
MAX_DIMENSIONS: Final = 8

UploadDtype = Literal["float32", "float16", "bfloat16", "int64", "int32", "uint16", "uint8"]
ITEM_BYTES: Final[Mapping[UploadDtype, int]] = MappingProxyType(
    {
        "float32": 4,
        "float16": 2,
        "bfloat16": 2,
        "int64": 8,
        "int32": 4,
        "uint16": 2,
        "uint8": 1,
    }
)
Buffer: TypeAlias = bytes | bytearray | memoryview

ContentHashes = Annotated[tuple[ContentHash, ...], Meta(max_length=MAX_NAMED_UPLOADS)]

UploadShape = Annotated[tuple[Positive, ...], Meta(min_length=1, max_length=MAX_DIMENSIONS)]


class UploadChunk(ControlRequest["UploadChunkReply"], frozen=True, tag=40, kw_only=True):
    """Store one chunk of a tensor, for the holder of the lease, once a model is loaded. The first
    chunk begins the upload, and reserves its memory; the others may come in any order, and
    repeatedly.

    Refused, with nothing changed: a chunk that does not belong to the tensor or differs from an
    earlier one at its offset (CONFIG), and an upload for which there is no room (CAPACITY).
    Complete chunks that do not match the hash are dropped (CONFIG). Uploads are dropped with the
    lease, except those of kept requests, which stay for the driver that adopts these. A Reset drops
    all.

    The hash is BLAKE2b of 32 bytes, personalized `upload`, over the ASCII text `DTYPE N,N,...` with
    a newline (`float32 2,3`), then each chunk's own BLAKE2b of 32 bytes, personalized `upload
    chunk`, in the order of the chunks.
    """

    epoch: Unsigned
    content_hash: ContentHash
    dtype: UploadDtype
    shape: UploadShape
    """Its data, row-major and little-endian, is at most 1 GiB."""
    offset: Unsigned
    """A multiple of 524288."""
    data: Annotated[bytes, Meta(min_length=1, max_length=CHUNK_BYTES)]
    """524288 bytes, or the remainder at the tensor's end."""


class UploadChunkReply(ControlReply, frozen=True, tag=40, kw_only=True):
    is_complete: bool
    """True if the tensor is complete and matches its hash."""


class FindUploads(ControlRequest["FindUploadsReply"], frozen=True, tag=41, kw_only=True):
    """Return which tensors have been uploaded already."""

    epoch: Unsigned
    content_hashes: ContentHashes


class FindUploadsReply(ControlReply, frozen=True, tag=41, kw_only=True):
    are_complete: Annotated[tuple[bool, ...], Meta(max_length=MAX_NAMED_UPLOADS)]
    """For each of content_hashes."""


class ReadUpload(ControlRequest["ReadUploadReply"], frozen=True, tag=45, kw_only=True):
    """Return a chunk of a complete upload, so that a driver that adopts requests has their tensors
    too. Refused for a hash that no complete upload has, or an offset that it does not have
    (CONFIG)."""

    epoch: Unsigned
    content_hash: ContentHash
    offset: Unsigned
    """A multiple of 524288."""


class ReadUploadReply(ControlReply, frozen=True, tag=45, kw_only=True):
    dtype: UploadDtype
    shape: UploadShape
    data: Annotated[bytes, Meta(min_length=1, max_length=CHUNK_BYTES)]
    """524288 bytes, or the remainder at the tensor's end."""


class DropUploads(ControlRequest[Acknowledged], frozen=True, tag=42, kw_only=True):
    """Drop these uploads, complete or not; missing ones are no error. While the lease lasts, only a
    Reset drops other uploads."""

    epoch: Unsigned
    content_hashes: ContentHashes


def tensor_bytes(dtype: UploadDtype, shape: Sequence[int]) -> int:
    """Return the size of a tensor."""
    return ITEM_BYTES[dtype] * prod(shape)


def chunk_digest(data: Buffer) -> bytes:
    """Return the digest of a chunk's bytes."""
    return blake2b(data, digest_size=HASH_BYTES, person=b"upload chunk").digest()


def content_hash(dtype: UploadDtype, shape: Sequence[int], digests: Iterable[bytes]) -> bytes:
    """Return the hash that names a tensor, as defined by UploadChunk, from its chunk digests in
    order.

    It is computed from digests, so that chunks can be hashed as they arrive, in any order, and
    never all at once.
    """
    whole = blake2b(digest_size=HASH_BYTES, person=b"upload")
    whole.update(f"{dtype} {','.join(map(str, shape))}\n".encode("ascii"))
    for digest in digests:
        whole.update(digest)
    return whole.digest()
