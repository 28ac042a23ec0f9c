"""Checkpoints whose reference keeps keys and values in FP8: transformers, with a cache that rounds
what it is given and returns it in float32. Independent of the code under test.

    reference = with_fp8_cache(make_checkpoint(directory, seed=3), "heads", seed=4)
    reference.greedy(prompt, 16)      # over rounded keys and values
    reference.expected(prompt, 16, tokens)  # tokens, if they are those up to near ties
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file
from transformers.cache_utils import DynamicCache

from tests.support.checkpoints import Checkpoint

ScaleForm = Literal["none", "layer", "heads", "single", "projections"]
"""No scales; k_scale and v_scale of each layer, as a scalar or for each KV head; one kv_scale of
each layer; the names of ModelOpt."""

TOLERANCE = 0.1
"""In nats. Another order of a sum now and then moves an element of a key across a tie of FP8, which
changes it by a sixteenth. transformers with itself, in one piece and in chunks, differed by up to
0.017 in 6 of 40 prompts."""


class RoundingCache(DynamicCache):
    """A cache that holds x / scale in float8_e4m3fn, limited to +-448, and returns it times the
    scale. Sliding windows are left to the model's masks."""

    def __init__(self, scales: Mapping[int, torch.Tensor]) -> None:
        """scales: float32 [2, Hkv] of each layer that has other scales than 1."""
        super().__init__()
        self._scales = scales

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        scales = self._scales.get(layer_idx, torch.ones(2, 1))
        given = (key_states, value_states)
        seen = [_rounded(x, scale) for x, scale in zip(given, scales, strict=True)]
        return super().update(*seen, layer_idx, *args, **kwargs)


def _rounded(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x [B, Hkv, S, D]."""
    factor = scale[:, None, None]
    return (x / factor).clamp(-448, 448).to(torch.float8_e4m3fn).float() * factor


@dataclass
class RoundedCheckpoint(Checkpoint):
    """A checkpoint whose reference results are those over a cache in FP8."""

    scales: Mapping[int, torch.Tensor] = field(default_factory=dict)

    def expected(self, prompt: Sequence[int], max_tokens: int, found: Sequence[int]) -> list[int]:
        """Return `found` if each of its tokens is the likeliest after those before it, or nearly,
        and the tokens of greedy otherwise."""
        ids = torch.tensor([[*prompt, *found]])
        with torch.no_grad():
            logits = self.model(ids, past_key_values=RoundingCache(self.scales)).logits
        logprobs = logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        chosen = logprobs.gather(1, ids[0, len(prompt) :, None])
        is_close = logprobs.amax(1, keepdim=True) - chosen < TOLERANCE
        if len(found) == max_tokens and is_close.all():
            return list(found)
        return self.greedy(prompt, max_tokens)

    def _continue(self, given, num_given_ids, max_tokens, ending):
        cache = RoundingCache(self.scales)
        return super()._continue(
            given, num_given_ids, max_tokens, {**ending, "past_key_values": cache}
        )


def with_fp8_cache(checkpoint: Checkpoint, form: ScaleForm, seed: int) -> RoundedCheckpoint:
    """Add scales to the files of a checkpoint, and return its reference. They are random, and so
    small that some keys and values are limited."""
    config = checkpoint.model.config
    num_heads, random = config.num_key_value_heads, torch.Generator().manual_seed(seed)
    scales, tensors = {}, {}
    for layer in range(config.num_hidden_layers if form != "none" else 0):
        count = num_heads if form == "heads" else 1
        drawn = (torch.rand(2, count, generator=random) * 3 - 8.5).exp2().bfloat16()
        if form == "single":
            drawn = drawn[:1].expand(2, 1)
        prefix = f"model.layers.{layer}.self_attn"
        tensors |= _tensors(prefix, form, drawn)
        scales[layer] = drawn.float().expand(2, num_heads).contiguous()
    if tensors:
        _add_tensors(checkpoint.path, tensors)
    return RoundedCheckpoint(checkpoint.path, checkpoint.model, least_margin=0.0, scales=scales)


def _tensors(prefix: str, form: ScaleForm, drawn: torch.Tensor) -> dict[str, torch.Tensor]:
    keys, values = drawn.clone()
    if form == "single":
        return {f"{prefix}.kv_scale": keys.squeeze().float()}
    if form == "projections":
        names = (f"{prefix}.k_proj.k_scale", f"{prefix}.v_proj.v_scale")
    else:
        names = (f"{prefix}.k_scale", f"{prefix}.v_scale")
    shape = (-1, 1, 1) if form == "heads" else (-1,)
    return {name: half.view(shape) for name, half in zip(names, (keys, values), strict=True)}


def _add_tensors(directory: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    path = directory / "model.safetensors"
    save_file({**load_file(path), **tensors}, path, metadata={"format": "pt"})
