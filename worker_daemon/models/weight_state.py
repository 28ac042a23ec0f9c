"""Tracks whether this rank's weights are complete, by checkpoint name.

Code that writes, discards or restores weights reports it here; code that needs them asks here. Used
on the step thread; `report` is a value that any thread may read.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from rpc_schema.errors import StateError
from worker_daemon.contracts.source_identity import SourceIdentity
from worker_daemon.errors import config_error

State = Literal["whole", "updating", "dirty", "discarded"]
MAX_NAMES = 16
"""Names in a report."""


@dataclass(frozen=True, slots=True)
class WeightReport:
    """A snapshot of the weights' state."""

    state: State
    num_tensors: int
    version: int
    """Number of the weights' version when they were last complete."""
    num_dirty: int
    """Tensors written since the weights were last complete."""
    dirty: tuple[str, ...]
    """Names of the first MAX_NAMES dirty tensors."""
    num_missing: int
    """Tensors still to be written before the weights are complete again."""
    missing: tuple[str, ...]
    cause: str
    identity: SourceIdentity
    """Identity of the weights when they were last complete."""


class WeightState:
    """The state of the weights, complete once a load has ended. Belongs to the loaded model."""

    def __init__(self, names: Iterable[str], identity: SourceIdentity, version: int) -> None:
        """identity: of the files that they were read from; version: their number."""
        self.version = version
        """Number of the weights' version when they were last complete."""
        self.identity = identity
        """Identity of the weights when they were last complete; without place and stamps once a
        trainer has sent some."""
        self._names = frozenset(names)
        self._dirty: set[str] = set()
        self._missing: set[str] = set()
        self._is_complete = False
        """True if the open or failed update replaces every tensor."""
        self.state: State = "whole"
        self.is_whole = True
        self.report = self._report("")

    def hold(self, names: Iterable[str], *, instead_of: Iterable[str]) -> None:
        """Record that this rank has these tensors from now on instead of others. The weights are
        complete."""
        self._names = self._names.difference(instead_of).union(names)
        self.report = self._report("")

    def next_version(self, version: int | None) -> int:
        """Return the number of the version that an update makes, `version` if it is named.

        Raises:
            ConfigError: it is not larger than the present one.
        """
        if version is None:
            return self.version + 1
        if version <= self.version:
            problem = f"the weights have version {self.version} already"
            fix = f"name a larger one, {self.version + 1} for example, or none"
            raise config_error("version", version, problem, fix)
        return version

    def begin(self, *, partial: bool) -> None:
        """Open an update and drop one that is open. Unless it is partial, every tensor must be
        written before it can end. A partial update must write the tensors that are incomplete at
        its start."""
        self._close_open()
        self._is_complete = not partial
        if not partial:
            self._missing = set(self._names)
        self._move("updating")

    def writing(self, names: Iterable[str]) -> None:
        """Record that these tensors are being overwritten and hold neither old nor new values."""
        held = self._names.intersection(names)
        self._dirty |= held
        self._missing |= held

    def written(self, names: Iterable[str]) -> None:
        """Record that these tensors are complete."""
        self._missing.difference_update(names)

    def changing(self, names: Iterable[str]) -> frozenset[str]:
        """Record that single elements of these tensors are being overwritten. Return those that are
        complete afterwards, for written(): the others were not before."""
        whole = self._names.intersection(names) - self._missing
        self.writing(names)
        return whole

    def finish(self, identity: SourceIdentity, version: int) -> None:
        """Close the update: the weights are complete. identity: of the weights that the update has
        brought; version: their number, of next_version.

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
        self.identity, self.version = identity, version
        self._move("whole")

    def interrupt(self, cause: str) -> None:
        """Record that the open update failed: the weights are dirty until later updates or a reload
        have written every missing tensor."""
        if self.state == "updating":
            self._close_open()
            self._move("dirty", cause)

    def discard(self, cause: str, kept: Collection[str] = ()) -> None:
        """Record that the memory no longer holds weights, except for the tensors kept. Those count
        as missing if they were incomplete."""
        self._missing = (self._missing & set(kept)) | self._names.difference(kept)
        self._dirty = set()
        self._is_complete = True
        self._move("discarded", cause)

    def require_whole(self, what: str) -> None:
        """Raise StateError unless the weights are complete; `what` needs them."""
        if not self.is_whole:
            report = self.report
            cause = f" ({report.cause})" if report.cause else ""
            raise StateError(
                f"{what} needs complete weights, but they are {report.state}{cause}: "
                f"{len(self._dirty)} tensors are new, {len(self._missing)} of "
                f"{report.num_tensors} missing",
                fix="finish a complete weight update, or reload_weights",
            )

    def _close_open(self) -> None:
        """Close the open update. The next one must write the tensors that this one touched, or all
        of them if this one was to replace all."""
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
            version=self.version,
            num_dirty=len(self._dirty),
            dirty=_first(self._dirty),
            num_missing=len(self._missing),
            missing=_first(self._missing),
            cause=cause,
            identity=self.identity,
        )


def _first(names: Collection[str]) -> tuple[str, ...]:
    return tuple(sorted(names)[:MAX_NAMES])
