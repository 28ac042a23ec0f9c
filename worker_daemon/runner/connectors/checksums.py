"""Checksums of blocks, by which a changed bit is found."""

from copy import copy
from typing import Final

import numpy as np
import torch
from torch import Tensor

WORD_BYTES: Final = 4


class BlockChecksums:
    """Multilinear hashing of 32-bit words modulo 2^64 (Lemire and Kaser, "Strongly universal string
    hashing is fast", 2014): the sum of w_i * x_i with random odd 64-bit keys w_i.

    Any change of a single word is found, since w_i is odd; a change of several is missed with a
    probability of about 2^-32. The keys are random, or follow from a seed: then checksums of other
    objects with it, in other processes too, can be compared.
    The same torch operations run on the CPU and on a GPU, where they read the words once and write
    and read twice as many bytes: device memory is fast beside the host's bus.
    """

    def __init__(
        self, num_words: int, most_rows: int, device: torch.device, seed: int | None = None
    ) -> None:
        """num_words: of a row; most_rows: at once. seed: None for random keys."""
        # NumPy promises the same stream in all versions, which torch does not.
        keys = np.random.Philox(key=seed).random_raw(num_words).astype(np.uint64) | np.uint64(1)
        self._keys = torch.from_numpy(keys.view(np.int64)).to(device)
        self._products = torch.empty((most_rows, num_words), dtype=torch.int64, device=device)

    def beside(self) -> "BlockChecksums":
        """Return one with the same keys and a buffer of its own, for another stream."""
        other = copy(self)
        other._products = torch.empty_like(self._products)
        return other

    def of(self, rows: Tensor) -> Tensor:
        """Return int64 [n] for int32 rows [n, num_words], at most most_rows. Never waits for the
        device. Uses one buffer: calls on several streams must be ordered."""
        products = self._products[: rows.shape[0]]
        return torch.mul(rows, self._keys, out=products).sum(dim=1)
