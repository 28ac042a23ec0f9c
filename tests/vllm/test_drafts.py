"""Drafts behind vLLM's scheduler: the tokens are those of a run without them, and vLLM counts what
was accepted."""

from dataclasses import replace

import pytest

from tests.support.checkpoints import prompts
from tests.support.serving import generate, greedy_request
from tests.support.structured import EOS_TOKEN_ID, VOCAB_SIZE
from tests.vllm.test_parity import cases, check_logprobs, run_vllm, tokens_of

SPECULATION = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
SIZES = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
REFUSED_BY_VLLM = ("other seed", "bias", "everything")
"""Cases with min_p or logit_bias, which vLLM refuses together with drafts."""


@pytest.fixture(scope="module")
def model(checkpoint):
    return checkpoint(vocab_size=VOCAB_SIZE, seed=41, eos_token_id=EOS_TOKEN_ID)


def repeating(max_tokens=40):
    """Return requests, greedy and seeded, whose outputs soon repeat: few tokens are allowed."""
    few = {"allowed_token_ids": (4, 8, 15, 16)}
    return [
        greedy_request(
            f"repeats {at}",
            prompt.tolist(),
            max_tokens,
            ignore_eos=True,
            **few,
            **({"temperature": 0.7, "seed": at} if at % 2 else {"logprobs": 2}),
        )
        for at, prompt in enumerate(prompts(8, [3, 17, 33, 50, 6, 7], VOCAB_SIZE))
    ]


def requests_of_all_kinds():
    return [*repeating(), *(r for r in cases() if r.id.rpartition(" ")[0] not in REFUSED_BY_VLLM)]


def accepted(llm):
    """Return how many drafts vLLM has counted, and how many of them as accepted."""
    values = {each.name: each.value for each in llm.get_metrics() if hasattr(each, "value")}
    names = ("num_draft_tokens", "num_accepted_tokens")
    return tuple(values[f"vllm:spec_decode_{name}"] for name in names)


@pytest.mark.parametrize(
    ("pp", "tp", "settings"),
    [(1, 1, {}), (2, 1, {}), (1, 2, {"suffix_lookup": True})],
)
def test_tokens_are_those_without_drafts(ours, engine, model, pp, tp, settings):
    requests = requests_of_all_kinds()
    with ours(model.path, pp, tp, **SIZES) as served:
        expected = generate(*served, requests)
    options = {"speculative_config": {**SPECULATION}, "disable_log_stats": False}
    with engine(model.path, pp, tp, settings=settings, **options) as llm:
        outputs = run_vllm(llm, requests)
        assert tokens_of(outputs) == expected.tokens
        check_logprobs(requests, outputs, expected.outputs)
        again = run_vllm(llm, [replace(each, id=f"again {each.id}") for each in requests])
        cached = {name.removeprefix("again "): own for name, own in tokens_of(again).items()}
        assert cached == expected.tokens
        drafted, taken = accepted(llm)
        assert drafted > taken > 100
