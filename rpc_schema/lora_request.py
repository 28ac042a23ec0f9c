"""The extension by which a request uses a LoRA adapter (rpc_schema/lora.py)."""

from rpc_schema.base import Extension, Name, Positive, Unsigned


class LoraRequest(Extension, frozen=True, tag=5, kw_only=True):
    """A request's tokens are computed with an adapter, which every rank must have (AddLora). On a
    rank without it, or with another version of it, this request alone fails: NO_TOKEN."""

    name: Name
    lora_id: Positive
    version: Unsigned
    """Version of AddLora; 0 stands for an adapter of zeros, as in warm-up."""
