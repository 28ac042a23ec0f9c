"""vLLM's scheduler on our daemons gives the tokens of our own driver, for whatever a request may
ask."""

from dataclasses import replace

import pytest
import torch
import transformers

from tests.support.checkpoints import Checkpoint, decisive_prompts, prompts
from tests.support.flat_requests import changed
from tests.support.serving import generate, greedy_request
from tests.support.structured import EOS_TOKEN_ID, VOCAB_SIZE
from tests.vllm.models import write_tokenizer

NUM_TOKENS = 12
SHAPES = [(1, 1), (2, 1), (1, 2)]


@pytest.fixture(scope="module")
def model(checkpoint):
    return checkpoint(vocab_size=VOCAB_SIZE, seed=41, eos_token_id=EOS_TOKEN_ID)


FEATURES = {
    "greedy": {},
    "stops early": {"max_tokens": 3},
    "seeded": {"temperature": 0.9, "top_p": 0.9, "seed": 7},
    "other seed": {"temperature": 1.3, "top_k": 40, "min_p": 0.01, "seed": 2**62 + 5},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": -0.5, "repetition_penalty": 1.3},
    "bias": {"logit_bias": {5: 4.0, 9: -100.0}},
    "allowed": {"allowed_token_ids": (4, 8, 15, 16, 23, 42)},
    "logprobs": {"logprobs": 3},
    "sampled logprob": {"logprobs": 0, "temperature": 0.8, "seed": 3},
    "prompt logprobs": {"prompt_logprobs": 2},
    "given tokens": {"prompt_logprobs": 0, "logprobs": 0},
    "named": {"logprob_token_ids": (3, 1, 99)},
    "unlikely": {"temperature": 2.0, "seed": 2, "logprobs": 20, "frequency_penalty": 2.0},
    "ends late": {
        "allowed_token_ids": (EOS_TOKEN_ID, 9, 15, 77),
        "ignore_eos": False,
        "min_tokens": 5,
        "stop_token_ids": (77,),
    },
    "everything": {
        "temperature": 0.7,
        "top_p": 0.95,
        "seed": 11,
        "presence_penalty": 0.3,
        "logit_bias": {7: 2.0},
        "logprobs": 2,
        "prompt_logprobs": 1,
    },
}


def cases():
    """Return our requests: each feature with prompts of several lengths, some of one prefix."""
    shared = prompts(5, [40], VOCAB_SIZE)[0].tolist()
    requests = []
    for index, (name, fields) in enumerate(FEATURES.items()):
        for length in (1, 17, 70):
            tail = prompts(100 * index + length, [length], VOCAB_SIZE)[0].tolist()
            prompt = (shared + tail)[: 32 + length] if length > 1 else tail
            request = greedy_request(f"{name} {length}", prompt, NUM_TOKENS, ignore_eos=True)
            requests.append(changed(request, **fields))
    return requests


def as_vllm(request):
    """Return a request of ours as vLLM's prompt and parameters."""
    from vllm import SamplingParams

    names = (
        "temperature", "top_p", "top_k", "min_p", "seed", "logprobs",
        "presence_penalty", "frequency_penalty", "repetition_penalty", "prompt_logprobs",
        "min_tokens", "ignore_eos",
    )  # fmt: skip
    fields = {name: getattr(request.sampling, name) for name in names}
    for name in ("allowed_token_ids", "logprob_token_ids"):
        value = getattr(request.sampling, name)
        fields[name] = None if value is None else list(value)
    params = SamplingParams(
        **fields,
        max_tokens=request.max_tokens,
        logit_bias=dict(request.sampling.logit_bias) or None,
        stop_token_ids=list(request.sampling.stop_token_ids),
        detokenize=False,
    )
    return {"prompt_token_ids": request.prompt.tolist()}, params


def run_vllm(llm, requests, adapter=None):
    """Return vLLM's output of each request."""
    given = [as_vllm(each) for each in requests]
    outputs = llm.generate(
        [g[0] for g in given], [g[1] for g in given], use_tqdm=False, lora_request=adapter
    )
    return {request.id: output for request, output in zip(requests, outputs, strict=True)}


def tokens_of(outputs):
    return {name: list(output.outputs[0].token_ids) for name, output in outputs.items()}


def as_dict(entry):
    """Return our entry of a position as vLLM's users see it: {token: (logprob, rank)}."""
    pairs = zip(entry.token_ids.tolist(), entry.logprobs.tolist(), strict=True)
    found = {}
    for place, (token, logprob) in enumerate(pairs):
        found.setdefault(token, (logprob, entry.rank if place == 0 else place))
    return found


def assert_entries(theirs, entries):
    assert len(theirs) == len(entries)
    for their, entry in zip(theirs, entries, strict=True):
        wanted = as_dict(entry)
        assert their.keys() == wanted.keys()
        for token, (logprob, rank) in wanted.items():
            assert their[token].logprob == pytest.approx(logprob, abs=1e-4)
            if token == entry.token_ids[0]:
                assert their[token].rank == rank


@pytest.mark.parametrize(("pp", "tp"), SHAPES)
def test_requests_have_the_tokens_of_our_driver(ours, engine, model, pp, tp):
    requests = cases()
    with ours(model.path, pp, tp, max_num_seqs=8, max_num_batched_tokens=64) as served:
        expected = generate(*served, requests)
    with engine(model.path, pp, tp) as llm:
        outputs = run_vllm(llm, requests)
        assert tokens_of(outputs) == expected.tokens
        check_logprobs(requests, outputs, expected.outputs)
        again = run_vllm(llm, [replace(each, id=f"again {each.id}") for each in requests])
        cached = {name.removeprefix("again "): own for name, own in tokens_of(again).items()}
        assert cached == expected.tokens
        assert sum(output.num_cached_tokens for output in again.values()) > 0


def check_logprobs(requests, outputs, expected):
    for request in requests:
        own, output = expected[request.id], outputs[request.id]
        if request.sampling.logprobs is not None:
            assert_entries(output.outputs[0].logprobs, own.logprobs)
        if request.sampling.logprob_token_ids is not None:
            for their, entry in zip(output.outputs[0].logprobs, own.token_id_logprobs, strict=True):
                values = [their[token].logprob for token in request.sampling.logprob_token_ids]
                assert values == pytest.approx(list(entry), abs=1e-4)
        if request.sampling.prompt_logprobs is not None:
            assert output.prompt_logprobs[0] is None
            assert_entries(output.prompt_logprobs[1:], own.prompt_logprobs[1:])


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (2, 1)])
def test_preempted_requests_have_the_same_tokens(ours, engine, model, pp, tp):
    """Blocks for one long request and a little more."""
    requests = [replace(each, max_tokens=40) for each in cases()]
    with ours(model.path, pp, tp, max_num_seqs=8, max_num_batched_tokens=64) as served:
        expected = generate(*served, requests)
    with engine(model.path, pp, tp, num_gpu_blocks_override=16, disable_log_stats=False) as llm:
        outputs = run_vllm(llm, requests)
        assert tokens_of(outputs) == expected.tokens
        check_logprobs(requests, outputs, expected.outputs)
        preemptions = [each for each in llm.get_metrics() if each.name == "vllm:num_preemptions"]
        assert sum(each.value for each in preemptions) > 0


@pytest.mark.parametrize("pp", [1, 2])
def test_bad_words_do_not_occur(ours, engine, model, pp):
    """Words of one token and of several, as vLLM's tokenizer splits them."""
    from vllm import SamplingParams
    from vllm.tokenizers import get_tokenizer

    write_tokenizer(model.path)
    tokenizer = get_tokenizer(str(model.path))
    fields = {"max_tokens": 40, "temperature": 0.8, "seed": 3, "ignore_eos": True}
    requests = [
        greedy_request(str(at), prompt, **fields)
        for at, prompt in enumerate(prompts(3, [5, 30, 9], 400))
    ]
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    with ours(model.path, pp, **sizes) as served:
        plain = generate(*served, requests).tokens
        words = [some_word(tokenizer, plain["0"], size) for size in (1, 2, 3)]
        params = SamplingParams(**fields, bad_words=words)
        split = params.clone()
        split.update_from_tokenizer(tokenizer)
        banned = tuple(tuple(word) for word in split.bad_words_token_ids)
        requests = [changed(each, id=f"-{each.id}", bad_words=banned) for each in requests]
        expected = generate(*served, requests).tokens
    assert expected["-0"] != plain["0"]
    with engine(model.path, pp, skip_tokenizer_init=False) as llm:
        given = [as_vllm(each)[0] for each in requests]
        outputs = llm.generate(given, params, use_tqdm=False)
        cleaned = [list(output.outputs[0].token_ids) for output in outputs]
        refuse(llm, SamplingParams)
    assert cleaned == [expected[each.id] for each in requests]
    for own in cleaned:
        assert not any(tuple(own[at : at + len(w)]) == w for w in banned for at in range(len(own)))


def some_word(tokenizer, tokens, size):
    """Return a text of some of these tokens."""
    texts = (tokenizer.decode(tokens[at : at + size]) for at in range(len(tokens) - size))
    return next(text for text in texts if text and text.isprintable() and "\ufffd" not in text)


def refuse(llm, params):
    """Ask for what is not served, and then for something else."""
    from vllm.exceptions import VLLMValidationError

    prompt = {"prompt_token_ids": [5, 6]}
    with pytest.raises(VLLMValidationError, match="watermark"):
        llm.generate(prompt, params(watermarking=True), use_tqdm=False)
    with pytest.raises(VLLMValidationError, match="unknown"):
        llm.generate(prompt, params(extra_args={"x": 1}), use_tqdm=False)
    (output,) = llm.generate(prompt, params(max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3


def test_sleep_and_collective_rpc(engine, model):
    with engine(model.path, enable_sleep_mode=True) as llm:
        requests = cases()[:6]
        before = tokens_of(run_vllm(llm, requests))
        llm.sleep(level=1)
        llm.wake_up()
        llm.reset_prefix_cache()
        assert tokens_of(run_vllm(llm, requests)) == before
        (first,) = llm.collective_rpc("compute_weight_checksums")
        assert first
        with pytest.raises(NotImplementedError):
            llm.collective_rpc("no_such_operation")
        assert tokens_of(run_vllm(llm, requests)) == before


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 64},
        {"rope_type": "linear", "factor": 4.0},
    ],
    ids=["yarn", "linear"],
)
def test_rope_scaling_by_hf_overrides(engine, model, rope):
    """The tokens of transformers' model with that config.json."""
    overrides = {"rope_parameters": {**rope, "rope_theta": 2e4}}
    config = transformers.AutoConfig.from_pretrained(model.path, **overrides)
    scaled = transformers.AutoModelForCausalLM.from_pretrained(
        model.path, config=config, dtype=torch.float32
    ).eval()
    scaled.generation_config.eos_token_id = None
    reference = Checkpoint(model.path, scaled)
    given = decisive_prompts(reference, 7, (30, 70), NUM_TOKENS)
    requests = [
        greedy_request(f"r{at}", tokens, NUM_TOKENS, ignore_eos=True)
        for at, tokens in enumerate(given)
    ]
    with engine(model.path, hf_overrides=overrides) as llm:
        found = tokens_of(run_vllm(llm, requests))
    expected = {f"r{at}": reference.greedy(tokens, NUM_TOKENS) for at, tokens in enumerate(given)}
    assert found == expected
    with engine(model.path) as llm:
        assert tokens_of(run_vllm(llm, requests)) != expected
