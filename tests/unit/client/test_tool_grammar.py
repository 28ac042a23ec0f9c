"""Grammars of tool calls: what a random model writes under one is calls of the functions, whose
arguments jsonschema accepts; what models write is allowed."""

import json
import random

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from worker_client.service.tool_calls import ToolCall, ToolCallStream, ToolForm
from worker_client.service.tool_grammar import (
    Function,
    call_grammar,
    text_grammar,
    written_marks,
)
from worker_client.structured.mask_process import as_llguidance

SEED = random.randrange(10**6)
TOKENIZER = LLTokenizer("byte")
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", 'a "b"', "</tool_call>"]},
        "days": {"$ref": "#/$defs/days"},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
FUNCTIONS = [Function("get_weather", WEATHER), Function("now"), Function("a-b", {"type": "object"})]
SCHEMAS = {own.name: own.parameters or {"maxProperties": 0} for own in FUNCTIONS}
STRICT = [Function("get_weather", WEATHER, is_strict=True), Function("now", is_strict=True)]
STRICT.append(Function("a-b", {"enum": [{}]}))


def matcher(form, functions=FUNCTIONS, special=(), *, several=True, grammar=call_grammar):
    text = grammar(form, functions, dict(special), several=several)
    return LLMatcher(TOKENIZER, as_llguidance("grammar", text, {}))


def allows(form, text, **options):
    made = matcher(form, **options)
    tokens = list(text.encode())
    return made.try_consume_tokens(tokens) == len(tokens) and made.is_accepting()


def random_text(made, rng, most=400):
    """A text of random bytes that the grammar allows; None if it does not end."""
    tokens = []
    for _ in range(most):
        if made.is_accepting() and (made.is_stopped() or rng.random() < 0.5):
            return bytes(tokens).decode()
        bits = np.unpackbits(np.frombuffer(made.compute_bitmask(), np.uint8), bitorder="little")
        allowed = [int(t) for t in np.flatnonzero(bits) if t < 128]  # ASCII
        tokens.append(rng.choice(allowed))
        assert made.consume_token(tokens[-1])
    return None


def calls_of(form, text):
    stream = ToolCallStream(form, SCHEMAS)
    return stream.push(text) + stream.finish()


@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("form", ToolForm)
def test_outputs_are_calls_with_arguments_by_the_schemas(form, several):
    rng, seen = random.Random(SEED), set()
    for _ in range(12):
        text = random_text(matcher(form, several=several), rng)
        if text is None:
            continue
        calls = calls_of(form, text)
        assert calls and all(isinstance(call, ToolCall) for call in calls), (SEED, text)
        assert several or len(calls) == 1
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
            seen.add(name)
    assert len(seen) > 1, SEED


WRITTEN = {
    ToolForm.HERMES: '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", '
    '"days": 3}}\n</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ToolForm.LLAMA3_JSON: '{"name": "get_weather", "parameters": {"city": "Oslo", "days": 3}}',
    ToolForm.MISTRAL: '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Oslo"}}, '
    '{"name": "now", "arguments": {}}]',
}


@pytest.mark.parametrize("form", ToolForm)
def test_what_models_write_is_allowed_and_nothing_else(form):
    text = WRITTEN[form]
    assert allows(form, text)
    assert not allows(form, "Sure. " + text)
    assert not allows(form, text.replace("Oslo", "Rome"))
    assert not allows(form, text.replace("get_weather", "get_news"))
    assert allows(form, text, functions=FUNCTIONS[:1]) == (form is ToolForm.LLAMA3_JSON)
    assert allows(form, text, several=False) == (form is ToolForm.LLAMA3_JSON)


OPENER = {ToolForm.HERMES: "<tool_call>", ToolForm.MISTRAL: "[TOOL_CALLS]"}
SPECIAL = {"<tool_call>": ord("@"), "[TOOL_CALLS]": ord("@"), "<|python_tag|>": ord("@")}


@pytest.mark.parametrize("special", [{}, SPECIAL])
@pytest.mark.parametrize("form", ToolForm)
def test_what_begins_as_a_call_in_a_text_is_one(form, special):
    """Text is free; functions that are not strict take any arguments."""

    def is_allowed(text, functions=STRICT, **options):
        for mark in special:
            text = text.replace(mark, "@")
        own = {"functions": functions, "special": special, "grammar": text_grammar}
        return allows(form, text, **own, **options)

    text = WRITTEN[form]
    assert is_allowed(text)
    assert is_allowed("") and is_allowed("Sure.\n") and is_allowed("a < b [TOOL {x} <tool_cal")
    assert not is_allowed(text[:-12]), "it does not end within a call"
    assert not is_allowed(text.replace("Oslo", "Rome"))
    assert not is_allowed(text.replace("get_weather", "get_news"))
    free = text.replace("get_weather", "a-b").replace("Oslo", "Rome")
    assert is_allowed(free)
    assert not is_allowed(free, [each._replace(is_strict=True) for each in STRICT])
    if not special:  # bytes are text too, where no special token is looked for
        assert is_allowed(text, several=False) == (form is ToolForm.LLAMA3_JSON)
    wrong = text.replace("Oslo", "Rome")
    if form is ToolForm.LLAMA3_JSON:
        assert is_allowed(f"<|python_tag|>{text}") and is_allowed(f"\n {text}")
        assert not is_allowed('{"answer": 3}') and not is_allowed("<|python_tag|>print()")
        assert is_allowed(f"Sure. {wrong}"), "that is no call"
    else:
        assert is_allowed(f"Sure.\n{text}\nand {text} so")
        assert not is_allowed(f"Sure. {wrong}") and not is_allowed(f"{text} {wrong}")
        assert not is_allowed(f"{text} {OPENER[form]}now")


@pytest.mark.parametrize("form", ToolForm)
def test_texts_have_no_call_that_is_none(form):
    """Whatever a random model writes behind the mark of a call."""
    rng, num_calls = random.Random(SEED), 0
    opener = OPENER.get(form, "{")
    for _ in range(8):
        made = matcher(form, STRICT, grammar=text_grammar)
        assert made.try_consume_tokens(list(opener.encode())) == len(opener)
        text = random_text(made, rng)
        if text is None:
            continue
        for piece in calls_of(form, opener + text):
            if isinstance(piece, ToolCall):
                num_calls += 1
                if piece.name != "a-b":
                    jsonschema.validate(json.loads(piece.arguments), SCHEMAS[piece.name])
            else:
                assert opener not in piece, SEED
    assert num_calls, SEED


def test_marks_that_are_special_tokens_are_named_by_their_ids():
    """Here the byte of a character stands for each."""
    special = {"[TOOL_CALLS]": ord("@"), "[ARGS]": ord("#")}
    assert allows(ToolForm.MISTRAL, '@get_weather#{"city": "Oslo"}@now#{}', special=special)
    assert not allows(ToolForm.MISTRAL, "[TOOL_CALLS]now[ARGS]{}", special=special)
    older = ["{{ '[TOOL_CALLS]' + message.tool_calls | tojson }}"]
    assert written_marks(special, [*older, "{{ name + '[ARGS]' }}"]) == special
    only = written_marks(special, older)
    assert only == {"[TOOL_CALLS]": ord("@")}
    assert allows(ToolForm.MISTRAL, '@[{"name": "now", "arguments": {}}]', special=only)
