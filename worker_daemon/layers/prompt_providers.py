"""Libraries that may compute the attention of long chunks in place of our kernel, over the same
gathered keys and values.

None is needed. Each is an optional extra, which is imported only where it is tried, and tried only
at load (provider_choice.py): a step never calls one for scores that it has not computed before.

Letters: L query tokens, R gathered positions, Hq and Hkv query and KV heads, D head_dim.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from worker_daemon.contracts.attention import (
    AttentionLayer,
    AttentionMetadata,
    GatheredAttention,
    KeyRange,
)
from worker_daemon.layers.attention import HeadSizes
from worker_daemon.layers.bare_package import bare_package

AttendGathered = Callable[[Tensor, Tensor, AttentionLayer, int | None], Tensor]
"""(q [L, Hq, D], context [2, R, Hkv, D], layer, window) -> [L, Hq, D]: GatheredAttention.attend
without a log-sum-exp."""


LEAST_OPERATIONS: Final = 1e11
"""Operations of a chunk that a library computes: ours takes about 0.2 ms for as many on an H200,
and a library's launch as much of the host, two times what ours does."""


class ScoreKind(NamedTuple):
    """A kind of softmax over a chunk's scores. Layers of one kind run the same kernel."""

    window: int | None
    """In tokens; None if each query sees all keys up to its own."""
    logit_softcap: float | None
    has_sinks: bool

    @classmethod
    def of(cls, layer: AttentionLayer, window: int | None) -> "ScoreKind":
        """Return a layer's kind. window: the layer's, None where it covers the whole sequence."""
        return cls(window, layer.logit_softcap, layer.sinks is not None)

    def __str__(self) -> str:
        parts = [
            "" if self.window is None else f"window {self.window}",
            "" if self.logit_softcap is None else f"soft cap {self.logit_softcap:g}",
            "sinks" if self.has_sinks else "",
        ]
        return ", ".join(filter(None, parts)) or "all keys"


@dataclass(frozen=True, slots=True)
class PromptCase:
    """The long chunks that a rank's layers attend to."""

    device: torch.device
    dtype: torch.dtype
    heads: HeadSizes
    """This rank's."""
    kinds: tuple[ScoreKind, ...]
    """Distinct. If one has a window, the same without it is there too, for shorter sequences."""


class PromptProvider(Protocol):
    """A library that computes attention over gathered keys."""

    @property
    def name(self) -> str:
        """The name of its distribution."""

    @property
    def version(self) -> str | None:
        """None if it is not installed. Imports nothing of it."""

    def find_obstacle(self, case: PromptCase, kind: ScoreKind) -> str | None:
        """Return why it cannot compute chunks of this kind; None if it should. Imports nothing of
        it."""

    def open(self) -> AttendGathered:
        """Import the library, and return its attention. The first call for each ScoreKind may
        compile, later ones must not, whatever L >= MIN_TOKENS and R are.

        Raises:
            Exception: of any class, as libraries raise them.
        """


class FlashAttention:
    """PromptProvider by FlashAttention's kernels in CuTe DSL (package flash-attn-4, Dao et al.;
    Shah et al., arXiv 2407.08608, on Hopper).

    Its causal mask is aligned with the last key, as ours is. It sums in float32. Kernels depend on
    heads, dtype, cap, and on whether there are windows or sinks: the lengths are arguments.
    """

    name = "flash-attn-4"

    def __init__(self, pack_gqa: bool | None = None) -> None:
        """pack_gqa: a tile has the query heads of a KV head, not more tokens of one; None lets the
        library choose."""
        self._pack_gqa = pack_gqa

    @property
    def version(self) -> str | None:
        """See PromptProvider."""
        try:
            return version(self.name)
        except PackageNotFoundError:
            return None

    def find_obstacle(self, case: PromptCase, kind: ScoreKind) -> str | None:
        """See PromptProvider."""
        heads = case.heads
        major, _ = torch.cuda.get_device_capability(case.device)
        if major != 9:  # other kernels, whose choice depends on the lengths
            return f"it is used on compute capability 9 only, not {major}"
        if case.dtype not in (torch.bfloat16, torch.float16):
            return f"it does not compute in {case.dtype}"
        if heads.head_dim % 8 or heads.head_dim > 256:
            return f"it has no kernel for heads of {heads.head_dim}"
        return None

    def open(self) -> AttendGathered:
        """See PromptProvider."""
        # It needs a few modules of quack, whose __init__.py imports operators that need
        # torch._dynamo: half of the time. If another version needs more, quack is imported whole.
        with suppress(Exception), bare_package("quack"):
            import_module("quack.dsl")  # changes the DSL, as quack/__init__.py has it done
            import_module("flash_attn.cute")
        from flash_attn.cute import flash_attn_func

        pack_gqa = self._pack_gqa

        def attend(q: Tensor, context: Tensor, layer: AttentionLayer, window: int | None) -> Tensor:
            keys, values = context.unsqueeze(1).unbind(0)
            out: Tensor
            out, _ = flash_attn_func(
                q.unsqueeze(0),
                keys,
                values,
                softmax_scale=layer.scale,
                causal=True,
                # Keys left of the query's own, and right of it.
                window_size=(None, None) if window is None else (window - 1, 0),
                softcap=layer.logit_softcap or 0.0,
                learnable_sink=None if layer.sinks is None else layer.sinks.values,
                pack_gqa=pack_gqa,
            )
            return out.squeeze(0)

        return attend


class ProvidedGathered:
    """GatheredAttention that gathers with ours, and attends with libraries where these were chosen.

    Chunks of other kinds, those whose log-sum-exp is asked for, and small ones are ours.
    """

    def __init__(
        self, ours: GatheredAttention[Tensor], provided: "dict[ScoreKind, AttendGathered]"
    ) -> None:
        self._ours = ours
        self._provided = provided

    def gather(
        self,
        kv_cache: Tensor,
        layer: AttentionLayer,
        metadata: AttentionMetadata,
        keys: KeyRange,
        dtype: torch.dtype,
    ) -> Tensor:
        """See GatheredAttention."""
        return self._ours.gather(kv_cache, layer, metadata, keys, dtype)

    def attend(
        self,
        q: Tensor,
        context: Tensor,
        layer: AttentionLayer,
        window: int | None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """See GatheredAttention."""
        provided = self._provided.get(ScoreKind.of(layer, window)) if lse is None else None
        if provided is None or _num_operations(q, context, window) < LEAST_OPERATIONS:
            return self._ours.attend(q, context, layer, window, lse)
        return provided(q, context, layer, window)


def _num_operations(q: Tensor, context: Tensor, window: int | None) -> float:
    """Return the operations of both products: two for each visible pair, head and dimension."""
    num_queries, num_keys = q.shape[0], context.shape[1]
    keys_seen = num_keys - num_queries / 2  # in the mean
    if window is not None:
        keys_seen = min(keys_seen, window)
    return 4.0 * keys_seen * q.numel()
