"""Stages of random checkpoints on a GPU against transformers, one for each family: prompts in
chunks, some of them unpaged, then decodes in a CUDA graph."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from tests.support.checkpoints import Checkpoint, make_checkpoint
from tests.support.expert_counts import NearTie, expected_loads
from tests.support.paged_run import PagedRun, StepTensors
from worker_daemon.backend import choose_backend
from worker_daemon.distributed.tp import SingleRank
from worker_daemon.kernel_compiler import KernelCompiler
from worker_daemon.kernels.compile_ahead import compiling_ahead
from worker_daemon.layers.attention_choice import choose_attention
from worker_daemon.models.config import read_model_config
from worker_daemon.models.decoder import DecoderStage, build_stage, checkpoint_names
from worker_daemon.models.weights import load_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SEED = random.randrange(1 << 30)
DEVICE = "cuda"
MAX_LEN = 2048
CHUNKS = [(1050, 200, 20, 6), (40, 522, 22, 0), (0, 0, 1, 0)]
"""Tokens of each sequence in the steps of its prompt."""
NUM_DECODES = 8
TOLERANCE = 1e-3
"""In nats, in float32."""

SIZES: Mapping[str, object] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.05,
}
GEMMA: Mapping[str, object] = {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 600}
LONGROPE: Mapping[str, object] = {
    "rope_type": "longrope",
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + index / 30 for index in range(36)],
    "long_factor": [2.0 + index for index in range(36)],
    "original_max_position_embeddings": 2 * MAX_LEN,
    "attention_factor": 1.2,
}
FAMILIES: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "gemma2": (
        "Gemma2ForCausalLM",
        {
            **GEMMA,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 5.0,
            # With torch's attention, some versions of transformers ignore the cap.
            "attn_implementation": "eager",
        },
    ),
    "gemma3": ("Gemma3ForCausalLM", {**GEMMA, "sliding_window_pattern": 2}),
    "glm": ("GlmForCausalLM", {"head_dim": 128, "num_key_value_heads": 1, "attention_bias": True}),
    "glm4": ("Glm4ForCausalLM", {"head_dim": 128, "num_attention_heads": 8}),
    "olmo2": ("Olmo2ForCausalLM", {"num_key_value_heads": 4}),
    "phi3": (
        "Phi3ForCausalLM",
        {
            "hidden_size": 384,
            "head_dim": 96,
            "num_key_value_heads": 4,
            "sliding_window": 600,
            "rope": LONGROPE,
        },
    ),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 8}),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        {"moe_intermediate_size": 96, "shared_expert_intermediate_size": 192},
    ),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {"moe_intermediate_size": 96}),
    "gpt_oss": ("GptOssForCausalLM", {"num_local_experts": 8, "sliding_window": 600}),
}


@pytest.fixture(params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Checkpoint:
    architecture, overrides = FAMILIES[request.param]
    return make_checkpoint(tmp_path, architecture, seed=SEED, **{**SIZES, **overrides})


def load(checkpoint: Checkpoint, dtype: torch.dtype) -> DecoderStage:
    """Return the whole model as one stage, with the kernels that a daemon chooses."""
    device, config = torch.device(DEVICE), read_model_config(checkpoint.path)
    backend = choose_backend(device)
    heads = config.heads
    stage = build_stage(
        config,
        range(config.num_hidden_layers),
        True,
        True,
        SingleRank(),
        dtype,
        device,
        MAX_LEN,
        choose_attention(backend.attention, device, heads, dtype).backend,
        backend.make_ops(),
    )
    names = checkpoint_names(config)
    load_weights(stage.parameters(), checkpoint.path, names, lambda progress: None)
    return stage


def new_run(stage: DecoderStage, sequences: Sequence[np.ndarray], dtype: torch.dtype) -> PagedRun:
    return PagedRun(
        [stage], sequences, SEED, max_len=MAX_LEN, block_size=16, dtype=dtype, device=DEVICE
    )


def compile_kernels(run: PagedRun) -> None:
    """Compile all kernels of a run at once; it computes nothing."""
    with KernelCompiler.start() as compiler, compiling_ahead(compiler):
        for counts in CHUNKS:
            run.step(counts, num_padding=3)
        run.compute(run.advance([1] * len(run.sequences), max_seq_len=MAX_LEN))


def captured(run: PagedRun, inputs: StepTensors) -> Callable[[], torch.Tensor]:
    """Return a function that replays the step from what inputs then hold."""
    run.compute(inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = run.compute(inputs)
    logits.fill_(torch.nan)

    def replay() -> torch.Tensor:
        graph.replay()
        return logits

    return replay


def steps_of(run: PagedRun) -> Iterator[tuple[Sequence[int], torch.Tensor]]:
    """Yield each step's tokens of each sequence, and the logits of all."""
    for counts in CHUNKS:
        yield counts, run.step(counts, num_padding=3)
    each = [1] * len(run.sequences)
    static = run.advance(each, max_seq_len=MAX_LEN)
    replay = captured(run, static)
    for number in count(1):
        yield each, replay().clone()
        if number == NUM_DECODES:
            return
        static.copy_from(run.advance(each, max_seq_len=MAX_LEN))


@torch.inference_mode()
def serve(stage: DecoderStage, sequences: Sequence[np.ndarray], dtype: torch.dtype) -> torch.Tensor:
    """Return the log probabilities after each token of all sequences, one after another."""
    compile_kernels(new_run(stage, sequences, dtype))
    pieces: list[list[torch.Tensor]] = [[] for _ in sequences]
    for counts, logits in steps_of(new_run(stage, sequences, dtype)):
        for own, part in zip(pieces, logits.split([*counts]), strict=True):
            own.append(part)
    return torch.cat([torch.cat(own) for own in pieces]).float().log_softmax(-1).cpu()


@torch.inference_mode()
def expected(
    model: transformers.PreTrainedModel, sequences: Sequence[np.ndarray], device: str
) -> torch.Tensor:
    """Return the log probabilities of transformers, computed one sequence at a time."""
    model = model.to(device).eval()
    rows = [model(torch.from_numpy(each).to(device).long()[None]).logits[0] for each in sequences]
    return torch.cat(rows).float().log_softmax(-1).cpu()


def draw_sequences(checkpoint: Checkpoint) -> list[np.ndarray]:
    """Draw sequences whose tokens are routed without near ties, where there are experts."""
    rng, config = np.random.default_rng(SEED), checkpoint.model.config
    lengths = np.array(CHUNKS).sum(0) + NUM_DECODES
    while True:
        sequences = [rng.integers(0, config.vocab_size, length) for length in lengths]
        try:
            if hasattr(config, "num_experts_per_tok"):
                expected_loads(checkpoint.model, sequences)
            return sequences
        except NearTie:
            continue


def test_float32_agrees_with_transformers(checkpoint: Checkpoint) -> None:
    sequences = draw_sequences(checkpoint)
    ours = serve(load(checkpoint, torch.float32), sequences, torch.float32)
    exact = expected(checkpoint.model, sequences, "cpu")
    assert float((ours - exact).abs().max()) < TOLERANCE


def test_bfloat16_is_no_worse_than_transformers(checkpoint: Checkpoint) -> None:
    """Experts included: rounding sends some tokens to others, in both."""
    sequences = draw_sequences(checkpoint)
    exact = expected(checkpoint.model, sequences, "cpu")
    ours = serve(load(checkpoint, torch.bfloat16), sequences, torch.bfloat16)
    # Loaded in bfloat16: a converted model would round the frequencies of its rotation too.
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint.path,
        dtype=torch.bfloat16,
        attn_implementation=checkpoint.model.config._attn_implementation,
    )
    theirs = expected(model, sequences, DEVICE)
    assert float((ours - exact).abs().mean()) < 1.5 * float((theirs - exact).abs().mean())
