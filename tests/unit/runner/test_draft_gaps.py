"""What a draft model computes again of prefixes that come from the host tier: what the blocks had
lacked when they were stored, and nothing of those that another group has computed."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from worker_daemon.runner.draft_backlog import DraftBacklog
from worker_daemon.runner.parts.registry import make_parts
from worker_daemon.runner.request_state import RequestState
from worker_daemon.runner.scheduled_step import BlockUpdates, StepLimits
from worker_daemon.sample.sampler import TorchSampling

BLOCK, NUM_BLOCKS, NUM_SLOTS = 4, 40, 20


def int32s(values):
    return np.array(values, np.int32)


class Rows:
    """Rows of a state, whose steps a draft model follows or not."""

    def __init__(self):
        limits = StepLimits(8, 64, 64, 40, BLOCK, NUM_BLOCKS, num_host_blocks=NUM_SLOTS)
        parts = make_parts(limits, torch.device("cpu"), TorchSampling())
        self.state = RequestState(limits, parts)
        self.backlog, self.gaps = DraftBacklog(self.state), self.state.draft_gaps

    def begin(self, slot, blocks, num_cached, *, follows):
        """Admit a row with cached tokens, compute the others; return how many the draft model
        computes after the step."""
        count = len(blocks) * BLOCK - num_cached
        self.state.counts.blocks_by_group[0, slot] = len(blocks)
        step = SimpleNamespace(
            recomputes=False,
            skips_drafts=False,
            corrections=None,
            new_requests=[SimpleNamespace(slot=slot, num_computed_tokens=num_cached)],
            block_updates=BlockUpdates(
                np.full(len(blocks), slot), int32s(range(len(blocks))), int32s(blocks)
            ),
            slots=np.array([slot]),
            num_tokens=int32s([count]),
            starts=int32s([num_cached]),
            ends=int32s([num_cached + count]),
            num_samples=int32s([1]),
        )
        missing = self.backlog.take(step, follows=follows)
        if missing is None:
            return 0
        self.backlog.caught_up(missing)
        return int(missing.counts.sum())


@pytest.mark.parametrize("way", ["stored", "stored with gaps", "received", "unknown"])
def test_what_is_computed_again_of_a_loaded_prefix(way):
    rows, blocks = Rows(), random.sample(range(1, NUM_BLOCKS), 8)
    own, loaded, slots = blocks[:3], blocks[3:6], int32s(random.sample(range(NUM_SLOTS), 3))
    if way.startswith("stored"):
        rows.begin(0, own, 0, follows=True)
        if way == "stored with gaps":
            rows.gaps.of_blocks[own[1]] = True
        rows.gaps.store(int32s(own), slots)
    elif way == "received":
        rows.gaps.receive(slots)
    rows.gaps.load(int32s(loaded), slots)
    num_again = rows.begin(1, [*loaded, blocks[6]], 3 * BLOCK, follows=True)
    behind_gap = 2 * BLOCK + BLOCK  # from the first gap on, with the step's own tokens
    expected = {"stored": 0, "received": 0, "stored with gaps": behind_gap, "unknown": 4 * BLOCK}
    assert num_again == expected[way]


def test_nothing_is_known_after_a_restart():
    rows, slots = Rows(), int32s([3, 4])
    rows.gaps.receive(slots)
    rows.backlog.restart()
    rows.gaps.load(int32s([5, 6]), slots)
    assert rows.begin(0, [5, 6, 7], 2 * BLOCK, follows=True) == 3 * BLOCK
