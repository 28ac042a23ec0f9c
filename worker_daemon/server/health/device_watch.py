"""The device watch thread: waits for faults of the GPU and reads its gauges."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from worker_daemon.device.fault_watch import FaultWatch
from worker_daemon.device.gauges import GaugeReading, Gauges
from worker_daemon.device.gpu_faults import Fault
from worker_daemon.server.server_thread import ServerThread

WAIT_MS: Final = 200
GAUGE_INTERVAL_S: Final = 1.0

OpenFaultWatch = Callable[[], FaultWatch | None]
OpenGauges = Callable[[], Gauges | None]

logger = logging.getLogger(__name__)


class DeviceWatch:
    """Made and started by the daemon. Its thread ends at once if there is nothing to watch."""

    def __init__(
        self, open_watch: OpenFaultWatch, on_fault: Callable[[Fault], None], open_gauges: OpenGauges
    ) -> None:
        """open_watch and open_gauges are called on the thread, because opening NVML is slow.
        on_fault(fault) is called there for each fault."""
        self.load: GaugeReading | None = None
        """The last gauge reading; any thread may read it."""
        self.xids: Counter[int] = Counter()
        """Faults by XID since the start (0: without one); any thread may copy it."""
        self._open_watch = open_watch
        self._open_gauges = open_gauges
        self._gauged_at = 0.0
        self._on_fault = on_fault
        self._stopped = threading.Event()
        self.thread = ServerThread("device watch", self._run)

    def stop(self) -> None:
        """Ask the thread to end."""
        self._stopped.set()

    def _run(self) -> None:
        watch, gauges = self._open_watch(), self._open_gauges()
        while not self._stopped.is_set() and (watch is not None or gauges is not None):
            if gauges is not None:
                self._read(gauges)
            if watch is None:
                self._stopped.wait(WAIT_MS / 1000)
                continue
            if (fault := watch.wait(WAIT_MS)) is not None:
                self.xids[fault.xid] += 1
                self._on_fault(fault)
            if not watch.is_on:
                watch.close()
                watch = None
                logger.warning("NVML is lost: GPU faults are no longer watched")
        if watch is not None:
            watch.close()

    def _read(self, gauges: Gauges) -> None:
        now = time.monotonic()
        if now - self._gauged_at >= GAUGE_INTERVAL_S:
            self._gauged_at = now
            self.load = gauges.read()
