"""Checks a device's staging over random steps against the host's data, for the interpreter's tests
and for a GPU."""

import numpy as np
import torch

from worker_daemon.runner.staging import CudaStaging
from worker_daemon.runner.step_layout import StepShape, packed_size

ROWS = 700


def random_shape(rng):
    tokens, seqs, updates = (int(rng.integers(1, top)) for top in (3000, 300, 900))
    extra = tuple(rng.choice([tokens, seqs], int(rng.integers(0, 3))).tolist())
    return StepShape(tokens, seqs, int(rng.integers(1, seqs + 1)), updates, extra)


def make_staging(device, depth, shapes):
    capacity = max(map(packed_size, shapes))
    return CudaStaging(torch.device(device), capacity, ROWS, depth, delivers=True)


def fill(packed, rng):
    for column in packed.host.every:
        column[:] = rng.integers(-(1 << 31), 1 << 31, column.size)
    return [column.tolist() for column in packed.host.every]


def check_turns(device, depth, num_steps, seed):
    """Check that each step's columns reach the device in any order of shapes, and its tokens the
    host, even if another thread reads them late."""
    rng = np.random.default_rng(seed)
    shapes = [random_shape(rng) for _ in range(4)]
    staging = make_staging(device, depth, shapes)
    staging.keep(shapes[:2])
    newest = torch.full((ROWS,), -1, dtype=torch.int64, device=device)
    expected_newest = [-1] * ROWS
    unread = []
    for _ in range(num_steps):
        packed = staging.open(shapes[int(rng.integers(0, 4))])
        fill(packed, rng)
        if rng.random() < 0.2:  # a step that fails before its launch leaves its turn to the next
            packed = staging.open(shapes[int(rng.integers(0, 4))])
        values = fill(packed, rng)
        packed.take()
        packed.taken()
        assert [column.tolist() for column in packed.columns.every] == values
        count = int(rng.integers(1, ROWS))
        rows, tokens = rng.permutation(ROWS)[:count], rng.integers(0, 1 << 31, count)
        staging.store(
            newest,
            torch.from_numpy(rows.astype(np.int32)).to(device),
            torch.from_numpy(tokens).to(device),
        )
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            expected_newest[row] = token
        gained = rng.integers(0, 9, int(rng.integers(0, count + 1))).astype(np.int32)
        if gained.size:
            staging.store_counts(torch.from_numpy(gained).to(device))
        if rng.random() < 0.8:
            wanted = int(rng.integers(1, count + 1))
            delivered = packed.delivery.expect(wanted, gained.size)
            unread.append((delivered, tokens[:wanted].tolist(), gained.tolist()))
        while len(unread) > int(rng.integers(0, 3 * depth)):
            check_delivered(*unread.pop(int(rng.integers(0, len(unread)))))
    assert newest.tolist() == expected_newest
    for each in unread:
        check_delivered(*each)


def check_delivered(delivered, tokens, counts):
    assert np.frombuffer(delivered.wait(), "<i4").tolist() == tokens
    assert delivered.counts.tolist() == counts


def check_holds(device):
    """Check that a buffer reports its shape until another shape has overwritten its memory."""
    shapes = [StepShape(8, 8, 8, 8), StepShape(16, 4, 4, 4)]
    staging = make_staging(device, 2, shapes)
    staging.keep(shapes)
    marks = [object(), object()]
    for mark in marks:
        packed = staging.open(shapes[0])
        packed.holds = mark
        packed.take()
        packed.taken()
    assert staging.open(shapes[0]).holds is marks[0]
    assert staging.open(shapes[1]).holds is None
    assert staging.open(shapes[0]).holds is None
