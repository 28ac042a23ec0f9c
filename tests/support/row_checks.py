"""Row kernels on random columns, compared with plain Python lists. For the interpreter's tests and
for a GPU."""

from itertools import pairwise

import numpy as np
import torch

from rpc_schema.step import NO_TOKEN
from worker_daemon.kernels.row_ops import TritonRowKernels
from worker_daemon.runner.row_tables import TOKEN_ON_DEVICE, TorchRowKernels

KERNELS = TritonRowKernels()


def _columns(device, *values):
    return [torch.from_numpy(np.array(v, np.int32)).to(device) for v in values]


def check_gather(device, num_tokens, block_size, seed):
    """Check that tokens come from the host, or from their row's newest one and its drafts, KV slots
    from the row's block table, and that texts get the tokens at their positions, if there are
    some."""
    rng = np.random.default_rng(seed)
    num_rows, num_blocks = int(rng.integers(1, 40)), int(rng.integers(1, 30))
    num_drafts = int(rng.integers(0, 6))
    table = rng.integers(0, 1 << 30, (num_rows, num_blocks)) // block_size
    following = rng.integers(-1, 1 << 40, (num_rows, 1 + num_drafts))
    following[rng.random(num_rows) < 0.2, 0] = NO_TOKEN
    host = rng.integers(0, 1000, num_tokens)
    on_device = rng.random(num_tokens) < 0.5
    host[on_device] = TOKEN_ON_DEVICE - rng.integers(0, 1 + num_drafts, np.count_nonzero(on_device))
    rows = rng.integers(0, num_rows, num_tokens)
    positions = rng.integers(0, num_blocks * block_size, num_tokens)
    width = num_blocks * block_size + int(rng.integers(0, 9))
    _, firsts, inverse = np.unique(rows * width + positions, return_index=True, return_inverse=True)
    host = host[firsts[inverse]]  # a place that is named again has the same token
    before = rng.integers(0, 99, (num_rows, width)).astype(np.int32)
    for texts in (None, torch.from_numpy(before).to(device)):
        token_ids, slots = KERNELS.gather_tokens(
            *_columns(device, host, rows, positions),
            torch.from_numpy(following).to(device),
            *_columns(device, table),
            block_size,
            texts,
        )
        assert token_ids.dtype == slots.dtype == torch.int64
        assert token_ids.tolist() == [
            max(following[row, TOKEN_ON_DEVICE - token], 0) if token < 0 else token
            for token, row in zip(host, rows, strict=True)
        ]
        assert slots.tolist() == [
            table[row, position // block_size] * block_size + position % block_size
            for row, position in zip(rows, positions, strict=True)
        ]
    expected = before.copy()
    expected[rows, positions] = token_ids.cpu().numpy().astype(np.int32)
    assert texts is not None and np.array_equal(texts.cpu().numpy(), expected)


def check_writes(device, num_values, seed):
    """Check that updates reach only their places; padding repeats one place."""
    rng = np.random.default_rng(seed)
    table = rng.integers(0, 99, (num_values + 3, 7)).astype(np.int32)
    rows = rng.permutation(num_values + 2)[:num_values]
    indices, ids = rng.integers(0, 7, num_values), rng.integers(0, 1 << 30, num_values)
    spare = num_values + 2
    on_device = torch.from_numpy(table).to(device)
    padded = [np.append(rows, [spare] * 5), np.append(indices, [0] * 5), np.append(ids, [0] * 5)]
    KERNELS.update_blocks(on_device, *_columns(device, *padded))
    expected = table.copy()
    expected[rows, indices] = ids
    expected[spare, 0] = 0
    assert on_device.cpu().numpy().tolist() == expected.tolist()


def check_corrections(device, num_seqs, seed):
    """Check that lengths and positions move by a row's correction minus its refusals, and that rows
    without a correction have no refusals left."""
    rng = np.random.default_rng(seed)
    num_rows = num_seqs + 4
    seq_rows = rng.permutation(num_rows - 1)[:num_seqs]
    refused = rng.integers(0, 9, num_rows)
    corrections = rng.integers(-1, 9, num_seqs)
    seq_lens = rng.integers(20, 90, num_seqs)
    rows = rng.choice(seq_rows, 3 * num_seqs)
    positions = rng.integers(20, 90, rows.size)
    shift, left = {}, refused.copy()
    for row, correction in zip(seq_rows.tolist(), corrections.tolist(), strict=True):
        shift[row] = correction - refused[row] if correction >= 0 else 0
        left[row] = refused[row] if correction >= 0 else 0
    lens, there, own = _columns(device, seq_lens, positions, refused)
    scratch = torch.full_like(own, 77)
    KERNELS.correct_lengths(lens, *_columns(device, seq_rows, corrections), own, scratch)
    KERNELS.correct_positions(there, *_columns(device, rows), scratch)
    assert own.tolist() == left.tolist()
    assert lens.tolist() == [n + shift[row] for n, row in zip(seq_lens, seq_rows, strict=True)]
    assert there.tolist() == [at + shift[row] for at, row in zip(positions, rows, strict=True)]


def check_verified(device, num_seqs, most, seed):
    """Check what sequences gain in a step with drafts against plain Python, and that padding
    changes nothing; the same in plain torch."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, most + 2, num_seqs)
    firsts = np.append(0, np.cumsum(counts))
    rows = np.repeat(rng.permutation(num_seqs + 3)[:num_seqs], counts)
    inputs = rng.integers(0, 3, counts.sum())
    token_ids = np.where(rng.random(inputs.size) < 0.7, np.append(inputs[1:], 0), 7)
    token_ids[rng.random(inputs.size) < 0.1] = NO_TOKEN
    before = rng.integers(0, 9, num_seqs + 4)
    positions = rng.integers(1, 1 << 20, inputs.size)
    num_padding = int(rng.integers(0, 4))
    for num_there in {num_seqs, int(rng.integers(0, num_seqs + 1))}:
        # Padding of two kinds: without samples, and of a step that is verified elsewhere.
        padded = np.append(firsts, [firsts[-1]] * num_padding)
        spare = num_seqs + 3
        for kernels, where in ((KERNELS, device), (TorchRowKernels(), torch.device("cpu"))):
            following = torch.full((spare + 1, most + 1), 50, device=where)
            refused = torch.from_numpy(before.astype(np.int32)).to(where)
            own_rows, at = _columns(where, rows, positions)
            own_firsts, count = _columns(where, padded, [num_there])
            columns = torch.from_numpy(token_ids).to(where), torch.from_numpy(inputs).to(where)
            outcome = kernels.verify(*columns, own_firsts, count, own_rows, at, following, refused)
            kept, changed = [], set()
            for seq, (first, end) in enumerate(pairwise(firsts[: num_there + 1])):
                last = first
                while last + 1 < end and token_ids[last] == inputs[last + 1]:
                    if token_ids[last + 1] == NO_TOKEN:
                        break
                    last += 1
                gained, row = token_ids[first : last + 1].tolist(), rows[first]
                num_refused = int(end - last - 1)
                padding = [NO_TOKEN] * (most + 1 - len(gained))
                assert outcome.rows[seq] == row
                assert outcome.gained[seq].tolist() == gained + padding
                assert outcome.counts[seq] == len(gained) and outcome.refused[seq] == num_refused
                assert outcome.lengths[seq] == positions[first] + len(gained)
                assert outcome.total[seq] == refused[row] == before[row] + num_refused
                assert following[row].tolist() == [gained[-1]] + [50] * most
                kept += gained + [NO_TOKEN] * num_refused
                changed.add(row)
            assert outcome.kept[: len(kept)].tolist() == kept
            assert outcome.rows[num_there:].tolist() == [spare] * (padded.size - 1 - num_there)
            assert (outcome.gained[num_there:] == NO_TOKEN).all()
            assert not outcome.counts[num_there:].any() and not outcome.refused[num_there:].any()
            assert not outcome.lengths[num_there:].any()
            others = [row for row in range(spare + 1) if row not in changed]
            assert (following[others] == 50).all()
            assert refused[others].tolist() == before[others].tolist()
