"""Drafts of requests with a grammar, on real daemons: with forced tokens and guesses, right and
wrong, requests have the same tokens as one by one. Those that are right save a step each."""

import random
from contextlib import closing
from pathlib import Path

import pytest

from rpc_schema.config import SpeculativeConfig
from rpc_schema.extensions import extension_of
from rpc_schema.structured import StructuredOutput
from tests.e2e.test_jump_forward import ends, forced_line, free_line
from tests.support.exhaustive import exhaustively
from tests.support.serving import scheduler_limits
from tests.support.structured import (
    EOS_TOKEN_ID,
    VOCAB_SIZE,
    long_names_case,
    make_tokenizer,
    random_case,
    regex_case,
)
from worker_client.driver import Driver
from worker_client.driver_parts.registry import DriverOptions
from worker_client.inputs.request_parser import RequestParser
from worker_client.inputs.tokenizer import load_tokenizer
from worker_client.scheduler import Scheduler
from worker_client.scheduler.drafting.expected_drafts import ExpectedDrafts
from worker_client.structured import matchers
from worker_client.structured.grammars import GrammarLimits, Grammars
from worker_client.structured.matchers import MaskProcess

DRIVER = SpeculativeConfig(method="driver", num_speculative_tokens=4)
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1)


@pytest.fixture(scope="module")
def model(checkpoint):
    made = checkpoint(vocab_size=VOCAB_SIZE, eos_token_id=EOS_TOKEN_ID)
    make_tokenizer(made.path)
    return made


@pytest.fixture(scope="module")
def grammars(model):
    made = Grammars(model.path, VOCAB_SIZE, [EOS_TOKEN_ID])
    yield made
    made.close()


@pytest.fixture(scope="module")
def sampling(model):
    """Every token is sampled."""
    made = Grammars(model.path, VOCAB_SIZE, [EOS_TOKEN_ID], GrammarLimits(max_jump=0))
    yield made
    made.close()


def still():
    """A clock by which all drafts pay."""
    return 0.0


class Guessing(Scheduler):
    """Guesses the next tokens of requests with a grammar, also beyond their ends."""

    def __init__(self, limits, texts, rng, outputs):
        super().__init__(limits, texts, clock=still)
        self.rng, self.outputs = rng, outputs

    def schedule(self):
        for request in self._queues.unfinished.values():
            if extension_of(request.extensions, StructuredOutput) is not None:
                own = self.outputs[request.id].token_ids
                right = own[len(request.tokens) - request.num_prompt_tokens :][:12]
                right += [EOS_TOKEN_ID] * (12 - len(right))
                guesses = [
                    token if self.rng.random() < 0.8 else self.rng.randrange(VOCAB_SIZE)
                    for token in right
                ]
                request.drafts.expected = ExpectedDrafts(guesses, first=len(request.tokens))
        return super().schedule()

    def expect_tokens(self, req_id, token_ids, num_forced):
        """Guess instead."""


def serve_all(group, loaded, grammars, lines, make=None, **limits):
    """Outputs by id, and the driver."""
    texts = load_tokenizer(Path(group.get_status()[0].config.model.model))
    bounds = scheduler_limits(group, loaded, **limits)
    scheduler = make(bounds, texts) if make else Scheduler(bounds, texts, clock=still)
    driver = Driver(group, scheduler, options=DriverOptions(grammars))
    parser = RequestParser(texts.encode, seed=1, encode_word=texts.encode_word)
    for index, fields in enumerate(lines):
        driver.add_request(parser.from_fields(fields, index))
    return {output.req_id: output for output in driver.run()}, driver


def random_lines(rng):
    lines = [forced_line(rng, f"m{i}") for i in range(8)]
    lines += [free_line(rng, f"f{i}") for i in range(2)]
    for i in range(5):
        options = {"structured_outputs": random_case(rng).options, "max_tokens": rng.randint(5, 60)}
        if i % 2:
            options |= {"temperature": 1.5, "seed": i}
        lines.append({**free_line(rng, f"s{i}"), **options})
    return lines


def reports(outputs):
    return {
        name: [(each.token_ids[0], round(float(each.logprobs[0]), 3)) for each in output.logprobs]
        for name, output in outputs.items()
        if output.logprobs is not None
    }


@pytest.mark.parametrize(
    ("pp", "method"),
    [(2, DRIVER), (1, NGRAM), *(exhaustively(*each) for each in ((1, DRIVER), (2, NGRAM)))],
)
def test_drafts_change_no_token(serve, model, grammars, sampling, pp, method):
    """With few blocks too, where requests are preempted."""
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    lines = random_lines(rng)
    with serve(model.path, 1, reload=True) as (group, loaded):
        expected, _ = serve_all(group, loaded, sampling, lines)
    crowd = [free_line(rng, f"c{i}") | {"max_tokens": 40} for i in range(5)]
    scarce = {"num_blocks": 32, "max_num_batched_tokens": 24}

    def guessing(limits, texts):
        return Guessing(limits, texts, rng, expected)

    with serve(model.path, pp, reload=True, speculative=method) as (group, loaded):
        for make in (None, guessing):
            outputs, _ = serve_all(group, loaded, grammars, lines, make)
            assert ends(outputs) == ends(expected), (seed, make)
            assert reports(outputs) == reports(expected), (seed, make)
            own = [output for name, output in outputs.items() if name[0] in "ms"]
            assert sum(output.num_accepted for output in own) > 0, (seed, make)
            refused = sum(output.num_drafted - output.num_accepted for output in own)
            assert refused > 0 or make is None, (seed, make)
            outputs, _ = serve_all(group, loaded, grammars, lines + crowd, make, **scarce)
            assert ends({name: outputs[name] for name in expected}) == ends(expected), (seed, make)
            assert sum(output.num_preemptions for output in outputs.values()) > 0, (seed, make)


def test_guesses_for_which_the_mask_process_has_no_room_cost_no_token(
    serve, model, sampling, monkeypatch
):
    """Rows have the same tokens then, and fewer of their drafts are accepted."""
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    options = {"structured_outputs": regex_case("([ab]{3}-){12}").options, "max_tokens": 60}
    lines = [free_line(rng, f"s{i}") | options for i in range(6)] + [free_line(rng, "f")]
    made, found = MaskProcess.fork, []

    def fork(process, source, matcher, tokens):
        made(process, source, matcher, tokens)
        found.append(not matcher.error)

    with serve(model.path, 1, reload=True) as (group, loaded):
        expected, _ = serve_all(group, loaded, sampling, lines)
    monkeypatch.setattr(MaskProcess, "fork", fork)
    monkeypatch.setattr(matchers, "MAX_ROWS", len(lines) + 3)
    limits = GrammarLimits(num_serving=1)
    with (
        closing(Grammars(model.path, VOCAB_SIZE, [EOS_TOKEN_ID], limits)) as crowded,
        serve(model.path, 1, reload=True, speculative=DRIVER) as (group, loaded),
    ):
        outputs, _ = serve_all(
            group, loaded, crowded, lines, lambda *own: Guessing(*own, rng, expected)
        )
    assert ends(outputs) == ends(expected), seed
    assert reports(outputs) == reports(expected), seed
    assert found.count(False) > 5 and found.count(True) > 5, (seed, found)
    assert sum(output.num_accepted for output in outputs.values()) > 0, seed


def test_right_drafts_save_a_step_each(serve, model, grammars, sampling):
    """Forced tokens, and guesses of what stood in the output before; also those of a request that
    may not jump."""
    line = {"id": "a", "prompt_token_ids": [5, 6, 7], "max_tokens": 200, "logprobs": 1}
    line["structured_outputs"] = long_names_case().options
    with serve(model.path, 1, reload=True, speculative=DRIVER) as (group, loaded):
        expected, slow = serve_all(group, loaded, sampling, [line], num_speculative_tokens=0)
        runs = [serve_all(group, loaded, each, [line]) for each in (grammars, sampling)]
    num_tokens = len(expected["a"].token_ids)
    assert num_tokens > 60 and len(slow.records) >= num_tokens
    for outputs, driver in runs:
        assert ends(outputs) == ends(expected)
        assert reports(outputs) == reports(expected)
        output = outputs["a"]
        assert output.finish_reason == "stop"
        saved = len(slow.records) - len(driver.records)
        assert saved == pytest.approx(output.num_accepted, abs=2)
    forced, guessed = (len(driver.records) for _, driver in runs)
    assert forced < 0.5 * num_tokens
    assert guessed < 0.8 * num_tokens
