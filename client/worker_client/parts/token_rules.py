"""The driver's side of the rules on tokens: penalties, biases, allowed tokens, bad words. What is
wrong with them is found by rpc_schema/token_rules.py on both sides."""

from rpc_schema.token_rules import AllowedTokens, BadWords, LogitBias, Penalties, TokenRule
from worker_client.parts.interface import ExtensionFault, ModelBounds, RequestPart


class _RuleRequestPart(RequestPart):
    """A rule on tokens; the KV of a request does not depend on it."""

    def find_fault(self, extension: TokenRule, bounds: ModelBounds) -> ExtensionFault | None:
        fault = extension.find_fault(bounds.vocab_size)
        return None if fault is None else ExtensionFault(*fault)


class PenaltiesRequestPart(_RuleRequestPart):
    """Penalties on tokens that the request has already."""

    extension = Penalties
    may_jump = True


class LogitBiasRequestPart(_RuleRequestPart):
    """Biases of single tokens."""

    extension = LogitBias
    may_jump = True


class AllowedTokensRequestPart(_RuleRequestPart):
    """The only tokens that may be sampled."""

    extension = AllowedTokens


class BadWordsRequestPart(_RuleRequestPart):
    """Sequences that are not sampled."""

    extension = BadWords
