"""A saved set: the weights of a group on disk, as each rank holds them. Its layout, and reading it.

    NAME/index.json            the group's shape, and which save is in use; replacing this file
                               replaces the set
    NAME/SAVE/config.json      the model's config.json when it was loaded
    NAME/SAVE/rank-N.json      file, shape and checksum of each tensor of rank N
    NAME/SAVE/*.safetensors    the parts of tensors that a rank holds, by their checkpoint names;
                               or *.tensors, if the index names that format

`saving.py` writes sets.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

from torch import Tensor

from rpc_schema.errors import CheckpointError
from worker_daemon.errors import config_error
from worker_daemon.layers.experts import ExpertsSpec
from worker_daemon.layers.parameter import Parameter, Piece
from worker_daemon.layers.quantization import Int4Quantization, Quantization
from worker_daemon.models.description import DecoderConfig
from worker_daemon.models.tensor_bytes import checksum, write_safetensors
from worker_daemon.models.weights import (
    Item,
    LoadFile,
    LoadReport,
    OnProgress,
    WriteObserver,
    check_items,
    load_items,
)
from worker_daemon.regular_file import broken_file, is_plain_name, read_whole

INDEX_FILE = "index.json"
CONFIG_FILES = (
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "config_sentence_transformers.json",
)
"""Files of a model's directory that a set copies, if they exist."""
FORMAT = 1
_REPLICAS = "replicas_sharing_experts"
_SAVE_ID = re.compile(r"[0-9a-f]{32}")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class FileKind:
    """The file format of a set's tensors."""

    name: str
    """The name in the index."""
    suffix: str
    write: Callable[[BinaryIO, Mapping[str, Tensor]], dict[str, bytes]]
    """Writes a complete file, which is open at its start; returns each tensor's checksum. Raises
    OSError as the file does."""


SAFETENSORS = FileKind("safetensors", ".safetensors", write_safetensors)
TENSORS_SUFFIX = ".tensors"
"""Suffix of tensorizer's files."""
LOAD_FORMATS = {"safetensors": "sharded_state", "tensorizer": "tensorizer"}
"""The load_format that reads a set's files, by their name in the index."""


_EXPERT: Final = re.compile(r"\.experts\.\d+\.")
"""A part of the names of an expert's tensors."""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """The properties in which a group must match the one that saved; otherwise its ranks hold
    different parts."""

    pipeline_parallel_size: int
    tensor_parallel_size: int
    layer_partition: tuple[int, ...]
    """Layers of each stage."""
    dtype: str
    """float32, float16 or bfloat16."""
    enable_expert_parallel: bool = False
    replicas_sharing_experts: int = 1
    """Replicas that share the experts of each layer; 1: each has all of them."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks that hold different parts, or that other parts lie on."""
        return (
            self.replicas_sharing_experts * self.pipeline_parallel_size * self.tensor_parallel_size
        )


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """The entry of one tensor in a rank's index."""

    file: str
    shape: tuple[int, ...]
    checksum: bytes


@dataclass(frozen=True, slots=True)
class SavedSet:
    """The content of a set's index."""

    directory: Path
    """The directory of the save in use."""
    shape: GroupShape
    model: Mapping[str, object]
    """See model_fields."""
    files: str = SAFETENSORS.name
    """Name of the FileKind of the set's files."""
    version: int = 0
    """Number of the version of the saved weights."""

    def check_files(self, load_format: str) -> None:
        """Raise ConfigError unless this format reads the set."""
        fitting = LOAD_FORMATS[self.files]
        if load_format != fitting:
            problem = f"the files of the set in {self.directory.parent} are {self.files}'s"
            raise config_error("load_format", load_format, problem, fitting)

    def check(self, group: GroupShape, decoder: DecoderConfig) -> None:
        """Check that a group of this shape and model may load the set.

        Raises:
            ConfigError: the group has another shape or dtype.
            CheckpointError: config.json does not match the weights.
        """
        saved = asdict(self.shape)
        for name, wanted in asdict(group).items():
            if wanted != saved[name]:
                problem = f"the set in {self.directory.parent} was saved with another value"
                fix = f"load it with {saved[name]}, or save it again from a group of this shape"
                raise config_error(name, wanted, problem, fix)
        for name, value in model_fields(decoder).items():
            if value != self.model.get(name):
                raise CheckpointError(
                    f"config.json is not the saved model's, which has {self.model.get(name)!r}",
                    field=name,
                    value=value,
                    fix="put the saved config.json back, load with the same quantization as at the "
                    "save, or save the set again",
                )


def is_save_id(name: str) -> bool:
    """Return True if a directory of this name holds the files of one save."""
    return _SAVE_ID.fullmatch(name) is not None


def rank_index_name(rank: int) -> str:
    """Return the name of a rank's index."""
    return f"rank-{rank}.json"


def model_fields(decoder: DecoderConfig) -> dict[str, object]:
    """Return the fields of a model that determine the shapes of its weights."""
    experts = [None if spec is None else _expert_sizes(spec) for spec in decoder.layer_experts]
    fields: dict[str, object] = {
        "architecture": decoder.architecture,
        "vocab_size": decoder.vocab_size,
        "hidden_size": decoder.hidden_size,
        "intermediate_size": decoder.intermediate_size,
        "num_hidden_layers": decoder.num_hidden_layers,
        **_mixer_sizes(decoder),
        "tie_word_embeddings": decoder.tie_word_embeddings,
        "quantization": _format_name(decoder.quantization),
    }
    return fields | {"experts": experts} if any(experts) else fields


def _mixer_sizes(decoder: DecoderConfig) -> dict[str, object]:
    """Return the sizes of the layers' first blocks; of each layer, unless all have the same."""
    sizes = [layer.attention.weight_sizes for layer in decoder.layers]
    if all(each == sizes[0] for each in sizes):
        return dict(sizes[0])
    return {"mixers": [dict(each) for each in sizes]}


def _expert_sizes(spec: ExpertsSpec) -> list[int]:
    """Return the number of experts, their inner size, and that of the shared one."""
    shared = 0 if spec.shared is None else spec.shared.intermediate_size
    return [spec.num_experts, spec.intermediate_size, shared]


def _format_name(quantization: Quantization | None) -> str | None:
    """Return what determines the scales of a set; None for an unquantized model, as in older
    sets."""
    if quantization is None:
        return None
    ignored = quantization.ignored
    lists = [sorted(ignored.names), list(ignored.patterns), list(ignored.paths)]
    if isinstance(quantization, Int4Quantization):
        group = quantization.group_size or "row"
        zeros = "zeros" if quantization.has_zeros else "symmetric"
        order = "ordered" if quantization.has_order else "plain"
        return f"int4 {group} {zeros} {order} {json.dumps(lists)}"
    origin = "online" if quantization.is_online else "checkpoint"
    return f"fp8 {origin} {quantization.scales} {quantization.activations} {json.dumps(lists)}"


def index_bytes(
    save: str, shape: GroupShape, decoder: DecoderConfig, files: str, version: int
) -> bytes:
    """Return the content of index.json."""
    values = {
        "format": FORMAT,
        "files": files,
        "save": save,
        "weights_version": version,
        "shape": asdict(shape),
        "model": model_fields(decoder),
    }
    return json.dumps(values, indent=1).encode() + b"\n"


def rank_index_bytes(tensors: Mapping[str, SavedTensor]) -> bytes:
    """Return the content of a rank's index."""
    entries = {
        name: {"file": t.file, "shape": t.shape, "checksum": t.checksum.hex()}
        for name, t in tensors.items()
    }
    return json.dumps({"tensors": entries}, indent=1).encode() + b"\n"


def read_saved_set(home: Path) -> SavedSet:
    """Read a set's index.

    Raises:
        CheckpointError: the index is missing or malformed.
    """
    path = home / INDEX_FILE
    values = _read_object(path)
    try:
        if values.get("format") != FORMAT:
            raise ValueError(f"format is {values.get('format')!r}, not {FORMAT}")
        save = _take(values, "save", str)
        if not is_save_id(save):
            raise ValueError(f"save is {save!r}")
        shape = _parse_shape(_take(values, "shape", dict))
        files = values.get("files", SAFETENSORS.name)  # older sets lack it
        if not isinstance(files, str) or files not in LOAD_FORMATS:
            raise ValueError(f"files is {files!r}")
        version = values.get("weights_version", 0)  # older sets lack it
        if not isinstance(version, int) or not 0 <= version < 2**63:
            raise ValueError(f"weights_version is {version!r}")
        return SavedSet(home / save, shape, _take(values, "model", dict), files, version)
    except (ValueError, TypeError) as error:
        raise _broken(path, f"is not an index of a saved set ({error})") from error


def load_saved(
    parameters: Sequence[Parameter],
    saved: SavedSet,
    rank: int,
    progress: OnProgress,
    *,
    verify: bool,
    load_file: LoadFile | None = None,
    observer: WriteObserver | None = None,
    buffers: Sequence[Parameter] = (),
    experts_move: bool = False,
) -> LoadReport:
    """Fill the parameters of this rank from its own files, which are read straight into place, and
    those of its buffers that the set has. experts_move: experts that its own files lack come from
    those of other ranks.

    Checks all headers before the first byte is written; observer as in load_weights. load_file
    reads and checks files of other formats than safetensors.

    verify: compare the loaded tensors with the checksums taken at the save.

    Raises:
        CheckpointError: a file is missing or truncated, or a tensor is missing, or differs in shape
            or content from the saved one. The loaded tensors must be discarded.
    """
    path = saved.directory / rank_index_name(rank)
    tensors = _read_rank_index(path)
    if experts_move:
        tensors = _with_experts_of_others(tensors, parameters, saved)
    parameters = [*parameters, *(each for each in buffers if _is_in(tensors, each))]
    wanted = _by_file(parameters, tensors, path)
    if load_file is None:
        check_items(wanted)
    used = {piece.name for _, piece in _items(parameters)}
    unused = tensors.keys() - used
    if experts_move:
        unused = {name for name in unused if _EXPERT.search(name) is None}
    ignored = tuple(sorted(unused))
    report = load_items(wanted, progress, ignored, load_file, observer)
    if verify:
        _verify(parameters, tensors, path)
    return report


def _with_experts_of_others(
    own: dict[str, SavedTensor], parameters: Iterable[Parameter], saved: SavedSet
) -> dict[str, SavedTensor]:
    """Return a rank's index with the experts that it lacks, as far as other ranks' files have
    them: a rank has whole experts. Raises CheckpointError: an index is broken."""
    wanted = {piece.name for _, piece in _items(parameters) if _EXPERT.search(piece.name)}
    found = dict(own)
    for rank in range(saved.shape.num_ranks):
        missing = wanted - found.keys()
        if not missing:
            break
        others = _read_rank_index(saved.directory / rank_index_name(rank))
        found.update((name, others[name]) for name in missing & others.keys())
    return found


def _by_file(
    parameters: Sequence[Parameter], tensors: Mapping[str, SavedTensor], path: Path
) -> dict[Path, list[Item]]:
    wanted: defaultdict[Path, list[Item]] = defaultdict(list)
    for parameter, piece in _items(parameters):
        tensor = _find(tensors, piece, path)
        wanted[path.with_name(tensor.file)].append((parameter, piece))
    return wanted


def _items(parameters: Iterable[Parameter]) -> list[Item]:
    """Return the items of each tensor: a rank's file has exactly the part that the rank holds."""
    return [(parameter, piece) for parameter in parameters for piece in parameter.held_pieces]


def _is_in(tensors: Mapping[str, SavedTensor], parameter: Parameter) -> bool:
    return all(piece.name in tensors for piece in parameter.pieces)


def _find(tensors: Mapping[str, SavedTensor], piece: Piece, path: Path) -> SavedTensor:
    tensor = tensors.get(piece.name)
    if tensor is None:
        raise _broken(path, f"has no tensor {piece.name}")
    if tensor.shape != piece.full_shape:
        raise _broken(
            path, f"has {piece.name} in shape {tensor.shape}, this rank holds {piece.full_shape}"
        )
    return tensor


def _verify(
    parameters: Iterable[Parameter], tensors: Mapping[str, SavedTensor], path: Path
) -> None:
    for parameter, piece in _items(parameters):
        tensor = tensors[piece.name]
        if checksum(parameter.data[piece.target]) != tensor.checksum:
            raise _broken(
                path.with_name(tensor.file), f"has other values of {piece.name} than were saved"
            )


def _parse_shape(values: Mapping[str, object]) -> GroupShape:
    partition = _take(values, "layer_partition", list)
    return GroupShape(
        pipeline_parallel_size=_take(values, "pipeline_parallel_size", int),
        tensor_parallel_size=_take(values, "tensor_parallel_size", int),
        layer_partition=tuple(_integers(partition)),
        dtype=_take(values, "dtype", str),
        enable_expert_parallel=values.get("enable_expert_parallel", False) is True,  # older: absent
        replicas_sharing_experts=_take({_REPLICAS: 1, **values}, _REPLICAS, int),  # older: absent
    )


def _read_rank_index(path: Path) -> dict[str, SavedTensor]:
    tensors = _read_object(path).get("tensors")
    try:
        if not isinstance(tensors, dict):
            raise ValueError("tensors is not an object")
        return {name: _parse_tensor(entry) for name, entry in tensors.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise _broken(path, f"is not an index of saved tensors ({error})") from error


def _parse_tensor(entry: Mapping[str, object]) -> SavedTensor:
    file = _take(entry, "file", str)
    if not is_plain_name(file, (SAFETENSORS.suffix, TENSORS_SUFFIX)):
        raise ValueError(f"file is {file[:80]!r}, which is not a plain name of a tensor file")
    shape = tuple(_integers(_take(entry, "shape", list)))
    return SavedTensor(file, shape, bytes.fromhex(_take(entry, "checksum", str)))


def _take(values: Mapping[str, object], name: str, kind: type[_T]) -> _T:
    value = values.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}")
    return value


def _integers(values: Iterable[object]) -> list[int]:
    numbers = [value for value in values if isinstance(value, int)]
    if numbers != list(values):
        raise ValueError(f"{values!r} are not all integers")
    return numbers


def _read_object(path: Path) -> dict[str, object]:
    try:
        values = json.loads(read_whole(path))
    except FileNotFoundError as error:
        raise _broken(path, "is missing") from error
    except (OSError, ValueError, RecursionError) as error:
        raise _broken(path, f"cannot be read ({error})") from error
    if not isinstance(values, dict):
        raise _broken(path, "is not a JSON object")
    return values


def _broken(path: Path, problem: str) -> CheckpointError:
    return broken_file(path, problem, "name a set that save_sharded_state wrote, or save it again")
