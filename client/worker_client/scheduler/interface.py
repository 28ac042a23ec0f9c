"""The interface between a driver and a scheduler, and the values that they exchange. Requests and
their outputs are in requests.py, steps in scheduler_output.py."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple, Protocol, runtime_checkable

from rpc_schema.config import MAX_SAMPLES_PER_SEQ, SpeculativeConfig, WorkerConfig
from rpc_schema.kv_cache import BlockGroup, block_groups, border_tokens, longest_request
from rpc_schema.pooling import PoolingSupport
from rpc_schema.routed_experts import RoutedExpertsShape
from worker_client.group.loading import LoadedGroup
from worker_client.group.loras import GroupAdapter
from worker_client.group.running import RunningRequests
from worker_client.group.weights_state import WeightsVersion
from worker_client.parts.interface import ModelBounds
from worker_client.requests import GenerationRequest, RequestOutput
from worker_client.scheduler_output import SchedulerOutput, StepResult

_UNCHECKED: Final = 1 << 31
"""A vocabulary of every token id that a message can carry."""


class SchedulerInterface(Protocol):
    """Calls of `worker_client.driver.Driver` to a scheduler, all from one thread.

    The driver sends every output of schedule() before it makes another call, takes results in
    the order of the outputs, and keeps at most pipeline size + 1 outputs without a result.
    """

    def add_request(self, request: GenerationRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: it can never be served.
        """

    def abort_request(self, req_id: str) -> None:
        """End a request early; unknown ids are ignored. No RequestOutput follows."""

    def has_unfinished_requests(self) -> bool:
        """Return True while a request has not finished."""

    def schedule(self) -> SchedulerOutput | None:
        """Decide the next step; None if there is nothing to send until a result comes."""

    def update_from_output(
        self, output: SchedulerOutput, result: StepResult
    ) -> list[RequestOutput]:
        """Process the tokens that a step sampled; return the requests that it finished.

        They may include tokens of requests that have finished meanwhile, and NO_TOKEN for requests
        that have failed. Requests that pool end with their outputs (StepResult.pooled).
        """

    def step_failed(self, outputs: Sequence[SchedulerOutput], lost_req_ids: frozenset[str]) -> None:
        """Roll back steps that failed, or that the group refused; none will have a result.

        The workers have dropped the requests of lost_req_ids: those that are to continue must be
        admitted again, from their known tokens. Blocks written by the failed steps have no valid
        contents.
        """


@runtime_checkable
class HoldingScheduler(SchedulerInterface, Protocol):
    """A scheduler that can hold a request back, which a driver needs for requests with uploads."""

    def hold_request(self, req_id: str) -> None:
        """Do not admit a request that was just added until release_request."""

    def release_request(self, req_id: str) -> None:
        """Admit a held request as any other, in its order of arrival; unknown ids are ignored."""


@runtime_checkable
class PausingScheduler(HoldingScheduler, Protocol):
    """A scheduler that can take a running request out of its steps, which a driver needs for
    requests whose grammars are slow. With another one, they hold up the steps that name them."""

    def pause_request(self, req_id: str) -> None:
        """Preempt a request, and do not admit it until release_request. Steps in flight, and the
        last one of schedule(), still sample it, most often as NO_TOKEN: ignore that. Unknown ids
        are ignored."""


@runtime_checkable
class VersionedScheduler(SchedulerInterface, Protocol):
    """A scheduler that caches prefixes by the version of the weights."""

    def use_weights(self, version: WeightsVersion) -> None:
        """Begin no request that is admitted from now on with blocks that other weights have
        computed, nor with those of requests that run now, which may fill more of them. Called at
        the driver's start, then with each new version. If the group has dropped the rows of running
        requests, it fails the next step, and step_failed gets their ids; else they go on."""


@runtime_checkable
class RecomputingScheduler(VersionedScheduler, Protocol):
    """A scheduler that shares blocks of requests that were recomputed. With another one, nobody
    begins with these."""

    def share_recomputed(self) -> None:
        """Let requests begin with the blocks of those that run, again: the present weights have
        computed their KV. Called after use_weights."""


@runtime_checkable
class SuspendingScheduler(SchedulerInterface, Protocol):
    """A scheduler that leaves requests out of steps until they are recomputed. With another one,
    all requests of a step are recomputed before it."""

    def await_recompute(self, req_ids: Collection[str]) -> None:
        """Give no step with these running requests, which keep their blocks, nor let them jump
        forward; let all others go on. Called again when fewer of them wait; unknown ids are
        ignored. They may be preempted, or end, as any."""


@runtime_checkable
class AdaptingScheduler(SchedulerInterface, Protocol):
    """A scheduler of requests with adapters whose weights may be updated. With another one, such
    updates are refused."""

    def use_adapter(
        self, adapter: GroupAdapter, running: RunningRequests, num_in_flight: int
    ) -> None:
        """Begin no request of this adapter (LoraRequest.version) with blocks that other weights of
        it (GroupAdapter.weights_key) have computed, nor with those of its requests that run now.
        Other requests and their blocks are not concerned.

        The workers have its rows, and compute them with the new weights. running: `keep`, they go
        on; `drop` or `recompute`, they are preempted, and continue from their known tokens;
        `abort`, they end with the tokens that they have, also those that wait. num_in_flight: steps
        that were sent before and have no result here, the oldest ones; they sample with the former
        weights. Called at the driver's start for each adapter that was updated before, then after
        each update."""


@runtime_checkable
class EndingScheduler(SchedulerInterface, Protocol):
    """A scheduler that can end requests with the tokens that they have. With another one, requests
    that an update aborts end without output."""

    def end_requests(self, req_ids: Collection[str]) -> list[RequestOutput]:
        """End these requests, which the workers have dropped, and all others that wait and have
        generated tokens; return their outputs, with the finish reason "abort". Called after
        step_failed; unknown ids are ignored."""


@runtime_checkable
class ContinuingScheduler(SchedulerInterface, Protocol):
    """A scheduler whose unfinished requests can go on under another driver, in another group with
    the same model. It takes GenerationRequest.continues. With another one, requests that have
    generated tokens stay in their group, and end with its driver."""

    def output_so_far(self, req_id: str) -> RequestOutput | None:
        """Return an unfinished request's output so far, with the finish reason "abort"; None if it
        has none, or is unknown. Abort the request next: its output may share what it gains."""


class Jump(NamedTuple):
    """The outcome of a scheduler's jump_forward."""

    num_tokens: int
    """Number of forced tokens that the request has gained."""
    finished: RequestOutput | None = None
    """The request, if the last of these tokens has ended it by a stop string."""


NO_JUMP: Final = Jump(0)


@runtime_checkable
class JumpingScheduler(SchedulerInterface, Protocol):
    """A scheduler whose requests can gain tokens that no step samples, because their grammars leave
    no choice."""

    def jump_forward(self, req_id: str, token_ids: Sequence[int]) -> Jump:
        """Append tokens to the known ones of a request, and admit it again in the next step that
        names it. That step lists it as preempted and as new, with these tokens, its present blocks
        and its present computed tokens, including those of steps in flight.

        The first of these tokens are those that steps in flight sample for it. Their results still
        arrive; ignore them, except NO_TOKEN. Tokens from the first stop token on, or from the one
        that reaches the request's limit, are not appended. Return NO_JUMP for an unknown request,
        or if no more tokens remain than are in flight.
        """


@runtime_checkable
class ExpectingScheduler(SchedulerInterface, Protocol):
    """A scheduler whose steps may compute tokens of a request before they are sampled: those about
    which its grammar leaves no choice, and those that its text makes likely."""

    @property
    def most_expected(self) -> int:
        """Most tokens of a request that a step computes so; 0: expect_tokens is in vain."""

    def expect_tokens(self, req_id: str, token_ids: Sequence[int], num_forced: int) -> None:
        """Note which tokens will follow those that steps in flight are expected to gain, in place
        of what was noted before. The next step of the request may have them, or the first few, as
        drafts: the driver makes their masks. The first num_forced are accepted for certain, the
        others are guesses. Unknown ids are ignored."""


STORED_AHEAD_BYTES: Final = 64 << 20
"""Most bytes that a step stores on each rank before they are evicted: one of a rank's two staging
buffers, which has left before the next step fills it again, if that step takes 0.7 ms."""


@dataclass(frozen=True)
class SchedulerLimits:
    """Limits of a scheduler for a loaded group."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    """Null block included."""
    block_size: int
    """Tokens of the smallest blocks."""
    pipeline_parallel_size: int = 1
    eos_token_ids: tuple[int, ...] = ()
    enable_prefix_caching: bool = True
    vocab_size: int | None = None
    """None leaves the token ids of requests unchecked."""
    max_loras: int | None = None
    """Maximum number of adapters in a step; None leaves the adapters of requests unchecked."""
    groups: tuple[BlockGroup, ...] = ()
    """Groups of layers; each gives every request separate blocks. Empty: one of block_size,
    without a window."""
    generates: bool = True
    """The model has an output layer for tokens."""
    pooling: PoolingSupport | None = None
    """None leaves requests that pool unchecked."""
    logits_processors: tuple[str, ...] | None = None
    """Names that requests may ask for; None leaves them unchecked."""
    hidden_size: int = 0
    """0 leaves the width of prompt embeddings unchecked."""
    keeps_state: bool = False
    """Layers keep a state per request: requests share prefixes at borders only, and do not jump."""
    checkpoint_blocks: int = 0
    """Blocks of the first group from a border to the next; 0: there are no checkpoints of states,
    and requests begin at position 0."""
    max_samples_per_seq: int = MAX_SAMPLES_PER_SEQ
    """Most samples of a request in a step (SchedulerOutput.num_samples)."""
    num_speculative_tokens: int = 0
    """Most drafts of a request in a step; 0: requests have none."""
    makes_drafts: bool = True
    """The devices make drafts; otherwise requests have only those that the driver brings."""
    num_lookahead_tokens: int = 0
    """Tokens behind a step's drafts that a draft model computes at its end."""
    max_itl_ms: float | None = None
    """Target for the time between two tokens of a request, in milliseconds; None: no target."""
    routed_experts: RoutedExpertsShape | None = None
    """Sizes of the experts that requests may ask for; None: they may not."""
    num_host_blocks: int = 0
    """Slots of the ranks' host tier; 0: there is none."""
    has_device_tier: bool = False
    """It lies in the devices' memory: steps load from it without taking much longer."""
    has_kv_files: bool = False
    """The ranks keep files of KV blocks."""
    max_stored_ahead: int = 0
    """Most blocks that a step stores in the host tier before they are evicted; 0: none."""

    @property
    def shares_prefixes(self) -> bool:
        """True if requests may begin with blocks of others. With states, they do so at
        checkpoints."""
        return self.enable_prefix_caching and (not self.keeps_state or self.checkpoint_blocks > 0)

    @property
    def moves_blocks(self) -> bool:
        """True if steps may move blocks between the KV cache and another place."""
        return self.num_host_blocks > 0 or self.has_kv_files

    @cached_property
    def bounds(self) -> ModelBounds:
        """Bounds on the extensions of requests."""
        size = _UNCHECKED if self.vocab_size is None else self.vocab_size
        return ModelBounds(
            size,
            pooling=self.pooling,
            max_loras=self.max_loras,
            logits_processors=self.logits_processors,
            hidden_size=self.hidden_size,
            max_samples_per_seq=self.max_samples_per_seq,
            keeps_experts=self.routed_experts is not None,
            routed_experts=self.routed_experts,
        )

    @property
    def max_cached_experts(self) -> int:
        """Most cached tokens whose experts a step's reply may report."""
        return 0 if self.routed_experts is None else self.routed_experts.max_positions

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """Those of eos_token_ids that the model can produce: others end nothing."""
        size = self.vocab_size
        return tuple(token for token in self.eos_token_ids if size is None or token < size)

    @cached_property
    def block_groups(self) -> tuple[BlockGroup, ...]:
        """The groups, one at least."""
        return block_groups(self.groups, self.block_size)

    @cached_property
    def border_tokens(self) -> int:
        """Number of tokens from a border to the next; 0 if there are no checkpoints."""
        return border_tokens(self.block_groups, self.checkpoint_blocks)

    def cut_at_border(self, begin: int, count: int) -> int:
        """Return how many of `count` tokens of a request, after its first `begin`, one step may
        compute: those up to the next border."""
        return (
            min(count, self.border_tokens - begin % self.border_tokens)
            if self.border_tokens
            else count
        )

    @cached_property
    def longest_request(self) -> int:
        """Number of tokens of the longest request that fits in the KV cache, at most
        max_model_len."""
        return longest_request(
            self.num_blocks, self.block_groups, self.max_model_len, self.max_num_batched_tokens
        )


def scheduler_limits(
    model: LoadedGroup, config: WorkerConfig, *, max_itl_ms: float | None = None
) -> SchedulerLimits:
    """Return the limits of a scheduler for a group that was loaded with `config`. max_itl_ms: see
    SchedulerLimits."""
    return SchedulerLimits(
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_model_len=model.max_model_len,
        num_blocks=model.num_blocks,
        block_size=model.block_size,
        pipeline_parallel_size=config.parallel.pipeline_parallel_size,
        eos_token_ids=model.metadata.eos_token_ids,
        vocab_size=model.metadata.vocab_size,
        hidden_size=model.metadata.hidden_size,
        keeps_state=model.keeps_state,
        checkpoint_blocks=model.checkpoint_blocks,
        groups=model.groups,
        generates=model.metadata.generates,
        pooling=model.metadata.pooling,
        max_loras=config.lora.max_loras,
        logits_processors=config.scheduler.logits_processors,
        max_samples_per_seq=config.scheduler.max_samples_per_seq,
        num_speculative_tokens=config.speculative.num_speculative_tokens,
        makes_drafts=config.speculative.on_device,
        num_lookahead_tokens=_lookahead(config.speculative),
        max_itl_ms=max_itl_ms,
        routed_experts=model.metadata.routed_experts,
        num_host_blocks=model.num_host_blocks,
        has_device_tier=config.cache.kv_tier_memory == "device",
        has_kv_files=config.cache.kv_files,
        max_stored_ahead=_stored_ahead(model.num_host_blocks, config.cache.kv_host_memory_bytes),
    )


def _stored_ahead(num_host_blocks: int, host_bytes: int) -> int:
    """Return how many blocks may be stored ahead in a step, of a host tier of this size."""
    return max(1, STORED_AHEAD_BYTES * num_host_blocks // host_bytes) if num_host_blocks else 0


def _lookahead(config: SpeculativeConfig) -> int:
    """Return how many tokens a draft model computes behind those of a step."""
    return config.num_speculative_tokens if config.method == "draft_model" else 0
