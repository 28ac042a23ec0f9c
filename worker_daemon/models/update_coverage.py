"""The pieces of an update's tensors: boxes that must not overlap, and in the end leave no gap."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice, takewhile
from typing import NamedTuple

from worker_daemon.errors import config_error

_MAX_NAMED = 8


class Box(NamedTuple):
    """A region of a tensor: indices of its first element, and one past its last, per dimension."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def at(cls, origin: Sequence[int], shape: Sequence[int]) -> "Box":
        """Return the box of a shape at an origin."""
        return cls(tuple(origin), tuple(a + b for a, b in zip(origin, shape, strict=True)))

    @property
    def size(self) -> int:
        """Number of its elements."""
        return math.prod(b - a for a, b in zip(self.start, self.stop, strict=True))

    def meets(self, other: "Box") -> bool:
        """Return True if both have an element in common."""
        bounds = zip(self.start, self.stop, other.start, other.stop, strict=True)
        return all(max(a, c) < min(b, d) for a, b, c, d in bounds)

    def __str__(self) -> str:
        bounds = zip(self.start, self.stop, strict=True)
        return f"[{', '.join(f'{start}:{stop}' for start, stop in bounds)}]"


class Coverage:
    """The boxes of one update's tensors that have arrived, of those that come in pieces."""

    def __init__(self) -> None:
        self._boxes: dict[str, list[Box]] = {}
        self._left: dict[str, int] = {}
        """Elements of a tensor that have not arrived."""

    @property
    def incomplete(self) -> Collection[str]:
        """Names of tensors of which pieces are missing."""
        return [name for name, left in self._left.items() if left]

    def check(self, pieces: Mapping[str, Iterable[Box]]) -> None:
        """Check the pieces of a request before they arrive.

        Raises:
            ConfigError: two of a tensor overlap, in the request or with an earlier one.
        """
        for name, boxes in pieces.items():
            ordered = sorted(box for box in [*self._boxes.get(name, ()), *boxes] if box.size)
            for index, box in enumerate(ordered):
                after = islice(ordered, index + 1, None)
                near = takewhile(partial(_begins_before, box.stop[0]), after)
                other = next(filter(box.meets, near), None)
                if other is not None:
                    raise config_error(
                        "origins", str(other), f"a piece of {name} overlaps {box}", "send each once"
                    )

    def add(self, name: str, box: Box, size: int) -> bool:
        """Record a piece of a tensor of `size` elements; return True if it was the last."""
        self._boxes.setdefault(name, []).append(box)
        self._left[name] = self._left.get(name, size) - box.size
        return not self._left[name]

    def replace(self, name: str) -> None:
        """Forget the pieces of a tensor: it has arrived whole."""
        self._boxes.pop(name, None)
        self._left.pop(name, None)

    def check_complete(self) -> None:
        """Check that no tensor has gaps. Raises ConfigError, which names the first of them."""
        names = sorted(self.incomplete)
        if names:
            counts = [f"{name} ({self._left[name]} elements)" for name in names[:_MAX_NAMED]]
            problem = f"pieces of {len(names)} tensors are missing"
            raise config_error("names", counts, problem, "send them with update_weights")


def _begins_before(row: int, box: Box) -> bool:
    return box.start[0] < row
