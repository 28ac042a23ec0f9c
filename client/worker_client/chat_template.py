"""Turns messages into prompts, by a checkpoint's chat template. The only user of jinja2 (extra
`chat`)."""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec

from worker_client.errors import ClientConfigError, RequestError, config_error
from worker_client.requests import Json
from worker_client.tokenizer import read_tokenizer_file

try:
    from jinja2 import Template, TemplateError, nodes
    from jinja2.ext import Extension, LoopControlExtension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment
except ImportError as error:
    raise ImportError(
        'chat templates need jinja2: pip install "worker-daemon[chat]"', name=error.name
    ) from None

CONFIG_FILE: Final = "tokenizer_config.json"
"""File with the special tokens and, of older checkpoints, the template or a list of named ones."""
TEMPLATE_FILE: Final = "chat_template.jinja"
NAMED_TEMPLATES: Final = "additional_chat_templates"
"""Directory of further templates, called by the names of their files."""
TEMPLATE_JSON: Final = "chat_template.json"
DEFAULT: Final = "default"
WITH_TOOLS: Final = "tool_use"
"""Name of a template for requests with tools, if a checkpoint has another one for these."""
ROLES: Final = frozenset(("system", "developer", "user", "assistant", "tool"))
"""Roles that any template may be given. Others must be named in it."""


class ChatTemplate:
    """A checkpoint's templates, compiled. They run in a sandbox: they see messages, tools and
    special tokens, and change nothing. Threads may share it."""

    def __init__(
        self, templates: str | Mapping[str, str], special_tokens: Mapping[str, str] | None = None
    ) -> None:
        """templates: the template, or several by name. special_tokens: variables that templates
        use, as bos_token.

        Raises:
            ClientConfigError: one is no template.
        """
        named = {DEFAULT: templates} if isinstance(templates, str) else templates
        environment = _environment()
        self._special_tokens = dict(special_tokens or {})
        self._templates: dict[str, Template] = {}
        self._roles = ROLES
        for name, source in named.items():
            try:
                tree = environment.parse(source)
                self._roles |= set(_compared(tree))  # compiling changes the tree
                self._templates[name] = environment.from_string(tree)
            except (TemplateError, RecursionError) as error:
                problem = f"the chat template cannot be compiled: {error}"
                raise config_error("chat_template", name, problem, "correct it") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Json]],
        tools: Sequence[Mapping[str, Json]] | None = None,
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Json] | None = None,
    ) -> str:
        """Return the prompt, special tokens included: encode it with add_special_tokens=False.

        Args:
            messages: each with a role; most have a content. None is the same as absent.
            tools: JSON schemas of functions.
            add_generation_prompt: end with the header of the assistant's next message.
            variables: further ones that the template knows, as enable_thinking.

        Raises:
            RequestError: a message is malformed or its role is unknown, or the template refuses
                the messages, or fails.
        """
        plain = [
            {key: value for key, value in message.items() if value is not None}
            for message in self._checked(messages)
        ]
        try:
            return self._chosen(tools).render(
                {
                    **self._special_tokens,
                    **_copied("variables", dict(variables or {})),
                    "messages": plain,
                    "tools": None if tools is None else _copied("tools", list(tools)),
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except RequestError:
            raise
        except Exception as error:  # the template's own, or one that it cannot handle
            said = "refuses" if isinstance(error, _Refusal) else "fails with"
            raise RequestError(
                f"the chat template {said} the messages: {error}",
                field="messages",
                value=[message["role"] for message in plain],
                fix="give messages of the roles and forms that the model was trained on",
            ) from None

    def _chosen(self, tools: object) -> Template:
        if tools is not None and WITH_TOOLS in self._templates:
            return self._templates[WITH_TOOLS]
        if DEFAULT not in self._templates:
            raise RequestError(
                "the model has no chat template for messages without tools",
                field="tools",
                value=tools,
                fix="give tools",
            )
        return self._templates[DEFAULT]

    def _checked(self, messages: Sequence[Mapping[str, Json]]) -> list[dict[str, Any]]:
        copies: list[dict[str, Any]] = _copied("messages", list(messages))
        if not copies:
            fix = "give at least one"
            raise RequestError("there are no messages", field="messages", value=copies, fix=fix)
        for place, message in enumerate(copies):
            if not isinstance(message, dict):
                raise RequestError(
                    "a message is not an object",
                    field=f"messages[{place}]",
                    value=message,
                    fix="give a role and a content",
                )
            role = message.get("role")
            if not isinstance(role, str) or role not in self._roles:
                raise RequestError(
                    "a message has an unknown role, or none",
                    field=f"messages[{place}].role",
                    value=role,
                    fix="use " + ", ".join(sorted(ROLES)),
                )
        return copies


class _Refusal(TemplateError):
    """Raised by a template."""


class _Generation(Extension):
    """The tag that marks what a model is trained on; here it does nothing."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        """Return what stands between the tags, as a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    """Return what templates of Hugging Face expect."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment


def _compared(tree: nodes.Template) -> Iterator[str]:
    """Yield the texts that a template compares something with: its roles are among them."""
    for node in tree.find_all(nodes.Compare):
        for side in (node.expr, *(operand.expr for operand in node.ops)):
            for each in side.items if isinstance(side, (nodes.List, nodes.Tuple)) else [side]:
                if isinstance(each, nodes.Const) and isinstance(each.value, str):
                    yield each.value


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as it is: jinja2's own filter escapes it for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> NoReturn:
    raise _Refusal(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _copied(field: str, value: Any) -> Any:
    """Return a copy of plain JSON values: objects have methods, which a template could call."""
    try:
        return msgspec.json.decode(msgspec.json.encode(value))
    except (msgspec.MsgspecError, TypeError, UnicodeError, RecursionError) as error:
        problem, fix = f"{field} cannot be written as JSON: {error}", "use values of JSON"
        raise RequestError(problem, field=field, value=type(value), fix=fix) from None


def load_chat_template(model: Path) -> ChatTemplate:
    """Return the chat template of a checkpoint directory.

    Raises:
        ClientConfigError: it has none, or it cannot be read or compiled.
    """
    config = _read_object(model / CONFIG_FILE)
    tokens = {**_read_object(model / "special_tokens_map.json"), **config}
    found = _templates(model, config)
    if not found:
        raise config_error(
            "chat_template",
            str(model),
            "the checkpoint has no chat template",
            "use the checkpoint of a chat model, or render the prompt in your program",
        )
    return ChatTemplate(found, dict(_special_tokens(tokens)))


def _templates(model: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates by name: the .jinja files if one is the default, else from JSON."""
    paths = {path.stem: path for path in sorted((model / NAMED_TEMPLATES).glob("*.jinja"))}
    if (model / TEMPLATE_FILE).exists():
        paths[DEFAULT] = model / TEMPLATE_FILE
    if DEFAULT in paths:
        return {name: _read_text(path) for name, path in paths.items()}
    given = _read_object(model / TEMPLATE_JSON).get("chat_template", config.get("chat_template"))
    if given is None:
        return {}
    if isinstance(given, list):
        given = {each.get("name"): each.get("template") for each in given if isinstance(each, dict)}
    named = {DEFAULT: given} if isinstance(given, str) else given
    try:
        return msgspec.convert(named, dict[str, str])
    except msgspec.ValidationError as error:
        problem = f"the chat template is malformed: {error}"
        fix = "make it a string, or a list of objects with name and template"
        raise config_error("chat_template", str(model), problem, fix) from None


def _special_tokens(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each special token's variable, such as bos_token, and its text."""
    for name, token in config.items():
        content = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(content, str):
            yield name, content


def _read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if there is no file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, error) from None
    if not isinstance(value, dict):
        raise _unreadable(path, "it is no JSON object")
    return value


def _read_text(path: Path) -> str:
    try:
        return read_tokenizer_file(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, why: object) -> ClientConfigError:
    problem = f"cannot read the chat template: {why}"
    return config_error("chat_template", str(path), problem, "repair or remove the file")
