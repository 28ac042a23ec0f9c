"""Prompts of chats against transformers' apply_chat_template: templates in the forms of real ones,
random messages, and every place that a checkpoint may keep its template in."""

import contextlib
import json
import random

import pytest
import tokenizers
import transformers
from tokenizers import models
from transformers.utils.chat_template_utils import render_jinja_template

from worker_client.errors import ClientConfigError, RequestError
from worker_client.inputs.chat_template import ChatTemplate, load_chat_template
from worker_client.inputs.tokenizer import load_tokenizer

SEED = random.randrange(10**6)
WORDS = ["<b>", "it's", 'say "x"', " two\n lines\n", "é你🙂", "{{ 7 }}", "", "  ", "</s>", "a\\n"]

PLAIN = """\
{% for message in messages %}
{{ '<|start|>' + message['role'] + '\\n' + message['content'] | trim + '<|end|>' }}
{% endfor %}
{% if add_generation_prompt %}
    {{- '<|start|>assistant\\n' }}
{%- endif %}
"""

STRICT = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- if loop.first and system is defined %}
        {{- '[I] ' + system + '\\n\\n' + message.content + ' [/I]' }}
    {%- elif message.role == 'user' %}
        {{- '[I] ' + message.content + ' [/I]' }}
    {%- else %}
        {%- generation %} {{ message.content.strip() }}{{ eos_token }}{% endgeneration %}
    {%- endif %}
{%- endfor %}
"""

WITH_TOOLS = """\
{%- macro show(message, last=false) -%}
<{{ message.role }}{% if last %} last{% endif %}>
{%- if message.content is string %}{{ message.content }}
{%- elif message.content is iterable %}
    {%- for part in message.content if part.type == 'text' %}{{ part['text'] }}{% endfor %}
{%- endif %}
{%- for call in message.tool_calls | default([]) %}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
{% endfor -%}
{%- endmacro -%}
{%- set ns = namespace(last=-1, num=0) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if message.role == 'user' and ns.last < 0 %}{% set ns.last = index %}{% endif %}
    {%- if message.role not in ['user', 'assistant', 'system', 'tool', 'critic'] %}
        {%- break %}
    {%- endif %}
    {%- set ns.num = ns.num + 1 %}
{%- endfor %}
{%- if tools %}
    {{- "# Tools\\n" }}
    {%- for tool in tools %}
{{ tool | tojson(indent=2) }}
{{ tool | tojson(sort_keys=true, separators=(',', ':')) }}
        {%- for name, value in tool.function.parameters.properties.items() %}
  {{ name }}: {{ value.type | upper }}{{ ", " if not loop.last }}
        {%- endfor %}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.content is none or message.content is not defined %}{% continue %}{% endif %}
    {{- show(message, loop.index0 == ns.last) | replace("\\n\\n", "\\n") }}
{%- endfor %}
{{- strftime_now("%Y") }} {{ ns.num }} {{ documents is none }} {{ undefined_thing }}
{%- if add_generation_prompt %}
<assistant>
    {%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{%- endif %}
"""

TESTS_NONE = """\
{{- bos_token }}
{%- set ns = namespace(first=true, after_tool=false) %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{{ message['content'] }}{% endif %}
    {%- if message['role'] == 'user' %}{{ '<U>' + message['content'] }}{% endif %}
    {%- if message['role'] == 'assistant' and message['content'] is none %}
        {%- for call in message['tool_calls'] %}
            {{- '<A><calls>' if loop.first else '\\n' }}
            {{- call['type'] + '<sep>' + call['function']['name'] + '\\n' }}
            {{- call['function']['arguments'] | tojson }}
        {%- endfor %}
        {{- '</calls>' }}
        {%- set ns.after_tool = true %}
    {%- endif %}
    {%- if message['role'] == 'assistant' and message['content'] is not none %}
        {%- set content = message['content'] %}
        {%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
        {{- '<A>' + content + eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.after_tool %}{{ '<A><think>' }}{% endif %}
"""

TESTS_DEFINED = """\
{%- for message in messages %}
    {{- '<' + message.role + '>' }}
    {%- if message.reasoning_content is defined and message.reasoning_content %}
        {{- '<think>' + message.reasoning_content + '</think>' }}
    {%- endif %}
    {%- if message.thinking %}{{ '<T>' ~ message.thinking }}{% endif %}
    {%- if message.content is defined %}
        {{- message.content + '</end>' }}
    {%- endif %}
    {%- if message.tool_calls is defined %}{{ message.tool_calls | length }} calls{% endif %}
{%- endfor %}
"""

JOINS = """\
{%- for message in messages %}
    {%- if message['content'] == none %}
        {{- message.role ~ ' calls' ~ message.name }}
    {%- else %}
        {{- message['role'] + ': ' + message['content'] + (message.name or '') }}
    {%- endif %}
{%- endfor %}
"""

TEMPLATES = {
    "plain": PLAIN,
    "strict": STRICT,
    "tools": WITH_TOOLS,
    "none": TESTS_NONE,
    "defined": TESTS_DEFINED,
    "joins": JOINS,
}


def make_model(path, template, **fields):
    """Write the files of a tokenizer with a template, as transformers does; return it."""
    made = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, "<unk>"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>", **fields
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    return tokenizer


def random_messages(rng):
    """Some messages; tool calls, reasoning, and fields that are null or absent among them."""
    messages = []
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": rng.choice(WORDS)})
    for number in range(rng.randint(1, 6)):
        role = "assistant" if number % 2 else "user"
        message = {"role": role, "content": " ".join(rng.choices(WORDS, k=rng.randint(0, 4)))}
        if role == "assistant" and rng.random() < 0.3:
            arguments = {"city": rng.choice(WORDS), "days": [rng.random(), None, True]}
            call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
            message |= {"tool_calls": [call], "content": rng.choice([None, "so"])}
        if rng.random() < 0.2:
            message[rng.choice(["name", "reasoning", "reasoning_content", "thinking"])] = "why"
        if rng.random() < 0.2:
            message[rng.choice(["name", "reasoning_content", "content"])] = None
        if rng.random() < 0.1:
            del message["content"]
        messages.append(message)
    return messages


def random_tools(rng):
    properties = {name: {"type": rng.choice(["string", "integer"])} for name in "ab<"}
    function = {
        "name": "look",
        "description": rng.choice(WORDS),
        "parameters": {"type": "object", "properties": properties},
    }
    return rng.choice([None, [], [{"type": "function", "function": function}]])


def reference_prompt(reference, messages, tools, **variables):
    """Return transformers' prompt, else that of its renderer, which keeps nulls, and whether it was
    the latter; None if both fail."""
    with contextlib.suppress(Exception):  # jinja2's, or of the operations in the template
        return reference.apply_chat_template(messages, tools, tokenize=False, **variables), False
    with contextlib.suppress(Exception):
        (prompt,), _ = render_jinja_template(
            [messages], tools, None, reference.chat_template, **reference.special_tokens_map,
            **variables,
        )  # fmt: skip
        return prompt, True
    return None, False


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_those_of_transformers(tmp_path, name):
    reference = make_model(tmp_path, TEMPLATES[name])
    template = load_chat_template(tmp_path)
    rng, num_refused, num_with_nulls = random.Random(SEED), 0, 0
    for _ in range(200):
        messages, tools = random_messages(rng), random_tools(rng)
        prompting = rng.random() < 0.5
        variables = rng.choice([{}, {"enable_thinking": False}, {"enable_thinking": True}])
        expected, has_nulls = reference_prompt(
            reference, messages, tools, add_generation_prompt=prompting, **variables
        )
        if expected is None:
            num_refused += 1
            with pytest.raises(RequestError, match="chat template"):
                template.render(
                    messages, tools, add_generation_prompt=prompting, variables=variables
                )
            continue
        num_with_nulls += has_nulls
        before = json.dumps([messages, tools])
        found = template.render(
            messages, tools, add_generation_prompt=prompting, variables=variables
        )
        assert found == expected, f"seed {SEED}"
        assert json.dumps([messages, tools]) == before
    assert num_refused < 150
    assert num_with_nulls > 5 or name not in ("none", "joins")


def test_first_error_counts_where_messages_with_nulls_fail_too():
    text = "{{ raise_exception('null' if messages[0].content is none else 'absent') }}"
    with pytest.raises(RequestError, match="refuses the messages: absent"):
        ChatTemplate(text).render([{"role": "user", "content": None}])


def test_contents_in_parts_and_roles_of_the_templates_own(tmp_path):
    reference = make_model(tmp_path, WITH_TOOLS)
    messages = [
        {"role": "critic", "content": [{"type": "text", "text": "a"}, {"type": "image"}]},
        {"role": "tool", "content": "b", "name": None},
    ]
    found = load_chat_template(tmp_path).render(messages, add_generation_prompt=False)
    assert found == reference.apply_chat_template(messages, tokenize=False)
    assert "<critic>a" in found


@pytest.mark.parametrize("form", ["files", "string", "list", "json"])
def test_places_of_templates(tmp_path, form):
    reference = make_model(tmp_path, {"default": "no tools", "tool_use": "{{ tools | length }}"})
    tools = [{"type": "function", "function": {"name": "f"}}]
    messages = [{"role": "user", "content": "x"}]
    if form != "files":
        (tmp_path / "chat_template.jinja").unlink()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").unlink()
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        named = [
            {"name": "default", "template": "no tools"},
            {"name": "tool_use", "template": "{{ tools | length }}"},
        ]
        given = {"string": "{{ bos_token }}", "list": named}.get(form)
        config |= {"bos_token": {"content": "<s>"}, "chat_template": given}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if form == "json":
        text = json.dumps({"chat_template": "{{ eos_token }}"})
        (tmp_path / "chat_template.json").write_text(text)
    template = load_chat_template(tmp_path)
    found = [template.render(messages), template.render(messages, tools)]
    if form in ("files", "list"):
        again = [reference.apply_chat_template(messages, t, tokenize=False) for t in (None, tools)]
        assert found == again == ["no tools", "1"]
    else:
        assert found == [{"string": "<s>", "json": "</s>"}[form]] * 2


def test_the_tokens_of_a_prompt_are_those_of_transformers(tmp_path):
    reference = make_model(tmp_path, STRICT, add_bos_token=True)
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "x"}]
    ids = reference.apply_chat_template(messages, return_dict=False)
    prompt = load_chat_template(tmp_path).render(messages, add_generation_prompt=False)
    assert load_tokenizer(tmp_path).encode(prompt, add_special_tokens=False) == ids


@pytest.mark.parametrize(
    ("messages", "field", "said"),
    [
        ([], "messages", "no messages"),
        ([{"role": "user", "content": "a"}, {"role": "judge"}], "messages[1].role", "unknown"),
        ([{"content": "a"}], "messages[0].role", "or none"),
        (["a"], "messages[0]", "not an object"),
        ([{"role": "user", "content": "\ud800"}], "messages", "JSON"),
        ([{"role": "user", "content": object()}], "messages", "JSON"),
        ([{"role": "assistant", "content": "a"}], "messages", "refuses.*must alternate"),
        ([{"role": "user", "content": 5}], "messages", "fails with"),
        ([{"role": "user"}], "messages", "fails with"),
    ],
)
def test_wrong_messages(messages, field, said):
    template = ChatTemplate(STRICT)
    with pytest.raises(RequestError, match=said) as refused:
        template.render(messages)
    assert refused.value.field == field
    assert template.render([{"role": "user", "content": "a"}]) == "[I] a [/I]"


@pytest.mark.parametrize("value", [0, 5, True, 1.5, "look", {"a": 1}, {1, 2}, object(), [1], [[]]])
@pytest.mark.parametrize("field", ["messages", "tools", "variables"])
def test_what_is_no_list_of_objects_is_refused(field, value):
    if (field, value) == ("variables", {"a": 1}):
        return
    given = {"messages": [{"role": "user", "content": "a"}], field: value}
    with pytest.raises(RequestError) as refused:
        ChatTemplate(STRICT).render(**given)
    assert refused.value.field in (field, f"{field}[0]")


@pytest.mark.parametrize(
    "text",
    [
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__ }}{{ raise_exception.__globals__['os'] }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% include 'x' %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_templates_are_confined(text):
    try:
        shown = ChatTemplate(text).render([{"role": "user", "content": "a"}])
    except RequestError as error:
        assert error.field == "messages"
    else:
        assert shown == ""


def test_checkpoints_without_a_usable_template(tmp_path):
    def refused(match):
        with pytest.raises(ClientConfigError, match=match) as error:
            load_chat_template(tmp_path)
        assert error.value.field == "chat_template"

    refused("no chat template")
    config = tmp_path / "tokenizer_config.json"
    for text, match in [
        ("{", "cannot read"),
        ("[]", "no JSON object"),
        ('{"bos_token": "<s>"}', "no chat template"),
        ('{"chat_template": 5}', "malformed"),
        ('{"chat_template": [{"name": "default"}]}', "malformed"),
        ('{"chat_template": "{% for %}"}', "cannot be compiled"),
        ('{"chat_template": "{{ x | nothing }}"}', "cannot be compiled"),
    ]:
        config.write_text(text)
        refused(match)
    config.write_text('{"chat_template": [{"name": "tool_use", "template": "x"}]}')
    with pytest.raises(RequestError, match="without tools"):
        load_chat_template(tmp_path).render([{"role": "user"}])
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    refused("cannot read")
