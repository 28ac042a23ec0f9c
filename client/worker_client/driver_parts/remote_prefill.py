"""Prefill apart from decode: another group computes the prompts of new requests, and its KV blocks
come to this group's host tier, as they are computed, before the scheduler admits them. Whatever
fails there, the request is admitted nevertheless, and computes what it lacks.

A request here has all its prompt, and the same sampling as without: only the KV of full blocks
comes from elsewhere, and the last token of the prompt is computed here. The group that computes the
prompt also samples the first token, as this one would, where nothing is reported on it: the request
has it while its blocks are still on their way.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias, get_args, runtime_checkable

from msgspec import structs

from rpc_schema.config import RendezvousAddress
from rpc_schema.errors import WorkerDaemonError
from rpc_schema.kv_transfer import KVShard
from worker_client.driver_parts.context import DriverContext
from worker_client.driver_parts.interface import DriverPart
from worker_client.errors import WorkerDied, config_error
from worker_client.group.kv_transfers import BlockMove, GroupTransfers, TransferLink
from worker_client.inputs.sampling_params import SamplingParams
from worker_client.requests import GenerationRequest
from worker_client.scheduler import HoldingScheduler, Jump
from worker_client.scheduler.block_exchange import HostBlockExchange
from worker_client.scheduler.content_names import HeldContents
from worker_client.scheduler_output import StepResult
from worker_host.metrics import HistogramCounts

RETRY_S: Final = 0.5
"""Time from the end of a transfer link to the next attempt."""
WAIT_S: Final = 0.001
"""Longest pause of a driver that has nothing else to do."""
MOVE_WAIT_S: Final = 0.0002
"""Its pause between questions after moves in progress."""

_LOG = logging.getLogger(__name__)


@runtime_checkable
class ExchangingScheduler(HoldingScheduler, Protocol):
    """A scheduler whose host tier can be filled from another group."""

    @property
    def exchange(self) -> HostBlockExchange | None:
        """The blocks that other groups get and give; None without a host tier. Its `outgoing` is
        asked to keep what was filled before each step is planned."""

    @property
    def prefix_tag(self) -> bytes:
        """See RestoringScheduler."""

    @property
    def weights_key(self) -> bytes:
        """Names the present weights, as groups of one model do that have the same."""

    def begin_output(self, req_id: str, token_id: int) -> Jump:
        """Let a held request begin its output with a token that another group has sampled for it,
        by the same weights, seed and rules. Return no token unless it has only its prompt, and
        reports nothing on its tokens; and the request, if it ends with the token."""


class Described(NamedTuple):
    """The ranks of the prefill group and what they keep; None: nothing that others can use."""

    shards: tuple[KVShard, ...] | None
    fault: str = "the group that computes prompts has no host tier"
    """Says why there are none."""


class SlotsWanted(NamedTuple):
    """A prompt is about to be computed, and waits for a grant() of slots."""

    number: int
    """Number of the prompt."""
    tag: bytes
    """Tag of its names: HostBlockExchange.tag."""


class MoveToReceive(NamedTuple):
    """Contents of a prompt that are being sent to slots that were granted for them, perhaps before
    the steps that fill them have ended. The driver that decodes has its ranks receive them, or
    leaves the link."""

    link: int
    move: int
    """1 for the first of a link, then one more each."""
    number: int
    """Number of the prompt."""
    names: list[bytes]


class MoveConfirmed(NamedTuple):
    """The steps that have filled the contents of a move have succeeded. It comes for each move,
    unless the link is left."""

    link: int
    move: int
    number: int
    """Number of the prompt."""


class FirstToken(NamedTuple):
    """The token that follows a prompt, of which it is the only one."""

    number: int
    """Number of the prompt."""
    weights: bytes
    """ExchangingScheduler.weights_key from the beginning to the end of its computation."""
    token_id: int


class PromptOver(NamedTuple):
    """No further contents of a prompt will be sent: it was computed, dropped, or has failed."""

    number: int


class LinkLeft(NamedTuple):
    """The prefill group cannot take part in a transfer link."""

    link: int


class Opened(NamedTuple):
    """The prefill group is there, for the first time or again."""


class Ended(NamedTuple):
    """The prefill group has ended. What follows, if anything does, is Opened."""

    error: Exception | None


PrefillNews: TypeAlias = (
    Described
    | SlotsWanted
    | MoveToReceive
    | MoveConfirmed
    | FirstToken
    | PromptOver
    | LinkLeft
    | Opened
    | Ended
)

PromptEnd: TypeAlias = Literal["moved", "lacking", "failed", "late", "left"]
"""End of the wait for a prompt: its blocks are here; the other group has none that this group can
use; the link or a move has failed; it was not in time; its requests have ended before."""
HELD_BOUNDS_S: Final = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0),
)


class PrefillCounts:
    """Counts since the start. Written by the thread of the driver that decodes; any may read."""

    def __init__(self) -> None:
        self.is_linked = False
        """True while blocks can come."""
        self.prompts: Counter[PromptEnd] = Counter(dict.fromkeys(get_args(PromptEnd), 0))
        self.num_blocks = 0
        """Blocks that have come."""
        self.num_early_blocks = 0
        """Those of them that have come while their prompts were still computed."""
        self.num_first_tokens = 0
        """First tokens that it has sampled and requests have begun with."""
        self.num_lost_links = 0
        """Transfer links that have ended, or could not be opened."""
        self.held = HistogramCounts(HELD_BOUNDS_S)
        """Seconds for which requests have waited for their prompts."""


class PrefillGroup(Protocol):
    """The group that computes prompts, on a thread of its own."""

    timeout_s: float
    """Longest time from a request's arrival to its admission, and limit on a move."""
    counts: PrefillCounts
    """Counts of the part that uses it."""

    def describe(self) -> None:
        """Ask for a Described."""

    def open_meeting(self, num_members: int) -> RendezvousAddress:
        """Open the place where the ranks of a new transfer link meet."""

    def open_link(self, link: TransferLink) -> None:
        """Have its ranks join a transfer link."""

    def compute(
        self,
        number: int,
        request: GenerationRequest,
        names: list[bytes],
        sampling: SamplingParams | None,
    ) -> None:
        """Compute a request's prompt, of which this group lacks contents of these names, and sample
        its FirstToken so; None: nobody wants it."""

    def grant(self, link: TransferLink, number: int, names: list[bytes]) -> None:
        """Have contents of a prompt sent as they are computed: there are slots for them until its
        PromptOver, and the end of its moves."""

    def drop(self, number: int) -> None:
        """Give up a prompt that is not over, and ask for its PromptOver."""

    def news(self) -> list[PrefillNews]:
        """Return what has happened since the last call."""

    def await_news(self, timeout_s: float) -> None:
        """Wait for some time, or until there is news: the one method that waits."""


@dataclass(slots=True, eq=False)
class _ComingMove:
    """Contents that are on their way, or not confirmed yet."""

    contents: list[HeldContents]
    is_confirmed: bool = False
    has_come: bool = False


@dataclass(slots=True, eq=False)
class _Prompt:
    """A prompt at the other group."""

    number: int
    request: GenerationRequest
    names: list[bytes]
    """Contents that its request lacks."""
    sampling: SamplingParams | None
    """Options by which the first token is sampled there; None: it is sampled here."""
    deadline: float
    waiting: dict[str, float] = field(default_factory=dict)
    """Requests that are held for it, and since when."""
    is_sent: bool = False
    """The other group has it; False while there is no link."""
    is_over: bool = False
    """The other group sends no more of it."""
    is_left: bool = False
    """Nothing waits for it any more."""
    reserved: dict[bytes, HeldContents] = field(default_factory=dict)
    """Slots of contents that may come, by name."""
    moves: dict[int, _ComingMove] = field(default_factory=dict)
    """By number."""
    come: list[HeldContents] = field(default_factory=list)
    """Contents that have come, and are right. Nothing evicts them while its requests wait."""
    has_failed: bool = False
    """A move has failed."""

    @property
    def has_slots(self) -> bool:
        """True while the other group may fill slots of this one."""
        return bool(self.moves or (self.reserved and not self.is_over))


class RemotePrefillPart(DriverPart):
    """Holds requests until their blocks are here, for a limited time."""

    def __init__(
        self, context: DriverContext, scheduler: ExchangingScheduler, prefill: PrefillGroup
    ) -> None:
        """Raises ClientConfigError: the scheduler has no host tier, or the ranks none. Raises
        ConfigError: another group cannot fill it."""
        exchange = scheduler.exchange
        transfers: GroupTransfers = context.group.transfers
        shards = None if exchange is None else transfers.get_metadata()
        if exchange is None or shards is None:
            problem = "the group has no host tier that another group can fill"
            fix = "set cache.kv_host_memory_bytes"
            raise config_error("options.prefill", prefill, problem, fix)
        self._scheduler, self._exchange, self._prefill = scheduler, exchange, prefill
        self._counts = prefill.counts
        self._context = context
        self._transfers = transfers
        self._link: TransferLink | None = None
        self._is_open = False
        self._num_moves = 0
        """Number of moves of the link that ranks receive or have received."""
        self._describing = False
        self._retry_at = 0.0
        self._opening_until = 0.0
        self._has_ended = self._has_failed = False
        self._cause = ""
        """Why there was no link, or the last one has ended."""
        self._prompts: dict[int, _Prompt] = {}
        self._num_prompts = 0
        self._coming: dict[bytes, _Prompt] = {}
        """The prompt that brings contents."""

    def queued(self, request: GenerationRequest) -> None:
        if self._has_ended or not _can_leave(request):
            return
        self._ask_for_link()
        if not self._has_failed:  # otherwise this group computes prompts until there is a link
            self._hold(request)

    def ended(self, req_id: str) -> None:
        for prompt in [each for each in self._prompts.values() if req_id in each.waiting]:
            del prompt.waiting[req_id]
            if not prompt.waiting:
                self._release(prompt, "left")

    def attend(self) -> None:
        for news in self._prefill.news():
            self._take(news)
        if self._link is not None and (not self._is_open or self._is_moving):
            self._look(self._link)
        if self._prompts:
            now = time.monotonic()
            for prompt in [each for each in self._prompts.values() if now >= each.deadline]:
                if prompt.is_left:
                    self._lose_link("a prompt that was given up has not ended in time")
                    return
                _LOG.warning("blocks of %s have not come in time", sorted(prompt.waiting))
                self._release(prompt, "late")

    def group_replaced(self) -> None:
        self._lose_link("a daemon of this group was replaced")

    def wait(self) -> bool:
        if not any(prompt.waiting for prompt in self._prompts.values()):
            return False
        self._prefill.await_news(MOVE_WAIT_S if self._is_moving else WAIT_S)
        return True

    @property
    def _is_moving(self) -> bool:
        """True if something waits for the end of a move alone."""
        moves = (move for prompt in self._prompts.values() for move in prompt.moves.values())
        return any(move.is_confirmed and not move.has_come for move in moves)

    def _hold(self, request: GenerationRequest) -> None:
        """Hold a request until what it lacks is here, if anything can come."""
        sampling = first_token_sampling(request)
        names = self._exchange.lacking(request.id, has_token=sampling is not None)
        if not names:
            return
        shared = self._bringing(names)
        if shared is None:
            self._num_prompts += 1
            deadline = time.monotonic() + self._prefill.timeout_s
            shared = _Prompt(self._num_prompts, request, names, sampling, deadline)
            self._prompts[shared.number] = shared
            self._coming |= dict.fromkeys(names, shared)
            if self._is_open:
                self._compute(shared)
        shared.waiting[request.id] = time.monotonic()
        self._scheduler.hold_request(request.id)

    def _bringing(self, names: list[bytes]) -> _Prompt | None:
        """Return the prompt that brings some of these contents or, if a part of them is of no use,
        all."""
        found = [self._coming.get(name) for name in names]
        if not self._exchange.needs_all:
            return next((prompt for prompt in found if prompt is not None), None)
        return found[0] if all(prompt is found[0] for prompt in found) else None

    def _compute(self, prompt: _Prompt) -> None:
        prompt.is_sent = True
        self._prefill.compute(prompt.number, prompt.request, prompt.names, prompt.sampling)

    def _ask_for_link(self) -> None:
        if self._link is None and not self._describing and time.monotonic() >= self._retry_at:
            self._describing = True
            self._prefill.describe()

    def _take(self, news: PrefillNews) -> None:
        if isinstance(news, Opened):
            self._has_ended = self._describing = False
        elif isinstance(news, Ended):
            self._has_ended = True
            _LOG.warning("the prefill group has ended, prompts are computed here: %s", news.error)
            self._lose_link("the prefill group has ended")
        elif isinstance(news, Described):
            self._describing = False
            self._open(news)
        elif isinstance(news, LinkLeft):
            if self._link is not None and news.link == self._link.number:
                self._lose_link("the prefill group has left it")
        elif isinstance(news, SlotsWanted):
            self._grant(news)
        elif isinstance(news, MoveToReceive):
            self._receive(news)
        elif isinstance(news, MoveConfirmed):
            self._confirm(news)
        elif isinstance(news, FirstToken):
            self._begin_output(news)
        elif (prompt := self._prompts.get(news.number)) is not None:
            self._end(prompt)

    def _open(self, described: Described) -> None:
        """Open a transfer link, if the other group is ready for one."""
        sources = described.shards
        try:
            destinations = self._transfers.get_metadata()
            if sources is None or destinations is None:
                own_fault = "this group's host tier is not there yet"
                self._lose_link(described.fault if sources is None else own_fault)
                return
            place = self._prefill.open_meeting(len(sources) + len(destinations))
            link = TransferLink(
                time.monotonic_ns(), place, sources, destinations, self._prefill.timeout_s
            )
            self._transfers.open(link, sends=False)
        except WorkerDied:
            self._lose_link("a daemon of this group has died")  # the next step recovers from that
            return
        except (WorkerDaemonError, OSError) as error:  # OSError: of the place where they meet
            self._lose_link(str(error))
            return
        self._link, self._num_moves = link, 0
        self._opening_until = time.monotonic() + link.timeout_s
        self._prefill.open_link(link)

    def _look(self, link: TransferLink) -> None:
        """Ask the ranks what has become of the link and its moves."""
        try:
            report = self._transfers.poll(link)
        except WorkerDaemonError as error:
            self._lose_link(str(error))
            return
        if report is None:
            return
        if report.is_open and not self._is_open:
            self._is_open = self._counts.is_linked = True
            self._has_failed = False
            for prompt in [each for each in self._prompts.values() if not each.is_sent]:
                self._compute(prompt)
        for prompt in [each for each in self._prompts.values() if each.moves]:
            for number in [number for number in prompt.moves if number <= report.num_ended]:
                prompt.moves[number].has_come = number not in report.failed
                self._end_move(prompt, number, has_failed=number in report.failed)
        if report.fault:
            self._lose_link(report.fault)
        elif not self._is_open and time.monotonic() >= self._opening_until:
            self._lose_link("its ranks have not met in time")

    def _grant(self, wanted: SlotsWanted) -> None:
        """Give slots to what a prompt's requests lack, as far as there is room."""
        prompt, link = self._prompts.get(wanted.number), self._link
        if prompt is None or prompt.is_left or link is None:  # it was told that it is dropped
            return
        reserved = []
        if wanted.tag == self._exchange.tag:
            reserved = self._exchange.reserve(prompt.names)
        if not reserved:
            self._release(prompt, "lacking")
            return
        prompt.reserved = {each.name: each for each in reserved}
        self._prefill.grant(link, prompt.number, [*prompt.reserved])

    def _receive(self, sending: MoveToReceive) -> None:
        """Have the ranks receive a move."""
        prompt, link = self._prompts.get(sending.number), self._link
        if link is None or sending.link != link.number:
            return
        self._num_moves += 1
        if prompt is None or sending.move != self._num_moves:
            self._lose_link(f"move {sending.move} is not the next one")
            return
        contents = [prompt.reserved.pop(name) for name in sending.names]
        prompt.moves[sending.move] = _ComingMove(contents)
        blocks = self._exchange.blocks_of(contents)
        try:
            move = BlockMove(sending.move, self._scheduler.prefix_tag, blocks)
            self._transfers.move(link, move)
        except WorkerDaemonError as error:
            self._lose_link(str(error))

    def _confirm(self, confirmed: MoveConfirmed) -> None:
        """Note that what a move brings is right."""
        prompt = self._prompts.get(confirmed.number)
        is_ours = self._link is not None and confirmed.link == self._link.number
        if prompt is not None and is_ours and confirmed.move in prompt.moves:
            prompt.moves[confirmed.move].is_confirmed = True
            self._end_move(prompt, confirmed.move)

    def _begin_output(self, sampled: FirstToken) -> None:
        """Give a prompt's request its first token, if it still waits."""
        prompt = self._prompts.get(sampled.number)
        if prompt is None or sampled.weights != self._scheduler.weights_key:
            return
        req_id = prompt.request.id
        if req_id in prompt.waiting:
            begun = self._scheduler.begin_output(req_id, sampled.token_id)
            if begun.num_tokens:
                self._counts.num_first_tokens += 1
                finished = () if begun.finished is None else (begun.finished,)
                self._context.gain(StepResult([req_id], [sampled.token_id]), finished)

    def _end_move(self, prompt: _Prompt, number: int, *, has_failed: bool = False) -> None:
        """End a move that has failed, or has come and is confirmed."""
        move = prompt.moves[number]
        if has_failed:
            prompt.has_failed = True
            self._exchange.give_back([each.name for each in move.contents])
        elif move.has_come and move.is_confirmed:
            num_blocks = sum(len(each.slots) for each in move.contents)
            self._counts.num_blocks += num_blocks
            self._counts.num_early_blocks += 0 if prompt.is_over else num_blocks
            prompt.come += move.contents
            if prompt.is_left:
                self._use_come(prompt)
        else:
            return
        del prompt.moves[number]
        self._end_if_done(prompt)

    def _end(self, prompt: _Prompt) -> None:
        """Note that the other group sends no more of a prompt."""
        prompt.is_over = True
        self._exchange.give_back(prompt.reserved)
        self._end_if_done(prompt)

    def _end_if_done(self, prompt: _Prompt) -> None:
        if prompt.moves or not prompt.is_over:
            return
        if prompt.is_left:
            del self._prompts[prompt.number]
        elif prompt.has_failed:
            self._release(prompt, "failed")
        else:
            is_enough = not (prompt.reserved and self._exchange.needs_all)
            self._release(prompt, "moved" if prompt.come and is_enough else "lacking")

    def _use_come(self, prompt: _Prompt) -> None:
        """Let requests load what has come."""
        self._exchange.fill(each.name for each in prompt.come)
        prompt.come.clear()

    def _release(self, prompt: _Prompt, end: PromptEnd) -> None:
        """Let the scheduler admit the requests that wait for a prompt, with what has come, and give
        it up, if it is not over. Its slots stay reserved while the other group may fill them."""
        self._use_come(prompt)
        self._counts.prompts[end] += 1
        for name in prompt.names:
            if self._coming.get(name) is prompt:
                del self._coming[name]
        now = time.monotonic()
        for req_id, since in sorted(prompt.waiting.items()):
            self._counts.held.observe(now - since)
            self._scheduler.release_request(req_id)
        prompt.waiting.clear()
        if prompt.is_sent and not prompt.is_over:
            self._prefill.drop(prompt.number)
        prompt.is_left, prompt.deadline = True, now + self._prefill.timeout_s
        if not prompt.has_slots:
            del self._prompts[prompt.number]

    def _lose_link(self, cause: str) -> None:
        """Leave the link, and let all requests compute what has not come."""
        if self._link is not None:
            _LOG.warning("transfer link %d has ended: %s", self._link.number, cause)
            try:
                self._transfers.close()
            except WorkerDaemonError as error:
                _LOG.info("a rank of the link does not answer: %s", error)
        elif cause != self._cause:  # it is tried again and again
            _LOG.warning("prompts are computed here: %s", cause)
        self._cause = cause
        self._counts.num_lost_links += 1
        self._link, self._is_open, self._has_failed = None, False, True
        self._counts.is_linked = False
        self._retry_at = time.monotonic() + RETRY_S
        for prompt in [*self._prompts.values()]:
            self._take_slots_back(prompt)
            if prompt.is_left:
                del self._prompts[prompt.number]
            else:
                self._release(prompt, "failed")

    def _take_slots_back(self, prompt: _Prompt) -> None:
        """Give up what has not come of a prompt: nothing fills its slots any more."""
        lost = [each.name for move in prompt.moves.values() for each in move.contents]
        if not prompt.is_over:
            lost += prompt.reserved
        self._exchange.give_back(lost)
        prompt.moves.clear()
        prompt.reserved.clear()


def first_token_sampling(request: GenerationRequest) -> SamplingParams | None:
    """Return how another group samples the first token of a request; None: it cannot do it alone,
    or nothing may be reported on the token."""
    own = request.sampling
    reports = (own.logprobs, own.prompt_logprobs, own.logprob_token_ids, own.structured_outputs)
    if any(each is not None for each in reports) or own.full_logprobs or own.logits_processors:
        return None
    if request.output_token_ids or request.routed_experts:
        return None
    # The decoding group looks for stop strings. Of one token, the first is all that is needed.
    return structs.replace(
        own, stop=(), include_stop_str_in_output=False, min_tokens=min(1, own.min_tokens)
    )


def _can_leave(request: GenerationRequest) -> bool:
    """Return True if another group gets the same KV from a request's token ids alone."""
    return (
        request.prompt_embeds is None
        and request.replay_experts is None
        and request.lora is None
        and request.pooling is None
        and not request.features
    )


def remote_prefill_parts(
    context: DriverContext, prefill: PrefillGroup | None
) -> Iterator[RemotePrefillPart]:
    """Yield the part of a driver with a prefill group. Raises ClientConfigError: its scheduler
    cannot hold requests or exchange blocks."""
    if prefill is None:
        return
    scheduler: object = context.scheduler
    if not isinstance(scheduler, ExchangingScheduler):
        problem = "the scheduler cannot exchange blocks with another group"
        raise config_error("options.prefill", prefill, problem, "add ExchangingScheduler's methods")
    yield RemotePrefillPart(context, scheduler, prefill)
