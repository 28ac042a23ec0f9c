"""Structured output on a GPU: masks under CUDA graphs, with some rows of each step deferred."""

import random

import pytest

from tests.support.flat_requests import changed
from tests.support.gpu_generation import generate, gpu_group, make_requests
from tests.support.structured import make_tokenizer, random_case
from worker_client.inputs.grammar_options import read_structured_output
from worker_client.structured.grammars import Grammars

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_what_their_grammars_allow_beside_free_requests(llama, tmp_path, temperature):
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    tokenizer = make_tokenizer(tmp_path)
    cases = {str(index): random_case(rng) for index in range(0, 48, 2)}
    with gpu_group(llama, 1, 1, "bfloat16") as (_, group, loaded):
        metadata = loaded.metadata
        grammars = Grammars(tmp_path, metadata.vocab_size, metadata.eos_token_ids)
        requests = [
            changed(
                request,
                ignore_eos=False,
                structured_outputs=read_structured_output(cases[request.id].options),
            )
            if request.id in cases
            else request
            for request in make_requests(48, seed, temperature=temperature, max_tokens=150)
        ]
        outputs = generate(group, loaded, requests, grammars)
        grammars.close()
    num_whole = 0
    for name, output in outputs.items():
        assert not output.error, (seed, output)
        if name not in cases:
            assert (output.finish_reason, len(output.token_ids)) == ("length", 150)
        elif output.finish_reason == "stop":
            num_whole += 1
            cases[name].check(tokenizer.decode(output.token_ids, skip_special_tokens=True))
    assert num_whole > 0.8 * len(cases), seed
