"""The attention of published models at their real sizes, for tests of kernels on any device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.paged_reference import PagedBatch, Shape, make_batch
from tests.support.attention_steps import GivenSinks, random_sinks
from tests.support.rotated_decodes import RotatedDecode, make_decode


@dataclass(frozen=True)
class ModelAttention:
    """The layers of one kind of a model."""

    shape: Shape
    window: int | None = None
    logit_softcap: float | None = None
    has_sinks: bool = False
    rotary_dim: int | None = None
    """Rotated elements of a head; None = all."""
    interleaved: bool = False
    is_normed: bool = False
    """A norm for each head."""
    weight_offset: float = 0.0
    """That of the heads' norms."""

    def batch(
        self,
        lengths: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        device: str,
        seed: int,
        num_padding: int = 0,
    ) -> PagedBatch:
        """Return a batch (make_batch) whose scores reach the cap, if there is one."""
        made = make_batch(
            self.shape, [*lengths], dtype=dtype, device=device, seed=seed, num_padding=num_padding
        )
        self._enlarge_scores(made.q)
        return made

    def decode(
        self,
        seq_lens: Sequence[int],
        dtype: torch.dtype,
        device: str,
        seed: int,
        num_padding: int = 0,
        num_idle: int = 0,
    ) -> RotatedDecode:
        """Return a decode step (make_decode) whose scores reach the cap, if there is one."""
        made = make_decode(
            self.shape,
            [*seq_lens],
            dtype=dtype,
            device=device,
            seed=seed,
            is_normed=self.is_normed,
            weight_offset=self.weight_offset,
            num_padding=num_padding,
            num_idle=num_idle,
            rotary_dim=self.rotary_dim,
            interleaved=self.interleaved,
            logit_softcap=self.logit_softcap,
            has_sinks=self.has_sinks,
        )
        self._enlarge_scores(made.qkv[:, : self.shape.num_q_heads * self.shape.head_dim])
        return made

    def score_options(self, dtype: torch.dtype, device: str, seed: int) -> dict[str, object]:
        """Return the softcap, and random sinks if the layers have any, by argument name."""
        return {"logit_softcap": self.logit_softcap, "sinks": self._sinks(dtype, device, seed)}

    def with_window(self, window: int | None) -> "ModelAttention":
        """Return the same layers with another window."""
        return replace(self, window=window)

    def _sinks(self, dtype: torch.dtype, device: str, seed: int) -> GivenSinks | None:
        if not self.has_sinks:
            return None
        return random_sinks(self.shape.num_q_heads, dtype, device, seed)

    def _enlarge_scores(self, q: torch.Tensor) -> None:
        """Bring scores, of variance 1, to a third of the cap: otherwise it would change little."""
        if self.logit_softcap is not None:
            q.mul_(self.logit_softcap / 3)


_GEMMA2 = ModelAttention(Shape(16, 8, 256), logit_softcap=50.0)
_GEMMA3 = ModelAttention(Shape(16, 8, 256), is_normed=True, weight_offset=1.0)
_GPT_OSS = ModelAttention(Shape(64, 8, 64), has_sinks=True)

MODEL_ATTENTION: Mapping[str, ModelAttention] = {
    "gemma2-9b": _GEMMA2,
    "gemma2-9b sliding": _GEMMA2.with_window(4096),
    "gemma3-12b": _GEMMA3,
    "gemma3-12b sliding": _GEMMA3.with_window(1024),
    "gpt-oss-20b": _GPT_OSS,
    "gpt-oss-20b sliding": _GPT_OSS.with_window(128),
    "glm4-9b": ModelAttention(Shape(32, 2, 128), rotary_dim=64, interleaved=True),
    "phi4-14b": ModelAttention(Shape(40, 10, 128)),
    "phi4-mini": ModelAttention(Shape(24, 8, 128), rotary_dim=96),
    "phi3-mini": ModelAttention(Shape(32, 32, 96), window=2047),
    "olmo2-7b": ModelAttention(Shape(32, 32, 128)),
}
"""By model, and by kind of layer if it has several."""

SCORED = ("gemma2-9b", "gemma2-9b sliding", "gpt-oss-20b", "gpt-oss-20b sliding")
"""Those that cap scores or have sinks."""
