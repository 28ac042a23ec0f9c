"""Collects the experts that the routers of a stage choose in a forward pass.

Shapes: N tokens, L layers with experts of this stage, K experts of a token.
"""

import torch
from torch import Tensor


class ChosenExperts:
    """Choices of a stage's routers, between a forward pass and take. Used on the step thread; owns
    no memory between steps."""

    def __init__(self) -> None:
        self._chosen: list[Tensor | None] = []
        self.replayed: Tensor | None = None
        """int16 [N, L, K], the experts that tokens of the forward pass must take, -1 for tokens
        that take the best ones; None: all do. Set for one forward pass."""

    def add(self) -> int:
        """Return the index of another layer with experts."""
        self._chosen.append(None)
        return len(self._chosen) - 1

    def note(self, index: int, experts: Tensor) -> None:
        """Note a layer's choice, [N, K]."""
        self._chosen[index] = experts

    def take(self) -> list[Tensor]:
        """Return the choices of the last forward pass, [N, K] for each of L layers: zeros for those
        that a program of few layers has left out, so that it takes as much memory."""
        known = next((each for each in self._chosen if each is not None), None)
        if known is None:
            return []
        taken = [torch.zeros_like(known) if each is None else each for each in self._chosen]
        self._chosen = [None] * len(self._chosen)
        return taken
