"""Tool calls in the text of a model, in parts of any size, against the whole text and against the
calls that it was written from."""

import itertools
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker_client.service.tool_calls import (
    BrokenCall,
    MoreArguments,
    ToolCall,
    ToolCallStream,
    ToolForm,
    detected_form,
    marks_of,
)

INF = float("inf")
NAMES = ["get_weather", "add", "a-b"]
PARTS = ['{"name": "add", "arguments": {}}', '{"name": "add"', "{", "}", "[", "]", '"', "\\", "add"]
PARTS += [" ", "\n", "x", ";", "<tool", "_call>", "</", "[TOOL", '"a": 1', ",", ":", "[ARGS]"]
PARTS += ['{"name": "add", ', '"name": "f"', '"arguments": {', '"parameters": {"a":"\\"}"}}']
fast = settings(max_examples=60, deadline=None, database=None)

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('ab{}[]"\\<>/;\n tool_call', max_size=12),
    lambda own: st.lists(own, max_size=2) | st.dictionaries(st.text(max_size=4), own, max_size=2),
    max_leaves=4,
)
arguments = st.dictionaries(st.text("ab <{", max_size=3), values, max_size=3)
calls = st.lists(st.tuples(st.sampled_from(NAMES), arguments), min_size=1, max_size=3)
prose = st.text("ab {}[]<>;\n", max_size=20).filter(lambda text: "{" not in text.strip()[:1])


def written(form, made):
    """Text of calls, as models of a form write them."""
    objects = [{"name": name, "arguments": own} for name, own in made]
    if form is ToolForm.HERMES:
        return "\n".join(f"<tool_call>\n{json.dumps(o)}\n</tool_call>" for o in objects)
    if form is ToolForm.MISTRAL:
        return "[TOOL_CALLS]" + json.dumps(objects, ensure_ascii=False)
    return "; ".join(json.dumps({"name": n, "parameters": own}) for n, own in made)


def split(form, parts):
    stream = ToolCallStream(form, NAMES)
    pieces = [piece for part in parts for piece in stream.push(part)] + stream.finish()
    texts = "".join(piece for piece in pieces if isinstance(piece, str))
    found = [(p.name, json.loads(p.arguments)) for p in pieces if isinstance(p, ToolCall)]
    return texts, found


def split_in_parts(form, parts, *, is_cut=False):
    """Likewise, with calls in parts; and whether one could not go on."""
    stream = ToolCallStream(form, NAMES, in_parts=True)
    pieces = [piece for part in parts for piece in stream.push(part)]
    pieces += stream.finish(is_cut=is_cut)
    texts, found, is_broken = "", [], False
    for piece in pieces:
        if isinstance(piece, str):
            texts += piece
        elif isinstance(piece, BrokenCall):
            is_broken = True
            break  # the answer ends
        elif isinstance(piece, MoreArguments):
            found[-1] = (found[-1][0], found[-1][1] + piece.text)
        else:
            found.append(tuple(piece))
    return texts, found, is_broken


def read(found):
    return [(name, json.loads(arguments)) for name, arguments in found]


def cut(data, text):
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    bounds = [0, *sorted(places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


@pytest.mark.parametrize("form", ToolForm)
@fast
@given(st.data())
def test_calls_are_found_wherever_the_text_is_cut(form, data):
    made, before = data.draw(calls), data.draw(prose)
    if form is ToolForm.LLAMA3_JSON:
        before = data.draw(st.sampled_from(["", " \n", "<|python_tag|>"]))
    text = before + written(form, made)
    expected = "" if form is ToolForm.LLAMA3_JSON else before.rstrip()
    assert split(form, cut(data, text)) == (expected, made)
    assert split(form, list(text)) == (expected, made)
    for parts in (cut(data, text), list(text), [text]):
        texts, found, is_broken = split_in_parts(form, parts)
        assert (texts, read(found), is_broken) == (expected, made, False)


@pytest.mark.parametrize("form", ToolForm)
@fast
@given(st.data())
def test_what_a_text_is_does_not_depend_on_its_parts(form, data):
    """Whatever it holds: broken calls, marks without calls, text behind them."""
    text = "".join(data.draw(st.lists(st.sampled_from([*marks_of(form), *PARTS]), max_size=14)))
    assert split(form, cut(data, text)) == split(form, list(text)) == split(form, [text])
    texts, found, is_broken = split_in_parts(form, [text])
    assert split_in_parts(form, cut(data, text)) == (texts, found, is_broken)
    assert split_in_parts(form, list(text)) == (texts, found, is_broken)
    if not is_broken:
        assert (texts, read(found)) == split(form, [text])


@pytest.mark.parametrize("form", ToolForm)
@fast
@given(st.data())
def test_an_output_may_end_within_a_call(form, data):
    """What has been passed on by then is the beginning of what the whole call would be."""
    text = written(form, data.draw(calls))
    end = data.draw(st.integers(0, len(text)))
    _, whole, _ = split_in_parts(form, [text])
    texts, found, is_broken = split_in_parts(form, list(text[:end]), is_cut=True)
    assert not is_broken
    assert [name for name, _ in found] == [name for name, _ in whole][: len(found)]
    assert [own for _, own in found[:-1]] == [own for _, own in whole][: max(len(found) - 1, 0)]
    assert not found or whole[len(found) - 1][1].startswith(found[-1][1])
    assert text[:end].rstrip().endswith(texts.rstrip()), "a call that has not begun is text"
    _, _, is_broken = split_in_parts(form, list(text[:end]))
    assert is_broken == (len(split(form, [text[:end]])[1]) < len(found))


@fast
@given(st.text("ab {<tool_cal[TOOLCS]|python>\n;", max_size=40))
def test_text_without_a_call_stays_as_it_is(text):
    for form in ToolForm:
        assert split(form, list(text)) == (text, [])


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        (
            ToolForm.HERMES,
            'So <tool_call>{"name": "add", "arguments": {"a": "}", "b": {}}}</tool_call>',
            ["So", ("add", "{"), '"', "a", '"', ": ", '"', "}", '"', ", ", '"', "b"],
        ),
        (ToolForm.LLAMA3_JSON, '{"name": "add", "parameters": {"a": 1}}', [("add", "{"), '"', "a"]),
        (ToolForm.MISTRAL, '[TOOL_CALLS]add[ARGS]{"a": 1}', [("add", "{"), '"', "a"]),
        (
            ToolForm.MISTRAL,
            '[TOOL_CALLS][{"name": "add", "arguments": {}}, {"name": "f", "arguments": {"a": 1}}]',
            [("add", "{"), "}", ("f", "{"), '"', "a", '"', ": "],
        ),
    ],
)
def test_arguments_are_passed_on_as_they_come(form, text, expected):
    """As soon as a token is here: the tokens are words and signs."""
    stream = ToolCallStream(form, NAMES, in_parts=True)
    pieces = [piece for part in re.findall(r"\w+|: |, |\W", text) for piece in stream.push(part)]
    said = [
        piece.text if isinstance(piece, MoreArguments) else
        tuple(piece) if isinstance(piece, ToolCall) else piece
        for piece in pieces
    ]  # fmt: skip
    assert said[: len(expected)] == expected


@pytest.mark.parametrize(
    ("text", "found", "is_broken"),
    [
        ('{"name": "add", "arguments": {x}}', [("add", "{x}")], True),
        ('{"name": "add", "arguments": {"a": 1}, "name": "f"}', [("add", '{"a": 1}')], True),
        ('{"name": "add", "arguments": {"a": 1', [("add", '{"a": 1')], True),
        ('{"name": "add", "arguments": [1]}', [], False),
        ('{"arguments": {"a": 1}, "name": "add"}', [("add", '{"a": 1}')], False),
        ('{"name": "\\u0061dd", "arguments": {}}', [("add", "{}")], False),
        ('{"name": "\\ud800", "arguments": {}}', [], False),
        ('{"name": 3, "arguments": {}}', [], False),
    ],
)
def test_calls_that_are_none_after_all(text, found, is_broken):
    assert split_in_parts(ToolForm.HERMES, list("<tool_call>" + text))[1:] == (found, is_broken)


CASES = {
    "newer Mistral": (ToolForm.MISTRAL, '[TOOL_CALLS]add{"a": 1}[TOOL_CALLS]f[ARGS]{}', "",
                      [("add", {"a": 1}), ("f", {})]),
    "with ids": (ToolForm.MISTRAL, "hm [TOOL_CALLS]add[CALL_ID]1b2[ARGS]{}", "hm", [("add", {})]),
    "text behind": (ToolForm.HERMES, '<tool_call>{"name": "add"}</tool_call>\n so', "so",
                    [("add", {})]),
    "no closing mark": (ToolForm.HERMES, '<tool_call>\n{"name": "add"}\n', "", [("add", {})]),
    "cut off": (ToolForm.HERMES, 'a <tool_call>{"name": "ad', 'a <tool_call>{"name": "ad', []),
    "no JSON": (ToolForm.HERMES, "<tool_call>{x}</tool_call>", "<tool_call>{x}</tool_call>", []),
    "no number": (ToolForm.MISTRAL, '[TOOL_CALLS]add{"a": NaN}', '[TOOL_CALLS]add{"a": NaN}', []),
    "a large number": (ToolForm.MISTRAL, '[TOOL_CALLS]add{"a": 1e999}', "", [("add", {"a": INF})]),
    "list of arguments": (ToolForm.HERMES, '<tool_call>{"name":"add","arguments":[]}</tool_call>',
                          '<tool_call>{"name":"add","arguments":[]}</tool_call>', []),
    "an answer in JSON": (ToolForm.LLAMA3_JSON, '{"name": "Ann", "parameters": {}}',
                          '{"name": "Ann", "parameters": {}}', []),
    "an answer with a name": (ToolForm.LLAMA3_JSON, '{"name": "add"}', '{"name": "add"}', []),
    "behind text": (ToolForm.LLAMA3_JSON, 'x {"name": "add", "parameters": {}}',
                    'x {"name": "add", "parameters": {}}', []),
}  # fmt: skip


BROKEN = ["no number"]
"""Those that have begun by then."""


@pytest.mark.parametrize("name", CASES)
def test_forms_at_their_borders(name):
    form, text, said, made = CASES[name]
    assert split(form, list(text)) == (said, made)
    texts, found, is_broken = split_in_parts(form, list(text))
    assert is_broken == (name in BROKEN)
    assert is_broken or (texts, read(found)) == (said, made)


def test_text_is_passed_on_before_a_call():
    stream = ToolCallStream(ToolForm.HERMES, NAMES)
    assert stream.push("Let me see.") == ["Let me see."]
    assert stream.push(" \n<tool") == []
    assert stream.push("box") == [" \n<toolbox"]
    assert stream.push('<tool_call>{"name": "add", "arguments": {"a": 1}') == []
    assert stream.push("}</tool_call>") == [ToolCall("add", '{"a": 1}')]


def test_calls_that_never_end_take_no_more_than_their_length():
    text = "<tool_call>{" * 20_000
    assert split(ToolForm.HERMES, [text]) == (text, [])
    text = '<tool_call>{"name": "add", "arguments": ' + '{"a": [' * 20_000
    assert split_in_parts(ToolForm.HERMES, [*text])[2]
    assert split(ToolForm.MISTRAL, ["[TOOL_CALLS]" + "[" * 50_000 + "]" * 50_000])[1] == []


HERMES = (
    "For each function call, return a json object within <tool_call></tool_call> XML tags:\\n"
    '<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args>}\\n</tool_call>'
)
LLAMA = (
    '{{- "Environment: ipython\\n" }}{{- \'Respond in the format {"name": function name, '
    '"parameters": dictionary of argument name and its value}.\' }}'
)
MISTRAL = "{{- '[TOOL_CALLS][' }}{%- for call in message.tool_calls %}"
XML = "<tool_call>\\n<function=example>\\n<parameter=a>\\n</parameter>\\n</function>\\n</tool_call>"


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (HERMES, ToolForm.HERMES),
        (LLAMA, ToolForm.LLAMA3_JSON),
        (MISTRAL, ToolForm.MISTRAL),
        (XML, None),
        ("{{ messages[0].content }}", None),
    ],
)
def test_a_template_shows_the_form_of_its_model(template, form):
    assert detected_form(["", template]) == form
