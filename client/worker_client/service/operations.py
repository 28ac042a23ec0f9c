"""Operations of administrators on what all replicas hold: adapters, memory, weights."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from rpc_schema.identity import first_difference
from rpc_schema.lifecycle import MemoryTag, SleepLevel
from worker_client.driver import Driver
from worker_client.errors import ContentMismatchError
from worker_client.group.loras import AddTask, GroupAdapter
from worker_client.group.running import RunningRequests
from worker_client.group.weights_state import WeightsVersion, common_version
from worker_client.replicas.loras import Addition, check_same_adapter
from worker_client.replicas.operations import ReplicaOperation
from worker_client.scheduler import Scheduler


def adapter_addition(name: str, addition: Addition) -> ReplicaOperation[AddTask]:
    """Return the operation that adds an adapter, while requests are served."""

    def begin(driver: Driver) -> AddTask:
        return driver.group.loras.begin_add(
            name,
            addition.lora_id,
            load_inplace=addition.load_inplace,
            version=addition.version,
        )

    def take_back(driver: Driver, _: AddTask | None) -> None:
        known = driver.group.loras.known.get(addition.lora_id)
        if addition.is_new and known is not None and known.version == addition.version:
            driver.group.loras.remove(addition.lora_id)

    def catch_up(driver: Driver, elsewhere: AddTask) -> None:
        known = driver.group.loras.known.get(addition.lora_id)
        if known is None or known.version != addition.version:
            task = begin(driver)
            task.finish()
            check(name, [elsewhere, task])

    def check(name: str, tasks: Sequence[AddTask]) -> None:
        check_same_adapter(name, [task.adapter for task in tasks if task.adapter is not None])

    return ReplicaOperation(
        name=f"load of adapter {name}",
        kind="adapters",
        subject=name,
        apply=begin,
        proceed=lambda _, task: task.proceed(),
        check=partial(check, name),
        undo=take_back,
        catch_up=catch_up,
    )


def adapter_removal(adapter: GroupAdapter) -> ReplicaOperation[bool]:
    """Return the operation that removes an adapter."""

    def remove(driver: Driver) -> bool:
        return driver.group.loras.remove(adapter.lora_id)

    def catch_up(driver: Driver, _: bool) -> None:
        known = driver.group.loras.known.get(adapter.lora_id)
        if known is not None and known.name == adapter.name:
            remove(driver)

    return ReplicaOperation(
        name=f"removal of adapter {adapter.name}",
        kind="adapters",
        subject=adapter.name,
        apply=remove,
        catch_up=catch_up,
        lasts=False,
    )


def falling_asleep(level: SleepLevel) -> ReplicaOperation[None]:
    """Return the operation that puts all ranks to sleep, or none: if one cannot at level 1, the
    others are woken."""

    def sleep(driver: Driver) -> None:
        try:
            driver.group.memory.sleep(level)
        finally:
            _forget_prefixes(driver)

    def wake(driver: Driver, _: None) -> None:
        driver.group.memory.wake_up()

    return ReplicaOperation(
        name="sleep",
        kind="memory",
        apply=sleep,
        undo=wake if level == 1 else None,
        catch_up=lambda driver, _: sleep(driver),
    )


def waking(tags: tuple[MemoryTag, ...] | None) -> ReplicaOperation[None]:
    """Return the operation that wakes these tags of all ranks; None: all tags."""

    def wake(driver: Driver) -> None:
        driver.group.memory.wake_up(tags)

    def catch_up(driver: Driver, _: None) -> None:
        if tags is not None:  # a new daemon is awake
            falling_asleep(1).apply(driver)
        wake(driver)

    return ReplicaOperation(
        name="wake up",
        kind="memory",
        apply=wake,
        catch_up=catch_up,
        lasts=tags is not None,
    )


class Reloaded(NamedTuple):
    """Weights that were read from files."""

    version: WeightsVersion
    model: str
    """Name of their directory, as daemons take it."""


def reloading(
    path: str, version: int | None, running: RunningRequests | None, budget: int | None
) -> ReplicaOperation[Reloaded | None]:
    """Return the operation that reads the weights of all ranks again. version: larger than that of
    every rank, for several replicas. running, budget: as GroupWeights.reload takes them."""

    def reload(driver: Driver) -> Reloaded | None:
        weights = driver.group.weights
        weights.reload(path, version=version, running=running or "drop", recompute_budget=budget)
        return _weights_of(driver)

    def check(found: Sequence[Reloaded | None]) -> None:
        identities = [None if each is None else each.version.identity for each in found]
        differing = first_difference(identities)
        if differing is not None:
            raise ContentMismatchError(
                f"replicas {differing.first} and {differing.second} have read different files",
                field="path",
                value=path,
                fix="give all hosts the same files, then update the weights again",
            )

    def catch_up(driver: Driver, elsewhere: Reloaded | None) -> None:
        assert elsewhere is not None, "they are whole after a reload"
        number, found = elsewhere.version.number, _weights_of(driver)
        if found is None or found.version.number < number:
            driver.group.weights.reload(elsewhere.model, version=number)
            found = _weights_of(driver)
        check([elsewhere, found])

    return ReplicaOperation(
        name="update of the weights",
        kind="weights",
        apply=reload,
        check=check,
        catch_up=catch_up,
    )


def _weights_of(driver: Driver) -> Reloaded | None:
    statuses = driver.group.get_status()
    version, config = common_version(statuses), statuses[0].config
    return None if version is None or config is None else Reloaded(version, config.model.model)


def _forget_prefixes(driver: Driver) -> None:
    assert isinstance(driver.scheduler, Scheduler), "the engine's"
    driver.scheduler.forget_prefixes()
