"""Checks of penalty kernels against plain torch, on any device."""

import numpy as np
import torch

from worker_daemon.contracts.sampling import PenaltyTables, Sampling
from worker_daemon.sample.sampler import TorchSampling

NUM_SLOTS = 9


def random_tables(vocab_size: int, rng: np.random.Generator, device: str) -> PenaltyTables:
    """Return tables with a third of the tokens seen, in the prompt, the output, or both, and one
    row without penalties."""
    counts = rng.choice([0, 0, 0, 0, 1, 2, 7, 2**15 - 1], (NUM_SLOTS, vocab_size))
    in_prompt = rng.random((NUM_SLOTS, vocab_size)) < 0.2
    entries = np.where(in_prompt, counts - 2**15, counts).astype(np.int16)
    weights = rng.uniform([-2, -2, 0.3], [2, 2, 3], (NUM_SLOTS, 3)).astype(np.float32)
    weights[rng.integers(NUM_SLOTS)] = (0, 0, 1)
    return PenaltyTables(torch.from_numpy(entries).to(device), torch.from_numpy(weights).to(device))


def check_penalized(
    sampling: Sampling, device: str, num_rows: int, vocab_size: int, dtype: torch.dtype, seed: int
) -> None:
    """Check for the same floats as plain torch, from rows of a larger tensor."""
    rng = np.random.default_rng(seed)
    tables = random_tables(vocab_size, rng, device)
    whole = torch.from_numpy(rng.standard_normal((num_rows, vocab_size + 3)) * 5).to(device, dtype)
    whole[:, rng.integers(0, vocab_size, 2)] = -torch.inf
    logits = whole[:, :vocab_size]
    before = logits.clone()
    slots = torch.from_numpy(rng.permutation(NUM_SLOTS)[:num_rows].astype(np.int32)).to(device)
    result = sampling.penalized(logits, slots, tables)
    assert result.dtype == torch.float32
    torch.testing.assert_close(
        result.cpu(),
        TorchSampling().penalized(logits, slots, tables).cpu(),
        rtol=0,
        atol=0,
    )
    assert torch.equal(logits, before)


def check_counts(sampling: Sampling, device: str, vocab_size: int, seed: int) -> None:
    """Check that tokens are counted once in their rows, missing tokens not at all, and up to the
    maximum."""
    rng = np.random.default_rng(seed)
    tables = random_tables(vocab_size, rng, device)
    slots = rng.permutation(NUM_SLOTS)[: NUM_SLOTS - 2]
    tokens = rng.integers(-1, vocab_size, slots.size)
    tokens[0] = -1
    expected = tables.seen.cpu().numpy().astype(np.int64)
    for slot, token in zip(slots, tokens, strict=True):
        if token >= 0 and expected[slot, token] & 0x7FFF < 0x7FFF:
            expected[slot, token] += 1
    on_device = torch.from_numpy(slots.astype(np.int32)).to(device)
    sampling.count_tokens(on_device, torch.from_numpy(tokens).to(device), tables)
    assert tables.seen.cpu().numpy().tolist() == expected.tolist()
