"""LoRA adapters of a data-parallel group: each has one id and one version in all replicas, so that
a request which names it can run on any of them."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import NamedTuple, Protocol, TypeVar

from rpc_schema.errors import WorkerDaemonError
from rpc_schema.identity import first_difference
from worker_client.errors import ContentMismatchError
from worker_client.group.loras import GroupAdapter, new_adapter_version
from worker_client.worker_group import WorkerGroup

ResultT = TypeVar("ResultT")


class OnAll(Protocol):
    """DataParallelGroup.on_all."""

    def __call__(self, operation: Callable[[WorkerGroup], ResultT]) -> list[ResultT]: ...


class ReplicaLoras:
    """`DataParallelGroup.loras`: adapters that all replicas have."""

    def __init__(self, replicas: Sequence[WorkerGroup], on_all: OnAll) -> None:
        self._replicas = replicas
        self._on_all = on_all

    def add(
        self, name: str, lora_id: int | None = None, *, load_inplace: bool = False
    ) -> GroupAdapter:
        """Put an adapter into the host memory of every replica's ranks, and return it. Options and
        errors are those of GroupLoras.add, and

        Raises:
            ContentMismatchError: replicas have read different files. Whatever is raised, no replica
                has an adapter that was added by this call.
        """
        known = [replica.loras.known for replica in self._replicas]
        chosen = choose_addition(name, known, lora_id, load_inplace=load_inplace)
        try:
            added = self._on_all(
                lambda replica: replica.loras.add(
                    name,
                    chosen.lora_id,
                    load_inplace=chosen.load_inplace,
                    version=chosen.version,
                )
            )
            check_same_adapter(name, added)
        except (WorkerDaemonError, ContentMismatchError):
            if chosen.is_new:
                self._take_back(chosen.lora_id, chosen.version)
            raise
        return added[0]

    def remove(self, lora_id: int) -> bool:
        """Remove an adapter from all replicas; running requests keep using it. Return False if none
        had one of that id."""
        return any(self._on_all(lambda replica: replica.loras.remove(lora_id)))

    def _take_back(self, lora_id: int, version: int) -> None:
        for replica in self._replicas:
            adapter = replica.loras.known.get(lora_id)
            if adapter is not None and adapter.version == version:
                with contextlib.suppress(WorkerDaemonError):
                    replica.loras.remove(lora_id)


class Addition(NamedTuple):
    """The way in which all replicas are to add an adapter."""

    lora_id: int
    version: int
    load_inplace: bool
    is_new: bool
    """No replica has this version."""


def choose_addition(
    name: str,
    known: Sequence[Mapping[int, GroupAdapter]],
    lora_id: int | None = None,
    *,
    load_inplace: bool = False,
) -> Addition:
    """Return how replicas that have the adapters of `known` add one, so that it has one id and one
    version in all of them. lora_id: the id that is asked for, if any."""
    there = [
        adapter
        for own in known
        for adapter in own.values()
        if adapter.name == name and lora_id in (None, adapter.lora_id)
    ]
    versions = {adapter.version for adapter in there}
    load_inplace = load_inplace or len(versions) > 1
    version = new_adapter_version() if load_inplace or not there else there[0].version
    if lora_id is None:
        taken = {number for own in known for number in own}
        free = next(number for number in count(1) if number not in taken)
        lora_id = there[0].lora_id if there else free
    return Addition(lora_id, version, load_inplace, version not in versions)


def check_same_adapter(name: str, added: Sequence[GroupAdapter]) -> None:
    """Raise ContentMismatchError if replicas have read different files for an adapter."""
    differing = first_difference([adapter.identity for adapter in added])
    if differing is not None:
        raise ContentMismatchError(
            f"replicas {differing.first} and {differing.second} have read different files",
            field="name",
            value=name,
            fix="give all hosts the same files, and write none while they are read; then add "
            "the adapter again",
        )
