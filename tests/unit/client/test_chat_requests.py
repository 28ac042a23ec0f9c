"""Bodies of chats as prompts and options, against transformers where it does the same."""

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from worker_client.errors import RequestError
from worker_client.inputs.chat_template import ChatTemplate
from worker_client.service.chat_messages import read_messages
from worker_client.service.chat_prompt import take_prompt
from worker_client.service.chat_tools import take_tools
from worker_client.service.fields import BodyFields
from worker_client.service.response_format import take_response_format

TEMPLATE = """\
{%- for message in messages %}
    {{- '<' + message.role + '>' }}
    {%- if message.content %}{{ message.content | trim }}{% endif %}
    {%- for call in message.tool_calls or [] %}
        {{- call.function.name }} {{ call.function.arguments | sort | join(' ') }}
    {%- endfor %}
    {{- '</' + message.role + '>' }}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}
{%- if mood is defined %}({{ mood }}){% endif %}
"""
GOING_ON = {"continue_final_message": True, "add_generation_prompt": False}
USER = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def template():
    made = ChatTemplate(TEMPLATE)
    yield made
    made.close()


def rendered(template, tools=None, **body):
    fields = BodyFields(body)
    prompt = take_prompt(fields)
    fields.check_empty()
    return prompt.render(template, tools)


def call(arguments):
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}


def test_messages_are_as_templates_take_them():
    part = {"type": "text", "text": "a"}
    given = [
        {"role": "developer", "content": [part, {"type": "text", "text": "b"}], "name": "n"},
        {"role": "assistant", "content": None, "tool_calls": [call('{"x": [1, {}]}'), call("")]},
        {"role": "tool", "tool_call_id": "c", "content": ""},
        {"role": "assistant", "content": "x", "tool_calls": None, "reasoning_content": "r"},
    ]
    developer, calling, tool, assistant = read_messages(given)
    assert developer == {"role": "system", "content": "a\nb", "name": "n"}
    arguments = [each["function"]["arguments"] for each in calling["tool_calls"]]
    assert arguments == [{"x": [1, {}]}, {}]
    assert tool == given[2]
    assert assistant == {"role": "assistant", "content": "x", "reasoning_content": "r"}
    assert read_messages(given, has_developer=True)[0]["role"] == "developer"
    assert given[1]["tool_calls"][0] == call('{"x": [1, {}]}'), "it is the caller's"


def test_a_template_may_know_developers(template):
    knows = ChatTemplate("{% if messages[0].role in ['developer'] %}D{% endif %}")
    body = {"messages": [{"role": "developer", "content": "a"}]}
    assert rendered(knows, **body) == "D"
    assert not template.compares("developer")


@pytest.mark.parametrize("source", [TEMPLATE, TEMPLATE.replace(" | trim", "")])
def test_the_last_message_goes_on_as_in_transformers(source):
    template = ChatTemplate(source)
    for final in ("one two", " one two ", "one\n", "  one"):
        messages = [USER, {"role": "assistant", "content": final}]
        expected, _ = render_jinja_template([messages], chat_template=source, **GOING_ON)
        body = {"messages": messages, "continue_final_message": True}
        assert [rendered(template, **body)] == expected


def test_options_of_the_template(template):
    body = {"messages": [USER]}
    assert rendered(template, **body) == "<user>Hi</user><assistant>"
    assert rendered(template, **body, add_generation_prompt=False) == "<user>Hi</user>"
    variables = {"chat_template_kwargs": {"mood": "glad"}}
    assert rendered(template, **body, **variables).endswith("<assistant>(glad)")
    calling = {"role": "assistant", "tool_calls": [call('{"b": 1, "a": 2}')]}
    shown = rendered(template, messages=[USER, calling], add_generation_prompt=False)
    assert shown.endswith("<assistant>f a b</assistant>")


BAD = [
    ({"messages": [{**USER, "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{**USER, "content": [{"text": 3}]}]}, "messages[0].content[0].text"),
    ({"messages": [{**USER, "content": [3]}]}, "messages[0].content[0]"),
    ({"messages": [USER, {**USER, "content": {}}]}, "messages[1].content"),
    ({"messages": [{**USER, "tool_calls": [call("{}")]}]}, "messages[0].tool_calls"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [call("[]")]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": ["f"]}]}, "messages[0].tool_calls[0]"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
        "messages[0].tool_calls[0].function.name",
    ),
    ({"messages": [USER], "chat_template_kwargs": {"mood": "\ud800"}}, "chat_template_kwargs"),
    ({"messages": [USER, {"role": "assistant"}], "continue_final_message": True},
     "messages[1].content"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "field"), BAD)
def test_bad_messages_are_refused_by_path(template, body, field):
    with pytest.raises(RequestError) as refused:
        rendered(template, **body)
    assert refused.value.field == field


def tool(name, **fields):
    return {"type": "function", "function": {"name": name, **fields}}


def test_tools_and_the_choice_among_them():
    both = [tool("f", parameters={"type": "object"}, strict=True), tool("g", description="G")]
    auto = take_tools(BodyFields({"tools": both}))
    assert (auto.given, auto.is_required, auto.several) == (both, False, True)
    assert [(each.name, each.is_strict) for each in auto.functions] == [("f", True), ("g", False)]
    assert take_tools(BodyFields({"tools": both, "tool_choice": "auto"})) == auto
    assert take_tools(BodyFields({"tools": both, "tool_choice": "none"})) is None
    assert take_tools(BodyFields({"tools": []})) is None
    required = {"tools": both, "tool_choice": "required", "parallel_tool_calls": False}
    found = take_tools(BodyFields(required))
    assert (found.is_required, found.several, len(found.functions)) == (True, False, 2)
    named = take_tools(BodyFields({"tools": both, "tool_choice": tool("g")}))
    assert (named.is_required, [each.name for each in named.functions]) == (True, ["g"])
    assert named.given == both


def test_response_formats_as_grammars():
    schema = {"type": "object"}
    wrapped = {"name": "n", "schema": schema, "strict": True, "description": "d"}
    for given, expected in [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"json_object": True}),
        ({"type": "json_schema", "json_schema": wrapped}, {"json": schema}),
    ]:
        fields = BodyFields({"response_format": given})
        assert take_response_format(fields, has_other=False) == expected
    for given in ({"type": "grammar"}, {"type": "json_schema", "json_schema": {"schema": 3}}, 3):
        with pytest.raises(RequestError, match="response_format"):
            take_response_format(BodyFields({"response_format": given}), has_other=False)
