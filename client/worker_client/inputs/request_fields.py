"""The type and the bounds of each field of a request, and their description for an error."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta
from msgspec.inspect import (
    BoolType,
    CollectionType,
    DictType,
    FloatType,
    IntType,
    NoneType,
    StrType,
    TupleType,
    UnionType,
)

from rpc_schema.base import Count, Fraction, Name, Positive, Unsigned
from rpc_schema.pooling import PoolingParams
from rpc_schema.prompt_embeds import MAX_EMBEDDED_RANGES
from rpc_schema.sampling import (
    MAX_LOGITS_PROCESSORS,
    MAX_LOGPROB_TOKEN_IDS,
    LogitsProcessors,
    LogprobsWanted,
    LogprobTokens,
    NumLogprobs,
    PromptLogprobsWanted,
    RandomSampling,
    StopTokens,
    Temperature,
    TopP,
)
from rpc_schema.structured import StructuredOutput
from rpc_schema.token_rules import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_BIASED_TOKENS,
    AllowedTokens,
    BadWords,
    LogitBias,
    Penalties,
    Penalty,
    RepetitionPenalty,
)
from worker_client.inputs.stop_strings import MAX_STOP_STRINGS

MAX_SAMPLES: Final = 64
"""Bound on n."""

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
"""A value as JSON has it."""

TokenIds = tuple[Count, ...]
Bias = Annotated[float, Meta(ge=-MAX_BIAS, le=MAX_BIAS)]
BadWord = Annotated[TokenIds, Meta(min_length=1, max_length=MAX_BAD_WORD_TOKENS)]
StopString = Annotated[str, Meta(min_length=1)]

FIELD_TYPES: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "id": Name,
        "max_tokens": Positive,
        "seed": Unsigned | None,
        "ignore_eos": bool,
        "temperature": Temperature,
        "top_p": TopP,
        "top_k": Count,
        "min_p": Fraction,
        "min_tokens": Count,
        "stop_token_ids": TokenIds,
        "logprobs": NumLogprobs | None,
        "lora": Name | None,
        "presence_penalty": Penalty,
        "frequency_penalty": Penalty,
        "repetition_penalty": RepetitionPenalty,
        "logit_bias": Annotated[dict[Count, Bias], Meta(max_length=MAX_BIASED_TOKENS)],
        "allowed_token_ids": Annotated[TokenIds, Meta(min_length=1, max_length=MAX_ALLOWED_TOKENS)]
        | None,
        "bad_words": Annotated[tuple[BadWord, ...], Meta(max_length=MAX_BAD_WORDS)],
        "logprob_token_ids": Annotated[
            TokenIds, Meta(min_length=1, max_length=MAX_LOGPROB_TOKEN_IDS)
        ]
        | None,
        "prompt_logprobs": NumLogprobs | None,
        "logits_processors": Annotated[tuple[Name, ...], Meta(max_length=MAX_LOGITS_PROCESSORS)],
        "n": Annotated[int, Meta(ge=1, le=MAX_SAMPLES)],
        "index": Count | None,
        "stop": Annotated[tuple[StopString, ...], Meta(max_length=MAX_STOP_STRINGS)],
        "include_stop_str_in_output": bool,
        "prompt_embeds_at": Annotated[
            tuple[tuple[Count, Positive], ...], Meta(max_length=MAX_EMBEDDED_RANGES)
        ],
    }
)
"""Fields of GenerationRequest that are numbers, texts and collections of them. request_checks.py
checks the others."""


FIELDS_OF: Final[Mapping[type, str]] = MappingProxyType(
    {
        AllowedTokens: "allowed_token_ids",
        BadWords: "bad_words",
        LogitBias: "logit_bias",
        LogitsProcessors: "logits_processors",
        LogprobTokens: "logprob_token_ids",
        LogprobsWanted: "logprobs",
        Penalties: "repetition_penalty, presence_penalty or frequency_penalty",
        PoolingParams: "pooling",
        PromptLogprobsWanted: "prompt_logprobs",
        RandomSampling: "temperature",
        StopTokens: "stop_token_ids",
        StructuredOutput: "structured_outputs",
    }
)
"""Extensions that fields of a request stand for, and these fields: the driver goes by the fields,
so that a request must not have them otherwise."""


def described(kind: Any) -> str:
    """Return a description of the values of a type of FIELD_TYPES."""
    return _described(msgspec.inspect.type_info(kind))


def _described(kind: msgspec.inspect.Type) -> str:
    match kind:
        case BoolType():
            text = "true or false"
        case NoneType():
            text = "none"
        case IntType():
            text = f"a whole number{_range(kind.ge, kind.le)}"
        case FloatType():
            text = f"a number{_range(kind.ge, kind.le)}"
        case StrType():
            text = f"a text{_length(kind.min_length, kind.max_length, 'characters')}"
        case CollectionType():
            size = _length(kind.min_length, kind.max_length, "entries")
            text = f"a list{size}, each {_described(kind.item_type)}"
        case TupleType():
            text = f"a list of {' and '.join(map(_described, kind.item_types))}"
        case DictType():
            size = _length(kind.min_length, kind.max_length, "entries")
            key, value = _described(kind.key_type), _described(kind.value_type)
            text = f"a mapping{size} from {key} to {value}"
        case UnionType():
            text = ", or ".join(map(_described, kind.types))
        case _:
            raise AssertionError(f"no field has a {type(kind).__name__}")
    return text


def _range(low: float | None, high: float | None) -> str:
    return "" if low is None else f" from {low} to {high}"


def _length(low: int | None, high: int | None, of: str) -> str:
    if high is not None:
        return f" of {low or 0} to {high} {of}"
    return "" if low is None else f" of at least {low} {of}"
