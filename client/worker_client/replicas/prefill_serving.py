"""The work of a group that computes prompts, on its thread (prefill_group.py): runs its driver, and
sends blocks of each prompt as they are computed."""

import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from rpc_schema.errors import WorkerDaemonError
from rpc_schema.moved_blocks import MAX_MOVED_BLOCKS
from worker_client.driver import Driver
from worker_client.driver_parts.interface import DriverPart, StepInFlight
from worker_client.driver_parts.remote_prefill import (
    Described,
    ExchangingScheduler,
    FirstToken,
    LinkLeft,
    MoveConfirmed,
    MoveToReceive,
    PrefillNews,
    PromptOver,
    SlotsWanted,
)
from worker_client.group.kv_transfers import BlockMove, TransferLink
from worker_client.inputs.sampling_params import DEFAULT_SAMPLING, SamplingParams
from worker_client.requests import GenerationRequest, RequestOutput
from worker_client.scheduler.block_exchange import HostBlockExchange
from worker_client.scheduler.content_names import HeldContents
from worker_client.scheduler.outgoing_contents import StoredContents

POLL_S: Final = 0.001
"""Pause between questions after moves in progress, of a group that does nothing else."""
GRANT_POLL_S: Final = 0.0005
"""Longest pause between two looks for the end of a step whose blocks wait for slots."""
LOOK_S: Final = 0.25
"""Interval at which an idle group looks for dead daemons."""
MAX_AHEAD: Final = 1024
"""Contents for which the other group is asked to keep slots at once, if one prompt has no more."""

_LOG = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _PromptToSend:
    """A prompt that is being computed, or not yet sent."""

    number: int
    num_wanted: int
    """Contents that the other group lacks."""
    weights: bytes
    """ExchangingScheduler.weights_key when it came."""
    is_sampled: bool
    """The other group wants its first token."""
    is_asked: bool = False
    """The other group was asked for slots."""
    granted: frozenset[bytes] | None = None
    """Contents that it has slots for; None: it has not answered."""
    stored: list[StoredContents] = field(default_factory=list)
    """Contents that can be sent, and were not."""
    is_computed: bool = False

    @property
    def name(self) -> str:
        """Id of the request that computes it."""
        return f"prefill-{self.number}"


class _Unconfirmed(NamedTuple):
    """A move whose contents are right once the steps before one have succeeded."""

    move: int
    number: int
    """Number of the prompt."""
    step: int


class _SendsInFlight(DriverPart):
    """Begins to send what steps store while they are in flight."""

    def __init__(self, serving: "PrefillServing") -> None:
        self._serving = serving

    def work_in_flight(self) -> bool:
        self._serving.send_all()
        return False

    def complete(self, flight: StepInFlight) -> None:
        with suppress(WorkerDaemonError):  # the driver meets it where it waits for the result
            self._serving.await_grants(flight.future.done)

    def steps_failed(self) -> None:
        self._serving.tell_again()


class PrefillServing:
    """Owned by PrefillThread, whose thread calls it: prompts that are computed, and blocks that are
    kept for the other group."""

    def __init__(
        self,
        driver: Driver,
        tell: Callable[[PrefillNews], None],
        take_grant: "Callable[[PrefillServing, float], None]",
    ) -> None:
        """take_grant: carries out the next grant(), if one comes within so many seconds."""
        self._driver = driver
        self._take_grant = take_grant
        self._transfers = driver.group.transfers
        self._tell = tell
        self._prompts: dict[int, _PromptToSend] = {}
        """By number, in the order in which they came."""
        self._link: TransferLink | None = None
        self._num_moves = 0
        """Number of moves of the link."""
        self._moving: dict[int, list[HeldContents]] = {}
        """Contents that are being sent, by move of the present link."""
        self._unconfirmed: deque[_Unconfirmed] = deque()
        """Moves of the link that were begun while steps were in flight which fill their contents:
        so no block of a prompt's last chunk waits for the news of its end."""
        self._num_failures = 0
        """Failures of steps before the first of these was sent."""
        driver.add_part(_SendsInFlight(self))
        self._must_step = False
        """A step is to be sent, even with nothing to compute: it stores blocks, and tells daemons
        which prompts have ended."""

    @property
    def _scheduler(self) -> ExchangingScheduler:
        scheduler: object = self._driver.scheduler
        assert isinstance(scheduler, ExchangingScheduler), "see describe()"
        return scheduler

    @property
    def _exchange(self) -> HostBlockExchange:
        exchange = self._scheduler.exchange
        assert exchange is not None, "see describe()"
        return exchange

    @property
    def wait_s(self) -> float:
        """Time for which there is nothing to do but to wait for commands."""
        if self._driver.busy or self._must_step:
            return 0.0
        return POLL_S if self._moving else LOOK_S

    def proceed(self) -> None:
        """Run a step, if there is one, send what was computed, and see to the moves in progress."""
        driver = self._driver
        if driver.busy or self._must_step:
            if not driver.busy:  # with steps in flight it may not be sent yet
                self._must_step = False
            for output in driver.step():
                self._take(output)
        elif not self._moving:
            driver.look()
        self._confirm()
        self.send_all()
        self._ask_for_slots()
        if self._moving and self._link is not None:
            self._look(self._link)

    def close(self) -> None:
        """Leave the link."""
        self._leave(self._link)

    def describe(self) -> None:
        """Tell what the ranks keep. A group without a host tier gets no prompts."""
        described, scheduler = Described(None), self._driver.scheduler
        if isinstance(scheduler, ExchangingScheduler) and scheduler.exchange is not None:
            try:
                described = Described(self._transfers.get_metadata())
            except WorkerDaemonError as error:  # from most of these the next step recovers
                described = Described(None, str(error))
        self._tell(described)

    def open_link(self, link: TransferLink) -> None:
        self._leave(self._link)
        self._link, self._num_moves = link, 0
        try:
            self._transfers.open(link, sends=True)
        except WorkerDaemonError as error:
            _LOG.warning("transfer link %d cannot be opened: %s", link.number, error)
            self._leave(link)

    def compute(
        self,
        number: int,
        request: GenerationRequest,
        names: list[bytes],
        sampling: SamplingParams | None,
    ) -> None:
        is_sampled = sampling is not None
        prompt = _PromptToSend(number, len(names), self._scheduler.weights_key, is_sampled)
        alone = replace(
            request,
            id=prompt.name,
            max_tokens=1,
            sampling=sampling or DEFAULT_SAMPLING,
            deadline=None,
            index=None,
            output_token_ids=(),
            routed_experts=False,
            continues=None,
        )
        self._prompts[number] = prompt
        self._exchange.outgoing.want(number, names)
        try:
            self._driver.add_request(alone)
        except WorkerDaemonError as error:
            _LOG.warning("a prompt of %s is refused: %s", request.id, error)
            self._end(prompt)
        self._ask_for_slots()

    def grant(self, link: TransferLink, number: int, names: list[bytes]) -> None:
        prompt = self._prompts.get(number)
        if prompt is None:
            return
        if link is not self._link:
            self.drop(number)
            return
        prompt.granted = frozenset(names)
        self._send_filled(prompt)

    def drop(self, number: int) -> None:
        prompt = self._prompts.get(number)
        if prompt is None:  # its end was told already
            return
        if not prompt.is_computed:
            self._driver.abort_request(prompt.name)
            self._must_step = True
        self._end(prompt)

    def _take(self, output: RequestOutput) -> None:
        """Note that a prompt was computed."""
        prompt = next((each for each in self._prompts.values() if each.name == output.req_id), None)
        if prompt is None:
            return
        self._must_step = True
        if output.error:
            self._end(prompt)
            return
        are_same = prompt.weights == self._scheduler.weights_key
        if prompt.is_sampled and output.token_ids and are_same:
            self._tell(FirstToken(prompt.number, prompt.weights, output.token_ids[0]))
        prompt.is_computed = True
        self._exchange.outgoing.keep_filled()

    def _ask_for_slots(self) -> None:
        """Ask for slots for the next prompts: while those before them are computed, so that no
        block waits for the answer."""
        num_asked = sum(prompt.num_wanted for prompt in self._prompts.values() if prompt.is_asked)
        for prompt in self._prompts.values():
            is_next = not num_asked or num_asked + prompt.num_wanted <= MAX_AHEAD
            if not prompt.is_asked and (is_next or prompt.stored):
                prompt.is_asked = True
                num_asked += prompt.num_wanted
                self._tell(SlotsWanted(prompt.number, self._exchange.tag))

    def send_all(self) -> None:
        """Send what steps that were sent store; the driver calls it too, with steps in flight."""
        for prompt in [*self._prompts.values()]:
            self._send_filled(prompt)

    def tell_again(self) -> None:
        """Send another step, if nothing else does: daemons may have missed which prompts ended."""
        self._must_step = True

    def await_grants(self, has_ended: Callable[[], bool]) -> None:
        """Take grants while the oldest step in flight has not ended, and blocks wait for slots: so
        they move while it runs."""
        while self._waits_for_slots and not has_ended():
            self._take_grant(self, GRANT_POLL_S)

    @property
    def _waits_for_slots(self) -> bool:
        return any(prompt.stored and prompt.granted is None for prompt in self._prompts.values())

    def _send_filled(self, prompt: _PromptToSend) -> None:
        """Send what steps store of a prompt since the last call, if there are slots for it; end
        the prompt once the last of it was sent and is right."""
        outgoing = self._exchange.outgoing
        prompt.stored += outgoing.take(prompt.number)
        if prompt.stored and prompt.granted is not None and self._link is not None:
            stored, prompt.stored = prompt.stored, []
            refused = [each for each in stored if each.contents.name not in prompt.granted]
            outgoing.release(each.contents for each in refused)
            self._send(self._link, prompt, [each for each in stored if each not in refused])
            self._confirm()  # of steps that have ended, as when the slots come late
        is_sent = not (prompt.stored or outgoing.has_kept(prompt.number))
        is_right = all(each.number != prompt.number for each in self._unconfirmed)
        if prompt.is_computed and is_sent and is_right:
            self._end(prompt)

    def _confirm(self) -> None:
        """Tell which moves have brought what is right; leave the link if steps have failed that may
        have filled others."""
        if not self._unconfirmed:
            return
        outgoing, link = self._exchange.outgoing, self._link
        assert link is not None, "moves are of a link"
        if outgoing.num_failures != self._num_failures:
            _LOG.warning("steps have failed whose blocks were being sent")
            self._leave(link)
        while self._unconfirmed and outgoing.are_filled(self._unconfirmed[0].step):
            move, number, _ = self._unconfirmed.popleft()
            self._tell(MoveConfirmed(link.number, move, number))

    def _send(
        self, link: TransferLink, prompt: _PromptToSend, stored: list[StoredContents]
    ) -> None:
        """Begin moves of contents."""
        contents = [each.contents for each in stored]
        most = MAX_MOVED_BLOCKS // max((len(each.slots) for each in contents), default=1)
        for first in range(0, len(contents), most):
            part = contents[first : first + most]
            self._num_moves += 1
            self._moving[self._num_moves] = part
            step = max(each.filled_before for each in stored[first : first + most])
            blocks = self._exchange.blocks_of(part)
            try:
                move = BlockMove(self._num_moves, self._scheduler.prefix_tag, blocks)
                self._transfers.move(link, move)
            except WorkerDaemonError as error:
                _LOG.warning("blocks cannot be sent: %s", error)
                self._exchange.outgoing.release(contents[first + most :])
                self._leave(link)
                return
            names = [each.name for each in part]
            self._tell(MoveToReceive(link.number, self._num_moves, prompt.number, names))
            if not self._unconfirmed:
                self._num_failures = self._exchange.outgoing.num_failures
            self._unconfirmed.append(_Unconfirmed(self._num_moves, prompt.number, step))

    def _end(self, prompt: _PromptToSend) -> None:
        """Send no more of a prompt."""
        del self._prompts[prompt.number]
        self._exchange.outgoing.drop(prompt.number)
        self._exchange.outgoing.release(each.contents for each in prompt.stored)
        self._tell(PromptOver(prompt.number))

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
            self._exchange.outgoing.release(self._moving.pop(move))
        if report.fault:
            self._leave(link)

    def _leave(self, link: TransferLink | None) -> None:
        """Leave a link: nothing is sent over it any more."""
        if link is None or link is not self._link:
            return
        self._link = None
        with suppress(WorkerDaemonError):
            self._transfers.close()
        for contents in self._moving.values():
            self._exchange.outgoing.release(contents)
        self._moving.clear()
        self._unconfirmed.clear()
        self._tell(LinkLeft(link.number))
