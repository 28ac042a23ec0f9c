"""One request of the reference scheduler: its tokens, its counts and its end. What only some
requests have is in values of its own: reports, experts, drafts, and the weights it was sampled
by."""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rpc_schema.extensions import extension_of
from rpc_schema.routed_experts import RoutedExpertsWanted
from rpc_schema.sampling import StopTokens
from rpc_schema.step import NO_TOKEN
from rpc_schema.structured import StructuredOutput
from worker_client.inputs.stop_strings import StopWatch
from worker_client.parts.registry import Extensions, may_refuse, pools, prefix_root
from worker_client.requests import FinishReason, RequestOutput
from worker_client.scheduler.drafting.expected_drafts import NO_DRAFTS_EXPECTED
from worker_client.scheduler.drafting.request_drafts import RequestDrafts
from worker_client.scheduler.experts_record import ExpertsRecord
from worker_client.scheduler.reported import Reported
from worker_client.scheduler.weights_history import WeightsHistory
from worker_client.scheduler_output import DraftOutcome, Experts, SampledToken, StepResult


@dataclass(slots=True)
class HeldBlocks:
    """A request's blocks. The start of an adopted one sets num_cached_tokens and num_preemptions.
    From then on RequestBlocks alone writes here."""

    by_group: tuple[list[int], ...] = ()
    """Blocks of each group of layers, by position; 0 replaces a block that a window has passed.
    Empty while it waits."""
    end: int = 0
    """Position after the last one for which it has a block in every group, as far as extend() has
    told: it may have more."""
    num_cached_tokens: int = -1
    """Prompt tokens found in the prefix cache at the first admission; -1 before that."""
    num_loaded_tokens: int = 0
    """Those of them whose KV came from outside of the KV cache."""
    were_loaded: bool = False
    """Since it waits, blocks that it may begin with were loaded beside steps."""
    num_preemptions: int = 0
    """Number of times that it was preempted."""


@dataclass(slots=True)
class RequestPrefix:
    """Part of a request that others may share: the names of its blocks' contents, and how far they
    are cached. What decides a request's KV sets root, may_share and is_mixed: its start, and
    updates of weights, which clear the hashes. PrefixCache alone writes the counts."""

    root: bytes = b""
    """First parent of the hash chain."""
    hashes: list[bytes] = field(default_factory=list)
    """Hashes of its full blocks, in units of the smallest block size of all groups, as far as
    tokens are known. They depend on tokens alone, and outlive a preemption."""
    may_share: bool = True
    """True if it may reuse cached blocks of other requests."""
    is_mixed: bool = False
    """True if weights have computed some of its KV that were replaced since: no other request may
    begin with its blocks."""
    num_shared: int = 0
    """Number of leading hashes whose blocks were in the prefix cache at its latest admission."""
    num_remembered: int = 0
    """Number of leading hashes that the pool has recorded."""
    num_offered: int = 0
    """Leading hashes whose blocks were offered to a place outside of the KV cache, or need not
    be."""
    num_filed: int | None = None
    """Leading hashes whose blocks are in files, if some were loaded since it waits; None if none
    were."""

    def lose_blocks(self) -> None:
        """Note that it has no blocks any more. What others may begin with stays cached."""
        self.is_mixed = False
        self.num_remembered = self.num_offered = 0


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
    drafts: RequestDrafts = field(default_factory=RequestDrafts)
    blocks: HeldBlocks = field(default_factory=HeldBlocks)
    prefix: RequestPrefix = field(default_factory=RequestPrefix)
    reported: Reported | None = None
    """None if it reports nothing."""
    experts: ExpertsRecord | None = None
    """None if it did not ask for the experts of its tokens."""
    num_given: int = field(init=False)
    """Tokens that it began with: the prompt, and output that it has brought."""
    weights: WeightsHistory = field(default_factory=WeightsHistory)
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
        self.prefix.root = prefix_root(self.extensions)
        if extension_of(self.extensions, RoutedExpertsWanted) is not None:
            self.experts = ExpertsRecord()
        self.sees_each = self.reported is not None or not self.traits.may_draft
        # Prompt tokens found in the cache are not computed, so they would have no logprobs.
        self.prefix.may_share = self.reported is None or self.reported.prompt_logprobs is None

    @property
    def most_cached(self) -> int:
        """Most of its tokens whose KV it may find in the cache: what a trace still has to report is
        computed, and experts that do not fit into a reply."""
        most = len(self.tokens) - 1
        if self.experts is not None:
            most = min(most, self.experts.num_known_of(self.num_settled) + self.experts.max_cached)
        if self.reported is not None and self.reported.is_tracing:
            most = min(most, self.num_prompt_tokens + self.reported.num_traced - 1)
        return most

    @property
    def num_settled(self) -> int:
        """Number of its leading tokens from which a later one has followed that was sampled or
        reported: they stay computed as they are, whatever computes them again."""
        end = len(self.tokens) if len(self.tokens) > self.num_given else 0
        if self.reported is not None and self.reported.is_tracing:
            num_traced = self.reported.num_traced
            end = self.num_prompt_tokens + num_traced if num_traced else 0
        return max(0, end - 1)

    @property
    def has_output(self) -> bool:
        """True if it has gained a token, or a report on one that it has brought."""
        num_traced = 0 if self.reported is None else self.reported.num_traced
        return len(self.tokens) > self.num_given or num_traced > 0

    @property
    def known_experts(self) -> Experts | None:
        """The experts of its tokens, as far as they are known: a view; None if there are none."""
        return None if self.experts is None else self.experts.first(len(self.tokens) - 1)

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
    def is_new(self) -> bool:
        """True if it has its prompt alone, and no step has had it."""
        has_prompt = len(self.tokens) == self.num_tokens == self.num_prompt_tokens
        return has_prompt and not (self.is_running or self.num_void or self.pools)

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
        if not (self.traits.may_refuse or self.drafts.num_in_flight):
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
        if self.traits.may_draft:
            return room
        return min(room, self.drafts.expected.count_from(self.num_tokens))

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
        self.weights.stamp_brought(self.num_tokens - self.num_prompt_tokens)
        return reason

    def gain(self, token: int, result: StepResult, one: SampledToken | None) -> FinishReason | None:
        """Append a sampled token and the reports on it, or in its place the last token that the
        request has brought; return the reason if it ends. one: as Reported.take takes it."""
        reported = self.reported
        if reported is None:
            return self.take(token)
        if reported.closing is not None:
            return self.bring((reported.closing,))
        reason = self.take(token)
        reported.take(self.id, result, one)
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
        drafts = self.drafts
        drafts.num_in_flight -= num_drafted
        drafts.num_drafted += num_drafted
        drafts.num_accepted += num_accepted
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
        reason, reported = None, self.reported
        for token in generated if reported is None else generated[: reported.num_brought]:
            if token == NO_TOKEN or reason is not None:
                break
            reason = self.take(token)
        self.num_tokens = len(self.tokens)
        if reported is not None:
            self.num_given = self.num_tokens
        return reason

    def stamp(self, version: int | None, end: int | None = None) -> None:
        """Note that weights of this version have sampled the tokens that are not stamped yet, up to
        position `end`."""
        known = len(self.tokens) if end is None else min(end, len(self.tokens))
        self.weights.stamp(version, max(0, known - self.num_prompt_tokens))

    def go_on_from_known(self, num_void: int = 0) -> None:
        """Give up the tokens in flight. num_void: how many of them still arrive, to be ignored."""
        self.num_tokens = len(self.tokens)
        self.num_void = num_void
        self.repeated = range(0)
        self.drafts.expected = NO_DRAFTS_EXPECTED

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
            self.weights.stamp_pooled(sampled_by)
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
            weights_versions=self.weights.runs,
            error=error,
            num_drafted=self.drafts.num_drafted,
            num_accepted=self.drafts.num_accepted_of(len(self.tokens)),
            num_loaded_tokens=self.blocks.num_loaded_tokens,
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
