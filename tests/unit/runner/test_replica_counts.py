"""Steps of replicas in lockstep: what a rank checks of every replica's counts. Empty and steady
steps carry them as any other."""

import numpy as np
import pytest
import torch

from rpc_schema.errors import InvalidStepError, PrecededByError
from rpc_schema.step import ExecuteModel, NewRequestData
from worker_daemon.runner.parts.registry import make_parts
from worker_daemon.runner.replica_counts import ReplicaCounts
from worker_daemon.runner.request_state import RequestState
from worker_daemon.runner.scheduled_step import StepLimits
from worker_daemon.sample.sampler import TorchSampling

LIMITS = StepLimits(
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_model_len=64,
    vocab_size=100,
    block_size=16,
    num_blocks=8,
)
TOKENS = np.arange(3, dtype="<i4").tobytes()


def state_of(dp_rank=1, dp_size=3):
    parts = make_parts(LIMITS, torch.device("cpu"), TorchSampling())
    return RequestState(LIMITS, parts, ReplicaCounts(dp_rank, dp_size))


def counts_of(*replicas):
    return np.array(replicas, "<i4").tobytes()


def step_of(seq, num_tokens, **fields):
    scheduled = b"\1" if num_tokens else b""
    return ExecuteModel(
        epoch=1,
        link=1,
        seq=seq,
        total_num_scheduled_tokens=num_tokens,
        scheduled=scheduled,
        **fields,
    )


def admission(seq, counts):
    request = NewRequestData(
        slot=0, req_id="a", num_tokens=3, num_prompt_tokens=3, num_computed_tokens=0
    )
    return step_of(
        seq,
        3,
        num_scheduled_tokens=np.array([0, 3], "<i4").tobytes(),
        new_block_slots=np.array([0], "<u2").tobytes(),
        new_block_ids=np.array([1], "<i4").tobytes(),
        scheduled_new_reqs=(request,),
        replica_counts=counts,
    )


def test_each_step_carries_the_counts_of_all_replicas():
    state = state_of()
    idle = step_of(1, 0, replica_counts=counts_of((2, 9), (0, 0), (1, 1)))
    assert not state.apply(idle, []).slots.size
    assert state.tokens_of_replicas == ((9, 0, 1), False)
    admitted = state.apply(admission(2, counts_of((0, 0), (1, 3), (4, 4))), [TOKENS])
    assert admitted.total_num_tokens == 3
    steps = []
    for seq, others in enumerate((2, 2, 2, 5), 3):
        counts = counts_of((others, others), (1, 1), (0, 0))
        steps.append(state.apply(step_of(seq, 1, replica_counts=counts), []))
        assert state.tokens_of_replicas == ((others, 1, 0), True)
    assert [step.starts.tolist() for step in steps] == [[3], [4], [5], [6]]
    assert steps[-1].steady is steps[-2].steady is not None


@pytest.mark.parametrize(
    ("counts", "arrays", "problem"),
    [
        (b"", [], "replica_counts"),
        (counts_of((0, 0), (0, 0)), [], "16 bytes"),
        (counts_of((0, 0), (0, 0), (0, 0), (0, 0)), [], "32 bytes"),
        (counts_of((0, 0), (1, 1), (0, 0)), [], r"\[1, 1\]"),
        (counts_of((0, 0), (0, 1), (0, 0)), [], r"\[0, 1\]"),
        (counts_of((0, -1), (0, 0), (0, 0)), [], "-1"),
        (counts_of((0, 0), (0, 0), (0, 0)), [TOKENS], "arrays"),
    ],
)
@pytest.mark.parametrize("comes_first", [True, False])
def test_wrong_counts_refuse_the_step(counts, arrays, problem, comes_first):
    """Also after a step whose counts were right."""
    state, right = state_of(), counts_of((0, 0), (0, 0), (0, 0))
    if not comes_first:
        state.apply(step_of(1, 0, replica_counts=right), [])
    with pytest.raises(InvalidStepError, match=problem):
        state.apply(step_of(2, 0, replica_counts=counts), arrays)
    state.apply(step_of(3, 0, replica_counts=right), [])
    with pytest.raises(PrecededByError, match="step 2 failed"):
        state.raise_if_failed()
    state.apply(step_of(4, 0, resync=b"", replica_counts=right), [])
    state.raise_if_failed()


def test_counts_that_stay_the_same_are_checked_against_each_step():
    state = state_of(0, 2)
    state.apply(admission(1, counts_of((1, 3), (0, 0))), [TOKENS])
    same = counts_of((1, 1), (1, 1))
    state.apply(step_of(2, 1, replica_counts=same), [])
    with pytest.raises(InvalidStepError, match="replica_counts"):
        state.apply(step_of(3, 0, replica_counts=same), [])
    assert state.tokens_of_replicas == ((1, 1), True)


def test_counts_where_there_is_one_sequence_a_replica_are_refused():
    state = RequestState(LIMITS, make_parts(LIMITS, torch.device("cpu"), TorchSampling()))
    with pytest.raises(InvalidStepError, match="there is one replica"):
        state.apply(step_of(1, 0, replica_counts=counts_of((0, 0), (0, 0))), [])


def test_warm_up_says_nothing_of_other_replicas():
    state = state_of()
    with state.computing_nothing():
        state.apply(step_of(1, 0), [])
    with pytest.raises(InvalidStepError, match="replica_counts"):
        state.apply(step_of(2, 0), [])
