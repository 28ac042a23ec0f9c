"""Prompts with embeddings through real daemons: the tokens are those that transformers generates
from inputs_embeds in float32."""

import random

import pytest

from tests.support.driving import random_cases
from tests.support.embedded_prompts import clear_cases
from tests.support.serving import generate

MAX_TOKENS = 24
LONGEST = 20
"""Tokens, and rows, of a prompt."""


@pytest.mark.parametrize(
    ("architecture", "pp", "tp"),
    [("LlamaForCausalLM", 1, 1), ("Qwen3ForCausalLM", 2, 1), ("LlamaForCausalLM", 1, 2)],
)
def test_embedded_prompts_are_served_beside_others(serve, checkpoint, architecture, pp, tp):
    """In steps of 16 tokens, which cut them, with too few blocks for all."""
    seed = random.randrange(1 << 30)
    model = checkpoint(architecture)
    requests, expected = clear_cases(model, seed, 8, MAX_TOKENS, LONGEST)
    plain = random_cases(model, seed, 4, MAX_TOKENS)
    mixed = [*requests, *plain.requests]
    random.Random(seed).shuffle(mixed)
    sizes = {"max_num_batched_tokens": 16, "max_num_seqs": 16, "max_model_len": 72}
    with serve(model.path, pp, tp, num_gpu_blocks=30, **sizes) as (group, loaded):
        run = generate(group, loaded, mixed)
        statuses = group.get_status()
    assert run.tokens == expected | plain.expected, seed
    assert sum(output.num_preemptions for output in run.outputs.values()) > 0
    assert [status.upload_bytes for status in statuses] == [0] * (pp * tp)
