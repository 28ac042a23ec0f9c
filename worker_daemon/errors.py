"""Adds to the error tree (rpc_schema/errors.py) what the wire does not have."""

from rpc_schema.errors import CapacityError, ConfigError


class StartLaterError(CapacityError):
    """A daemon cannot start now, but the same start may succeed later. The process ends with exit
    code 75."""


def config_error(field: str, value: object, problem: str, fix: str | None = None) -> ConfigError:
    """Return the error for one value: the problem, then field, value and fix."""
    return ConfigError(problem, field=field, value=value, fix=fix)
