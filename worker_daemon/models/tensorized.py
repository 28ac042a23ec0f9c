"""Reads and writes files of the tensorizer library, an optional extra, a tensor at a time.

Only the library's plain local files are used, whose format stores names, dtypes, shapes, hashes and
bytes in its own structs. Its other features (URIs, encryption, torch.save) are not used: it gets an
open file, never a name.
"""

import contextlib
import os
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from torch import Tensor

from rpc_schema.errors import CheckpointError
from worker_daemon.errors import config_error
from worker_daemon.models.saved_set import TENSORS_SUFFIX, FileKind
from worker_daemon.models.tensor_bytes import checksum, num_bytes
from worker_daemon.models.weights import Item
from worker_daemon.regular_file import RegularFile, broken_file

TENSORIZER_PATTERN: Final = "model-rank-{rank}-part-{part}.tensors"
_MALFORMED: Final = (
    *(struct.error, ValueError, TypeError, KeyError, IndexError, AttributeError),
    *(OverflowError, MemoryError, RuntimeError, EOFError, OSError, AssertionError),
)
"""Exceptions that the library raises for a damaged file, besides its own HashMismatchError."""


def require_tensorizer(field: str, value: object) -> Any:
    """Return the library.

    Raises:
        ConfigError: it is not installed. field, value: the setting that needs it.
    """
    try:
        import tensorizer  # optional, and takes two seconds to import
    except ImportError as error:
        problem = f"the tensorizer library cannot be loaded ({error})"
        fix = 'pip install "worker-daemon[tensorizer]", or use sharded_state'
        raise config_error(field, value, problem, fix) from error
    return tensorizer


def tensorizer_files(field: str, value: object) -> FileKind:
    """Return the file format that the library writes. Raises as require_tensorizer does."""
    library = require_tensorizer(field, value)

    def write(file: BinaryIO, tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
        # The library closes its file, which must still be synced to disk.
        with open(os.dup(file.fileno()), "wb+", buffering=0) as own:  # noqa: PTH123  # a number
            serializer = library.TensorSerializer(own, limit_cpu_concurrency=_num_threads())
            try:
                checksums = {
                    name: _write(library, serializer, name, tensor)
                    for name, tensor in tensors.items()
                }
            except BaseException:
                with contextlib.suppress(*_MALFORMED):
                    serializer.close()
                raise
            serializer.close()
        return checksums

    return FileKind("tensorizer", TENSORS_SUFFIX, write)


def _write(library: Any, serializer: Any, name: str, tensor: Tensor) -> bytes:
    digest = checksum(tensor)
    serializer.write_tensor(0, name, library.TensorType.PARAM, tensor.detach())
    return digest


def read_tensorized(path: Path, items: Iterable[Item], advance: Callable[[int], None]) -> None:
    """Fill the pieces of a file's items; advance is called with the number of parameter bytes.

    Raises:
        ConfigError: the library is not installed.
        CheckpointError: the file is missing or damaged, or a tensor is missing, or differs in shape
            or dtype from the saved one. The loaded tensors must be discarded.
    """
    library = require_tensorizer("load_format", "tensorizer")
    wanted: defaultdict[str, list[Item]] = defaultdict(list)
    for parameter, piece in items:
        wanted[piece.name].append((parameter, piece))
    malformed = (*_MALFORMED, library.serialization.HashMismatchError)
    try:
        RegularFile(path).close()  # a FIFO, say, could block forever
        with (
            path.open("rb") as file,
            contextlib.closing(
                library.TensorDeserializer(file, device="cpu", lazy_load=True, verify_hash=True)
            ) as source,
        ):
            for _, _, name, tensor in source.read_tensors(filter_func=wanted.__contains__):
                for item in wanted.pop(name, ()):
                    advance(_fill(path, item, tensor))
    except FileNotFoundError as error:
        raise _broken(path, "is missing") from error
    except malformed as error:
        raise _broken(path, f"is truncated or not a tensorizer file ({error!r})") from error
    if wanted:
        raise _broken(path, f"has no tensor {min(wanted)}")


def _fill(path: Path, item: Item, tensor: Tensor) -> int:
    parameter, piece = item
    target = parameter.data[piece.target]
    if tensor.shape != target.shape or tensor.dtype != target.dtype:
        raise _broken(
            path,
            f"has {piece.name} as {tensor.dtype} {tuple(tensor.shape)}, "
            f"this rank holds {target.dtype} {tuple(target.shape)}",
        )
    with torch.no_grad():
        target.copy_(tensor)
    return num_bytes(target)


def _num_threads() -> int:
    return max(1, torch.get_num_threads())


def _broken(path: Path, problem: str) -> CheckpointError:
    fix = "name a set that save_tensorized_model wrote, or save it again"
    return broken_file(path, problem, fix)
