"""Requests, for generation or pooling: their fields and bounds, and the parsing of input lines."""

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NoReturn, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from rpc_schema.extensions import RequestExtension, extension_of
from rpc_schema.lora_request import LoraRequest
from rpc_schema.plain_text import printable
from rpc_schema.pooling import PoolingParams
from rpc_schema.prompt_embeds import PromptEmbeds
from rpc_schema.sampling import (
    MAX_LOGITS_PROCESSORS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_LOGPROBS,
    MAX_STOP_TOKEN_IDS,
    MIN_TEMPERATURE,
    SamplingParams,
    StopTokens,
)
from rpc_schema.structured import StructuredOutput
from rpc_schema.token_rules import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_BIASED_TOKENS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MIN_REPETITION_PENALTY,
)
from worker_client.embeds_files import EmbedsFiles
from worker_client.errors import RequestError
from worker_client.host_tensor import HostTensor
from worker_client.prompt_embeds import (
    Embeddings,
    Ranges,
    embeds_extension,
    host_tensor,
    with_placeholders,
)
from worker_client.stop_strings import MAX_STOP_BYTES, MAX_STOP_STRINGS
from worker_client.structured.options import read_structured_output

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Encode = Callable[[str], Sequence[int]]

DEFAULT_MAX_TOKENS = 16
MAX_SEED = 2**63 - 1
MAX_COUNT = 2**31 - 1
MAX_ID_LENGTH = 256
MAX_SAMPLES = 64
"""Bound on n."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request for generation, or with `pooling` for an output made of the prompt's hidden states.
    `validated` checks every field, as schedulers do."""

    id: str
    prompt_token_ids: NDArray[np.int32]
    """int32 [num_prompt_tokens], at least one."""
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
        _check_num_stop_ids(len(stop_ids))
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


_INT32: Final = np.dtype(np.int32)

_OPTIONS: Final = tuple(
    field
    for field in dataclasses.fields(GenerationRequest)
    if field.name not in ("id", "prompt_token_ids", "max_tokens", "seed", "ignore_eos")
)
_options_of: Final = attrgetter(*[field.name for field in _OPTIONS])
_DEFAULTS: Final = tuple(
    {} if field.default is dataclasses.MISSING else field.default for field in _OPTIONS
)

_SIZED: Final = (
    "id",
    "prompt_token_ids",
    "logit_bias",
    "bad_words",
    "lora",
    "stop",
    "logits_processors",
)
"""Fields of which the length is bounded."""


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
        RequestError: n is out of bounds, or the request has no seed and needs one.
    """
    if request.n == 1:
        return (request,)
    if not 1 <= request.n <= MAX_SAMPLES:
        raise RequestError(
            "n is out of bounds", field="n", value=request.n, fix=f"use 1 to {MAX_SAMPLES}"
        )
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
            seed=derived_seed(request.seed, index) if index and request.seed else request.seed,
            prompt_logprobs=None if index else request.prompt_logprobs,
        )
        for index in range(request.n)
    )


def sample_id(req_id: str, index: int) -> str:
    """Return the id of a request's sample."""
    return f"{req_id}#{index}"


def parent_id(sample: str) -> str:
    """Return the id of the request that a sample belongs to."""
    return sample.rpartition("#")[0]


def validated(request: GenerationRequest) -> GenerationRequest:
    """Return the request unchanged. check_fits checks the same.

    Raises:
        RequestError: a field is out of bounds.
    """
    _check_fields(request, None)
    return request


def _check_fields(request: GenerationRequest, vocab_size: int | None) -> None:
    """Check every field. vocab_size: the model's; None: token ids that a message can carry."""
    prompt, num_tokens = request.prompt_token_ids, len(request.prompt_token_ids)
    top = MAX_COUNT if vocab_size is None else vocab_size - 1
    _check_unicode("id", request.id)
    for field, value, low, high in (
        ("id", len(request.id), 1, MAX_ID_LENGTH),
        ("prompt_token_ids", num_tokens, 1, MAX_COUNT),
        ("max_tokens", request.max_tokens, 1, MAX_COUNT),
        ("seed", request.seed or 0, 0, MAX_SEED),
    ):
        if not low <= value <= high:
            _refuse_range(field, value, low, high)
    if request.has_options:
        _check_options(request, top)
    # Negative ids are the largest as uint32.
    if prompt.dtype != _INT32 or int(np.maximum.reduce(prompt.view(np.uint32))) > top:
        _check_token_ids("prompt_token_ids", (int(prompt.min()), int(prompt.max())), top)


def _refuse_range(field: str, value: float, low: float, high: float) -> NoReturn:
    what = f"the length of {field}" if field in _SIZED else field
    raise RequestError(
        f"{what} is out of bounds", field=field, value=value, fix=f"use {low} to {high}"
    )


def _check_options(request: GenerationRequest, top: int) -> None:
    """Check the fields that few requests have; top: the largest token id."""
    _check_unicode("lora", request.lora or "")
    features: object = request.features
    if not isinstance(features, tuple):
        fix = "give a tuple of extensions"
        raise RequestError("the features are malformed", field="features", value=features, fix=fix)
    if request.pooling is not None:
        _check_pooling(request, request.pooling)
    _check_num_stop_ids(len(set(request.stop_token_ids)))
    if request.prompt_embeds is None and len(request.prompt_embeds_at):
        raise RequestError(
            "there are no embeddings for these positions",
            field="prompt_embeds_at",
            value=request.prompt_embeds_at,
            fix="give prompt_embeds too",
        )
    for field, value, low, high in (
        ("temperature", request.temperature, 0.0, 1e6),
        ("top_p", request.top_p, 1e-6, 1.0),
        ("top_k", request.top_k, 0, MAX_COUNT),
        ("min_p", request.min_p, 0.0, 1.0),
        ("min_tokens", request.min_tokens, 0, MAX_COUNT),
        ("logprobs", request.logprobs or 0, 0, MAX_LOGPROBS),
        ("prompt_logprobs", request.prompt_logprobs or 0, 0, MAX_LOGPROBS),
        ("logits_processors", len(request.logits_processors), 0, MAX_LOGITS_PROCESSORS),
        ("n", request.n, 1, MAX_SAMPLES),
        ("stop", len(request.stop), 0, MAX_STOP_STRINGS),
        ("presence_penalty", request.presence_penalty, -MAX_PENALTY, MAX_PENALTY),
        ("frequency_penalty", request.frequency_penalty, -MAX_PENALTY, MAX_PENALTY),
        (
            "repetition_penalty",
            request.repetition_penalty,
            MIN_REPETITION_PENALTY,
            MAX_REPETITION_PENALTY,
        ),
        ("logit_bias", len(request.logit_bias), 0, MAX_BIASED_TOKENS),
        ("bad_words", len(request.bad_words), 0, MAX_BAD_WORDS),
        ("lora", 1 if request.lora is None else len(request.lora), 1, MAX_ID_LENGTH),
    ):
        if not low <= value <= high:
            _refuse_range(field, value, low, high)
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
    _check_token_ids("stop_token_ids", request.stop_token_ids, top)
    _check_token_rules(request, top)
    _check_stop(request.stop)


def _check_stop(stop: Sequence[str]) -> None:
    for text in stop:
        _check_unicode("stop", text)
        if not text:
            fix = "leave it out, or name at least a character"
            raise RequestError("a stop string is empty", field="stop", value=text, fix=fix)
    size = sum(len(text.encode()) for text in stop)
    if size > MAX_STOP_BYTES:
        raise RequestError(
            "the stop strings are too long",
            field="stop",
            value=f"{size} bytes",
            fix=f"use at most {MAX_STOP_BYTES} bytes of UTF-8 in all",
        )


def _check_token_rules(request: GenerationRequest, top: int) -> None:
    """Check the rules on tokens, their numbers apart."""
    _check_token_ids("logit_bias", request.logit_bias, top)
    for bias in request.logit_bias.values():
        if not abs(bias) <= MAX_BIAS:  # also true of NaN
            raise RequestError(
                "a bias is out of bounds",
                field="logit_bias",
                value=bias,
                fix=f"use biases from {-MAX_BIAS} to {MAX_BIAS}",
            )
    if request.allowed_token_ids is not None:
        _check_length("allowed_token_ids", request.allowed_token_ids, MAX_ALLOWED_TOKENS)
        _check_token_ids("allowed_token_ids", request.allowed_token_ids, top)
    if request.logprob_token_ids is not None:
        _check_length("logprob_token_ids", request.logprob_token_ids, MAX_LOGPROB_TOKEN_IDS)
        _check_token_ids("logprob_token_ids", request.logprob_token_ids, top)
    for word in request.bad_words:
        _check_length("bad_words", word, MAX_BAD_WORD_TOKENS)
        _check_token_ids("bad_words", word, top)


def _check_length(field: str, token_ids: Sequence[int], most: int) -> None:
    if not 1 <= len(token_ids) <= most:
        raise RequestError(
            f"{field} has too many token ids, or none",
            field=field,
            value=f"{len(token_ids)} token ids",
            fix=f"give 1 to {most}",
        )


def check_fits(request: GenerationRequest, *, max_model_len: int, vocab_size: int | None) -> None:
    """Check a request, by itself and against the loaded model; vocab_size None: unknown.

    Raises:
        RequestError: a field is out of bounds, the prompt leaves no room for a token, or names
            tokens that do not exist.
    """
    _check_fields(request, vocab_size)
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


def _check_pooling(request: GenerationRequest, pooling: object) -> None:
    if not isinstance(pooling, PoolingParams):
        fix = "give rpc_schema.pooling.PoolingParams"
        raise RequestError("pooling is malformed", field="pooling", value=pooling, fix=fix)
    try:
        msgspec.convert(msgspec.to_builtins(pooling), PoolingParams)
    except (msgspec.ValidationError, TypeError) as error:
        raise RequestError(
            "pooling is malformed", field="pooling", value=pooling, fix=str(error)
        ) from None
    for field in _SAMPLING_FIELDS:
        value, own = getattr(request, field), GenerationRequest.__dataclass_fields__[field]
        default = {} if own.default is dataclasses.MISSING else own.default
        if value != default:
            raise RequestError(
                "a request either samples or pools",
                field=field,
                value=value,
                fix="leave it out, or leave pooling out",
            )


class RequestParser:
    """Parser of input lines. Requests without an id get the line's index, those without a seed get
    one."""

    def __init__(
        self,
        encode: Encode | None,
        seed: int | None = None,
        *,
        encode_word: Encode | None = None,
        directory: Path | None = None,
    ) -> None:
        """encode: turns text into token ids; None if the model has no tokenizer. seed: every
        request without one gets a seed derived from it and the request's index. encode_word: as
        encode, without special tokens. directory: of the files that requests name; None: they may
        name none."""
        self._encode = encode
        self._seed = seed
        self._encode_word = encode_word
        self._files = None if directory is None else EmbedsFiles(directory)

    def parse(self, text: str | bytes, index: int) -> GenerationRequest:
        """Return the request on line index + 1; bytes are UTF-8.

        Raises:
            RequestError: it is not a JSON object, or a field is unknown, of the wrong type or out
                of bounds; names line, field, value and fix.
        """
        try:
            return self.from_fields(_load_object(_decoded(text)), index)
        except RequestError as error:
            raise error.at_line(index + 1) from None

    def from_fields(self, fields: Mapping[str, Json], index: int) -> GenerationRequest:
        """Return the request with these fields. Raises as parse does, without the line."""
        values = _typed(fields)
        stop = values.pop("stop", ())
        pooling = _read_pooling(values.pop("pooling", None))
        at = values.pop("prompt_embeds_at", ())
        embeds = self._embeds(values.pop("prompt_embeds", None), at)
        text, ids = values.pop("prompt", None), values.pop("prompt_token_ids", None)
        if embeds is None:
            prompt = self._prompt(text, ids)
        else:
            given = () if text is None and ids is None else self._prompt(text, ids)
            prompt = with_placeholders(given, embeds.shape[0], at)
            values |= {"prompt_embeds": embeds, "prompt_embeds_at": at}
        seed = random_seed() if self._seed is None else derived_seed(self._seed, index)
        if "structured_outputs" in values:
            values["structured_outputs"] = read_structured_output(values["structured_outputs"])
        request = GenerationRequest(
            id=str(values.pop("id", index)),
            prompt_token_ids=prompt,
            bad_words=self._bad_words(values.pop("bad_words", ())),
            pooling=pooling,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            **{"seed": seed, **{field: _frozen(value) for field, value in values.items()}},
        )
        return validated(request)

    def _bad_words(self, words: Sequence[str | list[int]]) -> tuple[tuple[int, ...], ...]:
        """Return the sequences of token ids of bad words: of a text, with a space before it and
        without, since tokenizers tell words inside a sentence by that."""
        if len(words) > MAX_BAD_WORDS:  # before each is tokenized
            fix = f"give at most {MAX_BAD_WORDS}"
            raise RequestError("too many", field="bad_words", value=len(words), fix=fix)
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            if not isinstance(word, str):
                found[tuple(word)] = None
                continue
            _check_unicode("bad_words", word)
            if self._encode_word is None:
                raise RequestError(
                    "the model has no tokenizer.json",
                    field="bad_words",
                    value=word,
                    fix="give each word as a list of token ids",
                )
            for text in (word, " " + word.lstrip(" ")):
                found[tuple(self._encode_word(text))] = None
        return tuple(found)

    def _embeds(self, name: str | None, at: Ranges) -> HostTensor | None:
        if name is not None and self._files is not None:
            return self._files.read(name)
        if name is None and not at:
            return None
        raise RequestError(
            "there are no embeddings",
            field="prompt_embeds",
            value=name,
            fix="name a file with it, in an input file (--input) beside it",
        )

    def _prompt(self, text: str | None, ids: list[int] | None) -> NDArray[np.int32]:
        if ids is not None and text is None:
            _check_token_ids("prompt_token_ids", ids, MAX_COUNT)
            return np.array(ids, np.int32)
        if text is None or ids is not None:
            raise RequestError(
                "a request has either prompt or prompt_token_ids",
                field="prompt",
                value=text,
                fix="give exactly one of the two",
            )
        _check_unicode("prompt", text)
        if self._encode is None:
            raise RequestError(
                "the model has no tokenizer.json",
                field="prompt",
                value=text,
                fix="give prompt_token_ids",
            )
        return np.array(self._encode(text), np.int32)


_SAMPLING_FIELDS: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "logprobs",
    "structured_outputs",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "logprob_token_ids",
    "prompt_logprobs",
    "logits_processors",
    "n",
    "stop",
    "include_stop_str_in_output",
)
"""Fields that pooling excludes. max_tokens and seed are ignored."""

_FIELDS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "id": str | int,
        "prompt": str,
        "prompt_token_ids": list[int],
        "max_tokens": int,
        "temperature": float,
        "top_p": float,
        "top_k": int,
        "min_p": float,
        "seed": int,
        "min_tokens": int,
        "ignore_eos": bool,
        "stop_token_ids": list[int],
        "logprobs": int,
        "lora": str,
        "structured_outputs": dict[str, Any],
        "presence_penalty": float,
        "frequency_penalty": float,
        "repetition_penalty": float,
        "logit_bias": dict[int, float],
        "allowed_token_ids": list[int],
        "bad_words": list[str | list[int]],
        "pooling": dict[str, Any],
        "logprob_token_ids": list[int],
        "prompt_logprobs": int,
        "logits_processors": list[str],
        "n": int,
        "stop": str | list[str],
        "include_stop_str_in_output": bool,
        "prompt_embeds": str,
        "prompt_embeds_at": list[list[int]],
    }
)
"""Fields of an input line, and their types."""


def _typed(fields: Mapping[str, Json]) -> dict[str, Any]:
    """Return the fields that are not null, each of its type."""
    unknown = sorted(fields.keys() - _FIELDS.keys())
    if unknown:
        raise RequestError(
            "unknown field",
            field=printable(unknown[0][:80]),
            value=fields[unknown[0]],
            fix="use " + ", ".join(sorted(_FIELDS)),
        )
    values = {}
    for field, value in fields.items():
        try:
            if value is not None:
                values[field] = msgspec.convert(value, _FIELDS[field], str_keys=True)
        except msgspec.ValidationError as error:
            raise _wrong_type(field, value, error) from None
    return values


def _frozen(value: Any) -> Any:
    """Return a list as a tuple, and anything else as it is."""
    return tuple(value) if isinstance(value, list) else value


def _read_pooling(fields: Mapping[str, Json] | None) -> PoolingParams | None:
    """Return a request's pooling, whose values `validated` checks."""
    if fields is None:
        return None
    unknown = sorted(fields.keys() - set(PoolingParams.__struct_fields__))
    if unknown or "task" not in fields:
        raise RequestError(
            "pooling has other fields" if unknown else "pooling has no task",
            field="pooling",
            value=printable(str(fields)[:80]),
            fix="use " + ", ".join(PoolingParams.__struct_fields__),
        )
    return PoolingParams(**{k: v for k, v in fields.items() if v is not None})  # type: ignore[arg-type]  # checked later


def _decoded(text: str | bytes) -> str:
    if isinstance(text, str):
        return text
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"not UTF-8: {error.reason} at byte {error.start + 1} of the line",
            field="line",
            value=text[max(0, error.start - 20) : error.start + 20],
            fix="write the file in UTF-8",
        ) from None


def _check_unicode(field: str, text: str) -> None:
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


def _check_num_stop_ids(count: int) -> None:
    if count > MAX_STOP_TOKEN_IDS:
        raise RequestError(
            "too many stop tokens, end of sequence included",
            field="stop_token_ids",
            value=count,
            fix=f"give at most {MAX_STOP_TOKEN_IDS}",
        )


def _load_object(text: str) -> dict[str, Json]:
    try:
        value: Json = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"not JSON: {error}", field="line", value=text[:80], fix="write one JSON object a line"
        ) from None
    if not isinstance(value, dict):
        raise _wrong_type("line", value, "write a JSON object")
    return value


def _wrong_type(field: str, value: Json, error: object) -> RequestError:
    return RequestError(f"{field} has the wrong type", field=field, value=value, fix=str(error))


def _check_token_ids(field: str, token_ids: Iterable[int], high: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id <= high:
            raise RequestError(
                f"{field} has an invalid token id",
                field=field,
                value=token_id,
                fix=f"use token ids from 0 to {high}",
            )
