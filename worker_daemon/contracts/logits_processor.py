"""The interface of custom logits processors, for packages that provide one.

Such a package names a factory in the entry point group `worker_daemon.logits_processors`, and is
installed with every daemon of a group.
"""

from typing import Final, Protocol

import torch
from torch import Tensor

ENTRY_POINT_GROUP: Final = "worker_daemon.logits_processors"


class LogitsProcessor(Protocol):
    """Changes logits. Called on the step thread of each rank of the last stage, with the same
    values on all of them."""

    def __call__(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Return float32 [R, V] for the rows that enable it. logits: float32 [R, V], may be changed
        in place. positions: int32 [R], of the tokens to sample. A row must not depend on other
        rows, although a request may have several, which differ in their positions. Never waits for
        the device."""


class MakeLogitsProcessor(Protocol):
    """The factory that the entry point names."""

    def __call__(self, vocab_size: int, device: torch.device) -> LogitsProcessor:
        """Return a processor. Called once for each runner."""
