"""A rank's device, and its link to the other ranks: from init_device to the reset that closes both.

Used on the step thread; abort, dump and check are called by the guard thread.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from rpc_schema.config import Rendezvous, RendezvousAddress
from rpc_schema.lifecycle import InitDevice
from worker_daemon.backend import choose_backend
from worker_daemon.device.health import CheckDevice, no_check
from worker_daemon.device.init import open_capture_stream, open_device
from worker_daemon.device.memory import MemorySnapshot, MemorySource
from worker_daemon.device.threads import choose_threads
from worker_daemon.distributed.ep import replica_experts
from worker_daemon.distributed.link import Link, RendezvousPoint, rendezvous_limit_s
from worker_daemon.distributed.parallel_state import ParallelState
from worker_daemon.distributed.tp import tensor_parallel
from worker_daemon.errors import config_error
from worker_daemon.phases import SetPhase
from worker_daemon.worker.memory_ledger import MemoryLedger
from worker_daemon.worker.stage_loading import RankPlace

logger = logging.getLogger(__name__)

_DISPOSAL_S = 0.5
_PEER_GRACE_S = 0.9
"""Time that gloo waits for peers beyond a step's deadline, so that a waiting rank reports within a
second of the deadline."""


@dataclass(frozen=True, slots=True)
class OpenedDevice:
    """The device and link that init_device opens and reset(CREATED) closes; a relink replaces
    link."""

    place: RankPlace
    memory: MemorySource
    baseline: MemorySnapshot
    budget_bytes: int
    ledger: MemoryLedger
    link: Link
    timeout_s: float
    capture_stream: torch.cuda.Stream | None
    """The stream for graph captures; None on the CPU."""

    def synchronize(self) -> None:
        """Wait for the device's queued work."""
        if self.place.device.type == "cuda":
            torch.cuda.synchronize(self.place.device)


@dataclass(slots=True, eq=False)
class RankDevice:
    """A worker's device, open or not. Touches no device before open()."""

    name: str
    _set_phase: SetPhase
    _open_memory: Callable[[torch.device], MemorySource]
    _open_health: Callable[[torch.device], CheckDevice]
    _num_threads: int | None
    """Number of torch's CPU threads, if the user set it."""
    opened_or_none: OpenedDevice | None = field(default=None, init=False)
    check: CheckDevice = field(default=no_check, init=False)
    """The device's health check, for the guard thread."""
    _max_threads: int = field(default_factory=torch.get_num_threads, init=False)
    _newest_link: Link | None = field(default=None, init=False)
    """The newest link, also while it is being opened: abort() reads it."""
    _capture_stream: torch.cuda.Stream | None = field(default=None, init=False)
    """Outlives a reset: cuBLAS keeps a stream's workspace until the process ends."""

    @property
    def opened(self) -> OpenedDevice:
        """The open device."""
        assert self.opened_or_none is not None, "legal after init_device only"
        return self.opened_or_none

    def open(self, message: InitDevice) -> OpenedDevice:
        """Open the device context, then the link, then take the memory baseline, which includes
        both.

        Raises:
            ConfigError: no such device or rank, or a link of another replica.
            CommError: the other ranks did not connect.
            CapacityError: less memory is free than gpu_memory_utilization asks for.
        """
        rendezvous = message.rendezvous
        parallel = ParallelState(
            message.parallel.pipeline_parallel_size,
            message.parallel.tensor_parallel_size,
            rendezvous.rank,
            message.parallel.data_parallel_size,
            message.parallel.data_parallel_lockstep,
        )
        parallel.check_link(rendezvous.link)
        threads = choose_threads(self._num_threads, rendezvous.local_world_size, self._max_threads)
        if self.name == "cpu":
            logger.info("torch computes with %d threads (%s)", *threads)
        device = open_device(self.name, threads)
        timeout_s = message.scheduler.step_deadline_ms / 1000 + _PEER_GRACE_S
        backend = choose_backend(device)
        tp = tensor_parallel(parallel.tp_rank, parallel.tp_size, backend.make_reducer)
        experts = replica_experts(parallel, backend.make_row_exchange)
        place = RankPlace(device, message.parallel, parallel, tp, backend, experts)
        link = self._open_link(rendezvous, place, timeout_s)
        try:
            if self._capture_stream is None:
                self._capture_stream = open_capture_stream(device)
            memory = self._open_memory(device)
            memory.reset_peak()
            baseline = memory.snapshot()
            budget = memory.budget(baseline, message.cache.gpu_memory_utilization)
        except BaseException:
            link.leave()
            raise
        self.opened_or_none = OpenedDevice(
            place=place,
            memory=memory,
            baseline=baseline,
            budget_bytes=budget,
            ledger=MemoryLedger(memory, baseline, budget),
            link=link,
            timeout_s=timeout_s,
            capture_stream=self._capture_stream,
        )
        self.check = self._open_health(device)
        return self.opened_or_none

    def relink(self, rendezvous: Rendezvous) -> Link:
        """Open a new link to the other ranks, after the last one was left.

        Raises:
            CommError: the other ranks did not connect. There is no link then; another relink may
                follow.
        """
        opened = self.opened
        link = self._open_link(rendezvous, opened.place, opened.timeout_s)
        self.opened_or_none = replace(opened, link=link)
        return link

    def leave_link(self) -> threading.Thread | None:
        """Leave the link without contacting any peer. Returns as Link.leave does."""
        return None if self.opened_or_none is None else self.opened_or_none.link.leave()

    def give_up(self) -> threading.Thread | None:
        """Leave the link and drop the device. Returns as Link.leave does."""
        disposal = self.leave_link()
        self.opened_or_none = None
        return disposal

    def close(self) -> None:
        """Leave the link, after settling transfers if the peers respond; process exit frees the
        rest."""
        disposal = self.leave_link()
        if disposal is not None:
            disposal.join(_DISPOSAL_S)

    def abort(self, *, frees_peers: bool) -> bool:
        """Abort waits for other ranks. See Link.abort; False without a link."""
        return self._newest_link is not None and self._newest_link.abort(frees_peers=frees_peers)

    def dump(self) -> bytes:
        """Return the communicators' last operations, as JSON; empty if they are not recorded."""
        opened = self.opened_or_none
        return b"" if opened is None else opened.link.dump()

    def _open_link(self, rendezvous: Rendezvous, place: RankPlace, timeout_s: float) -> Link:
        rendezvous_point = _resolved(rendezvous.place, place.parallel)
        self._set_phase("LINKING", rendezvous_limit_s(timeout_s) + _DISPOSAL_S)
        link = self._newest_link = Link(rendezvous.link, place.device)
        link.open(place.parallel, rendezvous_point, timeout_s)
        try:
            place.tp.bind(link.groups.stage, link.peers)
            if place.experts is not None:
                place.experts.bind(link.groups.experts, link.expert_peers)
        except BaseException:
            link.leave()
            raise
        return link


def _resolved(address: RendezvousAddress | None, parallel: ParallelState) -> RendezvousPoint | None:
    """Resolve the address of the rendezvous. Raises ConfigError if a group of several ranks has
    none."""
    if address is not None:
        return RendezvousPoint(address.host, address.port, address.secret)
    if parallel.group_size > 1:
        problem = "a group of several ranks needs a rendezvous address"
        fix = "use the address that OpenRendezvous returned"
        raise config_error("rendezvous.place", None, problem, fix)
    return None
