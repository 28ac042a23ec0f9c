"""Reads files of embeddings, .npy or .safetensors, in an input file's directory or below it.
Follows no link out of that directory, and executes nothing from a file."""

import os
import stat
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
import numpy as np

from rpc_schema.uploads import MAX_UPLOAD_BYTES
from worker_client.errors import ClientConfigError, RequestError
from worker_client.inputs.host_tensor import HostTensor
from worker_client.inputs.prompt_embeds import host_tensor

MAX_HEADER_BYTES: Final = 1 << 20
_SAFETENSORS_DTYPES: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_SOLE_TENSOR = "prompt_embeds"
"""Name of the tensor to read from a file with several."""


class _TensorEntry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class EmbedsFiles:
    """Reader of the files in one directory and below. Each file is read once and kept, for all
    requests that name it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[str, HostTensor] = {}

    def read(self, name: str) -> HostTensor:
        """Return the embeddings of a file.

        Raises:
            RequestError: it is not below the directory, cannot be read, is larger than an upload
                may be, or has no tensor that can be a prompt's embeddings.
        """
        if name not in self._read:
            try:
                self._read[name] = self._open_and_read(name)
            except (OSError, ValueError, msgspec.DecodeError, ClientConfigError) as error:
                if isinstance(error, RequestError):
                    raise
                raise _refused(name, str(error)) from None
        return self._read[name]

    def _open_and_read(self, name: str) -> HostTensor:
        if "\0" in name:
            raise _refused("a name with a zero byte", "name a file")
        path = self._directory / name
        parts = Path(name).parts
        inside = path.resolve().is_relative_to(self._directory.resolve())
        if Path(name).is_absolute() or ".." in parts or not inside:
            raise _refused(name, "name a file in the input file's directory, or below it")
        readers = {".npy": _read_npy, ".safetensors": _read_safetensors}
        if path.suffix not in readers:
            raise _refused(name, "name a .npy or .safetensors file")
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            facts = os.fstat(fd)
            if not stat.S_ISREG(facts.st_mode):
                raise _refused(name, "name a regular file")
            if facts.st_size > MAX_UPLOAD_BYTES + MAX_HEADER_BYTES:
                raise _refused(name, f"use a file of at most {MAX_UPLOAD_BYTES} bytes")
            return readers[path.suffix](name, file, facts.st_size)


def _read_npy(name: str, file: BinaryIO, num_bytes: int) -> HostTensor:
    version = np.lib.format.read_magic(file)
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:
        raise _refused(name, "save the array with numpy.save")
    shape, is_fortran, dtype = readers[version](file)
    size = prod(shape) * dtype.itemsize
    if dtype.hasobject or is_fortran or file.tell() + size != num_bytes:
        raise _refused(name, "save a plain array, row-major and complete")
    values: np.ndarray[Any, Any] = np.frombuffer(file.read(size), dtype)
    return host_tensor(values.reshape(shape))


def _read_safetensors(name: str, file: BinaryIO, num_bytes: int) -> HostTensor:
    header_bytes = int.from_bytes(file.read(8), "little")
    if header_bytes > min(MAX_HEADER_BYTES, num_bytes):
        raise _refused(name, f"use a file with a header of at most {MAX_HEADER_BYTES} bytes")
    raw = msgspec.json.decode(file.read(header_bytes), type=dict[str, msgspec.Raw])
    raw.pop("__metadata__", None)
    wanted = next(iter(raw)) if len(raw) == 1 else _SOLE_TENSOR
    if wanted not in raw:
        raise _refused(name, f"save one tensor, or one that is named {_SOLE_TENSOR}")
    entry = msgspec.json.decode(raw[wanted], type=_TensorEntry)
    begin, end = entry.data_offsets
    if not 0 <= begin <= end <= num_bytes - 8 - header_bytes or min(entry.shape, default=0) < 1:
        raise _refused(name, "save the tensor again: the file is damaged, or the tensor empty")
    file.seek(8 + header_bytes + begin)
    dtype = _SAFETENSORS_DTYPES.get(entry.dtype)
    if dtype is None:
        raise _refused(entry.dtype, f"use one of {', '.join(_SAFETENSORS_DTYPES)}")
    return host_tensor(HostTensor.from_bytes(dtype, entry.shape, file.read(end - begin)))


def _refused(value: object, fix: str) -> RequestError:
    return RequestError(
        "the file of embeddings is refused", field="prompt_embeds", value=value, fix=fix
    )
