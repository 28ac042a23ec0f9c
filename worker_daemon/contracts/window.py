"""Memory that the ranks of a tensor-parallel group share, as seen by one rank."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Window:
    """One rank's view of the windows of its group."""

    rank: int
    """0 <= rank < len(addresses)."""
    device: torch.device
    addresses: Sequence[int]
    """Address of each rank's window on this device, aligned to 16 bytes or more."""
    num_bytes: int
    """Size of each window."""
    blank: int
    """The initial int32 of every word of every window: a pair of negative zeros."""
    stop_address: int
    """Address of an int32 in page-locked memory, the stop flag; once it is not 0, all waits end."""
