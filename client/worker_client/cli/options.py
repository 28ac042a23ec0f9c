"""Options of commands: in groups that several share, with defaults from the environment
(WORKER_CLIENT_*), then from the TOML file of --config."""

import copy
import functools
import inspect
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, get_args

import typer

from worker_client.errors import config_error

ENV_PREFIX: Final = "WORKER_CLIENT_"
_Group = TypeVar("_Group")


def _env(name: str) -> str:
    return ENV_PREFIX + name


def read_config_file(context: typer.Context, path: Path | None) -> Path | None:
    """Make a TOML file's keys (`max_num_seqs = 64`) the defaults of a command's options."""
    if path is None:
        return None
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise typer.BadParameter(f"cannot read {path}: {error}") from None
    known = {parameter.name for parameter in context.command.params}
    unknown = sorted(set(values) - known)
    if unknown:
        near = get_close_matches(unknown[0].replace("-", "_"), filter(None, known), 1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise typer.BadParameter(
            f"{path} sets {unknown[0]!r}, which is not an option of this command{meant}"
        )
    context.default_map = {**values, **(context.default_map or {})}
    return path


KeyFile = Annotated[
    str | None,
    typer.Option(
        envvar=_env("KEY_FILE"), help="Our secret file, or credential:NAME; needed on tcp."
    ),
]
KnownDaemons = Annotated[
    Path | None,
    typer.Option(envvar=_env("KNOWN_DAEMONS"), help="JSON file of the daemons' public keys."),
]
Wait = Annotated[
    float,
    typer.Option(
        envvar=_env("WAIT"),
        min=0.0,
        metavar="SECONDS",
        help="Wait for daemons that are not started, or do not answer, yet.",
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", is_eager=True, callback=read_config_file, help="TOML file with defaults."
    ),
]


def parameters_of(group: type[Any]) -> list[inspect.Parameter]:
    """Return the options that a group has: the fields of a dataclass, each annotated with its
    typer.Option."""
    return list(inspect.signature(group).parameters.values())


def take_group(group: type[_Group], values: dict[str, Any]) -> _Group:
    """Take the values of a group's options out of those of a command. Those that it has no value
    for have their defaults."""
    names = [entry.name for entry in parameters_of(group) if entry.name in values]
    return group(**{name: values.pop(name) for name in names})


def expanded(
    parameters: Iterable[inspect.Parameter],
) -> tuple[list[inspect.Parameter], dict[str, type[Any]]]:
    """Return a function's parameters for a command, with the options of a group in place of the
    group; and the groups, by the names of their parameters."""
    options: list[inspect.Parameter] = []
    groups: dict[str, type[Any]] = {}
    for entry in parameters:
        kind = entry.annotation
        if isinstance(kind, type) and is_dataclass(kind):
            groups[entry.name] = kind
            options += parameters_of(kind)
        else:
            options.append(entry.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    return options, groups


def with_options(
    command: Callable[..., None], options: list[inspect.Parameter]
) -> Callable[..., None]:
    """Let a command have these options, all of which it takes by name."""
    vars(command)["__signature__"] = inspect.Signature(options)
    command.__annotations__ = {entry.name: entry.annotation for entry in options}
    return command


def takes_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that has the options of those parameters that are groups. The wrapped
    function gets the groups, made of these options."""
    options, groups = expanded(inspect.signature(command).parameters.values())

    @functools.wraps(command)
    def run(**values: Any) -> None:
        taken = {name: take_group(group, values) for name, group in groups.items()}
        command(**taken, **values)

    return with_options(run, options)


def from_environment(parameter: inspect.Parameter) -> inspect.Parameter:
    """Let an option be set by the environment variable of its name."""
    kind, option = get_args(parameter.annotation)
    option = copy.copy(option)
    option.envvar = _env(parameter.name.upper())
    return parameter.replace(annotation=Annotated[kind, option])


def one_of(field: str, value: str, kind: Any) -> Any:
    """Return the value if it is one of a Literal's."""
    if value not in get_args(kind):
        fix = "use " + ", ".join(get_args(kind))
        raise config_error(field, value, "unknown value", fix)
    return value
