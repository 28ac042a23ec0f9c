"""Random grammars with independent judges of their texts (jsonschema, re and lark), a tokenizer for
the tiny models, and matchers that are waited for."""

import contextlib
import json
import random
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import lark
import numpy as np
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from rpc_schema.structured import StructuredOutput
from worker_client.structured.grammars import Grammars

VOCAB_SIZE = 421
"""Vocabulary size of the model; the tokenizer has fewer tokens."""
EOS_TOKEN_ID = 3
ADDED = "<tool_call>"
DECOMPOSED = "Zu\u0308rich"
COMPACT = {"whitespace_flexible": False}
"""Without this, a random model writes blanks forever."""
NEGATED = '[^ab\\n"\\\\]'
WORDS = ("red", "green", "a b", "é", 'say "x"', "back\\slash", "long-word")
TEXTS = [
    json.dumps({"name": word, "items": [1, 22, 333], "ok": True, "none": None, "x": -1.5e3})
    for word in WORDS
] * 4


def make_tokenizer(path: Path) -> Tokenizer:
    """Write a byte-level tokenizer of some 400 tokens to a model's directory: one that composes
    characters, and has an added token that is no special one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 16,
        special_tokens=["<a>", "<b>", "<c>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken(ADDED, special=False)])
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.save(str(path / "tokenizer.json"))
    return tokenizer


def settle(grammars: Grammars, is_done: Callable[[], bool], cpu_s: float = 60.0) -> None:
    """Let grammars proceed until something is done: they belong to this thread. cpu_s: CPU time of
    all its processes after which it fails."""
    began = _cpu_s(grammars)
    for _ in range(100_000):
        grammars.proceed(0.01)
        if is_done():
            return
        if _cpu_s(grammars) - began > cpu_s:
            break
    raise AssertionError("it is not done")


def _cpu_s(grammars: Grammars) -> float:
    own = time.process_time()
    for pid in grammars.pids:
        with contextlib.suppress(OSError):
            own += time.clock_gettime((~pid << 3) | 2)
    return own


def compiled(grammars: Grammars, grammar: StructuredOutput) -> Any:
    """Compile a grammar; raise RequestError if that fails."""
    future = grammars.compile(grammar)
    settle(grammars, future.done)
    return future.result(0)


def begun(grammars: Grammars, grammar: StructuredOutput, tokens: Sequence[int] = ()) -> Any:
    """Return a matcher that is ready."""
    compiled(grammars, grammar)
    matcher = grammars.begin(grammar, tokens)
    settle(grammars, lambda: matcher.is_ready)
    return matcher


def take(grammars: Grammars, matcher: Any, token: int) -> None:
    """Let a matcher take a token, and wait for the mask after it."""
    grammars.take(matcher, [token])
    settle(grammars, lambda: matcher.is_ready)


def allowed_tokens(matcher: Any) -> list[int]:
    """Return the tokens that a matcher allows next; none once it has failed."""
    if matcher.error:
        return []
    if matcher.forced:
        return [matcher.forced[0]]
    bits = np.unpackbits(np.ascontiguousarray(matcher.mask).view(np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]


class Case(NamedTuple):
    """A request's grammar, and a check of its texts."""

    options: dict[str, Any]
    check: Callable[[str], None]
    """Raises if a text is not allowed."""


def random_case(rng: random.Random, *, tagged: bool = True) -> Case:
    """Return a grammar of any kind; most are schemas.

    tagged: also texts that the tokenizer takes for other ones.
    """
    kinds = ["json", "regex", "choice", "grammar", "json_text", "tagged"]
    kind = rng.choices(kinds, [8, 2, 2, 2, 1, 2 if tagged else 0])[0]
    if kind == "tagged":
        return tagged_case(rng)
    if kind == "regex":
        return regex_case(random_regex(rng))
    if kind == "choice":
        choices = rng.sample([*WORDS, "", "yes", "no", "redder"], rng.randint(1, 6))
        return Case({"choice": choices}, lambda text: _check_member(text, choices))
    if kind == "grammar":
        return grammar_case(rng)
    return schema_case(random_schema(rng), as_text=kind == "json_text")


def long_names_case() -> Case:
    """An object of booleans with long names: nearly all of its text is forced."""
    names = [f"a_rather_long_property_name_{i}" for i in range(4)]
    return schema_case(
        {
            "type": "object",
            "properties": {name: {"type": "boolean"} for name in names},
            "required": names,
            "additionalProperties": False,
        }
    )


def schema_case(schema: dict[str, Any], *, as_text: bool = False) -> Case:
    """Return a JSON schema, as an object or as text."""
    whole = {**schema, "x-guidance": COMPACT}
    jsonschema.Draft202012Validator.check_schema(schema)

    def check(text: str) -> None:
        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)

    return Case({"json": json.dumps(whole) if as_text else whole}, check)


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """Return a schema with bounded texts: all lengths and numbers are bounded."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    if depth:
        kinds += ["object", "object", "object", "array", "array", "anyOf"]
    return _schema_of(rng.choice(kinds), rng, depth)


LONG_NAMES = ("first_measurement", "the name of it", "größe in Metern", "is_repeated", "x" * 30)


def forced_schema(rng: random.Random, depth: int = 1) -> dict[str, Any]:
    """An object whose text is mostly forced: long names that are required, constants, and short
    values between them."""
    names = rng.sample(LONG_NAMES, rng.randint(2, 4))
    values: list[dict[str, Any]] = [{"const": rng.choice(LONG_NAMES)}, {"enum": ["redder", "red"]}]
    values += [{"type": "boolean"}, {"type": "string", "maxLength": 3}]
    values += [{"type": "integer", "minimum": 0, "maximum": 99}]
    if depth:
        values += [forced_schema(rng, depth - 1)] * 2
    return {
        "type": "object",
        "properties": {name: rng.choice(values) for name in names},
        "required": names,
        "additionalProperties": False,
    }


def _schema_of(kind: str, rng: random.Random, depth: int) -> dict[str, Any]:  # noqa: PLR0911
    if kind == "string":
        shortest = rng.randint(0, 3)
        return {"type": "string", "minLength": shortest, "maxLength": shortest + rng.randint(0, 4)}
    if kind == "integer":
        low = rng.randint(-300, 300)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}
    if kind == "number":
        return {"type": "number", "multipleOf": 1, "minimum": 0, "maximum": rng.randint(1, 50)}
    if kind == "enum":
        return {"enum": rng.sample([*WORDS, 1, -2, True, None], rng.randint(1, 5))}
    if kind == "const":
        return {"const": rng.choice([*WORDS, 17, False])}
    if kind == "pattern":
        # llguidance escapes a quote or a backslash that a pattern's character class excludes.
        pattern = random_regex(rng).replace(NEGATED, "[c-z,.]")
        return {"type": "string", "pattern": f"^{pattern}$"}
    if kind == "array":
        least = rng.randint(0, 2)
        items = random_schema(rng, depth - 1)
        most = least + rng.randint(0, 2)
        return {"type": "array", "items": items, "minItems": least, "maxItems": most}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
    if kind == "object":
        names = rng.sample(["a", "name", "x y", "ok", "é"], rng.randint(0, 4))
        return {
            "type": "object",
            "properties": {name: random_schema(rng, depth - 1) for name in names},
            "required": [name for name in names if rng.random() < 0.6],
            "additionalProperties": False,
        }
    return {"type": kind}


def random_regex(rng: random.Random, depth: int = 2) -> str:
    """Return a bounded regular expression of a few characters, valid in Python and in Rust."""
    parts = []
    for _ in range(rng.randint(1, 3)):
        atom = rng.choice(["a", "b", "[0-9]", NEGATED, "x.?y", "\\-", "(red|green|r)"])
        if depth and rng.random() < 0.3:
            atom = f"({random_regex(rng, depth - 1)}|{random_regex(rng, depth - 1)})"
        parts.append(atom + rng.choice(["", "", "?", "{1,3}", "{2}"]))
    return "".join(parts).replace(".", "[a-z]")


def crossing_case(rng: random.Random) -> Case:
    """Return a regular expression with forced text whose tokens cross its characters."""
    forced = "".join(rng.choice("テスト中文日本語éüñ😀🎉") for _ in range(rng.randint(2, 6)))
    return regex_case(f"({rng.choice('ax')}|b){forced}[a-z]{{{rng.randint(1, 12)}}}{forced[:1]}?")


def tagged_case(rng: random.Random) -> Case:
    """Return a regular expression of texts that the tokenizer takes for other ones: an added token,
    a special one, and characters that it would compose."""
    before, after = (rng.choice([ADDED, "<eos>", DECOMPOSED, "<a>"]) for _ in range(2))
    return regex_case(f"{before}[0-9]{{1,3}}{after}")


def regex_case(regex: str) -> Case:
    """Return a regular expression."""
    compiled = re.compile(regex)
    return Case({"regex": regex}, lambda text: _check(compiled.fullmatch(text) is not None, text))


def grammar_case(rng: random.Random) -> Case:
    """Return sums of words with nested brackets in EBNF, with the same grammar in lark's syntax."""
    words = rng.sample(["x", "yz", "foo", "12"], rng.randint(1, 4))
    depth = rng.randint(1, 3)
    ebnf = ['root ::= sum0 "\\n"']
    own = ['start: sum0 "\\n"']
    for level in range(depth + 1):
        inner = f' | "(" sum{level + 1} ")"' if level < depth else ""
        atoms = " | ".join(f'"{word}"' for word in words) + inner
        ebnf += [f'sum{level} ::= atom{level} ("+" atom{level})?', f"atom{level} ::= {atoms}"]
        own += [f'sum{level}: atom{level} ("+" atom{level})?', f"atom{level}: {atoms}"]
    parser = lark.Lark("\n".join(own) + "\n", parser="earley", lexer="dynamic")

    def check(text: str) -> None:
        parser.parse(text)

    return Case({"grammar": "\n".join(ebnf) + "\n"}, check)


def _check_member(text: str, choices: list[str]) -> None:
    _check(text in choices, text)


def _check(is_allowed: bool, text: str) -> None:
    if not is_allowed:
        raise ValueError(text)
