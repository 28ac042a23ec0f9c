"""The driver side of a bias on one token's logit. The KV does not depend on it, so requests still
share prefixes."""

from rpc_schema.token_bias import TokenBias

from worker_client.parts.interface import ExtensionFault, ModelBounds, RequestPart


class TokenBiasPart(RequestPart):
    """One biased token per request."""

    extension = TokenBias

    def find_fault(self, extension: TokenBias, bounds: ModelBounds) -> ExtensionFault | None:
        if extension.token_id >= bounds.vocab_size:
            return ExtensionFault(
                "token_id", extension.token_id, f"use ids below {bounds.vocab_size}"
            )
        return None
