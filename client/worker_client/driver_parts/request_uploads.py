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
from rpc_schema.extensions import RequestExtension, extension_of
from rpc_schema.prompt_embeds import PromptEmbeds
from rpc_schema.routed_experts import ReplayExperts
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
UPLOADS_LOST = "the daemons have lost its embeddings or experts; fix: send the request again"


class Needed(NamedTuple):
    """An upload that a request needs."""

    content_hash: bytes
    is_everywhere: bool = False
    """Ranks of all stages need it, not those of the first one alone."""


def needed_by(extensions: Sequence[RequestExtension]) -> tuple[Needed, ...]:
    """Return the uploads that a driver's own features need for a request with these extensions."""
    embeds = extension_of(extensions, PromptEmbeds)
    replay = extension_of(extensions, ReplayExperts)
    return (
        *(() if embeds is None else (Needed(embeds.content_hash),)),
        *(() if replay is None else (Needed(replay.content_hash, is_everywhere=True),)),
    )


class UploadProgress(NamedTuple):
    """Requests that need not wait any longer."""

    ready: list[str]
    refused: list[tuple[str, str]]
    """Requests whose uploads the daemons refuse, and why."""


class RequestUploads:
    """Uploads that unfinished requests need. Owned by a driver, for one group."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._needs: dict[str, tuple[Needed, ...]] = {}
        """Needs of each request, one at least."""
        self._tensors: dict[bytes, HostTensor] = {}
        """All of these, to be sent again."""
        self._present: set[Needed] = set()
        """Those that their ranks have."""
        self._queue: deque[str] = deque()
        """Held requests, in the order in which their tensors are sent."""
        self._task: UploadTask | None = None
        """The upload of the first request in the queue."""
        self._lacks_room = False
        self._untold = UploadProgress([], [])
        """Progress that proceed() has not returned yet, since an error came after it."""
        self.to_drop: deque[tuple[int, Needed]] = deque()
        """Those that no request needs any more, each with the number of steps sent by then: steps
        in flight may still read the tensor."""

    @property
    def can_proceed(self) -> bool:
        """True if proceed() sends something of a held request's tensor, or returns progress."""
        return self._can_send or any(self._untold)

    @property
    def _can_send(self) -> bool:
        return bool(self._queue) and not self._lacks_room

    def add(self, req_id: str, tensors: Mapping[Needed, HostTensor]) -> None:
        """Queue the tensors that a held request needs, one at least."""
        self._needs[req_id] = tuple(tensors)
        self._tensors |= {needed.content_hash: tensor for needed, tensor in tensors.items()}
        self._queue.append(req_id)

    def claim(
        self, needs: Mapping[str, Sequence[Needed]], tensors: Iterable[HostTensor]
    ) -> set[str]:
        """Take over the uploads that adopted requests need. Those that are not among `tensors` are
        read from a rank that has them, and ranks that lack one get it. Return the requests of which
        no rank has a tensor. Waits, so call it before the first step."""
        given = {tensor.content_hash: tensor for tensor in tensors}
        names = {each.content_hash for own in needs.values() for each in own}
        self._tensors |= {name: given[name] for name in names & given.keys()}
        unknown = sorted(names - self._tensors.keys())
        read = self._group.uploads.read(unknown, self._group.ranks) if unknown else []
        self._tensors |= {tensor.content_hash: tensor for tensor in read}
        self._needs |= {
            req_id: tuple(own)
            for req_id, own in needs.items()
            if all(each.content_hash in self._tensors for each in own)
        }
        lacking = needs.keys() - self._needs.keys()
        self._keep_needed()
        self._send_needed(needs.keys() - lacking)
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
                is_complete = self._send_chunk_for(req_id)
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
        own = self._needs.pop(req_id, ())
        if not own:
            return
        if req_id in self._queue:
            if self._queue[0] == req_id:
                self._task = None
            self._queue.remove(req_id)
        if any(self._untold):
            ready, refused = self._untold
            others = [entry for entry in refused if entry[0] != req_id]
            self._untold = UploadProgress([other for other in ready if other != req_id], others)
        in_use = self._in_use()
        self.to_drop += [(num_sent, needed) for needed in own if needed not in in_use]
        self._keep_needed()

    def drop_unused(self, num_done: int) -> None:
        """Drop the uploads of ended requests that no step can read any more. num_done: the number
        of steps that are done."""
        unused, in_use = set(), self._in_use()
        while self.to_drop and self.to_drop[0][0] <= num_done:
            needed = self.to_drop.popleft()[1]
            if needed not in in_use:
                unused.add(needed)
        if not unused:
            return
        self._present -= unused
        self._lacks_room = False
        # Those that are not dropped here end with the lease.
        with suppress(WorkerError, DeadlineExceeded, WorkerDied):
            for is_everywhere in {needed.is_everywhere for needed in unused}:
                names = [
                    each.content_hash for each in unused if each.is_everywhere == is_everywhere
                ]
                self._group.uploads.drop(names, self._ranks(is_everywhere))

    def restart(self) -> None:
        """Send everything again that running requests need, after the ranks have lost all uploads.
        Waits."""
        self._present.clear()
        self.to_drop.clear()
        self._task = None
        self._lacks_room = False
        self._send_needed(self._needs.keys() - set(self._queue))

    def _ranks(self, is_everywhere: bool) -> Sequence[int]:
        return self._group.ranks if is_everywhere else self._group.first_stage_ranks

    def _in_use(self) -> set[Needed]:
        return {needed for own in self._needs.values() for needed in own}

    def _keep_needed(self) -> None:
        """Forget the tensors that no request needs."""
        names = {needed.content_hash for needed in self._in_use()}
        self._tensors = {name: tensor for name, tensor in self._tensors.items() if name in names}

    def _send_needed(self, req_ids: Iterable[str]) -> None:
        """Send what requests need to all ranks that lack it."""
        needed = {each for req_id in req_ids for each in self._needs[req_id]}
        for is_everywhere in {each.is_everywhere for each in needed}:
            names = [each.content_hash for each in needed if each.is_everywhere == is_everywhere]
            self._begin(names, is_everywhere).finish()
        self._present |= needed

    def _begin(self, names: Sequence[bytes], is_everywhere: bool) -> UploadTask:
        tensors = [self._tensors[name] for name in names]
        return self._group.uploads.begin(tensors, self._ranks(is_everywhere))

    def _send_chunk_for(self, req_id: str) -> bool:
        """Send a chunk of a tensor that a request needs; return True if its ranks have all."""
        missing = [each for each in self._needs[req_id] if each not in self._present]
        if not missing:
            return True
        if self._task is None:
            self._task = self._begin([missing[0].content_hash], missing[0].is_everywhere)
        if self._task.proceed():
            return False
        self._task = None
        self._present.add(missing[0])
        return len(missing) == 1

    def _others_end(self) -> bool:
        """Return True if room will become free for the first request in the queue, because uploads
        of others are there that will end."""
        others = self._present.difference(self._needs[self._queue[0]])
        return bool(others or self.to_drop)


class UploadsPart(DriverPart):
    """Uploads what a driver's requests need, while they wait in the scheduler."""

    def __init__(self, context: DriverContext) -> None:
        self._context = context
        self._uploads = RequestUploads(context.group)
        self._must_restart = False
        """The ranks have lost all uploads."""
        self._capacity: int | None = None
        """Bytes that each rank has for uploads; None: to be asked."""

    def check(self, request: GenerationRequest) -> None:
        for field in ("prompt_embeds", "replay_experts"):
            tensor = getattr(request, field)
            if tensor is not None:
                self._check_tensor(field, tensor)
        named = [name for each in request.features for name in each.uploads]
        if named:
            self._check_present(named)

    def _check_tensor(self, field: str, tensor: HostTensor) -> None:
        """Refuse a tensor for which there will never be room, or whose request cannot wait."""
        if not isinstance(self._context.scheduler, HoldingScheduler):
            raise RequestError(
                "the scheduler cannot hold a request until its tensor is uploaded",
                field=field,
                value=list(tensor.shape),
                fix="add hold_request and release_request (HoldingScheduler)",
            )
        if self._capacity is None:
            with suppress(WorkerError, DeadlineExceeded, WorkerDied):  # the upload will tell
                self._capacity = self._context.group.uploads.capacity()
        num_bytes, most = tensor.data.nbytes, self._capacity
        if most is not None and num_bytes > most:
            raise RequestError(
                f"the tensor has {num_bytes} bytes, and the daemons have {most} for uploads",
                field=field,
                value=list(tensor.shape),
                fix="give fewer rows, or more room: worker-daemon serve --upload-memory-bytes",
            )

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
        """Hold a request until its tensors are uploaded."""
        embeds, experts = request.prompt_embeds, request.replay_experts
        tensors: dict[Needed, HostTensor] = {}
        if isinstance(embeds, HostTensor):
            tensors[Needed(embeds.content_hash)] = embeds
        if isinstance(experts, HostTensor):
            tensors[Needed(experts.content_hash, is_everywhere=True)] = experts
        scheduler = self._context.scheduler
        if tensors and isinstance(scheduler, HoldingScheduler):
            scheduler.hold_request(request.id)
            self._uploads.add(request.id, tensors)

    def ended(self, req_id: str) -> None:
        self._uploads.end(req_id, self._context.steps.num_sent)

    def adopt(
        self, requests: Sequence[AdoptedRequest], tensors: Iterable[HostTensor]
    ) -> Mapping[str, str]:
        needs = {
            request.req_id: own for request in requests if (own := needed_by(request.extensions))
        }
        lost = self._uploads.claim(needs, tensors) if needs else set()
        return dict.fromkeys(sorted(lost), UPLOADS_LOST)

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
                self._uploads.restart()
            except WorkerDied as died:
                self._context.replace(died)
                continue
            self._must_restart = False

    def group_replaced(self) -> None:
        self._must_restart, self._capacity = True, None

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
