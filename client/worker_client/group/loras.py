"""LoRA adapters of a group: adds them to all ranks, and tracks which adapters all ranks have."""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import compress
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

import msgspec

from rpc_schema import lora
from rpc_schema.errors import (
    WorkerDaemonError,
    WorkerError,
)
from rpc_schema.identity import ContentIdentity, first_difference
from rpc_schema.lora_request import LoraRequest
from rpc_schema.operations import StepMessage
from worker_client.errors import (
    ContentMismatchError,
    DeadlineExceeded,
    config_error,
)
from worker_client.group.group_channel import GroupChannel
from worker_client.group.running import RunningRequests

ADD_TIMEOUT_S: Final = 600.0
"""Limit on reading an adapter from disk."""
_POLL_S: Final = 0.02
_VERSION_BYTES: Final = 7
"""Bytes of a random version, enough that no two contents have the same."""

_TYPES: Final = MappingProxyType({e.name: e.type for e in msgspec.structs.fields(lora.AddLora)})

_LOG = logging.getLogger(__name__)


class OnUpdate(Protocol):
    """See GroupLoras.on_update."""

    def __call__(self, adapter: "GroupAdapter", running: RunningRequests) -> None: ...


class GroupAdapter(NamedTuple):
    """An adapter that every rank has in host memory."""

    name: str
    lora_id: int
    version: int
    identity: ContentIdentity
    is_pinned: bool = False
    weights_version: int = 0
    """Number of its latest weight update; 0: it is as its files were."""

    @property
    def weights_key(self) -> bytes:
        """Bytes that no other weights of this version have; empty if it is as its files were."""
        number = self.weights_version
        return number.to_bytes(8, "little") + self.identity.content if number else b""

    @property
    def extension(self) -> LoraRequest:
        """The extension of requests that use it."""
        return LoraRequest(name=self.name, lora_id=self.lora_id, version=self.version)


def new_adapter_version() -> int:
    """Return a version for an adapter that is about to be read."""
    return 1 + int.from_bytes(os.urandom(_VERSION_BYTES), "little")


class Committed(NamedTuple):
    """An adapter that was added, or was there."""

    adapter: GroupAdapter
    files_changed: bool
    """True if it was there, and its files have changed since on some host."""


class AddTask:
    """An adapter being added to all ranks. Belongs to the group's thread."""

    def __init__(
        self,
        adapters: "GroupLoras",
        name: str,
        lora_id: int,
        *,
        load_inplace: bool,
        version: int | None = None,
    ) -> None:
        self._adapters = adapters
        self._name = name
        self._lora_id = lora_id
        self._load_inplace = load_inplace
        self._version = new_adapter_version() if version is None else version
        self.adapter: GroupAdapter | None = None
        """The adapter, once it is added."""

    def proceed(self) -> bool:
        """Ask whether the ranks have read the adapter, and add it once all have. Steps may run
        meanwhile. Return False once it is added. Raises as GroupLoras.add does."""
        if self.adapter is not None:
            return False
        must_read = self._load_inplace or not self._adapters.is_there(self._name, self._lora_id)
        if must_read and not self._adapters.prepare(self._name, self._version):
            return True
        added = self._adapters.commit(
            self._name, self._lora_id, self._version, load_inplace=self._load_inplace
        )
        if added.files_changed:
            raise ContentMismatchError(
                "the adapter's files have changed since it was loaded",
                field="name",
                value=self._name,
                fix="read them with load_inplace=True (worker-client lora add NAME --replace), or "
                "remove the adapter first",
            )
        self.adapter = added.adapter
        return False

    def finish(self) -> GroupAdapter:
        """Wait until it is added. Raises as GroupLoras.add does."""
        deadline = time.monotonic() + ADD_TIMEOUT_S
        while self.proceed():
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"reading adapter {self._name!r}", ADD_TIMEOUT_S)
            time.sleep(_POLL_S)
        assert self.adapter is not None, "it was added"
        return self.adapter


class GroupLoras:
    """`WorkerGroup.loras`: the adapters that all ranks have. Belongs to the group's thread."""

    def __init__(self, channel: GroupChannel) -> None:
        self._channel = channel
        self._known: dict[int, GroupAdapter] = {}
        self.on_update: OnUpdate | None = None
        """Called with an adapter whose weights an update has changed, before another step can be
        sent; must not call the group. The newest driver of the group sets it."""
        self.updates_fault = ""
        """Why the newest driver cannot have adapters updated; empty: it can, or there is none."""

    @property
    def known(self) -> Mapping[int, GroupAdapter]:
        """The adapters that all ranks have, by id, if this driver has added or found them."""
        return self._known

    def add(
        self,
        name: str,
        lora_id: int | None = None,
        *,
        load_inplace: bool = False,
        version: int | None = None,
    ) -> GroupAdapter:
        """Put an adapter below the daemons' --lora-root into every rank's host memory, and return
        it: requests name it by its `extension`. Daemons keep running steps, but this call blocks
        until it is loaded: a serving driver uses begin_add.

        lora_id: by default its current ID, or a free one. An adapter that is already in host memory
        only counts as used, unless load_inplace replaces it. The least recently used adapter is
        evicted if there is no room: see `known`. version: its version if it is read now, the same
        for all replicas that read it; None: a new one.

        Raises:
            ConfigError: it is not supported, or exceeds max_lora_rank; the model was loaded
                without adapters; the id or the name belongs to another one.
            CheckpointError: its files are missing or faulty.
            CapacityError: all adapters are pinned. Whatever is raised, nothing has changed.
        """
        return self.begin_add(name, lora_id, load_inplace=load_inplace, version=version).finish()

    def begin_add(
        self,
        name: str,
        lora_id: int | None = None,
        *,
        load_inplace: bool = False,
        version: int | None = None,
    ) -> AddTask:
        """Begin to add an adapter: call its proceed() between steps, until that returns False."""
        _check_field("name", name, "a text of 1 to 256 characters, as UTF-8 has them")
        if lora_id is None:
            lora_id = self._id_for(name)
        _check_id(lora_id)
        _check_field("load_inplace", load_inplace, "True or False")
        return AddTask(self, name, lora_id, load_inplace=load_inplace, version=version)

    def is_there(self, name: str, lora_id: int) -> bool:
        """Return True if all ranks have the adapter with this name and id."""
        known = self._known.get(lora_id)
        return known is not None and known.name == name

    def prepare(self, name: str, version: int, ranks: Collection[int] | None = None) -> bool:
        """Make ranks (None: all) read an adapter; return True once all of them have. Raises
        ContentMismatchError if they have read different files."""
        build = partial(lora.PrepareLora, name=name, version=version)

        def build_for(rank: int) -> Callable[..., StepMessage]:
            return build if ranks is None or rank in ranks else lora.ListLoras

        replies = self._channel.ask_each(build_for)
        identities = [
            reply.identity if isinstance(reply, lora.PrepareLoraReply) else None
            for reply in replies
        ]
        asked = [ranks is None or reply.rank in ranks for reply in replies]
        if None in compress(identities, asked):
            return False
        self._check_same(name, identities)
        return True

    def commit(
        self, name: str, lora_id: int, version: int, *, load_inplace: bool = False
    ) -> Committed:
        """Add an adapter to all ranks. Raises ContentMismatchError, and removes it from all, if
        they have read different files."""
        build = partial(
            lora.AddLora, name=name, lora_id=lora_id, version=version, load_inplace=load_inplace
        )
        try:
            replies = self._channel.ask(build)
        except WorkerError:
            self._take_back(version)
            raise
        for reply in replies:
            if reply.evicted is not None:
                self._known.pop(reply.evicted, None)
        try:
            self._check_same(name, [reply.identity for reply in replies])
        except ContentMismatchError:
            self.remove(lora_id)
            raise
        pinned = lora_id in self._known and self._known[lora_id].is_pinned
        found = replies[0]
        adapter = GroupAdapter(
            name, lora_id, found.version, found.identity, pinned, found.weights_version
        )
        self._known[lora_id] = adapter
        return Committed(adapter, any(reply.files_changed for reply in replies))

    def _check_same(self, name: str, identities: Sequence[ContentIdentity | None]) -> None:
        """Raise ContentMismatchError if two ranks have read different files of an adapter."""
        ranks = first_difference(identities)
        if ranks is not None:
            clients = [self._channel.daemons.clients[index] for index in ranks]
            first, second = (f"rank {each.rank} ({each.endpoint.control})" for each in clients)
            raise ContentMismatchError(
                f"{first} and {second} have read different files",
                field="name",
                value=name,
                fix="give all hosts the same files, and write none while they are read; then add "
                "the adapter again",
            )

    def remove(self, lora_id: int) -> bool:
        """Remove an adapter from host memory; running requests keep using it. Return False if there
        was none of that id."""
        _check_id(lora_id)
        replies = self._channel.ask(partial(lora.RemoveLora, lora_id=lora_id))
        self._known.pop(lora_id, None)
        return any(reply.removed for reply in replies)

    def pin(self, lora_id: int) -> None:
        """Pin an adapter: it is never evicted. Raises ConfigError if there is none of that
        id."""
        _check_id(lora_id)
        self._channel.ask(partial(lora.PinLora, lora_id=lora_id))
        if lora_id in self._known:
            self._known[lora_id] = self._known[lora_id]._replace(is_pinned=True)

    def list_by_rank(self) -> list[lora.ListLorasReply]:
        """Return every rank's adapters in host memory, least recently used first."""
        return self._channel.ask(lora.ListLoras)

    def find(self, adapter: GroupAdapter) -> GroupAdapter:
        """Return an adapter as the ranks have it now, for an update of its weights. Raises
        ClientConfigError: they have no such adapter, or the driver cannot have it updated."""
        known = self._known.get(adapter.lora_id)
        if known is None or known.version != adapter.version:
            there = sorted(each.name for each in self._known.values())
            fix = f"add it first, and use what that returns; there are {there}"
            raise config_error("target", adapter.name, "the group has no such adapter", fix)
        if self.updates_fault:
            fix = "give the driver a scheduler that has it"
            raise config_error("target", adapter.name, self.updates_fault, fix)
        return known

    def updated(self, adapter: GroupAdapter, running: RunningRequests) -> None:
        """Note that an update of an adapter was finished, at least on some ranks. If they differ in
        it now, it is removed from all.

        Raises:
            ContentMismatchError: it was removed.
        """
        before = self._known.get(adapter.lora_id)
        self.learn()
        now = self._known.get(adapter.lora_id)
        if now is None or now.version != adapter.version:
            raise ContentMismatchError(
                "not all ranks have finished the update of this adapter: it was removed",
                field="target",
                value=adapter.name,
                fix="add it again, and update it",
            )
        if now != before and self.on_update is not None:
            self.on_update(now, running)

    def forget(self) -> None:
        """Forget all adapters, which the daemons have dropped."""
        self._known.clear()

    def learn(self) -> None:
        """Find the adapters that are the same on all ranks, and remove all others: a driver may
        have died while it added one."""
        ranks = [
            {each.lora_id: _known_as(each) for each in reply.adapters}
            for reply in self.list_by_rank()
        ]
        first = ranks[0]
        self._known = {
            lora_id: adapter
            for lora_id, adapter in first.items()
            if _are_same([rank.get(lora_id) for rank in ranks])
        }
        for lora_id in {each for rank in ranks for each in rank} - self._known.keys():
            self._channel.ask(partial(lora.RemoveLora, lora_id=lora_id))

    def restore(self, newcomers: Collection[int]) -> None:
        """Give newly loaded ranks the adapters that all ranks had, from their files. One that
        cannot be read there, or whose files or weights were changed since, is removed from the
        other ranks too; only its requests fail. So is one that only some ranks have added before
        one was lost."""
        for adapter in list(self._known.values()):
            name, lora_id, version, is_pinned = (
                adapter.name,
                adapter.lora_id,
                adapter.version,
                adapter.is_pinned,
            )
            try:
                deadline = time.monotonic() + ADD_TIMEOUT_S
                while not self.prepare(name, version, newcomers):
                    if time.monotonic() >= deadline:
                        raise DeadlineExceeded(f"reading adapter {name!r}", ADD_TIMEOUT_S)
                    time.sleep(_POLL_S)
                found = self.commit(name, lora_id, version).adapter.identity
                # KV of the former files may be in the memory that a rank has taken over.
                if found.content != adapter.identity.content:
                    raise ContentMismatchError(
                        "its files or its weights have changed",
                        field="name",
                        value=name,
                        fix="add it again",
                    )
                if is_pinned:
                    self.pin(lora_id)
            except (WorkerError, DeadlineExceeded, ContentMismatchError) as error:
                _LOG.warning("adapter %r is removed: %s", name, error)
                self.remove(lora_id)
        self.learn()

    def _id_for(self, name: str) -> int:
        for lora_id, adapter in self._known.items():
            if adapter.name == name:
                return lora_id
        return next(
            number for number in range(1, len(self._known) + 2) if number not in self._known
        )

    def _take_back(self, version: int) -> None:
        """Remove an adapter that only some ranks have added."""
        with contextlib.suppress(WorkerDaemonError):
            there = {
                a.lora_id
                for reply in self.list_by_rank()
                for a in reply.adapters
                if a.version == version
            }
            for lora_id in there:
                self.remove(lora_id)


def _check_field(field: str, value: object, wanted: str) -> None:
    """Raise ClientConfigError for a value that no AddLora can carry."""
    try:
        msgspec.convert(value, _TYPES[field])
        msgspec.msgpack.encode(value)  # which a lone surrogate prevents
    except (msgspec.ValidationError, TypeError, ValueError):
        raise config_error(field, value, "no adapter can have it", f"give {wanted}") from None


def _check_id(lora_id: object) -> None:
    _check_field("lora_id", lora_id, "a whole number from 1 to 2147483647")


def _known_as(info: lora.LoraInfo) -> GroupAdapter:
    return GroupAdapter(
        info.name, info.lora_id, info.version, info.identity, info.is_pinned, info.weights_version
    )


def _are_same(found: Sequence[GroupAdapter | None]) -> bool:
    """Return True if all ranks have the same adapter."""
    there = [each for each in found if each is not None]
    return (
        len(there) == len(found)
        and all(each._replace(identity=there[0].identity) == there[0] for each in there)
        and first_difference([each.identity for each in there]) is None
    )
