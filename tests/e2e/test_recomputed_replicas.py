"""Weight updates that recompute the running requests of replicas in lockstep: the same tokens, and
log probabilities, as requests that begin with the weights of each token, whoever is idle."""

import random
from functools import partial

import numpy as np
import pytest
from msgspec.structs import replace

from rpc_schema.errors import InvalidStepError
from rpc_schema.weight_transfer import RecomputeRequests
from tests.e2e.test_recompute_budget import Stepped, recompute
from tests.support.exhaustive import exhaustively
from tests.support.faulty_daemon import Fault
from tests.support.fresh_reference import assert_all_fresh, assert_as_fresh, texts_of
from tests.support.serving import connect, drafts_by
from tests.support.serving import worker_config as config_of
from tests.support.watched import Watched, successor
from worker_client.errors import WorkerDied
from worker_client.replicas import placement

MOST = 32
"""Tokens of a pass."""
SHAPES = [(1, 1), exhaustively(2, 1), exhaustively(1, 2)]
FAMILY = {"num_experts": 7, "num_experts_per_tok": 7, "num_hidden_layers": 2}
"""Tokens have all experts: no rounding changes the choice."""


@pytest.fixture(scope="module")
def moe(checkpoint):
    """Three checkpoints of one shape."""
    return [checkpoint("Qwen3MoeForCausalLM", seed=seed, **FAMILY) for seed in (61, 62, 63)]


def worker_config(path, pp=1, tp=1, *, dp=2, balanced=False, **options):
    options = {"enable_expert_parallel": True, "max_num_batched_tokens": MOST, **options}
    config = config_of(path, pp, tp, **options)
    parallel = replace(config.parallel, data_parallel_size=dp, data_parallel_lockstep=True)
    copies = -FAMILY["num_experts"] % (dp * tp) if balanced else 0
    model = replace(config.model, enable_eplb=balanced, num_redundant_experts=copies)
    return replace(config, parallel=parallel, model=model)


@pytest.fixture
def opened(daemons):
    """opened(config) -> context manager of (group, loaded) on the pool's daemons."""
    return lambda config: connect(daemons.endpoints(config.parallel.group_size), config)


def computed_tokens(group, tables=None):
    """The computed tokens of each replica's requests."""
    counts = []
    for table in tables or group.slots.tables:
        slots = [table.slot_of(name) for name in table.req_ids]
        counts.append(int(table._rows.num_computed[slots].sum()))
    return counts


@pytest.mark.parametrize(("pp", "tp"), SHAPES)
@pytest.mark.parametrize("shares", [True, exhaustively(False)])
def test_replicas_with_uneven_loads(opened, moe, pp, tp, shares, seed, monkeypatch):
    """In several passes, of which one replica has more, in the middle of a prompt, with shared
    blocks; by each engine."""
    monkeypatch.setattr(placement, "PREFIX_TOKENS", 4)
    rng = random.Random(seed)
    texts = texts_of(seed, [40, 5, 33, 9, 90])
    texts.insert(2, texts[0])  # on the first replica too, with nine blocks of the other
    config = worker_config(moe[0].path, pp, tp, enable_expert_parallel=shares)
    with opened(config) as (group, loaded):
        watched = Watched(group, loaded)
        model_of = {group.weights.version.number: moe[0]}
        watched.add(texts[:2], 40)
        watched.step(4)
        watched.add(texts[2:], 40, first=2)
        watched.step(2)
        for number, engine in enumerate(["reload", "gloo"]):
            watched.step(rng.randrange(1, 4))
            model = moe[number + 1]
            recompute(group, model, None, engine)
            model_of[group.weights.version.number] = model
            first, second = computed_tokens(group)
            assert first != second
            assert group.weights.recomputed.num_tokens == first + second - 36
            assert group.weights.recomputed.num_passes == -(-max(first - 36, second) // MOST)
        texts.append(texts[0])
        watched.add(texts[-1:], 5, first=6)
        watched.finish()
    assert watched.driver.num_failures == 0
    assert dict.fromkeys(watched.outputs, 1) == watched.admitted
    assert_all_fresh(watched, model_of, texts)


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("dp", [2, exhaustively(3)])
def test_idle_replicas_take_part_without_tokens(opened, moe, dp, balanced, seed):
    """One replica has the only request; then all have some, and the first ones end. With experts
    that have moved too."""
    texts = texts_of(seed, [70, *[6] * dp])
    with opened(worker_config(moe[0].path, dp=dp, balanced=balanced)) as (group, loaded):
        watched = Watched(group, loaded)
        first = group.weights.version.number
        watched.add(texts[:1], 30)
        watched.step(6)
        if balanced:
            group.experts.rebalance({0: np.array([9, 8, 7, 1, 1, 1, 1])})
        for model in moe[1:]:
            recompute(group, model, None)
            counts = computed_tokens(group)
            assert counts[0] > 2 * MOST and not any(counts[1:])
            assert group.weights.recomputed.num_passes == -(-counts[0] // MOST)
            watched.step(3)
        watched.add(texts[1:], 12, first=1)
        watched.step(4)
        recompute(group, moe[0], None, "gloo")
        watched.finish()
        recompute(group, moe[1], None)  # nothing runs
        assert group.weights.recomputed[:2] == (0, 0)
    assert watched.driver.num_failures == 0
    models = [moe[0], moe[1], moe[2], moe[0], moe[1]]
    assert_all_fresh(watched, dict(enumerate(models, first)), texts)


@pytest.mark.parametrize(("pp", "tp"), SHAPES)
@pytest.mark.parametrize("budget", [13, exhaustively(1)])
def test_steps_go_on_between_recomputed_parts(opened, moe, pp, tp, budget, seed):
    """So many tokens of each replica before each step. A request ends while it waits, and one
    begins."""
    texts = texts_of(seed, [45, 9, 30, 14, 22, 6])
    with opened(worker_config(moe[0].path, pp, tp)) as (group, loaded):
        watched = Stepped(group, loaded)
        first = group.weights.version.number
        watched.add(texts[:5], 40)
        watched.step(6)
        recompute(group, moe[1], budget)
        watched.settle()
        assert len(group.slots.stale) == 5
        expected, done = sum(computed_tokens(group)), 0
        watched.add(texts[5:], 40, first=5)
        while group.weights.recomputation.is_pending:
            watched.step()
            assert group.weights.recomputed.num_tokens <= done + 2 * budget
            done = group.weights.recomputed.num_tokens
        assert done == expected
        watched.finish()
    assert watched.driver.num_failures == 0
    assert watched.sampled_beside
    assert dict.fromkeys(watched.outputs, 1) == watched.admitted
    assert_all_fresh(watched, {first: moe[0], first + 1: moe[1]}, texts)


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_requests_with_drafts(opened, moe, method, seed):
    rng = random.Random(seed)
    texts = texts_of(seed, [30, 12, 25, 7])
    config = worker_config(moe[0].path, speculative=drafts_by(method, moe[1].path))
    with opened(config) as (group, loaded):
        watched = Stepped(group, loaded)
        first = group.weights.version.number
        watched.add(texts, 40)
        watched.step(rng.randrange(3, 12))
        recompute(group, moe[1], rng.choice([None, 11]))
        watched.finish()
    assert watched.driver.num_failures == 0
    assert_all_fresh(watched, {first: moe[0], first + 1: moe[1]}, texts)


def test_next_driver_recomputes_what_its_predecessor_has_not(daemons, moe, seed):
    """One is lost in the middle: what it has not computed again begins without KV."""
    texts = texts_of(seed, [26, 11, 17, 30])
    old, new, _ = moe
    config, endpoints = worker_config(old.path), daemons.endpoints(2)
    with connect(endpoints, config) as (group, loaded):
        watched = Watched(group, loaded)
        first = group.weights.version.number
        watched.add(texts, 30, logprobs=None)
        watched.step(5)
        recompute(group, new, 30)
        watched.step(1)
        waiting = {*group.slots.stale}
        assert waiting and len(waiting) < len(texts)
        watched.settle()
        own = replace(config, model=replace(config.model, model=str(new.path)))
        with successor(endpoints, own, loaded) as (next_one, adopted):
            without = {each.req_id for each in adopted if not each.num_computed_tokens}
            assert without == waiting
            assert {each.dp_rank for each in adopted} == {0, 1}
            next_one.finish()
    assert not watched.outputs
    for number, text in enumerate(texts):
        assert_as_fresh({first: old, first + 1: new}, text, next_one.outputs[f"r{number}"])


@pytest.mark.parametrize("what", ["raise", exhaustively("kill")])
@pytest.mark.parametrize("rank", [0, exhaustively(1)])
def test_rank_that_fails_meanwhile_loses_no_request(faulty, moe, what, rank, seed):
    """In a pass of several, in which the other replica has tokens or none. All requests are
    computed again from their tokens, by the new weights."""
    texts = texts_of(seed, [60, 8, 41, 7])
    old, new, _ = moe
    config = worker_config(old.path, step_deadline_ms=5000)
    with connect(faulty.endpoints, config) as (group, loaded):
        watched = Watched(group, loaded)
        watched.replace_dead(faulty)
        first = group.weights.version.number
        watched.add(texts, 20)
        watched.step(6)
        watched.settle()
        faulty.faults[rank].put(Fault("forward", what))
        if what == "kill":
            with pytest.raises(WorkerDied):
                recompute(group, new, None)
        else:
            recompute(group, new, None)
            assert group.weights.recomputed is None
        watched.finish()
        last = group.weights.version.number
    assert set(watched.admitted.values()) == {2}
    assert_all_fresh(watched, {first: old, last: new}, texts)


def int32s(*values):
    return np.array(values, "<i4").tobytes()


def test_replica_that_refuses_keeps_its_place_in_the_others_passes(opened, moe, seed):
    """A message that does not fit one replica's rows, or says other counts of them: the other one
    computes, over the same link. What no rank can read is refused by all."""
    texts = texts_of(seed, [50, 12])
    with opened(worker_config(moe[0].path)) as (group, loaded):
        watched = Watched(group, loaded)
        first = group.weights.version.number
        watched.add(texts, 20)
        watched.step(4)
        watched.settle()
        links = {status.link for status in group.get_status()}

        def send(rows, counts):
            build = partial(RecomputeRequests, max_num_tokens=16, tokens_by_replica=counts)
            group._channel.ask_each(lambda rank: partial(build, rows=rows[rank]))

        good, both = [int32s(0, 0, 50, 0), int32s(0, 0, 12, 0)], (int32s(50), int32s(12))
        for rows, counts, field in (
            ([good[0], int32s(7, 0, 12, 0)], both, "rows"),
            ([int32s(0, 0, 900, 0), good[1]], both, "rows"),
            (good, (int32s(50), int32s(11)), "tokens_by_replica"),
            (good, (int32s(50, 3), int32s(12)), "tokens_by_replica"),
            (good, (), "tokens_by_replica"),
            (good, both[:1], "tokens_by_replica"),
            (good, (int32s(50), b"abc"), "tokens_by_replica"),
            (good, (int32s(50), int32s(0)), "tokens_by_replica"),
            (good, (int32s(50), int32s(1 << 30)), "tokens_by_replica"),
        ):
            with pytest.raises(InvalidStepError, match=f"field {field}"):
                send(rows, counts)
        send(good, both)
        assert {status.link for status in group.get_status()} == links
        watched.finish()
    assert watched.driver.num_failures == 0
    assert_all_fresh(watched, {first: moe[0]}, texts)
