"""The extension of a request that uses a LoRA adapter (rpc_schema/lora.py)."""

from rpc_schema.base import Extension, Name, Positive, Unsigned


class LoraRequest(Extension, frozen=True, tag=5, kw_only=True):
    """The adapter that a request's tokens are computed with. Every rank must have it (AddLora). If
    a rank lacks it or has another version, only this request fails: NO_TOKEN."""

    name: Name
    lora_id: Positive
    version: Unsigned
    """The version that AddLora returned. 0 means an adapter of zeros, for warm-up."""
