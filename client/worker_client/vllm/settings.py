"""Settings of vLLM's side: the daemons from the environment, the rest from
`--additional-config '{"worker_daemon": {...}}'`."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from rpc_schema.config import PromptAttentionDtype
from rpc_schema.lease import DEFAULT_LEASE_TTL_MS
from worker_client.errors import config_error
from worker_client.group.replacement import REPLACE_WITHIN_S
from worker_client.wire.keys import Keys, read_keys
from worker_client.wire.lease import LeaseTerms

ENDPOINTS_VARIABLE: Final = "WORKER_DAEMON_ENDPOINTS"
"""Endpoints of the daemons, in rank order: EP,EP,... vLLM uses daemons only where it is set."""

SECTION: Final = "worker_daemon"
"""Key of the settings in vLLM's additional_config."""

LOGGER: Final = "vllm.worker_daemon"
"""Logger below vLLM's own, which has the handlers."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The section of additional_config. Times are in seconds."""

    key_file: str = ""
    """This driver's secret key: a file, or credential:NAME."""
    known_daemons: str = ""
    """JSON file of the daemons' public keys."""
    model: str = ""
    """Checkpoint directory on the daemons' hosts; empty: where vLLM finds the model."""
    draft_model: str = ""
    """Directory of the draft model there; empty: where vLLM finds it."""
    lora_root: str = ""
    """Directory below which vLLM's paths of adapters lie: the daemons' --lora-root, or a mount of
    it. Empty refuses adapters."""
    save_root: str = ""
    """Directory below which save_sharded_state writes: the daemons' --save-root. Empty refuses
    it."""
    reload: bool = False
    """Load again where another model or configuration is loaded."""
    force: bool = False
    """Take the daemons from another driver that still renews its lease."""
    wait_s: float = 60.0
    """Wait for daemons that are not started yet."""
    replace_within_s: float = REPLACE_WITHIN_S
    """Wait for the successor of a daemon that has died."""
    drained_for_s: float = 300.0
    """Time for which an operator may drain the group before the server ends."""
    lease_ttl_s: float = DEFAULT_LEASE_TTL_MS / 1000
    logits_processors: tuple[str, ...] = ()
    """Names of custom logits processors that requests may ask for; the daemons have them."""
    step_deadline_ms: int | None = None
    """None: the daemons' default."""
    suffix_lookup: bool = False
    """Look drafts of vLLM's method ngram up in the outputs of earlier requests, too."""
    prompt_attention_dtype: PromptAttentionDtype = "auto"
    """fp8 computes long prompts with products in FP8, over a KV cache in FP8: see CacheConfig."""
    running_requests: Literal["keep", "recompute"] = "keep"
    """Running requests go on after a weight update with the KV that they have, or with KV of the
    new weights (GroupWeights.start_update)."""

    @property
    def lease(self) -> LeaseTerms:
        """Terms of the lease. Raises ClientConfigError if they are out of bounds."""
        return LeaseTerms(ttl_s=self.lease_ttl_s)

    def keys(self) -> Keys:
        """Read the keys. Raises ClientConfigError as read_keys does."""
        known = Path(self.known_daemons) if self.known_daemons else None
        return read_keys(self.key_file or None, known)


def read_settings(additional_config: object) -> Settings:
    """Return the settings of vLLM's additional_config.

    Raises:
        ClientConfigError: a field is unknown, or of the wrong type.
    """
    section: object = {}
    if isinstance(additional_config, Mapping):
        section = additional_config.get(SECTION, {})
    try:
        return msgspec.convert(section, Settings)
    except msgspec.ValidationError as error:
        known = ", ".join(Settings.__struct_fields__)
        raise config_error(
            f"additional_config.{SECTION}", section, str(error), f"the fields are: {known}"
        ) from None


def read_endpoints(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the daemons' endpoints in rank order; none: vLLM is to use its own workers."""
    text = environment.get(ENDPOINTS_VARIABLE, "")
    return tuple(each.strip() for each in text.split(",") if each.strip())


def relative_name(path: str, root: str, field: str) -> str:
    """Return the name of a directory below a root of the daemons: its path from there.

    Raises:
        ClientConfigError: there is no root, or the path lies elsewhere.
    """
    if not root:
        fix = f"set {field} in --additional-config '{{\"{SECTION}\": {{...}}}}'"
        raise config_error(field, path, "the daemons' directory is not known", fix)
    inside, directory = Path(os.path.normpath(path)), Path(os.path.normpath(root))
    if not inside.is_relative_to(directory) or inside == directory:
        raise config_error(field, path, "it lies elsewhere", f"use a directory below {root}")
    return inside.relative_to(directory).as_posix()


def settings_of(vllm_config: Any) -> Settings:
    """Return the settings of a VllmConfig. Raises as read_settings does."""
    return read_settings(getattr(vllm_config, "additional_config", None))
