"""Prefill apart from decode: requests whose prompts another group has computed get the same tokens
as transformers', whatever becomes of the other group and of the blocks on their way."""

import os
import random
import signal
import time
from dataclasses import replace

import pytest

from tests.support.exhaustive import exhaustively
from tests.support.faulty_daemon import Fault
from tests.support.flipping_daemon import FlippingDaemons
from tests.support.forked_daemons import ForkedDaemons
from tests.support.prefill_pairs import (
    SMALL_CHUNKS,
    Prompts,
    assert_blocks_come,
    no_slots,
    opened,
    prefill_pair,
    replaced,
    run,
    run_until_early,
)
from tests.support.secured import ask
from tests.support.serving import drafts_by, kill_and_wait, scheduler_limits
from tests.support.tiered_waves import assert_right, num_loaded, tiers, tokens_of
from tests.support.waiting import wait_until
from tests.support.window_models import MODELS, WINDOW
from worker_client.driver import Driver
from worker_client.driver_parts.registry import DriverOptions
from worker_client.errors import ClientConfigError
from worker_client.inputs.sampling_params import SamplingParams
from worker_client.replicas import prefill_serving
from worker_client.replicas.prefill_group import PrefillThread
from worker_client.scheduler import Scheduler
from worker_client.wire.keys import NO_KEYS

SHAPES = [((1, 1), (1, 1)), ((1, 2), (1, 1)), ((2, 1), (1, 2)), ((1, 1), (1, 2)), ((1, 2), (2, 1))]


@pytest.mark.parametrize(
    ("source", "destination", "memory"),
    [
        *((*shape, "host") for shape in SHAPES[1:3]),
        (*SHAPES[0], "device"),
        *(exhaustively(*shape, memory) for shape in SHAPES for memory in ("host", "device")),
    ],
)
def test_blocks_of_another_group_give_the_same_tokens(
    daemons, checkpoint, source, destination, memory
):
    sent, model = Prompts(random.randrange(1 << 30)), checkpoint()
    endpoints = daemons.endpoints(sum(pp * tp for pp, tp in (source, destination)))
    both = ({"kv_tier_memory": memory},) * 2
    with prefill_pair(endpoints, model, source, destination, changes=both) as (driver, _):
        outputs = run(driver, sent.requests)
        found, num_exchanged = tiers(driver.group), driver.scheduler.exchange.num_slots
        num_bytes = sum(tier.received.num_bytes for tier in found)
        sources = endpoints[: source[0] * source[1]]
        wait_until(lambda: num_bytes == sum(map(sent_bytes, sources)), f"{sent.seed}: {num_bytes}")
    assert_right(outputs, model, sent)
    assert num_loaded(outputs) > 0, sent.seed
    assert all(tier.num_received > 0 == tier.num_invalid for tier in found), (sent.seed, found)
    assert num_exchanged == 0
    assert all(tier.received.num_us > 0 == tier.num_failed for tier in found), sent.seed
    assert all((tier.memory, tier.num_mapped) == (memory, 0) for tier in found)


LONG = (50, 80)


@pytest.mark.parametrize(
    ("kind", "source", "destination"),
    [
        (None, *SHAPES[0]),
        ("drafted windows", *SHAPES[1]),
        *(exhaustively(kind, *shape) for kind in (None, "drafted", "windows") for shape in SHAPES),
    ],
)
def test_blocks_come_while_their_prompt_is_computed(
    daemons, checkpoint, kind, source, destination, monkeypatch
):
    """However many prompts have slots at once."""
    sent = Prompts(random.randrange(1 << 30), count=60, lengths=LONG)
    monkeypatch.setattr(prefill_serving, "MAX_AHEAD", random.choice([1, 30, 1024]))
    model, changes = (checkpoint(), {}) if kind is None else model_of(checkpoint, kind)
    endpoints = daemons.endpoints(sum(pp * tp for pp, tp in (source, destination)))
    both, drivers = (changes | SMALL_CHUNKS,) * 2, []
    pair = prefill_pair(endpoints, model, source, destination, changes=both, sources=drivers)
    with pair as (driver, prefill):
        outputs, _ = run_until_early(driver, prefill, sent)
        outputs |= {output.req_id: output for output in driver.run()}
        counts, ended = prefill.counts, prefill.counts.prompts
        wait_until(lambda: no_slots([driver, *drivers]), sent.seed)
    assert_right(outputs, model, sent)
    assert ended["moved"] == ended.total() > 0, (sent.seed, ended)
    assert counts.num_early_blocks < counts.num_blocks, sent.seed
    assert num_loaded(outputs) > 0, sent.seed


@pytest.mark.parametrize("event", ["prefill dies", "decode dies", "abort"])
@pytest.mark.parametrize("kind", [None, exhaustively("drafted windows")])
def test_what_happens_between_two_moves_of_a_prompt(pair, checkpoint, event, kind):
    """The others get the same tokens, and nothing is left behind. What has come is used, but by a
    rank that was replaced."""
    sent = Prompts(random.randrange(1 << 30), count=60, lengths=LONG)
    model, changes = (checkpoint(), {}) if kind is None else model_of(checkpoint, kind)
    both, drivers, recover = (changes | SMALL_CHUNKS,) * 2, [], replaced(pair)
    options = {"recover": (recover, recover), "changes": both, "sources": drivers}
    with prefill_pair(pair.endpoints, model, (1, 1), (1, 1), **options) as (driver, prefill):
        assert_blocks_come(driver, sent.seed)
        outputs, waiting = run_until_early(driver, prefill, sent)
        if event == "abort":
            driver.abort_request(waiting[0].id)
            sent.requests.remove(waiting[0])
        else:
            kill_and_wait(pair.pids[event == "decode dies"])
        outputs |= {output.req_id: output for output in driver.run()}
        assert_right(outputs, model, sent)
        if event != "decode dies" and not kind:
            assert num_loaded(outputs) > 0, sent.seed
        assert_blocks_come(driver, sent.seed + 1)
        wait_until(lambda: driver.step() == [] and no_slots([driver, *drivers]), sent.seed)
        for endpoint in pair.endpoints:
            wait_until(lambda endpoint=endpoint: not num_held(endpoint), sent.seed)


def sent_bytes(endpoint):
    return ask(endpoint, NO_KEYS, lambda client: client.get_status().host_tier.sent.num_bytes)


WINDOWED = {**MODELS["mixed"], "sliding_window": WINDOW, "seed": 22}
ROOM = {"num_gpu_blocks": 200, "kv_host_memory_bytes": 4 << 20}
KINDS = {
    "windows": (WINDOWED, False),
    "all slide": ({**MODELS["mistral"], "sliding_window": WINDOW}, False),
    "drafted": ({}, True),
    "drafted windows": (WINDOWED, True),
}
"""Fields of the checkpoint, and whether it drafts for itself. With windows a rank has several KV
groups, into which groups of other shapes divide their layers in another way."""


def model_of(checkpoint, kind):
    """A kind's checkpoint, and changes of a group's CONFIG for it."""
    fields, is_drafted = KINDS[kind]
    model = checkpoint(**fields)
    drafts = {"speculative": drafts_by("draft_model", model.path)} if is_drafted else {}
    return model, {**ROOM, **drafts}


@pytest.mark.parametrize(
    ("kind", "source", "destination"),
    [
        ("windows", *SHAPES[1]),
        ("all slide", *SHAPES[0]),
        ("drafted windows", *SHAPES[2]),
        *(
            exhaustively(kind, *shape)
            for kind in ("windows", "drafted windows")
            for shape in SHAPES
        ),
        *(exhaustively(kind, *shape) for kind in ("all slide", "drafted") for shape in SHAPES[1:3]),
    ],
)
def test_kinds_of_blocks(daemons, checkpoint, kind, source, destination):
    sent, (model, changes) = Prompts(random.randrange(1 << 30)), model_of(checkpoint, kind)
    endpoints = daemons.endpoints(sum(pp * tp for pp, tp in (source, destination)))
    both = (changes, changes)
    with prefill_pair(endpoints, model, source, destination, changes=both) as (driver, prefill):
        outputs = run(driver, sent.requests)
        found, num_exchanged = tiers(driver.group), driver.scheduler.exchange.num_slots
        counts, num_free = prefill.counts.prompts, driver.scheduler.num_free_blocks
    assert_right(outputs, model, sent)
    assert counts["moved"] == counts.total() > 0, (sent.seed, counts)
    assert num_loaded(outputs) > 0, sent.seed
    assert all(tier.num_received > 0 == tier.num_invalid for tier in found), (sent.seed, found)
    assert num_exchanged == 0
    assert num_free == ROOM["num_gpu_blocks"] - 1


@pytest.mark.parametrize("drafts", ["prefill", exhaustively("decode")])
def test_a_draft_model_of_one_group(daemons, checkpoint, drafts):
    """A group with one takes only blocks that have its part."""
    sent, (model, changes) = Prompts(random.randrange(1 << 30)), model_of(checkpoint, "drafted")
    both = (changes, ROOM) if drafts == "prefill" else (ROOM, changes)
    endpoints = daemons.endpoints(2)
    with prefill_pair(endpoints, model, (1, 1), (1, 1), changes=both) as (driver, prefill):
        outputs = run(driver, sent.requests)
        counts = prefill.counts.prompts
    assert_right(outputs, model, sent)
    assert counts["moved" if drafts == "prefill" else "failed"] > 0, (sent.seed, counts)
    assert (num_loaded(outputs) > 0) == (drafts == "prefill"), sent.seed


def test_sampling_goes_on_as_without_another_group(daemons, checkpoint):
    """Seeds, penalties and several samples: the same tokens as by a group that computes all, the
    first of them where the prompt is computed, unless something is reported on it."""
    sent, model = Prompts(random.randrange(1 << 30), 6, lengths=(20, 60)), checkpoint()
    kinds = [
        SamplingParams(temperature=0.9, seed=sent.seed),
        SamplingParams(temperature=0.7, seed=sent.seed, repetition_penalty=1.3, n=2),
        SamplingParams(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.3),
        SamplingParams(temperature=1.0, seed=sent.seed, top_k=5, logprobs=2),
        SamplingParams(temperature=1.1, seed=sent.seed, top_p=0.8, min_tokens=3),
        SamplingParams(temperature=1.0, seed=sent.seed, allowed_token_ids=(5, 6, 7), min_p=0.01),
    ]
    requests = [
        replace(request, sampling=kind) for request, kind in zip(sent.requests, kinds, strict=True)
    ]
    endpoints = daemons.endpoints(2)
    with prefill_pair(endpoints, model, (1, 1), (1, 1)) as (driver, prefill):
        outputs = run(driver, requests)
        num_first = prefill.counts.num_first_tokens
    with opened(endpoints[1:], model, (1, 1)) as driver:
        expected = run(driver, requests)
    assert num_loaded(outputs) > 0, sent.seed
    assert tokens_of(outputs) == tokens_of(expected), sent.seed
    assert num_first == 5, sent.seed
    assert all(
        output.weights_versions == expected[name].weights_versions
        for name, output in outputs.items()
    )


@pytest.fixture
def flipping(model_root, tmp_path):
    """Two daemons that change bits of blocks when told."""
    with FlippingDaemons(2, model_root, tmp_path) as daemons:
        yield daemons


@pytest.mark.parametrize("kind", ["drafted windows", exhaustively("windows"), None])
def test_bits_that_change_on_the_way_cost_their_blocks(flipping, checkpoint, kind):
    sent = Prompts(random.randrange(1 << 30), count=12)
    model, changes = (checkpoint(), None) if kind is None else model_of(checkpoint, kind)
    flips = flipping.flips[0]
    flips.put(one_of=6, seed=sent.seed, where="transit")
    both = (changes, changes)
    with prefill_pair(flipping.endpoints, model, (1, 1), (1, 1), changes=both) as (driver, _):
        outputs = run(driver, sent.requests)
        (found,) = tiers(driver.group)
    assert_right(outputs, model, sent)
    assert 0 < found.num_invalid <= flips.num_done, (sent.seed, found)
    if kind is None:  # otherwise blocks may be evicted that no request has loaded
        assert found.num_invalid == flips.num_done, (sent.seed, found)
    assert found.num_loaded > found.num_invalid, sent.seed


@pytest.fixture
def pair(model_root):
    """Two daemons that a test may kill: the first computes prompts."""
    with ForkedDaemons(["cpu", "cpu"], model_root) as daemons:
        yield daemons


def run_with(driver, requests, at, then):
    """The outputs of requests; calls `then` once so many have ended."""
    for request in requests:
        driver.add_request(request)
    outputs = {}
    while driver.busy:
        outputs |= {output.req_id: output for output in driver.step()}
        if then is not None and len(outputs) >= at:
            then()
            then = None
    return outputs


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize(("at", "kind"), [(0, None), *(exhaustively(2, k) for k in [None, *KINDS])])
def test_the_death_of_either_side(pair, checkpoint, side, at, kind):
    """Requests get the same tokens, and blocks come again once its successor is there."""
    sent = Prompts(random.randrange(1 << 30), count=10)
    model, changes = (checkpoint(), None) if kind is None else model_of(checkpoint, kind)
    killed = 0 if side == "prefill" else 1
    recover = replaced(pair)
    shapes = ((1, 1), (1, 1))
    options = {"recover": (recover, recover), "changes": (changes, changes)}
    with prefill_pair(pair.endpoints, model, *shapes, **options) as (driver, _):
        assert_blocks_come(driver, sent.seed)
        outputs = run_with(driver, sent.requests, at, lambda: kill_and_wait(pair.pids[killed]))
        assert_right(outputs, model, sent)
        assert_blocks_come(driver, sent.seed + 1)
        assert driver.scheduler.exchange.num_slots == 0


@pytest.mark.parametrize("what", ["raise", exhaustively("kill")])
@pytest.mark.parametrize("kind", [None, exhaustively("drafted windows")])
def test_a_step_that_fails_once_its_layers_were_sent(faulty, checkpoint, what, kind):
    """Nothing of it is used, and blocks come again afterwards."""
    sent = Prompts(random.randrange(1 << 30), count=12, lengths=(20, 60))
    model, changes = (checkpoint(), {}) if kind is None else model_of(checkpoint, kind)
    options = {"changes": (changes | SMALL_CHUNKS,) * 2, "recover": (replaced(faulty), None)}
    with prefill_pair(faulty.endpoints, model, (1, 1), (1, 1), **options) as (driver, prefill):
        assert_blocks_come(driver, sent.seed)
        faulty.faults[0].put(Fault("argmax_tokens", what, random.randrange(8)))
        outputs = run(driver, sent.requests)
        assert_right(outputs, model, sent)
        assert not faulty.faults[0].armed, sent.seed
        assert prefill.counts.num_lost_links > 0, sent.seed
        assert_blocks_come(driver, sent.seed + 1)
        wait_until(lambda: driver.step() == [] and no_slots([driver]), sent.seed)


@pytest.mark.parametrize("memory", ["device", exhaustively("host")])
def test_blocks_are_there_before_the_step_that_computes_them_has_ended(faulty, checkpoint, memory):
    sent, model = Prompts(random.randrange(1 << 30), count=1, lengths=(25, 31)), checkpoint()
    changes = ({"kv_tier_memory": memory},) * 2
    with prefill_pair(faulty.endpoints, model, (1, 1), (1, 1), changes=changes) as (driver, _):
        assert_blocks_come(driver, sent.seed)
        (before,) = tiers(driver.group)
        hang = Fault("argmax_tokens", "hang", seconds=0.1, is_ended_by_test=True)
        faulty.faults[0].put(hang)
        (request,) = sent.requests
        driver.add_request(request)

        def have_come():
            assert not driver.step(), sent.seed
            (tier,) = tiers(driver.group)
            return tier.num_received >= before.num_received + len(request.prompt) // 4

        wait_until(have_come, sent.seed)
        faulty.faults[0].end_hang()
        outputs = {output.req_id: output for output in driver.run()}
    assert_right(outputs, model, sent)
    assert num_loaded(outputs) > 0, sent.seed


def test_daemons_keep_no_rows_of_prompts_that_were_given_up(daemons, checkpoint):
    sent, model = Prompts(random.randrange(1 << 30), count=10), checkpoint()
    endpoints = daemons.endpoints(2)
    with prefill_pair(endpoints, model, (1, 1), (1, 1)) as (driver, _):
        assert_blocks_come(driver, sent.seed)
        for number, request in enumerate(sent.requests):
            driver.add_request(request)
            for _ in range(number):
                driver.step()
            driver.abort_request(request.id)
            wait_until(lambda: not num_held(endpoints[0]), f"{sent.seed}: {number} is given up")


def num_held(endpoint):
    return ask(endpoint, NO_KEYS, lambda client: client.get_status().num_kv_blocks_held)


def test_a_prefill_group_that_stays_dead(pair, checkpoint):
    sent, model = Prompts(random.randrange(1 << 30), count=6), checkpoint()
    with prefill_pair(pair.endpoints, model, (1, 1), (1, 1)) as (driver, _):
        kill_and_wait(pair.pids[0])
        outputs = run(driver, sent.requests)
        assert driver.scheduler.exchange.num_slots == 0
    assert_right(outputs, model, sent)


def test_a_prefill_group_is_opened_again_once_its_daemons_are_back(pair, checkpoint):
    """Its driver replaces nobody: the group ends with its daemon, and fails to open meanwhile."""
    sent, model = Prompts(random.randrange(1 << 30), count=4), checkpoint()
    shapes = ((1, 1), (1, 1))
    with prefill_pair(pair.endpoints, model, *shapes, reopen_s=0.1) as (driver, prefill):
        assert_blocks_come(driver, sent.seed)
        kill_and_wait(pair.pids[0])
        outputs = run(driver, sent.requests)
        time.sleep(0.5)  # several attempts
        pair.restart_dead()
        assert_right(outputs, model, sent)
        assert_blocks_come(driver, sent.seed + 1)
        counts = prefill.counts
        assert counts.is_linked and counts.num_lost_links > 0, sent.seed
        assert counts.prompts["moved"] >= 2 and counts.held.total > 0, (sent.seed, counts.prompts)


def test_a_group_that_cannot_be_opened_says_why():
    def open_driver():
        raise ClientConfigError("refused", field="x", value=1, fix="another")

    refused = pytest.raises(ClientConfigError, match="refused")
    with PrefillThread(open_driver, reopen_s=0.1) as prefill, refused:
        prefill.wait_opened()


@pytest.mark.exhaustive
def test_a_prefill_group_that_hangs(pair, checkpoint):
    """Requests wait until their deadline at most."""
    sent, model = Prompts(random.randrange(1 << 30), count=6), checkpoint()
    with prefill_pair(pair.endpoints, model, (1, 1), (1, 1), timeout_s=3.0) as (driver, _):
        assert_blocks_come(driver, sent.seed)
        os.kill(pair.pids[0], signal.SIGSTOP)
        try:
            outputs = run(driver, sent.requests)
        finally:
            os.kill(pair.pids[0], signal.SIGCONT)
        wait_until(lambda: driver.step() == [] and no_slots([driver]), sent.seed)
    assert_right(outputs, model, sent)


def test_groups_of_other_weights_exchange_nothing(daemons, models):
    old, new, _ = models
    sent = Prompts(random.randrange(1 << 30), count=4)
    endpoints = daemons.endpoints(2)
    with prefill_pair(endpoints, old, (1, 1), (1, 1), decode_model=new) as (driver, _):
        outputs = run(driver, sent.requests)
        (found,) = tiers(driver.group)
    assert_right(outputs, new, sent)
    assert found.num_received == found.num_loaded == 0, sent.seed


def test_what_cannot_be_is_refused_by_name(serve, checkpoint):
    with pytest.raises(ClientConfigError, match="timeout_s = 0"):
        PrefillThread(None, timeout_s=0)
    with serve(checkpoint().path) as (group, loaded):
        scheduler = Scheduler(scheduler_limits(group, loaded))
        options = DriverOptions(prefill=PrefillThread(None))
        with pytest.raises(ClientConfigError, match=r"set cache\.kv_host_memory_bytes"):
            Driver(group, scheduler, options=options)
