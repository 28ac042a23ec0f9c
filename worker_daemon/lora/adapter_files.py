"""Reads an adapter's tensors into one slot's layout. The header is checked in full against the
model and adapter_config.json before any tensor is read."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from rpc_schema.errors import CheckpointError, ConfigError
from worker_daemon.contracts.source_identity import SourceIdentity
from worker_daemon.layers.adapters import AdapterLayout, MatrixShard
from worker_daemon.lora.adapter_config import (
    CONFIG_NAME,
    AdapterConfig,
    ModuleScale,
    Side,
    check_targets,
    read_adapter_config,
    tensor_name,
)
from worker_daemon.models.file_identity import file_identity, file_stamps
from worker_daemon.models.safetensors_file import (
    FLOAT_DTYPES,
    Entry,
    MalformedError,
    SafetensorsFile,
)
from worker_daemon.regular_file import TruncatedError, read_whole

TENSORS_NAME: Final = "adapter_model.safetensors"
_TENSOR: Final = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_MAX_SHOWN: Final = 200


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter that was read and validated."""

    weights: Tensor
    """[slot_size] in the model's dtype, on the host; page-locked for a GPU."""
    modules: Mapping[str, ModuleScale]
    """Rank and scale of each module of the whole model that it changes."""
    identity: SourceIdentity


class AdapterFormat:
    """Reads adapters for one rank of a loaded model. Any thread may use it."""

    def __init__(
        self,
        layout: AdapterLayout,
        shapes: Mapping[str, tuple[int, int]],
        dtype: torch.dtype,
        *,
        pinned: bool,
    ) -> None:
        """layout: this rank's. shapes: (output, input features) of every module of the whole model
        that an adapter may change. pinned: page-lock the host memory."""
        self._layout = layout
        self._shapes = shapes
        self._dtype = dtype
        self._pinned = pinned

    def read(self, directory: Path) -> AdapterFiles:
        """Read an adapter.

        Raises:
            ConfigError: its configuration is not supported, or exceeds max_lora_rank.
            CheckpointError: a file is missing, malformed or truncated, was changed during the read,
                or its tensors do not match this model and configuration.
        """
        stamps = adapter_stamps(directory)
        config = read_adapter_config(directory)
        check_targets(config, self._shapes)
        path = directory / TENSORS_NAME
        try:
            identity = _identity_of(directory, stamps)
            with SafetensorsFile(path) as file:
                modules = self._check(file.entries, config, directory)
                adapter = AdapterFiles(self._read(file, config, directory), modules, identity)
            if adapter_stamps(directory) != stamps:
                what, fix = "its files changed while they were read", "add it again"
                raise _refused(what, directory, fix)
            return adapter
        except OSError as error:
            reason = f"{path} cannot be read: {error.strerror}"
        except (MalformedError, TruncatedError) as error:
            reason = f"{path} is not a whole safetensors file: {error}"
        raise _refused(reason, directory, f"give the adapter's own {TENSORS_NAME}")

    def _check(
        self, entries: Mapping[str, Entry], config: AdapterConfig, directory: Path
    ) -> dict[str, ModuleScale]:
        """Return rank and scale of each module in the file."""
        found: dict[str, set[str]] = {}
        for name, entry in entries.items():
            matched = _TENSOR.fullmatch(name)
            module = matched[1] if matched else ""
            if matched is None or module not in self._shapes:
                raise _unknown(name, directory)
            self._check_entry(module, "A" if matched[2] == "A" else "B", entry, config, directory)
            found.setdefault(module, set()).add(matched[2])
        if not found:
            raise _refused("it has no tensors", directory, "use an adapter with LoRA matrices")
        for module, sides in found.items():
            if len(sides) < 2:
                what = f"{module} has only its lora_{sides.pop()}"
                raise _refused(what, directory, "save the adapter again, with A and B")
        return config.scales_of(found)

    def _check_entry(
        self, module: str, side: Side, entry: Entry, config: AdapterConfig, directory: Path
    ) -> None:
        rank, (num_outputs, num_inputs) = config.rank_of(module), self._shapes[module]
        if rank > self._layout.max_rank:
            raise ConfigError(
                f"the adapter's matrices of {module} are too large",
                field="rank",
                value=rank,
                fix=f"at most {self._layout.max_rank}, or load the model with a larger "
                "max_lora_rank",
            )
        expected = (rank, num_inputs) if side == "A" else (num_outputs, rank)
        if entry.shape != expected:
            raise _refused(
                f"lora_{side} of {module} is {list(entry.shape)}, not {list(expected)}",
                directory,
                "use an adapter of this model, with its own adapter_config.json",
            )
        if entry.dtype not in FLOAT_DTYPES:
            raise _refused(
                f"lora_{side} of {module} has dtype {entry.dtype[:32]}",
                directory,
                f"save the adapter as one of {', '.join(FLOAT_DTYPES)}",
            )

    def _read(self, file: SafetensorsFile, config: AdapterConfig, directory: Path) -> Tensor:
        layout = self._layout
        weights = torch.zeros(layout.slot_size, dtype=self._dtype, pin_memory=self._pinned)
        slots = weights.unsqueeze(0)
        for each in layout.merged:
            a, b = each.a_of(slots)[0], each.b_of(slots)[0]
            for index, shard in enumerate(each.shards):
                if tensor_name(shard.module, "A") in file.entries:
                    first = index * layout.max_rank
                    rank = config.rank_of(shard.module)
                    self._read_a(file, shard, rank, a[first : first + rank])
                    scale = config.scale_of(shard.module)
                    self._read_b(file, shard, rank, scale, b[shard.target, :rank])
        if not bool(weights.isfinite().all()):
            raise _refused(
                "it has values that are not finite in the model's dtype",
                directory,
                "use another checkpoint of the adapter",
            )
        return weights

    def _read_a(self, file: SafetensorsFile, shard: MatrixShard, rank: int, into: Tensor) -> None:
        file.read_into(tensor_name(shard.module, "A"), (slice(0, rank), shard.columns), into)

    def _read_b(
        self, file: SafetensorsFile, shard: MatrixShard, rank: int, scale: float, into: Tensor
    ) -> None:
        first = 0
        for rows in shard.rows:
            values = torch.empty((rows.stop - rows.start, rank), dtype=torch.float32)
            file.read_into(tensor_name(shard.module, "B"), (rows, slice(0, rank)), values)
            into[first : first + len(values)].copy_(values.mul_(scale))
            first += len(values)


def adapter_stamps(directory: Path) -> bytes:
    """Return the stamps of an adapter's files: see file_stamps."""
    return file_stamps([directory / CONFIG_NAME, directory / TENSORS_NAME])


def _identity_of(directory: Path, stamps: bytes) -> SourceIdentity:
    config = directory / CONFIG_NAME
    texts, files = {config: read_whole(config)}, [directory / TENSORS_NAME]
    return file_identity(directory, texts, files, stamps)


def _unknown(name: str, directory: Path) -> CheckpointError:
    shown = f"{name[:_MAX_SHOWN]!r}"
    if ".experts." in name:
        what = f"{shown} changes an expert: adapters of experts are not supported"
        return _refused(what, directory, "use an adapter without experts")
    what = f"{shown} is no LoRA matrix of a linear layer of this model"
    return _refused(what, directory, "use an adapter of this model's linear layers")


def _refused(reason: str, directory: Path, fix: str) -> CheckpointError:
    return CheckpointError(reason, field="adapter", value=str(directory), fix=fix)
