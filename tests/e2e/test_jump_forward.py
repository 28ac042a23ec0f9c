"""Jump forward on real daemons: requests that gain forced tokens without sampling them get the same
tokens as with every token sampled, in fewer steps. test_structured.py has failures and adoption."""

import random
from pathlib import Path

import pytest

from tests.support.exhaustive import exhaustively
from tests.support.serving import scheduler_limits
from tests.support.structured import (
    EOS_TOKEN_ID,
    VOCAB_SIZE,
    crossing_case,
    forced_schema,
    long_names_case,
    make_tokenizer,
    random_case,
    schema_case,
)
from worker_client.driver import Driver
from worker_client.driver_parts.registry import DriverOptions
from worker_client.inputs.request_parser import RequestParser
from worker_client.inputs.tokenizer import load_tokenizer
from worker_client.scheduler import Scheduler
from worker_client.structured.grammars import GrammarLimits, Grammars

MAX_TOKENS = 90


@pytest.fixture(scope="module")
def model(checkpoint):
    return checkpoint(vocab_size=VOCAB_SIZE, eos_token_id=EOS_TOKEN_ID)


@pytest.fixture(scope="module", autouse=True)
def tokenizer(model):
    return make_tokenizer(model.path)


@pytest.fixture(scope="module")
def jumping(model, tokenizer):
    made = Grammars(model.path, VOCAB_SIZE, [EOS_TOKEN_ID])
    yield made
    made.close()


@pytest.fixture(scope="module")
def sampling(model, tokenizer):
    """Every token is sampled."""
    made = Grammars(model.path, VOCAB_SIZE, [EOS_TOKEN_ID], GrammarLimits(max_jump=0))
    yield made
    made.close()


def forced_line(rng, name, prompt=None):
    """A request whose output is mostly forced, with any options that leave it be."""
    length = rng.randint(1, 20)
    fields = {
        "id": name,
        "prompt_token_ids": prompt or [rng.randrange(4, VOCAB_SIZE) for _ in range(length)],
        "max_tokens": rng.choice([MAX_TOKENS, MAX_TOKENS, rng.randint(1, 30)]),
        "structured_outputs": schema_case(forced_schema(rng)).options,
    }
    if rng.random() < 0.7:
        fields |= {"temperature": rng.choice([0.7, 2.0]), "seed": rng.randrange(1 << 40)}
    options = [
        {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
        {"logit_bias": {str(rng.randrange(4, VOCAB_SIZE)): 3.0}},
        {"min_tokens": rng.randint(1, min(12, fields["max_tokens"]))},
        {"stop": [rng.choice(["in M", "peated", "measure", '": '])]},
        {"stop_token_ids": [rng.randrange(4, VOCAB_SIZE) for _ in range(30)]},
        {"logprobs": 1},
        {"prompt_logprobs": 1},
        {"logprob_token_ids": [5, 6]},
        {"bad_words": ["nowhere"]},
        {"n": 2},
    ]
    for option in rng.sample(options, rng.choice([0, 0, 1, 2])):
        fields |= option
    return fields


def free_line(rng, name):
    prompt = [rng.randrange(4, VOCAB_SIZE) for _ in range(rng.randint(1, 40))]
    return {"id": name, "prompt_token_ids": prompt, "max_tokens": rng.randint(5, 40)}


class Heard:
    """What a driver says of each request, as it comes."""

    def __init__(self):
        self.tokens = {}

    def __call__(self, result):
        for req_id, token in zip(result.req_ids, result.token_ids, strict=True):
            self.tokens.setdefault(req_id, []).append(token)


def serve_all(group, loaded, grammars, lines, **limits):
    """Outputs by id, and the driver; what was heard is what the outputs have."""
    texts = load_tokenizer(Path(group.get_status()[0].config.model.model))
    scheduler = Scheduler(scheduler_limits(group, loaded, **limits), texts)
    heard = Heard()
    driver = Driver(group, scheduler, heard, options=DriverOptions(grammars))
    parser = RequestParser(texts.encode, seed=1, encode_word=texts.encode_word)
    for index, fields in enumerate(lines):
        driver.add_request(parser.from_fields(fields, index))
    outputs = {output.req_id: output for output in driver.run()}
    for name, output in outputs.items():
        length = len(output.token_ids)
        assert heard.tokens.get(name, [])[:length] == output.token_ids, name
    return outputs, driver


def ends(outputs):
    return {name: (o.token_ids, o.finish_reason, o.text) for name, o in outputs.items()}


def num_busy(driver):
    return sum(record.num_requests for record in driver.records)


@pytest.mark.parametrize("pp", [exhaustively(1), 2])
def test_jumps_change_no_token(serve, model, jumping, sampling, pp):
    """Whatever else the requests ask for, in few blocks, in chunks, and behind a cached prefix."""
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    shared = [rng.randrange(4, VOCAB_SIZE) for _ in range(24)]
    lines = [forced_line(rng, f"m{i}", shared if i % 3 == 0 else None) for i in range(9)]
    lines += [free_line(rng, f"f{i}") for i in range(2)]
    lines += [
        {**free_line(rng, f"s{i}"), "structured_outputs": random_case(rng).options}
        for i in range(3)
    ]
    lines += [
        {**free_line(rng, f"x{i}"), "structured_outputs": crossing_case(rng).options}
        for i in range(3)
    ]
    with serve(model.path, pp) as (group, loaded):
        expected, slow = serve_all(group, loaded, sampling, lines)
        outputs, driver = serve_all(group, loaded, jumping, lines)
        assert ends(outputs) == ends(expected), seed
        assert num_busy(driver) < num_busy(slow), seed
        limits = {"num_blocks": 32, "max_num_batched_tokens": 24}
        crowd = [free_line(rng, f"c{i}") | {"max_tokens": 40} for i in range(5)]
        outputs, _ = serve_all(group, loaded, jumping, lines + crowd, **limits)
        assert ends({name: outputs[name] for name in expected}) == ends(expected), seed
        assert sum(output.num_preemptions for output in outputs.values()) > 0, seed


@pytest.mark.parametrize("pp", [1, exhaustively(2)])
def test_a_lone_request_takes_fewer_steps(serve, model, jumping, sampling, pp):
    line = {"id": "a", "prompt_token_ids": [5, 6, 7], "max_tokens": 200}
    line["structured_outputs"] = long_names_case().options
    with serve(model.path, pp) as (group, loaded):
        expected, slow = serve_all(group, loaded, sampling, [line])
        outputs, driver = serve_all(group, loaded, jumping, [line])
    assert ends(outputs) == ends(expected)
    assert outputs["a"].finish_reason == "stop"
    num_tokens = len(outputs["a"].token_ids)
    assert len(slow.records) >= num_tokens > 60
    assert len(driver.records) < 0.4 * num_tokens
