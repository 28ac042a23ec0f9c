"""Uploads of a driver's requests. They are sent between steps, before their requests are admitted,
and dropped once no request needs them."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from rpc_schema.errors import (
    CapacityError,
    ConfigError,
    WorkerError,
)
from rpc_schema.extensions import extension_of
from rpc_schema.prompt_embeds import PromptEmbeds
from worker_client.driver_parts.context import DriverContext
from worker_client.driver_parts.interface import DriverPart, StepInFlight
from worker_client.errors import (
    DeadlineExceeded,
    RequestError,
    WorkerDied,
)
from worker_client.group.adoption import AdoptedRequest
from worker_client.group.uploads import UploadTask
from worker_client.inputs.host_tensor import HostTensor
from worker_client.requests import GenerationRequest, failed_request
from worker_client.scheduler import HoldingScheduler
from worker_client.worker_group import WorkerGroup

CHUNKS_AT_ONCE = 4
"""Chunks of half a MiB that are sent between two steps."""
EMBEDS_LOST = "the daemons have lost the embeddings of its prompt; fix: send the request again"


class UploadProgress(NamedTuple):
    """Requests that need not wait any longer."""

    ready: list[str]
    refused: list[tuple[str, str]]
    """Requests whose uploads the daemons refuse, and why."""


class RequestUploads:
    """Uploads that unfinished requests need. Owned by a driver, for one group."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._needs: dict[str, bytes] = {}
        """Content hash that each request needs."""
        self._tensors: dict[bytes, HostTensor] = {}
        """Tensors that can be sent again; those of adopted requests may be missing."""
        self._present: set[bytes] = set()
        """Hashes that all ranks of the first stage have."""
        self._queue: deque[str] = deque()
        """Held requests, in the order in which their tensors are sent."""
        self._task: UploadTask | None = None
        """The upload of the first request in the queue."""
        self._lacks_room = False
        self._untold = UploadProgress([], [])
        """Progress that proceed() has not returned yet, since an error came after it."""
        self.to_drop: deque[tuple[int, bytes]] = deque()
        """Hashes that no request needs, each with the number of steps sent by then: steps in flight
        may still read the tensor."""

    @property
    def can_proceed(self) -> bool:
        """True if proceed() sends something of a held request's tensor, or returns progress."""
        return self._can_send or any(self._untold)

    @property
    def _can_send(self) -> bool:
        return bool(self._queue) and not self._lacks_room

    def add(self, req_id: str, tensor: HostTensor) -> None:
        """Queue a tensor for a held request."""
        self._needs[req_id] = tensor.content_hash
        self._tensors[tensor.content_hash] = tensor
        self._queue.append(req_id)

    def claim(self, needs: Mapping[str, bytes], tensors: Iterable[HostTensor]) -> set[str]:
        """Take over the uploads that adopted requests need. Send missing ones again if they are
        among `tensors`. Return the requests whose upload is still missing. Waits, so call it before
        the first step."""
        self._tensors |= {each.content_hash: each for each in tensors}
        hashes = list(dict.fromkeys(needs.values()))
        missing = self._send_missing(hashes)
        lacking = {req_id for req_id, name in needs.items() if name in missing}
        self._needs |= {r: name for r, name in needs.items() if r not in lacking}
        self._present |= {*hashes} - missing
        unused = self._tensors.keys() - self._needs.values()
        self._tensors = {name: t for name, t in self._tensors.items() if name not in unused}
        return lacking

    def proceed(self) -> UploadProgress:
        """Send a few chunks, and wait for their replies. Raises as UploadTask.proceed does, except
        for errors of a single request; the next call then returns what is known by now."""
        progress = self._untold
        for _ in range(CHUNKS_AT_ONCE):
            if not self._can_send:
                break
            req_id = self._queue[0]
            try:
                is_complete = self._send_chunk(self._needs[req_id])
            except (CapacityError, ConfigError) as error:
                self._task = None
                self._lacks_room = isinstance(error, CapacityError) and self._others_end()
                if not self._lacks_room:
                    progress.refused.append((req_id, f"its upload is refused: {error}"))
                    self._queue.popleft()
                continue
            if is_complete:
                progress.ready.append(req_id)
                self._queue.popleft()
        self._untold = UploadProgress([], [])
        return progress

    def end(self, req_id: str, num_sent: int) -> None:
        """Note that a request has ended. num_sent: the number of steps sent by then."""
        name = self._needs.pop(req_id, None)
        if name is None:
            return
        if req_id in self._queue:
            if self._queue[0] == req_id:
                self._task = None
            self._queue.remove(req_id)
        if any(self._untold):
            ready, refused = self._untold
            others = [entry for entry in refused if entry[0] != req_id]
            self._untold = UploadProgress([other for other in ready if other != req_id], others)
        if name not in self._needs.values():
            self._tensors.pop(name, None)
            self.to_drop.append((num_sent, name))

    def drop_unused(self, num_done: int) -> None:
        """Drop the uploads of ended requests that no step can read any more. num_done: the number
        of steps that are done."""
        unused = []
        while self.to_drop and self.to_drop[0][0] <= num_done:
            name = self.to_drop.popleft()[1]
            if name not in self._needs.values():
                unused.append(name)
        if unused:
            self._present.difference_update(unused)
            self._lacks_room = False
            # Those that are not dropped here end with the lease.
            with suppress(WorkerError, DeadlineExceeded, WorkerDied):
                self._group.uploads.drop(unused, self._group.first_stage_ranks)

    def restart(self) -> set[str]:
        """Send everything again that running requests need, after the ranks have lost all uploads.
        Return the requests whose tensors the driver does not have. Waits."""
        self._present.clear()
        self.to_drop.clear()
        self._task = None
        self._lacks_room = False
        if not self._needs:
            return set()
        running = {r: name for r, name in self._needs.items() if r not in self._queue}
        missing = self._send_missing(list(dict.fromkeys(running.values())))
        self._present |= {*running.values()} - missing
        return {req_id for req_id, name in running.items() if name in missing}

    def _send_missing(self, hashes: Sequence[bytes]) -> set[bytes]:
        """Send the tensors that the driver has; return the hashes that ranks then still lack."""
        ranks = self._group.first_stage_ranks
        here = [self._tensors[name] for name in hashes if name in self._tensors]
        if here:
            task = self._group.uploads.begin(here, ranks)
            while task.proceed():
                pass
        found = self._group.uploads.find(hashes, ranks) if hashes else []
        return {name for name, is_there in zip(hashes, found, strict=True) if not is_there}

    def _send_chunk(self, name: bytes) -> bool:
        """Send a chunk of a tensor; return True if it is complete."""
        if name in self._present:
            return True
        if self._task is None:
            ranks = self._group.first_stage_ranks
            self._task = self._group.uploads.begin([self._tensors[name]], ranks)
        if self._task.proceed():
            return False
        self._task = None
        self._present.add(name)
        return True

    def _others_end(self) -> bool:
        """Return True if room will become free, because other uploads are there that will end."""
        return bool(self._present or self.to_drop)


class UploadsPart(DriverPart):
    """Uploads what a driver's requests need, while they wait in the scheduler."""

    def __init__(self, context: DriverContext) -> None:
        self._context = context
        self._uploads = RequestUploads(context.group)
        self._must_restart = False
        """The ranks have lost all uploads."""

    def check(self, request: GenerationRequest) -> None:
        tensor = request.prompt_embeds
        if tensor is not None and not isinstance(self._context.scheduler, HoldingScheduler):
            raise RequestError(
                "the scheduler cannot hold a request until its embeddings are uploaded",
                field="prompt_embeds",
                value=list(tensor.shape),
                fix="add hold_request and release_request (HoldingScheduler), or upload them and "
                "give PromptEmbeds in features",
            )
        named = [name for each in request.features for name in each.uploads]
        if named:
            self._check_present(named)

    def _check_present(self, named: Sequence[bytes]) -> None:
        """Steps with a missing upload would fail, and with them those of all requests."""
        group: WorkerGroup = self._context.group
        found = group.uploads.find(named, group.first_stage_ranks)
        for name, is_there in zip(named, found, strict=True):
            if not is_there:
                raise RequestError(
                    "the daemons have no such upload",
                    field="features",
                    value=name.hex(),
                    fix="upload it first (group.uploads.put), and keep it until the request ends",
                )

    def queued(self, request: GenerationRequest) -> None:
        """Hold a request until its tensor is uploaded."""
        tensor, scheduler = request.prompt_embeds, self._context.scheduler
        if isinstance(tensor, HostTensor) and isinstance(scheduler, HoldingScheduler):
            scheduler.hold_request(request.id)
            self._uploads.add(request.id, tensor)

    def ended(self, req_id: str) -> None:
        self._uploads.end(req_id, self._context.steps.num_sent)

    def adopt(
        self, requests: Sequence[AdoptedRequest], tensors: Iterable[HostTensor]
    ) -> Mapping[str, str]:
        needs = {
            request.req_id: embeds.content_hash
            for request in requests
            if (embeds := extension_of(request.extensions, PromptEmbeds)) is not None
        }
        lost = self._uploads.claim(needs, tensors) if needs else set()
        return dict.fromkeys(sorted(lost), EMBEDS_LOST)

    def attend(self) -> None:
        if self._uploads.to_drop:
            self._uploads.drop_unused(self._context.steps.num_done)

    def settled(self, flight: StepInFlight) -> None:
        if self._uploads.to_drop:
            self.attend()

    def prepare(self) -> None:
        """Send again what requests need. They have lost their rows too."""
        while self._must_restart:
            try:
                lost = self._uploads.restart()
            except WorkerDied as died:
                self._context.replace(died)
                continue
            self._must_restart = False
            for req_id in lost:
                self._context.requests.stop(failed_request(req_id, EMBEDS_LOST))

    def group_replaced(self) -> None:
        self._must_restart = True

    def work_in_flight(self) -> bool:
        """Send some chunks for held requests."""
        if not self._uploads.can_proceed:
            return False
        try:
            progress = self._uploads.proceed()
        except WorkerDied as died:
            self._context.replace(died)
            return True
        for req_id, reason in progress.refused:
            self._context.requests.stop(failed_request(req_id, reason))
        for req_id in progress.ready:
            assert isinstance(self._context.scheduler, HoldingScheduler), "it held the request"
            self._context.scheduler.release_request(req_id)
        return True

    def wait(self) -> bool:
        return self._uploads.can_proceed
