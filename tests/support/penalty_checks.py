"""Checks of penalty kernels against plain torch, on any device."""

import numpy as np
import torch

from worker_daemon.contracts.sampling import DraftsBefore, PenaltyTables, Sampling
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


def check_drafts(
    sampling: Sampling, device: str, vocab_size: int, dtype: torch.dtype, most: int, seed: int
) -> None:
    """Check that samples behind drafts are penalized, to the bit, as if these had been counted in
    a row of their own. Many of the drafts are equal, and rows have 0 to most of them."""
    rng = np.random.default_rng(seed)
    tables = random_tables(vocab_size, rng, device)
    counts = rng.integers(0, most + 1, NUM_SLOTS)
    counts[rng.integers(NUM_SLOTS)] = most
    slots = np.repeat(np.arange(NUM_SLOTS), counts + 1)
    num_before = np.concatenate([np.arange(count + 1) for count in counts])
    inputs = rng.choice(rng.integers(0, vocab_size, 4), slots.size)
    inputs[rng.random(slots.size) < 0.2] = 0
    logits = torch.from_numpy(rng.standard_normal((slots.size, vocab_size)) * 5).to(device, dtype)
    before = logits.clone()
    seen = tables.seen.cpu().numpy()[slots].astype(np.int64)
    for sample, number in enumerate(num_before):
        for token in inputs[sample - number + 1 : sample + 1]:
            seen[sample, token] += seen[sample, token] & 0x7FFF < 0x7FFF
    on_device = torch.from_numpy(slots.astype(np.int32)).to(device)
    own = PenaltyTables(
        torch.from_numpy(seen.astype(np.int16)).to(device), tables.weights[on_device.long()]
    )
    every = torch.arange(slots.size, dtype=torch.int32, device=device)
    drafts = DraftsBefore(
        torch.from_numpy(num_before.astype(np.int32)).to(device),
        torch.from_numpy(inputs).to(device),
        most,
    )
    result = sampling.penalized(logits, on_device, tables, drafts)
    expected = TorchSampling().penalized(logits, every, own)
    torch.testing.assert_close(result.cpu(), expected.cpu(), rtol=0, atol=0)
    assert torch.equal(logits, before)


def check_counts(
    sampling: Sampling, device: str, vocab_size: int, seed: int, most: int = 1
) -> None:
    """Check that tokens are counted in their rows, each as often as a row has it, missing tokens
    not at all, and up to the maximum. Rows have 1 to most entries, many of them equal."""
    rng = np.random.default_rng(seed)
    tables = random_tables(vocab_size, rng, device)
    slots = rng.permutation(NUM_SLOTS)[: NUM_SLOTS - 2]
    slots = np.repeat(slots, rng.integers(1, most + 1, slots.size))
    tokens = rng.integers(-1, vocab_size, slots.size)
    if most > 1:
        tokens = rng.choice([*rng.integers(0, vocab_size, 2), -1, 0], slots.size)
    tokens[0] = -1
    expected = tables.seen.cpu().numpy().astype(np.int64)
    for slot, token in zip(slots, tokens, strict=True):
        if token >= 0 and expected[slot, token] & 0x7FFF < 0x7FFF:
            expected[slot, token] += 1
    on_device = torch.from_numpy(slots.astype(np.int32)).to(device)
    sampling.count_tokens(on_device, torch.from_numpy(tokens).to(device), tables, most)
    assert tables.seen.cpu().numpy().tolist() == expected.tolist()
