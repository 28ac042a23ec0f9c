"""Turns messages into prompts, by a checkpoint's chat template.

Templates come from checkpoints, and what they are given from requests: either may take any time or
memory. So they are compiled and rendered by template_process.py, in processes that are killed when
they exceed their bounds."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from worker_client.errors import ClientConfigError, RequestError, config_error
from worker_client.inputs.job_pool import JobBounds, JobExceeded, JobFailed, JobPool
from worker_client.inputs.request_fields import Json
from worker_client.inputs.template_process import (
    Answer,
    Compiled,
    NotCompiled,
    NotRendered,
    Render,
    Rendered,
    TemplateSetup,
    TooMuch,
)
from worker_client.inputs.tokenizer import MAX_TEXT_BYTES, check_text_bytes, read_tokenizer_file

CONFIG_FILE: Final = "tokenizer_config.json"
"""File with the special tokens and, of older checkpoints, the template or a list of named ones."""
TEMPLATE_FILE: Final = "chat_template.jinja"
NAMED_TEMPLATES: Final = "additional_chat_templates"
"""Directory of further templates, called by the names of their files."""
TEMPLATE_JSON: Final = "chat_template.json"
MAX_FILE_BYTES: Final = 16 << 20
"""Bound on each of these files, and on the templates of a checkpoint together."""
DEFAULT: Final = "default"
WITH_TOOLS: Final = "tool_use"
"""Name of a template for requests with tools, if a checkpoint has another one for these."""
ROLES: Final = frozenset(("system", "developer", "user", "assistant", "tool"))
"""Roles that any template may be given. Others must be named in it."""
COMPILE_S: Final = 2.0
"""Processor seconds in which the templates of a checkpoint must be compiled."""
MAX_PROCESSES: Final = 8
"""Renders at a time. The usual one takes a millisecond."""
INPUT_FACTOR: Final = 4
"""Messages, tools and variables of a request have at most this many times the bytes of the longest
prompt: a template may show a part of them."""


class TemplateBounds(NamedTuple):
    """Bounds on a render."""

    render_s: float = 1.0
    """Processor seconds. Templates of published checkpoints take milliseconds."""
    memory_bytes: int = 512 << 20
    """Memory of the process, beyond what it has at its start."""
    max_output_bytes: int = MAX_TEXT_BYTES
    """UTF-8 bytes of a prompt."""


class ChatTemplate:
    """A checkpoint's templates, compiled. They run in a sandbox: they see messages, tools and
    special tokens, and change nothing. Threads may share it; a render that takes long delays no
    other, and one that is interrupted by a crash of its process runs once more."""

    def __init__(
        self,
        templates: str | Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        bounds: TemplateBounds = TemplateBounds(),  # noqa: B008  # immutable
    ) -> None:
        """templates: the template, or several by name. special_tokens: variables that templates
        use, as bos_token.

        Raises:
            ClientConfigError: one is no template, or takes too much to compile.
        """
        named = {DEFAULT: templates} if isinstance(templates, str) else dict(templates)
        self._names = frozenset(named)
        self.sources = tuple(named.values())
        """The templates' texts."""
        check_text_bytes("max_output_bytes", bounds.max_output_bytes)
        self._bounds = bounds
        setup = _setup_message(
            TemplateSetup(named, dict(special_tokens or {}), bounds.max_output_bytes)
        )
        self._pool = JobPool(
            "worker_client.inputs.template_process",
            setup,
            JobBounds(COMPILE_S, bounds.render_s, bounds.memory_bytes),
            max_processes=MAX_PROCESSES,
        )
        self._compared = self._compiled()
        self._roles = ROLES | self._compared

    def close(self) -> None:
        """End the processes, and every render that runs. Not needed: they end with the last user of
        this object."""
        self._pool.close()

    def compares(self, text: str) -> bool:
        """Return True if a template compares something with a text, as with a role that it
        knows."""
        return text in self._compared

    def render(
        self,
        messages: Sequence[Mapping[str, Json]],
        tools: Sequence[Mapping[str, Json]] | None = None,
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Json] | None = None,
    ) -> str:
        """Return the prompt, special tokens included: encode it with add_special_tokens=False.
        Blocks for up to the bound, without the GIL: in an asyncio program, call it on a thread.

        Args:
            messages: each with a role; most have a content. None is the same as absent, except to
                a template that fails on an absent field.
            tools: JSON schemas of functions.
            add_generation_prompt: end with the header of the assistant's next message.
            variables: further ones that the template knows, as enable_thinking.

        Raises:
            RequestError: messages, tools or variables are malformed, a role is unknown, or the
                template refuses the messages, or fails, or exceeds its bounds.
        """
        checked = self._checked(messages)
        given = {
            **_checked_variables({} if variables is None else variables),
            "tools": None if tools is None else _checked_list("tools", tools),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        job = msgspec.json.encode(Render(self._chosen(tools), checked, given))
        if len(job) > INPUT_FACTOR * self._bounds.max_output_bytes:
            raise self._too_much(checked, f"they have {len(job)} bytes")
        return self._rendered(job, checked)

    def _rendered(self, job: bytes, messages: Sequence[Mapping[str, Any]]) -> str:
        try:
            answer = _decoded(self._pool.run(job))
        except JobExceeded:
            raise self._too_much(messages, "the chat template takes too long with them") from None
        except JobFailed as error:
            raise self._too_much(messages, f"the chat template cannot run: {error}") from None
        if isinstance(answer, Rendered):
            return answer.text
        if isinstance(answer, TooMuch):
            raise self._too_much(messages, f"the chat template needs too much {answer.what}")
        assert isinstance(answer, NotRendered)
        said = "refuses" if answer.is_refused else "fails with"
        raise RequestError(
            f"the chat template {said} the messages: {answer.said}",
            field="messages",
            value=_shown(messages),
            fix="give messages of the roles and forms that the model was trained on",
        )

    def _too_much(self, messages: Sequence[Mapping[str, Any]], problem: str) -> RequestError:
        bounds = self._bounds
        return RequestError(
            problem,
            field="messages",
            value=_shown(messages),
            fix=f"give fewer and shorter messages, tools and variables: a prompt takes at most "
            f"{bounds.render_s:g} s, {bounds.memory_bytes >> 20} MiB, and has at most "
            f"{bounds.max_output_bytes} bytes; or correct the template",
        )

    def _compiled(self) -> frozenset[str]:
        """Start a process; return the texts that the templates compare something with."""
        name = ", ".join(sorted(self._names))[:80]
        try:
            answer = _decoded(self._pool.open())
        except JobExceeded:
            said = f"it takes longer than {COMPILE_S:g} s"
        except JobFailed as error:
            said = str(error)
        else:
            if isinstance(answer, Compiled):
                return frozenset(answer.compared)
            assert isinstance(answer, NotCompiled)
            name, said = answer.name, answer.said
        self._pool.close()
        problem = f"the chat template cannot be compiled: {said}"
        raise config_error("chat_template", name, problem, "correct it")

    def _chosen(self, tools: object) -> str:
        if tools is not None and WITH_TOOLS in self._names:
            return WITH_TOOLS
        if DEFAULT not in self._names:
            raise RequestError(
                "the model has no chat template for messages without tools",
                field="tools",
                value=tools,
                fix="give tools",
            )
        return DEFAULT

    def _checked(self, messages: Sequence[Mapping[str, Json]]) -> list[dict[str, Any]]:
        copies = _checked_list("messages", messages)
        if not copies:
            fix = "give at least one"
            raise RequestError("there are no messages", field="messages", value=copies, fix=fix)
        for place, message in enumerate(copies):
            role = message.get("role")
            if not isinstance(role, str) or role not in self._roles:
                raise RequestError(
                    "a message has an unknown role, or none",
                    field=f"messages[{place}].role",
                    value=role,
                    fix="use " + ", ".join(sorted(ROLES)),
                )
        return copies


def _shown(messages: Sequence[Mapping[str, Any]]) -> list[object]:
    """Return the messages' roles, for an error."""
    return [message["role"] for message in messages[:20]]


def _decoded(answer: bytes) -> Answer:
    decoded: Answer = msgspec.json.decode(answer, type=Answer)
    return decoded


def _setup_message(setup: TemplateSetup) -> bytes:
    """Return the first message as JSON. Raises ClientConfigError."""
    try:
        message = msgspec.json.encode(setup)
    except UnicodeError as error:
        problem = f"the chat template cannot be compiled: {error}"
        raise config_error("chat_template", list(setup.templates), problem, "correct it") from None
    if len(message) > MAX_FILE_BYTES:
        problem = f"the chat template has more than {MAX_FILE_BYTES} bytes"
        raise config_error("chat_template", len(message), problem, "correct it")
    return message


def _checked_list(field: str, given: object) -> list[dict[str, Any]]:
    """Return a copy of a list of JSON objects."""
    if not isinstance(given, list | tuple):
        fix = "give a list of objects"
        raise RequestError(f"{field} is not a list", field=field, value=given, fix=fix)
    copies: list[Any] = _copied(field, given)
    for place, each in enumerate(copies):
        if not isinstance(each, dict):
            own, fix = f"{field}[{place}]", "give an object"
            raise RequestError(f"{own} is not an object", field=own, value=each, fix=fix)
    return copies


def _checked_variables(given: object) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        fix = "give an object"
        raise RequestError("variables is no object", field="variables", value=given, fix=fix)
    copies: dict[str, Any] = _copied("variables", dict(given))
    return copies


def _copied(field: str, value: Any) -> Any:
    """Return a copy of plain JSON values: objects have methods, which a template could call."""
    try:
        return msgspec.json.decode(msgspec.json.encode(value))
    except (msgspec.MsgspecError, TypeError, UnicodeError, RecursionError) as error:
        problem, fix = f"{field} cannot be written as JSON: {error}", "use values of JSON"
        raise RequestError(problem, field=field, value=type(value), fix=fix) from None


def load_chat_template(
    model: Path,
    bounds: TemplateBounds = TemplateBounds(),  # noqa: B008  # immutable
) -> ChatTemplate:
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
    return ChatTemplate(found, dict(_special_tokens(tokens)), bounds)


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
        return read_tokenizer_file(path, MAX_FILE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, why: object) -> ClientConfigError:
    problem = f"cannot read the chat template: {why}"
    return config_error("chat_template", str(path), problem, "repair or remove the file")
