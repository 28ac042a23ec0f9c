"""Coordinates of ranks: every group shape up to 4 x 4."""

import pytest

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


@pytest.mark.parametrize("rank", [-1, 6, 100])
def test_rank_outside_is_refused(rank):
    with pytest.raises(ConfigError, match="from 0 to 5") as caught:
        ParallelState(2, 3, rank)
    assert caught.value.field == "rendezvous.rank"


def test_a_group_of_one_communicates_with_nobody():
    assert isinstance(tensor_parallel(0, 1), SingleRank)
    tp = tensor_parallel(2, 4)
    assert (tp.rank, tp.size) == (2, 4)
