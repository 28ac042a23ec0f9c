"""Drafts behind vLLM's scheduler: the tokens are those of a run without them, and vLLM counts what
was accepted."""

import concurrent.futures
import json
import re
import shutil
import time
from dataclasses import replace

import pytest

from tests.support.checkpoints import prompts
from tests.support.command_line import short_directory
from tests.support.serving import generate, greedy_request
from tests.support.structured import EOS_TOKEN_ID, VOCAB_SIZE
from tests.support.supervised import Supervised
from tests.vllm.models import write_tokenizer
from tests.vllm.serving import DAEMON_PYTHON, serving
from tests.vllm.test_parity import as_vllm, cases, check_logprobs, run_vllm, tokens_of

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


def speculating(**options):
    """Return options of an engine with drafts."""
    return {"speculative_config": {**SPECULATION}, "disable_log_stats": False, **options}


def counted(llm):
    """Return vLLM's counters by their names."""
    return {
        each.name.removeprefix("vllm:"): each.value
        for each in llm.get_metrics()
        if hasattr(each, "value")
    }


@pytest.mark.parametrize(
    ("pp", "tp", "settings"),
    [(1, 1, {}), (2, 1, {}), (1, 2, {"suffix_lookup": True})],
)
def test_tokens_are_those_without_drafts(ours, engine, model, pp, tp, settings):
    requests = requests_of_all_kinds()
    with ours(model.path, pp, tp, **SIZES) as served:
        expected = generate(*served, requests)
    with engine(model.path, pp, tp, settings=settings, **speculating()) as llm:
        outputs = run_vllm(llm, requests)
        assert tokens_of(outputs) == expected.tokens
        check_logprobs(requests, outputs, expected.outputs)
        again = run_vllm(llm, [replace(each, id=f"again {each.id}") for each in requests])
        cached = {name.removeprefix("again "): own for name, own in tokens_of(again).items()}
        assert cached == expected.tokens
        counts = counted(llm)
    drafted, taken = (counts[f"spec_decode_num_{n}_tokens"] for n in ("draft", "accepted"))
    assert drafted > taken > 100


def drafting_by(path):
    """Return vLLM's setting of a draft model."""
    return {"model": str(path), "method": "draft_model", "num_speculative_tokens": 3}


@pytest.mark.parametrize(("pp", "tp"), [(1, 2), (2, 1)])
def test_tokens_are_those_without_a_draft_model(ours, engine, checkpoint, model, pp, tp):
    """Another model, and the model itself: then all drafts of plain requests are right. Requests
    with a grammar have drafts of them too, which know nothing of it."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    write_tokenizer(model.path)
    requests = requests_of_all_kinds()
    plain = [
        greedy_request(f"plain {at}", prompt.tolist(), 41, ignore_eos=True)
        for at, prompt in enumerate(prompts(9, [3, 20, 90], VOCAB_SIZE))
    ]
    masked = SamplingParams(
        max_tokens=40,
        temperature=0.8,
        seed=5,
        structured_outputs=StructuredOutputsParams(regex="(abc|abe){3,9}-[0-9]{6}"),
    )
    asked = [{"prompt_token_ids": [5, 6, at]} for at in range(3)]

    def masked_tokens(llm):
        outputs = llm.generate(asked, masked, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    with ours(model.path, pp, tp, **SIZES) as served:
        expected = generate(*served, [*requests, *plain])
    with engine(model.path, pp, tp, skip_tokenizer_init=False) as llm:
        alone = masked_tokens(llm)
    other = checkpoint("Qwen3ForCausalLM", vocab_size=VOCAB_SIZE, seed=42)
    for path in (other.path, model.path):
        options = speculating(speculative_config=drafting_by(path), skip_tokenizer_init=False)
        with engine(model.path, pp, tp, **options) as llm:
            outputs = run_vllm(llm, plain)
            counts = counted(llm)
            outputs |= run_vllm(llm, requests)
            assert masked_tokens(llm) == alone
        assert tokens_of(outputs) == expected.tokens
        check_logprobs(requests, outputs, expected.outputs)
    drafted, taken = (counts[f"spec_decode_num_{n}_tokens"] for n in ("draft", "accepted"))
    assert drafted >= taken > 0.9 * drafted > 0


@pytest.mark.parametrize(("pp", "method"), [(1, "ngram"), (2, "ngram"), (1, "draft_model")])
def test_preempted_requests_have_the_same_tokens(ours, engine, model, pp, method):
    requests = [replace(each, max_tokens=60) for each in requests_of_all_kinds()]
    with ours(model.path, pp, **SIZES) as served:
        expected = generate(*served, requests)
    options = speculating(num_gpu_blocks_override=16)
    if method == "draft_model":
        options["speculative_config"] = drafting_by(model.path)
    with engine(model.path, pp, **options) as llm:
        before = counted(llm)
        outputs = run_vllm(llm, requests)
        after = counted(llm)
    assert tokens_of(outputs) == expected.tokens
    check_logprobs(requests, outputs, expected.outputs)
    for name in ("num_preemptions", "spec_decode_num_accepted_tokens"):
        assert after[name] > before[name]


def test_grammars_beside_others_have_the_same_tokens(ours, engine, model):
    """The step of a request with a grammar is sent before its drafts are known, and its masks are
    made for them; the others do not wait for that. test_grammars.py has grammars alone."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    write_tokenizer(model.path)
    plain = repeating()
    with ours(model.path, **SIZES) as served:
        expected = generate(*served, plain).tokens
    regex = "[ab]{3}-[0-9]{12}"
    masked = [
        SamplingParams(
            max_tokens=60,
            temperature=1.0 if seed else 0.0,
            seed=seed,
            structured_outputs=StructuredOutputsParams(regex=regex),
        )
        for seed in range(3)
    ]
    with engine(model.path, skip_tokenizer_init=False) as llm:
        alone = llm.generate([{"prompt_token_ids": [5, 6]}] * 3, masked, use_tqdm=False)
    options = speculating(skip_tokenizer_init=False)
    with engine(model.path, **options) as llm:
        given = [as_vllm(each) for each in plain] + [
            ({"prompt_token_ids": [5, 6]}, m) for m in masked
        ]
        outputs = llm.generate([g[0] for g in given], [g[1] for g in given], use_tqdm=False)
        taken = counted(llm)["spec_decode_num_accepted_tokens"]
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    assert tokens[: len(plain)] == [expected[each.id] for each in plain]
    assert tokens[len(plain) :] == [list(output.outputs[0].token_ids) for output in alone]
    texts = [output.outputs[0].text for output in outputs[len(plain) :]]
    assert all(re.fullmatch(regex, text) for text in texts), texts
    assert taken > 0


@pytest.fixture
def daemons(root):
    """Two daemons that are started again."""
    directory = short_directory()
    daemons = Supervised(2, root, directory, python=DAEMON_PYTHON)
    yield daemons
    daemons.close()
    shutil.rmtree(directory)


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_killed_daemon_is_replaced_and_no_request_notices(daemons, root):
    """The rows and the drafts of the pipeline's last stage are lost, those of requests with a
    grammar too."""
    words = ("--pipeline-parallel-size", "2", "--speculative-config", json.dumps(SPECULATION))
    settings = {"reload": True, "replace_within_s": 90.0}
    fields = {"max_tokens": 60, "ignore_eos": True, "return_token_ids": True}
    few = {"allowed_token_ids": [4, 8, 15, 16]}
    kinds = [{}, few, {"structured_outputs": {"regex": "(ab|cd){30}"}, "ignore_eos": False}]
    asked = [
        {**fields, **kinds[at % 3], "temperature": 0.9 * (at % 2), "seed": at} for at in range(24)
    ]

    def complete(own):
        return server.complete(f"The driver {own['seed']}", **own)["choices"][0]["token_ids"]

    with (
        serving(daemons.endpoints, root / "demo", root, *words, settings=settings) as server,
        concurrent.futures.ThreadPoolExecutor(len(asked)) as pool,
    ):
        expected = list(pool.map(complete, asked))
        assert server.post("/reset_prefix_cache").json() == {"success": True}
        again = [pool.submit(complete, own) for own in asked]
        time.sleep(0.5)
        assert not all(each.done() for each in again)
        daemons.kill(1)
        daemons.restart_later(1)
        assert [each.result() for each in again] == expected
        metrics = server.client.get("/metrics").text
        assert "replaced ranks" in server.log()
    found = re.search(r"^vllm:spec_decode_num_accepted_tokens_total\S* (\S+)$", metrics, re.M)
    assert float(found[1]) > 0
