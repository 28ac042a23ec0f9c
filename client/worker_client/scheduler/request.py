"""One request of the reference scheduler: its counts, its end, and its start, here or by adoption
from another driver."""

import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rpc_schema.extensions import extension_of
from rpc_schema.kv_cache import NUM_NULL_BLOCKS, BlockGroup, blocks_for
from rpc_schema.pooling import PoolingParams, pooled_bytes
from rpc_schema.routed_experts import ReplayExperts, RoutedExpertsWanted
from rpc_schema.sampling import (
    MAX_PROMPT_LOGPROBS_TOKENS,
    FullLogprobs,
    FullLogprobsWanted,
    GivenLogprobs,
    LogprobsWanted,
    LogprobTokens,
    PromptLogprobsWanted,
    StopTokens,
    TokenLogprobs,
    TraceWanted,
)
from rpc_schema.step import NO_TOKEN
from rpc_schema.structured import StructuredOutput
from worker_client.errors import RequestError
from worker_client.group.adoption import AdoptedRequest
from worker_client.inputs.request_checks import check_fits, feature_error
from worker_client.inputs.stop_strings import StopWatch
from worker_client.parts.registry import Extensions, may_refuse, pools, prefix_root
from worker_client.requests import (
    FinishReason,
    GenerationRequest,
    PromptTokenIds,
    RequestOutput,
    VersionRun,
    seeded,
)
from worker_client.scheduler.drafting.expected_drafts import (
    NO_DRAFTS_EXPECTED,
    ExpectedDrafts,
)
from worker_client.scheduler.experts_record import ExpertsRecord
from worker_client.scheduler.interface import SchedulerLimits
from worker_client.scheduler_output import (
    DraftOutcome,
    Experts,
    ExpertsChunk,
    FullLogprob,
    Logprobs,
    NewRequest,
    PromptChunk,
    SampledToken,
    StepResult,
    TraceChunk,
)
from worker_client.steps.step_checks import (
    MAX_ADMITTED_BYTES,
    MAX_ADMITTED_TOKENS,
    WIRE_LIMITS,
    GroupLimits,
    admission_bytes,
    extension_fault,
    pooling_admission_fault,
)

if TYPE_CHECKING:  # it needs the library of an extra
    from worker_client.inputs.tokenizer import Tokenizer


NO_DRAFTS: Final = DraftOutcome(0, 0)

_NOTE_BYTES: Final = 112
"""Bound on an encoded _Note without its runs of versions, and without its stop strings, whose bytes
Traits.fixed_bytes counts."""
_RUN_BYTES: Final = 24
"""Bound on an encoded run."""
MAX_NOTED_RUNS: Final = 2048
"""Runs of versions in a note; earlier ones become one run of an unknown version."""


class _Note(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Facts of a request for another driver's scheduler, besides those that the workers have."""

    limit: int
    arrival: int
    num_cached_tokens: int
    num_preemptions: int
    index: int | None = None
    stop: tuple[str, ...] = ()
    includes_stop: bool = False
    priority: int = 0
    deadline_unix_s: float | None = None
    """Time of day: the monotonic clock of another host differs."""
    weights_versions: tuple[VersionRun, ...] = ()
    is_mixed: bool = False
    """Its blocks have KV of weights that were replaced."""
    adapter_version: int | None = None
    """Number of the weights of its adapter that its row began with."""
    num_recomputed: int = 0
    """Leading positions whose KV was computed again, as Request has them."""


@dataclass(slots=True)
class HeldBlocks:
    """A request's blocks. The start of the request sets root and may_share, and num_cached_tokens,
    num_preemptions and is_mixed if it was adopted. From then on RequestBlocks alone writes here."""

    by_group: tuple[list[int], ...] = ()
    """Blocks of each group of layers, by position; 0 replaces a block that a window has passed.
    Empty while it waits."""
    end: int = 0
    """Position after the last one for which it has a block in every group, as far as extend() has
    told: it may have more."""
    hashes: list[bytes] = field(default_factory=list)
    """Hashes of its full blocks, in units of the smallest block size of all groups, as far as
    tokens are known. They depend on tokens alone, and outlive a preemption."""
    num_remembered: int = 0
    """Number of leading hashes that the pool has recorded."""
    num_shared: int = 0
    """Number of leading hashes whose blocks were in the prefix cache at its latest admission."""
    num_cached_tokens: int = -1
    """Prompt tokens found in the prefix cache at the first admission; -1 before that."""
    may_share: bool = True
    """True if it may reuse cached blocks of other requests."""
    root: bytes = b""
    """First parent of the hash chain."""
    num_preemptions: int = 0
    """Number of times that it was preempted."""
    is_mixed: bool = False
    """True if weights have computed some of its KV that were replaced since: no other request may
    begin with its blocks."""


_REPORTED: Final = frozenset(
    (LogprobsWanted, FullLogprobsWanted, LogprobTokens, PromptLogprobsWanted)
)


@dataclass(slots=True)
class Reported:
    """Reports of a request so far; None of each kind that it did not ask for."""

    logprobs: list[Logprobs] | None = None
    token_id_logprobs: list[NDArray[np.float32]] | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    full_logprobs: list[FullLogprob] | None = None

    @classmethod
    def of(cls, extensions: Extensions, num_prompt_tokens: int) -> "Reported | None":
        """Return what a request with these extensions has at first; None if it reports nothing."""
        if _REPORTED.isdisjoint(map(type, extensions)):
            return None
        kinds = {type(each) for each in extensions}
        return cls(
            [] if LogprobsWanted in kinds else None,
            [] if LogprobTokens in kinds else None,
            [None] * num_prompt_tokens if PromptLogprobsWanted in kinds else None,
            [] if FullLogprobsWanted in kinds else None,
        )

    def take(self, req_id: str, result: StepResult, one: SampledToken | None = None) -> None:
        """Append the reports on a sampled token. one: the token, if it is one of several that the
        request has gained in the step."""
        for kind, taken in (
            (TokenLogprobs, self.logprobs),
            (FullLogprobs, self.full_logprobs),
            (GivenLogprobs, self.token_id_logprobs),
        ):
            if taken is not None:
                own = result.reports[kind][req_id] if one is None else one.reports[kind]
                taken.append(own)

    def take_trace(self, chunk: TraceChunk, num_prompt_tokens: int) -> None:
        """Note a chunk of the tokens that the request has brought, perhaps again. Chunks come in
        order."""
        if self.full_logprobs is not None:
            place = chunk.first - num_prompt_tokens
            self.full_logprobs[place : place + len(chunk.logprobs)] = chunk.logprobs

    def take_prompt(self, chunk: PromptChunk) -> None:
        """Note a chunk of the prompt, perhaps again: after a preemption it is computed again."""
        if self.prompt_logprobs is not None:
            places = range(chunk.first, len(self.prompt_logprobs))
            for place, entry in zip(places, chunk.logprobs, strict=False):
                self.prompt_logprobs[place] = entry


class SampleIdentity(NamedTuple):
    """A request's place among the samples of one prompt, and the strings that end it."""

    place: int | None = None
    """None: it is the only sample."""
    stop: tuple[str, ...] = ()
    """Stop strings: WatchedRequest looks for them."""
    includes_stop: bool = False


ONLY_SAMPLE: Final = SampleIdentity()


class Traits(msgspec.Struct, frozen=True, gc=False):
    """Consequences of a request's extensions for its steps."""

    stop_ids: frozenset[int] = frozenset()
    may_refuse: bool = False
    """Its tokens may be refused after a step has counted them."""
    pools: bool = False
    output_bytes: int = 0
    """Bytes of the output of a request that pools."""
    may_draft: bool = True
    """Its steps may verify drafts that the device makes."""
    fixed_bytes: int = 0
    """Bytes of the extensions and the stop strings in an admission's message."""

    @classmethod
    def of(cls, extensions: Extensions, sample: SampleIdentity) -> "Traits":
        """Return the traits of a request; its output's bytes are set where they are known."""
        if not (extensions or sample.stop):
            return PLAIN
        fixed_bytes = len(msgspec.msgpack.encode((extensions, sample.stop)))
        stops = extension_of(extensions, StopTokens)
        refuses, no_samples = may_refuse(extensions), pools(extensions)
        has_grammar = extension_of(extensions, StructuredOutput) is not None
        return cls(
            stop_ids=frozenset() if stops is None else frozenset(stops.token_ids),
            may_refuse=refuses,
            pools=no_samples,
            may_draft=not (refuses or no_samples or has_grammar),
            fixed_bytes=fixed_bytes,
        )


PLAIN: Final = Traits(fixed_bytes=2)
"""Traits of a request without extensions and stop strings."""


@dataclass(slots=True, eq=False)
class Request:
    """A request's progress. Three counts matter, and each is at most the next:

    num_computed (positions whose step was sent) <= num_tokens (known or being sampled) <= limit.

    While drafts are in flight, the first two are upper bounds: they count all of these as accepted.
    """

    id: str
    tokens: "array[int]"
    """Known tokens, as int32: the prompt, then the generated ones."""
    num_prompt_tokens: int
    limit: int
    """Number of tokens at which max_tokens or max_model_len ends it."""
    extensions: Extensions
    arrival: int = -1
    """Place in the order of arrival; the request queues assign it."""
    priority: int = 0
    deadline: float = math.inf
    """Seconds of time.monotonic() at which it ends, whether it has finished or not."""
    urgency: Any = ()
    """Its key by the scheduler's policy; the request queues assign it when it is queued."""
    sample: SampleIdentity = ONLY_SAMPLE
    traits: Traits = PLAIN
    num_tokens: int = field(init=False)
    num_computed: int = 0
    admission: int = -1
    """Increases with each admission; -1 while waiting."""
    needs_admission: bool = False
    """True if it runs here, but its next step must admit it on the workers: it was adopted, or has
    jumped forward."""
    last_step: int = -1
    """Step that samples its newest token; -1 for none."""
    num_void: int = 0
    """Number of tokens in flight that are to be ignored."""
    repeated: range = range(0)
    """Positions of tokens that it has from a jump, but whose samples still arrive. They are the
    first of the num_void tokens."""
    num_drafts_in_flight: int = 0
    num_drafted: int = 0
    """Drafts of its steps with results."""
    num_accepted: int = 0
    """Those of them that are its tokens, as soon as all tokens of their step are taken."""
    accepted_end: int = 0
    """Position after the last of these."""
    draft_row: int = -1
    """DraftLengths owns it; -1: it has not decoded yet."""
    expected: ExpectedDrafts = NO_DRAFTS_EXPECTED
    """Tokens that its next steps may have as drafts, if the device makes none for it. Their
    positions count the drafts in flight as num_tokens does."""
    forced_in_flight: deque[int] = field(default_factory=deque)
    """Number of certain drafts in each step in flight that has some of these."""
    blocks: HeldBlocks = field(default_factory=HeldBlocks)
    reported: Reported | None = None
    """None if it reports nothing."""
    experts: ExpertsRecord | None = None
    """None if it did not ask for the experts of its tokens."""
    num_given: int = field(init=False)
    """Tokens that it began with: the prompt, and output that it has brought."""
    num_recomputed: int = 0
    """Leading positions whose KV was computed again behind tokens that were sampled before, and so
    were the experts that the workers keep with it: what its row would tell another driver."""
    num_brought: int = 0
    """Output tokens that it has brought, all of which are reported."""
    closing: int | None = None
    """Another one, the last of all, which takes the place of the token that its first step
    samples."""
    weights_versions: tuple[VersionRun, ...] = ()
    """Versions of the weights that have sampled its tokens, as far as stamp() was told."""
    adapter_version: int | None = None
    """Number of the weights of its adapter that sample for it, in the step whose result comes next;
    AdapterVersions has it."""
    sees_each: bool = False
    """True if it does more with each token that it gains than to look for one that ends it, or has
    drafts of the driver."""

    def __post_init__(self) -> None:
        self.num_tokens = len(self.tokens)
        self.num_given = self.num_prompt_tokens
        if self.sample is not ONLY_SAMPLE or self.extensions:
            self._note_features()

    def _note_features(self) -> None:
        self.traits = Traits.of(self.extensions, self.sample)
        self.reported = Reported.of(self.extensions, self.num_prompt_tokens)
        self.blocks.root = prefix_root(self.extensions)
        if extension_of(self.extensions, RoutedExpertsWanted) is not None:
            self.experts = ExpertsRecord()
        trace = extension_of(self.extensions, TraceWanted)
        if trace is not None:
            self.num_brought = trace.num_tokens
            self.closing = trace.last_token_id if trace.last_token_id >= 0 else None
        self.sees_each = (
            self.reported is not None or self.closing is not None or not self.traits.may_draft
        )
        # Prompt tokens found in the cache are not computed, so they would have no logprobs.
        self.blocks.may_share = self.reported is None or self.reported.prompt_logprobs is None

    @property
    def most_cached(self) -> int:
        """Most of its tokens whose KV it may find in the cache: what a trace still has to report is
        computed, and experts that do not fit into a reply."""
        most = len(self.tokens) - 1
        if self.experts is not None:
            most = min(most, self.num_settled_experts + self.experts.max_cached)
        return (
            min(most, self.num_prompt_tokens + self.num_reported - 1) if self.is_tracing else most
        )

    @property
    def is_tracing(self) -> bool:
        """True if tokens that it has brought are still to be reported."""
        return self.num_reported < self.num_brought

    @property
    def num_reported(self) -> int:
        """Number of its output tokens that have been reported, if it has brought some."""
        full = None if self.reported is None else self.reported.full_logprobs
        return 0 if full is None else len(full)

    @property
    def pools(self) -> bool:
        """True if it samples nothing. It ends with the pooled output of the step that computes its
        last token."""
        return self.traits.pools

    @property
    def is_running(self) -> bool:
        """True if it has blocks and a place in RequestQueues.running; otherwise it waits. The
        workers may not have it yet (needs_admission)."""
        return self.admission >= 0

    @property
    def stopped_text(self) -> str | None:
        """The text that a stop string has ended."""
        return None

    @property
    def most_computed(self) -> int:
        """Largest number of its tokens whose KV is computed: all but the last sampled one."""
        return self.limit if self.pools else self.limit - 1

    @property
    def least_computed(self) -> int:
        """Number of positions that stay computed even if every token in flight is refused."""
        if not (self.traits.may_refuse or self.num_drafts_in_flight):
            return self.num_computed
        return min(self.num_computed, len(self.tokens) - 1)

    @property
    def num_in_flight(self) -> int:
        """Number of tokens being sampled."""
        return self.num_tokens - len(self.tokens)

    @property
    def most_drafts(self) -> int:
        """Most drafts that its next step may have, if all of its tokens are to be within the
        limit."""
        room = self.limit - 1 - self.num_tokens
        return room if self.traits.may_draft else min(room, self.num_expected)

    @property
    def num_expected(self) -> int:
        """Number of drafts that its next step may have of the expected tokens."""
        return self.expected.count_from(self.num_tokens)

    @property
    def num_certain(self) -> int:
        """Number of these that are accepted for certain, the first ones."""
        return self.expected.count_forced_from(self.num_tokens)

    def expect(self, tokens: Sequence[int], num_forced: int) -> None:
        """Note tokens that may follow those in flight, up to one that ends it. One whose drafts the
        device makes has no others."""
        if self.traits.may_draft:
            return
        stops = self.traits.stop_ids
        end = next((i for i, token in enumerate(tokens) if token in stops), len(tokens))
        self.expected = ExpectedDrafts(tokens[:end], self.num_tokens, min(num_forced, end))

    def take_drafts(self, count: int) -> Sequence[int]:
        """Return the drafts of its next step, which is about to be sent: the first of the expected
        tokens."""
        self.forced_in_flight.append(min(count, self.num_certain))
        return self.expected.from_place(self.num_tokens, count)

    def take_outcome(self, outcome: DraftOutcome) -> DraftOutcome:
        """Note what has become of its drafts in a step, before the tokens of that step. Return the
        outcome of those that were guesses, and were put to the test."""
        num_drafted, num_accepted = outcome
        self.num_drafts_in_flight -= num_drafted
        if not self.num_void:
            self.num_drafted += num_drafted
            self.num_accepted += num_accepted
            self.accepted_end = len(self.tokens) + num_accepted
        if not self.forced_in_flight:
            return outcome
        num_forced = self.forced_in_flight.popleft()
        if self.num_void or outcome.num_accepted < num_forced:
            return NO_DRAFTS
        return DraftOutcome(outcome.num_drafted - num_forced, outcome.num_accepted - num_forced)

    def take(self, token: int) -> FinishReason | None:
        """Append a sampled token; return the reason if the request ends with it."""
        tokens = self.tokens
        tokens.append(token)
        if token in self.traits.stop_ids:
            return "stop"
        return "length" if len(tokens) == self.limit else None

    def bring(self, tokens: Sequence[int]) -> FinishReason | None:
        """Append tokens that it has brought, up to one that ends it; return the reason."""
        reason = next((reason for token in tokens if (reason := self.take(token))), None)
        self.num_tokens = self.num_given = len(self.tokens)
        self.weights_versions = (VersionRun(None, self.num_tokens - self.num_prompt_tokens),)
        return reason

    def gain(self, token: int, result: StepResult, one: SampledToken | None) -> FinishReason | None:
        """Append a sampled token and the reports on it, or in its place the last token that the
        request has brought; return the reason if it ends. one: as Reported.take takes it."""
        if self.closing is not None:
            return self.bring((self.closing,))
        reason = self.take(token)
        if self.reported is not None:
            self.reported.take(self.id, result, one)
        return reason

    def gain_run(self, tokens: Sequence[int], outcome: DraftOutcome) -> bool:
        """Take the outcome of its drafts in a step and append the tokens of that step, none of
        which is NO_TOKEN. Return False, and change nothing, if there may be more to do with one of
        them: if it may end the request, for example."""
        known, stops = self.tokens, self.traits.stop_ids
        if (
            self.sees_each
            or self.num_void
            or self.num_tokens == self.limit
            or len(known) + len(tokens) >= self.limit
            or (stops and not stops.isdisjoint(tokens))
        ):
            return False
        num_drafted, num_accepted = outcome
        self.num_drafts_in_flight -= num_drafted
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        if num_drafted > num_accepted:
            num_refused = num_drafted - num_accepted
            self.num_tokens -= num_refused
            if self.is_running:
                self.num_computed -= num_refused
        known.extend(tokens)
        return True

    def take_again(self) -> FinishReason | None:
        """Append all generated tokens of an adopted request again, up to its end or to a NO_TOKEN;
        return the reason if it ends. A request that reports anything restarts from its prompt:
        earlier reports are not kept."""
        generated = self.tokens[self.num_prompt_tokens :]
        del self.tokens[self.num_prompt_tokens :]
        reason = None
        for token in generated if self.reported is None else generated[: self.num_brought]:
            if token == NO_TOKEN or reason is not None:
                break
            reason = self.take(token)
        self.num_tokens = len(self.tokens)
        if self.reported is not None:
            self.num_given = self.num_tokens
        return reason

    def stamp(self, version: int | None, end: int | None = None) -> None:
        """Note that weights of this version have sampled the tokens that are not stamped yet, up to
        position `end`."""
        known = len(self.tokens) if end is None else min(end, len(self.tokens))
        runs, left = [], max(0, known - self.num_prompt_tokens)
        for run in self.weights_versions:
            if left:
                runs.append(run._replace(num_tokens=min(run.num_tokens, left)))
                left -= runs[-1].num_tokens
        made = VersionRun(version, left, self.adapter_version)
        if left and runs and runs[-1]._replace(num_tokens=left) == made:
            runs[-1] = made._replace(num_tokens=runs[-1].num_tokens + left)
        elif left:
            runs.append(made)
        self.weights_versions = tuple(runs)

    def forget_adapter_versions(self) -> None:
        """Note that it is not known which weights of its adapter have sampled its tokens."""
        self.adapter_version = None
        runs = (run._replace(adapter_version=None) for run in self.weights_versions)
        self.weights_versions = tuple(runs)

    def go_on_from_known(self, num_void: int = 0) -> None:
        """Give up the tokens in flight. num_void: how many of them still arrive, to be ignored."""
        self.num_tokens = len(self.tokens)
        self.num_void = num_void
        self.repeated = range(0)
        self.expected = NO_DRAFTS_EXPECTED

    def num_jumped(self, tokens: Sequence[int]) -> int:
        """Return how many of these forced tokens it may gain at once: those before the first one
        that could end it; 0 if no more than are in flight."""
        room = self.limit - 1 - len(self.tokens)
        stops = self.traits.stop_ids
        count = next((i for i, token in enumerate(tokens[:room]) if token in stops), None)
        count = min(len(tokens), room) if count is None else count
        return count if count > self.num_in_flight and not self.num_void else 0

    def jump(self, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
        """Gain forced tokens, up to one that ends it; return how many, and the reason."""
        first, end = len(self.tokens), self.num_tokens
        for count, token in enumerate(tokens, 1):
            reason = self.take(token)
            if reason is not None:
                return count, reason
        self.go_on_from_known(num_void=end - first)
        self.repeated = range(first, end)
        return len(tokens), None

    def admission_bytes(
        self, num_tokens: int, groups: Sequence[BlockGroup], num_runs: int | None = None
    ) -> int:
        """Return the most bytes of a step's message that its admission with so many tokens takes.
        num_runs: of versions; None: of the tokens that it has, and perhaps one more."""
        num_blocks, num_runs = 0, len(self.weights_versions) + 1 if num_runs is None else num_runs
        note_bytes = _NOTE_BYTES + _RUN_BYTES * min(num_runs, MAX_NOTED_RUNS)
        for group in groups:
            num_blocks += blocks_for(num_tokens, group.block_size)
        own = self.traits.fixed_bytes
        return admission_bytes(num_tokens, num_blocks, len(self.id), own, note_bytes)

    def as_new(self, sampled_by: int, adapter_version: int | None = None) -> NewRequest:
        """Return its admission for the workers. sampled_by: version of the weights that have
        sampled its newest tokens; adapter_version: that of its adapter's present ones."""
        if len(self.tokens) > self.num_prompt_tokens:
            self.stamp(sampled_by)
        self._note_recomputed()
        by_group = self.blocks.by_group  # their lists grow later
        note = _Note(
            self.limit,
            self.arrival,
            self.blocks.num_cached_tokens,
            self.blocks.num_preemptions,
            *self.sample,
            self.priority,
            None if self.deadline == math.inf else self.deadline + _unix_offset_s(),
            _noted(self.weights_versions),
            self.blocks.is_mixed,
            adapter_version,
            self.num_recomputed,
        )
        return NewRequest(
            req_id=self.id,
            token_ids=np.array(self.tokens),
            num_prompt_tokens=self.num_prompt_tokens,
            num_computed_tokens=self.num_computed,
            block_ids=by_group[0].copy(),
            more_block_ids=[own.copy() for own in by_group[1:]] if len(by_group) > 1 else (),
            extensions=self.extensions if self.experts is None else self._going_on(),
            note=msgspec.msgpack.encode(note),
        )

    def _note_recomputed(self) -> None:
        """Note, at an admission, what is computed again, if it is not with its present KV."""
        if not self.needs_admission:
            has_sampled = len(self.tokens) > self.num_given
            self.num_recomputed = len(self.tokens) - 1 if has_sampled else 0
        if self.experts is not None and not self.experts.num_known:
            self.experts.num_recomputed = self.num_recomputed

    def _going_on(self) -> Extensions:
        """Return its extensions for an admission: the experts that are settled need not be reported
        again."""
        wanted = RoutedExpertsWanted(first=self.num_settled_experts)
        return tuple(wanted if type(e) is RoutedExpertsWanted else e for e in self.extensions)

    @property
    def num_known_experts(self) -> int:
        """Number of its leading tokens whose experts are known, without refused drafts."""
        return 0 if self.experts is None else min(self.experts.num_known, len(self.tokens) - 1)

    @property
    def num_settled_experts(self) -> int:
        """Number of these that stay as they are, whatever computes the tokens again: what was
        sampled or reported of the request has followed from them."""
        if self.experts is None:
            return 0
        end = len(self.tokens) if len(self.tokens) > self.num_given else 0
        if self.is_tracing:
            end = self.num_prompt_tokens + self.num_reported if self.num_reported else 0
        return min(self.experts.num_known, max(0, end - 1))

    @property
    def known_experts(self) -> Experts | None:
        """The experts of its tokens, as far as they are known: a view; None if there are none."""
        return None if self.experts is None else self.experts.first(self.num_known_experts)

    def take_experts(self, chunks: Sequence[ExpertsChunk]) -> None:
        """Note what a step reports of its tokens' experts."""
        if self.experts is not None:
            self.experts.take(chunks, self.num_settled_experts)

    def output(
        self,
        reason: FinishReason,
        sampled_by: int,
        error: str = "",
        pooled: NDArray[np.float32] | None = None,
    ) -> RequestOutput:
        """Return its output as it ends. sampled_by: version of the weights that have sampled its
        newest tokens, or pooled it."""
        self.stamp(sampled_by)
        if pooled is not None:
            self.weights_versions = (VersionRun(sampled_by, 0, self.adapter_version),)
        reported, experts = self.reported or Reported(), self.known_experts
        return RequestOutput(
            req_id=self.id,
            token_ids=self.tokens[self.num_prompt_tokens :].tolist(),
            finish_reason=reason,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=max(0, self.blocks.num_cached_tokens),
            num_preemptions=self.blocks.num_preemptions,
            logprobs=reported.logprobs,
            token_id_logprobs=reported.token_id_logprobs,
            prompt_logprobs=reported.prompt_logprobs,
            full_logprobs=reported.full_logprobs,
            routed_experts=None if experts is None else experts.copy(),
            num_recomputed_experts=0 if self.experts is None else self.experts.num_recomputed,
            pooled=pooled,
            text=self.stopped_text if reason == "stop" else None,
            index=self.sample.place,
            weights_versions=self.weights_versions,
            error=error,
            num_drafted=self.num_drafted,
            num_accepted=self.num_accepted - max(0, self.accepted_end - len(self.tokens)),
        )


@dataclass(slots=True, eq=False)
class WatchedRequest(Request):
    """A request that stop strings may end."""

    watch: StopWatch = field(kw_only=True)

    def __post_init__(self) -> None:
        Request.__post_init__(self)
        self.sees_each = True

    def take(self, token: int) -> FinishReason | None:
        """Append a sampled token; return the reason if the request ends with it."""
        # @dataclass(slots=True) creates another class: super() would refer to the original one.
        reason = Request.take(self, token)
        if reason != "stop" and self.watch.take(token):
            return "stop"
        return reason

    @property
    def stopped_text(self) -> str | None:
        """The text that a stop string has ended."""
        return self.watch.stopped_text


def _request_class(
    sample: SampleIdentity, extensions: Extensions, texts: "Tokenizer | None"
) -> Callable[..., Request]:
    """Return the class that a request's stop strings need, with their watch.

    Raises:
        RequestError: it has stop strings, and there is no tokenizer.
    """
    if not sample.stop:
        return Request
    if texts is None:
        raise RequestError(
            "stop strings need the model's tokenizer",
            field="sampling.stop",
            value=sample.stop[0],
            fix="give the Scheduler a tokenizer, or use stop_token_ids",
        )
    stops = extension_of(extensions, StopTokens)
    watch = StopWatch(
        sample.stop,
        texts.stream(),
        min_tokens=0 if stops is None else stops.min_tokens,
        includes_stop=sample.includes_stop,
    )
    return partial(WatchedRequest, watch=watch)


def new_request(
    request: GenerationRequest, limits: SchedulerLimits, texts: "Tokenizer | None" = None
) -> Request:
    """Return a request in its initial state, with a seed if it needs one. texts: the tokenizer
    whose text is searched for stop strings.

    Raises:
        RequestError: a field has the wrong type or is out of bounds, or it can never be served.
    """
    request = check_fits(request, max_model_len=limits.max_model_len, vocab_size=limits.vocab_size)
    request = seeded(request)
    sampling = request.sampling
    if sampling.n != 1:
        raise RequestError(
            "a request of several samples",
            field="sampling.n",
            value=sampling.n,
            fix="add each of worker_client.requests.forked(request), as Driver does",
        )
    num_prompt = len(request.prompt)
    limit = min(num_prompt + request.max_tokens, limits.max_model_len)
    if request.pooling is not None:
        limit = num_prompt
    samples = request.pooling is None
    if limit - samples > limits.longest_request:
        usable = limits.num_blocks - NUM_NULL_BLOCKS
        raise RequestError(
            f"{limit} tokens do not fit into {usable} blocks of {limits.block_size}",
            field="max_tokens" if samples else "prompt",
            value=request.max_tokens if samples else num_prompt,
            fix="ask for less" if samples else "use a shorter prompt",
        )
    most_tokens = limits.max_num_batched_tokens
    if sampling.prompt_logprobs is not None and most_tokens > MAX_PROMPT_LOGPROBS_TOKENS:
        raise RequestError(
            f"a step may have {most_tokens} tokens, too many for log probabilities of prompts",
            field="sampling.prompt_logprobs",
            value=sampling.prompt_logprobs,
            fix=f"load with max_num_batched_tokens of at most {MAX_PROMPT_LOGPROBS_TOKENS}",
        )
    extensions = request.extensions(limits.end_ids)
    fault = None
    if extensions and (request.features or not _only_stops(extensions)):
        fault = extension_fault(extensions, limits.bounds, num_prompt)
    if fault is None and not (samples and limits.generates):
        fault = pooling_admission_fault(extensions, num_prompt, 0, group_bounds(limits))
    if fault is not None:
        raise feature_error(fault)
    sample = ONLY_SAMPLE
    if sampling.stop or request.index is not None:
        includes_stop = sampling.include_stop_str_in_output
        sample = SampleIdentity(request.index, sampling.stop, includes_stop)

    def make(extensions: Extensions) -> Request:
        return _request_class(sample, extensions, texts)(
            id=request.id,
            tokens=_int32s(request.prompt),
            num_prompt_tokens=num_prompt,
            limit=limit,
            extensions=extensions,
            priority=request.priority,
            deadline=math.inf if request.deadline is None else request.deadline,
            sample=sample,
        )

    made = make(extensions)
    if request.output_token_ids:
        made = _with_output(made, request.output_token_ids, make)
    _check_replay(made)
    _note_limits(made, limits)
    _check_admission(made, limits.block_groups)
    return made


def _check_replay(made: Request) -> None:
    """Refuse experts of a token that is not computed: the last one, behind which nothing is
    generated."""
    replay = extension_of(made.extensions, ReplayExperts)
    if replay is not None and replay.num_positions > len(made.tokens):
        raise RequestError(
            "no step computes the last token, behind which nothing is generated",
            field="replay_experts",
            value=replay.num_positions,
            fix=f"give the experts of at most {len(made.tokens)} tokens",
        )


def _with_output(
    made: Request, output: Sequence[int], make: Callable[[Extensions], Request]
) -> Request:
    """Return a request with the tokens that it brings. make: makes it again without, with other
    extensions.

    Raises:
        RequestError: one of them ends the request, and it is not the last; or the last one does,
            and nothing is reported.
    """
    reason = made.bring(output)
    if reason is None:
        return made
    count, trace = len(made.tokens) - made.num_prompt_tokens, made.num_brought
    if count < len(output):
        raise RequestError(
            f"output_token_ids goes on past a token that ends the request ({reason!r})",
            field="output_token_ids",
            value=f"{len(output)} tokens",
            fix=f"give the first {count}, or change what ends it (ignore_eos, stop)",
        )
    if not trace:
        raise RequestError(
            "output_token_ids leaves nothing to generate, and nothing is reported",
            field="output_token_ids",
            value=f"{count} tokens, then {reason!r}",
            fix="ask for full_logprobs, or give fewer tokens or a larger max_tokens",
        )
    wanted = TraceWanted(num_tokens=count - 1, last_token_id=output[-1])
    kept = (each for each in made.extensions if not isinstance(each, TraceWanted))
    made = make((*kept, wanted))
    made.bring(output[:-1])
    return made


def _noted(runs: tuple[VersionRun, ...]) -> tuple[VersionRun, ...]:
    """Return runs as a note has them."""
    if len(runs) <= MAX_NOTED_RUNS:
        return runs
    first, last = runs[: 1 - MAX_NOTED_RUNS], runs[1 - MAX_NOTED_RUNS :]
    return (VersionRun(None, sum(run.num_tokens for run in first)), *last)


def _unix_offset_s() -> float:
    """Return what to add to a monotonic time for the time of day."""
    return time.time() - time.monotonic()


def _only_stops(extensions: Extensions) -> bool:
    """Return True if there is no more than the stop tokens, whose ids were checked."""
    return len(extensions) == 1 and type(extensions[0]) is StopTokens


def _int32s(token_ids: PromptTokenIds) -> "array[int]":
    return array("i", np.asarray(token_ids, np.int32).tobytes())


def group_bounds(limits: SchedulerLimits) -> GroupLimits:
    """Return the bounds of a group on one request, as the checks of steps take them."""
    return GroupLimits(
        max_num_batched_tokens=limits.max_num_batched_tokens,
        vocab_size=WIRE_LIMITS.vocab_size if limits.vocab_size is None else limits.vocab_size,
        hidden_size=limits.hidden_size,
        max_loras=limits.max_loras,
        generates=limits.generates,
        pooling=limits.pooling,
        max_samples_per_seq=limits.max_samples_per_seq,
    )


def _note_limits(made: Request, limits: SchedulerLimits) -> None:
    """Note what a group's limits mean for a request's steps."""
    if not limits.makes_drafts and made.traits.may_draft:
        made.traits = msgspec.structs.replace(made.traits, may_draft=False)
        made.sees_each = True
    if made.experts is not None:
        made.experts.max_cached = limits.max_cached_experts
    if made.pools:
        _note_pooling(made, limits)


def _note_pooling(made: Request, limits: SchedulerLimits) -> None:
    """Note what a request's pooling means for its steps."""
    params = extension_of(made.extensions, PoolingParams)
    support = limits.pooling
    found = None if params is None or support is None else support.find(params.task)
    if params is None or support is None or found is None:
        return
    output_bytes = pooled_bytes(params, len(made.tokens), support)
    made.traits = msgspec.structs.replace(made.traits, output_bytes=output_bytes)
    if found.states != "last" or support.whole_prompts:
        made.blocks.may_share = False  # its output needs the hidden states of all tokens


def _check_admission(made: Request, groups: Sequence[BlockGroup]) -> None:
    """Check that one step can admit the request with all tokens that it may ever have, as after a
    preemption."""
    num_tokens = made.most_computed
    num_runs = max(0, num_tokens - made.num_prompt_tokens)  # as many as tokens, at worst
    num_bytes = made.admission_bytes(num_tokens, groups, num_runs)
    if num_tokens <= MAX_ADMITTED_TOKENS and num_bytes <= MAX_ADMITTED_BYTES:
        return
    most = min(MAX_ADMITTED_TOKENS, MAX_ADMITTED_BYTES * num_tokens // num_bytes)
    too_long = made.num_prompt_tokens > most
    raise RequestError(
        f"{made.limit} tokens are more than a step can admit",
        field="prompt" if too_long else "max_tokens",
        value=made.num_prompt_tokens if too_long else made.limit - made.num_prompt_tokens,
        fix=f"use at most {most} tokens, prompt and output together",
    )


def adopted_request(
    request: AdoptedRequest, limits: SchedulerLimits, texts: "Tokenizer | None" = None
) -> Request:
    """Return a request of another driver in the state from which it continues here, not running
    yet. texts: as new_request takes it.

    Raises:
        RequestError: it was admitted by another kind of scheduler, or does not fit these limits.
    """
    try:
        note = msgspec.msgpack.decode(request.note, type=_Note)
    except msgspec.DecodeError:
        raise RequestError(
            f"request {request.req_id!r} was admitted by another kind of scheduler",
            field="note",
            value=request.note,
            fix="adopt it with that scheduler, or drop it",
        ) from None
    if note.limit - 1 > min(limits.longest_request, limits.max_model_len - 1):
        raise RequestError(
            f"request {request.req_id!r} may have {note.limit} tokens, which is more than fits",
            field="limit",
            value=note.limit,
            fix="use the limits that it was admitted under",
        )
    sample, unix_s = SampleIdentity(note.index, note.stop, note.includes_stop), note.deadline_unix_s
    made = _request_class(sample, request.extensions, texts)(
        id=request.req_id,
        tokens=_int32s(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        limit=note.limit,
        extensions=request.extensions,
        arrival=note.arrival,
        priority=note.priority,
        deadline=math.inf if unix_s is None else unix_s - _unix_offset_s(),
        sample=sample,
        weights_versions=note.weights_versions,
        adapter_version=note.adapter_version,
    )
    made.num_recomputed = _recomputed_by_others(request, note)
    made.blocks.num_cached_tokens = note.num_cached_tokens
    made.blocks.num_preemptions = note.num_preemptions
    made.blocks.is_mixed = note.is_mixed or bool(request.earlier_versions)
    _note_limits(made, limits)
    _check_admission(made, limits.block_groups)
    return made


def _recomputed_by_others(request: AdoptedRequest, note: _Note) -> int:
    """Return Request.num_recomputed of an adopted request that goes on with the KV that it has. The
    ranks may lack that of its newest tokens, which have been computed once."""
    last = len(request.token_ids) - 1
    if last < request.num_prompt_tokens:
        return 0
    kept = max(note.num_recomputed, request.num_recomputed_tokens)
    return kept if request.num_computed_tokens == last else last
