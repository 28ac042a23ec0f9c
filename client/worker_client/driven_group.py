"""A group as a command describes it: model, configuration and daemons."""

from dataclasses import dataclass
from pathlib import Path

from rpc_schema.config import WorkerConfig
from worker_client.group.replacement import REPLACE_WITHIN_S
from worker_client.inputs.model_source import ModelSource, ShowDownload
from worker_client.inputs.tokenizer import MAX_TEXT_BYTES
from worker_client.launcher import LocalDaemons
from worker_client.wire.keys import NO_KEYS, Keys


@dataclass(frozen=True, slots=True)
class DrivenGroup:
    """The model to drive, and the daemons to drive it on."""

    model: ModelSource
    config: WorkerConfig
    endpoints: tuple[str, ...] = ()
    """Running daemons, in rank order; empty: one is to be started on each of `devices`."""
    devices: tuple[str, ...] = ()
    keys: Keys = NO_KEYS
    """Keys for the daemons of `endpoints`; local ones have none."""
    lora_root: Path | None = None
    """Directory of the LoRA adapters of local daemons."""
    adapter_cache: Path | None = None
    """Hub cache with adapters, for local daemons too."""
    draft: ModelSource | None = None
    """The draft model, if there is one."""
    num_gpu_blocks: int | None = None
    fit_max_model_len: bool = False
    reload: bool = False
    force: bool = False
    wait_s: float = 0.0
    """Time for running daemons to be started."""
    replace_within_s: float = REPLACE_WITHIN_S
    """Time for the successor of a dead daemon."""
    max_text_bytes: int = MAX_TEXT_BYTES
    """Bound on the UTF-8 bytes of a prompt's text."""
    max_itl_ms: float | None = None
    """Target for the time between two tokens of a request, in milliseconds."""
    eplb_step_interval: int | None = None
    """Steps between two rebalances of the experts; None: they do not move."""
    seed: int | None = None
    """Requests without a seed get one that is derived from it and their number; None: random."""

    def start_daemons(self) -> LocalDaemons:
        """Start a local daemon on each device. Raises LaunchError."""
        return LocalDaemons(
            self.devices,
            self.model.model_root,
            lora_root=self.lora_root,
            draft_root=None if self.draft is None else self.draft.model_root,
            adapter_cache=self.adapter_cache,
        )

    def download_weights(self, show: ShowDownload) -> None:
        """Download the weights that local daemons read and that the hub cache lacks. Raises
        HubModelError."""
        if self.config.model.load_format == "dummy":
            return
        self.model.download_weights(show)
        if self.draft is not None:
            self.draft.download_weights(show)
