"""Checks token masks against loops over bits, for a kernel and its torch implementation."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Masked = Callable[[Tensor, Tensor, Tensor], Tensor]


def check_masks(
    masked: Masked, rng: np.random.Generator, device: torch.device, vocab_size: int
) -> None:
    """Check rows with and without masks, unused masks, padded rows of logits, NaN and infinities,
    and bits past the vocabulary."""
    num_rows, num_masks = int(rng.integers(1, 7)), int(rng.integers(1, 6))
    dtype = [torch.float32, torch.bfloat16, torch.float16][int(rng.integers(3))]
    wide = torch.from_numpy(rng.standard_normal((num_rows, vocab_size + 5)).astype(np.float32))
    wide[rng.integers(num_rows), rng.integers(vocab_size)] = torch.nan
    wide[rng.integers(num_rows), rng.integers(vocab_size)] = -torch.inf
    logits = wide.to(device, dtype)[:, :vocab_size]
    allowed = rng.random((num_masks, vocab_size)) < rng.uniform(0, 1, (num_masks, 1))
    mask_of_row = rng.integers(-1, num_masks, num_rows).astype(np.int32)
    before, expected = logits.clone(), logits.clone()
    for row, mask in enumerate(mask_of_row.tolist()):
        for token in range(vocab_size) if mask >= 0 else ():
            if not allowed[mask, token]:
                expected[row, token] = -torch.inf
    words = torch.from_numpy(packed(allowed, rng)).to(device)
    out = masked(logits, words, torch.from_numpy(mask_of_row).to(device))
    assert torch.equal(out.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0))


def packed(allowed: NDArray[np.bool_], rng: np.random.Generator) -> NDArray[np.int32]:
    """Return bool [M, V] as int32 words, with random bits past the vocabulary."""
    num_masks, vocab_size = allowed.shape
    bits = rng.random((num_masks, -(-vocab_size // 32) * 32)) < 0.5
    bits[:, :vocab_size] = allowed
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)
