"""Checksums of blocks, or of their parts, by which a changed bit or a mistaken part is found.

Shapes: n blocks, W int32 words of a block on this rank, U parts.
"""

from collections.abc import Sequence
from copy import copy
from hashlib import blake2b
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker_daemon.contracts.arrays import Int64s

WORD_BYTES: Final = 4
CHECKSUM_WORDS: Final = 2
"""Words of a checksum, an int64."""

_Hashes: TypeAlias = npt.NDArray[np.uint8]


class BlockParts(NamedTuple):
    """The parts into which a block's words are divided: the keys and values of a KV head in a
    layer, or all that a layer keeps. Ranks of any shape that have the same layer and head have the
    same part, so a checksum survives a different division among ranks."""

    layers: tuple[str, ...]
    """Names of the layers, in the order of their pages."""
    first_head: int
    """Number of this rank's first KV head among those of the model."""
    num_heads: int
    """Parts of a layer; 1 if its pages are one part."""
    rows: int
    """Rows of a page, each with words of all heads in turn: 2 * block_size for keys and values."""
    words: int
    """Words of a head in a row."""
    further: tuple[int, ...] = ()
    """Words of each further page, a part of its own."""

    @property
    def layer_words(self) -> int:
        """Words of a block in all layers."""
        return len(self.layers) * self.rows * self.num_heads * self.words

    @property
    def num_words(self) -> int:
        """W."""
        return self.layer_words + sum(self.further)

    @property
    def num_layer_parts(self) -> int:
        """Parts of all layers."""
        return len(self.layers) * self.num_heads

    @property
    def num_parts(self) -> int:
        """U: those of the layers, then the further pages."""
        return self.num_layer_parts + len(self.further)

    @property
    def checksum_words(self) -> int:
        """Words of a block's checksums."""
        return CHECKSUM_WORDS * self.num_parts

    def by_head(self, rows: Tensor) -> Tensor:
        """View the layers' words of rows [n, W or more] as [n, layers, rows, heads, words]."""
        shape = (-1, len(self.layers), self.rows, self.num_heads, self.words)
        return rows[:, : self.layer_words].view(shape)

    def sums(self, values: Tensor) -> Tensor:
        """Add up the values [n, W] of each part; return [n, U]."""
        own = self.by_head(values).sum(dim=(2, 4)).flatten(1)
        if not self.further:
            return own
        others = torch.split(values[:, self.layer_words :], list(self.further), dim=1)
        return torch.cat([own, *(other.sum(dim=1, keepdim=True) for other in others)], dim=1)

    def keys(self) -> Int64s:
        """Return a random odd key for each word [W], which depends on the layer's name, the head's
        number and the word's place in the part alone."""
        size = self.rows * self.words
        heads = range(self.first_head, self.first_head + self.num_heads)
        parts = [named_keys(f"{layer} {head}", size) for layer in self.layers for head in heads]
        by_head = np.array(parts, np.int64).reshape(-1, self.num_heads, self.rows, self.words)
        others = [named_keys(f"further page {i}", count) for i, count in enumerate(self.further)]
        return np.concatenate([by_head.transpose(0, 2, 1, 3).ravel(), *others])


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


class PartChecksums:
    """A checksum of each part of a block, as BlockChecksums makes one of a row. Keys are drawn from
    the part's name, so all daemons have the same, and another head or layer is found too."""

    def __init__(self, parts: BlockParts, most_rows: int, device: torch.device) -> None:
        """most_rows: at once."""
        self._parts = parts
        self._keys = torch.from_numpy(parts.keys()).to(device)
        shape = (most_rows, parts.num_words)
        self._products = torch.empty(shape, dtype=torch.int64, device=device)

    def beside(self) -> "PartChecksums":
        """Return one with the same keys and a buffer of its own, for another stream."""
        other = copy(self)
        other._products = torch.empty_like(self._products)
        return other

    def of(self, rows: Tensor) -> Tensor:
        """Return int64 [n, U] for int32 rows [n, W], at most most_rows. Never waits for the device.
        Uses one buffer: calls on several streams must be ordered."""
        products = self._products[: rows.shape[0]]
        return self._parts.sums(torch.mul(rows, self._keys, out=products))


def numbers_of(hashes: _Hashes) -> Int64s:
    """Return an int64 for each hash, uint8 [n, bytes of a hash]."""
    num, width = hashes.shape
    whole = np.zeros((num, -(-width // 8) * 8), np.uint8)
    whole[:, :width] = hashes
    words = whole.view(np.uint64)
    factors = named_keys("hash", words.shape[1]).view(np.uint64)
    numbers: Int64s = (words * factors).sum(axis=1, dtype=np.uint64).view(np.int64)
    return numbers


def digest(*fields: bytes | Sequence[bytes]) -> bytes:
    """Return 32 bytes that name these fields."""
    flat = [each for one in fields for each in ((one,) if isinstance(one, bytes) else one)]
    framed = b"".join(len(each).to_bytes(8, "little") + each for each in flat)
    return blake2b(framed, digest_size=32).digest()


def named_keys(name: str, count: int) -> Int64s:
    """Draw odd keys from a name: the same in every process, since Philox's raw numbers are
    fixed."""
    seed = int.from_bytes(blake2b(name.encode(), digest_size=16).digest(), "little")
    drawn = np.random.Philox(key=seed).random_raw(count)
    keys: Int64s = (drawn | np.uint64(1)).view(np.int64)
    return keys
