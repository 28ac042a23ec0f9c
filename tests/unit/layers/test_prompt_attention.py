"""Whole prompts computed separately from the rest of a step, against the plain paged path: the
split of a step, and equal results for every sequence. torch's attention on the CPU stands in for
the GPU's."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from benchmarks.paged_reference import PagedBatch, Shape, make_batch, relative_error
from tests.support.attention_steps import layer_of, token_rows
from worker_daemon.backend import choose_backend
from worker_daemon.contracts.attention import AttentionLayer, AttentionMetadata, AttentionStep
from worker_daemon.layers.attention import HeadSizes
from worker_daemon.layers.attention_choice import choose_attention, is_accurate
from worker_daemon.layers.prompt_attention import PLAN_TOKENS, PromptAttention
from worker_daemon.layers.torch_attention import TorchPagedAttention

CPU = torch.device("cpu")
SHAPE = Shape(4, 2, 8)
WHOLE = [(1024, 1024), (1100, 1100), (1800, 1800), (2048, 2048), (2300, 2300)]
OTHERS = [(1, 1500), (1, 1), (0, 40), (33, 1000), (700, 700), (1200, 1300), (1023, 1023), (5, 5)]


def whole_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> torch.Tensor:
    return functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=True
    )


class Recorder:
    """Both implementations that PromptAttention calls, and what they were called with."""

    def __init__(self) -> None:
        self.plans: list[int] = []
        self.steps: list[AttentionMetadata] = []
        self.rotated: list[AttentionMetadata] = []

    def whole(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        assert q.shape[2] == k.shape[2] == v.shape[2]
        self.plans.append(q.shape[2])
        return whole_attention(q, k, v, scale)

    def attend(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        layer: AttentionLayer,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        self.steps.append(metadata)
        return TorchPagedAttention().attend(q, kv_cache, layer, metadata)

    def rotate_and_attend(
        self,
        qkv: torch.Tensor,
        kv_cache: torch.Tensor,
        layer: AttentionLayer,
        step: AttentionStep,
    ) -> torch.Tensor:
        self.rotated.append(step.metadata)
        q = layer.rotate_and_store(qkv, kv_cache, step)
        return self.attend(q, kv_cache, layer, step.metadata)


def build(lengths: list[tuple[int, int]], num_padding: int = 0, shape: Shape = SHAPE) -> PagedBatch:
    seed = random.randrange(2**31)
    print("seed", seed)
    batch = make_batch(
        shape, lengths, dtype=torch.float32, device="cpu", seed=seed, num_padding=num_padding
    )
    batch.store()
    return batch


def run(batch: PagedBatch, window: int | None = None) -> tuple[torch.Tensor, Recorder]:
    recorder = Recorder()
    backend = PromptAttention(recorder, recorder.whole)
    out = backend.attend(batch.q, batch.kv_cache, layer_of(batch.shape, window), batch.metadata)
    return out, recorder


def check(batch: PagedBatch, out: torch.Tensor, window: int | None = None) -> None:
    expected = TorchPagedAttention().attend(
        batch.q, batch.kv_cache, layer_of(batch.shape, window), batch.metadata
    )
    assert out.shape == expected.shape
    for rows in token_rows(batch):
        if rows.numel():
            assert relative_error(out[rows], expected[rows]) < 1e-5
    assert out.isfinite().all()


def planned(length: int) -> list[int]:
    """The plan of a prompt alone in its step."""
    return run(build([(length, length)]))[1].plans


@pytest.mark.parametrize("num_padding", [0, 3])
def test_random_mixed_steps(num_padding: int) -> None:
    for _ in range(3):
        lengths = random.sample(WHOLE, 2) + random.sample(OTHERS, random.randrange(6))
        random.shuffle(lengths)
        print(lengths)
        batch = build(lengths, num_padding)
        out, recorder = run(batch)
        check(batch, out)
        assert len(recorder.plans) == 2
        assert len(recorder.steps) <= 1


def test_a_step_of_every_kind() -> None:
    batch = build([*OTHERS[:4], *WHOLE, *OTHERS[4:]])
    out, recorder = run(batch)
    check(batch, out)
    assert recorder.plans == [1024, 1024, 2048, 2048, 2048]
    (others,) = recorder.steps
    # The sequence without a token is gone; two prompts left a chunk behind their heads.
    assert sorted(others.query_lens_np.tolist()) == [1, 1, 5, 33, 76, 252, 700, 1023, 1200]
    assert others.num_seqs == 9
    assert others.max_query_len == 1200
    assert others.max_seq_len == 2300
    assert sorted(others.seq_order.tolist()) == list(range(9))
    ordered = others.seq_lens[others.seq_order.long()]
    assert torch.equal(ordered, ordered.sort(descending=True).values)


def test_a_prompt_is_padded_only_where_little_is_missing() -> None:
    assert planned(1024) == planned(1500) == planned(1791) == [1024]
    assert planned(1792) == planned(2048) == planned(3583) == [2048]
    assert planned(3584) == [4096]


@pytest.mark.parametrize("length", [1, 700, 1023])
def test_shorter_prompts_stay_with_the_paged_backend(length: int) -> None:
    batch = build([(length, length), (1, 30)])
    out, recorder = run(batch)
    check(batch, out)
    assert not recorder.plans
    (step,) = recorder.steps
    assert step.num_seqs == 2


def test_chunks_behind_other_tokens_stay_with_the_paged_backend() -> None:
    batch = build([(1200, 1201), (1500, 3000)])
    out, recorder = run(batch)
    check(batch, out)
    assert not recorder.plans


def test_layers_with_a_window_stay_with_the_paged_backend() -> None:
    batch = build([(1024, 1024), (1, 30)])
    out, recorder = run(batch, window=100)
    check(batch, out, window=100)
    assert not recorder.plans


@pytest.mark.parametrize(
    ("lengths", "window", "is_left"),
    [
        ([(1, 40), (1, 7)], None, True),
        ([(1024, 1024)], 300, True),
        ([(1024, 1024), (1, 7)], None, False),
    ],
)
def test_steps_without_heads_are_turned_by_the_paged_backend(
    lengths: list[tuple[int, int]], window: int | None, is_left: bool
) -> None:
    batch = build(lengths)
    recorder = Recorder()
    backend = PromptAttention(recorder, recorder.whole)
    positions = torch.cat([torch.arange(n - length, n) for length, n in lengths])
    angles = torch.rand(2000, SHAPE.head_dim // 2)
    table = torch.stack((angles.cos(), angles.sin()), dim=1)
    layer, step = layer_of(SHAPE, window), AttentionStep(positions, table, batch.metadata)
    qkv = torch.cat((batch.q, batch.k, batch.v), dim=1).flatten(1)
    expected = batch.kv_cache.clone()
    q = layer.rotate_and_store(qkv.clone(), expected, step)
    want = TorchPagedAttention().attend(q, expected, layer, batch.metadata)
    out = backend.rotate_and_attend(qkv, batch.kv_cache, layer, step)
    assert bool(recorder.rotated) == is_left
    assert relative_error(out, want) < 1e-5
    assert torch.equal(batch.kv_cache.nan_to_num(), expected.nan_to_num())


def test_a_prompt_that_fills_its_plan_and_its_step_needs_nothing_else() -> None:
    batch = build([(2048, 2048)])
    out, recorder = run(batch)
    check(batch, out)
    assert recorder.plans == [2048]
    assert not recorder.steps


@pytest.mark.parametrize("shape", [Shape(3, 3, 16, 8), Shape(5, 1, 8, 32), Shape(4, 2, 8, 24)])
def test_heads_and_blocks_of_other_sizes(shape: Shape) -> None:
    batch = build([(1, 9), (1030, 1030), (1900, 1900), (1, 1)], shape=shape)
    out, recorder = run(batch)
    check(batch, out)
    assert recorder.plans == [1024, 2048]


@pytest.mark.parametrize("position", [0, 1])
def test_a_neighbour_that_is_not_finite_is_not_noticed(position: int) -> None:
    """Not even by a padded prompt that is followed by the neighbour's queries."""
    lengths = [(1900, 1900), (1900, 1900)]
    batch = build(lengths)
    expected, _ = run(batch)
    broken, intact = token_rows(batch)[position], token_rows(batch)[1 - position]
    for part in (batch.q, batch.k, batch.v):
        part[broken] = torch.nan
    batch.store()
    out, recorder = run(batch)
    assert recorder.plans == [2048, 2048]
    assert torch.equal(out[intact], expected[intact])


def test_all_plans_of_one_length_see_tensors_of_the_same_strides() -> None:
    """cuDNN plans for shapes and strides: every other pair would be planned when it comes."""
    seen: set[tuple[tuple[int, ...], ...]] = set()

    def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        seen.add((q.stride(), k.stride(), v.stride()))
        return whole_attention(q, k, v, scale)

    backend = PromptAttention(TorchPagedAttention(), whole)
    for lengths in ([(2048, 2048)], [(1900, 1900), (1, 50)], [(1, 5), (2100, 2100), (900, 900)]):
        batch = build(lengths)
        backend.attend(batch.q, batch.kv_cache, layer_of(SHAPE), batch.metadata)
    assert len(seen) == 1


def test_the_layers_of_a_step_share_its_split() -> None:
    batch = build([(1, 300), (1100, 1100)])
    recorder = Recorder()
    backend = PromptAttention(recorder, recorder.whole)
    for metadata in (batch.metadata, replace(batch.metadata)):
        for _ in range(2):
            backend.attend(batch.q, batch.kv_cache, layer_of(SHAPE), metadata)
    first, second, third, fourth = recorder.steps
    assert first is second
    assert third is fourth
    assert second is not third


def test_plans_are_what_the_sweep_of_sizes_runs_into() -> None:
    assert all(plan & (plan - 1) == 0 for plan in PLAN_TOKENS)
    assert sorted(PLAN_TOKENS) == list(PLAN_TOKENS)


def fails(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    raise RuntimeError("no available kernel")


def sees_everything(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> torch.Tensor:
    return functional.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)


def gives_nan(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.full_like(q, torch.nan)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("whole", "expected"),
    [(whole_attention, True), (sees_everything, False), (gives_nan, False), (fails, False)],
)
def test_an_implementation_is_tried_before_it_is_used(
    whole: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor],
    expected: bool,
    dtype: torch.dtype,
) -> None:
    assert is_accurate(whole, CPU, HeadSizes(4, 2, 32), dtype) is expected


def test_a_cpu_keeps_plain_torch() -> None:
    paged = choose_backend(CPU).attention
    assert choose_attention(paged, CPU, HeadSizes(4, 2, 64), torch.bfloat16) is paged
