"""Coordinates of ranks: every group shape up to 4 x 4."""

import pytest

from rpc_schema.config import ParallelConfig
from rpc_schema.errors import ConfigError
from worker_daemon.distributed.parallel_state import ParallelState
from worker_daemon.distributed.tp import SingleRank, tensor_parallel

SHAPES = [(pp, tp) for pp in range(1, 5) for tp in range(1, 5)]


@pytest.mark.parametrize(("pp_size", "tp_size"), SHAPES)
def test_coordinates_and_groups_partition_the_ranks(pp_size, tp_size):
    states = [ParallelState(pp_size, tp_size, rank) for rank in range(pp_size * tp_size)]
    assert [s.rank_of(s.pp_rank, s.tp_rank) for s in states] == list(range(len(states)))
    assert sum(s.is_output_rank for s in states) == 1
    assert states[(pp_size - 1) * tp_size].is_output_rank
    assert sum(s.is_first_stage for s in states) == sum(s.is_last_stage for s in states) == tp_size
    for state in states:
        assert state.world_size == len(states)
        stage, pipeline = state.stage_ranks(state.pp_rank), state.pipeline_ranks(state.tp_rank)
        assert {*stage} & {*pipeline} == {state.rank}
        assert stage[state.tp_rank] == pipeline[state.pp_rank] == state.rank
        assert pipeline == sorted(pipeline)
    stages = [rank for pp_rank in range(pp_size) for rank in states[0].stage_ranks(pp_rank)]
    assert sorted(stages) == list(range(len(states)))


@pytest.mark.parametrize(("pp_size", "tp_size"), SHAPES)
def test_replicas_have_the_same_coordinates_and_consecutive_ranks(pp_size, tp_size):
    alone = [ParallelState(pp_size, tp_size, rank) for rank in range(pp_size * tp_size)]
    config = ParallelConfig(
        pipeline_parallel_size=pp_size, tensor_parallel_size=tp_size, data_parallel_size=3
    )
    assert (config.world_size, config.world_size_across_dp) == (len(alone), 3 * len(alone))
    for dp_rank in range(3):
        ranks = config.ranks_of(dp_rank)
        states = [ParallelState(pp_size, tp_size, rank, 3) for rank in ranks]
        assert {state.dp_rank for state in states} == {dp_rank}
        for state, same in zip(states, alone, strict=True):
            assert state.rank_in_replica == same.rank and state.world_size == same.world_size
            assert (state.pp_rank, state.tp_rank) == (same.pp_rank, same.tp_rank)
            assert state.is_output_rank == same.is_output_rank
            assert state.stage_ranks(state.pp_rank) == same.stage_ranks(same.pp_rank)
            assert state.pipeline_ranks(state.tp_rank) == same.pipeline_ranks(same.tp_rank)
    with pytest.raises(ConfigError, match="from 0 to"):
        ParallelState(pp_size, tp_size, 3 * len(alone), 3)


def test_a_link_belongs_to_one_replica():
    for rank, links in [(0, (3, 6)), (2, (1, 4)), (5, (2, 5))]:
        state = ParallelState(1, 2, rank, 3)
        for link in range(1, 7):
            if link in links:
                state.check_link(link)
                continue
            with pytest.raises(ConfigError, match=f"{state.dp_rank} modulo 3") as caught:
                state.check_link(link)
            assert caught.value.field == "rendezvous.link"
    for link in range(1, 7):
        ParallelState(2, 2, 3).check_link(link)


@pytest.mark.parametrize("rank", [-1, 6, 100])
def test_rank_outside_is_refused(rank):
    with pytest.raises(ConfigError, match="from 0 to 5") as caught:
        ParallelState(2, 3, rank)
    assert caught.value.field == "rendezvous.rank"


def test_a_group_of_one_communicates_with_nobody():
    assert isinstance(tensor_parallel(0, 1), SingleRank)
    tp = tensor_parallel(2, 4)
    assert (tp.rank, tp.size) == (2, 4)


def test_replicas_in_lockstep_share_a_link():
    states = [ParallelState(2, 1, rank, 3, lockstep=True) for rank in range(6)]
    assert [state.rank_in_group for state in states] == list(range(6))
    assert {(state.group_size, state.world_size) for state in states} == {(6, 2)}
    assert [(state.dp_rank, state.pp_rank) for state in states] == [
        (dp_rank, pp_rank) for dp_rank in range(3) for pp_rank in range(2)
    ]
    assert [state.is_output_rank for state in states] == [False, True] * 3
    for state in states:
        for link in range(1, 5):
            state.check_link(link)
    alone = [ParallelState(2, 1, rank, 3) for rank in range(6)]
    assert [state.rank_in_group for state in alone] == [0, 1] * 3
    assert {state.group_size for state in alone} == {2}


def test_lockstep_of_one_replica_is_refused():
    with pytest.raises(ConfigError, match="there is one replica") as caught:
        ParallelState(2, 1, 0, 1, lockstep=True)
    assert caught.value.field == "parallel.data_parallel_lockstep"
