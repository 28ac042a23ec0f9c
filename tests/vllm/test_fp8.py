"""FP8 weights and KV caches through vLLM: the tokens of our own driver with the same settings."""

import pytest

from tests.support.checkpoints import prompts
from tests.support.quantized import quantize
from tests.support.serving import generate, greedy_request
from tests.support.structured import EOS_TOKEN_ID, VOCAB_SIZE
from tests.vllm.test_parity import run_vllm, tokens_of

LENGTHS = (1, 17, 70)
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def quantized(checkpoint):
    """An FP8 checkpoint: (method, strategy) -> Checkpoint."""

    def make(method, strategy):
        made = checkpoint(vocab_size=VOCAB_SIZE, seed=len(strategy), eos_token_id=EOS_TOKEN_ID)
        quantize(made.path, made.model, method, strategy)
        return made

    return make


def requests():
    made = enumerate(prompts(8, LENGTHS, VOCAB_SIZE))
    return [greedy_request(f"r{at}", tokens, NUM_TOKENS, ignore_eos=True) for at, tokens in made]


@pytest.mark.parametrize(
    ("made", "options", "expected_options", "pp", "tp"),
    [
        (("compressed", "channel"), {}, {}, 2, 1),
        (("fp8", "tensor"), {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8"}, 1, 2),
        (None, {"quantization": "fp8"}, {"quantization": "fp8"}, 1, 1),
        (None, {"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp8"}, 1, 1),
    ],
)
def test_tokens_are_those_of_our_driver(
    ours, engine, checkpoint, quantized, made, options, expected_options, pp, tp
):
    plain = {"vocab_size": VOCAB_SIZE, "seed": 43, "eos_token_id": EOS_TOKEN_ID}
    model = checkpoint(**plain) if made is None else quantized(*made)
    given = requests()
    settings = {"dtype": "bfloat16", "max_num_seqs": 8, "max_num_batched_tokens": 64}
    with ours(model.path, pp, tp, **settings, **expected_options) as served:
        expected = generate(*served, given).tokens
    with engine(model.path, pp, tp, dtype="bfloat16", **options) as llm:
        assert tokens_of(run_vllm(llm, given)) == expected
