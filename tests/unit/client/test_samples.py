"""Several samples of a request, and stop strings, in a driver and the reference scheduler."""

import json
import random

import numpy as np
import pytest

from tests.support.fake_daemon import reference_tokens
from tests.support.flat_requests import flat_request
from tests.unit.client.conftest import worker_config
from worker_client.cli.demo_model import make_demo_model
from worker_client.cli.session import read_inputs
from worker_client.driver import Driver
from worker_client.errors import RequestError
from worker_client.group.adoption import AdoptedRequest
from worker_client.inputs.stop_strings import StopWatch
from worker_client.inputs.tokenizer import load_tokenizer
from worker_client.requests import derived_seed, forked
from worker_client.scheduler import Scheduler, SchedulerLimits, scheduler_limits
from worker_client.scheduler_output import StepResult

LIMITS = SchedulerLimits(8, 16, 128, 64, 4, vocab_size=300)


class Letters:
    """Token t is the character of code t; one above 255 is half of a character."""

    def stream(self):
        return self

    def push(self, token_id):
        return chr(token_id) if token_id < 256 else ""


def request(name="a", prompt=(1, 2, 3), **fields):
    return flat_request(name, np.array(prompt, np.int32), **fields)


def sampled(scheduler, text):
    """Serve all requests, each of which samples the letters of a text."""
    places, outputs = {}, []
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        counts = {**dict.fromkeys(output.decode_req_ids, 1), **output.num_scheduled_tokens}
        for new in output.scheduled_new_reqs:
            places[new.req_id] = [new.num_computed_tokens, len(new.token_ids)]
        tokens = {}
        for name, count in counts.items():
            place = places[name]
            place[0] += count
            if place[0] == place[1]:
                tokens[name] = ord(text[place[1] - 3])
                place[1] += 1
        outputs += scheduler.update_from_output(
            output, StepResult(list(tokens), [*tokens.values()])
        )
    return outputs


def test_samples_wait_for_the_prompt_of_the_first_and_share_its_blocks(fakes, connect):
    group = connect(fakes(2), 2)
    group.attach()
    config = worker_config(2, max_num_batched_tokens=16)
    limits = scheduler_limits(group.prepare(config), config)
    driver = Driver(group, Scheduler(limits))
    rng = random.Random()
    prompt = [rng.randrange(50) for _ in range(41)]
    plain = request("b", prompt[:9], max_tokens=5, ignore_eos=True, seed=3)
    several = request("a", prompt, max_tokens=9, n=4, temperature=1.0, seed=7, ignore_eos=True)
    driver.add_request(several)
    driver.add_request(plain)
    outputs = {output.req_id: output for output in driver.run()}
    assert sorted(outputs) == ["a#0", "a#1", "a#2", "a#3", "b"]
    assert [outputs[f"a#{i}"].index for i in range(4)] == [0, 1, 2, 3]
    assert outputs["b"].index is None
    assert [outputs[f"a#{i}"].num_cached_tokens for i in range(4)] == [0, 40, 40, 40]
    for sample in forked(several):
        assert outputs[sample.id].token_ids == reference_tokens(
            prompt, 9, frozenset(), sample.sampling.seed
        )


def test_seeds_are_derived_and_prompts_reported_once():
    samples = forked(request(n=3, temperature=1.0, seed=5, prompt_logprobs=1))
    assert [sample.sampling.seed for sample in samples] == [
        5,
        derived_seed(5, 1),
        derived_seed(5, 2),
    ]
    assert [sample.sampling.prompt_logprobs for sample in samples] == [1, None, None]
    alone = request()
    assert forked(alone) == (alone,)


def test_seed_0_is_a_seed():
    samples = forked(request(n=3, temperature=1.0, seed=0))
    assert [sample.sampling.seed for sample in samples] == [
        0,
        derived_seed(0, 1),
        derived_seed(0, 2),
    ]
    assert len({sample.sampling.seed for sample in samples}) == 3


def test_samples_that_cannot_all_be_queued_are_not():
    scheduler = Scheduler(LIMITS)
    driver = Driver(type("Group", (), {"max_in_flight": 1})(), scheduler)
    driver.add_request(request("a#1"))
    with pytest.raises(RequestError, match="in use"):
        driver.add_request(request("a", n=3))
    driver.abort_request("a#1")
    assert not scheduler.has_unfinished_requests()
    driver.add_request(request("a", n=3))
    driver.abort_request("a")
    assert not scheduler.has_unfinished_requests()


@pytest.mark.parametrize("aborted", [0, 1, 2])
def test_others_are_served_when_a_sample_is_aborted(aborted):
    scheduler = Scheduler(LIMITS)
    for sample in forked(request(n=3, max_tokens=2)):
        scheduler.add_request(sample)
    scheduler.abort_request(f"a#{aborted}")
    left = {f"a#{i}" for i in range(3)} - {f"a#{aborted}"}
    assert {output.req_id for output in sampled(scheduler, "xyz")} == left


def test_lines_of_several_samples_become_requests():
    lines = [
        '{"id": "a", "prompt_token_ids": [1], "n": 2}',
        '{"id": "a#1", "prompt_token_ids": [1]}',
        '{"id": "a", "prompt_token_ids": [1]}',
        '{"id": "b", "prompt_token_ids": [1], "n": 65}',
        '{"id": "%s", "prompt_token_ids": [1], "n": 2}' % ("x" * 255),
    ]
    entries = read_inputs(lines, None, None)
    assert [entry.id for entry in entries] == ["a#0", "a#1", "line 2", "line 3", "line 4", "line 5"]
    assert [entry.line for entry in entries[:2]] == [1, 1]
    assert "occurs twice" in entries[2].error and "field n" in entries[4].error


@pytest.mark.parametrize(
    ("stop", "fields", "num_tokens", "text"),
    [
        (("o ",), {}, 6, "hell"),
        (("lo", "el"), {}, 3, "h"),
        (("lo", "ello"), {}, 5, "h"),
        (("o w",), {"include_stop_str_in_output": True}, 7, "hello w"),
        (("o",), {"min_tokens": 5}, 8, "hello w"),
        (("h",), {"min_tokens": 1}, 11, None),
        (("xyz",), {}, 11, None),
    ],
)
def test_stop_strings_end_a_request_and_its_text(stop, fields, num_tokens, text):
    scheduler = Scheduler(LIMITS, Letters())
    # min_tokens without any stop token: the stop strings alone heed it.
    scheduler.add_request(request(max_tokens=11, stop=stop, **fields))
    (output,) = sampled(scheduler, "hello world")
    assert output.token_ids == [ord(c) for c in "hello world"[:num_tokens]]
    assert (output.text, output.finish_reason) == (text, "stop" if text is not None else "length")


def test_an_adopted_request_keeps_its_stop_strings_and_its_index():
    first = Scheduler(LIMITS, Letters())
    (sample, _) = forked(request(n=2, max_tokens=11, stop=("o w",)))
    first.add_request(sample)
    (new,) = first.schedule().scheduled_new_reqs
    known = np.array([1, 2, 3, *map(ord, "hello")], np.int32)
    left = AdoptedRequest(new.req_id, known, 3, 0, (), new.extensions, new.note, 0)
    with pytest.raises(RequestError, match="tokenizer"):
        Scheduler(LIMITS).adopt_requests([left])
    second = Scheduler(LIMITS, Letters())
    assert not second.adopt_requests([left])
    (output,) = sampled(second, "hello world")
    assert (output.text, output.index, len(output.token_ids)) == ("hell", 0, 7)


@pytest.mark.parametrize("stop", [[""], ["\ud800"], ["x"] * 17, ["x" * 513], 3])
def test_stop_strings_are_bounded(stop):
    line = json.dumps({"prompt_token_ids": [1], "stop": stop})
    (entry,) = read_inputs([line], None, None)
    assert entry.request is None and "stop" in entry.error


def test_text_that_comes_token_by_token_is_the_text_of_all(tmp_path):
    make_demo_model(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    token_ids = tokenizer.encode_word("The driver sends the next step before it knows the last.")
    stream = tokenizer.stream()
    assert "".join(map(stream.push, token_ids)) == tokenizer.decode(token_ids)
    text = tokenizer.decode(token_ids)
    stop = text[len(text) // 2 :][:5]
    watch = StopWatch([stop], tokenizer.stream(), min_tokens=0, includes_stop=False)
    assert any(map(watch.take, token_ids))
    assert watch.stopped_text == text[: text.index(stop)]
