"""The thread that waits for faults of the GPU, and reads its gauges. Owns both; knows no NVML and
decides nothing."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from worker_daemon.device.fault_watch import FaultWatch
from worker_daemon.device.gauges import GaugeReading, Gauges, NoGauges
from worker_daemon.device.gpu_faults import Fault

WAIT_MS: Final = 200
GAUGE_INTERVAL_S: Final = 1.0

OpenFaultWatch = Callable[[], FaultWatch]
OpenGauges = Callable[[], Gauges]

logger = logging.getLogger(__name__)


class DeviceWatch:
    """Made and started by the daemon. Where there is nothing to watch its thread ends at once."""

    def __init__(
        self,
        open_watch: OpenFaultWatch,
        on_fault: Callable[[Fault], None],
        open_gauges: OpenGauges = NoGauges,
    ) -> None:
        """open_watch and open_gauges are called on the thread: NVML takes its time. on_fault hears
        there of each fault."""
        self.load: GaugeReading | None = None
        """What the gauges showed last; any thread may read it."""
        self._open_watch = open_watch
        self._open_gauges = open_gauges
        self._gauged_at = 0.0
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
        watch, gauges = self._open_watch(), self._open_gauges()
        was_on = watch.is_on
        while not self._stopped.is_set() and (watch.is_on or gauges.is_on):
            self._read(gauges)
            if not watch.is_on:
                self._stopped.wait(WAIT_MS / 1000)
            elif (fault := watch.wait(WAIT_MS)) is not None:
                self._on_fault(fault)
            if was_on and not watch.is_on and not self._stopped.is_set():
                was_on = False
                logger.warning("NVML is lost: faults of the GPU are no longer watched for")
        watch.close()

    def _read(self, gauges: Gauges) -> None:
        now = time.monotonic()
        if gauges.is_on and now - self._gauged_at >= GAUGE_INTERVAL_S:
            self._gauged_at = now
            self.load = gauges.read()
