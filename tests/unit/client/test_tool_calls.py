"""Tool calls in the text of a model, in parts of any size, against the whole text and against the
calls that it was written from."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker_client.service.tool_calls import (
    ToolCall,
    ToolCallStream,
    ToolForm,
    detected_form,
    marks_of,
)

INF = float("inf")
NAMES = ["get_weather", "add", "a-b"]
PARTS = ['{"name": "add", "arguments": {}}', '{"name": "add"', "{", "}", "[", "]", '"', "\\", "add"]
PARTS += [" ", "\n", "x", ";", "<tool", "_call>", "</", "[TOOL", '"a": 1']
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


@pytest.mark.parametrize("form", ToolForm)
@fast
@given(st.data())
def test_what_a_text_is_does_not_depend_on_its_parts(form, data):
    """Whatever it holds: broken calls, marks without calls, text behind them."""
    text = "".join(data.draw(st.lists(st.sampled_from([*marks_of(form), *PARTS]), max_size=14)))
    assert split(form, cut(data, text)) == split(form, list(text)) == split(form, [text])


@fast
@given(st.text("ab {<tool_cal[TOOLCS]|python>\n;", max_size=40))
def test_text_without_a_call_stays_as_it_is(text):
    for form in ToolForm:
        assert split(form, list(text)) == (text, [])


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


@pytest.mark.parametrize("name", CASES)
def test_forms_at_their_borders(name):
    form, text, said, made = CASES[name]
    assert split(form, list(text)) == (said, made)


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
