"""Reads PEFT's adapter_config.json into an AdapterConfig, and refuses unsupported settings."""

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, TypeAlias, TypeVar

from rpc_schema.errors import CheckpointError, ConfigError
from worker_daemon.models.fields import Fields
from worker_daemon.models.safetensors_file import full_name
from worker_daemon.regular_file import read_whole

CONFIG_NAME: Final = "adapter_config.json"
_MAX_CONFIG_BYTES: Final = 1 << 20
_MAX_RANK: Final = 1 << 16
_MAX_PATTERNS: Final = 4096
_PLAIN: Final = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")
_CHANGES_BASE: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Prefixes of init_lora_weights values that also change the base model's weights."""

_UNSUPPORTED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "use_dora": "DoRA",
        "lora_bias": "a bias of B",
        "modules_to_save": "modules that are saved whole",
        "alora_invocation_tokens": "activated LoRA",
        "layer_replication": "replicated layers",
        "trainable_token_indices": "trained tokens of the embedding",
        "target_parameters": "adapters of parameters",
        "use_qalora": "QALoRA",
        "fan_in_fan_out": "transposed matrices",
    }
)
"""Fields that must be absent, null, false or empty, and their meaning."""
_T = TypeVar("_T")


Side: TypeAlias = Literal["A", "B"]


def tensor_name(module: str, side: Side) -> str:
    """Return the name of a matrix, as PEFT saves it."""
    return f"base_model.model.{module}.lora_{side}.weight"


class ModuleScale(NamedTuple):
    """An adapter's change of one module."""

    rank: int
    """LoRA rank of its matrices."""
    scale: float
    """Factor of their product; B includes it where it is stored."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Rank and scale of each module's matrices."""

    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_modules: tuple[str, ...] | None
    """None if the file has a regular expression or "all-linear"; the tensors then show the
    modules."""

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's matrices."""
        return _first_match(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor by which a module's product is multiplied."""
        alpha, rank = _first_match(self.alpha_pattern, module, self.alpha), self.rank_of(module)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def scales_of(self, modules: Iterable[str]) -> dict[str, ModuleScale]:
        """Return rank and scale of each of these modules."""
        return {each: ModuleScale(self.rank_of(each), self.scale_of(each)) for each in modules}


def read_adapter_config(directory: Path) -> AdapterConfig:
    """Read a directory's adapter_config.json.

    Raises:
        CheckpointError: the file is missing or not a JSON object.
        ConfigError: a field is malformed, or asks for something that is not supported.
    """
    return parse_adapter_config(_read_object(directory / CONFIG_NAME))


def parse_adapter_config(values: Mapping[str, object]) -> AdapterConfig:
    """Return the configuration, with PEFT's meaning of these fields. Raises ConfigError, which
    names field and fix."""
    fields = _AdapterFields(values)
    _refuse_unsupported(fields)
    return AdapterConfig(
        rank=fields.integer("r", maximum=_MAX_RANK),
        alpha=fields.number("lora_alpha"),
        use_rslora=fields.flag("use_rslora", False),
        rank_pattern=fields.ranks("rank_pattern"),
        alpha_pattern=fields.alphas("alpha_pattern"),
        target_modules=fields.targets(),
    )


def check_targets(config: AdapterConfig, modules: Collection[str]) -> None:
    """Raise ConfigError if a target module is not a suffix of any of the model's modules."""
    for target in config.target_modules or ():
        if not any(_is_suffix(target, module) for module in modules):
            known = sorted({module.rpartition(".")[2] for module in modules})
            raise ConfigError(
                "the model has no such module that an adapter can change",
                field="target_modules",
                value=target[:256],
                fix=f"use an adapter of {', '.join(known)}",
            )


class _AdapterFields(Fields):
    """Fields whose errors name adapter_config.json."""

    def error(self, name: str, problem: str, fix: str | None = None) -> ConfigError:
        return super().error(name, problem, fix or f"in {CONFIG_NAME}, {name} {problem}")

    def value(self, name: str) -> object:
        """Return a field as it is."""
        return self._values.get(name)

    def given(self, name: str) -> bool:
        """Return True unless the field is absent, null, false or empty."""
        return bool(self._values.get(name))

    def ranks(self, name: str) -> dict[str, int]:
        """Return ranks by module suffix."""
        patterns = self._patterns(name)
        return {
            _module_name(key): patterns.integer(key, maximum=_MAX_RANK) for key in self._keys(name)
        }

    def alphas(self, name: str) -> dict[str, float]:
        """Return alphas by module suffix."""
        patterns = self._patterns(name)
        return {_module_name(key): patterns.number(key) for key in self._keys(name)}

    def targets(self) -> tuple[str, ...] | None:
        """Return target_modules, if they are a list."""
        if isinstance(self._values.get("target_modules"), str):
            return None
        return tuple(map(_module_name, self.optional_texts("target_modules") or ()))

    def _patterns(self, name: str) -> "_AdapterFields":
        return _AdapterFields(self.optional_object(name) or {}, f"{name}.")

    def _keys(self, name: str) -> list[str]:
        keys = list(self.optional_object(name) or {})
        if len(keys) > _MAX_PATTERNS:
            raise self.error(name, f"must have at most {_MAX_PATTERNS} entries")
        for key in keys:
            if not _PLAIN.fullmatch(key):
                raise self.error(name, "must name modules by suffixes, without patterns")
        return keys


def _refuse_unsupported(fields: _AdapterFields) -> None:
    if fields.text("peft_type", "LORA") != "LORA":
        raise fields.error("peft_type", "is not supported", "use an adapter of type LORA")
    if fields.text("bias", "none") != "none":
        raise fields.error("bias", "is not supported", "train the adapter with bias none")
    for name, meaning in _UNSUPPORTED.items():
        if fields.given(name):
            raise fields.error(name, f"is not supported: {meaning}", f"train without {name}")
    init = fields.value("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_CHANGES_BASE):
        fix = "convert the adapter to plain LoRA, as PEFT can when it saves"
        raise fields.error("init_lora_weights", "changes the base model, and is refused", fix)


def _module_name(name: str) -> str:
    """Return the canonical name of a module, or of the end of its name."""
    return full_name(f"{name}.weight").removesuffix(".weight")


def _first_match(pattern: Mapping[str, _T], module: str, default: _T) -> _T:
    matches = (value for suffix, value in pattern.items() if _is_suffix(suffix, module))
    return next(matches, default)


def _is_suffix(suffix: str, module: str) -> bool:
    return module == suffix or module.endswith(f".{suffix}")


def _read_object(path: Path) -> Mapping[str, object]:
    fix = f"name a directory with PEFT's {CONFIG_NAME}"
    try:
        value = json.loads(read_whole(path, _MAX_CONFIG_BYTES))
    except OSError as error:
        what = f"{path} cannot be read: {error.strerror}"
        raise CheckpointError(what, field="adapter", value=str(path.parent), fix=fix) from error
    except (ValueError, RecursionError) as error:
        what = f"{path} is not valid JSON: {error}"
        raise CheckpointError(what, field="adapter", value=str(path.parent), fix=fix) from error
    if not isinstance(value, dict):
        what = f"{path} is not a JSON object"
        raise CheckpointError(what, field="adapter", value=str(path.parent), fix=fix)
    return value
