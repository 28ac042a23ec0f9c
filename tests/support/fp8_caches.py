"""Paged batches and decodes over a cache in FP8, and their attention over the same cache in
float32; on any device.

The definition is written out here, apart from the code under test: a cached value is x / scale in
float32, limited to +-448 and rounded to float8_e4m3fn; a reader sees it times the scale.
"""

from dataclasses import dataclass, replace

import torch

from benchmarks.paged_reference import PagedBatch, dense_attention, relative_error
from tests.support.attention_steps import GivenSinks
from tests.support.rotated_decodes import RotatedDecode
from worker_daemon.contracts.attention import AttentionLayer
from worker_daemon.contracts.layer_ops import LayerOps
from worker_daemon.kernels.paged_attention import TritonAttention, paged_attention
from worker_daemon.kernels.paged_decode import rotate_and_attend

# Relative to fp64 over the same cached values.
BOUNDS = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}

# Keys are rounded to the model's dtype before FP8, so a few fall on the other side of a tie.
KEY_BOUNDS = {torch.float32: 1e-3, torch.float16: 4e-3, torch.bfloat16: 1.5e-2}


@dataclass(frozen=True)
class GivenScales:
    """KVScales with these values."""

    values: torch.Tensor  # float32 [2, Hkv]


def random_scales(num_kv_heads: int, device: str, seed: int) -> GivenScales:
    """Return scales of which the smallest limit a few values of a normal distribution."""
    generator = torch.Generator(device).manual_seed(seed)
    exponents = torch.rand(2, num_kv_heads, generator=generator, device=device) * 4 - 7.2
    return GivenScales(exponents.exp2())


def to_fp8(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[..., Hkv, D] -> float8_e4m3fn, as the kernels define it: the product with the scale's
    reciprocal, which at a tie may round otherwise than the quotient."""
    scaled = x.float() * (1.0 / scales[:, None])
    return scaled.clamp(min=-448.0, max=448.0).to(torch.float8_e4m3fn)


def rounded(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return [..., Hkv, D] as a reader of the cache sees it, float32."""
    return to_fp8(x, scales).float() * scales[:, None]


def in_fp8(batch: PagedBatch, scales: GivenScales) -> PagedBatch:
    """Return the batch over a cache in FP8, in which this step's tokens are not stored yet; its
    history is what readers see."""
    of_keys, of_values = scales.values
    halves = batch.kv_cache.unbind(1)
    cache = torch.stack([to_fp8(halves[0], of_keys), to_fp8(halves[1], of_values)], dim=1)
    history = [
        torch.stack([rounded(both[0], of_keys), rounded(both[1], of_values)])
        for both in batch.history
    ]
    return replace(batch, kv_cache=cache, history=history)


def store(batch: PagedBatch, scales: GivenScales) -> None:
    """Write this step's keys and values to their slots."""
    slots = batch.slot_mapping[: batch.num_real_tokens]
    block, offset = slots // batch.shape.block_size, slots % batch.shape.block_size
    for which, rows in enumerate((batch.k, batch.v)):
        stored = to_fp8(rows[: batch.num_real_tokens], scales.values[which])
        batch.kv_cache.view(torch.uint8)[block, which, offset] = stored.view(torch.uint8)


def check_paged(
    batch: PagedBatch,
    scales: GivenScales,
    window: int | None,
    *,
    logit_softcap: float | None = None,
    sinks: GivenSinks | None = None,
    **overrides: object,
) -> None:
    """Check paged_attention of a batch of in_fp8, against fp64 over what readers see."""
    store(batch, scales)
    out = torch.full_like(batch.q, float("nan"), memory_format=torch.contiguous_format)
    paged_attention(
        batch.q,
        batch.kv_cache,
        batch.metadata,
        scale=batch.shape.scale,
        window=window,
        logit_softcap=logit_softcap,
        sinks=sinks,
        kv_scales=scales,
        out=out,
        **overrides,
    )
    expected = dense_attention(batch, window, logit_softcap=logit_softcap, sinks=sinks)
    assert relative_error(out, expected) < BOUNDS[out.dtype]
    assert torch.equal(out[batch.num_real_tokens :], torch.zeros_like(out[batch.num_real_tokens :]))


@dataclass(frozen=True)
class FP8Decode:
    """A decode step that turns and stores its own heads, over a cache in FP8."""

    wide: RotatedDecode  # over a cache of the model's dtype
    batch: PagedBatch
    scales: GivenScales

    def layer(self, ops: LayerOps, window: int | None) -> AttentionLayer:
        return replace(self.wide.layer(ops, window), kv_scales=self.scales)

    def on_copies(self) -> "FP8Decode":
        """Return the same step with copies of projection and cache."""
        batch = replace(self.batch, kv_cache=self.batch.kv_cache.clone())
        return replace(self, wide=self.wide.on_copies(), batch=batch)

    def run_fused(self, window: int | None, **overrides: object) -> torch.Tensor:
        out = torch.full_like(self.batch.q, float("nan"), memory_format=torch.contiguous_format)
        rotate_and_attend(
            self.wide.qkv,
            self.batch.kv_cache,
            self.wide.step,
            self.wide.head_norms,
            scale=self.batch.shape.scale,
            window=window,
            kv_scales=self.scales,
            out=out,
            **self.wide.options,
            **overrides,
        )
        return out

    def run_apart(
        self, backend: TritonAttention, ops: LayerOps, window: int | None
    ) -> torch.Tensor:
        layer = self.layer(ops, window)
        q = layer.rotate_and_store(self.wide.qkv, self.batch.kv_cache, self.wide.step)
        return backend.attend(q, self.batch.kv_cache, layer, self.batch.metadata)

    def check(self, window: int | None, **overrides: object) -> None:
        """Check output and cache of the fused kernel."""
        before = self.batch.kv_cache.clone()
        out = self.run_fused(window, **overrides)
        self.check_output(out, window)
        self.check_cache(before)

    def check_output(self, out: torch.Tensor, window: int | None) -> None:
        """Compare with fp64 over the cache that the step has made; padding rows must be 0."""
        num_real = self.batch.num_real_tokens
        q, keys = self.wide.turned_heads()
        history, token = [], 0
        for query_len, both in zip(self.batch.query_lens, self.batch.history, strict=True):
            seen = both.clone()
            if query_len:
                seen[0, -1] = rounded(keys[token], self.scales.values[0])
            token += query_len
            history.append(seen)
        seen_batch = replace(self.batch, q=q, history=history)
        expected = dense_attention(seen_batch, window, **self.wide.score_options)
        bound = max(BOUNDS[out.dtype], KEY_BOUNDS[out.dtype])
        assert relative_error(out[:num_real], expected[:num_real]) < bound
        assert torch.equal(out[num_real:], torch.zeros_like(out[num_real:]))

    def check_cache(self, before: torch.Tensor) -> None:
        """Check that the newest keys and values are in their slots, and nothing else changed."""
        num_real, size = self.batch.num_real_tokens, self.batch.shape.block_size
        slots = self.batch.slot_mapping[:num_real]
        stored = slots >= 0
        block, offset = slots[stored] // size, slots[stored] % size
        of_keys, of_values = self.scales.values
        cache, had = self.batch.kv_cache.view(torch.uint8), before.view(torch.uint8)
        found = self.batch.kv_cache.float()
        keys = rounded(self.wide.turned_heads()[1][stored], of_keys)
        got = found[block, 0, offset] * of_keys[:, None]
        assert relative_error(got, keys) < KEY_BOUNDS[self.wide.qkv.dtype]
        values = to_fp8(self.batch.v[:num_real][stored], of_values)
        assert torch.equal(cache[block, 1, offset], values.view(torch.uint8))
        others = torch.ones(cache.shape[:1] + cache.shape[2:3], dtype=torch.bool)
        others = others.to(cache.device)
        others[block, offset] = False
        assert torch.equal(cache.transpose(1, 2)[others], had.transpose(1, 2)[others])


def fp8_decode(wide: RotatedDecode, seed: int) -> FP8Decode:
    """Return a decode step over a cache in FP8 with random scales."""
    device = str(wide.qkv.device)
    scales = random_scales(wide.batch.shape.num_kv_heads, device, seed)
    return FP8Decode(wide, in_fp8(wide.batch, scales), scales)
