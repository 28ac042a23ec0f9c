"""A parsed line of the input."""

from dataclasses import dataclass

from worker_client.requests import GenerationRequest


@dataclass(frozen=True, slots=True)
class InputRequest:
    """One line of the input: a request, or its error."""

    id: str
    request: GenerationRequest | None
    error: str = ""
    line: int | None = None
    """Line number from 1; None if it does not come from the input."""
    arrival_s: float = 0.0
    """Time from the start of the run at which it arrives, in seconds."""

    @property
    def shown_as(self) -> str:
        """Name in messages."""
        if self.line is None or self.request is None:
            return self.id
        return f"line {self.line}, request {self.id}"
