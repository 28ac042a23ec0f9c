"""Reads adapters from disk before their use, each on its own thread, so that steps do not wait for
disks."""

import threading
from collections.abc import Callable
from typing import Final

from rpc_schema.errors import CapacityError
from worker_daemon.contracts.source_identity import SourceIdentity
from worker_daemon.lora.adapter_files import AdapterFiles

MAX_PREPARED: Final = 4
"""Bound on adapters being read, or read but not taken yet. Each takes host memory."""

Read = Callable[[str], AdapterFiles]
"""Returns the adapter with a name. Raises ConfigError or CheckpointError if its files are
faulty."""
Changed = Callable[[str, SourceIdentity], bool]
"""Tells whether the files of the adapter with a name have changed since they had this identity."""


class _Reading:
    """One adapter being read."""

    def __init__(self, name: str, version: int, read: Read) -> None:
        self.version = version
        self._name = name
        self._read = read
        self._files: AdapterFiles | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="adapter", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> AdapterFiles:
        """Wait for the adapter, and return it or raise the error."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._files is not None, "the thread has ended"
        return self._files

    def _run(self) -> None:
        try:
            self._files = self._read(self._name)
        except BaseException as error:  # raised where the adapter is asked for
            self._error = error


class AdapterReader:
    """Reads adapters from disk on background threads. Owned by the loaded model; used on the step
    thread."""

    def __init__(self, read: Read, has_changed: Changed) -> None:
        self.has_changed = has_changed
        self._read = read
        self._readings: dict[str, _Reading] = {}

    def prepare(self, name: str, version: int) -> SourceIdentity | None:
        """Begin to read a version of an adapter; return its identity once it is read, until then
        None.

        Raises:
            CapacityError: MAX_PREPARED others are being read.
            ConfigError, CheckpointError: it cannot be used; it is forgotten.
        """
        reading = self._readings.get(name)
        if reading is None or reading.version != version:
            self.drop(name)
            self._make_room(name)
            self._readings[name] = _Reading(name, version, self._read)
            return None
        if not reading.is_done:
            return None
        try:
            return reading.result().identity
        except BaseException:
            del self._readings[name]
            raise

    def take(self, name: str, version: int) -> AdapterFiles:
        """Return an adapter and forget it. If this version was not prepared, read it now. Raises as
        prepare does."""
        reading = self._readings.pop(name, None)
        if reading is None or reading.version != version:
            return self._read(name)
        return reading.result()

    def drop(self, name: str) -> None:
        """Forget the adapters prepared under a name."""
        self._readings.pop(name, None)

    def drop_all(self) -> None:
        """Forget everything that was prepared."""
        self._readings.clear()

    def _make_room(self, name: str) -> None:
        if len(self._readings) < MAX_PREPARED:
            return
        done = next((name for name, each in self._readings.items() if each.is_done), None)
        if done is None:
            raise CapacityError(
                f"{MAX_PREPARED} adapters are being read already",
                field="name",
                value=name,
                fix="wait for one of them",
            )
        del self._readings[done]
