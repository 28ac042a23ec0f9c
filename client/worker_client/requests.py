"""Requests, for generation or pooling, their outputs, and what is derived from them: seeds, samples
and the extensions for the workers. inputs/request_checks.py checks their fields."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from operator import attrgetter
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rpc_schema.extensions import RequestExtension, extension_of
from rpc_schema.lora_request import LoraRequest
from rpc_schema.pooling import PoolingParams
from rpc_schema.prompt_embeds import PromptEmbeds
from rpc_schema.sampling import MAX_STOP_TOKEN_IDS, SamplingParams, StopTokens
from rpc_schema.structured import StructuredOutput
from worker_client.errors import RequestError
from worker_client.inputs.host_tensor import HostTensor
from worker_client.inputs.prompt_embeds import Embeddings, Ranges, embeds_extension, host_tensor
from worker_client.inputs.request_fields import MAX_SAMPLES as MAX_SAMPLES
from worker_client.scheduler_output import Logprobs

PromptTokenIds: TypeAlias = NDArray[np.integer[Any]] | Sequence[int]

DEFAULT_MAX_TOKENS = 16
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request for generation, or with `pooling` for an output made of the prompt's hidden states.
    Drivers and schedulers check every field: see request_checks.validated."""

    id: str
    prompt_token_ids: PromptTokenIds
    """[num_prompt_tokens], at least one: a list, or an array of integers. Schedulers get int32."""
    max_tokens: int = DEFAULT_MAX_TOKENS
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    """None: add_request gives it a random one."""
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    lora: str | None = None
    """Name of the LoRA adapter; with_adapter adds its extension, which has the id and version."""
    structured_outputs: StructuredOutput | None = None
    """The grammar that its tokens follow."""
    pooling: PoolingParams | None = None
    """Makes it a pooling request: nothing is sampled, and sampling fields keep their defaults."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """By token id."""
    allowed_token_ids: tuple[int, ...] | None = None
    """None allows all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of token ids."""
    logprob_token_ids: tuple[int, ...] | None = None
    """Tokens whose log probabilities are reported with each token."""
    prompt_logprobs: int | None = None
    """Like logprobs, for each token of the prompt except the first."""
    logits_processors: tuple[str, ...] = ()
    """Names of custom logits processors in the configuration."""
    n: int = 1
    """Samples to generate: see forked."""
    index: int | None = None
    """Index among the samples of a request; None: it is the only one."""
    stop: tuple[str, ...] = ()
    """Strings that end the request. The scheduler needs a tokenizer for them."""
    include_stop_str_in_output: bool = False
    """True if the text includes the stop string."""
    prompt_embeds: Embeddings | None = None
    """[rows, hidden size] of some positions of the prompt, where prompt_token_ids has placeholders
    (prompt_embeds.with_placeholders)."""
    prompt_embeds_at: Ranges = ()
    """Those positions."""
    features: tuple[RequestExtension, ...] = ()
    """Extensions of features that have no field above."""

    @property
    def has_options(self) -> bool:
        """True if it was given more than an id, a prompt, max_tokens, a seed or ignore_eos: most
        requests have nothing else to check or to send."""
        try:
            return bool(_options_of(self) != _DEFAULTS)
        except ValueError:  # an array in place of a tuple
            return True

    def stop_ids(self, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens that end this request."""
        eos = () if self.ignore_eos else tuple(eos_token_ids)
        return tuple(dict.fromkeys((*eos, *self.stop_token_ids)))

    def extensions(self, eos_token_ids: Sequence[int]) -> tuple[RequestExtension, ...]:
        """Return its extensions for the workers.

        Raises:
            RequestError: it samples and has no seed, which `seeded` would give it, its adapter has
                no id, it has more stop tokens than a request may have, or its embeddings are
                malformed.
        """
        stop_ids = self.stop_ids(eos_token_ids)
        check_num_stop_ids(len(stop_ids))
        if not self.has_options:
            return (StopTokens(token_ids=stop_ids),) if stop_ids else ()
        embeds = self.embeds_extension()
        others = self.features if embeds is None else (embeds, *self.features)
        if self.lora is not None and extension_of(self.features, LoraRequest) is None:
            fix = "add the adapter to the group, and use with_adapter(request, adapter.extension)"
            raise RequestError("the adapter has no id yet", field="lora", value=self.lora, fix=fix)
        if self.pooling is not None:
            return (self.pooling, *others)
        if self.seed is None and self.temperature > 0:
            raise RequestError(
                "the request has no seed yet", field="seed", value=None, fix="use seeded(request)"
            )
        params = SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=(self.seed or 0) if self.temperature else 0,
            min_tokens=self.min_tokens,
            stop_token_ids=stop_ids,
            logprobs=self.logprobs,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            allowed_token_ids=self.allowed_token_ids,
            bad_words=self.bad_words,
            logprob_token_ids=self.logprob_token_ids,
            prompt_logprobs=self.prompt_logprobs,
            logits_processors=self.logits_processors,
        )
        grammar = () if self.structured_outputs is None else (self.structured_outputs,)
        return (*params.extensions(), *grammar, *others)

    def embeds_extension(self) -> PromptEmbeds | None:
        """Return the extension for its embeddings, if it has any. Raises RequestError: they, or
        their positions, are malformed."""
        if self.prompt_embeds is None:
            return None
        return embeds_extension(host_tensor(self.prompt_embeds), self.prompt_embeds_at)


_OPTIONS: Final = tuple(
    field
    for field in dataclasses.fields(GenerationRequest)
    if field.name not in ("id", "prompt_token_ids", "max_tokens", "seed", "ignore_eos")
)
_options_of: Final = attrgetter(*[field.name for field in _OPTIONS])
_DEFAULTS: Final = tuple(
    {} if field.default is dataclasses.MISSING else field.default for field in _OPTIONS
)


def with_adapter(request: GenerationRequest, adapter: LoraRequest) -> GenerationRequest:
    """Return the request with the extension of its adapter, as GroupAdapter has it."""
    return replace(request, features=(*request.features, adapter))


def random_seed() -> int:
    """Return a seed for a request that has none."""
    return int.from_bytes(os.urandom(8), "little") & MAX_SEED


def seeded(request: GenerationRequest) -> GenerationRequest:
    """Return the request with a seed: its own, or a random one if it samples without one."""
    if request.seed is not None or request.temperature == 0:
        return request
    return replace(request, seed=random_seed())


def hashed(request: GenerationRequest) -> GenerationRequest:
    """Return the request with its embeddings as a HostTensor, whose hash is computed here unless it
    has one. Raises RequestError as host_tensor does."""
    if request.prompt_embeds is None or isinstance(request.prompt_embeds, HostTensor):
        return request
    return replace(request, prompt_embeds=host_tensor(request.prompt_embeds))


def derived_seed(seed: int, index: int) -> int:
    """Return the seed of request number `index` under a run's own seed."""
    digest = blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MAX_SEED


def forked(request: GenerationRequest) -> tuple[GenerationRequest, ...]:
    """Return the samples of a request as requests of their own, called ID#0, ID#1 and so on: of
    n = 1 itself alone. The first has the request's seed, the others have seeds derived from it and
    their index; log probabilities of the prompt are reported with the first.

    Raises:
        RequestError: the request has no seed and needs one.
    """
    if request.n == 1:
        return (request,)
    if request.seed is None and request.temperature > 0:
        raise RequestError(
            "the request has no seed yet", field="seed", value=None, fix="use seeded(request)"
        )
    return tuple(
        replace(
            request,
            id=sample_id(request.id, index),
            n=1,
            index=index,
            seed=_sample_seed(request.seed, index),
            prompt_logprobs=None if index else request.prompt_logprobs,
        )
        for index in range(request.n)
    )


def _sample_seed(seed: int | None, index: int) -> int | None:
    return seed if seed is None or index == 0 else derived_seed(seed, index)


def sample_id(req_id: str, index: int) -> str:
    """Return the id of a request's sample."""
    return f"{req_id}#{index}"


def parent_id(sample: str) -> str:
    """Return the id of the request that a sample belongs to."""
    return sample.rpartition("#")[0]


def check_num_stop_ids(count: int) -> None:
    """Raise RequestError for more stop tokens than a request may have."""
    if count > MAX_STOP_TOKEN_IDS:
        raise RequestError(
            "too many stop tokens, end of sequence included",
            field="stop_token_ids",
            value=count,
            fix=f"give at most {MAX_STOP_TOKEN_IDS}",
        )


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
    """One per token, if the request asked for them."""
    token_id_logprobs: list[NDArray[np.float32]] | None = None
    """For each token the log probabilities of the request's logprob_token_ids, in their order."""
    prompt_logprobs: list[Logprobs | None] | None = None
    """One per prompt token (None for the first), if the request asked for them."""
    pooled: NDArray[np.float32] | None = None
    """Output of a pooling request: float32 [width], or [num_prompt_tokens, width] for a task on
    tokens. It has no token_ids."""
    text: str | None = None
    """The text up to the stop string that ended it; None if no stop string did."""
    index: int | None = None
    """Index among the samples of the request `parent_id(req_id)`; None: it is the only one."""
    error: str = ""
    """Reason for the failure if finish_reason is "error"; token_ids are the tokens before it."""


def failed_request(
    req_id: str, reason: str, *, num_prompt_tokens: int = 0, token_ids: Sequence[int] = ()
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
    )
