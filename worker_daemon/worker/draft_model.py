"""The draft model that a LoadModel request names: found and checked by every rank, so that all
refuse it alike, and loaded whole on the ranks of the last stage."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from rpc_schema.config import ModelConfig, SpeculativeConfig
from rpc_schema.errors import CheckpointError, ConfigError
from worker_daemon.contracts.source_identity import SourceIdentity
from worker_daemon.device.init import supports
from worker_daemon.errors import config_error
from worker_daemon.layers.attention import NullAttention
from worker_daemon.layers.attention_choice import ChosenAttention
from worker_daemon.layers.cache_spec import StateLayerSpec
from worker_daemon.layers.rotary import rotary_table
from worker_daemon.models.decoder import DecoderStage, checkpoint_pieces, whole_model
from worker_daemon.models.partition import check_partition
from worker_daemon.models.weights import check_checkpoint
from worker_daemon.phases import SetPhase
from worker_daemon.runner.kv_cache import FurtherPages
from worker_daemon.worker.model_identity import ModelFiles
from worker_daemon.worker.resolve import ResolvedModel
from worker_daemon.worker.stage_loading import (
    RankPlace,
    Roots,
    choose_stage_attention,
    fill_stage,
)

_FIELD = "speculative.model"


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A draft model as one rank sees it: without memory until TaggedMemory.hold_stages gives it
    some."""

    config: ModelConfig
    resolved: ResolvedModel
    stage: DecoderStage
    attention: ChosenAttention
    is_local: bool
    """True on the last stage, which holds and runs it."""

    @property
    def layers(self) -> tuple[FurtherPages, ...]:
        """Specs of its pages in the KV cache, in its own dtype."""
        return layers_of(self.stage, self.resolved.dtype)

    def rotary_tables(self, device: torch.device) -> list[Tensor]:
        """Return its tables, on the device."""
        length = self.resolved.max_model_len
        return [rotary_table(rope, length, device) for rope in self.stage.ropes]

    def attend(self, *, is_real: bool) -> None:
        """Use its attention from now on, or one that computes nothing."""
        self.stage.set_attention(self.attention.backend if is_real else NullAttention())

    def check_files(self) -> None:
        """Check the headers of its weights. Raises CheckpointError."""
        with _naming(self.config.model):
            if self.config.load_format == "auto":
                check_checkpoint(self.resolved.directory, checkpoint_pieces(self.resolved.decoder))

    @property
    def names(self) -> frozenset[str]:
        """Names of the tensors that this rank holds."""
        return self.stage.loaded_names() if self.is_local else frozenset()

    def fill(self, set_phase: SetPhase) -> SourceIdentity:
        """Read its weights, if this rank holds them; return the identity of their files. Raises
        CheckpointError."""
        with _naming(self.config.model):
            files = ModelFiles.of(self.resolved, self.config)
            identity = files.identity()
            if self.is_local:
                fill_stage(self.stage, self.config, self.resolved, 0, set_phase)
            files.check_unchanged(identity)
        return identity


def draft_layers(draft: DraftModel | None) -> tuple[FurtherPages, ...]:
    """Return what a draft model keeps on a rank of the last stage, if there is one."""
    return () if draft is None else draft.layers


def find_draft(
    config: SpeculativeConfig,
    target: ModelConfig,
    resolved: ResolvedModel,
    roots: Roots,
    set_phase: SetPhase | None = None,
) -> tuple[ModelConfig, ResolvedModel] | None:
    """Find the draft model of a target, and check that they fit each other; None if drafts have
    another source. set_phase: gets the progress of a download.

    Raises:
        ConfigError: it cannot draft for the target.
        CheckpointError: its files are missing, or do not match its config.json.
    """
    if config.method != "draft_model":
        return None
    assert config.model is not None, "check_speculative has passed"
    own = ModelConfig(
        model=config.model,
        dtype=target.dtype,
        load_format="dummy" if target.load_format == "dummy" else "auto",
        seed=target.seed,
        max_model_len=resolved.max_model_len,
        enable_expert_parallel=False,
    )
    with _naming(config.model):
        found = roots.resolve(own, set_phase)
    _check_pair(config.model, found, resolved)
    return own, found


def build_draft(found: tuple[ModelConfig, ResolvedModel], place: RankPlace) -> DraftModel:
    """Return a rank's part of a draft model, without memory. Raises ConfigError: the ranks of a
    stage cannot share it, or its dtype is none of the device's."""
    config, resolved = found
    with _naming(config.model):
        check_partition(resolved.decoder, 1, place.parallel.tp_size)
        if not supports(place.device, resolved.dtype):
            problem = "this device does not support this dtype"
            raise config_error("dtype", str(resolved.dtype), problem, "float16")
        ops = place.backend.make_ops()
        stage = whole_model(resolved.decoder, place.tp, resolved.dtype, ops=ops)
        attention = choose_stage_attention(stage, resolved.decoder, resolved.dtype, place)
    return DraftModel(config, resolved, stage, attention, place.parallel.is_last_stage)


def layers_of(stage: DecoderStage, dtype: torch.dtype) -> tuple[FurtherPages, ...]:
    """Return what a draft model's stage keeps. The names differ from the target's."""
    specs = (spec for spec in stage.kv_layer_specs if not isinstance(spec, StateLayerSpec))
    return tuple(FurtherPages(spec.named(f"draft_model.{spec.name}"), dtype) for spec in specs)


def _check_pair(name: str, draft: ResolvedModel, target: ResolvedModel) -> None:
    """Raise ConfigError unless a draft model can draft for a target."""
    mine, theirs = draft.decoder, target.decoder
    if not (mine.generates and theirs.generates):
        whose = "the draft model" if theirs.generates else "the model"
        raise config_error(_FIELD, name, f"{whose} does not generate", "leave it out")
    if mine.vocab_size != theirs.vocab_size:
        problem = f"its vocabulary has {mine.vocab_size} tokens, the model's {theirs.vocab_size}"
        raise config_error(_FIELD, name, problem, "a draft model of the same tokenizer")
    if mine.keeps_state or theirs.keeps_state:
        whose = "the draft model" if mine.keeps_state else "the model"
        problem = f"layers of {whose} keep a state per request, which cannot take tokens back"
        raise config_error(_FIELD, name, problem, "models with a KV cache alone")


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Say in errors that they are the draft model's."""
    try:
        yield
    except (ConfigError, CheckpointError) as error:
        raise type(error)(f"the draft model: {error.message}", field=_FIELD, value=name) from None
