"""How work says what it is at, for whoever watches that it goes on. Knows neither."""

from collections.abc import Callable
from typing import Final, TypeAlias

SetPhase: TypeAlias = Callable[[str, float], None]
"""(phase, seconds of legal silence)."""

LONG_OPERATION_S: Final = 1800.0
"""The legal silence of what takes as long as the model is large."""
