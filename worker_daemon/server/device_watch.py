"""The thread that waits for faults of the GPU. Owns the watch; knows no NVML and decides
nothing."""

import logging
import threading
from collections.abc import Callable
from typing import Final

from worker_daemon.device.gpu_faults import Fault, FaultWatch

WAIT_MS: Final = 200

OpenFaultWatch = Callable[[], FaultWatch]

logger = logging.getLogger(__name__)


class DeviceWatch:
    """Made and started by the daemon. Where there is nothing to watch its thread ends at once."""

    def __init__(self, open_watch: OpenFaultWatch, on_fault: Callable[[Fault], None]) -> None:
        """open_watch is called on the thread: NVML takes its time. on_fault hears there of each
        fault."""
        self._open_watch = open_watch
        self._on_fault = on_fault
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="device watch", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end."""
        self._stopped.set()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end; tell whether it came."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        watch = self._open_watch()
        was_on = watch.is_on
        while self._goes_on(watch):
            fault = watch.wait(WAIT_MS)
            if fault is not None:
                self._on_fault(fault)
        if was_on and not self._stopped.is_set():
            logger.warning("NVML is lost: faults of the GPU are no longer watched for")
        watch.close()

    def _goes_on(self, watch: FaultWatch) -> bool:
        return watch.is_on and not self._stopped.is_set()
