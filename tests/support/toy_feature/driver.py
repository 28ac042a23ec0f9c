"""A bias on the logit of one token, as a driver judges it. What is computed does not depend on it,
so that requests share their prefixes as ever."""

from rpc_schema.token_bias import TokenBias

from worker_client.parts.interface import ExtensionFault, ModelBounds, RequestPart


class TokenBiasPart(RequestPart):
    """One token a request."""

    extension = TokenBias

    def find_fault(self, extension: TokenBias, bounds: ModelBounds) -> ExtensionFault | None:
        if extension.token_id >= bounds.vocab_size:
            return ExtensionFault(
                "token_id", extension.token_id, f"use ids below {bounds.vocab_size}"
            )
        return None
