"""A group that computes prompts for another one (driver_parts/remote_prefill.py), with a driver and
a thread of its own: a failure here, or the replacement of a daemon, delays no decode there.

    with PrefillThread(open_driver) as prefill:
        driver = Driver(group, scheduler, options=DriverOptions(prefill=prefill))

`open_driver` makes the group, its scheduler and its driver, as AsyncDriver takes it. Both groups
have the same weights, and a host tier each.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Final, TypeAlias

from rendezvous.store import StoreServer
from rpc_schema.config import RendezvousAddress
from rpc_schema.errors import WorkerDaemonError
from worker_client.driver import Driver
from worker_client.driver_parts.remote_prefill import (
    Computed,
    Described,
    Ended,
    ExchangingScheduler,
    LinkLeft,
    Opened,
    PrefillCounts,
    PrefillNews,
)
from worker_client.errors import config_error
from worker_client.group.kv_transfers import BlockMove, TransferLink
from worker_client.inputs.sampling_params import SamplingParams
from worker_client.requests import GenerationRequest, RequestOutput
from worker_client.scheduler.block_exchange import HeldContents, HostBlockExchange

DEFAULT_TIMEOUT_S: Final = 30.0
POLL_S: Final = 0.002
"""Pause between questions after moves in progress, of a group that does nothing else."""
LOOK_S: Final = 0.25
"""Interval at which an idle group looks for dead daemons."""
OPEN_POLL_S: Final = 0.1

OpenDriver: TypeAlias = Callable[[], AbstractContextManager[Driver]]
_Command: TypeAlias = Callable[["_Serving"], None]
_LOG = logging.getLogger(__name__)


class PrefillThread:
    """See PrefillGroup. Owns the thread, which runs while the object is entered. Methods belong to
    the thread of the driver that decodes."""

    def __init__(
        self,
        open_driver: OpenDriver,
        *,
        host: str = "127.0.0.1",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        reopen_s: float | None = None,
    ) -> None:
        """host: address of this host that all daemons of both groups reach: they meet there.
        timeout_s: longest time from a request's arrival to its admission, after which the group
        that decodes computes its prompt; and limit on each move. reopen_s: interval at which a
        group that has ended with an error is opened again; None: it is not.

        Raises:
            ClientConfigError: timeout_s is not positive.
        """
        if not timeout_s > 0:
            raise config_error("timeout_s", timeout_s, "no block comes in no time", "30, say")
        self.timeout_s = timeout_s
        self.counts = PrefillCounts()
        self._reopen_s = reopen_s
        self._has_opened = threading.Event()
        self._first_error: Exception | None = None
        self._is_stopping = False
        self._open_driver = open_driver
        self._host = host
        self._meeting: StoreServer | None = None
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        """None: stop."""
        self._news: queue.SimpleQueue[PrefillNews] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="prefill", daemon=True)

    def __enter__(self) -> "PrefillThread":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Abort all prompts, close the group and end the thread."""
        self._is_stopping = True
        self._commands.put(None)
        self._thread.join()
        if self._meeting is not None:
            self._meeting.close()

    @property
    def is_stopping(self) -> bool:
        """True once the thread is to end: an `open_driver` that takes long gives up then."""
        return self._is_stopping

    def wait_opened(self) -> None:
        """Wait until the group is open for the first time. Raises what has kept it from that."""
        while not self._has_opened.wait(OPEN_POLL_S):
            if not self._thread.is_alive():
                break
        if self._first_error is not None:
            raise self._first_error

    def describe(self) -> None:
        """See PrefillGroup."""
        self._commands.put(lambda serving: serving.describe())

    def open_meeting(self, num_members: int) -> RendezvousAddress:
        """See PrefillGroup."""
        if self._meeting is not None:
            self._meeting.close()
        meeting = self._meeting = StoreServer(self._host, num_members)
        return RendezvousAddress(host=meeting.host, port=meeting.port, secret=meeting.secret)

    def open_link(self, link: TransferLink) -> None:
        """See PrefillGroup."""
        self._commands.put(lambda serving: serving.open_link(link))

    def compute(self, number: int, request: GenerationRequest, names: list[bytes]) -> None:
        """See PrefillGroup."""
        self._commands.put(lambda serving: serving.compute(number, request, names))

    def drop(self, number: int) -> None:
        """See PrefillGroup."""
        self._commands.put(lambda serving: serving.drop(number))

    def send(self, link: TransferLink, number: int, move: int, names: list[bytes]) -> None:
        """See PrefillGroup."""
        self._commands.put(lambda serving: serving.send(link, number, move, names))

    def news(self) -> list[PrefillNews]:
        """See PrefillGroup."""
        found = []
        with suppress(queue.Empty):
            while True:
                found.append(self._news.get_nowait())
        return found

    def _run(self) -> None:
        error = self._serve()
        if not self._has_opened.is_set():
            self._first_error = error
            self._has_opened.set()
        elif self._reopen_s is not None:
            while error is not None and self._outlast(self._reopen_s, error):
                error = self._serve()
        self._news.put(Ended(error))

    def _serve(self) -> Exception | None:
        """Open the group and serve until it is to stop; return the error that has ended it."""
        try:
            with self._open_driver() as driver:
                serving = _Serving(driver, self._news.put)
                self._news.put(Opened())
                self._has_opened.set()
                while self._obey(serving):
                    serving.proceed()
                serving.close()
        except Exception as failure:  # the decoding group goes on without this one
            return failure
        return None

    def _outlast(self, seconds: float, error: Exception) -> bool:
        """Tell of an error that has ended the group, and drop the commands of so many seconds, all
        of them for that group. Return False if the thread is to stop."""
        self._news.put(Ended(error))
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self._is_stopping:
            with suppress(queue.Empty):
                self._commands.get(timeout=left)
        return not self._is_stopping

    def _obey(self, serving: "_Serving") -> bool:
        """Carry out the commands that are here; if there is nothing else to do, wait for one.
        Return False if one of them is to stop."""
        wait_s = serving.wait_s
        while True:
            try:
                command = (
                    self._commands.get(timeout=wait_s) if wait_s else self._commands.get_nowait()
                )
            except queue.Empty:
                return True
            if command is None:
                return False
            command(serving)
            wait_s = 0.0


class _Serving:
    """The thread's state: prompts that are computed, and blocks that are kept for the other
    group."""

    def __init__(self, driver: Driver, tell: Callable[[PrefillNews], None]) -> None:
        self._driver = driver
        self._transfers = driver.group.transfers
        self._tell = tell
        scheduler: object = driver.scheduler
        self._scheduler = scheduler if isinstance(scheduler, ExchangingScheduler) else None
        self._exchange: HostBlockExchange | None = None
        if self._scheduler is not None:
            self._exchange = self._scheduler.exchange
        self._computing: dict[str, tuple[int, list[bytes]]] = {}
        """Number and names, by the id of the request that computes a prompt."""
        self._staged: dict[int, list[HeldContents]] = {}
        """Contents that are kept, by prompt."""
        self._moving: dict[int, int] = {}
        """Prompts, by move of the present link."""
        self._link: TransferLink | None = None
        self._must_step = False
        """A step is to be sent, even with nothing to compute: it stores blocks, and tells daemons
        which prompts have ended."""

    @property
    def wait_s(self) -> float:
        """Time for which there is nothing to do but to wait for commands."""
        if self._driver.busy or self._must_step:
            return 0.0
        return POLL_S if self._moving else LOOK_S

    def proceed(self) -> None:
        """Run a step, if there is one, and see to the moves in progress."""
        driver = self._driver
        if driver.busy or self._must_step:
            if not driver.busy:  # with steps in flight it may not be sent yet
                self._must_step = False
            for output in driver.step():
                self._take(output)
        elif not self._moving:
            driver.look()
        if self._moving and self._link is not None:
            self._look(self._link)

    def close(self) -> None:
        """Leave the link."""
        self._leave(self._link)

    def describe(self) -> None:
        shards = None
        if self._exchange is not None:
            with suppress(WorkerDaemonError):  # the next step recovers from it
                shards = self._transfers.get_metadata()
        self._tell(Described(shards))

    def open_link(self, link: TransferLink) -> None:
        self._leave(self._link)
        self._link = link
        try:
            self._transfers.open(link, sends=True)
        except WorkerDaemonError as error:
            _LOG.warning("transfer link %d cannot be opened: %s", link.number, error)
            self._leave(link)

    def compute(self, number: int, request: GenerationRequest, names: list[bytes]) -> None:
        name = f"prefill-{number}"
        alone = replace(
            request,
            id=name,
            max_tokens=1,
            sampling=SamplingParams(temperature=0.0),
            deadline=None,
            index=None,
            output_token_ids=(),
            routed_experts=False,
        )
        self._computing[name] = number, names
        try:
            self._driver.add_request(alone)
        except WorkerDaemonError as error:
            _LOG.warning("a prompt of %s is refused: %s", request.id, error)
            del self._computing[name]
            self._tell(Computed(number, b"", []))

    def drop(self, number: int) -> None:
        for name in [name for name, each in self._computing.items() if each[0] == number]:
            del self._computing[name]
            self._driver.abort_request(name)
            self._must_step = True
        staged = self._staged.pop(number, None)
        if staged is not None and self._exchange is not None:
            self._exchange.release([each.name for each in staged])

    def send(self, link: TransferLink, number: int, move: int, names: list[bytes]) -> None:
        exchange, scheduler = self._exchange, self._scheduler
        staged = {each.name: each for each in self._staged.get(number, ())}
        if (
            exchange is None
            or scheduler is None
            or link is not self._link
            or not all(name in staged for name in names)
        ):
            self.drop(number)
            self._tell(LinkLeft(link.number))
            return
        self._moving[move] = number
        blocks = exchange.blocks_of(staged[name] for name in names)
        try:
            self._transfers.move(link, BlockMove(move, scheduler.prefix_tag, blocks))
        except WorkerDaemonError as error:
            _LOG.warning("blocks cannot be sent: %s", error)
            self._leave(link)

    def _take(self, output: RequestOutput) -> None:
        """Keep the blocks of a prompt that was computed."""
        number, names = self._computing.pop(output.req_id, (0, []))
        if not number or self._exchange is None:
            return
        staged = [] if output.error else self._exchange.stage(names)
        self._staged[number] = staged
        self._must_step = True
        self._tell(Computed(number, self._exchange.tag, [each.name for each in staged]))

    def _look(self, link: TransferLink) -> None:
        try:
            report = self._transfers.poll(link)
        except WorkerDaemonError as error:
            _LOG.warning("transfer link %d: %s", link.number, error)
            self._leave(link)
            return
        if report is None:
            return
        for move in [move for move in self._moving if move <= report.num_ended]:
            self.drop(self._moving.pop(move))
        if report.fault:
            self._leave(link)

    def _leave(self, link: TransferLink | None) -> None:
        """Leave a link, and drop what was being sent over it."""
        if link is None or link is not self._link:
            return
        self._link = None
        with suppress(WorkerDaemonError):
            self._transfers.close()
        for number in self._moving.values():
            self.drop(number)
        self._moving.clear()
        self._tell(LinkLeft(link.number))
