"""The driver side of checked tokens, which change no output."""

from rpc_schema.checked_tokens import CheckedTokens

from worker_client.parts.interface import ExtensionFault, ModelBounds, RequestPart


class CheckedTokensPart(RequestPart):
    """A number of tokens per request."""

    extension = CheckedTokens

    def find_fault(self, extension: CheckedTokens, bounds: ModelBounds) -> ExtensionFault | None:
        most = bounds.max_samples_per_seq - 1
        if extension.count > most:
            fix = f"use at most {most}, or raise max_samples_per_seq"
            return ExtensionFault("count", extension.count, fix)
        return None
