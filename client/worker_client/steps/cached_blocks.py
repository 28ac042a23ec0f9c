"""KV blocks and the hashes of their contents."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from worker_client.errors import config_error

Int32s = NDArray[np.int32]
Hashes = NDArray[np.uint8]


class CachedBlocks(NamedTuple):
    """KV blocks and the hashes of their contents."""

    block_ids: Int32s
    """int32 [n], of any KV group: all groups share one range of ids."""
    hashes: Hashes
    """uint8 [n, bytes of a hash]"""

    @classmethod
    def of(cls, block_ids: Sequence[int], hashes: Sequence[bytes]) -> "CachedBlocks":
        """Return blocks with hashes of equal length.

        Raises:
            ClientConfigError: their lengths differ, or there is not one for each block.
        """
        width = len(hashes[0]) if hashes else 0
        joined = b"".join(hashes)
        if len(hashes) != len(block_ids) or any(len(each) != width for each in hashes):
            fix = "give each block a hash, all of one length"
            raise config_error("hashes", f"{len(hashes)} hashes", "they do not fit", fix)
        column = np.frombuffer(joined, np.uint8).reshape(len(hashes), width)
        return cls(np.array(block_ids, np.int32), column)

    def only(self, chosen: NDArray[np.bool_]) -> "CachedBlocks":
        """Return some of them: those with True in `chosen` [n]."""
        return CachedBlocks(self.block_ids[chosen], self.hashes[chosen])


NO_CACHED_BLOCKS = CachedBlocks(np.zeros(0, np.int32), np.zeros((0, 0), np.uint8))
