"""Counts that are upper bounds: what a message may lower them by, and what the history makes of
tokens that some rows did not gain."""

from dataclasses import replace

import numpy as np
import pytest
from row_steps import bitmap, int32s

from rpc_schema.errors import InvalidStepError
from rpc_schema.sampling import RandomSampling
from rpc_schema.step import ExecuteModel, NewRequestData
from worker_daemon.runner.parts.interface import PartContext, StepPart
from worker_daemon.runner.parts.step_parts import StepParts
from worker_daemon.runner.request_state import RequestState
from worker_daemon.runner.scheduled_step import StepLimits
from worker_daemon.runner.token_history import Result, Sampled, SampledTokens

LIMITS = StepLimits(4, 40, 30, 50, 4, 30)


class Refusing(StepPart):
    request_extension = RandomSampling
    may_refuse = True


def rows(limits=LIMITS):
    """Slot 0 may refuse, slot 1 not; both have sampled once after three known tokens."""
    state = RequestState(
        limits, StepParts([Refusing(None)], None, PartContext(limits, *[None] * 4))
    )
    new = tuple(
        NewRequestData(
            slot=slot,
            req_id=f"r{slot}",
            num_tokens=3,
            num_prompt_tokens=3,
            num_computed_tokens=0,
            extensions=(RandomSampling(),) if slot == 0 else (),
        )
        for slot in (0, 1)
    )
    first = message(
        1,
        total=6,
        num_scheduled_tokens=int32s([0, 3, 1, 3]),
        scheduled_new_reqs=new,
        new_block_slots=np.array([0, 0, 1, 1], "<u2").tobytes(),
        new_block_ids=int32s([1, 2, 3, 4]),
    )
    return state, state.apply(first, [int32s([1] * 6)])


def message(seq, total=2, **fields):
    scheduled = bitmap([0, 1])
    return ExecuteModel(
        epoch=1, link=1, seq=seq, total_num_scheduled_tokens=total, scheduled=scheduled, **fields
    )


def test_drafts_and_refusals_are_not_of_the_same_step():
    """A step with drafts verifies: it does not ask a part that may refuse another row's token."""
    state, first = rows(replace(LIMITS, max_drafts=2))
    state.parts.admit(first.new_requests)
    drafted = message(
        2,
        total=3,
        num_scheduled_tokens=int32s([1, 2]),
        num_drafts=int32s([1, 1]),
        draft_token_ids=int32s([5]),
    )
    with pytest.raises(InvalidStepError, match="refuses tokens"):
        state.apply(drafted, [])


def test_bounds_fall_by_corrections_and_the_device_hears_of_them():
    state, first = rows()
    assert first.corrections.tolist() == [-1, -1]
    second = state.apply(message(2), [])
    assert second.corrections.tolist() == [0, -1] and second.starts.tolist() == [3, 3]
    third = state.apply(message(3, corrections=int32s([0, 2])), [])
    assert third.corrections.tolist() == [2, -1]
    assert third.starts.tolist() == [2, 4] and third.num_samples.all()
    assert state.counts.num_tokens[:2].tolist() == [4, 6]


@pytest.mark.parametrize(
    ("pairs", "word"),
    [
        ([0, 0], "1 to 1"),
        ([0, 2], "1 to 1"),
        ([0, -1], "1 to 1"),
        ([1, 1], "no feature"),
        ([2, 1], "admit a request"),
        ([-1, 1], "slots from 0"),
        ([7, 1], "slots from 0"),
        ([0, 1, 0, 1], "once"),
        ([0], "pairs"),
    ],
)
def test_corrections_that_do_not_fit_are_refused_whole(pairs, word):
    state, _ = rows()
    with pytest.raises(InvalidStepError, match=word):
        state.apply(message(2, corrections=int32s(pairs)), [])
    assert state.counts.num_computed[:2].tolist() == [3, 3]
    assert state.counts.num_tokens[:2].tolist() == [4, 4]


@pytest.mark.parametrize("seed", range(5))
def test_history_appends_what_was_gained(seed):
    rng = np.random.default_rng(seed)
    history, expected = SampledTokens(6, 60), {slot: [] for slot in range(5)}
    slots, generations = np.arange(5), np.full(5, 3)
    for step in range(12):
        gained = rng.integers(0, 4, 5).astype(np.uint8)
        tokens = rng.integers(0, 99, int(gained.sum())).astype("<i4")
        bounds = np.full(5, 7 + step, np.int32)
        raw = b"" if (gained == 1).all() else gained.tobytes()
        sampled = Sampled(slots, generations, bounds, True)
        history.unrecorded.append(Result(1, step, sampled, tokens.tobytes(), raw))
        for slot, own in enumerate(np.split(tokens, np.cumsum(gained)[:-1])):
            expected[slot] += own.tolist()
    for slot, tokens in expected.items():
        end = history.known_to(slot, 3, 7)
        assert history.between(slot, 7, end).tolist() == tokens
        assert history.known_to(slot, 4, 7) == 7


def test_a_feature_that_refuses_tokens_is_refused_where_layers_keep_states():
    """Nobody can take a refused token out of a state."""
    with pytest.raises(InvalidStepError) as refused:
        rows(replace(LIMITS, keeps_state=True))
    assert refused.value.field == "scheduled_new_reqs[r0].extensions"
