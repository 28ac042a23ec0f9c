"""Reads requests in JSON: lines of an input file, and the fields of an HTTP body."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Optional, get_type_hints

import msgspec
import numpy as np

from rpc_schema.base import Count
from rpc_schema.pooling import PoolingParams
from rpc_schema.token_rules import MAX_BAD_WORDS
from worker_client.errors import RequestError
from worker_client.inputs.embeds_files import EmbedsFiles
from worker_client.inputs.grammar_options import read_structured_output
from worker_client.inputs.host_tensor import HostTensor
from worker_client.inputs.prompt_embeds import Ranges, with_placeholders
from worker_client.inputs.request_checks import FACT_TYPES, check_unicode, refusal, validated
from worker_client.inputs.request_fields import Json, flat, plain
from worker_client.inputs.sampling_params import SamplingParams
from worker_client.requests import GenerationRequest, PromptTokenIds, derived_seed, random_seed
from worker_host.plain_text import printable

Encode = Callable[[str], Sequence[int]]

_MAX_NAME: Final = 80
"""Characters of an unknown field's name that an error shows."""


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
            RequestError: it is not a JSON object, or a field is unknown, given twice, of the wrong
                type or out of bounds; names line, field, value and fix.
        """
        try:
            return self.from_fields(read_object(text, "line"), index)
        except RequestError as error:
            raise error.at_line(index + 1) from None

    def from_fields(
        self,
        fields: Mapping[str, Json],
        index: int,
        *,
        token_ids: PromptTokenIds | None = None,
    ) -> GenerationRequest:
        """Return the request with these fields. token_ids: integers, in place of the fields of the
        prompt; a long list among the fields is looked at one by one. Raises as parse does, without
        the line."""
        try:
            return self._made(_typed(fields), index, token_ids)
        except RequestError as error:
            by_ids = token_ids is not None or (
                "prompt_token_ids" in fields and "prompt" not in fields
            )
            raise flat(error, "prompt_token_ids" if by_ids else "prompt") from None
        except Exception as error:  # too deep a schema for json, a fault of a tokenizer
            raise refusal(error) from error

    def _made(
        self, values: dict[str, Any], index: int, token_ids: PromptTokenIds | None
    ) -> GenerationRequest:
        at = values.pop("prompt_embeds_at", ())
        embeds = self._embeds(values.pop("prompt_embeds", None), at)
        text, ids = values.pop("prompt", None), values.pop("prompt_token_ids", None)
        prompt: PromptTokenIds
        if token_ids is not None:
            prompt = token_ids
        elif embeds is None:
            prompt = self._prompt(text, ids)
        else:
            given = () if text is None and ids is None else self._prompt(text, ids)
            prompt = with_placeholders(given, embeds.shape[0], at)
            values |= {"prompt_embeds": embeds, "prompt_embeds_at": at}
        if "structured_outputs" in values:
            values["structured_outputs"] = read_structured_output(values["structured_outputs"])
        if "pooling" in values:
            values["pooling"] = PoolingParams(**_given(values["pooling"]))
        if "bad_words" in values:
            values["bad_words"] = self._bad_words(values["bad_words"])
        if isinstance(values.get("stop"), str):
            values["stop"] = (values["stop"],)
        if "seed" not in values:
            own = self._seed
            values["seed"] = random_seed() if own is None else derived_seed(own, index)
        names = values.keys() & _SAMPLING_TYPES.keys()
        sampling = SamplingParams(**{name: values.pop(name) for name in names})
        name = str(values.pop("id", index))
        return validated(GenerationRequest(id=name, prompt=prompt, sampling=sampling, **values))

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
            check_unicode("bad_words", word)
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

    def _prompt(self, text: str | None, ids: list[int] | None) -> PromptTokenIds:
        if ids is not None and text is None:
            return np.array(ids, np.int32)
        if text is None or ids is not None:
            raise RequestError(
                "a request has either prompt or prompt_token_ids",
                field="prompt",
                value=text,
                fix="give exactly one of the two",
            )
        if self._encode is None:
            raise RequestError(
                "the model has no tokenizer.json",
                field="prompt",
                value=text,
                fix="give prompt_token_ids",
            )
        check_unicode("prompt", text)
        return np.array(self._encode(text), np.int32)


def _optional(types: Mapping[str, Any]) -> list[tuple[str, Any, None]]:
    return [(name, Optional[kind], None) for name, kind in types.items()]  # noqa: UP045  # a value


_SAMPLING_TYPES: Final = get_type_hints(SamplingParams, include_extras=True)
_POOLING_TYPES: Final = get_type_hints(PoolingParams, include_extras=True)
_Pooling: Final = msgspec.defstruct(
    "_Pooling",
    [("task", _POOLING_TYPES.pop("task")), *_optional(_POOLING_TYPES)],
    forbid_unknown_fields=True,
)
_Line: Final = msgspec.defstruct(
    "_Line",
    _optional(
        {
            **FACT_TYPES,
            **_SAMPLING_TYPES,
            "id": str | int,
            "prompt": str,
            "prompt_token_ids": list[Count],
            "stop": str | list[str],
            "bad_words": list[str | list[int]],
            "structured_outputs": dict[str, Any],
            "pooling": _Pooling,
            "prompt_embeds": str,
        }
    ),
)
"""The fields of a GenerationRequest and of its SamplingParams side by side, some in another form.
None: absent."""

FIELDS: Final = frozenset({*_Line.__struct_fields__} - {"index", "deadline"})
"""Fields of a request in JSON."""


def read_object(text: str | bytes, field: str) -> dict[str, Json]:
    """Return a JSON object; bytes are UTF-8. field: the name of the whole in errors.

    Raises:
        RequestError: it is none, or has a name twice.
    """
    try:
        value: Json = json.loads(_decoded(text, field), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"not JSON: {error}", field=field, value=text[:_MAX_NAME], fix="give one JSON object"
        ) from None
    if not isinstance(value, dict):
        message = f"{field} has the wrong type or is out of bounds"
        raise RequestError(message, field=field, value=value, fix="give a JSON object")
    return value


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise RequestError(
            "the name occurs twice in an object",
            field=_shown_name(twice),
            value=fields[twice],
            fix="give each name once",
        )
    return fields


def _shown_name(name: str) -> str:
    return printable(name[:_MAX_NAME])


def _decoded(text: str | bytes, field: str) -> str:
    if isinstance(text, str):
        return text
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"not UTF-8: {error.reason} at byte {error.start + 1} of the {field}",
            field=field,
            value=text[max(0, error.start - 20) : error.start + 20],
            fix="write it in UTF-8",
        ) from None


def _typed(fields: Mapping[str, Json]) -> dict[str, Any]:
    """Return the fields that are not null, of their types."""
    unknown = sorted(fields.keys() - FIELDS)
    if unknown:
        raise RequestError(
            "unknown field",
            field=_shown_name(unknown[0]),
            value=fields[unknown[0]],
            fix="use " + ", ".join(sorted(FIELDS)),
        )
    return _given(plain(_Line(**fields), is_json=True))


def _given(values: msgspec.Struct) -> dict[str, Any]:
    return {name: own for name, own in msgspec.structs.asdict(values).items() if own is not None}
