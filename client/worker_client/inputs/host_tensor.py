"""A tensor in the driver's memory, named by the hash of its content."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from rpc_schema import uploads as up
from rpc_schema.base import HASH_BYTES
from worker_client.errors import ClientConfigError


class HostTensor(NamedTuple):
    """A tensor to upload. Making one hashes it (a second for a gigabyte); any thread may."""

    dtype: up.UploadDtype
    shape: tuple[int, ...]
    data: memoryview
    """uint8 [bytes], row-major and little-endian; must not change before it is uploaded."""
    content_hash: bytes

    @property
    def is_whole(self) -> bool:
        """True if its fields fit each other, as those of from_array and from_bytes do."""
        sizes, data, name = self[1:]
        return (
            isinstance(self.dtype, str)
            and self.dtype in up.ITEM_BYTES
            and isinstance(sizes, tuple)
            and all(type(size) is int and size > 0 for size in sizes)
            and isinstance(data, memoryview)
            and (data.format, data.ndim, data.c_contiguous) == ("B", 1, True)
            and data.nbytes == up.tensor_bytes(self.dtype, sizes)
            and isinstance(name, bytes)
            and len(name) == HASH_BYTES
        )

    @classmethod
    def from_array(cls, array: NDArray[Any]) -> "HostTensor":
        """Wrap an array of one of the dtypes, without a copy if it is contiguous.

        Raises:
            ClientConfigError: the dtype or the shape cannot be uploaded.
        """
        _check_dtype(array.dtype.name)
        plain = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        return cls.from_bytes(plain.dtype.name, array.shape, plain.reshape(-1).view(np.uint8).data)

    @classmethod
    def from_bytes(cls, dtype: str, shape: Sequence[int], data: up.Buffer) -> "HostTensor":
        """Wrap the bytes of any of the dtypes: bfloat16 too, which numpy does not have. Raises as
        from_array does, and ClientConfigError: the number of bytes is not that of the shape."""
        _check_dtype(dtype)
        kind, sizes = cast("up.UploadDtype", dtype), tuple(map(int, shape))
        num_bytes = up.tensor_bytes(kind, sizes)
        if not 1 <= len(sizes) <= up.MAX_DIMENSIONS or min(sizes) < 1:
            raise ClientConfigError(
                "a tensor of this shape cannot be uploaded",
                field="shape",
                value=sizes,
                fix=f"use 1 to {up.MAX_DIMENSIONS} dimensions, none of them empty",
            )
        if num_bytes > up.MAX_UPLOAD_BYTES:
            raise ClientConfigError(
                f"the tensor has {num_bytes} bytes",
                field="shape",
                value=sizes,
                fix=f"upload parts of at most {up.MAX_UPLOAD_BYTES} bytes",
            )
        given = memoryview(data)
        if given.nbytes != num_bytes or not given.c_contiguous:
            raise ClientConfigError(
                f"a tensor of {dtype} {list(sizes)} has {num_bytes} bytes, without gaps",
                field="data",
                value=f"{given.nbytes} bytes",
                fix="give all of its bytes, row-major, and no others",
            )
        view = given.cast("B")
        offsets = range(0, num_bytes, up.CHUNK_BYTES)
        digests = (up.chunk_digest(view[begin : begin + up.CHUNK_BYTES]) for begin in offsets)
        return cls(kind, sizes, view, up.content_hash(kind, sizes, digests))


def _check_dtype(dtype: str) -> None:
    if dtype not in up.ITEM_BYTES:
        raise ClientConfigError(
            "tensors of this dtype cannot be uploaded",
            field="dtype",
            value=dtype,
            fix=f"use one of {', '.join(up.ITEM_BYTES)}",
        )
