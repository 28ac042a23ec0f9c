"""Requests, for generation or pooling, their outputs, and what is derived from them: seeds, samples
and the extensions for the workers. inputs/request_checks.py checks their fields."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from rpc_schema.base import Count, Name, Positive
from rpc_schema.extensions import RequestExtension, extension_of
from rpc_schema.lora_request import LoraRequest
from rpc_schema.pooling import PoolingParams
from rpc_schema.prompt_embeds import MAX_EMBEDDED_RANGES, PromptEmbeds
from rpc_schema.routed_experts import RoutedExpertsWanted
from rpc_schema.sampling import TraceWanted
from worker_client.errors import RequestError
from worker_client.inputs.prompt_embeds import Embeddings, embeds_extension, host_tensor
from worker_client.inputs.replayed_experts import (
    ExpertsToReplay,
    replay_extension,
    replayed_tensor,
)
from worker_client.inputs.sampling_params import DEFAULT_SAMPLING, no_seed
from worker_client.inputs.sampling_params import SamplingParams as SamplingParams
from worker_client.scheduler_output import Experts, FullLogprob, Logprobs

PromptTokenIds: TypeAlias = NDArray[np.integer[Any]] | Sequence[int]
EmbeddedAt = Annotated[tuple[tuple[Count, Positive], ...], Meta(max_length=MAX_EMBEDDED_RANGES)]
OutputTokenIds = Annotated[tuple[Count, ...], Meta(max_length=1 << 24)]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Moment = Annotated[float, Meta(ge=0.0, le=1e12)]
"""Seconds of time.monotonic()."""

DEFAULT_MAX_TOKENS = 16
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request for generation, or with `pooling` for an output made of the prompt's hidden states.
    Drivers and schedulers check every field: see request_checks.validated."""

    id: Name
    prompt: PromptTokenIds
    """Token ids [num_prompt_tokens], at least one: a list, or an array of integers. Schedulers get
    int32."""
    max_tokens: Positive = DEFAULT_MAX_TOKENS
    sampling: SamplingParams = DEFAULT_SAMPLING
    lora: Name | None = None
    """Name of the LoRA adapter; with_adapter adds its extension, which has the id and version."""
    pooling: PoolingParams | None = None
    """Makes it a pooling request: nothing is sampled, and `sampling` has its defaults."""
    prompt_embeds: Embeddings | None = None
    """[rows, hidden size] of some positions of the prompt, where `prompt` has placeholders
    (prompt_embeds.with_placeholders)."""
    prompt_embeds_at: EmbeddedAt = ()
    """Those positions, as pairs (start, length); empty: the first ones."""
    priority: Priority = 0
    """Lower is served earlier, as in vLLM."""
    deadline: Moment | None = None
    """Time at which it ends, with "error", if it has not ended before: seconds of
    time.monotonic(). None: never."""
    index: Count | None = None
    """Index among the samples of a request; None: it is the only one."""
    output_token_ids: OutputTokenIds = ()
    """Tokens that its output begins with: a trace, of which sampling.full_logprobs reports what
    decoding would have reported. At most max_tokens; what is left of these is generated."""
    routed_experts: bool = False
    """Report the experts of its tokens (RequestOutput.routed_experts)."""
    replay_experts: ExpertsToReplay | None = None
    """Experts that its first tokens take in place of their routers' choice: integers [positions,
    layers with experts, top_k], as RequestOutput.routed_experts, of at most the tokens of `prompt`
    and `output_token_ids`."""
    features: tuple[RequestExtension, ...] = ()
    """Extensions of features that have no field above."""
    continues: "RequestOutput | None" = None
    """Its output so far under another driver (ContinuingScheduler), behind which it goes on as if
    it had been preempted: with the same tokens, reports and statistics."""

    def extensions(self, eos_token_ids: Sequence[int]) -> tuple[RequestExtension, ...]:
        """Return its extensions for the workers.

        Raises:
            RequestError: it samples and has no seed, which `seeded` would give it, its adapter has
                no id, it has more stop tokens than a request may have, or its embeddings or experts
                are malformed.
        """
        own: tuple[RequestExtension, ...] = self.sampling.extensions(eos_token_ids)
        if self.output_token_ids and self.sampling.full_logprobs:
            own = (*own, TraceWanted(num_tokens=len(self.output_token_ids)))
        if self.routed_experts:
            own = (*own, RoutedExpertsWanted())
        if self.replay_experts is not None:
            num_tokens = len(self.prompt) + len(self.output_token_ids)
            own = (*own, replay_extension(self.replay_experts, num_tokens))
        if self.pooling is not None:
            own = (self.pooling,)
        if self.prompt_embeds is None and self.lora is None and not self.features:
            return own
        if self.lora is not None and extension_of(self.features, LoraRequest) is None:
            fix = "add the adapter to the group, and use with_adapter(request, adapter.extension)"
            raise RequestError("the adapter has no id yet", field="lora", value=self.lora, fix=fix)
        embeds = self.embeds_extension()
        return (*own, *self.features) if embeds is None else (*own, embeds, *self.features)

    def embeds_extension(self) -> PromptEmbeds | None:
        """Return the extension for its embeddings, if it has any. Raises RequestError: they, or
        their positions, are malformed."""
        if self.prompt_embeds is None:
            return None
        return embeds_extension(host_tensor(self.prompt_embeds), self.prompt_embeds_at)


def with_sampling(request: GenerationRequest, **options: Any) -> GenerationRequest:
    """Return the request with these options of its SamplingParams replaced."""
    return replace(request, sampling=msgspec.structs.replace(request.sampling, **options))


def with_adapter(request: GenerationRequest, adapter: LoraRequest) -> GenerationRequest:
    """Return the request with the extension of its adapter, as GroupAdapter has it."""
    return replace(request, features=(*request.features, adapter))


def random_seed() -> int:
    """Return a seed for a request that has none."""
    return int.from_bytes(os.urandom(8), "little") & MAX_SEED


def seeded(request: GenerationRequest) -> GenerationRequest:
    """Return the request with a seed: its own, or a random one if it samples without one."""
    return with_sampling(request, seed=random_seed()) if request.sampling.needs_seed else request


def must_hash(request: GenerationRequest) -> bool:
    """Return True if `hashed` takes time: a second for a gigabyte."""
    return any(isinstance(e, np.ndarray) for e in (request.prompt_embeds, request.replay_experts))


def hashed(request: GenerationRequest) -> GenerationRequest:
    """Return a checked request with its embeddings and experts as HostTensors, whose hashes are
    computed here unless they have them. Raises RequestError as host_tensor does."""
    if not must_hash(request):
        return request
    embeds, experts = request.prompt_embeds, request.replay_experts
    return replace(
        request,
        prompt_embeds=None if embeds is None else host_tensor(embeds),
        replay_experts=None if experts is None else replayed_tensor(experts),
    )


def derived_seed(seed: int, index: int) -> int:
    """Return the seed of request number `index` under a run's own seed."""
    digest = blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MAX_SEED


def forked(request: GenerationRequest) -> tuple[GenerationRequest, ...]:
    """Return the samples of a request as separate requests, called ID#0, ID#1 and so on: of
    n = 1 itself alone. The first has the request's seed, the others have seeds derived from it and
    their index; log probabilities of the prompt are reported with the first.

    Raises:
        RequestError: the request has no seed and needs one.
    """
    sampling = request.sampling
    if sampling.n == 1:
        return (request,)
    if sampling.needs_seed:
        raise no_seed()
    samples = []
    for index in range(sampling.n):
        own = msgspec.structs.replace(
            sampling,
            n=1,
            seed=_sample_seed(sampling.seed, index),
            prompt_logprobs=None if index else sampling.prompt_logprobs,
        )
        name = sample_id(request.id, index)
        samples.append(replace(request, id=name, index=index, sampling=own))
    return tuple(samples)


def _sample_seed(seed: int | None, index: int) -> int | None:
    return seed if seed is None or index == 0 else derived_seed(seed, index)


def sample_id(req_id: str, index: int) -> str:
    """Return the id of a request's sample."""
    return f"{req_id}#{index}"


def parent_id(sample: str) -> str:
    """Return the id of the request that a sample belongs to."""
    return sample.rpartition("#")[0]


FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]


class VersionRun(NamedTuple):
    """Consecutive tokens that weights of one version have sampled."""

    version: int | None
    """Its number (GroupWeights.version); None: it is not known any more."""
    num_tokens: int
    adapter_version: int | None = None
    """Number of the weights of the request's adapter (GroupAdapter.weights_version) that took part;
    None: it has no adapter, or it is not known any more."""


class Reports(NamedTuple):
    """Log probabilities of some tokens of a request, as RequestOutput has those of all."""

    logprobs: list[Logprobs] | None
    """One per token, if the request asked for them."""
    prompt_logprobs: list[Logprobs | None] | None
    """One per prompt token, likewise."""
    full_logprobs: list[FullLogprob] | None = None
    """One per token, likewise."""
    routed_experts: Experts | None = None
    """Those of all tokens so far, as RequestOutput has them; in a RequestProgress, those that the
    progress before did not have."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request."""

    req_id: str
    token_ids: list[int]
    """Generated tokens, behind those of output_token_ids; a stop token is the last of them."""
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache at the first admission."""
    num_preemptions: int
    logprobs: list[Logprobs] | None
    """One per token, if the request asked for them."""
    token_id_logprobs: list[NDArray[np.float32]] | None = None
    """For each token the log probabilities of the request's logprob_token_ids, in their order."""
    prompt_logprobs: list[Logprobs | None] | None = None
    """One per prompt token (None for the first), if the request asked for them."""
    full_logprobs: list[FullLogprob] | None = None
    """One per token, if the request asked for them."""
    routed_experts: Experts | None = None
    """Experts of its tokens, if the request asked for them: uint8, or uint16 if layers have more
    than 256, [positions, layers with experts, top_k], each token's in the order of the router's
    scores. Positions are those of prompt and output without the last token, which no step has
    computed; fewer if the request ended before they were."""
    num_recomputed_experts: int = 0
    """Leading positions of routed_experts that are of KV that was computed again behind tokens
    which were sampled before. 0, unless a driver has adopted the request: others keep what was
    reported first."""
    pooled: NDArray[np.float32] | None = None
    """Output of a pooling request: float32 [width], or [num_prompt_tokens, width] for a task on
    tokens. It has no token_ids."""
    text: str | None = None
    """The text up to the stop string that ended it; None if no stop string did."""
    index: int | None = None
    """Index among the samples of the request `parent_id(req_id)`; None: it is the only one."""
    weights_versions: tuple[VersionRun, ...] = ()
    """Versions of the weights that have sampled its tokens, in their order; one run, unless the
    weights have changed. Tokens that it has brought have a run without version. Of a pooling
    request, one run without tokens."""
    error: str = ""
    """Reason for the failure if finish_reason is "error"; token_ids are the tokens before it."""
    refusal: RequestError | None = None
    """The same as an error, if the request is at fault, which was found after add_request."""
    num_drafted: int = 0
    """Drafts that its steps have verified, under this driver."""
    num_accepted: int = 0
    """Those of them that are among its tokens: so many were gained without steps of their own."""
    num_loaded_tokens: int = 0
    """Those of num_cached_tokens whose KV came from host memory."""


def failed_request(
    req_id: str,
    reason: str,
    *,
    num_prompt_tokens: int = 0,
    token_ids: Sequence[int] = (),
    refusal: RequestError | None = None,
) -> RequestOutput:
    """Return the output of a request that has ended with an error outside of its scheduler."""
    return RequestOutput(
        req_id=req_id,
        token_ids=list(token_ids),
        finish_reason="error",
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=0,
        num_preemptions=0,
        logprobs=None,
        error=reason,
        refusal=refusal,
    )
