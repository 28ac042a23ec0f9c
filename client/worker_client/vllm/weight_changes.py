"""Changes of the daemons' weights, as far as vLLM's scheduler must know them. Shared by scheduler
and executor, on one thread."""

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from worker_client.group.weights_state import WeightsVersion


@dataclass(slots=True)
class WeightChanges:
    """State of an update, and the number of versions so far."""

    is_open: bool = False
    """An update is open, or has failed: no step can run until one is complete."""
    count: int = 0
    """Versions that have replaced another one."""

    def note(self, _: WeightsVersion) -> None:
        """Count a new version."""
        self.count += 1


def salt_kept(request: Any, count: int) -> None:
    """Let no other request have the block hashes of a vLLM Request that goes on with the KV of
    earlier weights, nor those of blocks that it fills from now on: they follow from that KV. count:
    see WeightChanges."""
    covered = repr((request.cache_salt, request.request_id, count)).encode()
    request.cache_salt = blake2b(covered, digest_size=32).digest()  # a client's own is text
    request.block_hashes.clear()
    request.update_block_hashes()
