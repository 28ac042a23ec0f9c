"""Stages of the decoder on a GPU at real sizes: fused operations against plain torch ones, and a
split model against the whole."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.paged_reference import PagedBatch, Shape, make_batch, relative_error
from worker_daemon.backend import choose_backend
from worker_daemon.contracts.fp8 import FP8_BLOCK, FP8_LEAST_SCALE, FP8_MAX, to_fp8
from worker_daemon.contracts.layer_ops import Fp8Matrix, LayerOps, computed
from worker_daemon.distributed.tp import SingleRank
from worker_daemon.kernels.paged_attention import TritonAttention
from worker_daemon.layers.attention import AttentionSpec
from worker_daemon.layers.mlp import MLPSpec
from worker_daemon.layers.norm import NormSpec, QKNormSpec
from worker_daemon.layers.quantization import WeightQuantization
from worker_daemon.layers.torch_ops import TorchOps
from worker_daemon.models.config import read_model_config
from worker_daemon.models.decoder import DecoderStage, build_stage
from worker_daemon.models.description import DecoderConfig, LayerSpec
from worker_daemon.models.weights import load_dummy_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CONFIGS = Path(__file__).parents[2] / "benchmarks" / "models"
NUM_LAYERS = 4
MAX_LEN = 600
LENGTHS = {
    "mixed": [(1, 500), (200, 200), (33, 100), (1, 1)],
    "decode": [(1, length) for length in (1, 16, 40, 599)],
}
# What the operations' different roundings come to after four layers and the head.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
EXPERT_BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 0.15}
# Those of inputs in FP8, which have three bits of mantissa.
QUANTIZED_BOUNDS = {"none": 4e-2, "dynamic": 0.25, "static": 0.4}


def with_merged_options(config: DecoderConfig) -> DecoderConfig:
    """Return a model of the same sizes: merged tensors as in Phi-3, norms over all heads as in
    OLMo-2."""
    (layer,) = set(config.layers)
    assert isinstance(layer.attention, AttentionSpec)
    assert isinstance(layer.mlp, MLPSpec)
    norm = QKNormSpec(1e-6, spans_heads=True)
    attention = replace(layer.attention, fused_qkv=True, qk_norm=norm)
    merged = LayerSpec(attention, replace(layer.mlp, fused_gate_up=True))
    return replace(config, layers=(merged,) * config.num_hidden_layers)


def with_gemmas_options(config: DecoderConfig) -> DecoderConfig:
    """Return a model of the same sizes: norms with an offset before and after each block, GELU, a
    scaled embedding and capped logits."""

    def norm(name: str) -> NormSpec:
        return NormSpec(name, 1e-6, 1.0)

    (layer,) = set(config.layers)
    assert isinstance(layer.attention, AttentionSpec)
    assert isinstance(layer.mlp, MLPSpec)
    attention = replace(
        layer.attention,
        norm=norm("input_layernorm"),
        qk_norm=QKNormSpec(1e-6, -0.5),  # large scores would enlarge rounding errors
        post_norm=norm("post_attention_layernorm"),
    )
    mlp = replace(
        layer.mlp,
        norm=norm("pre_feedforward_layernorm"),
        activation="gelu_tanh",
        post_norm=norm("post_feedforward_layernorm"),
    )
    return replace(
        config,
        layers=(LayerSpec(attention, mlp),) * config.num_hidden_layers,
        final_norm=norm("norm"),
        embedding_scale=config.hidden_size**0.5,
        final_logit_softcap=30.0,
    )


OPTIONS = {"merged": with_merged_options, "gemma": with_gemmas_options}


@pytest.fixture(params=["llama-8b", "qwen3-0.6b", "llama-8b as merged", "qwen3-0.6b as gemma"])
def config(request: pytest.FixtureRequest) -> DecoderConfig:
    name, _, options = request.param.partition(" as ")
    whole = read_model_config(CONFIGS / name)
    cut = replace(whole, layers=whole.layers[:NUM_LAYERS], vocab_size=1000)
    return OPTIONS[options](cut) if options else cut


def make_stages(
    config: DecoderConfig, splits: Sequence[int], dtype: torch.dtype, ops: LayerOps
) -> list[DecoderStage]:
    """Stages that end at the layers `splits`, filled with the same values however they are cut."""
    device = torch.device("cuda")
    stages = []
    for first, last in zip((0, *splits), splits, strict=False):
        stage = build_stage(
            config,
            range(first, last),
            first == 0,
            last == len(config.layers),
            SingleRank(),
            dtype,
            device,
            MAX_LEN,
            TritonAttention(device),
            ops,
        )
        load_dummy_weights(stage.parameters(), 1, lambda progress: None)
        stages.append(stage)
    return stages


def make_step(config: DecoderConfig, lengths: list[tuple[int, int]], dtype: torch.dtype):
    heads = config.heads
    shape = Shape(heads.num_attention_heads, heads.num_key_value_heads, heads.head_dim)
    batch = make_batch(shape, lengths, dtype=dtype, device="cuda", seed=5)
    starts = [torch.arange(length - count, length) for count, length in lengths]
    return batch, torch.cat(starts).cuda()


def run(stages: Sequence[DecoderStage], batch: PagedBatch, positions: torch.Tensor) -> torch.Tensor:
    """Logits of all tokens."""
    random = torch.Generator("cuda").manual_seed(6)
    ids = torch.randint(1000, positions.shape, generator=random, device="cuda")
    hidden = stages[0].embed(ids)
    for stage in stages:
        caches = [batch.kv_cache.clone() for _ in stage.kv_layer_specs]
        before = hidden.clone()
        after = stage.forward(hidden, positions, caches, [batch.metadata] * len(caches))
        assert torch.equal(hidden, before)
        hidden = after
    return stages[-1].compute_logits(hidden)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@torch.inference_mode()
def test_fused_operations_agree_with_torch(config, dtype, lengths):
    step = make_step(config, lengths, dtype)
    fused = choose_backend(torch.device("cuda")).make_ops()
    ours = run(make_stages(config, [NUM_LAYERS], dtype, fused), *step)
    plain = run(make_stages(config, [NUM_LAYERS], dtype, TorchOps()), *step)
    assert relative_error(ours, plain) < BOUNDS[dtype]


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("dtype", EXPERT_BOUNDS, ids=str)
@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss-20b"])
@torch.inference_mode()
def test_experts_agree_with_torch(name, dtype, lengths, expert_parallel):
    """In bfloat16, rounding sends some tokens to other experts."""
    whole = read_model_config(CONFIGS / name)
    config = replace(
        whole, layers=whole.layers[:2], vocab_size=1000, expert_parallel=expert_parallel
    )
    step = make_step(config, lengths, dtype)
    fused = choose_backend(torch.device("cuda")).make_ops()
    ours = run(make_stages(config, [2], dtype, fused), *step)
    plain = run(make_stages(config, [2], dtype, TorchOps()), *step)
    assert relative_error(ours, plain) < EXPERT_BOUNDS[dtype]


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize(
    ("scales", "activations"),
    [("tensor", "static"), ("channel", "dynamic"), ("channel", "none"), ("block", "dynamic")],
)
@torch.inference_mode()
def test_quantized_stages_agree_with_torch(config, scales, activations, lengths):
    """Products of more than 64 rows quantize their inputs, unless activations are none."""
    quantized = replace(config, quantization=WeightQuantization(scales, activations))
    step = make_step(quantized, lengths, torch.bfloat16)
    fused = choose_backend(torch.device("cuda")).make_ops()
    ours = run(make_stages(quantized, [NUM_LAYERS], torch.bfloat16, fused), *step)
    plain = run(make_stages(quantized, [NUM_LAYERS], torch.bfloat16, TorchOps()), *step)
    assert relative_error(ours, plain) < QUANTIZED_BOUNDS[activations]


class RoundingOps(TorchOps):
    """Products in FP8 of a GPU in plain torch: inputs are rounded to FP8, each row or each block of
    a row by its largest value."""

    def product(self, source, matrix, epilogue):
        if not isinstance(matrix, Fp8Matrix):
            return super().product(source, matrix, epilogue)
        x, total = computed(source, self)
        size = x.shape[1] if matrix.scale.dim() == 1 else FP8_BLOCK
        blocks = x.float().unflatten(1, (-1, size))
        scale = blocks.abs().amax(2, keepdim=True).clamp(min=FP8_LEAST_SCALE) / FP8_MAX
        rounded = (to_fp8(blocks, scale).float() * scale).flatten(1)
        y = rounded @ matrix.dequantized(torch.float32).T
        y = (y if epilogue.bias is None else y + epilogue.bias).to(x.dtype)
        gate = epilogue.activation
        return (y if gate is None else self.act_and_mul(y, gate)), total


@pytest.mark.parametrize(("scales", "num_requests"), [("channel", 9), ("block", 2)])
@torch.inference_mode()
def test_rounded_inputs_cost_no_more_than_in_torch(config, scales, num_requests):
    """Error of the log probabilities of up to 4,500 rows, against unrounded inputs."""
    quantized = replace(config, quantization=WeightQuantization(scales, "dynamic"))
    step = make_step(quantized, [(500, 500)] * num_requests, torch.bfloat16)
    fused = choose_backend(torch.device("cuda")).make_ops()
    ours, theirs, exact = (
        run(make_stages(quantized, [NUM_LAYERS], torch.bfloat16, ops), *step).float().log_softmax(1)
        for ops in (fused, RoundingOps(), TorchOps())
    )
    assert (ours - exact).abs().mean() < 1.1 * (theirs - exact).abs().mean()


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@torch.inference_mode()
def test_a_split_model_computes_the_same_bits(config, lengths):
    step = make_step(config, lengths, torch.bfloat16)
    ops = choose_backend(torch.device("cuda")).make_ops()
    whole = run(make_stages(config, [NUM_LAYERS], torch.bfloat16, ops), *step)
    for splits in ([1, NUM_LAYERS], [2, 3, NUM_LAYERS]):
        parts = run(make_stages(config, splits, torch.bfloat16, ops), *step)
        assert torch.equal(parts, whole)
