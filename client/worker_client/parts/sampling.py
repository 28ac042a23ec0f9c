"""The driver's side of random sampling and stop tokens."""

from rpc_schema.sampling import (
    MAX_STOP_TOKEN_IDS,
    MIN_TEMPERATURE,
    LogitsProcessors,
    RandomSampling,
    StopTokens,
)
from worker_client.parts.interface import ExtensionFault, ModelBounds, RequestPart


class RandomSamplingRequestPart(RequestPart):
    """Random sampling; the KV of a request does not depend on it."""

    extension = RandomSampling
    may_jump = True

    def find_fault(self, extension: RandomSampling, bounds: ModelBounds) -> ExtensionFault | None:
        if 0 < extension.temperature < MIN_TEMPERATURE:
            fix = f"use 0 for the most likely token, or at least {MIN_TEMPERATURE}"
            return ExtensionFault("temperature", extension.temperature, fix)
        return None


class StopTokensRequestPart(RequestPart):
    """Tokens that end a request, and are not sampled before its min_tokens."""

    extension = StopTokens
    may_jump = True

    def find_fault(self, extension: StopTokens, bounds: ModelBounds) -> ExtensionFault | None:
        token_ids = extension.token_ids
        if len(token_ids) > MAX_STOP_TOKEN_IDS:
            return ExtensionFault(
                "token_ids", f"{len(token_ids)} ids", f"give at most {MAX_STOP_TOKEN_IDS}"
            )
        unknown = [token_id for token_id in token_ids if token_id >= bounds.vocab_size]
        if unknown:
            return ExtensionFault(
                "token_ids", unknown[0], f"use token ids below {bounds.vocab_size}"
            )
        return None


class LogitsProcessorsRequestPart(RequestPart):
    """Custom logits processors, by name."""

    extension = LogitsProcessors

    def find_fault(self, extension: LogitsProcessors, bounds: ModelBounds) -> ExtensionFault | None:
        if bounds.logits_processors is None:
            return None
        fault = extension.find_fault(bounds.logits_processors)
        return None if fault is None else ExtensionFault(*fault)
