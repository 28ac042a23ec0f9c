"""The callback by which an operation reports its current phase and the phase's watchdog
deadline."""

from collections.abc import Callable
from typing import Final, TypeAlias

SetPhase: TypeAlias = Callable[[str, float], None]
"""(phase, seconds until it counts as hung)."""

LONG_OPERATION_S: Final = 1800.0
"""The limit of an operation whose duration depends on the model's size."""
