"""Penalties, biases, allowed tokens, bad words and log probabilities on a GPU: the kernels bit for
bit those of plain torch, and whole generations under graphs against transformers' logits."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.gpu_generation import generate, gpu_group, make_requests
from tests.support.penalty_checks import check_counts, check_drafts, check_penalized
from tests.support.token_rules import RuleProcessor, random_params
from worker_client.requests import SamplingParams
from worker_daemon.sample.sampler import TorchSampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
VOCAB_SIZE = 8192
NUM_REQUESTS = 40
RULES = [
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
]
ROUNDING = 0.3
"""Of bfloat16 logits, penalties included; a count that is wrong by one moves them further on
average."""


@pytest.fixture
def sampling():
    from worker_daemon.kernels.sampling import TritonSampling  # imports Triton

    return TritonSampling(torch.device("cuda"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 331), (9, 128_256), (8, 151_936)])
def test_penalties_are_those_of_plain_torch(sampling, num_rows, vocab_size, dtype):
    check_penalized(sampling, "cuda", num_rows, vocab_size, dtype, torch.seed() % 2**32)


@pytest.mark.parametrize("most", [1, 4, 31])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_drafts_count_as_output(sampling, dtype, most):
    for make in (sampling, TorchSampling()):
        check_drafts(make, "cuda", 32_003, dtype, most, torch.seed() % 2**32)


@pytest.mark.parametrize("most", [1, 3, 32])
@pytest.mark.parametrize("vocab_size", [331, 151_936])
def test_counts(sampling, vocab_size, most):
    for make in (sampling, TorchSampling()):
        check_counts(make, "cuda", vocab_size, torch.seed() % 2**32, most)


def few(params):
    """Params within a request's bounds; random params are for smaller vocabularies."""
    allowed = params.allowed_token_ids
    return {
        **{name: getattr(params, name) for name in RULES[:3]},
        "logit_bias": dict(list(params.logit_bias.items())[:1024]),
        "allowed_token_ids": None if allowed is None else allowed[:4096],
        "bad_words": params.bad_words,
    }


@torch.inference_mode()
def test_generations_under_graphs(llama):
    rng = np.random.default_rng()
    requests = [
        make_requests(
            1,
            seed=index,
            prompt_logprobs=2 if index % 4 == 0 else None,
            **few(random_params(rng, VOCAB_SIZE)) if index % 3 else {},
        )[0]
        for index in range(NUM_REQUESTS)
    ]
    requests = [replace(request, id=str(index)) for index, request in enumerate(requests)]
    with gpu_group(llama, 1, 1, "bfloat16") as (_, group, model):
        outputs = generate(group, model, requests)
    reference = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).to("cuda").eval()
    gaps, errors = [], []
    for request in requests:
        output, prompt = outputs[request.id], request.prompt.tolist()
        ids = torch.tensor([[*prompt, *output.token_ids]], device="cuda")
        logits = reference(ids).logits[0].float().cpu()
        rules = RuleProcessor(
            SamplingParams(**{name: getattr(request.sampling, name) for name in RULES}), len(prompt)
        )
        for place, token in enumerate(output.token_ids, len(prompt)):
            scores = rules(ids[:, :place].cpu(), logits[place - 1 : place])[0]
            gaps.append(float(scores.max() - scores[token]))
        if request.sampling.prompt_logprobs is not None:
            exact = logits.log_softmax(-1)
            ours = [entry.logprobs[0] for entry in output.prompt_logprobs[1:]]
            theirs = exact[range(len(ours)), prompt[1:]]
            errors += (torch.tensor(np.array(ours)) - theirs).abs().tolist()
    print(f"largest gap {max(gaps):.3f}, largest error of a prompt's {max(errors):.3f}")
    assert max(gaps) < ROUNDING
    assert max(errors) < ROUNDING
