"""The masks of a driver's steps: a matcher for each request with a grammar, and the time at which
each of its masks is sent.

A step is sent before the previous step's tokens are known, but a mask depends on the previous
token. So a step defers the sampling of such requests; WorkerGroup.sample_tokens sends the mask
during the forward pass. If the mask is known in time, the step itself carries it. Matchers are made
from the admissions in steps. After a jump (jump_forward.py) one is ahead of the steps in flight.

Masks come from other processes (grammars.py). A request whose mask is late is paused: its masks in
the steps in flight allow no token, and it is admitted again with its mask.
"""

from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from rpc_schema.extensions import extension_of
from rpc_schema.step import NO_TOKEN
from rpc_schema.structured import StructuredOutput
from worker_client.errors import RequestError, request_error
from worker_client.inputs.grammar_options import FIELD
from worker_client.parts.registry import may_jump
from worker_client.scheduler import RequestOutput, failed_request
from worker_client.scheduler_output import NewRequest, SchedulerOutput, StepResult
from worker_client.steps.drafts import StepDrafts
from worker_client.steps.masks import StepMasks
from worker_client.steps.sent_counts import read_counts
from worker_client.steps.step_checks import WIRE_LIMITS, admissions_fault, shape_fault
from worker_client.steps.step_fault import StepFault, refuse
from worker_client.structured.masked_rows import (
    NONE_EXPECTED,
    ExpectedTokens,
    Forking,
    Int32s,
    MaskedRow,
    RowSampling,
    State,
)

MAX_STEP_MASK_BYTES: Final = 1 << 20
"""Bound on the masks that a step itself carries, since admissions need room too. Rows with further
masks are deferred."""
MAX_MASK_BYTES: Final = 8 << 20
"""Bound on the masks in one message of sample_tokens."""
MIN_STEPS_SAVED: Final = 2
"""Fewest steps that a jump must save its request."""
MIXED_STEP_COST: Final = 0.5
"""The step that admits a request again after a jump is a mixed one: it takes up to this share
longer than a step of decodes, for all requests in it."""

CHECK_S: Final = 0.002
"""Time after which a wait for masks looks at what takes long."""

TOO_LONG: Final = "its grammar was not compiled in time: simplify it, or send fewer at a time"


class CompiledGrammars(Forking, Protocol):
    """The part of worker_client.structured.grammars.Grammars that is used here."""

    num_words: int

    @property
    def compile_s(self) -> float:
        """Seconds in which a grammar must be compiled."""

    def close(self) -> None:
        """End its processes."""

    def compile(self, source: StructuredOutput) -> "Future[Any]":
        """Compile a request's grammar; the future is done, within proceed(), when the request can
        begin, and raises RequestError."""

    def begin(self, source: StructuredOutput, tokens: Sequence[int] = ()) -> Any:
        """Return a new GrammarMatcher that takes the tokens of a request."""

    def take(self, matcher: Any, tokens: Sequence[int]) -> None:
        """Let a matcher that is ready take tokens that its masks allow."""

    def proceed(self, timeout_s: float = 0.0) -> None:
        """Ask for masks, and take those that are here; wait for the first at most timeout_s."""

    def forced_first(self, source: StructuredOutput) -> list[int]:
        """Return the tokens that a grammar forces at the start; none, if it is not compiled."""


def is_ready(compiled: "Future[Any]") -> bool:
    """Return True if a grammar is compiled; False if it is not yet, or cannot be."""
    return compiled.done() and not compiled.cancelled() and compiled.exception() is None


@dataclass(slots=True, eq=False)
class MaskedStep:
    """A step in the form that is sent, and its rows with a grammar."""

    output: SchedulerOutput
    sampled: list[MaskedRow] = field(default_factory=list)
    deferred: list[MaskedRow] = field(default_factory=list)
    """Rows whose sampling waits for a mask."""
    is_waiting: bool = False
    """True until their masks are sent."""


SampleLater: TypeAlias = Callable[[Mapping[str, Sequence[Int32s]], Sequence[str] | None], None]
"""Sends masks and the ids of the deferred requests to sample; None: all that are left. It is
WorkerGroup.sample_tokens for one step."""


class MaskedSteps:
    """Owns the matchers of a driver's requests. Used on the driver's thread only."""

    def __init__(self, grammars: CompiledGrammars) -> None:
        self.grammars = grammars
        self._rows: dict[str, MaskedRow] = {}
        self._waiting: dict[str, MaskedStep] = {}
        """Requests whose sampling waits for a mask, and their steps."""
        self._faults: dict[str, RequestOutput] = {}
        self._advanced: list[MaskedRow] = []
        """Rows whose matchers have taken a token of the newest result."""
        self._stray: list[str] = []
        """Requests of which steps in flight sample behind tokens that they have not gained."""
        self._paused: dict[str, MaskedRow] = {}
        """Requests that wait for a mask without a row."""
        self._resumed: dict[str, MaskedRow] = {}
        """Requests whose mask has come, and that are not admitted yet."""
        self._left: dict[str, MaskedRow] = {}
        """Rows that are void since the last plan: the next step may name them, as it may have been
        scheduled before."""

    def must_wait(self, output: SchedulerOutput) -> bool:
        """Return True if a step cannot be sent yet: it continues, preempts or finishes a request
        whose last token waits for its mask. The result of a sampling leaves out requests that have
        lost their row, and the scheduler expects a token of those that it preempts. Those that
        finish give their slots to others, which could defer too: workers hold logits for as many
        requests as have slots. Raises InvalidSchedulerOutput as plan does."""
        fault = shape_fault(output)
        if fault is not None:
            refuse(fault)
        waiting = self._waiting.keys()
        return bool(waiting) and not (
            waiting.isdisjoint(output.decode_req_ids)
            and waiting.isdisjoint(output.num_scheduled_tokens)
            and waiting.isdisjoint(output.preempted_req_ids)
            and waiting.isdisjoint(output.finished_req_ids)
        )

    def plan(self, output: SchedulerOutput) -> MaskedStep:
        """Return a step with the masks that are known, and the rows that must wait for theirs. A
        driver plans a step once, and may send it again.

        Raises:
            InvalidSchedulerOutput: the step is malformed.
        """
        fault = admissions_fault(tuple(output.scheduled_new_reqs), WIRE_LIMITS)
        counts = read_counts(output.num_scheduled_tokens)
        if output.num_drafts or output.draft_token_ids:
            fault = fault or self._drafts_fault(output)
        for found in (fault, counts):
            if isinstance(found, StepFault):
                refuse(found)
        self._admit(output)
        step = MaskedStep(output)
        if self._rows or self._left:
            self._plan_rows(step)
        return step

    def _drafts_fault(self, output: SchedulerOutput) -> StepFault | None:
        """Check that all drafts of requests with a grammar are known here, since their masks depend
        on them. The number of drafts is the group's check."""
        new = {each.req_id for each in output.scheduled_new_reqs if _grammar_of(each) is not None}
        for req_id in output.num_drafts:
            if (req_id in self._rows or req_id in new) and req_id not in output.draft_token_ids:
                return StepFault(
                    "masks cannot be made for the device's drafts",
                    "num_drafts",
                    output.num_drafts[req_id],
                    "give the drafts of a request with a grammar in draft_token_ids",
                    req_id,
                )
        return StepDrafts.of(output).tokens_fault(WIRE_LIMITS.vocab_size)

    def _admit(self, output: SchedulerOutput) -> None:
        """Make the rows of the requests that a step admits, and drop those of the requests that it
        ends or preempts."""
        admitted = [new.req_id for new in output.scheduled_new_reqs]
        leaving = (*output.finished_req_ids, *output.preempted_req_ids, *admitted)
        former = {req_id: self._rows.pop(req_id) for req_id in leaving if req_id in self._rows}
        for req_id in leaving:
            self._left.pop(req_id, None)
        for req_id in admitted:
            if req_id in self._resumed:
                former[req_id] = self._resumed.pop(req_id)
        for new in output.scheduled_new_reqs:
            grammar = _grammar_of(new)
            if grammar is not None:
                self._begin(new, grammar, former.pop(new.req_id, None))
        for row in former.values():
            row.end(self.grammars)

    def sent(self, step: MaskedStep) -> None:
        """Note that a planned step was sent."""
        step.is_waiting = bool(step.deferred)
        self._waiting.update((row.req_id, step) for row in step.deferred)

    def sample_ready(self, step: MaskedStep, sample: SampleLater) -> None:
        """Send the masks of a step's deferred rows if the tokens before them are known, in several
        messages if there are many."""
        if not step.is_waiting:
            return
        rows = step.deferred
        ready = [row.prepare(self.grammars) for row in rows]  # of all: their work begins at once
        if not all(ready):
            return
        states = {row.req_id: _states(row) for row in rows}
        masks = self._fill(rows)
        most = max(1, MAX_MASK_BYTES // (4 * self.grammars.num_words))
        names = list(masks)
        while (count := _count_within(most, [states[name] for name in names])) < len(names):
            count = max(1, count)
            now, names = names[:count], names[count:]
            sample({req_id: masks[req_id] for req_id in now}, now)
        sample({req_id: masks[req_id] for req_id in names}, None)
        step.is_waiting = False
        for row in step.deferred:
            del self._waiting[row.req_id]

    def take(self, step: MaskedStep, result: StepResult) -> Collection[str]:
        """Let the matchers take what a step sampled, and ask for their next masks. A token that its
        grammar rejects ends the request (`take_faults`). Return the requests whose tokens are not
        new, because they had them by a jump, or are void."""
        self._advanced.clear()
        repeated: list[str] = []
        for row in step.sampled:
            sampling = row.in_flight.popleft()
            if row.is_void:
                repeated.append(row.req_id)
            elif row.jumped:
                del row.jumped[0]
                repeated.append(row.req_id)
            elif self._rows.get(row.req_id) is row:
                self._take(row, sampling, _gained(row.req_id, sampling, result))
        if self._advanced:
            self.grammars.proceed()
        return repeated

    def _take(self, row: MaskedRow, sampling: RowSampling, tokens: Sequence[int]) -> None:
        """Let a row's matcher take what a step has sampled."""
        count = row.accept(sampling, len(tokens) - 1, self.grammars)
        row.note(tokens[:count])
        for token in tokens[count:]:
            if token == NO_TOKEN:  # its request ends, or is admitted again from its known tokens
                row.is_void = True
                return
            if row.matcher.error:
                self._refuse(row)
                return
            if not row.matcher.allows(token):
                self._fail(row, f"its grammar does not allow the sampled token {token}")
                return
            self.grammars.take(row.matcher, [token])
            row.note([token])
        if 0 < len(tokens) < sampling.num_tokens and row.has_placed:
            self._stray.append(row.req_id)
        elif tokens:
            self._advanced.append(row)

    def await_masks(self) -> None:
        """Wait for the masks that steps in flight need and that were asked for, but for those that
        are overdue."""
        while rows := self._late_rows():
            is_overdue = all(row.is_overdue for row in rows)
            self.grammars.proceed(0.0 if is_overdue else CHECK_S)
            if is_overdue:
                return

    def late(self) -> list[str]:
        """Return the requests of steps in flight whose mask was asked for and is not here."""
        return [row.req_id for row in self._late_rows()]

    def _late_rows(self) -> list[MaskedRow]:
        rows = (self._rows.get(req_id) for req_id in self._waiting)
        return [row for row in rows if row and row.is_placed and not row.prepare(self.grammars)]

    def take_stray(self) -> list[str]:
        """Return the requests that steps in flight continue from tokens which they have not gained:
        a token that their grammar forces could not be sampled. Another option forbids it, or the
        logits are not finite."""
        stray, self._stray = self._stray, []
        return [req_id for req_id in stray if req_id in self._rows]

    def fail_stray(self, req_id: str) -> None:
        """End a request of take_stray (`take_faults`)."""
        self._fail(self._rows[req_id], "no token that its grammar forces can be sampled")

    def pause(self, req_id: str) -> None:
        """Let a request wait for its mask without holding up the steps that name it."""
        row = self._paused[req_id] = self._left[req_id] = self._rows.pop(req_id)
        row.drop_guesses(self.grammars)
        row.is_void = True

    @property
    def has_paused(self) -> bool:
        """True if a request waits for its mask without a row."""
        return bool(self._paused)

    def take_resumed(self) -> list[str]:
        """Return the paused requests whose mask has come since. One whose matcher has failed ends
        instead (`take_faults`)."""
        known = [row for row in self._paused.values() if row.is_known]
        for row in known:
            if row.matcher.error:
                self._refuse(row)
            else:
                self._resumed[row.req_id] = self._paused.pop(row.req_id)
        return [row.req_id for row in known if not row.matcher.error]

    def find_expected(
        self, most: int, *, num_running: int, jumps: bool
    ) -> list[tuple[str, ExpectedTokens]]:
        """Return the requests that have taken a token of the newest result, each with up to `most`
        tokens that its next step may have as drafts. jumps: requests may jump instead; one that
        should soon, among so many running ones, has none, since drafts in flight are in its way."""
        num_saved = max(MIN_STEPS_SAVED, MIXED_STEP_COST * num_running)
        found: list[tuple[str, ExpectedTokens]] = []
        for row in self._advanced:
            if self._rows.get(row.req_id) is row:
                waits = jumps and row.waits_for_jump(most, num_saved)
                found.append((row.req_id, NONE_EXPECTED if waits else row.expected_next(most)))
        return found

    def find_jumps(self, num_running: int) -> list[tuple[str, list[int]]]:
        """Return the requests that have taken a token of the newest result and should jump from it,
        with the tokens that their grammars force next; none, if the steps that they save together
        would not make up for the time that all running requests lose."""
        advanced, self._advanced = self._advanced, []
        jumps: list[tuple[str, list[int]]] = []
        num_saved = 0
        for row in advanced:
            if row.may_jump and not row.has_drafts and self._rows.get(row.req_id) is row:
                tokens = list(row.matcher.forced)
                if len(tokens) >= row.num_unknown + MIN_STEPS_SAVED:
                    jumps.append((row.req_id, tokens))
                    num_saved += len(tokens) - row.num_unknown
        return jumps if num_saved >= MIXED_STEP_COST * num_running else []

    def jump(self, req_id: str, tokens: Sequence[int]) -> None:
        """Let a request's matcher take forced tokens, which its scheduler has taken. There must be
        more of them than tokens in flight."""
        row = self._rows.get(req_id)
        if row is not None:
            row.jumped = list(tokens)
            row.note(tokens)
            self.grammars.take(row.matcher, tokens)

    def take_faults(self) -> Mapping[str, RequestOutput]:
        """Return the requests that their grammars have ended, by id, and forget them."""
        faults, self._faults = self._faults, {}
        return faults

    def forget(self, req_id: str) -> None:
        """Drop a request that has ended."""
        for rows in (self._rows, self._paused, self._resumed):
            row = rows.pop(req_id, None)
            if row is not None:
                row.end(self.grammars)
                row.is_void = True
                self._left[req_id] = row

    def forget_steps(self) -> None:
        """Drop the steps in flight, which have failed. Their requests are lost or admitted
        again."""
        for step in self._waiting.values():
            step.is_waiting = False
        self._waiting.clear()

    def _begin(self, new: NewRequest, grammar: StructuredOutput, former: MaskedRow | None) -> None:
        """Make a request's matcher, which takes the tokens that the request has. former: its row
        until now, whose matcher goes on if it has taken these."""
        tokens = [int(token) for token in new.token_ids[new.num_prompt_tokens :]]
        num_left = len(new.token_ids) - new.num_computed_tokens
        if former is not None and (former.grammar, former.tokens) == (grammar, tokens):
            former.drop_guesses(self.grammars)
            self._rows[new.req_id] = replace(
                former, num_left=num_left, in_flight=deque(), jumped=[], is_void=False
            )
            return
        if former is not None:
            former.end(self.grammars)
        row = MaskedRow(
            new.req_id,
            grammar,
            self.grammars.begin(grammar, tokens),
            np.asarray(new.token_ids[: new.num_prompt_tokens], np.int32),
            num_left=num_left,
            may_jump=may_jump(new.extensions),
        )
        row.note(tokens)
        self._rows[new.req_id] = row
        if row.matcher.error:
            self._refuse(row)

    def _plan_rows(self, step: MaskedStep) -> None:
        """Find the rows that sample, and those of them whose masks can be computed now."""
        output = step.output
        decodes, counts = frozenset(output.decode_req_ids), output.num_scheduled_tokens
        known: list[MaskedRow] = []
        for row in (*self._rows.values(), *self._left.values()):
            if row.req_id in decodes:
                row.num_left -= 1
            elif row.req_id in counts:
                row.num_left -= counts[row.req_id] - output.num_drafts.get(row.req_id, 0)
            else:
                continue
            if row.num_left:
                continue  # a chunk of a prompt
            row.num_left = 1
            row.in_flight.append(_sampling(output, row.req_id))
            (known if row.prepare(self.grammars) else step.deferred).append(row)
            step.sampled.append(row)
        self._left.clear()
        most = MAX_STEP_MASK_BYTES // (4 * self.grammars.num_words)
        count = _count_within(most, [_states(row) for row in known])
        step.deferred += known[count:]
        if step.sampled:
            masks = self._fill(known[:count])
            copies = {id(mask): mask.copy() for own in masks.values() for mask in own}
            values = StepMasks(
                {req_id: [copies[id(mask)] for mask in own] for req_id, own in masks.items()},
                [row.req_id for row in step.deferred],
            )
            step.output = replace(output, extensions=(*output.extensions, values))

    def _fill(self, rows: Sequence[MaskedRow]) -> dict[str, list[Int32s]]:
        """Return the masks of the newest sampling of rows that are prepared: int32 [W] for each
        token that they may gain. Equal states share a mask. End those whose matcher has failed."""
        filled: dict[State, Int32s] = {}
        masks: dict[str, list[Int32s]] = {}
        for row in rows:
            if row.matcher.error and not (row.jumped or row.is_void):
                self._refuse(row)
            own: list[Int32s] = []
            for state, words in row.masks():
                if isinstance(state, int):
                    words = filled.get(state, self._only(state))
                assert words is not None, "it is known"
                filled.setdefault(state, words)
                own.append(filled[state])
            masks[row.req_id] = own
        return masks

    def _only(self, token: int) -> Int32s:
        """Return the mask that allows one token, or none (NO_TOKEN)."""
        words = np.zeros(self.grammars.num_words, np.uint32)
        if token != NO_TOKEN:
            words[token // 32] = 1 << token % 32
        return words.view(np.int32)

    def _refuse(self, row: MaskedRow) -> None:
        """End a request whose grammar exceeds a bound."""
        reason = row.matcher.error
        fix = "simplify it, or send it again if it was served before"
        self._fail(row, reason, request_error(FIELD, None, reason, fix))

    def _fail(self, row: MaskedRow, reason: str, refusal: RequestError | None = None) -> None:
        self.forget(row.req_id)
        self._faults[row.req_id] = failed_request(
            row.req_id,
            reason,
            num_prompt_tokens=row.prompt.size,
            token_ids=row.tokens,
            refusal=refusal,
        )


def _grammar_of(new: NewRequest) -> StructuredOutput | None:
    return extension_of(new.extensions, StructuredOutput)


def _gained(req_id: str, sampling: RowSampling, result: StepResult) -> list[int]:
    """Return the tokens that a request has gained from a sampling, oldest first."""
    if not sampling.drafts:
        token = result.sampled.get(req_id)
        return [] if token is None else [token]
    pairs = zip(result.req_ids, result.token_ids, strict=True)
    return [token for own, token in pairs if own == req_id]


def _sampling(output: SchedulerOutput, req_id: str) -> RowSampling:
    """Return what a step samples for a request."""
    return RowSampling([int(token) for token in output.draft_token_ids.get(req_id, ())])


def _states(row: MaskedRow) -> list[State]:
    return [state for state, _ in row.masks()]


def _count_within(most: int, keys: Sequence[Sequence[Hashable]]) -> int:
    """Return how many of these lists of keys, from the first on, have at most so many distinct
    values."""
    seen: set[Hashable] = set()
    for count, own in enumerate(keys):
        seen.update(own)
        if len(seen) > most:
            return count
    return len(keys)
