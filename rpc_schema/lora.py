"""LoRA adapters: the operations that put them into a group's host memory. A request uses one
through the extension in rpc_schema/lora_request.py.

An adapter is a directory in PEFT's format, below one of a daemon's --lora-root directories. Its
name is its path relative to that root, or a repository and its commit as in ModelConfig.model.
Every rank keeps its own shard of it.
"""

from typing import Annotated

from msgspec import Meta

from rpc_schema.base import Name, Positive, StepReply, StepRequest, Unsigned, Value
from rpc_schema.identity import ContentIdentity
from rpc_schema.step import Done

Version = Annotated[int, Meta(ge=1, le=2**63 - 1)]
"""Chosen by the driver, different for each content that is read. Requests share prefixes only if
their adapters have the same version, and the same `weights_version`."""


class LoraInfo(Value, frozen=True, kw_only=True):
    """An adapter in a rank's host memory."""

    name: Name
    lora_id: Positive
    version: Version
    rank: Positive
    """The largest LoRA rank of its matrices."""
    is_pinned: bool
    size_bytes: Unsigned
    """Size of its shard on this rank."""
    identity: ContentIdentity
    """Identity of the files that it was read from, or of the updates since."""
    weights_version: Unsigned = 0
    """Number of its weights: 0 as they were read, then that of the latest weight update."""


class PrepareLora(StepRequest["PrepareLoraReply"], frozen=True, tag=80, kw_only=True):
    """Begin to read an adapter from disk on another thread, while steps run, or report that this is
    done. The adapter is not used before AddLora. Faulty files are reported here, once."""

    name: Name
    version: Version
    """The version that AddLora will have. With a different one the files are read again."""


class PrepareLoraReply(StepReply, frozen=True, tag=80, kw_only=True):
    identity: ContentIdentity | None
    """Identity of the files that were read: AddLora will not wait for the disk. None: not yet."""


class AddLora(StepRequest["AddLoraReply"], frozen=True, tag=81, kw_only=True):
    """Put an adapter into host memory under an id. If it is already there under this name and id,
    it only counts as used, unless load_inplace replaces it. Running requests continue with the
    adapter that they began with.

    It is first read and validated completely, by PrepareLora or here. Then, if host memory has
    max_cpu_loras adapters, the least recently used one is evicted. Refused, with nothing changed:
    an id or name that another adapter has, faulty files (CONFIG, CHECKPOINT), and a new adapter
    when max_cpu_loras adapters are pinned (CAPACITY).
    """

    name: Name
    lora_id: Positive
    version: Version
    """Ignored if the adapter is already there and load_inplace is not set."""
    load_inplace: bool = False


class AddLoraReply(StepReply, frozen=True, tag=81, kw_only=True):
    version: Version
    """The version that is in host memory now."""
    identity: ContentIdentity
    """Identity as in LoraInfo. If ranks differ in it, remove the adapter."""
    evicted: Positive | None = None
    """Id of the adapter that was evicted for it."""
    files_changed: bool = False
    """The adapter was there, and its files have changed since it was read; False if it has been
    updated since."""
    weights_version: Unsigned = 0
    """Number as in LoraInfo."""


class RemoveLora(StepRequest["RemoveLoraReply"], frozen=True, tag=82, kw_only=True):
    """Remove an adapter from host memory, pinned or not. Running requests continue with it."""

    lora_id: Positive


class RemoveLoraReply(StepReply, frozen=True, tag=82, kw_only=True):
    removed: bool
    """False if no adapter had that id."""


class ListLoras(StepRequest["ListLorasReply"], frozen=True, tag=83, kw_only=True):
    """List the adapters in host memory."""


class ListLorasReply(StepReply, frozen=True, tag=83, kw_only=True):
    adapters: Annotated[tuple[LoraInfo, ...], Meta(max_length=65536)] = ()
    """Adapters, the least recently used first."""


class PinLora(StepRequest[Done], frozen=True, tag=84, kw_only=True):
    """Pin an adapter: it is never evicted from host memory, and leaves its device slot only for a
    step that needs the slots of pinned adapters too. An unknown id is refused (CONFIG)."""

    lora_id: Positive
