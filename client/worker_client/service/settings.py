"""The settings of a server, apart from those of the group that it drives (driven_group.py)."""

from dataclasses import dataclass, field
from typing import Final

from worker_client.driven_group import DrivenGroup
from worker_client.inputs.model_source import AdapterSource
from worker_host.log_lines import LOG_FORMATS

MAX_BODY_BYTES: Final = 4 << 20
MAX_PROMPTS: Final = 256
MAX_QUEUE: Final = 1024
READ_S: Final = 30.0
WRITE_S: Final = 30.0
DRAIN_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class PrefillSettings:
    """The group that computes prompts for the one that a server drives."""

    group: DrivenGroup
    """Its daemons run already."""
    host: str = "127.0.0.1"
    """Address of this host that the daemons of both groups reach."""
    timeout_s: float | None = None
    """Seconds that a request waits for its prompt at most; None: PrefillThread's default."""


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """Checked settings."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0: a free one."""
    names: tuple[str, ...] = ()
    """The model's names in requests, the first of which answers have; empty: that of its
    directory."""
    adapters: tuple[AdapterSource, ...] = ()
    """LoRA adapters that are added before the server is ready."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Keys of clients; empty: any client may ask."""
    admin_keys: tuple[str, ...] = field(default=(), repr=False)
    """Keys of administrators, who may do what clients may; empty: there are none."""
    tool_call_parser: str = ""
    """Form in which the model calls tools (tool_calls.ToolForm); empty: as its chat template shows.
    """
    generation_config: str = "auto"
    """Source of the sampling defaults (generation_defaults.SOURCES)."""
    max_body_bytes: int = MAX_BODY_BYTES
    """A body is parsed at once, and nothing else runs meanwhile."""
    max_prompts: int = MAX_PROMPTS
    """Prompts in one body."""
    max_queue: int = MAX_QUEUE
    """Samples that may wait beyond those that run (max_num_seqs)."""
    read_s: float = READ_S
    """Seconds in which a body must be here."""
    write_s: float = WRITE_S
    """Seconds in which a client must take what is written to it."""
    request_s: float | None = None
    """Seconds after which a request ends with an error; None: never."""
    drain_s: float = DRAIN_S
    """Seconds that running requests have after a signal."""
    log_format: str = LOG_FORMATS[0]
    """One of LOG_FORMATS."""
    prefill: PrefillSettings | None = None
    """None: the group computes its prompts itself."""
