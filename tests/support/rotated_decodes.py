"""Decode steps whose projections are not yet rotated and stored, their attention in fp64, and
checks of the fused kernel; on any device, at any size."""

from dataclasses import dataclass, replace

import torch

from benchmarks.layer_reference import Heads, ProjectedStep, make_rows, rotated
from benchmarks.paged_reference import (
    PagedBatch,
    Shape,
    dense_attention,
    make_batch,
    relative_error,
)
from tests.support.attention_steps import GivenSinks, random_sinks
from worker_daemon.contracts.attention import AttentionLayer, AttentionStep
from worker_daemon.contracts.layer_ops import LayerOps, Norm
from worker_daemon.kernels.paged_attention import TritonAttention
from worker_daemon.kernels.paged_decode import rotate_and_attend

# Relative to fp64: keys and queries are rounded once more than in the tests of attention alone, and
# norm weights increase scores and their errors. TF32 would give 3e-4.
BOUNDS = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# A capped score is exact to some 2^-22 of its cap, while scores near the cap cost no more than that
# in TF32.
CAPPED_BOUNDS = {**BOUNDS, torch.float32: 1e-4}


def bound_of(logit_softcap: float | None, dtype: torch.dtype) -> float:
    """Return the bound on the relative error of attention in this dtype."""
    return (BOUNDS if logit_softcap is None else CAPPED_BOUNDS)[dtype]


@dataclass(frozen=True)
class RotatedDecode:
    """One step, and its layer's settings."""

    batch: PagedBatch
    qkv: torch.Tensor  # [N, (Hq + 2 Hkv) D]
    positions: torch.Tensor  # [N] int32
    rotary_table: torch.Tensor
    head_norms: Norm | None
    interleaved: bool = False
    logit_softcap: float | None = None
    sinks: GivenSinks | None = None

    @property
    def step(self) -> AttentionStep:
        return AttentionStep(self.positions, self.rotary_table, self.batch.metadata)

    def layer(self, ops: LayerOps, window: int | None) -> AttentionLayer:
        shape = self.batch.shape
        return AttentionLayer(
            ops,
            shape.num_kv_heads,
            shape.head_dim,
            shape.scale,
            window,
            self.head_norms,
            interleaved=self.interleaved,
            logit_softcap=self.logit_softcap,
            sinks=self.sinks,
        )

    @property
    def options(self) -> dict[str, object]:
        """The fused kernel's arguments for the rotation and the scores."""
        return {"interleaved": self.interleaved, **self.score_options}

    @property
    def score_options(self) -> dict[str, object]:
        """Those for the scores."""
        return {"logit_softcap": self.logit_softcap, "sinks": self.sinks}

    def on_copies(self) -> "RotatedDecode":
        """Return the same step with copies of projection and cache."""
        copy = self.over(self.batch.kv_cache.clone())
        return replace(copy, qkv=self.qkv.clone())

    def over(self, kv_cache: torch.Tensor) -> "RotatedDecode":
        """Return the same step over another cache."""
        return replace(self, batch=replace(self.batch, kv_cache=kv_cache))

    def copy_from(self, other: "RotatedDecode") -> None:
        """Fill this step's tensors, as a graph's are, with those of another step of the same sizes,
        whose cache may have fewer blocks. History and expected results stay this step's."""
        self.batch.kv_cache[: len(other.batch.kv_cache)].copy_(other.batch.kv_cache)
        for mine, given in zip(self._inputs(), other._inputs(), strict=True):
            mine.copy_(given)

    def _inputs(self) -> list[torch.Tensor]:
        """The tensors that kernels read, except the cache."""
        batch, found = self.batch, [self.qkv, self.positions, self.rotary_table]
        found += [batch.slot_mapping, batch.block_table, batch.seq_rows]
        found += [batch.query_start_loc, batch.seq_lens, batch.seq_order]
        if self.head_norms is not None:
            found.append(self.head_norms.weight)
        if self.sinks is not None:
            found.append(self.sinks.values)
        return found

    def turned_heads(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the queries [N, Hq, D], and the keys of the real tokens [n, Hkv, D], rounded."""
        shape, dtype = self.batch.shape, self.qkv.dtype
        step = ProjectedStep(
            Heads(
                shape.num_q_heads,
                shape.num_kv_heads,
                shape.head_dim,
                rotary_dim=2 * self.rotary_table.shape[2],
                interleaved=self.interleaved,
            ),
            self.qkv,
            self.positions.long(),
            self.rotary_table,
            self.head_norms,
            self.batch.kv_cache,
            self.batch.slot_mapping,
        )
        q, k, _ = rotated(step)
        return q.to(dtype), k[: self.batch.num_real_tokens].to(dtype)

    def expected(self, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output [N, Hq, D] fp64, and the keys of the real tokens [n, Hkv, D],
        rounded."""
        q, keys = self.turned_heads()
        history = []
        token = 0
        for query_len, both in zip(self.batch.query_lens, self.batch.history, strict=True):
            cached = both.clone()
            if query_len:
                cached[0, -1] = keys[token]
            token += query_len
            history.append(cached)
        exact = replace(self.batch, q=q, history=history)
        return dense_attention(exact, window, **self.score_options), keys


def make_decode(
    shape: Shape,
    seq_lens: list[int],
    *,
    dtype: torch.dtype,
    device: str,
    seed: int,
    is_normed: bool = False,
    weight_offset: float = 0.0,
    num_padding: int = 0,
    num_idle: int = 0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    logit_softcap: float | None = None,
    has_sinks: bool = False,
) -> RotatedDecode:
    """Return a step with one token for each sequence of these lengths, num_idle sequences without a
    token, and num_padding rows. weight_offset: that of the heads' norms; rotary_dim: rotated
    elements of a head, None = all."""
    lengths = [(1, seq_len) for seq_len in seq_lens] + [(0, 7)] * num_idle
    batch = make_batch(
        shape, lengths, dtype=dtype, device=device, seed=seed, num_padding=num_padding
    )
    random = torch.Generator(device).manual_seed(seed)
    num_positions = max(seq_lens, default=1)
    half = (rotary_dim or shape.head_dim) // 2
    angles = torch.rand(num_positions, half, generator=random, device=device) * 6.3
    positions = torch.tensor([length - 1 for length in seq_lens] + [0] * num_padding).int()
    norms = Norm(make_rows(2, shape.head_dim, dtype, random), 1e-5, weight_offset)
    return RotatedDecode(
        batch,
        torch.cat((batch.q, batch.k, batch.v), dim=1).flatten(1),
        positions.to(device),
        torch.stack((angles.cos(), angles.sin()), dim=1),
        norms if is_normed else None,
        interleaved,
        logit_softcap,
        random_sinks(shape.num_q_heads, dtype, device, seed) if has_sinks else None,
    )


def run_fused(step: RotatedDecode, window: int | None, **overrides: object) -> torch.Tensor:
    """Run the fused kernel into an output full of NaN."""
    batch = step.batch
    out = torch.full(batch.q.shape, float("nan"), dtype=batch.q.dtype, device=batch.q.device)
    result = rotate_and_attend(
        step.qkv,
        batch.kv_cache,
        step.step,
        step.head_norms,
        scale=batch.shape.scale,
        window=window,
        out=out,
        **step.options,
        **overrides,
    )
    assert result is out
    return out


def run_apart(
    step: RotatedDecode, backend: TritonAttention, ops: LayerOps, window: int | None
) -> torch.Tensor:
    """Run the two separate kernels; the step is overwritten."""
    layer, kv_cache = step.layer(ops, window), step.batch.kv_cache
    q = layer.rotate_and_store(step.qkv, kv_cache, step.step)
    return backend.attend(q, kv_cache, layer, step.batch.metadata)


def check_output(step: RotatedDecode, out: torch.Tensor, window: int | None) -> None:
    """Compare the output with fp64; padding rows must be 0."""
    num_real = step.batch.num_real_tokens
    expected, _ = step.expected(window)
    bound = bound_of(step.logit_softcap, out.dtype)
    assert relative_error(out[:num_real], expected[:num_real]) < bound
    assert torch.equal(out[num_real:], torch.zeros_like(out[num_real:]))


def check_cache(step: RotatedDecode, before: torch.Tensor) -> None:
    """Check that the newest keys and values are in their slots, and nothing else has changed."""
    num_real = step.batch.num_real_tokens
    cache, size = step.batch.kv_cache.clone(), step.batch.shape.block_size
    slots = step.batch.slot_mapping[:num_real]
    stored = slots >= 0
    block, offset = slots[stored] // size, slots[stored] % size
    keys = step.expected(None)[1][stored]
    if len(keys):
        assert relative_error(cache[block, 0, offset], keys) < BOUNDS[cache.dtype]
    assert torch.equal(cache[block, 1, offset], step.batch.v[:num_real][stored])
    cache[block, :, offset] = before[block, :, offset]
    assert torch.equal(cache.isnan(), before.isnan())
    assert torch.equal(cache.nan_to_num(), before.nan_to_num())


def check_fused(step: RotatedDecode, window: int | None, **overrides: object) -> None:
    """Check the fused kernel's output and cache; the projection must not change."""
    before, qkv = step.batch.kv_cache.clone(), step.qkv.clone()
    out = run_fused(step, window, **overrides)
    check_output(step, out, window)
    check_cache(step, before)
    assert torch.equal(step.qkv, qkv)
