"""A safetensors file, open for reading: its header, which is checked in full before any tensor is
read, and the tensors' bytes.

The format: eight bytes with the length of the header (little-endian), the header (a JSON object:
name -> dtype, shape, data_offsets; `__metadata__` is free text), then the tensors' bytes without
gaps; offsets count from their start.
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from worker_daemon.models.expert_tensors import plain_expert_name, stacked_part
from worker_daemon.models.row_reader import read_rows
from worker_daemon.regular_file import RegularFile, TruncatedError

FLOAT_DTYPES: Final = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
    }
)
"""The dtypes of unquantized tensors, by their names in the format."""
LOADED_DTYPES: Final = MappingProxyType(
    {
        **FLOAT_DTYPES,
        "F8_E4M3": torch.float8_e4m3fn,
        "I32": torch.int32,
        "I64": torch.int64,
        "U8": torch.uint8,
    }
)
"""The dtypes that are loaded, by their names in the format."""
_OTHER_SIZES: Final = MappingProxyType({"BOOL": 1, "I8": 1, "I16": 2, "U16": 2, "U32": 4, "U64": 8})
"""Bytes per element of dtypes that are not loaded. For others the size is not checked."""
_T = TypeVar("_T")
_BARE_NAMES: Final = ("embed_tokens.", "layers.", "norm.")
_TEXT_PREFIXES: Final = MappingProxyType(
    {
        "model.language_model.": "model.",
        "language_model.model.": "model.",
        "language_model.": "",
    }
)
"""Prefixes of the text model's tensors in multimodal checkpoints, and their replacements: the names
of transformers since 4.52, those of most published checkpoints, and those of the latter's LM head.
The first prefix that matches is replaced."""
_ADAPTER: Final = "base_model.model."
"""PEFT's prefix of a model's names."""
_ENCODERS: Final = ("bert.", "roberta.")
_OLD_NORMS: Final = MappingProxyType({"gamma": "weight", "beta": "bias"})
_SCALES: Final = MappingProxyType(
    {".weight_scale_inv": ".weight_scale", ".activation_scale": ".input_scale"}
)
"""transformers' names of scales, and those of compressed-tensors."""
_LENGTH_BYTES: Final = 8
_MAX_HEADER_BYTES: Final = 16 << 20
_MAX_ENTRIES: Final = 1 << 16
"""Entries of the header, and of its metadata."""
_MAX_VALUES: Final = 16 * _MAX_ENTRIES
"""Values of the header's JSON, counted by brackets and commas; a tensor of eight dimensions has 14.
They are counted before parsing, which holds the GIL."""
_METADATA: Final = "__metadata__"
_MAX_NAME_CHARS: Final = 4096
_BLOCK_BYTES: Final = 1 << 20
"""Bytes to convert at a time; small enough for the CPU cache."""


class MalformedError(Exception):
    """The file is not a safetensors file, or not a complete one."""


class Entry(NamedTuple):
    """A tensor in the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Offset from the start of the file."""
    end: int


def full_name(name: str) -> str:
    """Return a tensor's canonical name. Checkpoints of a bare model leave out the base model's
    prefix: canonical names of decoders have it, those of encoders do not. In multimodal checkpoints
    the text model has a separate prefix. Scales have the names of compressed-tensors, experts
    those of expert_tensors.py. Names in LoRA adapters follow the same rules after PEFT's prefix."""
    if name.startswith(_ADAPTER):
        return _ADAPTER + full_name(name.removeprefix(_ADAPTER))
    name = plain_expert_name(name)
    prefix = next((prefix for prefix in _TEXT_PREFIXES if name.startswith(prefix)), None)
    if prefix is not None:
        name = _TEXT_PREFIXES[prefix] + name.removeprefix(prefix)
    for theirs, suffix in _SCALES.items():
        if name.endswith(theirs):
            name = name.removesuffix(theirs) + suffix
    if name.startswith(_BARE_NAMES):
        return f"model.{name}"
    if not name.startswith((*_ENCODERS, "embeddings.", "encoder.")):
        return name
    for prefix in _ENCODERS:
        name = name.removeprefix(prefix)
    stem, _, last = name.rpartition(".")
    old = _OLD_NORMS.get(last) if stem.endswith("LayerNorm") else None
    return name if old is None else f"{stem}.{old}"


def by_full_name(values: Mapping[str, _T]) -> dict[str, _T]:
    """Return values by the canonical names of tensors. Raises MalformedError if two have one name,
    or a name is too long."""
    named: dict[str, _T] = {}
    for name, value in values.items():
        if len(name) > _MAX_NAME_CHARS:
            raise MalformedError(f"the name {name[:80]!r}... is too long")
        full = full_name(name)
        if full in named:
            raise MalformedError(f"it has {full} twice, once as {name}")
        named[full] = value
    return named


class SafetensorsFile:
    """Owns the open file until close()."""

    def __init__(self, path: Path) -> None:
        """Open the file and check its header against its size.

        Raises:
            OSError: it cannot be read, or is not a regular file.
            MalformedError: it is truncated or not a safetensors file.
        """
        self.path = path
        self._file = RegularFile(path)
        try:
            entries = _read_entries(self._file)
            self.entries = by_full_name(entries)
        except TruncatedError as error:
            self.close()
            raise MalformedError("it ends within its header") from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "SafetensorsFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def find(self, name: str) -> Entry | None:
        """Return the entry of a tensor, which may be an expert's in a stacked one; None if the file
        has no such tensor."""
        entry, part = self.entries.get(name), stacked_part(name)
        if entry is not None or part is None or part.name not in self.entries:
            return entry
        stack = self.entries[part.name]
        shape = part.shape_in(stack.shape)
        if shape is None:
            return None
        size = (stack.end - stack.begin) // (stack.shape[0] * part.halves)
        begin = stack.begin + (part.expert * part.halves + part.half) * size
        return Entry(stack.dtype, shape, begin, begin + size)

    def check_whole(self, name: str) -> None:
        """Raise TruncatedError if the file is now too short for a tensor."""
        self._file.check_reaches(self._found(name).end)

    def read(self, name: str) -> Tensor:
        """Return a tensor on the CPU. Raises as read_into()."""
        entry = self._found(name)
        values = torch.empty(entry.shape, dtype=LOADED_DTYPES[entry.dtype])
        self.read_into(name, tuple(slice(0, size) for size in entry.shape), values)
        return values

    def read_into(self, name: str, region: tuple[slice, ...], target: Tensor) -> None:
        """Fill a target on the CPU with a region of a tensor (slices with explicit bounds) of the
        same shape, converted to the target's dtype.

        Raises:
            OSError: the file cannot be read. After either the target is neither old nor new.
            TruncatedError: the file has become shorter.
        """
        entry = self._found(name)
        dtype = LOADED_DTYPES[entry.dtype]
        rows = row_span(entry.shape, region, dtype.itemsize)
        start = entry.begin + rows.offset
        if not target.numel():
            return
        if target.dtype == dtype and target.is_contiguous():
            read_rows(self._file, start, rows.width, rows.stride, _bytes_of(target))
            return
        matrix = target.unsqueeze(0) if target.dim() == 0 else target
        at_once = max(1, _BLOCK_BYTES // rows.width)
        block = torch.empty((at_once, *matrix.shape[1:]), dtype=dtype)
        for first in range(0, len(matrix), at_once):
            part = block[: len(matrix) - first]
            offset = start + first * rows.stride
            read_rows(self._file, offset, rows.width, rows.stride, _bytes_of(part))
            matrix[first : first + at_once].copy_(part)

    def _found(self, name: str) -> Entry:
        entry = self.find(name)
        assert entry is not None, "found before"
        return entry


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    flat: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return flat


class RowSpan(NamedTuple):
    """The position of a region's rows in a tensor's bytes."""

    offset: int
    """Offset of the first row."""
    width: int
    stride: int


def row_span(shape: tuple[int, ...], region: tuple[slice, ...], itemsize: int) -> RowSpan:
    """Return the rows of a region of a tensor in row-major order. A vector has rows of one element;
    dimensions after the second are complete."""
    if not region:
        return RowSpan(0, itemsize, itemsize)
    stride = math.prod(shape[1:]) * itemsize
    column_bytes = math.prod(shape[2:]) * itemsize
    columns = region[1] if len(region) > 1 else slice(0, 1)
    return RowSpan(
        offset=region[0].start * stride + columns.start * column_bytes,
        width=(columns.stop - columns.start) * column_bytes,
        stride=stride,
    )


def _read_entries(file: RegularFile) -> dict[str, Entry]:
    length = bytearray(_LENGTH_BYTES)
    file.read(0, memoryview(length))
    num_bytes = int.from_bytes(length, "little")
    base = _LENGTH_BYTES + num_bytes
    if num_bytes > _MAX_HEADER_BYTES or base > file.num_bytes:
        raise MalformedError(f"its header would have {num_bytes} bytes")
    text = bytearray(num_bytes)
    file.read(_LENGTH_BYTES, memoryview(text))
    header = _parse(text)
    _check_metadata(header.pop(_METADATA, None))
    _check_number(header)
    entries = {name: _entry(name, value, base) for name, value in header.items()}
    _check_layout(entries.values(), base, file.num_bytes)
    return entries


def _parse(text: bytearray) -> dict[str, object]:
    if sum(text.count(sign) for sign in b"[{,") > _MAX_VALUES:
        raise MalformedError(f"its header has more than {_MAX_VALUES} values")
    try:
        header = json.loads(text.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"its header is not a JSON object ({error})") from error
    if not isinstance(header, dict):
        raise MalformedError("its header is not a JSON object")
    return header


def _check_metadata(metadata: object) -> None:
    """Raise MalformedError unless metadata maps names to strings, or is null."""
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(type(text) is str for text in metadata.values()):
        raise MalformedError(f"its {_METADATA} maps names to values that are not strings")
    _check_number(metadata)


def _check_number(entries: Mapping[str, object]) -> None:
    if len(entries) > _MAX_ENTRIES:
        raise MalformedError(f"its header has more than {_MAX_ENTRIES} entries")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a name occurs twice")
    return values


def _entry(name: str, value: object, base: int) -> Entry:
    shown = repr(name[:80])
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise MalformedError(f"its header does not describe {shown}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or not _are_sizes(shape) or not _are_sizes(offsets):
        raise MalformedError(f"its header has a wrong dtype, shape or offset of {shown}")
    if len(offsets) != 2 or len(name) > _MAX_NAME_CHARS:
        raise MalformedError(f"its header has wrong offsets of {shown}, or a name too long")
    begin, end = offsets
    known = LOADED_DTYPES[dtype].itemsize if dtype in LOADED_DTYPES else _OTHER_SIZES.get(dtype)
    if known is not None and math.prod(shape) * known != end - begin:
        raise MalformedError(f"{shown} has {end - begin} bytes, not those of its shape")
    return Entry(dtype, tuple(shape), base + begin, base + end)


def _are_sizes(values: object) -> bool:
    """Return True for a list of up to eight integers that may be sizes in a file."""
    return (
        isinstance(values, list)
        and len(values) <= 8
        and all(type(value) is int and 0 <= value < 1 << 63 for value in values)
    )


def _check_layout(entries: Iterable[Entry], base: int, num_bytes: int) -> None:
    """Raise MalformedError unless the tensors follow each other without gaps, up to the file's
    end."""
    at = base
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != at or entry.end < entry.begin:
            raise MalformedError("its tensors overlap, or leave a gap")
        at = entry.end
    if at != num_bytes:
        raise MalformedError(f"it has {num_bytes} bytes, and should have {at}")
