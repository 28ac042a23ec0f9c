"""Names of the contents of blocks: a hash of all tokens up to a block's end, and of what else
decides their KV. One chain serves all groups of layers: a hash for each block of the smallest
size."""

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Final

from worker_client.scheduler.interface import SchedulerLimits
from worker_client.scheduler.request import Request

HASH_BYTES: Final = 16
_TOKEN_BYTES: Final = 4
_FORMAT: Final = b"worker_client blake2b 2"
"""To be changed with the hashes."""


class BlockHashes:
    """Extends the chains of requests (RequestPrefix.hashes). Owned by a scheduler; knows the
    version of the weights whose KV the chains name."""

    def __init__(self, limits: SchedulerLimits) -> None:
        groups = limits.block_groups
        self.unit = min(group.block_size for group in groups)
        """Tokens per hash, and per block of the smallest size. The block sizes of all groups are
        multiples of it, and each size is a multiple of every smaller one."""
        self.strides = [group.block_size // self.unit for group in groups]
        """Hashes for each block, by group."""
        self.tag = _FORMAT + _digest_of(limits)
        """Name of the hash scheme. With equal tags, equal hashes mean equal contents, whichever
        driver made them."""
        windows = sorted({group.window or 0 for group in limits.block_groups})
        self.contents_tag = _FORMAT + _digest(f"{self.unit} {windows}")
        """Name of the hash scheme but for the division of layers into groups: with equal tags,
        groups with equal windows have equal contents under equal hashes."""
        self._empty = blake2b(digest_size=HASH_BYTES)
        self.weights = b""
        """Names the version of the weights; empty: none was named."""

    def use_weights(self, key: bytes, unfinished: Iterable[Request]) -> bool:
        """Hash blocks as those of the weights that `key` names, and the requests' blocks again.
        Return True if other weights were named before: no request may begin with the blocks of
        those that run."""
        before, self.weights = self.weights, key
        is_other = before not in (b"", key)
        if key != before:
            for request in unfinished:
                request.prefix.hashes.clear()
                request.prefix.is_mixed |= is_other and request.is_running
        return is_other

    def of(self, request: Request) -> list[bytes]:
        """Return a request's hashes, up to its known tokens."""
        hashes, num_bytes = request.prefix.hashes, _TOKEN_BYTES * self.unit
        num_new = len(request.tokens) // self.unit - len(hashes)
        if num_new <= 0:
            return hashes
        raw = request.tokens[len(hashes) * self.unit :].tobytes()
        parent = hashes[-1] if hashes else self.weights + request.prefix.root
        begin, add = self._empty.copy, hashes.append
        for start in range(0, num_new * num_bytes, num_bytes):
            made = begin()  # faster than a new one
            made.update(parent)
            made.update(raw[start : start + num_bytes])
            parent = made.digest()
            add(parent)
        return hashes

    def at(self, hashes: Sequence[bytes], group: int, index: int) -> bytes:
        """Return the hash of the block at an index among a request's blocks of a group."""
        return hashes[(index + 1) * self.strides[group] - 1]


def _digest_of(limits: SchedulerLimits) -> bytes:
    groups = ",".join(f"{group.block_size}/{group.window}" for group in limits.block_groups)
    if limits.checkpoint_blocks:
        groups += f",{limits.checkpoint_blocks}"
    return _digest(groups)


def _digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=HASH_BYTES).digest()
