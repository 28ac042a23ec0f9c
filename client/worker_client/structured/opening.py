"""Opens a model's grammars. If it cannot, each request with a grammar fails with the reason."""

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rpc_schema.structured import StructuredOutput
from worker_client.errors import ClientConfigError, RequestError
from worker_client.inputs.grammar_options import FIELD
from worker_client.structured.grammars import Grammars
from worker_client.structured.masked_steps import CompiledGrammars
from worker_client.structured.matchers import Grammar, GrammarMatcher


def open_grammars(model: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> CompiledGrammars:
    """Return the grammars of a model (grammars.py). Without llguidance, or with a model that has no
    usable tokenizer, each request with a grammar is refused, with the reason."""
    try:
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
        """Do nothing: there are no processes."""

    def compile(self, source: StructuredOutput) -> "Future[Any]":
        """Return a future that raises RequestError."""
        refused: Future[Any] = Future()
        refused.set_exception(self._refusal(source))
        return refused

    def begin(self, source: StructuredOutput, tokens: Sequence[int] = ()) -> GrammarMatcher:
        """Return a matcher that has failed."""
        error = self._refusal(source)
        return GrammarMatcher(Grammar(0, source, error), list(tokens), error=error.reason)

    def _refusal(self, grammar: StructuredOutput) -> RequestError:
        field, value = f"{FIELD}.{grammar.kind}", grammar.text
        return RequestError(self._reason, field=field, value=value, fix=self._fix)

    def take(self, matcher: GrammarMatcher, tokens: Sequence[int]) -> None:
        """Do nothing: the matcher has failed."""

    def fork(self, matcher: GrammarMatcher, tokens: Sequence[int]) -> GrammarMatcher:
        """Return the matcher, which has failed."""
        return matcher

    def end(self, matcher: GrammarMatcher) -> None:
        """Do nothing."""

    def proceed(self, timeout_s: float = 0.0) -> None:
        """Do nothing: there is nothing to wait for."""

    def forced_first(self, source: StructuredOutput) -> list[int]:
        """Return no tokens."""
        return []
