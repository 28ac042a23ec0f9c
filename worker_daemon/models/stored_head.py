"""Decides whether a model's LM head is its embedding. config.json says so by tie_word_embeddings,
but a checkpoint may hold another head all the same, which then is the model's, as in transformers.

Every rank decides by the whole tensors, so all ranks of a group agree. Everything else that depends
on it reads DecoderConfig.is_tied.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from worker_daemon.errors import config_error
from worker_daemon.models.decoder import EMBEDDING, LM_HEAD
from worker_daemon.models.description import DecoderConfig
from worker_daemon.models.weights import has_tensors, hold_the_same, tensor_names

_HEAD_PREFIX = "lm_head."
_UNUSED = ("lm_head.bias",)
"""Tensors beside the head's matrix that transformers ignores too."""


def with_stored_head(config: DecoderConfig, model_dir: Path) -> DecoderConfig:
    """Return the model with the head that its files have: its own if they hold one that differs
    from the embedding. Without files, config.json counts.

    Reads headers, and values only if both matrices are stored: up to the first difference.

    Raises:
        ConfigError: the stored head is quantized.
        CheckpointError: a file is missing or damaged.
    """
    if not config.is_tied or not has_tensors(model_dir):
        return config
    names = tensor_names(model_dir)
    for name in sorted(names):
        if name.startswith(_HEAD_PREFIX) and name not in (LM_HEAD, *_UNUSED):
            problem = f"the checkpoint in {model_dir} has a quantized LM head"
            raise config_error("tensor", name, problem, "use one whose LM head is not quantized")
    if not {LM_HEAD, EMBEDDING} <= names or hold_the_same(model_dir, EMBEDDING, LM_HEAD):
        return config
    return replace(config, tie_word_embeddings=False)


def with_saved_head(config: DecoderConfig, model: Mapping[str, object]) -> DecoderConfig:
    """Return the model with the head that a saved set has. model: the fields of its index."""
    has_own = model.get("tie_word_embeddings") is False
    return replace(config, tie_word_embeddings=False) if has_own else config
