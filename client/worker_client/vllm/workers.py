"""A group of daemons for a scheduler that cannot lose a step's outcome: dead daemons are replaced,
an expired lease is taken again, and a step that is lost nevertheless is reported, not raised."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, NoReturn, TypeVar, TypeVarTuple

from rpc_schema.codec import MAX_STEP_BYTES
from rpc_schema.config import WorkerConfig
from rpc_schema.errors import (
    DrainingError,
    LeaseExpiredError,
    NotAttachedError,
    WorkerDaemonError,
)
from worker_client.errors import (
    ConfigMismatchError,
    InvalidSchedulerOutput,
    ReplacementFailed,
    StepFailed,
    StepLost,
    WorkerDied,
)
from worker_client.group.loading import LoadedGroup
from worker_client.group.outcomes import StepFuture
from worker_client.scheduler_output import SchedulerOutput, StepResult
from worker_client.steps.masks import Mask, StepMasks
from worker_client.vllm.grammar_masks import placed_masks
from worker_client.vllm.settings import LOGGER, Settings
from worker_client.worker_group import WorkerGroup

MAX_IN_A_ROW: Final = 3
"""Lost steps, and recoveries, without a successful step between them, after which the server
ends."""

MAX_MASK_BYTES: Final = MAX_STEP_BYTES - (1 << 20)
"""Masks of one message; the rest is for its other fields."""

_DRAIN_POLL_S: Final = 0.2
_LOG = logging.getLogger(LOGGER)
_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")


class LostStep(NamedTuple):
    """The outcome of a step whose requests restart: the workers have no row of any request, and
    no block keeps its contents."""

    reason: str
    is_known: bool
    """The scheduler planned the step before it learned of an earlier loss, which covers it."""


class PendingStep(NamedTuple):
    """A step whose outcome is pending."""

    number: int
    future: StepFuture | None
    """None: it was not sent."""
    reason: str = ""
    """Why it was not sent."""


@dataclass(slots=True)
class _SinceSuccess:
    """Counts since the last successful step."""

    losses: int = 0
    recoveries: int = 0


@dataclass(slots=True)
class Workers:
    """Owns a group. Belongs to the thread that opens it."""

    group: WorkerGroup
    config: WorkerConfig
    settings: Settings
    num_gpu_blocks: int | None = None
    """None: all that fit."""
    fit_max_model_len: bool = False
    generation: int = 0
    """Rises when daemons are replaced or attached again: what was uploaded to them is lost."""
    _since_success: _SinceSuccess = field(default_factory=_SinceSuccess)
    _num_sent: int = 0
    _num_done: int = 0
    _lost_before: int = 0
    """Steps below this number are covered by a loss that the scheduler knows of."""
    _untold: str = ""
    """Why the group was attached again between two steps: the next one is lost, which tells the
    scheduler. Empty: it was not."""

    @property
    def num_sent(self) -> int:
        """Steps that were sent, or given up."""
        return self._num_sent

    @property
    def num_done(self) -> int:
        """Steps whose outcome is known, the first ones of those sent."""
        return self._num_done

    def open(self) -> LoadedGroup:
        """Attach to the daemons, and load what they lack. Raises what attach() and prepare()
        raise."""
        settings = self.settings
        self.group.attach(wait_s=settings.wait_s, force=settings.force)
        try:
            return self._prepare(reload=False)
        except ConfigMismatchError as mismatch:
            if not settings.reload:
                raise
            _LOG.warning("loading again: %s", mismatch)
            return self._prepare(reload=True)

    def close(self) -> None:
        """Give the daemons back. They keep the model."""
        self.group.close()

    def replace_dead(self) -> None:
        """Replace daemons that have died while nothing ran. Not counted as a recovery: it is not
        repeated unless somebody asks for it.

        Raises:
            WorkerDaemonError: a successor did not come, or the daemons cannot be used any more.
        """
        try:
            self.group.look()
        except WorkerDied as died:
            self._replace(died)
        except (LeaseExpiredError, NotAttachedError) as expired:  # a successor was there first
            self._untold = str(expired)
            self._attach(expired)

    def use_between_steps(self, use: Callable[[], None]) -> None:
        """Use the group by a call that is no step; recover and use it again as often as may help.
        If it had to be attached again, the next step is lost, which tells the scheduler.

        Raises:
            ClientError: the daemons cannot be used any more, or the call was refused.
        """
        try:
            self._recovering(use)
        except StepLost as again:
            self._untold = str(again)

    def send(self, step: SchedulerOutput) -> PendingStep:
        """Send a step, once there is credit for it.

        Raises:
            WorkerDaemonError: the daemons cannot be used any more.
        """
        number, self._num_sent = self._num_sent, self._num_sent + 1
        untold, self._untold = self._untold, ""
        if untold:
            return PendingStep(number, None, untold)
        try:
            return PendingStep(number, self._recovering(self._send, step))
        except InvalidSchedulerOutput as invalid:
            self.group.withdraw(step)
            return PendingStep(number, None, str(invalid))
        except StepLost as again:
            return PendingStep(number, None, str(again))

    def _send(self, step: SchedulerOutput) -> StepFuture:
        self.group.await_credit()
        return self.group.execute_model(step)

    def take_drafts(self, sent: PendingStep) -> dict[str, list[int]]:
        """Return the drafts that a step has of the requests that it has deferred; waits for the
        devices if there are some. None if they cannot be had: the step's outcome says why."""
        future = sent.future
        if future is None or future.failure is not None or future.step is None:
            return {}
        if future.step.output.num_drafts.keys().isdisjoint(future.step.left_req_ids):
            return {}
        try:
            found = self.group.drafts.take_token_ids(future)
        except WorkerDaemonError as error:
            _LOG.warning("a step's requests with a grammar go without drafts: %s", error)
            return {}
        return {} if found is None else dict(zip(*found, strict=True))

    def sample(self, sent: PendingStep, masks: Mapping[str, Sequence[Mask]]) -> list[PendingStep]:
        """Sample what a step has deferred, with masks for some of it, in as many messages as the
        masks need. masks: see read_masks. Raises as send() does."""
        future = sent.future
        if future is None or future.failure is not None or future.step is None:
            return []
        left, drafts = future.step.left_req_ids, future.step.output.num_drafts
        if not left:
            return []
        placed = {r: placed_masks(masks[r], drafts.get(r, 0)) for r in left if r in masks}
        width = max((sum(mask.nbytes for mask in own) for own in placed.values()), default=1)
        some = max(1, MAX_MASK_BYTES // width)
        parts = [left[start : start + some] for start in range(0, len(left), some)]
        return [self._sample(sent.number, future, part, placed) for part in parts]

    def _sample(
        self,
        number: int,
        future: StepFuture,
        req_ids: Sequence[str],
        masks: Mapping[str, Sequence[Mask]],
    ) -> PendingStep:
        own = {req_id: masks[req_id] for req_id in req_ids if req_id in masks}
        try:
            later = self._recovering(self.group.sample_tokens, future, (StepMasks(own),), req_ids)
            return PendingStep(number, later)
        except StepLost as again:
            return PendingStep(number, None, str(again))

    def outcome(self, steps: Sequence[PendingStep]) -> StepResult | LostStep:
        """Wait for the outcome of steps that count as one.

        Raises:
            WorkerDaemonError: the daemons cannot be used any more, or steps were lost MAX_IN_A_ROW
                in a row.
        """
        try:
            results = [self._result(each) for each in steps]
        except (StepFailed, StepLost) as error:
            return self._lost(steps[0].number, error)
        finally:
            self._num_done = steps[-1].number + 1
        self._since_success.losses = self._since_success.recoveries = 0
        result = results[0]
        for other in results[1:]:
            result = result.joined(other)
        return result

    def _result(self, sent: PendingStep) -> StepResult:
        if sent.future is None:
            raise StepLost(sent.reason)
        return self._recovering(sent.future.result)

    def _lost(self, number: int, error: WorkerDaemonError) -> LostStep:
        reason = error.message if isinstance(error, StepFailed) else str(error)
        if number < self._lost_before:
            return LostStep(reason, is_known=True)
        self._lost_before = self._num_sent
        self._since_success.losses += 1
        if self._since_success.losses >= MAX_IN_A_ROW:
            raise error
        _LOG.warning("a step was lost, its requests restart: %s", error)
        return LostStep(reason, is_known=False)

    def _recovering(self, use: Callable[[*_Args], _T], *args: *_Args) -> _T:
        """Use the group by a call; recover and use it again as often as may help.

        Raises:
            StepLost: this driver had to attach again, so all that was sent before is lost.
        """
        drained_until = 0.0
        dead: WorkerDied | None = None
        while True:
            try:
                if dead is not None:  # an operator may drain another rank meanwhile
                    self._replace(dead)
                    dead = None
                return use(*args)
            except DrainingError:
                now = time.monotonic()
                if not drained_until:
                    drained_until = now + self.settings.drained_for_s
                    _LOG.warning("the daemons are drained: waiting until that is undone")
                elif now >= drained_until:
                    raise
                time.sleep(_DRAIN_POLL_S)
            except WorkerDied as died:
                self._count_recovery(died)
                dead = died
            except (LeaseExpiredError, NotAttachedError) as expired:
                self._attach_again(expired)

    def _attach_again(self, cause: WorkerDaemonError) -> NoReturn:
        """Attach again, then raise StepLost."""
        self._count_recovery(cause)
        self._attach(cause)
        raise StepLost(str(cause)) from cause

    def _attach(self, cause: WorkerDaemonError) -> None:
        _LOG.warning("attaching again: %s", cause)
        self.group.attach()
        self.generation += 1
        self._prepare(reload=False)

    def _replace(self, died: WorkerDied) -> None:
        _LOG.warning("waiting for the successor of a daemon: %s", died)
        try:
            report = self.group.replace(died.rank, within_s=self.settings.replace_within_s)
        except ReplacementFailed as failed:
            raise failed from died
        self.generation += 1
        _LOG.warning("replaced ranks %s in %.1f s", report.ranks, sum(report.seconds.values()))

    def _count_recovery(self, error: WorkerDaemonError) -> None:
        if self._since_success.recoveries >= MAX_IN_A_ROW:
            raise error
        self._since_success.recoveries += 1

    def _prepare(self, *, reload: bool) -> LoadedGroup:
        return self.group.prepare(
            self.config,
            num_gpu_blocks=self.num_gpu_blocks,
            fit_max_model_len=self.fit_max_model_len,
            reload=reload,
            state_checkpoints=False,  # vLLM's scheduler knows no borders
        )
