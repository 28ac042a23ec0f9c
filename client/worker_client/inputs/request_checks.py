"""Checks a request whole, every field by type and value, before anything else uses it. Fields
become plain values on the way; request_fields.py has their types and bounds."""

from array import array
from collections.abc import Mapping
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any, Final, NoReturn, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from rpc_schema.pooling import PoolingParams
from rpc_schema.sampling import MIN_TEMPERATURE
from rpc_schema.structured import StructuredOutput
from worker_client.errors import RequestError
from worker_client.inputs.prompt_embeds import check_embeds
from worker_client.inputs.request_fields import FIELD_TYPES, FIELDS_OF, described
from worker_client.inputs.stop_strings import MAX_STOP_BYTES
from worker_client.requests import (
    GenerationRequest,
    PromptTokenIds,
    check_num_stop_ids,
    sample_id,
)
from worker_client.steps.step_checks import (
    MAX_ADMITTED_TOKENS,
    MAX_COUNT,
    MAX_ID_LENGTH,
    WIRE_LIMITS,
    extension_fault,
)

_INT32: Final = np.dtype(np.int32)
_NAMES: Final = tuple(FIELD_TYPES)
_Fields: Final = msgspec.defstruct("_Fields", [*FIELD_TYPES.items()], array_like=True, gc=False)
"""The fields in one struct: msgspec remembers the types of structs alone, and is slow without."""
_values_of: Final = attrgetter(*_NAMES)

_MAX_ENTRIES: Final = 1 << 14
_COMMON: Final = ("id", "max_tokens", "seed", "ignore_eos")
"""Fields that most requests have; they come first in FIELD_TYPES."""
_PLAIN_DEFAULTS: Final[Mapping[str, Any]] = {
    field.name: {} if field.name == "logit_bias" else field.default
    for field in fields(GenerationRequest)
}
_DEFAULTS: Final = tuple(_PLAIN_DEFAULTS[name] for name in _NAMES[len(_COMMON) :])
_TOKEN_ID_FIELDS: Final = (
    "stop_token_ids",
    "logit_bias",
    "allowed_token_ids",
    "logprob_token_ids",
)
_POOLING_ALLOWS: Final = ("id", "max_tokens", "seed", "lora", "index", "prompt_embeds_at")
_POOLING_EXCLUDES: Final = (
    *(name for name in _NAMES if name not in _POOLING_ALLOWS),
    "structured_outputs",
)
"""Fields that sample, and must have their defaults in a request that pools."""


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
    values = _values_of(request)
    try:
        plain = msgspec.structs.astuple(msgspec.convert(values, _Fields))
        is_plain = plain == values
    except Exception:  # a method of a value may raise anything
        plain = tuple(map(_read, _NAMES, values))
        is_plain = False
    given = request.prompt_token_ids
    prompt = _read_prompt(given, top)
    if prompt is not given or not is_plain:
        own = dict(zip(_NAMES, plain, strict=True))
        request = replace(request, prompt_token_ids=prompt, **own)
    if not request.id.isascii():
        check_unicode("id", request.id)
    if plain[len(_COMMON) :] != _DEFAULTS:
        _check_options(request)
        if top < MAX_COUNT:
            _check_rules(request, top)
    _check_objects(request)
    return request


def _check_kind(request: object) -> None:
    if not isinstance(request, GenerationRequest):
        fix = "give a GenerationRequest"
        raise RequestError("it is no request", field="request", value=request, fix=fix)


def _read(field: str, value: object) -> object:
    """Return a field as a plain value."""
    try:
        return msgspec.convert(_unwrapped(value), FIELD_TYPES[field])
    except Exception as error:  # as above
        _refuse(field, value, error)


def _refuse(field: str, value: object, error: Exception) -> NoReturn:
    raise RequestError(
        f"{field} has the wrong type or is out of bounds: {error}",
        field=field,
        value=value,
        fix=f"give {described(FIELD_TYPES[field])}",
    ) from None


def _unwrapped(value: object) -> object:
    """Return a value without numpy's scalars and one-dimensional arrays; a longer one than any
    field may have as it is."""
    if isinstance(value, list | tuple | dict | np.ndarray) and len(value) > _MAX_ENTRIES:
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.ndim == 1:
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_unwrapped(each) for each in value]
    if isinstance(value, dict):
        return {_unwrapped(key): _unwrapped(own) for key, own in value.items()}
    return value


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
        _refuse_prompt("the length of prompt_token_ids", 0, "give at least one token id")
    if int(np.maximum.reduce(prompt.view(np.uint32))) > top:  # negative ids are the largest here
        low, high = int(prompt.min()), int(prompt.max())
        raise_token_id("prompt_token_ids", low if low < 0 else high, top)
    return prompt


def _listed_ids(given: object) -> NDArray[np.int32]:
    if type(given) is not list and type(given) is not tuple:
        fix = "give a list of token ids, or a one-dimensional array of integers"
        _refuse_prompt("prompt_token_ids", given, fix)
    if len(given) > MAX_ADMITTED_TOKENS:
        value, fix = f"{len(given)} token ids", f"give at most {MAX_ADMITTED_TOKENS}"
        _refuse_prompt("the length of prompt_token_ids", value, fix)
    wrong = [kind for kind in {*map(type, given)} if not _is_integer(kind)]
    if wrong:
        value = next(each for each in given if type(each) in wrong)
        _refuse_prompt("a token id", value, "give whole numbers")
    try:
        return np.frombuffer(array("i", given), np.int32)
    except OverflowError:
        value = next(each for each in given if not -MAX_COUNT <= each <= MAX_COUNT)
        raise_token_id("prompt_token_ids", value, MAX_COUNT)


def _is_integer(kind: type) -> bool:
    return kind is int or issubclass(kind, np.integer)


def _array_ids(given: NDArray[Any]) -> NDArray[np.int32]:
    if given.dtype.kind not in "iu" or given.ndim != 1:
        fix = "give a list of token ids, or a one-dimensional array of integers"
        _refuse_prompt("prompt_token_ids", f"{given.dtype} {list(given.shape)}", fix)
    if len(given) and int(given.max()) > MAX_COUNT:
        raise_token_id("prompt_token_ids", int(given.max()), MAX_COUNT)
    if len(given) and int(given.min()) < 0:
        raise_token_id("prompt_token_ids", int(given.min()), MAX_COUNT)
    return given.astype(np.int32)


def _refuse_prompt(what: str, value: object, fix: str) -> NoReturn:
    message = f"{what} has the wrong type or is out of bounds"
    raise RequestError(message, field="prompt_token_ids", value=value, fix=fix)


def raise_token_id(field: str, token_id: int, most: int) -> NoReturn:
    """Raise the RequestError of a token id."""
    raise RequestError(
        f"{field} has an invalid token id",
        field=field,
        value=token_id,
        fix=f"use token ids from 0 to {most}",
    )


def _check_options(request: GenerationRequest) -> None:
    """Check what the type of a field does not say, of the fields that few requests have."""
    if request.stop or request.lora is not None or request.logits_processors:
        _check_texts(request)
    if request.stop_token_ids:
        check_num_stop_ids(len(set(request.stop_token_ids)))
    if 0 < request.temperature < MIN_TEMPERATURE:
        raise RequestError(
            "the temperature is too small to divide by",
            field="temperature",
            value=request.temperature,
            fix=f"use 0 for the most likely token, or at least {MIN_TEMPERATURE}",
        )
    if request.min_tokens > request.max_tokens:
        raise RequestError(
            f"min_tokens is above max_tokens = {request.max_tokens}",
            field="min_tokens",
            value=request.min_tokens,
            fix="lower it",
        )
    if request.n > 1 and len(sample_id(request.id, request.n - 1)) > MAX_ID_LENGTH:
        fix = "leave room for the # and the number of a sample"
        raise RequestError("the id is too long", field="id", value=request.id, fix=fix)


def _check_texts(request: GenerationRequest) -> None:
    for field, texts in (
        ("lora", () if request.lora is None else (request.lora,)),
        ("stop", request.stop),
        ("logits_processors", request.logits_processors),
    ):
        for text in texts:
            check_unicode(field, text)
    size = sum(len(text.encode()) for text in request.stop)
    if size > MAX_STOP_BYTES:
        raise RequestError(
            "the stop strings are too long",
            field="stop",
            value=f"{size} bytes",
            fix=f"use at most {MAX_STOP_BYTES} bytes of UTF-8 in all",
        )


def _check_objects(request: GenerationRequest) -> None:
    """Check the fields that are structs, arrays and extensions."""
    features: object = request.features
    if not isinstance(features, tuple):
        fix = "give a tuple of extensions"
        raise RequestError("the features are malformed", field="features", value=features, fix=fix)
    if features:
        _check_have_no_fields(features)
        _check_extensions(request, features)
    if request.structured_outputs is not None:
        _check_struct(request, "structured_outputs", StructuredOutput)
    if request.pooling is not None:
        _check_struct(request, "pooling", PoolingParams)
        _check_pooling(request)
    if request.prompt_embeds is not None or request.prompt_embeds_at:
        check_embeds(request.prompt_embeds, request.prompt_embeds_at)


def _check_have_no_fields(features: tuple[object, ...]) -> None:
    for kind in map(type, features):
        if kind in FIELDS_OF:
            raise RequestError(
                "the request has a field for this extension",
                field="features",
                value=kind.__name__,
                fix=f"use {FIELDS_OF[kind]}",
            )


def _check_struct(request: GenerationRequest, field: str, kind: type) -> None:
    value = getattr(request, field)
    if type(value) is not kind:
        fix = f"give {kind.__module__}.{kind.__name__}"
        raise RequestError(f"{field} has the wrong type", field=field, value=value, fix=fix)
    _check_extensions(request, (value,), field)


def _check_extensions(
    request: GenerationRequest, extensions: tuple[object, ...], field: str = ""
) -> None:
    num_prompt = len(request.prompt_token_ids)
    fault = extension_fault(extensions, WIRE_LIMITS.bounds, num_prompt)
    if fault is not None:
        message = "a feature of the request is refused"
        name, own = field or fault.field, f"{fault.field}: " if field else ""
        raise RequestError(own + message, field=name, value=fault.value, fix=fault.fix)


def _check_pooling(request: GenerationRequest) -> None:
    for field in _POOLING_EXCLUDES:
        value = getattr(request, field)
        if value != _PLAIN_DEFAULTS[field]:
            raise RequestError(
                "a request either samples or pools",
                field=field,
                value=value,
                fix="leave it out, or leave pooling out",
            )


def _check_rules(request: GenerationRequest, top: int) -> None:
    """Check the token ids that the request names besides its prompt; top: the largest one."""
    for field in _TOKEN_ID_FIELDS:
        token_ids = getattr(request, field)
        if token_ids and max(token_ids) > top:
            raise_token_id(field, max(token_ids), top)
    for word in request.bad_words:
        if max(word) > top:
            raise_token_id("bad_words", max(word), top)


def _check_length(request: GenerationRequest, max_model_len: int) -> None:
    length = len(request.prompt_token_ids)
    if request.pooling is not None and length > max_model_len:
        raise RequestError(
            f"the prompt has {length} tokens, and max_model_len is {max_model_len}",
            field="prompt_token_ids",
            value=length,
            fix=f"use a prompt of at most {max_model_len} tokens, or a longer max_model_len",
        )
    if request.pooling is None and length >= max_model_len:
        raise RequestError(
            f"the prompt's {length} tokens leave no room in max_model_len = {max_model_len}",
            field="prompt_token_ids",
            value=length,
            fix=f"use a prompt of at most {max_model_len - 1} tokens, or a longer max_model_len",
        )
