"""The driver's side of the rules on tokens: penalties, biases, allowed tokens, bad words. What is
wrong with them is found by rpc_schema/token_rules.py on both sides."""

from rpc_schema.token_rules import AllowedTokens, BadWords, LogitBias, Penalties
from worker_client.parts.interface import ExtensionFault, ModelBounds, RequestPart


class _NamedTokensPart(RequestPart):
    """A rule on tokens that it names; the KV of a request does not depend on it."""

    def find_fault(
        self, extension: LogitBias | AllowedTokens | BadWords, bounds: ModelBounds
    ) -> ExtensionFault | None:
        fault = extension.find_fault(bounds.vocab_size)
        return None if fault is None else ExtensionFault(*fault)


class PenaltiesRequestPart(RequestPart):
    """Penalties on tokens that the request has already; its KV does not depend on them."""

    extension = Penalties
    may_jump = True


class LogitBiasRequestPart(_NamedTokensPart):
    """Biases of single tokens."""

    extension = LogitBias
    may_jump = True


class AllowedTokensRequestPart(_NamedTokensPart):
    """The only tokens that may be sampled."""

    extension = AllowedTokens


class BadWordsRequestPart(_NamedTokensPart):
    """Sequences that are not sampled."""

    extension = BadWords
