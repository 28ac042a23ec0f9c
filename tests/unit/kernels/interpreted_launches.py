"""The attention kernels that a GPU would launch for published models at their real sizes, with the
options of each launch; conftest.py runs it. No kernel runs, and no tensor has memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.paged_reference import Shape
from tests.support.attention_steps import layer_of
from tests.support.fp8_caches import GivenScales
from tests.support.model_attention import MODEL_ATTENTION
from tests.support.model_configs import MODEL_CONFIGS
from worker_daemon.contracts.attention import AttentionMetadata
from worker_daemon.contracts.fp8 import FP8
from worker_daemon.distributed.tp import SingleRank
from worker_daemon.kernels import compile_ahead
from worker_daemon.kernels.gathered_prefill import TritonFP8Gathered, TritonGathered
from worker_daemon.kernels.ops import TritonOps
from worker_daemon.kernels.paged_attention import TritonAttention
from worker_daemon.kernels.scores import Scoring
from worker_daemon.kernels.tiles import DeviceLimits
from worker_daemon.layers import attention_choice, prompt_attention
from worker_daemon.layers.attention import AttentionSpec, HeadSizes
from worker_daemon.layers.attention_choice import ChosenAttention, choose_attention
from worker_daemon.layers.prompt_attention import PromptAttention
from worker_daemon.models.config import parse_model_config
from worker_daemon.models.decoder import DecoderStage, build_stage
from worker_daemon.models.description import DecoderConfig

META = torch.device("meta")
H100 = DeviceLimits(num_sms=132, shared_memory_bytes=227 * 1024)
MAX_LEN = 4096
ATTENDING = ("_decode_kernel", "_prefill_kernel", "_gathered_kernel", "whole")


@dataclass(frozen=True)
class Launch:
    """A kernel and its arguments, or a call of whole attention, which has none."""

    kernel: str
    arguments: dict[str, Any]


class Recorder:
    """Keeps launches instead of running them."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def launcher(self, kernel: Any) -> Callable[..., None]:
        def launch(*args: object, **options: object) -> None:
            arguments = {**dict(zip(kernel.arg_names, args, strict=False)), **options}
            self.launches.append(Launch(kernel.__name__, arguments))

        return launch

    def whole(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        self.launches.append(Launch("whole", {}))
        return torch.empty_like(q)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """A recorder of all launches, on a simulated H100 whose cuDNN is accurate."""
    made = Recorder()
    monkeypatch.setattr(
        compile_ahead.Launched, "__getitem__", lambda self, grid: made.launcher(self.kernel)
    )
    monkeypatch.setattr(DeviceLimits, "of", classmethod(lambda cls, device: H100))
    monkeypatch.setattr(attention_choice, "is_accurate", lambda *arguments: True)
    monkeypatch.setattr(attention_choice, "cudnn_attention", made.whole)
    monkeypatch.setattr(
        prompt_attention,
        "upload",
        lambda values, device: torch.empty(values.shape, dtype=torch.int32, device=device),
    )
    return made


def with_sinks(config: DecoderConfig) -> DecoderConfig:
    """Return the model with sinks, and a window in its first layer, as GPT-OSS has them."""
    first, *others = (
        replace(layer, attention=replace(layer.attention, has_sinks=True))
        for layer in config.layers
    )
    first = replace(first, attention=replace(first.attention, sliding_window=128))
    return replace(config, layers=(first, *others))


def read_config(name: str) -> DecoderConfig:
    model, *sinks = name.split(" with ")
    config = parse_model_config(MODEL_CONFIGS[model])
    return with_sinks(config) if sinks else config


def stages_of(config: DecoderConfig, backend: PromptAttention) -> dict[AttentionSpec, DecoderStage]:
    """Return a stage of one layer for each kind of attention."""
    first = {layer.attention: index for index, layer in reversed([*enumerate(config.layers)])}
    return {
        attention: build_stage(
            config, range(index, index + 1), False, False, SingleRank(), torch.bfloat16, META,
            MAX_LEN, backend, TritonOps(META),
        )
        for attention, index in first.items()
    }  # fmt: skip


def batch_of(lengths: Sequence[tuple[int, int]]) -> AttentionMetadata:
    """Return the metadata of sequences of (query_len, seq_len)."""
    query_lens, seq_lens = (np.array(column, np.int32) for column in zip(*lengths, strict=True))
    num_tokens, num_seqs = int(query_lens.sum()), len(lengths)
    return AttentionMetadata(
        query_start_loc=column(num_seqs + 1),
        seq_lens=column(num_seqs),
        seq_order=column(num_seqs),
        block_table=column(num_seqs, 512),
        seq_rows=column(num_seqs),
        slot_mapping=column(num_tokens),
        num_seqs=num_seqs,
        max_query_len=int(query_lens.max()),
        max_seq_len=int(seq_lens.max()),
        query_lens_np=query_lens,
        seq_lens_np=seq_lens,
    )


def column(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device=META)


def run(stage: DecoderStage, hidden_size: int, lengths: Sequence[tuple[int, int]]) -> None:
    """Run a step of sequences of (query_len, seq_len)."""
    metadata = batch_of(lengths)
    num_tokens = metadata.slot_mapping.shape[0]
    (spec,) = stage.kv_layer_specs
    cache_shape = (600, 2, 16, spec.num_kv_heads, spec.head_dim)
    hidden, cache = (
        torch.empty(shape, dtype=torch.bfloat16, device=META)
        for shape in ((num_tokens, hidden_size), cache_shape)
    )
    stage.forward(hidden, column(num_tokens), [cache], [metadata])


def check_scores(launch: Launch, spec: AttentionSpec, *, sees_all: bool) -> None:
    """Check that a kernel has the layer's options. sees_all: the window covers each sequence."""
    given, kernel = launch.arguments, launch.kernel
    scoring = Scoring(1.0, spec.sliding_window, spec.logit_softcap)
    assert given["SOFTCAP"] == scoring.softcap
    assert (given["sinks"] is not None) == spec.has_sinks
    assert given["lse"] is None
    has_window = spec.sliding_window is not None and not (sees_all and kernel == "_gathered_kernel")
    assert given["HAS_WINDOW"] == has_window
    assert given["window"] == (spec.sliding_window if has_window else 0)


def check_rotation(launch: Launch, spec: AttentionSpec) -> None:
    given, norm = launch.arguments, spec.qk_norm
    is_normed = norm is not None and not norm.spans_heads
    rotary_dim = given.get("ROTARY_DIM", 2 * given.get("ROTARY_HALF", 0))
    assert rotary_dim == spec.rope.rotary_dim
    assert given["INTERLEAVED"] == spec.rope.interleaved
    assert given["NORMED"] == is_normed
    assert given["WEIGHT_OFFSET"] == (norm.weight_offset if norm and is_normed else 0.0)


STEPS = {
    "one decode": [(1, 3000)],
    "decodes": [(1, 3000)] * 8,
    "many decodes": [(1, 200)] * 256,
    "mixed": [(1, 3000)] * 20 + [(300, 300)],
    "prompts": [(900, 900)] * 9,
    "planned prompt": [(4096, 4096)],
    "short planned prompt": [(1024, 1024)],
    "chunk": [(1500, 4000), (1, 90), (40, 50)],
    "other prompt": [(1500, 1500), (1, 90)],
}


@pytest.mark.parametrize("name", [*MODEL_CONFIGS, "phi4-14b with sinks", "gemma2-9b with sinks"])
def test_every_launch_has_the_options_of_its_layer(name: str, recorder: Recorder) -> None:
    config = read_config(name)
    heads = config.layers[0].attention.heads
    assert isinstance(heads, HeadSizes)
    paged = ChosenAttention("triton", TritonAttention(META), TritonGathered(META))
    chosen = choose_attention(paged, torch.device("cuda"), heads, torch.bfloat16)
    assert isinstance(chosen.backend, PromptAttention)
    for spec, stage in stages_of(config, chosen.backend).items():
        for step, lengths in STEPS.items():
            recorder.launches.clear()
            run(stage, config.hidden_size, lengths)
            check_step(spec, step, lengths, recorder.launches)


@pytest.mark.parametrize("group_size", [2, 4, 5])
def test_few_kernels_serve_steps_of_few_queries(group_size: int, recorder: Recorder) -> None:
    """Whatever the longest sequence of a step is, a step of a power of two has compiled its
    kernels; or one of as many queries as a tile has rows for."""
    attention, shape = TritonAttention(META), (600, 2, 16, 2, 64)
    layer = layer_of(Shape(2 * group_size, 2, 64), None)
    cache = torch.empty(shape, dtype=torch.bfloat16, device=META)
    most = min(16, 64 // group_size)
    compiled = dict[int, set[object]]()
    for num_queries in range(2, most + 1):
        recorder.launches.clear()
        q = torch.empty((3 * num_queries, 2 * group_size, 64), dtype=torch.bfloat16, device=META)
        attention.attend(q, cache, layer, batch_of([(num_queries, 3000)] * 3))
        assert [launch.kernel for launch in recorder.launches] == [
            "_decode_kernel", "_merge_parts_kernel"
        ]  # fmt: skip
        options = [
            tuple(sorted((name, each) for name, each in launch.arguments.items() if name.isupper()))
            for launch in recorder.launches
        ]
        compiled.setdefault(1 << (num_queries - 1).bit_length(), set()).add(tuple(options))
    assert [len(variants) for variants in compiled.values()] == [1] * len(compiled)


def check_step(
    spec: AttentionSpec, step: str, lengths: Sequence[tuple[int, int]], launches: Sequence[Launch]
) -> None:
    attending = [launch for launch in launches if launch.kernel in ATTENDING]
    rotating = [launch for launch in launches if launch.kernel == "_rotate_and_store_kernel"]
    window, longest = spec.sliding_window, max(length for _, length in lengths)
    sees_all = window is None or window >= longest
    for launch in attending:
        if launch.kernel != "whole":
            check_scores(launch, spec, sees_all=sees_all)
    fused = [launch for launch in attending if launch.arguments.get("ROTATES")]
    assert len(fused) + len(rotating) == 1
    check_rotation((fused or rotating)[0], spec)
    kernels = [launch.kernel for launch in attending]
    # cuDNN neither caps scores nor knows sinks or windows.
    is_whole = sees_all and spec.logit_softcap is None and not spec.has_sinks
    if "planned" in step:
        assert kernels == ["whole" if is_whole else "_gathered_kernel"]
    elif step in ("chunk", "other prompt"):
        others = "_prefill_kernel" if step == "chunk" else "_decode_kernel"
        assert kernels == ["_gathered_kernel", others]
    elif step == "mixed":
        # Decodes of short windows stay with the prompt.
        is_apart = window is None or window > 1024
        assert kernels == ["_decode_kernel"] * is_apart + ["_prefill_kernel"]
    else:
        assert kernels == ["_decode_kernel" if "decode" in step else "_prefill_kernel"]
    if spec.qk_norm is not None and spec.qk_norm.spans_heads:
        order = [launch.kernel for launch in launches]
        assert order.index("_span_norm_kernel") < order.index((fused or rotating)[0].kernel)


@pytest.mark.parametrize("name", [name for name in MODEL_ATTENTION if "gpt-oss" not in name])
def test_kernels_are_tested_with_the_attention_of_the_models(name: str) -> None:
    """GPU tests take their layers from a table, not from config.json."""
    model, *sliding = name.split()
    config = parse_model_config(MODEL_CONFIGS[model])
    specs = [
        layer.attention for layer in config.layers if isinstance(layer.attention, AttentionSpec)
    ]
    kinds = {spec.sliding_window is None: spec for spec in specs}
    # Without windows, or with a window in each layer, there is one kind.
    spec = kinds[not sliding] if len(kinds) == 2 else specs[0]
    heads, norm, found = spec.heads, spec.qk_norm, MODEL_ATTENTION[name]
    shape = found.shape
    assert (heads.num_attention_heads, heads.num_key_value_heads, heads.head_dim) == (
        shape.num_q_heads,
        shape.num_kv_heads,
        shape.head_dim,
    )
    assert spec.scale in (None, shape.scale)
    assert spec.sliding_window == found.window
    assert spec.logit_softcap == found.logit_softcap
    assert spec.has_sinks == found.has_sinks
    assert spec.rope.rotary_dim == (found.rotary_dim or shape.head_dim)
    assert spec.rope.interleaved == found.interleaved
    is_normed = norm is not None and not norm.spans_heads
    assert is_normed == found.is_normed
    assert found.weight_offset == (norm.weight_offset if norm is not None else 0.0)


def test_long_prompts_over_a_cache_in_fp8_may_have_products_in_fp8(recorder: Recorder) -> None:
    """Whole prompts of a plan's length too; other tokens have the model's dtype."""
    paged = ChosenAttention(
        "triton", TritonAttention(META), TritonGathered(META), TritonFP8Gathered(META)
    )
    heads = HeadSizes(8, 2, 64)
    chosen = choose_attention(paged, torch.device("cuda"), heads, torch.bfloat16, in_fp8=True)
    assert chosen.name == "triton+fp8"
    scales = GivenScales(torch.empty((2, 2), device=META))
    layer = replace(layer_of(Shape(8, 2, 64)), kv_scales=scales)
    cache = torch.empty((600, 2, 16, 2, 64), dtype=FP8, device=META)
    for lengths in ([(4096, 4096)], [(1500, 4000), (1, 90)]):
        recorder.launches.clear()
        total = sum(number for number, _ in lengths)
        q = torch.empty((total, 8, 64), dtype=torch.bfloat16, device=META)
        out = chosen.backend.attend(q, cache, layer, batch_of(lengths))
        assert out.shape == q.shape
        attending = [each for each in recorder.launches if each.kernel in ATTENDING]
        assert attending[0].kernel == "_gathered_kernel" and len(attending) == len(lengths)
        assert attending[0].arguments["kv_scales"] is scales.values


def test_a_cpu_and_float32_keep_the_paged_kernels(recorder: Recorder) -> None:
    paged = ChosenAttention("triton", TritonAttention(META), TritonGathered(META))
    heads = HeadSizes(16, 8, 256)
    assert choose_attention(paged, torch.device("cpu"), heads, torch.bfloat16) is paged
    assert choose_attention(paged, torch.device("cuda"), heads, torch.float32) is paged
