"""Checks a request whole, every field by type and value, before anything else uses it. Fields
become plain values on the way. The annotations of GenerationRequest and SamplingParams have the
bounds."""

from array import array
from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any, Final, NoReturn, cast, get_type_hints

import msgspec
import numpy as np
from numpy.typing import NDArray

from rpc_schema.pooling import PoolingParams
from rpc_schema.routed_experts import ReplayExperts, RoutedExpertsWanted
from rpc_schema.sampling import MIN_TEMPERATURE, SamplingExtension
from rpc_schema.structured import StructuredOutput
from worker_client.errors import RequestError
from worker_client.inputs.prompt_embeds import check_embeds
from worker_client.inputs.replayed_experts import check_replayed
from worker_client.inputs.request_fields import SAMPLING, plain
from worker_client.inputs.sampling_params import (
    DEFAULT_SAMPLING,
    SamplingParams,
    check_num_stop_ids,
)
from worker_client.inputs.stop_strings import MAX_STOP_BYTES
from worker_client.parts.interface import ExtensionFault
from worker_client.requests import GenerationRequest, PromptTokenIds, RequestOutput, sample_id
from worker_client.steps.step_checks import (
    MAX_ADMITTED_TOKENS,
    MAX_COUNT,
    MAX_ID_LENGTH,
    WIRE_LIMITS,
    extension_fault,
)

_INT32: Final = np.dtype(np.int32)
_OBJECTS: Final = (
    "prompt",
    "sampling",
    "pooling",
    "prompt_embeds",
    "replay_experts",
    "features",
    "continues",
)
"""Fields of a request that are structs, arrays and extensions."""
_OWN_FIELDS: Final[Mapping[type, str]] = {
    PoolingParams: "pooling",
    ReplayExperts: "replay_experts",
    RoutedExpertsWanted: "routed_experts",
}
"""Extensions that are made of a request's own fields."""
FACT_TYPES: Final = {
    name: kind
    for name, kind in get_type_hints(GenerationRequest, include_extras=True).items()
    if name not in _OBJECTS
}
"""The other fields, with their types."""
_Facts: Final = msgspec.defstruct(
    "_Facts", [(*each, None) for each in FACT_TYPES.items()], gc=False
)
_facts_of: Final = attrgetter(*FACT_TYPES)

_TOKEN_ID_FIELDS: Final = (
    "stop_token_ids",
    "logit_bias",
    "allowed_token_ids",
    "logprob_token_ids",
)


def validated(request: GenerationRequest) -> GenerationRequest:
    """Return the request with plain values: its prompt as int32, lists as tuples, numpy's numbers
    as Python's. It is the same one if it has those already.

    Raises:
        RequestError: a field has the wrong type or is out of bounds.
    """
    return _guarded(request, MAX_COUNT)


def check_fits(
    request: GenerationRequest, *, max_model_len: int, vocab_size: int | None
) -> GenerationRequest:
    """Check a request, by itself and against the loaded model; vocab_size None: unknown. Return it
    as `validated` does.

    Raises:
        RequestError: a field has the wrong type or is out of bounds, the prompt leaves no room for
            a token, or names tokens that do not exist.
    """
    request = _guarded(request, MAX_COUNT if vocab_size is None else vocab_size - 1)
    _check_length(request, max_model_len)
    return request


def checked_id(request: GenerationRequest) -> str:
    """Return the id of a request that is not checked yet. It may be longer than others accept.
    Raises RequestError: it is no text, or the request none."""
    _check_kind(request)
    check_text("id", request.id)
    return request.id


def check_text(field: str, text: object) -> None:
    """Raise RequestError for a value that is no text, an empty text, or no Unicode."""
    if not isinstance(text, str) or not text:
        message = f"{field} is no text, or empty"
        raise RequestError(message, field=field, value=text, fix="give a text")
    check_unicode(field, text)


def check_unicode(field: str, text: str) -> None:
    """Raise RequestError for a lone surrogate, which JSON can express and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{field} is not Unicode text: character {error.start + 1} is a lone surrogate",
            field=field,
            value=text[max(0, error.start - 20) : error.start + 20],
            fix="write whole characters: both halves of a surrogate pair, or UTF-8",
        ) from None


def refusal(error: Exception) -> RequestError:
    """Return the error of a request for an exception that nobody foresaw."""
    return RequestError(
        f"the request cannot be served: {type(error).__name__}",
        field="request",
        value=error,
        fix="correct what raised it: it is the cause (__cause__) of this error",
    )


def _guarded(request: GenerationRequest, top: int) -> GenerationRequest:
    """Return the request with plain values; top: the largest token id."""
    try:
        _check_kind(request)
        return _validated(request, top)
    except RequestError:
        raise
    except Exception as error:  # a method of a value may raise anything
        raise refusal(error) from error


def _validated(request: GenerationRequest, top: int) -> GenerationRequest:
    given = _Facts(*_facts_of(request))
    facts, sampling = plain(given), _plain_sampling(request.sampling)
    prompt = _read_prompt(request.prompt, top)
    if facts is not given or sampling is not request.sampling or prompt is not request.prompt:
        own = msgspec.structs.asdict(facts)
        request = replace(request, prompt=prompt, sampling=sampling, **own)
    if not request.id.isascii():
        check_unicode("id", request.id)
    if request.lora is not None:
        check_unicode("lora", request.lora)
    if sampling is not DEFAULT_SAMPLING:
        _check_sampling(request)
        if top < MAX_COUNT:
            _check_rules(sampling, top)
    _check_objects(request)
    if request.output_token_ids:
        _check_output(request, top)
    if request.continues is not None:
        _check_continued(request, top)
    return request


def _plain_sampling(given: SamplingParams) -> SamplingParams:
    if given is DEFAULT_SAMPLING:
        return given
    if type(given) is not SamplingParams:
        fix = "give worker_client.requests.SamplingParams"
        raise RequestError("no sampling options", field="sampling", value=given, fix=fix)
    if given.structured_outputs is not None:
        _check_struct(SAMPLING + "structured_outputs", given.structured_outputs, StructuredOutput)
    return plain(given, SAMPLING)


def _check_kind(request: object) -> None:
    if not isinstance(request, GenerationRequest):
        fix = "give a GenerationRequest"
        raise RequestError("it is no request", field="request", value=request, fix=fix)


def _read_prompt(given: PromptTokenIds, top: int) -> NDArray[np.int32]:
    """Return a prompt as int32: at least one token id, from 0 to top."""
    prompt: NDArray[np.int32]
    if not isinstance(given, np.ndarray):
        prompt = _listed_ids(given)
    elif given.dtype != _INT32 or given.ndim != 1:
        prompt = _array_ids(given)
    else:
        prompt = cast("NDArray[np.int32]", given)
    if not len(prompt):
        _refuse_prompt("the length of the prompt", 0, "give at least one token id")
    if int(np.maximum.reduce(prompt.view(np.uint32))) > top:  # negative ids are the largest here
        low, high = int(prompt.min()), int(prompt.max())
        raise_token_id("prompt", low if low < 0 else high, top)
    return prompt


def _listed_ids(given: object) -> NDArray[np.int32]:
    if type(given) is not list and type(given) is not tuple:
        fix = "give a list of token ids, or a one-dimensional array of integers"
        _refuse_prompt("the prompt", given, fix)
    if len(given) > MAX_ADMITTED_TOKENS:
        value, fix = f"{len(given)} token ids", f"give at most {MAX_ADMITTED_TOKENS}"
        _refuse_prompt("the length of the prompt", value, fix)
    wrong = [kind for kind in {*map(type, given)} if not _is_integer(kind)]
    if wrong:
        value = next(each for each in given if type(each) in wrong)
        _refuse_prompt("a token id", value, "give whole numbers")
    try:
        return np.frombuffer(array("i", given), np.int32)
    except OverflowError:
        value = next(each for each in given if not -MAX_COUNT <= each <= MAX_COUNT)
        raise_token_id("prompt", value, MAX_COUNT)


def _is_integer(kind: type) -> bool:
    return kind is int or issubclass(kind, np.integer)


def _array_ids(given: NDArray[Any]) -> NDArray[np.int32]:
    if given.dtype.kind not in "iu" or given.ndim != 1:
        fix = "give a list of token ids, or a one-dimensional array of integers"
        _refuse_prompt("the prompt", f"{given.dtype} {list(given.shape)}", fix)
    if len(given) and int(given.max()) > MAX_COUNT:
        raise_token_id("prompt", int(given.max()), MAX_COUNT)
    if len(given) and int(given.min()) < 0:
        raise_token_id("prompt", int(given.min()), MAX_COUNT)
    return given.astype(np.int32)


def _refuse_prompt(what: str, value: object, fix: str) -> NoReturn:
    message = f"{what} has the wrong type or is out of bounds"
    raise RequestError(message, field="prompt", value=value, fix=fix)


def raise_token_id(field: str, token_id: int, most: int) -> NoReturn:
    """Raise the RequestError of a token id."""
    raise RequestError(
        "a token id is out of bounds",
        field=field,
        value=token_id,
        fix=f"use token ids from 0 to {most}",
    )


def _check_sampling(request: GenerationRequest) -> None:
    """Check what the type of an option does not say."""
    sampling = request.sampling
    for field in ("stop", "logits_processors"):
        for text in getattr(sampling, field):
            check_unicode(SAMPLING + field, text)
    check_num_stop_ids(len(set(sampling.stop_token_ids)))
    size = sum(len(text.encode()) for text in sampling.stop)
    if size > MAX_STOP_BYTES:
        raise RequestError(
            "the stop strings are too long",
            field=SAMPLING + "stop",
            value=f"{size} bytes",
            fix=f"use at most {MAX_STOP_BYTES} bytes of UTF-8 in all",
        )
    if 0 < sampling.temperature < MIN_TEMPERATURE:
        raise RequestError(
            "the temperature is too small to divide by",
            field=SAMPLING + "temperature",
            value=sampling.temperature,
            fix=f"use 0 for the most likely token, or at least {MIN_TEMPERATURE}",
        )
    if sampling.min_tokens > request.max_tokens:
        raise RequestError(
            f"min_tokens is above max_tokens = {request.max_tokens}",
            field=SAMPLING + "min_tokens",
            value=sampling.min_tokens,
            fix="lower it",
        )
    if sampling.n > 1 and len(sample_id(request.id, sampling.n - 1)) > MAX_ID_LENGTH:
        fix = "leave room for the # and the number of a sample"
        raise RequestError("the id is too long", field="id", value=request.id, fix=fix)


def _check_output(request: GenerationRequest, top: int) -> None:
    """Check the tokens that a request brings; top: the largest token id."""
    output, sampling = request.output_token_ids, request.sampling
    if max(output) > top:
        raise_token_id("output_token_ids", max(output), top)
    if len(output) > request.max_tokens:
        raise RequestError(
            f"output_token_ids has {len(output)} tokens, and max_tokens is {request.max_tokens}",
            field="output_token_ids",
            value=len(output),
            fix="raise max_tokens, or give fewer",
        )
    if request.pooling is not None:
        fix = "leave it out, or leave pooling out"
        message = "a request that pools has no output tokens"
        raise RequestError(message, field="output_token_ids", value=output[:8], fix=fix)
    for field in ("logprobs", "logprob_token_ids", "structured_outputs"):
        value = getattr(sampling, field)
        if value is not None:
            raise RequestError(
                f"{field} is not served for tokens that a request brings (output_token_ids)",
                field=SAMPLING + field,
                value=value,
                fix="leave it out; full_logprobs reports their log probabilities",
            )


def _check_continued(request: GenerationRequest, top: int) -> None:
    """Check the output behind which a request goes on; top: the largest token id."""
    given, sampling = request.continues, request.sampling

    def refuse(problem: str, value: object) -> NoReturn:
        fix = "give the output that ContinuingScheduler.output_so_far has returned for this request"
        raise RequestError(problem, field="continues", value=value, fix=fix)

    if type(given) is not RequestOutput:
        refuse("it is no output", given)
    tokens = given.token_ids
    if type(tokens) is not list or not tokens or {*map(type, tokens)} != {int}:
        refuse("it has no list of token ids", tokens)
    if given.finish_reason != "abort":
        refuse("the request has ended", given.finish_reason)
    if request.pooling is not None:
        refuse("a request that pools has no output tokens", f"{len(tokens)} tokens")
    if sampling.n > 1:
        refuse("each of several samples has an output of its own", f"{sampling.n} samples")
    if len(tokens) >= request.max_tokens:
        problem = f"nothing is left to generate of max_tokens = {request.max_tokens}"
        refuse(problem, f"{len(tokens)} tokens")
    if min(tokens) < 0 or max(tokens) > top:
        raise_token_id("continues", max(tokens) if min(tokens) >= 0 else min(tokens), top)
    wanted = {
        "logprobs": (sampling.logprobs is not None, len(tokens)),
        "token_id_logprobs": (sampling.logprob_token_ids is not None, len(tokens)),
        "prompt_logprobs": (sampling.prompt_logprobs is not None, len(request.prompt)),
        "full_logprobs": (sampling.full_logprobs, None),
    }
    for name, (is_wanted, count) in wanted.items():
        own = getattr(given, name)
        if (own is not None) != is_wanted or (own is not None and count not in (None, len(own))):
            problem = f"its {name} are not those that the request asks for"
            refuse(problem, None if own is None else f"{len(own)} of them")


def _check_objects(request: GenerationRequest) -> None:
    """Check the fields that are structs, arrays and extensions."""
    features: object = request.features
    if not isinstance(features, tuple):
        fix = "give a tuple of extensions"
        raise RequestError("the features are malformed", field="features", value=features, fix=fix)
    for kind in map(type, features):
        if issubclass(kind, SamplingExtension | StructuredOutput) or kind in _OWN_FIELDS:
            raise RequestError(
                "the request has a field for this extension",
                field="features",
                value=kind.__name__,
                fix=f"use {_OWN_FIELDS.get(kind, 'sampling')}",
            )
    if features:
        _check_extensions(features, len(request.prompt))
    if request.pooling is not None:
        _check_no_experts(request)
        _check_struct("pooling", request.pooling, PoolingParams, len(request.prompt))
        _check_pooling(request.sampling)
    if request.replay_experts is not None:
        num_tokens = len(request.prompt) + len(request.output_token_ids)
        check_replayed(request.replay_experts, num_tokens)
    if request.prompt_embeds is not None or request.prompt_embeds_at:
        check_embeds(request.prompt_embeds, request.prompt_embeds_at)


def _check_no_experts(request: GenerationRequest) -> None:
    """Refuse what a request that pools cannot have."""
    fix, message = "leave it out, or leave pooling out", "a request that pools has no experts"
    if request.routed_experts:
        raise RequestError(message, field="routed_experts", value=True, fix=fix)
    if request.replay_experts is not None:
        raise RequestError(message, field="replay_experts", value="an array", fix=fix)


def _check_struct(field: str, value: object, kind: type, num_prompt: int = 1) -> None:
    if type(value) is not kind:
        fix = f"give {kind.__module__}.{kind.__name__}"
        raise RequestError(f"{field} has the wrong type", field=field, value=value, fix=fix)
    _check_extensions((value,), num_prompt, field)


def _check_extensions(extensions: tuple[object, ...], num_prompt: int, field: str = "") -> None:
    fault = extension_fault(extensions, WIRE_LIMITS.bounds, num_prompt)
    if fault is not None:
        raise feature_error(fault, field)


def feature_error(fault: ExtensionFault, field: str = "") -> RequestError:
    """Return the error of a request for a fault of an extension. field: that it was made of."""
    message, name = "a feature of the request is refused", fault.field.rpartition(".")[2]
    if field:
        message = f"{fault.field}: {message}"
    elif name in SamplingParams.__struct_fields__:
        field = SAMPLING + name
    elif name in ("routed_experts", "replay_experts"):
        field = name
    return RequestError(message, field=field or fault.field, value=fault.value, fix=fault.fix)


def _check_pooling(sampling: SamplingParams) -> None:
    for field in SamplingParams.__struct_fields__:
        value = getattr(sampling, field)
        if field != "seed" and value != getattr(DEFAULT_SAMPLING, field):
            raise RequestError(
                "a request either samples or pools",
                field=SAMPLING + field,
                value=value,
                fix="leave it out, or leave pooling out",
            )


def _check_rules(sampling: SamplingParams, top: int) -> None:
    """Check the token ids that sampling options name; top: the largest one."""
    for field in _TOKEN_ID_FIELDS:
        token_ids = getattr(sampling, field)
        if token_ids and max(token_ids) > top:
            raise_token_id(SAMPLING + field, max(token_ids), top)
    for word in sampling.bad_words:
        if max(word) > top:
            raise_token_id(SAMPLING + "bad_words", max(word), top)


def _check_length(request: GenerationRequest, max_model_len: int) -> None:
    length = len(request.prompt)
    if request.pooling is not None and length > max_model_len:
        raise RequestError(
            f"the prompt has {length} tokens, and max_model_len is {max_model_len}",
            field="prompt",
            value=length,
            fix=f"use a prompt of at most {max_model_len} tokens, or a longer max_model_len",
        )
    if request.pooling is None and length >= max_model_len:
        raise RequestError(
            f"the prompt's {length} tokens leave no room in max_model_len = {max_model_len}",
            field="prompt",
            value=length,
            fix=f"use a prompt of at most {max_model_len - 1} tokens, or a longer max_model_len",
        )
