"""A step's ends on a GPU: also as a captured graph serves them, in turn."""

import numpy as np
import pytest
import torch

from tests.support.staging_checks import check_holds, check_turns, fill, make_staging
from worker_daemon.runner.step_layout import StepShape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("depth", [1, 3, 4])
def test_columns_and_tokens_reach_the_other_side(depth: int) -> None:
    check_turns("cuda", depth, 300, seed=depth)


def test_a_buffer_says_what_it_holds() -> None:
    check_holds("cuda")


def test_a_graph_takes_the_next_steps_columns_each_time_it_is_replayed() -> None:
    """Steps run ahead of their results; each result is of its own step's columns."""
    shape, rng = StepShape(256, 256, 256, 16), np.random.default_rng()
    staging = make_staging("cuda", 3, [shape])
    newest = torch.zeros(701, dtype=torch.int64, device="cuda")
    first = staging.open(shape)
    fill(first, rng)

    def step(columns):
        rows = columns.seq_order
        staging.store(newest, rows, columns.positions.long() * 2 + columns.seq_lens.long())

    first.host.seq_order[:] = 0
    first.take()
    step(first.columns)  # compiles
    first.taken()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first.take()
        step(first.columns)
    unread = []
    for _ in range(500):
        packed = staging.open(shape)
        fill(packed, rng)
        packed.host.seq_order[:] = rng.permutation(256)
        expected = packed.host.positions.astype(np.int64) * 2 + packed.host.seq_lens
        graph.replay()
        packed.taken()
        unread.append((packed.delivery.expect(256), expected.astype(np.int32).tolist()))
        if len(unread) > 5:
            delivered, tokens = unread.pop(0)
            assert np.frombuffer(delivered.wait(), "<i4").tolist() == tokens
