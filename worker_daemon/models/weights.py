"""Fills the parameters of a stage from safetensors files, or with dummy values.

Each parameter names the regions of checkpoint tensors that it needs; only those are kept. On the
CPU they are read directly into place, on a device through page-locked buffers (`staged.py`). Both
paths read by position, so a file that shrinks in the meantime causes an error, not a signal. Values
are converted to the parameter's dtype; those that are quantized, dequantized or put into another
order arrive a few tensors at a time. An error leaves the stage half filled: discard it.
"""

import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from rpc_schema.errors import CheckpointError
from worker_daemon.layers.parameter import Kind, Parameter, Piece, TensorSpec
from worker_daemon.models.dummy import fill_dummy, max_chunk_elements
from worker_daemon.models.expert_tensors import stacked_part
from worker_daemon.models.safetensors_file import (
    FLOAT_DTYPES,
    LOADED_DTYPES,
    Entry,
    MalformedError,
    SafetensorsFile,
    by_full_name,
    row_span,
)
from worker_daemon.models.staged import MAX_READERS, Extent, read_staged
from worker_daemon.raising import Translation
from worker_daemon.regular_file import TruncatedError, broken_file, is_plain_name, read_whole

SINGLE_FILE: Final = "model.safetensors"
INDEX_NAME: Final = "model.safetensors.index.json"
"""Names the file of each tensor."""
_SUFFIX = ".safetensors"

_EXPECTED: Final[Mapping[Kind, str]] = MappingProxyType(
    {
        "fp8": "in FP8",
        "int4": "int32 words of 4-bit values",
        "int4_zero": "int32 words",
        "mxfp4": "bytes of 4-bit values (uint8)",
        "mxfp4_scale": "exponents (uint8)",
    }
)
_ARRIVAL_BYTES = 256 << 20
"""Bytes that wait for their conversion at a time, unless a single tensor has more."""
_COMPARED_BYTES = 8 << 20
"""Bytes of two tensors that are compared at a time, unless a single row has more."""
_PART_BYTES = 64 << 20
"""Bytes of a tensor that are read at a time for an update, unless a single row has more."""

Item: TypeAlias = tuple[Parameter, Piece]


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Progress of a load, in bytes of this rank's parameters."""

    bytes_done: int
    bytes_total: int
    seconds: float
    """Seconds since the load began."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The result of a finished load."""

    bytes_loaded: int
    seconds: float
    ignored_tensors: tuple[str, ...]
    """Tensors of the checkpoint that no stage of the model uses, sorted."""


class _Conversion(NamedTuple):
    """An item whose values pass through Parameter.write()."""

    item: Item
    paths: tuple[Path, ...]
    """The files of the tensors that it is read from, in the order of Piece.file_pieces."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the values as they arrive."""
        parameter, piece = self.item
        return sum(
            math.prod(part.source_shape) * parameter.arrival_dtype(part).itemsize
            for part in piece.file_pieces
        )

    def arrivals(self) -> list[Item]:
        """Return memory for the values of its tensors."""
        parameter, piece = self.item
        return [_arrival(parameter, part) for part in piece.file_pieces]


OnProgress = Callable[[LoadProgress], None]
LoadFile = Callable[[Path, Sequence[Item], Callable[[int], None]], None]
"""Loads a file: (file, the items that it fills, a callback for the number of parameter bytes)."""


class WriteObserver:
    """Receives the names of checkpoint tensors that are being overwritten on a rank. This base
    class ignores them, for a first load, which overwrites nothing."""

    def writing(self, names: Iterable[str]) -> None:
        """Receive names of tensors that now hold neither old nor new values."""

    def written(self, names: Iterable[str]) -> None:
        """Receive names of tensors that are complete."""


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A file's header entry of one tensor."""

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


def load_weights(
    parameters: Iterable[Parameter],
    model_dir: Path,
    known_names: Collection[str],
    progress: OnProgress,
    observer: WriteObserver | None = None,
) -> LoadReport:
    """Load from model.safetensors, or from the shards of model.safetensors.index.json.

    known_names are the tensors that the whole model reads (`decoder.checkpoint_names`); others in
    the checkpoint are reported, not loaded. progress is called after every tensor or buffer. An
    observer is called around every tensor on a CPU, and around all of them together on a device,
    except those that pass through Parameter.write(): around each of them. Raises CheckpointError,
    before the first byte is read, naming the file or tensor that is missing, truncated or not of
    the expected shape or type; later if a file changes meanwhile.
    """
    files = _tensor_files(model_dir)
    items = [
        (parameter, _without_other_name(piece, files))
        for parameter in parameters
        for piece in parameter.loaded_pieces
    ]
    read = [(parameter, part) for parameter, piece in items for part in piece.file_pieces]
    check_items(_group_by_file(read, files, model_dir))
    converted = [_conversion(item, files, model_dir) for item in items if item[0].converts(item[1])]
    direct = (item for item in items if not item[0].converts(item[1]))
    wanted = _group_by_file(direct, files, model_dir)
    stacks = {part.name for part in map(stacked_part, known_names) if part is not None}
    ignored = tuple(sorted(files.keys() - set(known_names) - stacks))
    return load_items(wanted, progress, ignored, observer=observer, converted=converted)


def load_items(
    wanted: Mapping[Path, Sequence[Item]],
    progress: OnProgress,
    ignored_tensors: tuple[str, ...],
    load_file: LoadFile | None = None,
    observer: WriteObserver | None = None,
    converted: Sequence[_Conversion] = (),
) -> LoadReport:
    """Fill the pieces of each file's items, by load_file if given, then those whose values are
    converted. Calls progress and raises like load_weights."""
    observer = observer or WriteObserver()
    num_bytes = sum(map(_total_bytes, wanted.values()))
    meter = _Meter(num_bytes + _total_bytes(each.item for each in converted), progress)
    device = next((item[0].data.device for items in wanted.values() for item in items), None)
    if load_file is not None:
        for path, items in wanted.items():
            names = {piece.name for _, piece in items}
            observer.writing(names)
            load_file(path, items, meter.advance)
            observer.written(names)
    elif device is None or device.type == "cpu":
        for path, items in wanted.items():
            _load_file(path, items, meter, observer)
    else:
        names = {piece.name for items in wanted.values() for _, piece in items}
        observer.writing(names)  # copies of all of them may be running at the same time
        load_through_buffers(wanted, device, meter.advance)
        observer.written(names)
    for batch in _batches(sorted(converted, key=lambda each: each.paths[0])):
        _convert(batch, meter, observer)
    return meter.report(ignored_tensors)


def _conversion(item: Item, files: Mapping[str, Path], model_dir: Path) -> _Conversion:
    names = [piece.name_among(files) for piece in item[1].file_pieces]
    return _Conversion(item, tuple(_file_of(name, files, model_dir) for name in names))


def _without_other_name(piece: Piece, files: Mapping[str, Path]) -> Piece:
    """Return a piece that is not read under its alias if the checkpoint has its own name."""
    return piece if piece.alias is None or piece.name not in files else replace(piece, alias=None)


def _convert(
    batch: Sequence[Sequence[_Conversion]], meter: "_Meter", observer: WriteObserver
) -> None:
    """Load the tensors of a batch into temporary memory; convert them into their parameters."""
    arrived: defaultdict[Path, list[Item]] = defaultdict(list)
    arrivals = [[conversion.arrivals() for conversion in tensor] for tensor in batch]
    for conversion, memory in zip(chain(*batch), chain(*arrivals), strict=True):
        for path, item in zip(conversion.paths, memory, strict=True):
            arrived[path].append(item)
    load_items(arrived, _ignore_progress, ())
    for tensor, memories in zip(batch, arrivals, strict=True):
        name = (tensor[0].item[1].name,)
        observer.writing(name)
        for conversion, memory in zip(tensor, memories, strict=True):
            parameter, piece = conversion.item
            values = piece.from_files([arrival.data for arrival, _ in memory])
            parameter.write(piece.target, values)
        observer.written(name)
        meter.advance(_total_bytes(conversion.item for conversion in tensor))


def _batches(converted: Iterable[_Conversion]) -> Iterator[list[list[_Conversion]]]:
    """Yield batches of tensors, each tensor as the list of its conversions. `converted` must have
    the conversions of one tensor next to each other."""
    batch: list[list[_Conversion]] = []
    size = 0
    for _, group in groupby(converted, key=lambda each: each.item[1].name):
        tensor = list(group)
        num_bytes = sum(each.num_bytes for each in tensor)
        if batch and size + num_bytes > _ARRIVAL_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(tensor)
        size += num_bytes
    if batch:
        yield batch


def _by_tensor(items: Iterable[Item]) -> Iterator[tuple[str, list[Item]]]:
    """Yield each checkpoint tensor's name and items, which follow each other."""
    for name, tensor in groupby(items, key=lambda item: item[1].name):
        yield name, list(tensor)


def _arrival(parameter: Parameter, piece: Piece) -> Item:
    """Return memory for the values of a piece, before they are converted."""
    shape, dtype = piece.source_shape, parameter.arrival_dtype(piece)
    whole = tuple(slice(0, size) for size in shape)
    memory = Parameter(shape, (), name=piece.name, dtype=dtype, device=parameter.data.device)
    return memory, replace(piece, target=whole, arrange=None, packed=None)


def _ignore_progress(progress: LoadProgress) -> None:
    return None


def load_through_buffers(
    wanted: Mapping[Path, Sequence[Item]], device: torch.device, advance: Callable[[int], None]
) -> None:
    """Fill the pieces of each file's items on any device, through page-locked buffers. advance is
    called with the number of parameter bytes. Raises like load_weights."""
    extents = {path: list(_extents(path, items)) for path, items in wanted.items()}
    num_readers = max(2, min(MAX_READERS, torch.get_num_threads()))
    try:
        read_staged(extents, device, advance, num_readers=num_readers)
    except TruncatedError as error:
        raise _broken(error.path, "is truncated") from error
    except OSError as error:
        path = next(iter(wanted)).parent
        raise _broken(path, f"holds a file that cannot be read ({error})") from error
    for parameter, piece in (item for items in wanted.values() for item in items):
        parameter.repeat(piece)


def check_checkpoint(model_dir: Path, pieces: Iterable[Piece]) -> None:
    """Check the headers of a complete checkpoint: every tensor of the model, on any rank, exists
    with its shape and a fitting dtype, and no file is truncated. Reads no weights. pieces:
    `decoder.checkpoint_pieces`.

    Raises:
        CheckpointError: a check failed; names file and tensor.
    """
    stored = tensor_names(model_dir)
    tensors = {piece.name_among(stored): piece.spec for piece in pieces}
    headers = read_headers(model_dir, tensors)
    for name, spec in tensors.items():
        found = headers[name]
        if not spec.fits(found.shape):
            problem = f"has {name} in shape {found.shape}, the loaded model has {spec.shape}"
            raise _broken(found.path, problem)
        if not spec.takes(found.dtype):
            raise _other_format(found.path, name, spec, found.dtype)


def check_items(wanted: Mapping[Path, Sequence[Item]]) -> None:
    """Check the headers of each file's items. Raises like load_weights, before any byte is read."""
    for path, items in wanted.items():
        with _open(path) as file:
            for _, piece in items:
                _checked_entry(file, piece)


def weight_files(model_dir: Path, single: str = SINGLE_FILE) -> tuple[Path, ...]:
    """Return the files that load_weights reads tensors from, sorted. single: the name of one that
    has all. Raises CheckpointError if there are none, or their index is broken."""
    return tuple(sorted(set(_tensor_files(model_dir, single).values())))


def has_tensors(model_dir: Path) -> bool:
    """Return True if a directory has the safetensors files of a checkpoint, or their index."""
    return (model_dir / SINGLE_FILE).exists() or (model_dir / INDEX_NAME).exists()


def hold_the_same(model_dir: Path, first: str, second: str) -> bool:
    """Return True if two tensors of a checkpoint are unquantized, of one shape, and have the same
    values (NaN equals nothing). Dtypes may differ: values are compared in one that holds both.
    Reads up to the first difference. Raises CheckpointError as read_headers does."""
    headers = read_headers(model_dir, (first, second))
    one, other = headers[first], headers[second]
    are_floats = {one.dtype, other.dtype} <= set(FLOAT_DTYPES.values())
    if one.shape != other.shape or not one.shape or not are_floats:
        return False
    dtype = torch.promote_types(one.dtype, other.dtype)
    step = max(1, _COMPARED_BYTES // max(1, math.prod(one.shape[1:]) * dtype.itemsize))
    with _open(one.path) as mine, _open(other.path) as its:
        for start in range(0, one.shape[0], step):
            stop = min(start + step, one.shape[0])
            region = (slice(start, stop), *(slice(0, size) for size in one.shape[1:]))
            parts = [torch.empty((stop - start, *one.shape[1:]), dtype=dtype) for _ in range(2)]
            for file, name, part in zip((mine, its), (first, second), parts, strict=True):
                with _reading(file.path, name):
                    file.read_into(name, region, part)
            if not torch.equal(*parts):
                return False
    return True


def tensor_names(model_dir: Path, single: str = SINGLE_FILE) -> frozenset[str]:
    """Return the names of all tensors of a checkpoint. single: as weight_files takes it. Raises
    CheckpointError as read_headers does."""
    return frozenset(_tensor_files(model_dir, single))


def read_headers(
    model_dir: Path, names: Iterable[str] = (), single: str = SINGLE_FILE
) -> dict[str, TensorHeader]:
    """Return the header entries of these tensors, in this order; without names those of all
    tensors, sorted. single: as weight_files takes it.

    Raises:
        CheckpointError: a tensor or file is missing or truncated, or of an unsupported dtype.
    """
    files = _tensor_files(model_dir, single)
    wanted = list(names) or sorted(files)
    by_file: defaultdict[Path, list[str]] = defaultdict(list)
    for name in wanted:
        by_file[_file_of(name, files, model_dir)].append(name)
    headers = {}
    for path, held in by_file.items():
        with _open(path) as file:
            for name in held:
                entry = _entry(file, name)
                headers[name] = TensorHeader(path, entry.shape, LOADED_DTYPES[entry.dtype])
    return {name: headers[name] for name in wanted}


def read_tensor(path: Path, name: str) -> Tensor:
    """Return a complete tensor on the CPU. Raises CheckpointError."""
    with _open(path) as file:
        _entry(file, name)
        with _reading(path, name):
            return file.read(name)


def read_parts(path: Path, name: str) -> Iterator[tuple[int, Tensor]]:
    """Yield a tensor in parts on the CPU: (index of the part's first row, rows). Raises
    CheckpointError."""
    with _open(path) as file:
        shape = _entry(file, name).shape
        if not math.prod(shape) or not shape:
            yield 0, read_tensor(path, name)
            return
        dtype = LOADED_DTYPES[_entry(file, name).dtype]
        step = max(1, _PART_BYTES // (math.prod(shape[1:]) * dtype.itemsize))
        for first in range(0, shape[0], step):
            part = (min(step, shape[0] - first), *shape[1:])
            values = torch.empty(part, dtype=dtype)
            region = (slice(first, first + part[0]), *(slice(0, size) for size in shape[1:]))
            with _reading(path, name):
                file.read_into(name, region, values)
            yield first, values


def load_dummy_weights(
    parameters: Iterable[Parameter],
    seed: int,
    progress: OnProgress,
    observer: WriteObserver | None = None,
) -> LoadReport:
    """Fill the parameters with values that depend only on name, full shape, index and seed
    (`dummy.py`)."""
    observer = observer or WriteObserver()
    items = [(parameter, piece) for parameter in parameters for piece in parameter.loaded_pieces]
    meter = _Meter(_total_bytes(items), progress)
    for batch in _dummy_batches(items):
        names = tuple(dict.fromkeys(piece.name for _, piece in batch))
        observer.writing(names)
        for _, alike in groupby(batch, key=_dummy_form):
            _fill_dummy(list(alike), seed)
        observer.written(names)
        meter.advance(_total_bytes(batch))
    return meter.report(())


def _dummy_batches(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Yield the items of consecutive tensors together, up to as many elements as fill_dummy
    computes at once. A larger tensor is alone."""
    batch: list[Item] = []
    num_elements = 0
    for _, tensor in _by_tensor(items):
        own = sum(math.prod(piece.source_shape) for _, piece in tensor)
        if batch and num_elements + own > max_chunk_elements(tensor[0][0].data.device):
            yield batch
            batch, num_elements = [], 0
        batch += tensor
        num_elements += own
    if batch:
        yield batch


def _dummy_form(item: Item) -> tuple[object, ...]:
    """Return what items have in common that one call of fill_dummy can fill."""
    parameter, piece = item
    return parameter.converts(piece), piece.kind, piece.source_shape, parameter.data.device


def _fill_dummy(items: Sequence[Item], seed: int) -> None:
    """Fill items of one form at once; those that are converted one by one."""
    parameter, piece = items[0]
    if not parameter.converts(piece):
        targets = [parameter.data[piece.target] for parameter, piece in items]
        fill_dummy(targets, [piece for _, piece in items], seed)
        return
    for parameter, piece in items:
        arrival, _ = _arrival(parameter, piece)
        fill_dummy([arrival.data], [piece], seed)
        parameter.write(piece.target, piece.arranged(arrival.data))


def _extents(path: Path, items: Iterable[Item]) -> Iterator[Extent]:
    """Return the place of each piece in the file."""
    with _open(path) as file:
        for parameter, piece in items:
            entry = _checked_entry(file, piece)
            target = parameter.memory_for(piece)
            if target.numel():
                dtype = LOADED_DTYPES[entry.dtype]
                rows = row_span(entry.shape, piece.source, dtype.itemsize)
                start = entry.begin + rows.offset
                yield Extent(start, rows.width, rows.stride, dtype, target)


class _Meter:
    """Counts bytes and time."""

    def __init__(self, bytes_total: int, progress: OnProgress) -> None:
        self._start_s = time.monotonic()
        self._bytes_done = 0
        self._bytes_total = bytes_total
        self._progress = progress

    def advance(self, num_bytes: int) -> None:
        self._bytes_done += num_bytes
        self._progress(LoadProgress(self._bytes_done, self._bytes_total, self._seconds()))

    def report(self, ignored_tensors: tuple[str, ...]) -> LoadReport:
        return LoadReport(self._bytes_done, self._seconds(), ignored_tensors)

    def _seconds(self) -> float:
        return time.monotonic() - self._start_s


def _total_bytes(items: Iterable[Item]) -> int:
    return sum(
        parameter.memory_for(piece).numel() * parameter.data.element_size()
        for parameter, piece in items
    )


def _tensor_files(model_dir: Path, name: str = SINGLE_FILE) -> Mapping[str, Path]:
    """Return tensor name -> the file that holds it."""
    single, index = model_dir / name, model_dir / INDEX_NAME
    if single.exists():
        with _open(single) as file:
            return dict.fromkeys(file.entries, single)
    if index.exists() and name == SINGLE_FILE:
        return _read_index(index)
    fix = f"provide {name}"
    if name == SINGLE_FILE:
        fix += f" or {INDEX_NAME} with its shards"
    if any(model_dir.glob("*.bin")) or any(model_dir.glob("*.pt")):
        fix += "; .bin and .pt files are pickles and are not read, convert them with safetensors"
    raise CheckpointError(
        f"{model_dir} has no safetensors weights", field="model", value=str(model_dir), fix=fix
    )


def _read_index(path: Path) -> Mapping[str, Path]:
    try:
        weight_map = json.loads(read_whole(path))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _broken(path, f"is not an index with a weight_map ({error})") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise _broken(path, "has a weight_map that is empty or not an object")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not is_plain_name(file, (_SUFFIX,)):
            shown = f"{tensor[:80]!r} to {file!r:.80}"
            raise _broken(path, f"maps {shown}, which is not a plain file name ending in {_SUFFIX}")
    try:
        return by_full_name({tensor: path.parent / file for tensor, file in weight_map.items()})
    except MalformedError as error:
        raise _broken(path, str(error)) from error


def _group_by_file(
    items: Iterable[Item], files: Mapping[str, Path], model_dir: Path
) -> Mapping[Path, list[Item]]:
    wanted: defaultdict[Path, list[Item]] = defaultdict(list)
    for parameter, piece in items:
        path = _file_of(piece.name_among(files), files, model_dir)
        wanted[path].append((parameter, piece))
    return wanted


def _file_of(name: str, files: Mapping[str, Path], model_dir: Path) -> Path:
    """Return the file that has a tensor, or the stacked one that it is a part of."""
    part = stacked_part(name)
    path = files.get(name) or (None if part is None else files.get(part.name))
    if path is None:
        raise _absent(model_dir, name)
    return path


def _load_file(path: Path, items: Iterable[Item], meter: _Meter, observer: WriteObserver) -> None:
    with _open(path) as file:
        for name, tensor in _by_tensor(items):
            _checked_entry(file, tensor[0][1])
            stored = tensor[0][1].name_among(file.entries)
            with _reading(path, stored):
                file.check_whole(stored)  # otherwise this tensor would be skipped with the file
                observer.writing((name,))
                for parameter, piece in tensor:
                    file.read_into(stored, piece.source, parameter.memory_for(piece))
            for parameter, piece in tensor:
                parameter.repeat(piece)
            observer.written((name,))
            meter.advance(_total_bytes(tensor))


def _open(path: Path) -> SafetensorsFile:
    try:
        return SafetensorsFile(path)
    except FileNotFoundError as error:
        raise _broken(path, "is missing") from error
    except PermissionError as error:
        fix = f"let user {os.geteuid()}, who runs the daemon, read it"
        raise _broken(path, "may not be read", fix) from error
    except (OSError, MalformedError) as error:
        raise _broken(path, f"is truncated or not a safetensors file ({error})") from error


def _reading(path: Path, name: str) -> Translation:
    def translate(error: Exception) -> CheckpointError:
        if isinstance(error, TruncatedError):
            return _broken(path, f"is truncated: it ends within {name}")
        return _broken(path, f"does not yield {name} ({error})")

    return Translation((TruncatedError, OSError), translate)


def _entry(file: SafetensorsFile, name: str) -> Entry:
    """Return the file's entry of a tensor, after a check of its dtype."""
    entry = file.find(name)
    if entry is None:
        raise _broken(file.path, f"has no tensor {name}, though the index says so")
    if entry.dtype not in LOADED_DTYPES:
        raise _broken(file.path, f"has {name} in dtype {entry.dtype}, which is not loaded")
    return entry


def _checked_entry(file: SafetensorsFile, piece: Piece) -> Entry:
    """Return the file's entry of the piece's tensor, after a check of its dtype and shape."""
    name = piece.name_among(file.entries)
    entry, spec = _entry(file, name), piece.spec
    if not spec.fits(entry.shape):
        problem = f"has {name} in shape {entry.shape}, config.json says {spec.shape}"
        raise _broken(file.path, problem)
    if not spec.takes(LOADED_DTYPES[entry.dtype]):
        raise _other_format(file.path, name, spec, LOADED_DTYPES[entry.dtype])
    return entry


def _other_format(path: Path, name: str, spec: TensorSpec, dtype: torch.dtype) -> CheckpointError:
    expected = _EXPECTED.get(spec.kind, "unquantized")
    problem = f"has {name} in {dtype}; by quantization_config of config.json it must be {expected}"
    fix = "correct quantization_config (its ignore list, or its absence); only layers are quantized"
    return _broken(path, problem, fix)


def _absent(model_dir: Path, name: str) -> CheckpointError:
    fix = "use weights that belong to this config.json"
    if name.startswith("lm_head."):
        fix += ", or set tie_word_embeddings in config.json if the head shares the embedding"
    problem = f"the checkpoint in {model_dir} has no tensor {name}"
    return CheckpointError(problem, field="tensor", value=name, fix=fix)


def _broken(path: Path, problem: str, fix: str = "download the file again") -> CheckpointError:
    return broken_file(path, problem, fix)
