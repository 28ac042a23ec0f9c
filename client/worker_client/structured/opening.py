"""Opens a model's grammars. If it cannot, each request with a grammar fails with the reason."""

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rpc_schema.structured import StructuredOutput
from worker_client.errors import ClientConfigError, RequestError
from worker_client.structured.masked_steps import CompiledGrammars
from worker_client.structured.options import FIELD


def open_grammars(model: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> CompiledGrammars:
    """Return the grammars of a model (grammars.py). Without llguidance, or with a model that has no
    usable tokenizer, each request with a grammar is refused, with the reason."""
    try:
        from worker_client.structured.grammars import Grammars

        return Grammars(model, vocab_size, eos_token_ids)
    except ImportError as error:
        missing = f"structured output needs a package that is not installed: {error.name}"
        return NoGrammars(missing, 'pip install "worker-daemon[structured]"')
    except ClientConfigError as error:
        return NoGrammars(error.message, error.fix)


class NoGrammars:
    """Refuses every grammar."""

    num_words = 1
    compile_s = 0.0

    def __init__(self, reason: str, fix: str) -> None:
        self._reason, self._fix = reason, fix

    def close(self) -> None:
        """Do nothing: there are no threads."""

    def compile(self, grammar: StructuredOutput) -> "Future[Any]":
        """Return a future that raises RequestError."""
        refused: Future[Any] = Future()
        refused.set_exception(self._refusal(grammar))
        return refused

    def begin(self, grammar: StructuredOutput) -> Any:
        """Raise RequestError."""
        raise self._refusal(grammar)

    def _refusal(self, grammar: StructuredOutput) -> RequestError:
        field, value = f"{FIELD}.{grammar.kind}", grammar.text
        return RequestError(self._reason, field=field, value=value, fix=self._fix)

    def fill(self, matchers: Sequence[Any]) -> NDArray[np.int32]:
        """Return no masks: there is never a matcher."""
        return np.zeros((len(matchers), self.num_words), np.int32)

    def consume(self, pairs: Sequence[tuple[Any, int]]) -> list[bool]:
        """Accept nothing: there is never a matcher."""
        return [False for _ in pairs]

    def forced_first(self, grammar: StructuredOutput) -> list[int]:
        """Return no tokens: there is never a matcher."""
        return []

    def forced(self, matcher: Any) -> list[int]:
        """Return no tokens: there is never a matcher."""
        return []
