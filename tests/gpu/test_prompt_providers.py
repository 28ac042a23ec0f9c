"""Long chunks by a library, beside cuDNN and our kernels, against a dense fp64 softmax:
FlashAttention where it is installed, and a stand-in for the choice itself."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.paged_reference import (
    PagedBatch,
    Shape,
    dense_attention,
    make_batch,
    relative_error,
)
from tests.support.attention_steps import layer_of, random_sinks, token_rows
from tests.support.fp8_caches import BOUNDS as FP8_BOUNDS
from tests.support.fp8_caches import in_fp8, random_scales, store
from worker_daemon.backend import choose_backend
from worker_daemon.contracts.attention import AttentionLayer
from worker_daemon.kernels.gathered_prefill import TritonGathered
from worker_daemon.layers.attention import HeadSizes
from worker_daemon.layers.attention_choice import ChosenAttention, choose_attention
from worker_daemon.layers.prompt_providers import (
    AttendGathered,
    FlashAttention,
    PromptCase,
    PromptProvider,
    ScoreKind,
)
from worker_daemon.layers.provider_records import ProviderRecords

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.kernels,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::UserWarning:cutlass"),
]

CUDA = torch.device("cuda")
BOUNDS = {torch.float16: 1e-3, torch.bfloat16: 6e-3}
LLAMA_8B = Shape(32, 8, 128)
ALL_KEYS = ScoreKind(None, None, False)
LENGTHS = [(1024, 1024), (1, 700), (1024, 9000), (1999, 2900), (2048, 2048), (40, 50), (5000, 5000)]
needs_flash_attention = pytest.mark.skipif(
    FlashAttention().version is None
    or not torch.cuda.is_available()
    or torch.cuda.get_device_capability()[0] != 9,
    reason="needs flash-attn-4 and a Hopper GPU",
)


@pytest.fixture(autouse=True)
def all_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries compute small chunks too."""
    monkeypatch.setattr("worker_daemon.layers.prompt_providers.LEAST_OPERATIONS", 0.0)


class Ours:
    """Our kernel as a library, which counts its calls."""

    name = "ours-again"
    version = "1"

    def __init__(self) -> None:
        self.calls = 0

    def find_obstacle(self, case: PromptCase, kind: ScoreKind) -> str | None:
        return None

    def open(self) -> AttendGathered:
        gathered = TritonGathered(CUDA)

        def attend(
            q: torch.Tensor, context: torch.Tensor, layer: AttentionLayer, window: int | None
        ) -> torch.Tensor:
            self.calls += 1
            return gathered.attend(q, context, layer, window)

        return attend


def in_turn(*seconds: float) -> Callable[[Callable[[], object]], float]:
    """A stopwatch that reads these times, over and over."""
    left: list[float] = []

    def read(launch: Callable[[], object]) -> float:
        launch()
        left[:] = left or seconds
        return left.pop(0)

    return read


def choose(
    library: PromptProvider,
    kind: ScoreKind,
    shape: Shape = LLAMA_8B,
    dtype: torch.dtype = torch.bfloat16,
    seconds: tuple[float, ...] = (1.0, 2.0),
    records: ProviderRecords | None = None,
) -> ChosenAttention:
    """Choose attention where the library takes the first of two times."""
    heads = HeadSizes(shape.num_q_heads, shape.num_kv_heads, shape.head_dim)
    ours = choose_backend(CUDA).attention
    return choose_attention(ours, CUDA, heads, dtype, [kind], records, [library], in_turn(*seconds))


def build(shape: Shape, dtype: torch.dtype, lengths: list[tuple[int, int]]) -> PagedBatch:
    seed = random.randrange(2**31)
    print("seed", seed)
    batch = make_batch(shape, lengths, dtype=dtype, device="cuda", seed=seed, num_padding=9)
    batch.store()
    return batch


@torch.inference_mode()
def check(chosen: ChosenAttention, batch: PagedBatch, kind: ScoreKind) -> torch.Tensor:
    sinks = None
    if kind.has_sinks:
        sinks = random_sinks(batch.shape.num_q_heads, batch.q.dtype, "cuda")
    layer = layer_of(batch.shape, kind.window, kind.logit_softcap, sinks)
    out = chosen.backend.attend(batch.q, batch.kv_cache, layer, batch.metadata)
    assert out.isfinite().all()
    expected = dense_attention(batch, kind.window, logit_softcap=kind.logit_softcap, sinks=sinks)
    for rows in token_rows(batch):
        assert relative_error(out[rows], expected[rows]) < BOUNDS[out.dtype]
    return out


@pytest.mark.parametrize("is_faster", [True, False])
def test_cudnn_keeps_whole_prompts_unless_the_library_is_faster(is_faster: bool) -> None:
    library = Ours()
    # Of the chunk, theirs and ours; of a whole prompt, theirs and cuDNN's.
    seconds = (1.0, 2.0, 1.0 if is_faster else 3.0, 2.0)
    chosen = choose(library, ALL_KEYS, seconds=seconds)
    assert chosen.name == ("triton+ours-again" if is_faster else "triton+ours-again+cudnn")
    assert chosen.long_chunks.startswith("all keys: ours-again 1, 2.00 times as fast; measured, ")
    library.calls = 0
    check(chosen, build(LLAMA_8B, torch.bfloat16, LENGTHS), ALL_KEYS)
    assert library.calls == (5 if is_faster else 3)


def test_a_library_that_is_slower_changes_nothing(tmp_path: Path) -> None:
    library, records = Ours(), ProviderRecords(tmp_path)
    for _ in range(2):
        chosen = choose(library, ALL_KEYS, seconds=(2.0, 1.0), records=records)
        assert chosen.name == "triton+cudnn"
        calls, library.calls = library.calls, 0
        check(chosen, build(LLAMA_8B, torch.bfloat16, LENGTHS), ALL_KEYS)
        assert library.calls == 0
    assert calls == 0  # the second time it was known


@needs_flash_attention
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(
    "shape",
    [LLAMA_8B, Shape(32, 8, 64), Shape(16, 8, 256), Shape(14, 2, 64), Shape(8, 1, 96),
     Shape(8, 4, 80), Shape(4, 4, 128)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(
    "kind",
    [ALL_KEYS, ScoreKind(1, None, False), ScoreKind(1000, None, False), ScoreKind(None, 5.0, False),
     ScoreKind(None, None, True), ScoreKind(300, 5.0, True)],
    ids=str,
)  # fmt: skip
def test_flash_attention_computes_what_it_was_chosen_for(
    kind: ScoreKind, shape: Shape, dtype: torch.dtype
) -> None:
    chosen = choose(FlashAttention(), kind, shape, dtype)
    assert chosen.name.startswith("triton+flash-attn-4")  # cuDNN may be chosen for other kinds
    check(chosen, build(shape, dtype, LENGTHS), kind)


@needs_flash_attention
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_flash_attention_compiles_and_waits_in_no_step() -> None:
    from flash_attn.cute.interface import _flash_attn_fwd

    kind = ScoreKind(1000, None, False)
    chosen = choose(FlashAttention(), kind)
    compiled = set(_flash_attn_fwd.compile_cache.cache)
    for lengths in ([(1024, 1024)], [(1024, 30_000)], [(8192, 8192)], [(4000, 20_000), (1, 9)]):
        batch = build(LLAMA_8B, torch.bfloat16, lengths)
        for window in (None, 1000):
            layer = layer_of(LLAMA_8B, window)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                with torch.inference_mode():
                    chosen.backend.attend(batch.q, batch.kv_cache, layer, batch.metadata)
            finally:
                torch.cuda.set_sync_debug_mode("default")
    assert set(_flash_attn_fwd.compile_cache.cache) == compiled


@needs_flash_attention
def test_flash_attention_repeats_itself_bit_by_bit() -> None:
    chosen = choose(FlashAttention(), ALL_KEYS)
    batch = build(LLAMA_8B, torch.bfloat16, LENGTHS)
    first = check(chosen, batch, ALL_KEYS)
    for _ in range(10):
        again = chosen.backend.attend(batch.q, batch.kv_cache, layer_of(LLAMA_8B), batch.metadata)
        assert torch.equal(again[: batch.num_real_tokens], first[: batch.num_real_tokens])


@needs_flash_attention
def test_flash_attention_reads_a_cache_in_fp8_through_the_gather() -> None:
    chosen = choose(FlashAttention(), ALL_KEYS)
    scales = random_scales(LLAMA_8B.num_kv_heads, "cuda", 1)
    batch = in_fp8(build(LLAMA_8B, torch.bfloat16, [(2000, 3000), (1, 40)]), scales)
    store(batch, scales)
    layer = replace(layer_of(LLAMA_8B), kv_scales=scales)
    with torch.inference_mode():
        out = chosen.backend.attend(batch.q, batch.kv_cache, layer, batch.metadata)
    rows = slice(0, batch.num_real_tokens)
    expected = dense_attention(batch, None)
    assert relative_error(out[rows], expected[rows]) < FP8_BOUNDS[torch.bfloat16]
