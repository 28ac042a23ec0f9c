"""LoRA adapters: the operations that put them into a group's host memory. A request uses one by the
extension of rpc_schema/lora_request.py.

An adapter is a directory in PEFT's format below one of a daemon's --lora-root directories, and its
name is the path of that directory from the root. Every rank keeps its own shard of it.
"""

from typing import Annotated

from msgspec import Meta

from rpc_schema.base import Name, Positive, StepReply, StepRequest, Unsigned, Value
from rpc_schema.step import Done

Version = Annotated[int, Meta(ge=1, le=2**63 - 1)]
"""Chosen by the driver, another for each content: requests share prefixes only if theirs is the
same."""


class LoraInfo(Value, frozen=True, kw_only=True):
    """An adapter in a rank's host memory."""

    name: Name
    lora_id: Positive
    version: Version
    rank: Positive
    """The largest rank of its matrices."""
    is_pinned: bool
    size_bytes: Unsigned
    """Size of its shard on this rank."""


class PrepareLora(StepRequest["PrepareLoraReply"], frozen=True, tag=80, kw_only=True):
    """Begin to read an adapter from disk on another thread, while steps run, or report that this is
    done. The adapter is not used before AddLora. A fault of its files is reported here, once."""

    name: Name
    version: Version
    """That AddLora will have; another one reads the files again."""


class PrepareLoraReply(StepReply, frozen=True, tag=80, kw_only=True):
    is_ready: bool
    """AddLora will not wait for the disk."""


class AddLora(StepRequest["AddLoraReply"], frozen=True, tag=81, kw_only=True):
    """Put an adapter into host memory under an id. If it is there under this name and id, it only
    counts as used, unless load_inplace replaces it. Running requests go on with the adapter that
    they began with.

    It is read and validated whole first, by PrepareLora or here. Then the one that was used least
    recently leaves, if max_cpu_loras are there. Refused, with nothing changed: an id or name that
    is in use for another adapter, faulty files (CONFIG, CHECKPOINT), and an adapter more than
    max_cpu_loras when all are pinned (CAPACITY).
    """

    name: Name
    lora_id: Positive
    version: Version
    """Without effect if the adapter is there already."""
    load_inplace: bool = False


class AddLoraReply(StepReply, frozen=True, tag=81, kw_only=True):
    version: Version
    """The version that is in host memory now."""
    evicted: Positive | None = None
    """Id of the adapter that left for it."""


class RemoveLora(StepRequest["RemoveLoraReply"], frozen=True, tag=82, kw_only=True):
    """Remove an adapter from host memory, pinned or not. Running requests go on with it."""

    lora_id: Positive


class RemoveLoraReply(StepReply, frozen=True, tag=82, kw_only=True):
    removed: bool
    """False if there was none of that id."""


class ListLoras(StepRequest["ListLorasReply"], frozen=True, tag=83, kw_only=True):
    """List the adapters in host memory."""


class ListLorasReply(StepReply, frozen=True, tag=83, kw_only=True):
    adapters: Annotated[tuple[LoraInfo, ...], Meta(max_length=65536)] = ()
    """The one used least recently first."""


class PinLora(StepRequest[Done], frozen=True, tag=84, kw_only=True):
    """Never evict an adapter from host memory, and from its device slot only for a step that needs
    the slots of pinned adapters too. An unknown id is refused (CONFIG)."""

    lora_id: Positive
