"""The interface between a driver and a scheduler, and the values besides steps that they
exchange."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from rpc_schema.config import WorkerConfig
from rpc_schema.kv_cache import BlockGroup, block_groups, request_blocks
from worker_client.loading import LoadedGroup
from worker_client.requests import GenerationRequest
from worker_client.scheduler_output import Logprobs, SchedulerOutput, StepResult

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request."""

    req_id: str
    token_ids: list[int]
    """Generated tokens; a stop token is the last of them."""
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache at the first admission."""
    num_preemptions: int
    logprobs: list[Logprobs] | None
    """One for each token, if the request asked for them."""
    error: str = ""
    """Reason for the failure if finish_reason is "error"; token_ids are the tokens before it."""


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
        that have failed.
        """

    def step_failed(self, outputs: Sequence[SchedulerOutput], lost_req_ids: frozenset[str]) -> None:
        """Roll back steps that failed, or that the group refused; none will have a result.

        The workers have dropped the requests of lost_req_ids: those that are to continue must be
        admitted again, from their known tokens. Blocks written by the failed steps have no valid
        contents.
        """


@dataclass(frozen=True, slots=True)
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
    groups: tuple[BlockGroup, ...] = ()
    """Groups of layers; each gives every request blocks of its own. Empty: one of block_size,
    without a window."""

    @property
    def block_groups(self) -> tuple[BlockGroup, ...]:
        """The groups, one at least."""
        return block_groups(self.groups, self.block_size)

    def most_blocks(self, num_tokens: int) -> int:
        """Return the most blocks of all groups that a request of num_tokens has at once."""
        return request_blocks(num_tokens, self.block_groups, self.max_num_batched_tokens)


def scheduler_limits(model: LoadedGroup, config: WorkerConfig) -> SchedulerLimits:
    """Return the limits of a scheduler for a group that was loaded with `config`."""
    return SchedulerLimits(
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_model_len=model.max_model_len,
        num_blocks=model.num_blocks,
        block_size=model.block_size,
        pipeline_parallel_size=config.parallel.pipeline_parallel_size,
        eos_token_ids=model.metadata.eos_token_ids,
        vocab_size=model.metadata.vocab_size,
        groups=model.groups,
    )
