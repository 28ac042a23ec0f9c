"""A group that computes prompts for another one (driver_parts/remote_prefill.py), with a driver and
a thread of its own: a failure here, or the replacement of a daemon, delays no decode there.

    with PrefillThread(open_driver) as prefill:
        driver = Driver(group, scheduler, options=DriverOptions(prefill=prefill))

`open_driver` makes the group, its scheduler and its driver, as AsyncDriver takes it. Both groups
have the same weights, and a host tier each.
"""

import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Final, TypeAlias

from rendezvous.store import StoreServer
from rpc_schema.config import RendezvousAddress
from worker_client.driver import Driver
from worker_client.driver_parts.remote_prefill import (
    Ended,
    Opened,
    PrefillCounts,
    PrefillNews,
)
from worker_client.errors import config_error
from worker_client.group.kv_transfers import TransferLink
from worker_client.inputs.sampling_params import SamplingParams
from worker_client.replicas.prefill_serving import PrefillServing
from worker_client.requests import GenerationRequest

DEFAULT_TIMEOUT_S: Final = 30.0
OPEN_POLL_S: Final = 0.1

OpenDriver: TypeAlias = Callable[[], AbstractContextManager[Driver]]
_Command: TypeAlias = Callable[[PrefillServing], None]


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
        self._grants: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        """Commands that may be carried out while a step runs."""
        self._news: queue.SimpleQueue[PrefillNews] = queue.SimpleQueue()
        self._waited_for: list[PrefillNews] = []
        """News that await_news() has met."""
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

    def compute(
        self,
        number: int,
        request: GenerationRequest,
        names: list[bytes],
        sampling: SamplingParams | None,
    ) -> None:
        """See PrefillGroup."""
        self._commands.put(lambda serving: serving.compute(number, request, names, sampling))

    def grant(self, link: TransferLink, number: int, names: list[bytes]) -> None:
        """See PrefillGroup."""
        self._grants.put(lambda serving: serving.grant(link, number, names))
        self._commands.put(self._take_grant)  # unless it is taken before, in a step

    def drop(self, number: int) -> None:
        """See PrefillGroup."""
        self._commands.put(lambda serving: serving.drop(number))

    def news(self) -> list[PrefillNews]:
        """See PrefillGroup."""
        found, self._waited_for = self._waited_for, []
        with suppress(queue.Empty):
            while True:
                found.append(self._news.get_nowait())
        return found

    def await_news(self, timeout_s: float) -> None:
        """See PrefillGroup."""
        with suppress(queue.Empty):
            self._waited_for.append(self._news.get(timeout=timeout_s))

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
                serving = PrefillServing(driver, self._news.put, self._take_grant)
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

    def _take_grant(self, serving: PrefillServing, wait_s: float = 0.0) -> None:
        """Carry out the next grant, if one is there within so many seconds."""
        with suppress(queue.Empty):
            grant = self._grants.get(timeout=wait_s) if wait_s else self._grants.get_nowait()
            grant(serving)

    def _obey(self, serving: PrefillServing) -> bool:
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
