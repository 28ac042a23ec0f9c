"""The process that compiles and renders chat templates, for chat_template.py. The only
user of jinja2 (extra `chat`). Templates are the checkpoint's and run in a sandbox; messages, tools
and variables are requests'."""

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any, Final, NoReturn

import msgspec

from worker_client.inputs.job_pool import serve_jobs

try:
    from jinja2 import Template, TemplateError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, LoopControlExtension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace
except ImportError as error:
    raise ImportError(
        'chat templates need jinja2: pip install "worker-daemon[chat]"', name=error.name
    ) from None

MAX_SAID: Final = 500
"""Bound on the characters of a template's own error."""


class TemplateSetup(msgspec.Struct, frozen=True):
    """The first message."""

    templates: dict[str, str]
    """By name."""
    special_tokens: dict[str, str]
    max_output_bytes: int


class Compiled(msgspec.Struct, frozen=True, tag=True):
    """The templates can be rendered."""

    compared: list[str]
    """Texts that they compare something with: their roles are among them."""


class NotCompiled(msgspec.Struct, frozen=True, tag=True):
    """One of the templates is none."""

    name: str
    said: str


class Render(msgspec.Struct, frozen=True):
    """A job."""

    template: str
    """Name."""
    messages: list[dict[str, Any]]
    """Messages as the request has them, nulls included."""
    variables: dict[str, Any]
    """All others."""


class Rendered(msgspec.Struct, frozen=True, tag=True):
    """The prompt."""

    text: str


class NotRendered(msgspec.Struct, frozen=True, tag=True):
    """The template refuses the messages, or fails on them."""

    is_refused: bool
    said: str


class TooMuch(msgspec.Struct, frozen=True, tag=True):
    """The render was given up for what it takes: "memory" or "output"."""

    what: str


Answer = Compiled | NotCompiled | Rendered | NotRendered | TooMuch

_ENCODER: Final = msgspec.json.Encoder()
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning, the preferred one first. Templates read one of the first two."""


class _Templates:
    """The compiled templates."""

    def __init__(self) -> None:
        self._environment = _environment()
        self._templates: dict[str, Template] = {}
        self._special_tokens: dict[str, str] = {}
        self._max_output_bytes = 0

    def set_up(self, message: bytes) -> bytes:
        """Compile them."""
        setup = msgspec.json.decode(message, type=TemplateSetup)
        self._special_tokens = setup.special_tokens
        self._max_output_bytes = setup.max_output_bytes
        compared: set[str] = set()
        for name, source in setup.templates.items():
            try:
                tree = self._environment.parse(source)
                compared |= set(_compared(tree))  # compiling changes the tree
                self._templates[name] = self._environment.from_string(tree)
            except (TemplateError, RecursionError, MemoryError, SyntaxError) as error:
                return _ENCODER.encode(NotCompiled(name, _said(error)))
        return _ENCODER.encode(Compiled(sorted(compared)))

    def render(self, message: bytes) -> bytes:
        """Do a job."""
        try:
            job = msgspec.json.decode(message, type=Render)
            text = self._prompt(self._templates[job.template], job)
            return _ENCODER.encode(TooMuch("output") if text is None else Rendered(text))
        except MemoryError:
            return _ENCODER.encode(TooMuch("memory"))
        except Exception as error:  # the template's own, or one that it cannot handle
            return _ENCODER.encode(NotRendered(isinstance(error, _Refusal), _said(error)))

    def _prompt(self, template: Template, job: Render) -> str | None:
        """Return the prompt; None if it is too long. Fields that are null are left out, as
        transformers does: many templates would write None. A template that fails without them, as
        one that tests for null, gets them; if it still fails, the first error counts."""
        given = [_with_reasoning(message) for message in job.messages]
        without = [_without_nulls(message) for message in given]
        try:
            return self._text(template, without, job.variables)
        except MemoryError:
            raise
        except Exception as error:  # the template's own, or one that it cannot handle
            if without == given:
                raise
            try:
                return self._text(template, given, job.variables)
            except MemoryError:
                raise
            except Exception:
                raise error from None

    def _text(
        self, template: Template, messages: list[dict[str, Any]], variables: dict[str, Any]
    ) -> str | None:
        """Return the prompt of these messages; None if it is too long."""
        parts: list[str] = []
        left = self._max_output_bytes
        given = {**self._special_tokens, **variables, "messages": messages}
        for part in template.generate(given):
            left -= len(part)
            if left < 0:
                return None
            parts.append(part)
        text = "".join(parts)
        return text if len(text.encode()) <= self._max_output_bytes else None


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its reasoning under the names that templates read, as transformers
    does."""
    given = (message[name] for name in _REASONING if message.get(name) is not None)
    reasoning = next(given, None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _without_nulls(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if value is not None}


class _Refusal(TemplateError):
    """Raised by a template."""


class _Generation(Extension):
    """The tag that marks what a model is trained on; here it does nothing."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        """Return what stands between the tags, as a separate scope."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    """Return what templates of Hugging Face expect, without jinja2's generator of filler text."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    environment.globals["dict"] = _dict
    environment.globals["namespace"] = _Namespace
    del environment.globals["lipsum"]
    return environment


def _dict(*args: Any, **fields: Any) -> dict[Any, Any]:
    """Return a dict; a template gets no class, whose attributes it could look through."""
    return dict(*args, **fields)


class _Namespace(Namespace):
    """Refuses names such as __class__, by which templates could leave the sandbox."""

    def __init__(*args: Any, **fields: Any) -> None:  # a field may be called self
        attributes = dict(*args[1:], **fields)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no attribute {name!r}")


def _compared(tree: nodes.Template) -> Iterator[str]:
    """Yield the texts that a template compares something with."""
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


def _said(error: BaseException) -> str:
    """Return an error's message: short, and without what JSON cannot express."""
    said = str(error)[:MAX_SAID] or type(error).__name__
    return said.encode("utf-8", "backslashreplace").decode()


def main() -> None:
    """Serve a JobPool."""
    templates = _Templates()
    serve_jobs(templates.set_up, templates.render)


if __name__ == "__main__":
    main()
