"""Injects each fault of a plan into the processes of a soak."""

import os
import random
import signal
import subprocess
from collections.abc import Callable

from rpc_schema import step
from rpc_schema.codec import encode_step
from rpc_schema.config import ParallelConfig
from rpc_schema.errors import LeaseHeldError, WorkerDaemonError
from tests.support.faulty_daemon import Fault as InjectedFault
from tests.support.secured import BareSockets
from tests.support.soak.plan import Fault, FaultKind
from tests.support.soak.scene import Scene
from worker_client.wire.endpoint import parse_endpoint
from worker_client.worker_group import WorkerGroup

STRANGE_MESSAGES = 60


class Injector:
    """Injects faults into a scene, and describes them."""

    def __init__(self, scene: Scene, parallel: ParallelConfig) -> None:
        self._scene = scene
        self._parallel = parallel
        self._ways: dict[FaultKind, Callable[[Fault], str]] = {
            "kill_rank": self._kill_rank,
            "kill_all_ranks": self._kill_all_ranks,
            "die_in_step": lambda fault: self._arm(fault, "kill"),
            "stop_rank_briefly": self._stop_rank,
            "stop_rank_beyond_fence": self._stop_rank,
            "raise_in_step": lambda fault: self._arm(fault, "raise"),
            "hang_in_step": lambda fault: self._arm(fault, "hang"),
            "lose_device": lambda fault: self._arm(fault, "lost"),
            "kill_driver": self._kill_driver,
            "driver_leaves": self._let_driver_leave,
            "stop_driver_briefly": self._stop_driver,
            "stop_driver_beyond_lease": self._stop_driver,
            "replace_stopped_driver": self._replace_stopped_driver,
            "hold_driver": self._hold_driver,
            "sleep_and_wake": self._sleep,
            "strange_frames": self._send_strange_frames,
            "second_driver": self._attach_second_driver,
        }

    def strike(self, fault: Fault) -> str:
        """Inject a fault; return its description."""
        return self._ways[fault.kind](fault)

    def _kill_rank(self, fault: Fault) -> str:
        self._scene.daemons[fault.rank].process.kill()
        return f"kill -9 of rank {fault.rank}"

    def _kill_all_ranks(self, fault: Fault) -> str:
        for daemon in self._scene.daemons:
            daemon.process.kill()
        return "kill -9 of all ranks"

    def _stop_rank(self, fault: Fault) -> str:
        process = self._scene.daemons[fault.rank].process
        process.send_signal(signal.SIGSTOP)
        self._scene.later(fault.seconds, lambda: process.send_signal(signal.SIGCONT))
        return f"rank {fault.rank} stopped for {fault.seconds:.1f} s"

    def _arm(self, fault: Fault, what: str) -> str:
        where = fault.where
        if where == "argmax_tokens" and fault.rank != len(self._scene.daemons) - 1:
            where = "forward"  # only the last stage samples tokens
        self._scene.daemons[fault.rank].faults.put(
            InjectedFault(where, what, fault.calls_before, fault.seconds, fault.times)  # type: ignore[arg-type]
        )
        return f"rank {fault.rank}: {what} in {where}, after {fault.calls_before} calls"

    def _kill_driver(self, fault: Fault) -> str:
        driver = self._driver()
        if driver is None:
            return "no driver to kill"
        driver.kill()
        return "kill -9 of the driver"

    def _let_driver_leave(self, fault: Fault) -> str:
        self._tell("leave")
        return "the driver leaves in order"

    def _stop_driver(self, fault: Fault) -> str:
        driver = self._driver()
        if driver is None:
            return "no driver to stop"
        driver.send_signal(signal.SIGSTOP)
        self._scene.later(fault.seconds, lambda: driver.send_signal(signal.SIGCONT))
        return f"the driver stopped for {fault.seconds:.1f} s"

    def _replace_stopped_driver(self, fault: Fault) -> str:
        done = self._stop_driver(fault)
        if self._driver() is not None:
            self._scene.start_driver()
        return f"{done}, another one started"

    def _hold_driver(self, fault: Fault) -> str:
        self._tell(f"hold {fault.seconds:.2f}")
        return f"the driver runs no Python for {fault.seconds:.1f} s"

    def _sleep(self, fault: Fault) -> str:
        self._tell(f"sleep {min(fault.seconds, 1.0):.2f}")
        return f"weights and KV cache asleep for {fault.seconds:.1f} s"

    def _send_strange_frames(self, fault: Fault) -> str:
        """Send malformed messages, and steps of past and unknown epochs."""
        source = random.Random(fault.calls_before)
        address = parse_endpoint(self._scene.daemons[fault.rank].endpoint).step
        sockets = BareSockets()
        for _ in range(4):
            dealer = sockets.open(address, None, "")
            for _ in range(STRANGE_MESSAGES // 4):
                dealer.send_multipart(_strange_message(source))
        self._scene.later(1.0, sockets.close)
        return f"{STRANGE_MESSAGES} strange messages to rank {fault.rank}"

    def _attach_second_driver(self, fault: Fault) -> str:
        endpoints = [daemon.endpoint for daemon in self._scene.daemons]
        try:
            with WorkerGroup(endpoints, self._parallel) as group:
                group.attach(1.0, wait_for_lease_s=0.0, keep_requests=True)
        except LeaseHeldError:
            return "a second driver was refused"
        except WorkerDaemonError as error:
            return f"a second driver gave up: {type(error).__name__}"
        return "a second driver came between"

    def _driver(self) -> "subprocess.Popen[bytes] | None":
        return self._scene.driver

    def _tell(self, command: str) -> None:
        if self._scene.driver is not None:
            self._scene.tell_driver(command)


def _strange_message(source: random.Random) -> list[bytes]:
    if source.random() < 0.3:
        return [source.randbytes(source.randrange(1, 300)) for _ in range(source.randint(1, 3))]
    message = step.ExecuteModel(
        epoch=source.choice((0, 1, 1 << 40)),
        link=source.randrange(3),
        seq=source.randrange(1 << 16),
        total_num_scheduled_tokens=1,
        scheduled=os.urandom(4),
    )
    return [bytes(frame) for frame in encode_step(message)]
