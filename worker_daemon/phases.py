"""The callback by which an operation reports its current phase and the phase's watchdog
deadline."""

from typing import Final, Protocol


class SetPhase(Protocol):
    """Reports a phase."""

    def __call__(self, phase: str, legal_silence_s: float, /, *, done: float = 0.0) -> bool:
        """legal_silence_s: seconds until the phase counts as hung; done: share of the operation
        that is complete, 0 to 1, if it is known. Return True if a driver that attaches waits for
        the operation's end."""


LONG_OPERATION_S: Final = 1800.0
"""The limit of an operation whose duration depends on the model's size."""
