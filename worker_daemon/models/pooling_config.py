"""Reads pooling from a model's files: the architecture in config.json, and modules.json of
sentence-transformers. Pure; raises ConfigError, which names field and fix."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Final, Literal

from rpc_schema.errors import ConfigError
from worker_daemon.models.description import (
    DecoderConfig,
    HeadSpec,
    PoolerSpec,
    ScoreActivation,
)
from worker_daemon.models.fields import Fields

MODULES_FILE: Final = "modules.json"
SENTENCE_TRANSFORMERS_FILE: Final = "config_sentence_transformers.json"
_ACTIVATION: Final = "activation_fn"
POOLING_FILE: Final = "pooling.json"
"""Configuration of the Pooling module in a saved set, which has no directories of modules."""
_CAUSAL = "ForCausalLM"
_SEQUENCE = "ForSequenceClassification"
_TOKEN = "ForTokenClassification"  # a class's name
_BARE = "Model"
_MAX_LABELS: Final = 1 << 16
_DEFAULT_LABELS: Final = 2
_POOLING_MODES: Final[Mapping[str, Literal["last", "first", "mean"]]] = MappingProxyType(
    {
        "pooling_mode_lasttoken": "last",
        "pooling_mode_cls_token": "first",
        "pooling_mode_mean_tokens": "mean",
    }
)
_NAMED_MODES: Final[Mapping[str, Literal["last", "first", "mean"]]] = MappingProxyType(
    {"lasttoken": "last", "cls": "first", "mean": "mean"}
)
_TORCH_ACTIVATIONS: Final[Mapping[str, ScoreActivation]] = MappingProxyType(
    {"Sigmoid": "sigmoid", "Softmax": "softmax", "Identity": "none"}
)
"""By the names of torch's classes."""
_ACTIVATIONS: Final[Mapping[str, ScoreActivation]] = MappingProxyType(
    {
        "single_label_classification": "softmax",
        "multi_label_classification": "sigmoid",
        "regression": "none",
    }
)


def names_with_same_layers(architecture: str) -> tuple[str, ...]:
    """Return the architectures of the same family that a table may list."""
    for suffix in (_SEQUENCE, _TOKEN, _BARE):
        if architecture.endswith(suffix):
            family = architecture.removesuffix(suffix)
            return family + _CAUSAL, family + _BARE
    return ()


def read_architecture(config: DecoderConfig, fields: Fields) -> DecoderConfig:
    """Return the model with the head of its architecture: for tokens, for labels, or none."""
    name = config.architecture
    if config.encoder is not None:
        return config  # set by its family
    if not fields.flag("is_causal", True):  # as some embedding models made of decoders have it
        raise fields.error("is_causal", "must be true", "use a model that sees earlier tokens only")
    if name.endswith((_SEQUENCE, _TOKEN)):
        per_token = name.endswith(_TOKEN)
        labels, activation = num_labels(fields), _activation(fields, per_token=per_token)
        head = HeadSpec("score", labels, per_token, None, per_token, activation)
        return replace(config, generates=False, pooler=PoolerSpec(head=head))
    return replace(config, generates=name.endswith(_CAUSAL))


def encoder_pooler(fields: Fields, classifier: str, dense: str) -> PoolerSpec:
    """Return the pooling of an encoder's architecture. classifier, dense: checkpoint names of the
    matrices of its per-prompt head."""
    (name, *_) = fields.optional_texts("architectures") or [""]
    if name.endswith(_SEQUENCE):
        activation = _activation(fields)
        head = HeadSpec(classifier, num_labels(fields), True, dense, False, activation)
        return PoolerSpec("first", head=head)
    if name.endswith(_TOKEN):
        activation = _activation(fields, per_token=True)
        head = HeadSpec("classifier", num_labels(fields), True, None, True, activation)
        return PoolerSpec("first", head=head)
    return PoolerSpec("mean")


def num_labels(fields: Fields) -> int:
    """Return a classifier's number of outputs."""
    names = fields.optional_object("id2label")
    if names is None:
        return fields.integer("num_labels", _DEFAULT_LABELS, maximum=_MAX_LABELS)
    if not 1 <= len(names) <= _MAX_LABELS:
        raise fields.error("id2label", f"must have 1 to {_MAX_LABELS} labels")
    return len(names)


def read_cross_encoder(config: DecoderConfig, fields: Fields) -> DecoderConfig:
    """Return a classifier of whole prompts with the activation of sentence-transformers'
    configuration, if that has one. fields: of SENTENCE_TRANSFORMERS_FILE."""
    head = config.pooler.head
    if head is None or head.per_token or fields.optional_text(_ACTIVATION) is None:
        return config
    head = replace(head, activation=_named_activation(fields, _ACTIVATION))
    return replace(config, pooler=replace(config.pooler, head=head))


def _activation(fields: Fields, *, per_token: bool = False) -> ScoreActivation:
    cross_encoder = None if per_token else _cross_encoder_activation(fields)
    if cross_encoder is not None:
        return cross_encoder
    kind = fields.optional_text("problem_type")
    if kind is None:
        return "sigmoid" if num_labels(fields) == 1 else "softmax"
    if kind not in _ACTIVATIONS:
        raise fields.error("problem_type", "is unknown", "use one of " + ", ".join(_ACTIVATIONS))
    return _ACTIVATIONS[kind]


def _cross_encoder_activation(fields: Fields) -> ScoreActivation | None:
    """Return the activation of a CrossEncoder that sentence-transformers has saved; None if it has
    not saved the model."""
    section, old = (
        fields.optional_object("sentence_transformers"),
        "sbert_ce_default_activation_function",
    )
    if section is not None and section.get(_ACTIVATION) is not None:
        of_section = Fields(section, prefix=fields.full_name("sentence_transformers."))
        return _named_activation(of_section, _ACTIVATION)
    if fields.optional_text(old) is not None and not (section and _ACTIVATION in section):
        return _named_activation(fields, old)
    if section is None:
        return None
    return "sigmoid" if num_labels(fields) == 1 else "none"


def _named_activation(fields: Fields, name: str) -> ScoreActivation:
    """Read a field with the path of a class."""
    package, _, kind = fields.text(name).rpartition(".")
    if package.partition(".")[0] != "torch" or kind not in _TORCH_ACTIVATIONS:
        fix = f"use torch's {' or '.join(_TORCH_ACTIVATIONS)}, or remove the field"
        raise fields.error(name, "is not supported", fix)
    return _TORCH_ACTIVATIONS[kind]


def pooling_config_path(modules: object) -> str:
    """Return the path of the pooling module's configuration in the model's directory."""
    for kind, path in _modules(modules):
        if kind == "Pooling":
            return f"{path}/config.json"
    raise _error("its modules pool nothing", "add a Pooling module")


def read_modules(config: DecoderConfig, modules: object, pooling: Fields) -> DecoderConfig:
    """Return the embedding model that these modules define. pooling: the Pooling module's
    configuration."""
    kinds = [kind for kind, _ in _modules(modules)]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        chain = "Transformer, Pooling and, if wanted, Normalize"
        raise _error(f"modules {', '.join(kinds)} are not supported", f"use {chain}")
    chosen = [name for name in _POOLING_MODES if pooling.flag(name, False)]
    others = [
        f"pooling_mode_{name}"
        for name in ("max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens")
        if pooling.flag(f"pooling_mode_{name}", False)
    ]
    if others or len(chosen) > 1:
        field = (others or chosen)[0]
        raise pooling.error(
            field, "is not supported here", f"use one of {', '.join(_POOLING_MODES)}"
        )
    mode = _POOLING_MODES[chosen[0]] if chosen else _named_mode(pooling)
    if mode == "first" and config.encoder is None:
        fix = "use lasttoken or mean: a decoder's first token does not see the others"
        raise pooling.error(chosen[0] if chosen else "pooling_mode", "needs an encoder", fix)
    if not pooling.flag("include_prompt", True):
        raise pooling.error("include_prompt", "must be true: prompts are pooled whole")
    spec = PoolerSpec(mode, normalize=kinds[-1] == "Normalize")
    return replace(config, generates=False, pooler=spec)


def _named_mode(pooling: Fields) -> Literal["last", "first", "mean"]:
    """Read the single name that newer releases of sentence-transformers write; default mean."""
    mode = pooling.text("pooling_mode", "mean")
    found = _NAMED_MODES.get(mode)
    if found is None:
        fix = "use " + ", ".join(_NAMED_MODES)
        raise pooling.error("pooling_mode", "is not supported", fix)
    return found


def _modules(modules: object) -> list[tuple[str, str]]:
    """Return kind and path of each module, in order."""
    if not isinstance(modules, list) or not 1 <= len(modules) <= 16:
        raise _error("it is no list of modules", "write it with sentence-transformers")
    found = []
    for module in modules:
        fields = Fields(module if isinstance(module, dict) else {}, prefix=f"{MODULES_FILE}: ")
        kind, path = fields.text("type").rpartition(".")[2], fields.text("path", "")
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
            raise fields.error("path", "leads out of the model's directory")
        if kind == "Transformer" and path:
            raise fields.error("path", "is not empty", "keep config.json beside modules.json")
        found.append((kind, path))
    return found


def _error(problem: str, fix: str) -> ConfigError:
    return ConfigError(f"{MODULES_FILE}: {problem}", field=MODULES_FILE, value=None, fix=fix)
