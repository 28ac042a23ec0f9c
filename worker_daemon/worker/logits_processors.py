"""Finds the custom logits processors of a configuration among the installed packages."""

from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points

from rpc_schema.errors import ConfigError
from worker_daemon.contracts.logits_processor import ENTRY_POINT_GROUP, MakeLogitsProcessor

FIELD = "scheduler.logits_processors"


def find_logits_processors(names: Sequence[str]) -> Mapping[str, MakeLogitsProcessor]:
    """Return the factories of these names, in their order.

    Raises:
        ConfigError: a name is not installed or occurs twice, or its package cannot be imported.
    """
    if not names:
        return {}
    installed = {each.name: each for each in entry_points(group=ENTRY_POINT_GROUP)}
    for name in names:
        if name not in installed:
            there = ", ".join(sorted(installed)) or "there are none"
            raise ConfigError(
                "no such logits processor is installed",
                field=FIELD,
                value=name,
                fix=f"install its package with each daemon, or use an installed one: {there}",
            )
        if names.count(name) > 1:
            fix = "name each processor once"
            raise ConfigError("a name occurs twice", field=FIELD, value=name, fix=fix)
    return {name: _load(installed[name]) for name in names}


def _load(entry: EntryPoint) -> MakeLogitsProcessor:
    try:
        factory: MakeLogitsProcessor = entry.load()
    except Exception as error:  # the package's code may raise anything
        raise ConfigError(
            f"the logits processor cannot be imported: {type(error).__name__}: {error}",
            field=FIELD,
            value=entry.name,
            fix="fix its package, or remove the name",
        ) from error
    return factory
