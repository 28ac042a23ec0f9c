"""The driver's side of prompt embeddings. driver_parts/request_uploads.py uploads them."""

import msgspec

from rpc_schema.prompt_embeds import PromptEmbeds, embeds_fault
from worker_client.parts.interface import ExtensionFault, ModelBounds, RequestPart


class PromptEmbedsRequestPart(RequestPart):
    """Requests share a prefix only if they have the same embeddings at the same positions."""

    extension = PromptEmbeds
    judges_prompt = True
    may_jump = True

    def find_fault(self, extension: PromptEmbeds, bounds: ModelBounds) -> ExtensionFault | None:
        hidden_size = bounds.hidden_size or extension.width
        fault = embeds_fault(extension, hidden_size, bounds.num_prompt_tokens)
        return None if fault is None else ExtensionFault(*fault)

    def prefix_salt(self, extension: PromptEmbeds) -> bytes:
        return msgspec.msgpack.encode(extension)
