"""The files of a repository that a driver or a daemon reads. No other file is downloaded."""

import json
import re
from collections.abc import Collection
from enum import StrEnum
from typing import Any, Final

CONFIG: Final = "config.json"
INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER: Final = "adapter_model.safetensors"
MAX_TEXT_BYTES: Final = 16 << 20
"""Bound on an index, as the daemon has it."""
_TEXTS: Final = frozenset(
    {
        *(CONFIG, INDEX, "generation_config.json", "hf_quant_config.json"),
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
        *("chat_template.jinja", "chat_template.json"),
        *("modules.json", "config_sentence_transformers.json"),
    }
)
_POOLING: Final = re.compile(r"[A-Za-z0-9_-]{1,64}/config\.json")
"""The file of a module of sentence-transformers: it counts only beside modules.json."""
_SHARD: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}\.safetensors")


class NeededPart(StrEnum):
    """A need of a repository's files."""

    TEXTS = "texts"
    """Configuration, tokenizer and chat template: what a driver reads."""
    MODEL = "model"
    """These, and the weights."""
    ADAPTER = "adapter"
    """A LoRA adapter."""


class BrokenIndex(ValueError):
    """An index that names no files, or files that it may not."""


def text_files(names: Collection[str]) -> list[str]:
    """Return the small files of a model, of all its files."""
    has_modules = "modules.json" in names
    return sorted(
        name
        for name in names
        if name in _TEXTS or (has_modules and _POOLING.fullmatch(name) is not None)
    )


def shards_of(index: bytes) -> list[str]:
    """Return the files that an index of weights names. Raises BrokenIndex."""
    if len(index) > MAX_TEXT_BYTES:
        raise BrokenIndex(f"{INDEX} has more than {MAX_TEXT_BYTES} bytes")
    try:
        found: Any = json.loads(index)
        names = {str(name) for name in found["weight_map"].values()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise BrokenIndex(f"{INDEX} has no weight_map") from None
    if not names:
        raise BrokenIndex(f"{INDEX} names no files")
    for name in names:
        if _SHARD.fullmatch(name) is None:
            raise BrokenIndex(f"{INDEX} names {name[:100]!r}, which is no safetensors file")
    return sorted(names)


def weight_files(names: Collection[str], index: bytes | None) -> list[str]:
    """Return the files with weights that a load reads: those of the index, if there is one. Raises
    BrokenIndex: it is broken, or there are no safetensors files, or the index names one that is not
    there."""
    if index is not None:
        shards = shards_of(index)
        missing = [name for name in shards if name not in names]
        if missing:
            raise BrokenIndex(f"{INDEX} names {missing[0]}, which is not there")
        return shards
    if SINGLE in names:
        return [SINGLE]
    raise BrokenIndex(f"it has neither {SINGLE} nor {INDEX}")


def adapter_files(names: Collection[str]) -> list[str]:
    """Return the files of an adapter. Raises BrokenIndex: one is not there."""
    for name in (ADAPTER_CONFIG, ADAPTER):
        if name not in names:
            raise BrokenIndex(f"it has no {name}: it is no adapter in PEFT's format")
    return [ADAPTER_CONFIG, ADAPTER]
