"""Tensors as bytes on the host, a chunk at a time: their checksums, and safetensors files of them.

Elements are row-major and little-endian, as in safetensors, so a tensor's file and checksum use the
same bytes.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import BinaryIO

import torch
from torch import Tensor

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int32: "I32",
}
"""The names of dtypes in safetensors' header."""
_CHUNK_BYTES = 16 << 20
_CHECKSUM_BYTES = 16
_LENGTH_BYTES = 8
_ALIGNMENT = 8


def checksum(tensor: Tensor) -> bytes:
    """Return the BLAKE2b-128 (RFC 7693) of a tensor's bytes; any strides, any device."""
    digest = hashlib.blake2b(digest_size=_CHECKSUM_BYTES)
    for chunk in _host_chunks(tensor):
        digest.update(chunk)
    return digest.digest()


def write_safetensors(file: BinaryIO, tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    """Write a complete safetensors file, with at most one chunk in memory; return each tensor's
    checksum. Raises OSError as the file does."""
    header = _header(tensors)
    file.write(len(header).to_bytes(_LENGTH_BYTES, "little") + header)
    return {name: _write(file, tensor) for name, tensor in tensors.items()}


def num_bytes(tensor: Tensor) -> int:
    """Return the size of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def _write(file: BinaryIO, tensor: Tensor) -> bytes:
    digest = hashlib.blake2b(digest_size=_CHECKSUM_BYTES)
    for chunk in _host_chunks(tensor):
        digest.update(chunk)
        file.write(chunk)
    return digest.digest()


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    entries, start = {}, 0
    for name, tensor in tensors.items():
        stop = start + num_bytes(tensor)
        entries[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % _ALIGNMENT)


def _host_chunks(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the rows in order, as many as fit a chunk, but at least one at a time."""
    step = max(1, _CHUNK_BYTES * tensor.shape[0] // max(1, num_bytes(tensor)))
    for start in range(0, tensor.shape[0], step):
        rows = tensor[start : start + step].contiguous().cpu()
        yield rows.flatten().view(torch.uint8).numpy().data
