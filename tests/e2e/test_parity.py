"""Greedy tokens equal transformers' for every architecture, position embedding, form of config.json
and shape of the group."""

import itertools

import pytest

from tests.support.checkpoints import ARCHITECTURES, ROPES, decisive_prompts
from tests.support.exhaustive import exhaustively
from tests.support.serving import assert_greedy, generate, greedy_request

SHAPES = [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2)]
LENGTHS = [3, 9, 17, 40, 70]
"""The longest are past every original context length and sliding window of the checkpoints."""
MAX_TOKENS = 10

FIELDS = {
    ("LlamaForCausalLM", "default"): {"tie_word_embeddings": True},
    ("LlamaForCausalLM", "linear"): {"attention_bias": True},
    ("LlamaForCausalLM", "dynamic"): {"mlp_bias": True, "tie_word_embeddings": True},
    ("LlamaForCausalLM", "llama3"): {"attention_bias": True, "mlp_bias": True},
    ("LlamaForCausalLM", "yarn"): {"attention_bias": True, "tie_word_embeddings": True},
    ("Qwen2ForCausalLM", "default"): {"tie_word_embeddings": True},
    ("Qwen2ForCausalLM", "yarn"): {"num_key_value_heads": 4},
    ("Qwen3ForCausalLM", "linear"): {"tie_word_embeddings": True},
    ("Qwen3ForCausalLM", "dynamic"): {"head_dim": 24},
    ("Qwen3ForCausalLM", "llama3"): {"num_key_value_heads": 1},
}


def latin_square():
    """Every architecture with every position embedding; each meets every shape and both forms."""
    for (row, architecture), (column, rope) in itertools.product(
        enumerate(ARCHITECTURES), enumerate(ROPES)
    ):
        shape = SHAPES[(row + column) % len(SHAPES)]
        form = 4 + (row // 2 + column) % 2
        name = f"{architecture.removesuffix('ForCausalLM')}-{rope}-form{form}-{shape[0]}x{shape[1]}"
        yield pytest.param(architecture, rope, form, shape, id=name)


@pytest.mark.usefixtures("each_drafter")
@pytest.mark.each_value
@pytest.mark.parametrize(("architecture", "rope", "form", "shape"), [*latin_square()])
def test_greedy_tokens_equal_transformers(serve, checkpoint, architecture, rope, form, shape):
    fields = dict(FIELDS.get((architecture, rope), {}))
    if architecture == "MistralForCausalLM":
        fields["sliding_window"] = 13
    reference = checkpoint(architecture, rope=ROPES[rope], form=form, **fields)
    requests = [
        greedy_request(f"r{index}", prompt, MAX_TOKENS)
        for index, prompt in enumerate(decisive_prompts(reference, 7, LENGTHS, MAX_TOKENS))
    ]
    with serve(reference.path, *shape) as (group, loaded):
        whole = generate(group, loaded, requests)
        chunked = generate(group, loaded, requests, max_num_batched_tokens=11)
    assert_greedy(whole, reference, requests)
    assert_greedy(chunked, reference, requests)
    assert max(record.num_tokens for record in whole.driver.records) == sum(LENGTHS)
    assert max(record.num_tokens for record in chunked.driver.records) <= 11


@pytest.mark.usefixtures("each_drafter")
@pytest.mark.parametrize(
    ("architecture", "shape", "fields"),
    [
        ("Gemma2ForCausalLM", (1, 2), {"sliding_window": 13, "query_pre_attn_scalar": 24}),
        ("Gemma3ForCausalLM", (2, 2), {"sliding_window": 13, "sliding_window_pattern": 2}),
        ("GlmForCausalLM", (2, 1), {"attention_bias": True}),
        ("Glm4ForCausalLM", (1, 2), {}),
        ("GptOssForCausalLM", (1, 4), {"num_hidden_layers": 2}),
        ("MixtralForCausalLM", (1, 2), {}),
        ("Olmo2ForCausalLM", (2, 2), {}),
        ("Phi3ForCausalLM", (1, 2), {"sliding_window": 13}),
        ("Qwen2MoeForCausalLM", (2, 1), {}),
        ("Qwen3MoeForCausalLM", (2, 2), {}),
    ],
)
def test_other_families(serve, checkpoint, architecture, shape, fields):
    reference = checkpoint(architecture, seed=10, **fields)
    requests = [
        greedy_request(f"r{index}", prompt, MAX_TOKENS)
        for index, prompt in enumerate(decisive_prompts(reference, 10, LENGTHS, MAX_TOKENS))
    ]
    divided = architecture == "Qwen3MoeForCausalLM"
    with serve(reference.path, *shape, enable_expert_parallel=divided) as (group, loaded):
        whole = generate(group, loaded, requests)
        chunked = generate(group, loaded, requests, max_num_batched_tokens=11)
    assert_greedy(whole, reference, requests)
    assert_greedy(chunked, reference, requests)


@pytest.mark.usefixtures("each_drafter")
@pytest.mark.parametrize(
    ("shape", "layers", "partition"),
    [
        pytest.param((3, 1), 5, None, id="even-as-can-be", marks=pytest.mark.exhaustive),
        pytest.param((3, 1), 5, (1, 1, 3), id="explicit", marks=pytest.mark.exhaustive),
        pytest.param((2, 2), 4, (3, 1), id="explicit-2x2"),
        pytest.param((4, 1), 4, None, id="one-layer-a-stage", marks=pytest.mark.exhaustive),
    ],
)
def test_stages_of_different_sizes(serve, checkpoint, shape, layers, partition):
    reference = checkpoint("Qwen3ForCausalLM", num_hidden_layers=layers, seed=layers)
    requests = [
        greedy_request(f"r{index}", prompt, MAX_TOKENS)
        for index, prompt in enumerate(decisive_prompts(reference, 8, LENGTHS, MAX_TOKENS))
    ]
    with serve(reference.path, *shape, layer_partition=partition) as (group, loaded):
        assert_greedy(generate(group, loaded, requests), reference, requests)


@pytest.mark.usefixtures("each_drafter")
@pytest.mark.parametrize(
    ("architecture", "shape"),
    [
        exhaustively("LlamaForCausalLM", (1, 2)),
        exhaustively("LlamaForCausalLM", (2, 2)),
        exhaustively("LlamaForCausalLM", (1, 4)),
        ("Qwen2ForCausalLM", (1, 4)),
    ],
)
def test_key_value_heads_are_replicated(serve, checkpoint, architecture, shape):
    kv_heads = 2 if shape[1] == 4 else 1
    reference = checkpoint(
        architecture, num_key_value_heads=kv_heads, num_hidden_layers=2, max_shard_size="60KB"
    )
    assert len(list(reference.path.glob("*.safetensors"))) > 1
    requests = [
        greedy_request(f"r{index}", prompt, MAX_TOKENS)
        for index, prompt in enumerate(decisive_prompts(reference, 9, LENGTHS, MAX_TOKENS))
    ]
    with serve(reference.path, *shape) as (group, loaded):
        assert_greedy(generate(group, loaded, requests), reference, requests)
