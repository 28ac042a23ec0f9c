"""Checks of the layer kernels on any device and at any size, used by the tests under Triton's
interpreter and on a GPU."""

import torch

from benchmarks.layer_reference import (
    EPS,
    Heads,
    ProjectedStep,
    activated,
    make_projected,
    make_rows,
    normed,
    rotated,
)
from benchmarks.paged_reference import relative_error
from worker_daemon.contracts.kv_scales import KVScales
from worker_daemon.contracts.layer_ops import (
    Activation,
    Epilogue,
    LayerOps,
    Norm,
    NormedSum,
    SpanNorms,
)

# Relative errors: one rounding of the output, and in fp32 the order of a sum.
BOUNDS = {torch.float32: 1e-6, torch.float16: 4e-4, torch.bfloat16: 3e-3}


def generator(device: str, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def check_norms(
    ops: LayerOps,
    device: str,
    dtype: torch.dtype,
    num_rows: int,
    size: int,
    seed: int,
    *,
    bound: float | None = None,
    weight_offset: float = 0.0,
) -> None:
    """Check all norms, which must not change their arguments.

    Sums must equal torch's bit for bit, unless a bound replaces BOUNDS.
    """
    random = generator(device, seed)
    x, residual = (make_rows(num_rows, size, dtype, random) for _ in range(2))
    norm = Norm(make_rows(1, size, dtype, random)[0], EPS, weight_offset)
    x_before, residual_before = x.clone(), residual.clone()
    alone = ops.rms_norm(x, norm)
    assert alone.dtype == dtype
    assert relative_error(alone, normed(x, norm)) < (bound or BOUNDS[dtype])

    def check_sum(total: torch.Tensor, expected: torch.Tensor, bound: float | None) -> None:
        assert relative_error(total, expected) < bound if bound else torch.equal(total, expected)

    out, total = ops.sum_and_norm(NormedSum(x, residual, norm))
    assert out.dtype == dtype
    check_sum(total, residual_before + x_before, bound)
    assert relative_error(out, normed(total, norm)) < (bound or BOUNDS[dtype])
    assert torch.equal(out, ops.rms_norm(total, norm))

    # In float32 a product and the addition to it may be rounded together.
    fused_bound = BOUNDS[dtype] if dtype == torch.float32 else bound
    added = ops.rms_norm_add(x, residual, norm)
    check_sum(added, residual_before + alone, fused_bound)
    other = Norm(make_rows(1, size, dtype, random)[0], EPS)
    out, total = ops.sum_and_norm(NormedSum(x, residual, other, norm))
    assert torch.equal(total, added)
    assert torch.equal(out, ops.rms_norm(total, other))
    assert torch.equal(x, x_before)
    assert torch.equal(residual, residual_before)


def check_span_norms(
    ops: LayerOps,
    device: str,
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    num_ranks: int,
    seed: int,
    bound: float | None = None,
) -> None:
    """Check the norms of all queries and of all keys, of one rank, and of several that each hold a
    part of the heads; of the KV heads, ranks hold copies if there are fewer than ranks. heads:
    query heads, KV heads, elements of a head."""
    num_q_heads, num_kv_heads, head_dim = heads
    random = generator(device, seed)
    rows = make_rows(7, (num_q_heads + 2 * num_kv_heads) * head_dim, dtype, random)
    sizes = (num_q_heads * head_dim, num_kv_heads * head_dim)
    q, k, v = rows.split((*sizes, sizes[1]), 1)
    q_weight, k_weight = (make_rows(1, size, dtype, random)[0] for size in sizes)
    q_parts, k_parts, v_parts = (_parts(x, head_dim, num_ranks) for x in (q, k, v))
    q_weights, k_weights = (_parts(x[None], head_dim, num_ranks) for x in (q_weight, k_weight))
    weights = [torch.cat(pair, 1)[0] for pair in zip(q_weights, k_weights, strict=True)]
    norms = [SpanNorms(weight, EPS, q_parts[0].shape[1]) for weight in weights]
    parts = [torch.cat(three, 1) for three in zip(q_parts, k_parts, v_parts, strict=True)]
    before = [part.clone() for part in parts]
    means = None
    if num_ranks > 1:
        shares = [
            ops.span_means(part, norm, num_ranks) for part, norm in zip(parts, norms, strict=True)
        ]
        assert all(torch.equal(part, old) for part, old in zip(parts, before, strict=True))
        means = torch.stack(shares).sum(0)
        assert (means.dtype, means.shape) == (torch.float32, (7, 2))
        exact = torch.stack([x.double().square().mean(1) for x in (q, k)], 1)
        assert relative_error(means, exact) < 1e-6
    expected = [
        _parts(normed(x, Norm(weight, EPS)), head_dim, num_ranks)
        for x, weight in ((q, q_weight), (k, k_weight))
    ]
    for rank, part in enumerate(parts):
        out = ops.norm_spans(part, norms[rank], means)
        assert (out.dtype, out.shape) == (dtype, before[rank].shape)
        widths = [x[rank].shape[1] for x in (q_parts, k_parts, v_parts)]
        *spans, values = out.split(widths, 1)
        for span, exact_parts in zip(spans, expected, strict=True):
            assert relative_error(span, exact_parts[rank]) < (bound or BOUNDS[dtype])
        assert torch.equal(values, v_parts[rank])


def _parts(x: torch.Tensor, head_dim: int, num_ranks: int) -> list[torch.Tensor]:
    """Split rows of heads over ranks; copy them if there are fewer."""
    heads = x.unflatten(1, (-1, head_dim))
    count = max(1, heads.shape[1] // num_ranks)
    firsts = [rank * heads.shape[1] // num_ranks for rank in range(num_ranks)]
    return [heads[:, first : first + count].flatten(1) for first in firsts]


def check_activation(
    ops: LayerOps,
    activation: Activation,
    device: str,
    dtype: torch.dtype,
    num_rows: int,
    size: int,
    seed: int,
    bound: float | None = None,
) -> None:
    """Check act_and_mul, including gates far from 0."""
    gate_up = make_rows(num_rows, 2 * size, dtype, generator(device, seed)) * 4
    out = ops.act_and_mul(gate_up, activation)
    assert out.shape == (num_rows, size)
    assert out.dtype == dtype
    assert relative_error(out, activated(gate_up, activation)) < (bound or BOUNDS[dtype])


def check_products(
    ops: LayerOps,
    device: str,
    dtype: torch.dtype,
    num_rows: int,
    num_inputs: int,
    num_outputs: int,
    seed: int,
    *,
    bound: float,
    activation: Activation = "silu",
    weight_offset: float = 0.0,
) -> None:
    """Check products with a norm before, a gate after, or both, with and without bias, against
    fp64. num_outputs is even."""
    random = generator(device, seed)
    part, residual = (make_rows(num_rows, num_inputs, dtype, random) for _ in range(2))
    norm = Norm(make_rows(1, num_inputs, dtype, random)[0], EPS, weight_offset)
    weight = make_rows(num_outputs, num_inputs, dtype, random) / num_inputs**0.5
    bias = make_rows(1, num_outputs, dtype, random)[0]
    for b in (None, bias):
        exact = _product(residual.double(), weight, b)
        gated, _ = ops.product(residual, weight, Epilogue(b, activation=activation))
        assert isinstance(gated, torch.Tensor)
        assert relative_error(gated, activated(exact, activation)) < bound
        sums = [
            (NormedSum(None, residual, norm), residual),
            (NormedSum(part, residual, norm), residual + part),
            (NormedSum(part, residual, norm, norm), residual + normed(part, norm)),
        ]
        for source, expected in sums:
            y, total = ops.product(source, weight, Epilogue(b))
            assert isinstance(y, torch.Tensor)
            assert relative_error(total, expected.double()) < 2 * BOUNDS[dtype] + bound / 5
            exact = _product(normed(total, norm), weight, b)
            assert y.dtype == dtype
            assert relative_error(y, exact) < bound
            y, total_again = ops.product(source, weight, Epilogue(b, activation=activation))
            assert isinstance(y, torch.Tensor)
            assert torch.equal(total_again, total)
            assert relative_error(y, activated(exact, activation)) < bound


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product = x @ weight.double().T
    return product if bias is None else product + bias.double()


def check_projection(
    ops: LayerOps,
    device: str,
    dtype: torch.dtype,
    heads: Heads,
    num_tokens: int,
    seed: int,
    *,
    pads: bool = True,
    integers: torch.dtype = torch.int64,
    bound: float | None = None,
    weight_offset: float = 0.0,
    rotary_table: torch.Tensor | None = None,
) -> None:
    """Check rotate_and_store: queries, and the written and unwritten slots."""
    random = generator(device, seed)
    step = make_projected(
        heads, num_tokens, dtype, random,
        pads=pads, weight_offset=weight_offset, rotary_table=rotary_table,
    )  # fmt: skip
    q, k, v = rotated(step)
    before = step.kv_cache.clone()
    out = run_projection(ops, step, step.kv_cache, integers)
    assert out.shape == q.shape
    assert out.dtype == dtype
    assert relative_error(out, q) < (bound or BOUNDS[dtype])

    written = step.slot_mapping >= 0
    slots = step.slot_mapping[written]
    block, offset = slots // heads.block_size, slots % heads.block_size
    keys = step.kv_cache[block, 0, offset]
    assert relative_error(keys, k[written]) < (bound or BOUNDS[dtype])
    assert torch.equal(step.kv_cache[block, 1, offset], v[written])
    step.kv_cache[block, :, offset] = before[block, :, offset]
    assert torch.equal(step.kv_cache, before)


def run_projection(
    ops: LayerOps,
    step: ProjectedStep,
    kv_cache: torch.Tensor,
    integers: torch.dtype = torch.int64,
    kv_scales: KVScales | None = None,
) -> torch.Tensor:
    """Return the queries; step.qkv is overwritten. integers: dtype of positions and slots.
    kv_scales: those of a cache in FP8."""
    return ops.rotate_and_store(
        step.qkv,
        step.positions.to(integers),
        step.rotary_table,
        step.heads.num_kv_heads,
        step.heads.head_dim,
        step.head_norms,
        kv_cache,
        step.slot_mapping.to(integers),
        kv_scales,
        interleaved=step.heads.interleaved,
    )
