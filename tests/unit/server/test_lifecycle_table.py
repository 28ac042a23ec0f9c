"""Every operation in every state: the rules of the table are what is enforced, and those of the
operations below are as a hand-written table has them."""

from dataclasses import replace
from itertools import product
from typing import get_args

import pytest

from rpc_schema import lifecycle as lc
from rpc_schema import lora, step
from rpc_schema import weight_transfer as wt
from rpc_schema.adoption import AdoptRequests
from rpc_schema.drafts import TakeDraftTokenIds
from rpc_schema.errors import ShuttingDownError, StateError
from rpc_schema.operations import LINK_STATES, LOAD_CHAIN, STEP_OPERATIONS, StepMessage
from tests.unit.server.driver import rendezvous
from worker_daemon.server.lifecycle import (
    HISTORY,
    SERVING_STATES,
    DaemonState,
    Lifecycle,
    after,
    legal,
    reset_targets,
)
from worker_daemon.worker.memory_tags import MemoryTags

CREATED, DEVICE, MODEL, KV, READY = LOAD_CHAIN
ANY_LINK = {"none", "up", "broken"}
EXPECTED = {
    lc.InitDevice: ({CREATED}, {"none", "broken"}),
    lc.Relink: ({DEVICE, MODEL, KV, READY}, {"up", "broken"}),
    lc.Reset: ({CREATED, DEVICE, MODEL, KV, READY}, ANY_LINK),
    lc.LoadModel: ({DEVICE}, ANY_LINK),
    lc.GetKVCacheSpec: ({MODEL, KV, READY}, ANY_LINK),
    lc.DetermineAvailableMemory: ({MODEL}, {"up"}),
    lc.UpdateMaxModelLen: ({MODEL, KV}, ANY_LINK),
    lc.InitializeFromConfig: ({MODEL}, ANY_LINK),
    lc.InitializeCache: ({KV}, ANY_LINK),
    lc.CompileOrWarmUpModel: ({KV, READY}, {"up"}),
    lc.GetSupportedTasks: ({MODEL, KV, READY}, ANY_LINK),
    lc.GetModelMetadata: ({MODEL, KV, READY}, ANY_LINK),
    lc.SaveShardedState: ({MODEL, KV, READY}, ANY_LINK),
    lc.FinishShardedState: ({MODEL, KV, READY}, ANY_LINK),
    lc.SaveTensorizedModel: ({MODEL, KV, READY}, ANY_LINK),
    lc.ComputeWeightChecksums: ({MODEL, KV, READY}, ANY_LINK),
    lc.Profile: ({DEVICE, MODEL, KV, READY}, ANY_LINK),
    lc.Sleep: ({MODEL, KV, READY}, ANY_LINK),
    lc.WakeUp: ({MODEL, KV, READY}, ANY_LINK),
    lc.Discard: ({MODEL, KV, READY}, ANY_LINK),
    wt.InitWeightTransferEngine: ({DEVICE, MODEL, KV, READY}, ANY_LINK),
    wt.StartWeightUpdate: ({MODEL, KV, READY}, ANY_LINK),
    wt.UpdateWeights: ({MODEL, KV, READY}, ANY_LINK),
    wt.FinishWeightUpdate: ({MODEL, KV, READY}, ANY_LINK),
    wt.ReloadWeights: ({MODEL, KV, READY}, ANY_LINK),
    wt.RecomputeRequests: ({READY}, {"up"}),
    wt.UpdateConfig: ({MODEL, KV, READY}, ANY_LINK),
    lora.PrepareLora: ({MODEL, KV, READY}, ANY_LINK),
    lora.AddLora: ({MODEL, KV, READY}, ANY_LINK),
    lora.RemoveLora: ({MODEL, KV, READY}, ANY_LINK),
    lora.ListLoras: ({MODEL, KV, READY}, ANY_LINK),
    lora.PinLora: ({MODEL, KV, READY}, ANY_LINK),
    AdoptRequests: ({READY}, ANY_LINK),
    TakeDraftTokenIds: ({READY}, {"up"}),
    step.ExecuteModel: ({READY}, {"up"}),
    step.SampleTokens: ({READY}, {"up"}),
    step.ExecuteDummyBatch: ({READY}, {"up"}),
}
IDS = {"epoch": 1, "link": 0, "seq": 1}
STATES = [DaemonState(*axes) for axes in product(LOAD_CHAIN, LINK_STATES, SERVING_STATES)]


def reset(to: str) -> lc.Reset:
    return lc.Reset(**IDS, to=to)


def in_state(state: DaemonState) -> Lifecycle:
    """A cursor brought to `state` by legal moves only."""
    lifecycle = Lifecycle()
    chain = [
        lc.GetModelMetadata(**IDS),
        *(build_move(name) for name in ("InitDevice", "LoadModel", "KV", "READY")),
    ]
    for move in chain[1 : LOAD_CHAIN.index(state.load) + 1]:
        lifecycle.check(move)
        lifecycle.succeeded(move)
    if state.link == "broken":
        lifecycle.link_broke("test")
    if state.serving != "SERVING":
        lifecycle.serve(state.serving, "test")
    return lifecycle


def build_move(name: str) -> StepMessage:
    if name == "InitDevice":
        return lc.InitDevice(
            **IDS,
            parallel=lc.ParallelConfig(),
            rendezvous=rendezvous(1),
            cache=lc.CacheConfig(),
            scheduler=lc.SchedulerConfig(),
        )
    if name == "LoadModel":
        return lc.LoadModel(
            **IDS,
            model=lc.ModelConfig(model="/m"),
            scheduler=lc.SchedulerConfig(),
            cache=lc.CacheConfig(),
            graph=lc.GraphConfig(),
        )
    if name == "KV":
        return lc.InitializeFromConfig(**IDS, kv_cache_configs=())
    return lc.CompileOrWarmUpModel(**IDS)


@pytest.mark.parametrize("state", STATES, ids=str)
def test_legal_operations_of_every_state(state: DaemonState) -> None:
    expected = {
        kind
        for kind, (loads, links) in EXPECTED.items()
        if state.serving == "SERVING" and state.load in loads and state.link in links
    }
    assert legal(state) & EXPECTED.keys() == expected


@pytest.mark.parametrize("state", STATES, ids=str)
def test_an_operation_is_legal_where_its_row_says_so(state: DaemonState) -> None:
    for memory in TAG_STATES if state.load in (MODEL, KV, READY) else [state.memory]:
        expected = {
            kind
            for kind, row in STEP_OPERATIONS.items()
            if state.serving == "SERVING"
            and state.load in row.rule.load
            and state.link in row.rule.link
            and memory.weights in row.rule.weights
            and memory.kv_cache in row.rule.kv_cache
        }
        assert legal(replace(state, memory=memory)) == expected


NEEDS_WEIGHTS = {
    lc.DetermineAvailableMemory,
    lc.SaveShardedState,
    lc.SaveTensorizedModel,
    lc.ComputeWeightChecksums,
}
NEEDS_THEIR_MEMORY = {
    lc.CompileOrWarmUpModel,
    lc.Relink,
    wt.StartWeightUpdate,
    wt.UpdateWeights,
    wt.FinishWeightUpdate,
    wt.ReloadWeights,
}
NEEDS_KV_CACHE = {lc.CompileOrWarmUpModel, lc.Relink, lc.InitializeFromConfig}
NEEDS_BOTH = {
    step.ExecuteModel,
    step.SampleTokens,
    step.ExecuteDummyBatch,
    wt.RecomputeRequests,
}
TAG_STATES = [MemoryTags(*states) for states in product(get_args(lc.TagState), repeat=2)]


@pytest.mark.parametrize("memory", TAG_STATES, ids=repr)
@pytest.mark.parametrize("load", [MODEL, KV, READY])
def test_sleep_forbids_what_reads_the_memory_that_is_away(load, memory) -> None:
    forbidden = set()
    if memory.weights != "awake":
        forbidden |= NEEDS_WEIGHTS | NEEDS_BOTH
    if memory.kv_cache != "awake":
        forbidden |= NEEDS_KV_CACHE | NEEDS_BOTH
    if memory.weights in ("asleep", "discarded"):
        forbidden |= NEEDS_THEIR_MEMORY
    awake = DaemonState(load, "up")
    of_table = legal(replace(awake, memory=memory)) & EXPECTED.keys()
    assert of_table == (legal(awake) & EXPECTED.keys()) - forbidden


@pytest.mark.parametrize(
    ("moves", "weights", "kv_cache"),
    [
        ([lc.Sleep(**IDS, level=1)], "asleep", "asleep"),
        ([lc.Sleep(**IDS, level=2)], "discarded", "asleep"),
        ([lc.Sleep(**IDS, level=1), lc.Sleep(**IDS, level=2)], "discarded", "asleep"),
        ([lc.Sleep(**IDS, level=2), lc.Sleep(**IDS, level=1)], "discarded", "asleep"),
        ([lc.Sleep(**IDS, level=1), lc.WakeUp(**IDS)], "awake", "awake"),
        ([lc.Sleep(**IDS, level=2), lc.WakeUp(**IDS)], "lost", "awake"),
        ([lc.Sleep(**IDS), lc.WakeUp(**IDS, tags=("kv_cache",))], "asleep", "awake"),
        ([lc.Sleep(**IDS), lc.WakeUp(**IDS, tags=("weights",))], "awake", "asleep"),
        ([lc.Sleep(**IDS), lc.WakeUp(**IDS, tags=())], "asleep", "asleep"),
        ([lc.Discard(**IDS, tags=("kv_cache",))], "awake", "discarded"),
        ([lc.Discard(**IDS, tags=("kv_cache",)), lc.WakeUp(**IDS)], "awake", "awake"),
        ([lc.Discard(**IDS, tags=("weights",)), lc.WakeUp(**IDS)], "lost", "awake"),
        ([lc.Sleep(**IDS, level=2), lc.WakeUp(**IDS), lc.Sleep(**IDS)], "discarded", "asleep"),
        ([lc.Sleep(**IDS, level=2), reset(MODEL)], "discarded", "awake"),
        ([lc.Sleep(**IDS, level=2), reset(DEVICE)], "awake", "awake"),
    ],
)
def test_what_sleep_makes_of_each_tag(moves, weights, kv_cache) -> None:
    lifecycle = in_state(DaemonState(READY, "up"))
    for move in moves:
        lifecycle.check(move)
        lifecycle.succeeded(move)
    assert lifecycle.state.memory == MemoryTags(weights, kv_cache)
    assert lifecycle.state.memory.states == {"weights": weights, "kv_cache": kv_cache}


@pytest.mark.parametrize(
    ("moves", "memory", "fix"),
    [
        (
            [lc.Sleep(**IDS)],
            "weights asleep/kv_cache asleep",
            "fix: wake_up(['weights', 'kv_cache'])",
        ),
        (
            [lc.Discard(**IDS, tags=("kv_cache",))],
            "kv_cache discarded",
            "fix: wake_up(['kv_cache'])",
        ),
        (
            [lc.Discard(**IDS, tags=("weights",))],
            "weights discarded",
            "fix: wake_up(['weights']), then load the weights again",
        ),
        (
            [lc.Sleep(**IDS, level=2), lc.WakeUp(**IDS)],
            "weights lost",
            "fix: load the weights again",
        ),
    ],
)
def test_refusal_names_the_way_to_wake(moves, memory, fix) -> None:
    lifecycle = in_state(DaemonState(READY, "up"))
    for move in moves:
        lifecycle.succeeded(move)
    with pytest.raises(StateError) as caught:
        lifecycle.check(step.ExecuteModel(**IDS, total_num_scheduled_tokens=0))
    assert fix in str(caught.value)
    assert f"READY/link up/SERVING/{memory}" in str(caught.value)


@pytest.mark.parametrize("load", LOAD_CHAIN)
def test_reset_never_goes_up(load: str) -> None:
    lifecycle = in_state(DaemonState(load, "up" if load != CREATED else "none"))
    for target in (CREATED, DEVICE, MODEL):
        if LOAD_CHAIN.index(target) <= LOAD_CHAIN.index(load):
            lifecycle.check(reset(target))
            assert target in reset_targets(lifecycle.state)
        else:
            with pytest.raises(StateError, match="Reset to"):
                lifecycle.check(reset(target))


def test_load_chain_goes_up_and_reset_down() -> None:
    lifecycle = in_state(DaemonState(READY, "up"))
    assert lifecycle.state == DaemonState(READY, "up")
    lifecycle.succeeded(reset(MODEL))
    assert lifecycle.state == DaemonState(MODEL, "up")
    lifecycle.succeeded(reset(CREATED))
    assert lifecycle.state == DaemonState(CREATED, "none")


def test_broken_link_refuses_steps_until_relink() -> None:
    lifecycle = in_state(DaemonState(READY, "broken"))
    with pytest.raises(StateError, match="ExecuteModel is not legal in READY/link broken"):
        lifecycle.check(step.ExecuteModel(**IDS, total_num_scheduled_tokens=0))
    relink = lc.Relink(**IDS, rendezvous=rendezvous(2))
    lifecycle.check(relink)
    assert lifecycle.succeeded(relink)
    lifecycle.check(step.ExecuteModel(**IDS, total_num_scheduled_tokens=0))


@pytest.mark.parametrize("serving", ["DRAINING", "FAILED", "CLOSED"])
@pytest.mark.parametrize(
    "message", [step.ExecuteModel(**IDS, total_num_scheduled_tokens=0), reset(MODEL)]
)
def test_daemon_that_ends_refuses_everything_for_that_reason(serving, message) -> None:
    """Whatever else the state lacks: its driver has to find another daemon."""
    lifecycle = in_state(DaemonState(READY, "broken"))
    assert lifecycle.serve(serving, "why it ends")
    with pytest.raises(ShuttingDownError, match=r"why it ends\); fix: use its successor"):
        lifecycle.check(message)


@pytest.mark.parametrize("state", STATES, ids=str)
def test_success_changes_only_what_the_operation_is_about(state: DaemonState) -> None:
    for name in ("KV", "READY"):
        assert after(state, build_move(name)).link == state.link
    assert after(state, lc.Relink(**IDS, rendezvous=rendezvous(2))) == replace(state, link="up")
    assert after(state, step.ExecuteModel(**IDS, total_num_scheduled_tokens=0)) == state


def test_refusal_names_state_legal_requests_and_last_transitions() -> None:
    lifecycle = in_state(DaemonState(DEVICE, "up"))
    with pytest.raises(StateError) as caught:
        lifecycle.check(step.ExecuteModel(**IDS, total_num_scheduled_tokens=0))
    text = str(caught.value)
    assert "ExecuteModel is not legal in DEVICE_READY/link up/SERVING" in text
    assert "LoadModel, Profile, Relink, Reset" in text
    assert "CREATED/link none/SERVING -> DEVICE_READY/link up/SERVING (InitDevice)" in text


def test_history_keeps_the_last_transitions_only() -> None:
    lifecycle = Lifecycle()
    for _ in range(HISTORY):
        lifecycle.succeeded(build_move("InitDevice"))
        lifecycle.succeeded(reset(CREATED))
    assert len(lifecycle.transitions) == HISTORY
    assert lifecycle.transitions[-1].endswith("(Reset)")


@pytest.mark.parametrize(
    ("moves", "end"),
    [
        (["DRAINING", "CLOSED"], "CLOSED"),
        (["FAILED", "DRAINING"], "FAILED"),
        (["CLOSED", "SERVING"], "CLOSED"),
        (["DRAINING", "SERVING"], "SERVING"),
        (["DRAINING", "CLOSED", "SERVING"], "CLOSED"),
        (["FAILED", "SERVING"], "FAILED"),
    ],
)
def test_serving_comes_back_from_a_drain_alone(moves: list[str], end: str) -> None:
    lifecycle = Lifecycle()
    for to in moves:
        lifecycle.serve(to, "test")
    assert lifecycle.state.serving == end
