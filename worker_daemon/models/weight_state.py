"""Whether this rank's weights are whole: the one owner of that fact, by checkpoint name. Whoever
writes, discards or restores weights tells it; whoever needs them asks it. Knows no tensor.

Used on the step thread; `report` is a value that any thread may read.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from worker_daemon.errors import StateError

State = Literal["whole", "updating", "dirty", "discarded"]
MAX_NAMES = 16
"""In a report."""


@dataclass(frozen=True, slots=True)
class WeightReport:
    """What is known of the weights at one moment."""

    state: State
    num_tensors: int
    num_updates: int
    """Finished since the model was loaded."""
    num_dirty: int
    """Written since the weights were last whole."""
    dirty: tuple[str, ...]
    """The first MAX_NAMES of them."""
    num_missing: int
    """To be written before they are whole again."""
    missing: tuple[str, ...]
    cause: str


class WeightState:
    """Whole from the end of a load on. Belongs to the loaded model."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._dirty: set[str] = set()
        self._missing: set[str] = set()
        self._num_updates = 0
        self._is_complete = False
        """Whether the update that is open, or failed, replaces every tensor."""
        self.state: State = "whole"
        self.is_whole = True
        self.report = self._report("")

    def begin(self, *, partial: bool) -> None:
        """Open an update, in place of one that is open. Unless it is partial, every tensor must be
        written before it can end; a partial one must write what is not whole as it begins."""
        self._close_open()
        self._is_complete = not partial
        if not partial:
            self._missing = set(self._names)
        self._move("updating")

    def writing(self, names: Iterable[str]) -> None:
        """These are being overwritten: what they hold is neither old nor new."""
        held = self._names.intersection(names)
        self._dirty |= held
        self._missing |= held

    def written(self, names: Iterable[str]) -> None:
        """These are complete."""
        self._missing.difference_update(names)

    def finish(self) -> int:
        """Close the update: the weights are whole. Returns the number of updates so far.

        Raises:
            StateError: tensors are missing; the update stays open.
        """
        if self._missing:
            names, count = _first(self._missing), len(self._missing)
            raise StateError(
                f"{count} tensors of this rank have not been written: {', '.join(names)}",
                fix="send them, then finish again",
            )
        self._dirty.clear()
        self._num_updates += 1
        self._move("whole")
        return self._num_updates

    def interrupt(self, cause: str) -> None:
        """The open update has failed: the weights are dirty until a complete one, or a reload."""
        if self.state == "updating":
            self._close_open()
            self._move("dirty", cause)

    def discard(self, cause: str) -> None:
        """The memory holds no weights any more."""
        self._dirty = set()
        self._missing = set(self._names)
        self._is_complete = True
        self._move("discarded", cause)

    def require_whole(self, what: str) -> None:
        """Raises StateError unless the weights are whole; `what` needs them."""
        if not self.is_whole:
            report = self.report
            cause = f" ({report.cause})" if report.cause else ""
            raise StateError(
                f"{what} needs whole weights, and they are {report.state}{cause}: "
                f"{len(self._dirty)} tensors are new, {len(self._missing)} of "
                f"{report.num_tensors} missing",
                fix="finish a complete weight update, or reload_weights",
            )

    def _close_open(self) -> None:
        """What an unfinished update has touched must be written by the one that mends it."""
        if self.state == "updating":
            self._missing |= self._names if self._is_complete else self._dirty

    def _move(self, state: State, cause: str = "") -> None:
        self.state = state
        self.is_whole = state == "whole"
        self.report = self._report(cause)

    def publish(self) -> None:
        """Bring the report up to date while an update is open."""
        self.report = self._report(self.report.cause)

    def _report(self, cause: str) -> WeightReport:
        return WeightReport(
            state=self.state,
            num_tensors=len(self._names),
            num_updates=self._num_updates,
            num_dirty=len(self._dirty),
            dirty=_first(self._dirty),
            num_missing=len(self._missing),
            missing=_first(self._missing),
            cause=cause,
        )


def _first(names: Collection[str]) -> tuple[str, ...]:
    return tuple(sorted(names)[:MAX_NAMES])
