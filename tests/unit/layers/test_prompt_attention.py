"""Long chunks computed apart from the rest of a step, against the plain paged path: the split of a
step, and equal results for every sequence. torch's attention on the CPU stands in for the GPU's."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from benchmarks.paged_reference import (
    PagedBatch,
    Shape,
    dense_attention,
    dense_with_lse,
    make_batch,
    relative_error,
)
from tests.support.attention_parts import attend_with_lse, check_attended, keys_from
from tests.support.attention_steps import layer_of, random_sinks, token_rows
from tests.support.fp8_caches import in_fp8, random_scales, store
from tests.support.torch_gathered import TorchGathered
from worker_daemon.backend import choose_backend
from worker_daemon.contracts.attention import AttentionLayer, AttentionMetadata, AttentionStep
from worker_daemon.layers.attention import HeadSizes
from worker_daemon.layers.attention_choice import choose_attention, is_accurate
from worker_daemon.layers.prompt_attention import MIN_TOKENS, PLAN_TOKENS, PromptAttention
from worker_daemon.layers.torch_attention import TorchPagedAttention

CPU = torch.device("cpu")
SHAPE = Shape(4, 2, 8)
PLANNED = [(1024, 1024), (1950, 1950), (2048, 2048)]
GATHERED = [(1100, 1100), (1800, 1800), (1200, 1300), (1024, 2900)]
OTHERS = [(1, 1500), (1, 1), (0, 40), (33, 1000), (700, 700), (1023, 1023), (1023, 1500), (5, 5)]


def whole_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> torch.Tensor:
    return functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=True
    )


class Recorder:
    """The paged and the whole attention that PromptAttention calls, and what they were called
    with."""

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
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.steps.append(metadata)
        return TorchPagedAttention().attend(q, kv_cache, layer, metadata, lse)

    def rotate_and_attend(
        self,
        qkv: torch.Tensor,
        kv_cache: torch.Tensor,
        layer: AttentionLayer,
        step: AttentionStep,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.rotated.append(step.metadata)
        q = layer.rotate_and_store(qkv, kv_cache, step)
        return self.attend(q, kv_cache, layer, step.metadata, lse)

    def merge(self, outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return TorchPagedAttention().merge(outs, lses)


def build(lengths: list[tuple[int, int]], num_padding: int = 0, shape: Shape = SHAPE) -> PagedBatch:
    seed = random.randrange(2**31)
    print("seed", seed)
    batch = make_batch(
        shape, lengths, dtype=torch.float32, device="cpu", seed=seed, num_padding=num_padding
    )
    batch.store()
    return batch


def backend_of(recorder: Recorder) -> tuple[PromptAttention, TorchGathered]:
    gathered = TorchGathered()
    return PromptAttention(recorder, gathered, recorder.whole), gathered


def run(
    batch: PagedBatch, window: int | None = None
) -> tuple[torch.Tensor, Recorder, TorchGathered]:
    return run_layer(batch, layer_of(batch.shape, window))


def run_layer(
    batch: PagedBatch, layer: AttentionLayer
) -> tuple[torch.Tensor, Recorder, TorchGathered]:
    recorder = Recorder()
    backend, gathered = backend_of(recorder)
    out = backend.attend(batch.q, batch.kv_cache, layer, batch.metadata)
    return out, recorder, gathered


def check(batch: PagedBatch, out: torch.Tensor, window: int | None = None) -> None:
    expected = TorchPagedAttention().attend(
        batch.q, batch.kv_cache, layer_of(batch.shape, window), batch.metadata
    )
    assert out.shape == expected.shape
    for rows in token_rows(batch):
        if rows.numel():
            assert relative_error(out[rows], expected[rows]) < 1e-5
    assert out.isfinite().all()


def computed(query_len: int, seq_len: int, window: int | None = None) -> str:
    """What computes a chunk that is alone in its step."""
    batch = build([(query_len, seq_len)])
    out, recorder, gathered = run(batch, window)
    check(batch, out, window)
    if gathered.attended:
        assert not recorder.plans
        assert not recorder.steps
        return "gathered"
    return str(*recorder.plans) or "paged"


@pytest.mark.parametrize("num_padding", [0, 3])
@pytest.mark.parametrize("window", [None, 300])
def test_random_mixed_steps(num_padding: int, window: int | None) -> None:
    for _ in range(2):
        planned, others = random.sample(PLANNED, 1), random.sample(OTHERS, random.randrange(6))
        lengths = planned + random.sample(GATHERED, 2) + others
        random.shuffle(lengths)
        print(lengths)
        batch = build(lengths, num_padding)
        out, recorder, gathered = run(batch, window)
        check(batch, out, window)
        assert len(recorder.plans) == (window is None)
        assert len(gathered.attended) == 3 - len(recorder.plans)
        assert len(recorder.steps) <= 1


def test_a_step_of_every_kind() -> None:
    batch = build([*OTHERS[:4], *PLANNED, *GATHERED, *OTHERS[4:]])
    out, recorder, gathered = run(batch)
    check(batch, out)
    assert recorder.plans == [1024, 2048, 2048]
    assert gathered.attended == [(*lengths, None) for lengths in GATHERED]
    (others,) = recorder.steps
    # The sequence without a token is gone.
    assert others.query_lens_np.tolist() == [1, 1, 33, 700, 1023, 1023, 5]
    assert others.num_seqs == 7
    assert others.max_query_len == 1023
    assert others.max_seq_len == 1500
    assert sorted(others.seq_order.tolist()) == list(range(7))
    ordered = others.seq_lens[others.seq_order.long()]
    assert torch.equal(ordered, ordered.sort(descending=True).values)


def test_decodes_beside_a_long_chunk_stay_decodes() -> None:
    batch = build([(1, 300), (1100, 1100), (1, 20)])
    out, recorder, _ = run(batch)
    check(batch, out)
    (others,) = recorder.steps
    assert others.query_lens_np.tolist() == [1, 1]
    assert others.max_query_len == 1


def test_a_whole_prompt_is_padded_only_where_little_is_missing() -> None:
    assert computed(1024, 1024) == "1024"
    assert computed(1025, 1025) == computed(1919, 1919) == "gathered"
    assert computed(1920, 1920) == computed(2048, 2048) == "2048"
    assert computed(2048, 2049) == "gathered"
    assert computed(1023, 1023) == computed(1023, 3000) == "paged"


def test_short_chunks_of_long_contexts_are_long() -> None:
    assert computed(256, 16384) == "gathered"
    assert computed(255, 16384) == computed(256, 16383) == "paged"


def test_a_window_of_a_whole_sequence_is_none() -> None:
    assert computed(1024, 1024, window=1024) == "1024"
    assert computed(1024, 1024, window=1023) == "gathered"


@pytest.mark.each_value
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize(("logit_softcap", "has_sinks"), [(2.0, False), (None, True), (2.0, True)])
def test_no_whole_attention_for_capped_scores_or_sinks(
    logit_softcap: float | None, has_sinks: bool, window: int | None
) -> None:
    batch = build([(1, 300), (1024, 1024), (1950, 1950), (1100, 1300), (40, 40)], num_padding=2)
    sinks = random_sinks(SHAPE.num_q_heads, torch.float32) if has_sinks else None
    layer = layer_of(SHAPE, window, logit_softcap, sinks)
    out, recorder, gathered = run_layer(batch, layer)
    expected = dense_attention(batch, window, logit_softcap=logit_softcap, sinks=sinks)
    assert not recorder.plans
    assert len(gathered.attended) == 3
    assert len(recorder.steps) == 1
    assert out.isfinite().all()
    for rows in token_rows(batch):
        assert relative_error(out[rows], expected[rows]) < 1e-5


@pytest.mark.each_value
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_a_log_sum_exp_of_every_row(has_sinks: bool, window: int | None) -> None:
    """cuDNN returns none: whole prompts are gathered. Neither is a chunk that is short of keys."""
    lengths = [(1, 300), (1024, 1024), (40, 40), (1030, 1200), (1100, 1300), (1, 1)]
    batch = build(lengths, num_padding=2)
    sinks = random_sinks(SHAPE.num_q_heads, torch.float32) if has_sinks else None
    options = {"logit_softcap": 2.0 if has_sinks else None, "sinks": sinks}
    recorder = Recorder()
    backend, gathered = backend_of(recorder)
    layer = layer_of(SHAPE, window, **options)
    out, lse = attend_with_lse(backend, batch, layer)
    assert not recorder.plans
    assert len(gathered.attended) == 3
    assert len(recorder.steps) == 1
    check_attended(out, lse, dense_with_lse(batch, window, **options), 1e-5)

    short = keys_from(batch, 304)  # of which the third sequence has none, the fourth 896
    expected = attend_with_lse(TorchPagedAttention(), batch, layer, short)
    gathered.attended.clear()
    out, lse = attend_with_lse(backend, batch, layer, short)
    assert gathered.attended == []
    check_attended(out, lse, expected, 1e-5)


def test_only_keys_in_the_window_are_gathered() -> None:
    batch = build([(1, 9), (1100, 3000)])
    out, _, gathered = run(batch, window=200)
    check(batch, out, window=200)
    (keys,) = gathered.gathered
    assert (keys.seq, keys.first, keys.end, keys.num_rows) == (1, 1701, 3000, 1299)


def test_without_a_whole_attention_all_long_chunks_are_gathered() -> None:
    batch = build([(1024, 1024), (1, 77), (1024, 2000)])
    gathered = TorchGathered()
    backend = PromptAttention(TorchPagedAttention(), gathered)
    check(batch, backend.attend(batch.q, batch.kv_cache, layer_of(SHAPE), batch.metadata))
    assert len(gathered.attended) == 2


@pytest.mark.parametrize("length", [1, 700, 1023])
def test_shorter_prompts_stay_with_the_paged_backend(length: int) -> None:
    batch = build([(length, length), (1, 30)])
    out, recorder, gathered = run(batch)
    check(batch, out)
    assert not recorder.plans
    assert not gathered.gathered
    (step,) = recorder.steps
    assert step.num_seqs == 2


@pytest.mark.parametrize(
    ("lengths", "is_left"),
    [
        ([(1, 40), (1, 7)], True),
        ([(1023, 1300)], True),
        ([(1024, 1024), (1, 7)], False),
        ([(1024, 1300)], False),
    ],
)
@pytest.mark.parametrize("window", [None, 300])
def test_steps_without_long_chunks_are_turned_by_the_paged_backend(
    lengths: list[tuple[int, int]], window: int | None, is_left: bool
) -> None:
    batch = build(lengths)
    recorder = Recorder()
    backend, _ = backend_of(recorder)
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


@pytest.mark.parametrize("shape", [Shape(3, 3, 16, 8), Shape(5, 1, 8, 32), Shape(4, 2, 8, 24)])
def test_heads_and_blocks_of_other_sizes(shape: Shape) -> None:
    batch = build([(1, 9), (1024, 1024), (1950, 1950), (1, 1), (1030, 1111)], shape=shape)
    out, recorder, gathered = run(batch)
    check(batch, out)
    assert recorder.plans == [1024, 2048]
    assert gathered.attended == [(1030, 1111, None)]


def test_a_cache_in_fp8_is_read_in_the_models_dtype() -> None:
    batch = build([(1024, 1024), (1, 40), (1100, 1300)])
    scales = random_scales(SHAPE.num_kv_heads, "cpu", 1)
    batch = in_fp8(batch, scales)
    store(batch, scales)
    layer = replace(layer_of(SHAPE), kv_scales=scales)
    recorder = Recorder()
    backend, gathered = backend_of(recorder)
    out = backend.attend(batch.q, batch.kv_cache, layer, batch.metadata)
    expected = TorchPagedAttention().attend(batch.q, batch.kv_cache, layer, batch.metadata)
    assert recorder.plans == [1024]
    assert gathered.attended == [(1100, 1300, None)]
    assert relative_error(out, expected) < 1e-5


@pytest.mark.parametrize("position", [0, 1])
def test_a_neighbour_that_is_not_finite_is_not_noticed(position: int) -> None:
    """Not even by a padded prompt that is followed by the neighbour's queries."""
    lengths = [(1950, 1950), (1950, 1950)]
    batch = build(lengths)
    expected, _, _ = run(batch)
    broken, intact = token_rows(batch)[position], token_rows(batch)[1 - position]
    for part in (batch.q, batch.k, batch.v):
        part[broken] = torch.nan
    batch.store()
    out, recorder, _ = run(batch)
    assert recorder.plans == [2048, 2048]
    assert torch.equal(out[intact], expected[intact])


def test_all_plans_of_one_length_see_tensors_of_the_same_strides() -> None:
    """cuDNN plans for shapes and strides: every other pair would be planned when it comes."""
    seen: set[tuple[tuple[int, ...], ...]] = set()

    def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        seen.add((q.stride(), k.stride(), v.stride()))
        return whole_attention(q, k, v, scale)

    backend = PromptAttention(TorchPagedAttention(), TorchGathered(), whole)
    for lengths in ([(2048, 2048)], [(1950, 1950), (1, 50)], [(1, 5), (2000, 2000), (900, 900)]):
        batch = build(lengths)
        backend.attend(batch.q, batch.kv_cache, layer_of(SHAPE), batch.metadata)
    assert len(seen) == 1


def test_the_layers_of_a_step_share_its_split() -> None:
    """Also those of other groups, whose metadata have the step's arrays and tables of their own."""
    batch = build([(1, 300), (1100, 1100)])
    recorder = Recorder()
    backend, _ = backend_of(recorder)
    metadata = batch.metadata
    group = replace(metadata, block_table=metadata.block_table.clone())
    later = replace(metadata, seq_lens_np=metadata.seq_lens_np.copy())
    for each in (metadata, group, metadata, later):
        backend.attend(batch.q, batch.kv_cache, layer_of(SHAPE), each)
    tables = [step.block_table for step in recorder.steps]
    assert tables[0] is tables[2] is metadata.block_table
    assert tables[1] is group.block_table
    arrays = [step.query_lens_np for step in recorder.steps]
    assert arrays[0] is arrays[1] is arrays[2]
    assert arrays[3] is not arrays[0]


def test_plans_are_what_the_sweep_of_sizes_runs_into() -> None:
    assert all(plan & (plan - 1) == 0 for plan in PLAN_TOKENS)
    assert sorted(PLAN_TOKENS) == list(PLAN_TOKENS)
    assert PLAN_TOKENS[0] <= MIN_TOKENS


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
    heads = HeadSizes(4, 2, 32)
    assert is_accurate(whole, TorchGathered(), CPU, heads, dtype) is expected


def test_a_cpu_keeps_plain_torch() -> None:
    paged = choose_backend(CPU).attention
    assert choose_attention(paged, CPU, HeadSizes(4, 2, 64), torch.bfloat16) is paged
