"""Fields of vLLM's requests: each is served by vLLM itself, translated to extensions of ours, or
refused by name. Fields that a later vLLM adds are refused as soon as they are set."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from hashlib import blake2b
from typing import Any, Final

import msgspec

from rpc_schema.errors import (
    WorkerDaemonError,
)
from rpc_schema.extensions import RequestExtension
from rpc_schema.pooling import NO_POOLING, PoolingParams, output_fault, pooled_bytes
from worker_client.errors import RequestError, request_error
from worker_client.inputs.request_fields import plain
from worker_client.parts.interface import ModelBounds
from worker_client.requests import MAX_SEED, SamplingParams, random_seed
from worker_client.steps.step_checks import (
    MAX_ADMITTED_TOKENS,
    MAX_ID_LENGTH,
    extension_fault,
)
from worker_client.vllm.embedded_prompts import EmbeddedPrompts, embedded_prompt, salt_request

PROCESSORS_KEY: Final = "logits_processors"
"""Key of extra_args (vllm_xargs in HTTP requests) with the names of custom logits processors."""

MIN_TOP_P: Final = 1e-6  # vLLM allows 0

_SERVED_BY_VLLM: Final = frozenset(
    (
        "_all_stop_token_ids",
        "_bad_words_token_ids",
        "_eos_token_id",
        "_watermarking_skipped",
        "bad_words",  # as the token ids of _bad_words_token_ids
        "detokenize",
        "flat_logprobs",
        "ignore_eos",
        "include_stop_str_in_output",
        "max_tokens",
        "n",
        "output_kind",
        "output_text_buffer_length",
        "repetition_detection",
        "skip_clone",
        "skip_reading_prefix_cache",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_token_ids",
        "stream_interval",
        "structured_outputs",
    )
)
_TRANSLATED: Final = frozenset(
    (
        "allowed_token_ids",
        "extra_args",
        "frequency_penalty",
        "logit_bias",
        "logprob_token_ids",
        "logprobs",
        "min_p",
        "min_tokens",
        "presence_penalty",
        "prompt_logprobs",
        "repetition_penalty",
        "seed",
        "temperature",
        "top_k",
        "top_p",
    )
)
SAMPLING_FIELDS: Final = _SERVED_BY_VLLM | _TRANSLATED
"""Fields of vLLM's SamplingParams that a request may set."""

_TOKEN_TYPES: Final = "compressed_token_type_ids"
"""Key of extra_kwargs with the index of a pair's first token of type 1."""

POOLING_FIELDS: Final = frozenset(
    (
        "dimensions",
        "extra_kwargs",
        "output_kind",
        "requires_token_ids",
        "skip_reading_prefix_cache",
        "task",
        "use_activation",
    )
)
"""Fields of vLLM's PoolingParams that a request may set."""


def check_fields(params: Any, served: frozenset[str]) -> None:
    """Raise RequestError if a request sets a field that is not served. params: vLLM's
    SamplingParams or PoolingParams, structs of msgspec."""
    kind: Any = type(params)
    for name, default in _others(kind, served):
        value = getattr(params, name)
        if _is_set(value, default):
            fix = "leave it out: worker daemons do not have it"
            raise request_error(name, value, "the field is not supported", fix)


@cache
def _others(kind: Any, served: frozenset[str]) -> tuple[tuple[str, object], ...]:
    """Return the fields of a struct that are not served, with their defaults."""
    return tuple(
        (entry.name, _default(entry))
        for entry in msgspec.structs.fields(kind)
        if entry.name not in served
    )


def _is_set(value: object, default: object) -> bool:
    """Return whether a value asks for something. None and False do not, 0 does."""
    if value is None or (value is False and default is not True):
        return False
    return type(value) is not type(default) or value != default  # an array has no default


def _default(entry: msgspec.structs.FieldInfo) -> object:
    if entry.default_factory is not msgspec.NODEFAULT:
        return entry.default_factory()
    return entry.default


def sampling_params(params: Any, seed: int) -> SamplingParams:
    """Translate vLLM's SamplingParams. seed: for a request that names none.

    Raises:
        RequestError: a field is not served, has the wrong type or is out of bounds.
    """
    check_fields(params, SAMPLING_FIELDS)
    is_random = params.temperature > 0.0
    ours = SamplingParams(
        temperature=params.temperature,
        top_k=max(params.top_k, 0) if is_random else 0,
        top_p=max(params.top_p, MIN_TOP_P) if is_random else 1.0,
        min_p=params.min_p if is_random else 0.0,
        seed=(seed if params.seed is None else params.seed & MAX_SEED) if is_random else None,
        min_tokens=params.min_tokens,
        stop_token_ids=tuple(sorted(params.all_stop_token_ids)) if params.min_tokens else (),
        logprobs=_sampled_logprobs(params),
        prompt_logprobs=params.prompt_logprobs,
        logprob_token_ids=params.logprob_token_ids or None,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=params.logit_bias or {},
        allowed_token_ids=params.allowed_token_ids,
        bad_words=params.bad_words_token_ids or (),
        logits_processors=_processors(params.extra_args or {}),
    )
    return plain(ours)


def _sampled_logprobs(params: Any) -> int | None:
    """Return how many of the most likely tokens to report. A request that names tokens reports the
    sampled one besides them."""
    if params.logprob_token_ids:
        return 0
    count: int | None = params.logprobs
    if count == -1:
        fix = "ask for at most 20, or name tokens in logprob_token_ids"
        raise request_error("logprobs", count, "the whole vocabulary is not reported", fix)
    return count


def _processors(extra: Mapping[str, Any]) -> tuple[str, ...]:
    unknown = next((key for key in extra if key != PROCESSORS_KEY), None)
    if unknown is not None:
        fix = f"leave it out, or give {PROCESSORS_KEY}"
        raise request_error(f"extra_args.{unknown}", extra[unknown], "the key is unknown", fix)
    names = extra.get(PROCESSORS_KEY, ())
    if isinstance(names, str):
        names = [names]
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        fix = "give names of processors that the daemons have"
        raise request_error(
            f"extra_args.{PROCESSORS_KEY}", names, "they are no list of strings", fix
        )
    return tuple(names)


def pooling_params(params: Any) -> PoolingParams:
    """Translate vLLM's PoolingParams.

    Raises:
        RequestError: a field is not served.
    """
    check_fields(params, POOLING_FIELDS)
    extra = params.extra_kwargs
    if extra is not None and set(extra) != {_TOKEN_TYPES}:
        fix = f"leave it out, or give {_TOKEN_TYPES} alone"
        raise request_error("extra_kwargs", extra, "the field is not supported", fix)
    return PoolingParams(
        task=params.task,
        use_activation=params.use_activation,
        dimensions=params.dimensions or 0,
        second_start=None if extra is None else extra[_TOKEN_TYPES],
    )


@lru_cache(maxsize=4096)
def wire_id(req_id: str) -> str:
    """Return the id of a request on the wire: its own, or a digest of one that is empty or too
    long, as a client's X-Request-Id may be, or that is no text."""
    if 0 < len(req_id) <= MAX_ID_LENGTH and req_id.isprintable():
        return req_id
    return blake2b(req_id.encode(errors="surrogatepass"), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class KnownRequest:
    """A request that vLLM's scheduler may schedule."""

    params: Any
    """vLLM's own parameters. A streaming session replaces them."""
    wire_id: str
    extensions: tuple[RequestExtension, ...]
    """Without its adapter's."""
    lora_id: int = 0
    """Id of its adapter; 0: none."""
    prompt_logprobs: int | None = None
    """Number of the most likely tokens to report at each position of its prompt."""
    logprob_token_ids: tuple[int, ...] | None = None
    output_bytes: int = 0
    """Size of its output, if it pools."""


Adapters = Callable[[Any], None]
"""Makes the adapter of a vLLM LoRARequest known to all daemons. Raises
WorkerDaemonError."""


class Requests:
    """The requests of vLLM's scheduler. Shared by scheduler and executor, on one thread."""

    def __init__(
        self,
        bounds: ModelBounds,
        load_adapter: Adapters,
        why_closed: Callable[[], str] = lambda: "",
        embeds: EmbeddedPrompts | None = None,
    ) -> None:
        """why_closed returns why no request can be served at the moment; empty: they can. embeds:
        uploads prompts with embeddings; None: they are refused."""
        self._why_closed = why_closed
        self._embeds = embeds
        self._bounds = bounds
        self._load_adapter = load_adapter
        self._known: dict[str, KnownRequest] = {}
        self._renamed: dict[str, str] = {}
        """vLLM's ids of requests that have others on the wire."""

    def find_refusal(self, request: Any) -> str:
        """Return why a waiting request of vLLM's scheduler cannot be scheduled; empty: it can. Its
        adapter is loaded first, if it has one that the daemons lack."""
        closed = self._why_closed()
        if closed:
            return closed
        try:
            self._accept(request)
        except RequestError as error:
            return error.reason
        except WorkerDaemonError as error:
            return str(error)
        return "" if self._embeds is None else self._embeds.find_refusal(request.request_id)

    def is_ready(self, req_id: str) -> bool:
        """Return whether the daemons have what an accepted request needs beside its step."""
        return self._embeds is None or self._embeds.is_ready(req_id)

    def proceed(self) -> None:
        """Send some of what accepted requests need. Raises ClientError: the daemons cannot be used
        any more."""
        if self._embeds is not None:
            self._embeds.proceed()

    def salt_hashes(self, request: Any) -> None:
        """Prepare a request before vLLM's scheduler has it: no other prompt may have the block
        hashes of its embeddings."""
        if self._embeds is not None and request.prompt_embeds is not None:
            salt_request(request, self._embeds.model_dtype)

    def embeds_extension(self, req_id: str) -> RequestExtension:
        """Return the extension of an accepted request with embeddings that is ready."""
        assert self._embeds is not None, "it was refused"
        return self._embeds.extension(req_id)

    def _accept(self, request: Any) -> None:
        params = request.sampling_params or request.pooling_params
        adapter = request.lora_request
        known = self._known.get(request.request_id)
        if known is None or known.params is not params:
            num_prompt_tokens = request.num_prompt_tokens
            known = self._translate(request.request_id, params, num_prompt_tokens, adapter)
            if request.prompt_embeds is not None:
                self._begin_upload(request)
            self._known[request.request_id] = known
            if known.wire_id != request.request_id:
                self._renamed[known.wire_id] = request.request_id
        if known.output_bytes and self._needs_all_states(params):
            request.skip_reading_prefix_cache = True
        if adapter is not None:
            self._load_adapter(adapter)

    def _begin_upload(self, request: Any) -> None:
        if self._embeds is None:
            shape, fix = [*request.prompt_embeds.shape], "start the server with it"
            raise request_error("prompt_embeds", shape, "--enable-prompt-embeds is off", fix)
        self._embeds.begin(request.request_id, embedded_prompt(request, self._bounds))

    def _needs_all_states(self, params: Any) -> bool:
        """Return whether an output is computed from states that the KV cache does not have."""
        support = self._bounds.pooling or NO_POOLING
        found = support.find(params.task)
        return support.whole_prompts or (found is not None and found.states != "last")

    def _translate(
        self, req_id: str, params: Any, num_prompt_tokens: int, adapter: Any
    ) -> KnownRequest:
        if num_prompt_tokens > MAX_ADMITTED_TOKENS:
            fix = f"use at most {MAX_ADMITTED_TOKENS} tokens"
            raise request_error("prompt", num_prompt_tokens, "the prompt is too long", fix)
        if hasattr(params, "task"):
            return self._translate_pooling(req_id, params, num_prompt_tokens, adapter)
        sampling = sampling_params(params, random_seed())
        extensions = sampling.extensions()
        self._check_extensions(extensions, num_prompt_tokens)
        return KnownRequest(
            params,
            wire_id(req_id),
            extensions,
            _lora_id(adapter),
            sampling.prompt_logprobs,
            sampling.logprob_token_ids,
        )

    def _translate_pooling(
        self, req_id: str, params: Any, num_prompt_tokens: int, adapter: Any
    ) -> KnownRequest:
        pooling = pooling_params(params)
        self._check_extensions((pooling,), num_prompt_tokens)
        support = self._bounds.pooling
        if support is None:
            raise request_error("task", params.task, "the model does not pool", "leave it out")
        fault = output_fault(pooling, num_prompt_tokens, support)
        if fault is not None:
            field, value, fix = fault
            raise request_error(field, value, "no reply can hold the output", fix)
        num_bytes = pooled_bytes(pooling, num_prompt_tokens, support)
        name, lora_id = wire_id(req_id), _lora_id(adapter)
        return KnownRequest(params, name, (pooling,), lora_id, output_bytes=num_bytes)

    def _check_extensions(
        self, extensions: tuple[RequestExtension, ...], num_prompt_tokens: int
    ) -> None:
        fault = extension_fault(extensions, self._bounds, num_prompt_tokens)
        if fault is not None:
            raise request_error(fault.field, fault.value, "the value is not supported", fault.fix)

    def __getitem__(self, req_id: str) -> KnownRequest:
        """Return a request by vLLM's id."""
        return self._known[req_id]

    def find(self, wire_id: str) -> KnownRequest | None:
        """Return a request by its id on the wire; None if it has ended."""
        return self._known.get(self._renamed.get(wire_id, wire_id))

    def forget(self, req_ids: Iterable[str]) -> None:
        """Forget requests that have ended."""
        for req_id in req_ids:
            known = self._known.pop(req_id, None)
            if known is not None:
                self._renamed.pop(known.wire_id, None)
                if self._embeds is not None:
                    self._embeds.end(req_id)


def _lora_id(adapter: Any) -> int:
    """Return the id of a LoRARequest; 0 of none."""
    return 0 if adapter is None else int(adapter.lora_int_id)
