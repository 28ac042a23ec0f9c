"""A request of the input, in its place."""

from dataclasses import dataclass

from worker_client.requests import GenerationRequest


@dataclass(frozen=True, slots=True)
class InputRequest:
    """One request of the input, in its place: parsed, or its error."""

    id: str
    request: GenerationRequest | None
    error: str = ""
    line: int | None = None
    """Counted from 1; None: it does not come from the input."""

    @property
    def shown_as(self) -> str:
        """Its name in messages."""
        if self.line is None or self.request is None:
            return self.id
        return f"line {self.line}, request {self.id}"
