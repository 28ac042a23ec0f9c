"""The drafters by their method, for the last stage and for the memory plan."""

from collections.abc import Mapping
from typing import Final, Protocol

import torch

from rpc_schema.config import DraftMethod, SpeculativeConfig
from worker_daemon.contracts.drafting import TextKernels
from worker_daemon.drafting.interface import Drafter
from worker_daemon.drafting.model import ModelDrafter
from worker_daemon.drafting.ngram import NgramDrafter
from worker_daemon.drafting.row_texts import DraftLimits
from worker_daemon.drafting.suffix import SuffixDrafter


class TextDrafterKind(Protocol):
    """A class of drafters that need no model."""

    def __call__(
        self,
        config: SpeculativeConfig,
        limits: DraftLimits,
        device: torch.device,
        kernels: TextKernels,
    ) -> Drafter:
        """Make a drafter."""

    def num_bytes(self, config: SpeculativeConfig, limits: DraftLimits) -> int:
        """Return the device memory that a drafter takes."""


_TEXT_DRAFTERS: Final[Mapping[DraftMethod, TextDrafterKind]] = {
    "ngram": NgramDrafter,
    "suffix": SuffixDrafter,
}


def make_drafter(
    config: SpeculativeConfig,
    max_num_seqs: int,
    max_model_len: int,
    device: torch.device,
    kernels: TextKernels,
) -> Drafter | None:
    """Return the drafter of a method that needs no model; None for the others."""
    kind = _TEXT_DRAFTERS.get(config.method)
    limits = DraftLimits(max_num_seqs, max_model_len, config.num_speculative_tokens)
    return None if kind is None else kind(config, limits, device, kernels)


def drafter_bytes(config: SpeculativeConfig, max_num_seqs: int, max_model_len: int) -> int:
    """Return the device memory that a method's drafter takes, without a draft model's weights and
    pages; 0 without a drafter."""
    kind = _TEXT_DRAFTERS.get(config.method)
    limits = DraftLimits(max_num_seqs, max_model_len, config.num_speculative_tokens)
    if config.method == "draft_model":
        return ModelDrafter.num_bytes(limits)
    return 0 if kind is None else kind.num_bytes(config, limits)
