"""Roles of keys: what an operation needs, and what a daemon's authorized keys grant."""

import enum
from typing import Final


class Role(enum.StrEnum):
    """Permissions of a key; each role includes those before it."""

    OBSERVER = "observer"
    DRIVER = "driver"
    ADMIN = "admin"

    def covers(self, needed: "Role") -> bool:
        """Return True if this role includes `needed`."""
        return _LEVELS[self] >= _LEVELS[needed]


_LEVELS: Final = {role: level for level, role in enumerate(Role)}
