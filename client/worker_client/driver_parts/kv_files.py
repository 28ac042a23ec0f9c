"""Files of KV blocks: has the ranks read what a new request may begin with, while it waits."""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

from rpc_schema.errors import WorkerDaemonError
from worker_client.driver_parts.context import DriverContext
from worker_client.driver_parts.interface import DriverPart
from worker_client.group.kv_files import GroupKVFiles
from worker_client.requests import GenerationRequest
from worker_client.scheduler import HoldingScheduler

FETCHES_AT_ONCE: Final = 16
"""Requests whose blocks are asked for between two steps, the first ones."""
FETCH_TIMEOUT_S: Final = 10.0
"""Time after which a request no longer waits for blocks that are still being read."""
_POLL_S: Final = 0.001

_LOG = logging.getLogger(__name__)


@runtime_checkable
class FetchingScheduler(HoldingScheduler, Protocol):
    """A scheduler that keeps blocks in the ranks' files: its steps have KVFileMoves among their
    extensions."""

    @property
    def has_kv_files(self) -> bool:
        """True if it does with these limits."""

    @property
    def prefix_tag(self) -> bytes:
        """See RestoringScheduler."""

    def may_fetch(self, req_id: str) -> bool:
        """Return True if a request could be admitted next: it is not held, nor does it wait for
        another's prompt."""

    def lacking_blocks(self, req_id: str, *, windowed: bool) -> Sequence[Sequence[bytes]]:
        """Return the hashes of the blocks that a waiting request could begin with and that are
        neither in the KV cache nor in host memory, by KV group, in their order: those of groups
        without windows or, once these are noted as far as they are there, what the others need
        besides. If there are any, what is in host memory stays there until release_request."""

    def note_fetched(self, hashes: Sequence[bytes]) -> None:
        """Take note of blocks that all ranks have read; a load of one uses it up."""

    def forget_fetched(self) -> None:
        """Drop them: a rank has lost them."""


@dataclass(slots=True)
class _FetchingRequest:
    """A request that waits for its blocks."""

    request: GenerationRequest
    by_group: Sequence[Sequence[bytes]]
    """Hashes of the blocks that are not known to be there or not."""
    windowed: bool = False
    """True: these are of the groups with windows."""
    since: float = field(default_factory=time.monotonic)


class FetchedBlocksPart(DriverPart):
    """Holds each new request until the ranks have read what it may begin with."""

    def __init__(
        self, context: DriverContext, scheduler: FetchingScheduler, files: GroupKVFiles
    ) -> None:
        self._context = context
        self._scheduler = scheduler
        self._files = files
        self._waiting: dict[str, _FetchingRequest] = {}
        self._has_warned = False

    def queued(self, request: GenerationRequest) -> None:
        if not self._scheduler.may_fetch(request.id):
            return
        by_group = self._scheduler.lacking_blocks(request.id, windowed=False)
        windowed = not any(by_group)
        if windowed:
            by_group = self._scheduler.lacking_blocks(request.id, windowed=True)
        if any(by_group):
            self._scheduler.hold_request(request.id)
            self._waiting[request.id] = _FetchingRequest(request, by_group, windowed)

    def delays(self, req_id: str) -> bool:
        # What is not in files may come from another group.
        return req_id in self._waiting

    def ended(self, req_id: str) -> None:
        if self._waiting.pop(req_id, None) is not None:
            self._scheduler.release_request(req_id)

    def group_replaced(self) -> None:
        self._scheduler.forget_fetched()

    def attend(self) -> None:
        if self._waiting:
            self._proceed()

    def wait(self) -> bool:
        """Wait for reads, as no step is in flight."""
        if not self._waiting:
            return False
        time.sleep(_POLL_S)
        return True

    def _proceed(self) -> None:
        for waiting in list(self._waiting.values())[:FETCHES_AT_ONCE]:
            try:
                is_done = self._fetch(waiting)
            except WorkerDaemonError as error:  # the next step tells of a lost daemon
                is_done = True
                if not self._has_warned:
                    _LOG.warning("files of KV blocks are not used: %s", error)
                self._has_warned = True
            if is_done or time.monotonic() > waiting.since + FETCH_TIMEOUT_S:
                del self._waiting[waiting.request.id]
                self._scheduler.release_request(waiting.request.id)
                self._context.requests.hand_on(waiting.request, after=self)

    def _fetch(self, waiting: _FetchingRequest) -> bool:
        """Ask for the blocks of a request; return True once all ranks have read them."""
        tag, found = self._scheduler.prefix_tag, list[bytes]()
        for hashes in waiting.by_group:
            progress = self._files.fetch(tag, hashes)
            if not progress.is_done:
                return False
            found += hashes[: progress.num_ready]
        self._scheduler.note_fetched(found)
        if waiting.windowed:
            return True
        waiting.windowed = True
        waiting.by_group = self._scheduler.lacking_blocks(waiting.request.id, windowed=True)
        return not any(waiting.by_group)


def kv_files_parts(context: DriverContext) -> Iterator[FetchedBlocksPart]:
    """Yield the part of a driver whose scheduler keeps blocks in files."""
    scheduler: object = context.scheduler
    files: GroupKVFiles | None = getattr(context.group, "kv_files", None)
    if isinstance(scheduler, FetchingScheduler) and scheduler.has_kv_files and files is not None:
        yield FetchedBlocksPart(context, scheduler, files)
