"""Chunks of a tensor, with an independent implementation of the hash in docs/protocol.md."""

from hashlib import blake2b

from rpc_schema.uploads import UploadChunk

CUT = 524288


def reference_hash(dtype: str, shape: tuple[int, ...], data: bytes) -> bytes:
    """Return the hash of a tensor."""
    whole = f"{dtype} {str(list(shape))[1:-1].replace(' ', '')}\n".encode()
    for begin in range(0, len(data), CUT):
        whole += blake2b(data[begin : begin + CUT], digest_size=32, person=b"upload chunk").digest()
    return blake2b(whole, digest_size=32, person=b"upload").digest()


def chunks_of(
    dtype: str, shape: tuple[int, ...], data: bytes, name: bytes | None = None
) -> list[UploadChunk]:
    """Return all chunks, in order. name: used instead of the hash."""
    content_hash = reference_hash(dtype, shape, data) if name is None else name
    return [
        UploadChunk(
            call=1,
            epoch=1,
            content_hash=content_hash,
            dtype=dtype,
            shape=shape,
            offset=begin,
            data=data[begin : begin + CUT],
        )
        for begin in range(0, len(data), CUT)
    ]
