"""`worker-client config show COMMAND`: the settings of a command, each with its value and where it
comes from."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from worker_client.cli.options import ENV_PREFIX
from worker_client.cli.output_file import print_text
from worker_client.errors import config_error
from worker_client.service.generation_defaults import FILE_NAME, sampling_defaults
from worker_host.plain_text import printable

SECRETS: Final = ("api_key", "admin_key")
"""Settings whose values are not shown."""
_ORIGINS: Final[Mapping[str, str]] = {
    "COMMANDLINE": "argument",
    "ENVIRONMENT": "environment",
    "DEFAULT": "default",
}
"""By click's name of a source; DEFAULT_MAP is the configuration file."""

config = typer.Typer(no_args_is_help=True)


@config.command(
    "show",
    short_help="Show each setting of a command, its value and its origin.",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def show(
    context: typer.Context,
    command: Annotated[str, typer.Argument(help="serve, generate, bench and so on.")],
) -> None:
    """Show each setting of a command as a line of TOML, with its origin: argument, environment,
    file or default. Takes the command's options, none of which is required; does nothing else."""
    root = context.find_root().command
    assert isinstance(root, TyperGroup)
    if command not in root.commands:
        near = get_close_matches(command, root.commands, 1) or sorted(root.commands)
        fix = f"use {' or '.join(near)}"
        raise config_error("command", command, "there is no such command", fix)
    shown = root.commands[command]
    for parameter in shown.params:
        parameter.required = False  # this process runs nothing else
    with shown.make_context(command, list(context.args)) as parsed:
        lines = [_line(parsed, parameter) for parameter in shown.params]
        lines += _defaults(parsed.params)
    lines += _unknown(os.environ, known_variables(root))
    print_text("".join(f"{printable(line)}\n" for line in lines))


def _line(parsed: Any, parameter: Any) -> str:
    source = parsed.get_parameter_source(parameter.name)
    origin = _ORIGINS.get(getattr(source, "name", "DEFAULT"), f"file {parsed.params.get('config')}")
    value = parsed.params.get(parameter.name)
    if parameter.name in SECRETS and value:
        value = "(not shown)"
    return (
        f"# {parameter.name}  # {origin}"
        if value in (None, [], ())
        else (f"{parameter.name} = {_toml(value)}  # {origin}")
    )


def _defaults(given: Mapping[str, Any]) -> Iterator[str]:
    """Yield the sampling defaults that a server takes from its checkpoint. Raises
    ClientConfigError."""
    source, model = given.get("generation_config"), given.get("model")
    if source is not None and model is not None:
        for name, value in sampling_defaults(Path(model), source).items():
            yield f"# {name} of requests = {_toml(value)}  # file {Path(model) / FILE_NAME}"


def _toml(value: Any) -> str:
    """Return a value in TOML, whose strings, integers, switches and lists are JSON's."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, float):
        return repr(value)  # inf, where JSON has a word of its own
    if isinstance(value, Enum | Path):
        value = str(value)
    return json.dumps(value, ensure_ascii=False)


def known_variables(root: TyperGroup) -> set[str]:
    """Return the environment variables of all commands."""
    found: set[str] = set()
    for command in _commands(root):
        for parameter in command.params:
            names: Any = parameter.envvar or ()
            found.update([names] if isinstance(names, str) else names)
    return found


def _commands(root: Any) -> Iterator[Any]:
    for command in root.commands.values():
        yield command
        if isinstance(command, TyperGroup):
            yield from _commands(command)


def _unknown(environment: Iterable[str], known: set[str]) -> Iterator[str]:
    """Yield a remark on each variable that looks like ours and is no option's."""
    for name in sorted(environment):
        if name.startswith(ENV_PREFIX) and name not in known:
            near = get_close_matches(name, known, 1)
            meant = f"; did you mean {near[0]}?" if near else ""
            yield f"# {name} is set, and no option has it{meant}"
