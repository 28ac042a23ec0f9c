"""Weight updates that recompute running requests between steps: the same tokens, and log
probabilities, as requests that begin with the weights of each token, whatever ends meanwhile."""

import random

import pytest

from tests.support.faulty_daemon import Fault
from tests.support.fresh_reference import assert_all_fresh, assert_as_fresh, texts_of
from tests.support.serving import connect, drafts_by, worker_config
from tests.support.watched import TIMEOUT_S, Watched, successor
from tests.support.window_models import MAX_MODEL_LEN, STEP_TOKENS, WINDOW, make_model
from worker_client.errors import ClientConfigError, WeightsNotWhole
from worker_client.trainer.sender import WeightSender


class Stepped(Watched):
    """Notes which requests have sampled while others waited."""

    def __init__(self, group, loaded, **limits):
        super().__init__(group, loaded, **limits)
        self.sampled_beside = set()

    def _note(self, output):
        future = super()._note(output)
        waiting = {*self.group.slots.stale}
        scheduled = {*output.decode_req_ids, *output.num_scheduled_tokens}
        assert waiting.isdisjoint(scheduled)
        if waiting:
            self.sampled_beside |= scheduled
        return future


def recompute(group, model, budget, engine="reload"):
    if engine == "reload":
        group.weights.reload(str(model.path), running="recompute", recompute_budget=budget)
        return
    with WeightSender(group, "gloo", timeout_s=TIMEOUT_S) as sender:
        tensors = dict(model.model.state_dict())
        sender.send(tensors, running="recompute", recompute_budget=budget)


@pytest.mark.parametrize(("pp", "tp", "budget"), [(1, 1, 1), (1, 1, 13), (2, 1, 37), (1, 2, 9)])
def test_steps_go_on_between_recomputed_parts(serve, models, pp, tp, budget, seed):
    """In the middle of a prompt, with shared blocks, by an update of which steps hear in between.
    New requests begin meanwhile, and share blocks at the end."""
    old, new, _ = models
    texts = texts_of(seed, [40, 33, 9, 120, 14])
    texts.insert(1, texts[0])
    with serve(old.path, pp, tp, max_num_batched_tokens=32) as (group, loaded):
        watched = Stepped(group, loaded)
        first = group.weights.version.number
        watched.add(texts[:1], 40)
        watched.step(4)
        watched.add(texts[1:5], 40, first=1)
        watched.step(2)
        group.weights.start_update(running="recompute", recompute_budget=budget)
        watched.settle()
        with pytest.raises(WeightsNotWhole):
            watched.step()
        recompute(group, new, budget, "gloo")
        assert group.weights.recomputed.num_tokens == 0 and len(group.slots.stale) == 5
        computed = [group.slots.slot_of(name) for name in group.slots.req_ids]
        expected = group.slots._rows.num_computed[computed].sum() - 36  # nine blocks are shared
        watched.add(texts[5:], 40, first=5)
        num_steps, done = 0, 0
        while group.weights.recomputation.is_pending:
            watched.step()
            num_steps += 1
            assert group.weights.recomputed.num_tokens <= done + budget
            done = group.weights.recomputed.num_tokens
        assert done == expected
        assert num_steps >= -(-expected // budget)
        assert "r5" in watched.sampled_beside and {"r0", "r1"} & watched.sampled_beside
        texts.append(texts[0])
        watched.add(texts[-1:], 5, first=6)
        watched.finish()
    assert watched.driver.num_failures == 0
    assert dict.fromkeys(watched.outputs, 1) == watched.admitted
    if budget > 1:  # otherwise the first request has ended by then
        assert watched.outputs["r6"].num_cached_tokens == 36
    assert_all_fresh(watched, {first: old, first + 1: new}, texts)


def test_requests_that_wait_end_and_begin_again(serve, models, seed):
    """One is aborted, whose blocks another one shares; one is preempted; and one is of a scheduler
    that does not know that it waits."""
    rng = random.Random(seed)
    old, new, last = models
    texts = texts_of(seed, [41, 30, 22, 35])
    texts.insert(1, texts[0])
    with serve(old.path, 2, max_num_batched_tokens=64) as (group, loaded):
        watched = Stepped(group, loaded)
        first = group.weights.version.number
        watched.add(texts[:1], 60)
        watched.step(4)
        watched.add(texts[1:], 60, first=1)
        watched.step(rng.randrange(4, 9))
        recompute(group, new, 12)  # there is more than eight times as much
        watched.step(rng.randrange(1, 4))
        watched.driver.abort_request("r0")
        watched.scheduler.pause_request("r3")
        watched.step(rng.randrange(1, 4))
        watched.scheduler.release_request("r3")
        watched.step(rng.randrange(1, 3))
        assert group.weights.recomputation.is_pending
        group.weights.reload(str(last.path), running="keep")  # and so again, with the budget
        assert {"r1", "r2", "r4"} <= {*group.slots.stale}
        watched.scheduler.await_recompute(())
        group.weights.recomputation.on_waiting = None
        watched.finish()
    assert watched.driver.num_failures == 0
    assert watched.admitted == {"r0": 1, "r1": 1, "r2": 1, "r3": 2, "r4": 1}
    for number, text in enumerate(texts[1:], 1):
        model_of = {first: old, first + 1: new, first + 2: last}
        assert_as_fresh(model_of, text, watched.outputs[f"r{number}"])
    assert watched.outputs.keys() == {"r1", "r2", "r3", "r4"}


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_requests_with_drafts(serve, models, method, seed):
    rng = random.Random(seed)
    texts = texts_of(seed, [30, 12, 25, 7])
    old, new, _ = models
    with serve(old.path, 2, speculative=drafts_by(method, new.path)) as (group, loaded):
        watched = Stepped(group, loaded)
        watched.add(texts, 40)
        watched.step(rng.randrange(3, 12))
        first = group.weights.version.number
        recompute(group, new, rng.randrange(8, 20))
        watched.finish()
    assert watched.driver.num_failures == 0
    assert watched.sampled_beside
    assert_all_fresh(watched, {first: old, first + 1: new}, texts)


def test_requests_that_windows_have_passed_are_lost_alone(serve, model_root, seed):
    old, new = (make_model(model_root, "mixed", each) for each in (95, 96))
    texts = texts_of(seed, [5, 4, 7])
    sizes = {"max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": STEP_TOKENS}
    with serve(old.path, **sizes) as (group, loaded):
        watched = Stepped(group, loaded)
        watched.add(texts[:1], 30)
        watched.step(2 * WINDOW)
        watched.add(texts[1:], 30, first=1)
        watched.step(3)
        watched.settle()
        first = group.weights.version.number
        recompute(group, new, 3)
        assert group.weights.recomputed.lost_req_ids == {"r0"}
        watched.finish()
    assert watched.admitted == {"r0": 2, "r1": 1, "r2": 1}
    assert watched.driver.num_failures == 1
    assert_all_fresh(watched, {first: old, first + 1: new}, texts)


@pytest.mark.parametrize("is_cut_off", [False, True])
def test_next_driver_goes_on_with_what_was_recomputed(serve, models, is_cut_off, seed):
    """Its predecessor dies between two parts, one of which ends within a request, or once it has
    sent the next one to the first rank alone."""
    rng = random.Random(seed)
    old, new, _ = models
    texts = texts_of(seed, [26, 31, 40])
    with serve(old.path, 2) as (group, loaded):
        endpoints = [status.endpoint for status in group.get_status()]
        watched = Stepped(group, loaded)
        watched.add(texts, 40, logprobs=None)
        watched.step(rng.randrange(3, 7))
        first = group.weights.version.number
        recompute(group, new, 45)
        watched.step()
        assert group.weights.recomputed.num_tokens == 45
        assert {*group.slots.stale} == {"r1", "r2"}
        watched.step(rng.randrange(2))
        waiting = {*group.slots.stale}
        if is_cut_off:
            watched.settle()

            def die(frames):
                raise KeyboardInterrupt

            group.clients[1].send = die
            with pytest.raises(KeyboardInterrupt):
                group.weights.recomputation.advance()
        config = worker_config(new.path, 2)
        with successor(endpoints, config, loaded) as (next_one, adopted):
            assert {each.req_id for each in adopted if not each.num_computed_tokens} == waiting
            assert len(adopted) == 3
            next_one.finish()
    for number, text in enumerate(texts):
        assert_as_fresh({first: old, first + 1: new}, text, next_one.outputs[f"r{number}"])


@pytest.mark.parametrize("what", ["raise", "kill"])
@pytest.mark.parametrize("in_step", [False, True])
def test_rank_that_fails_between_loses_no_request(faulty, models, what, in_step, seed):
    """In a part, all requests are computed again; in a step between, those that wait too."""
    texts = texts_of(seed, [26, 41, 33])
    old, new, _ = models
    config = worker_config(old.path, 2, max_num_batched_tokens=32, step_deadline_ms=3000)
    with connect(faulty.endpoints, config) as (group, loaded):
        watched = Stepped(group, loaded)
        watched.replace_dead(faulty)
        watched.add(texts, 30)
        watched.step(8)
        first = group.weights.version.number
        recompute(group, new, 16)
        while len(group.slots.stale) == 3:
            watched.step()
        watched.settle()
        before = dict(watched.admitted)
        faulty.faults[1].put(Fault("forward", what, 1 + in_step))
        watched.finish()
        last = group.weights.version.number
    assert before == {"r0": 1, "r1": 1, "r2": 1}
    assert set(watched.admitted.values()) == {2}
    model_of = dict.fromkeys(range(first + 1, last + 1), new) | {first: old}
    assert_all_fresh(watched, model_of, texts)


def test_budgets_that_mean_nothing_are_refused(serve, models):
    with serve(models[0].path, 1) as (group, loaded):
        watched = Watched(group, loaded)
        watched.add([[1, 2, 3]], 8)
        watched.step(2)
        for refused in (group.weights.reload, group.weights.start_update):
            for running, budget in (("keep", 8), ("drop", 8), ("abort", 8), ("recompute", 0)):
                with pytest.raises(ClientConfigError) as error:
                    refused(running=running, recompute_budget=budget)
                assert error.value.field == "recompute_budget"
        watched.finish()
    assert watched.admitted == {"r0": 1} and watched.driver.num_failures == 0
