"""The driver's side of LoRA adapters (group/loras.py puts them into a group)."""

from collections.abc import Sequence

from rpc_schema.lora_request import LoraRequest
from worker_client.parts.interface import ExtensionFault, ModelBounds, RequestPart


class LoraRequestPart(RequestPart):
    """An adapter of a request: its KV is that of this version of the adapter alone."""

    extension = LoraRequest
    limits_running = True
    may_jump = True

    def find_fault(self, extension: LoraRequest, bounds: ModelBounds) -> ExtensionFault | None:
        if bounds.max_loras == 0:
            fix = "load the model with max_loras of at least 1"
            return ExtensionFault("name", extension.name, fix)
        if extension.version == 0:
            return ExtensionFault("version", 0, "use the version that add_lora() has returned")
        return None

    def prefix_salt(self, extension: LoraRequest) -> bytes:
        return extension.version.to_bytes(8, "little") + extension.name.encode()

    def may_start(
        self, extension: LoraRequest, running: Sequence[LoraRequest], bounds: ModelBounds
    ) -> bool:
        if bounds.max_loras is None:
            return True
        different = {(each.lora_id, each.version) for each in (*running, extension)}
        return len(different) <= bounds.max_loras
