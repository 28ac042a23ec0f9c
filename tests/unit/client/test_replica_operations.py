"""Operations of administrators on replicas of fake daemons, some of which are lost: they take
effect in those that serve, and in a lost one before it takes requests again. Real daemons:
tests/e2e/test_service_replicas.py."""

import asyncio
import contextlib
import random
import threading

import pytest

from rpc_schema.errors import StateError
from tests.support.waiting import PATIENCE_S
from tests.unit.client.test_continued_requests import Heard, random_request, until
from tests.unit.client.test_data_parallel import follow, hold
from worker_client.driver import give_up
from worker_client.errors import MissedOperationFailed, ReplicasDiffer, WorkerDied
from worker_client.replicas.driver import DataParallelDriver
from worker_client.replicas.operations import PAUSE, RESUME, ReplicaOperation


class Log:
    """Operations that replicas have done: what, where, and after how many steps there."""

    def __init__(self, made):
        self._made = made
        self.done = [[] for _ in made.daemons]
        self.steps = [[] for _ in made.daemons]
        self.refusing = {}
        """Errors of replicas that refuse."""

    def note(self, driver, what):
        place = self._made.group.replicas.index(driver.group)
        if place in self.refusing:
            raise self.refusing[place]
        self.done[place].append(what)
        self.steps[place].append(self._made.daemons[place].num_executes)

    def operation(self, what, kind="weights", *, has_undo=True, **options):
        return ReplicaOperation(
            name=what,
            kind=kind,
            apply=lambda driver: self.note(driver, what),
            undo=(lambda driver, _: self.note(driver, f"no {what}")) if has_undo else None,
            catch_up=lambda driver, _: self.note(driver, f"late {what}"),
            **options,
        )


@pytest.fixture
def successors(replicas):
    """Make replicas whose lost ranks are followed once `may_come` is set."""

    def make(count):
        made, may_come = replicas(count), threading.Event()

        def recover(replica, died):
            assert may_come.wait(PATIENCE_S)
            follow(made.daemons, died.rank)
            replica.replace(died.rank)

        return made, may_come, DataParallelDriver(made.opening(recover))

    return make


async def read_all(driver, count):
    rng = random.Random()
    heard = [Heard(random_request(rng, f"r{number}")) for number in range(count)]
    await asyncio.gather(*(each.read(driver) for each in heard))
    for each in heard:
        each.check()


def test_operation_without_a_replica_whose_driver_has_ended(replicas):
    made = replicas(3)
    log = Log(made)

    async def main():
        async with DataParallelDriver(made.opening(lambda _, died: give_up(died))) as driver:
            made.daemons[1].kill()
            await until(lambda: driver.drivers[1].error is not None, "the end of a driver")
            report = await driver.operations.do(PAUSE)
            assert report.results == {0: False, 2: False}
            assert isinstance(report.missing[1], WorkerDied)
            reading = asyncio.create_task(read_all(driver, 6))
            await asyncio.sleep(0.1)
            assert not any(driver.num_executes for driver in made.daemons)
            await driver.operations.do(log.operation("new weights"))
            assert await driver.operations.ask(lambda own: own.is_paused) == [True, True]
            await driver.resume()
            await reading
            assert log.done == [["new weights"], [], ["new weights"]]

    asyncio.run(main())


def test_lost_replica_catches_up_before_it_takes_requests(successors):
    made, may_come, opening = successors(2)
    log = Log(made)

    async def main():
        async with opening as driver:
            made.daemons[0].kill()
            await until(lambda: driver.operations.missing, "the loss")
            for what, kind in (("a", "weights"), ("sleep", "memory"), ("b", "weights")):
                report = await driver.operations.do(log.operation(what, kind))
                assert report.results == {1: None} and [*report.missing] == [0]
            await driver.operations.do(PAUSE)
            await driver.operations.do(RESUME)
            assert log.done == [[], ["a", "sleep", "b"]]
            assert driver.drivers[0].loss is not None
            may_come.set()
            await until(lambda: driver.drivers[0].loss is None, "the return")
            assert log.done[0] == ["late sleep", "late b"]
            assert not driver.operations.missing
            await read_all(driver, 8)
            assert log.steps[0] == [0, 0] and made.daemons[0].num_executes
            await driver.operations.do(log.operation("c"))
            assert log.done[0][-1] == "c"

    asyncio.run(main())


def test_operation_that_waits_for_a_step_does_not_wait_for_a_successor(successors):
    """The replica's thread is in a step whose daemon dies."""
    made, may_come, opening = successors(2)
    log = Log(made)

    async def main():
        async with opening as driver:
            for daemon in made.daemons:
                hold(daemon)
            reading = asyncio.create_task(read_all(driver, 6))
            await until(lambda: all(d.num_executes for d in made.daemons), "steps on both")
            operation = asyncio.create_task(driver.operations.do(log.operation("a")))
            await asyncio.sleep(0.05)
            assert log.done == [[], []]
            made.daemons[0].kill()
            made.daemons[1].let_go.set()
            report = await operation
            assert report.results == {1: None} and isinstance(report.missing[0], WorkerDied)
            await reading
            may_come.set()
            await until(lambda: log.done == [["late a"], ["a"]], "the return")

    asyncio.run(main())


def test_replica_that_is_lost_in_an_operation_does_it_later(successors):
    made, may_come, opening = successors(2)
    log = Log(made)

    def apply(driver):
        if driver.group is made.group.replicas[0]:
            made.daemons[0].kill()
            while True:
                driver.group.look()
        log.note(driver, "a")

    operation = ReplicaOperation(
        name="a", kind="weights", apply=apply, catch_up=lambda driver, _: log.note(driver, "late a")
    )

    async def main():
        async with opening as driver:
            report = await driver.operations.do(operation)
            assert report.results == {1: None} and [*report.missing] == [0]
            may_come.set()
            await until(lambda: log.done == [["late a"], ["a"]], "the return")
            await read_all(driver, 8)

    asyncio.run(main())


@pytest.mark.parametrize("is_lost_before", [True, False])
def test_replica_that_comes_back_in_an_operation_does_it(successors, is_lost_before):
    """The other one takes its time; a daemon that has done it and is lost may need it again."""
    made, may_come, opening = successors(2)
    log, may_end = Log(made), threading.Event()
    operation = log.operation(
        "a", proceed=lambda driver, _: driver.group.ranks[0] == 1 and not may_end.is_set()
    )

    async def main():
        async with opening as driver:

            async def lose():
                made.daemons[0].kill()
                await until(lambda: driver.operations.missing, "the loss")

            if is_lost_before:
                await lose()
            doing = asyncio.create_task(driver.operations.do(operation))
            await until(lambda: log.done[1], "the operation")
            if not is_lost_before:
                await lose()
            may_come.set()
            await until(lambda: driver.drivers[0].loss is None, "the return")
            assert not doing.done()
            may_end.set()
            assert (await doing)._asdict() == {"results": {0: None, 1: None}, "missing": {}}
            assert log.done == [["a"] * (1 if is_lost_before else 2), ["a"]]

    asyncio.run(main())


def test_replica_that_cannot_catch_up_takes_no_requests(successors):
    made, may_come, opening = successors(2)
    log = Log(made)

    async def main():
        async with opening as driver:
            made.daemons[0].kill()
            await until(lambda: driver.operations.missing, "the loss")
            await driver.operations.do(log.operation("a"))
            log.refusing[0] = StateError("not now")
            may_come.set()
            own = driver.drivers[0]
            await until(lambda: isinstance(own.loss, MissedOperationFailed), "an attempt")
            assert "replica 0" in str(own.loss) and "not now" in str(own.loss)
            await read_all(driver, 4)
            assert not made.daemons[0].num_executes
            assert [*(await driver.operations.do(log.operation("b"))).missing] == [0]
            log.refusing.clear()
            await until(lambda: own.loss is None, "the return")
            assert log.done == [["late b"], ["a", "b"]]
            await read_all(driver, 4)

    asyncio.run(main())


@pytest.mark.parametrize("has_undo", [True, False])
def test_operation_that_a_replica_refuses(successors, has_undo):
    """It is taken back, or the error says who has done it; missing ones do not do it."""
    made, may_come, opening = successors(4)
    log = Log(made)

    async def main():
        async with opening as driver:
            made.daemons[3].kill()
            await until(lambda: driver.operations.missing, "the loss")
            log.refusing[1] = StateError("never")
            operation = log.operation("a", has_undo=has_undo)
            with pytest.raises(StateError if has_undo else ReplicasDiffer, match="never") as caught:
                await driver.operations.do(operation)
            expected = ["a", "no a"] if has_undo else ["a"]
            assert log.done == [expected, [], expected, []]
            if not has_undo:
                states = caught.value.states
                assert states[0] == states[2] == "has done it"
                assert states[1].startswith("has refused it: never")
                assert states[3].startswith("is missing")
            may_come.set()
            await until(lambda: driver.drivers[3].loss is None, "the return")
            assert not log.done[3]
            for place in (0, 2, 3):
                log.refusing[place] = StateError("never")
            with pytest.raises(StateError, match="never"):
                await driver.operations.do(operation)
            log.refusing.clear()
            await driver.operations.do(operation)
            assert [each[-1] for each in log.done] == ["a"] * 4

    asyncio.run(main())


def end(driver):
    """Let a driver end with its next step, or its next look."""

    def fail():
        raise ArithmeticError

    driver.step = driver.look = fail


@pytest.mark.parametrize("keeps_daemon", [True, False])
def test_replica_whose_driver_has_ended_is_opened_again(replicas, keeps_daemon):
    """It begins with what it has missed, once it can be opened; its daemon may be another one."""
    made, place = replicas(2), random.randrange(2)
    log, may_open, num_calls = Log(made), threading.Event(), [0]
    opening = made.opening(lambda _, died: give_up(died))

    @contextlib.contextmanager
    def open_driver():
        num_calls[0] += 1
        if num_calls[0] > 1:
            if not may_open.is_set():
                raise StateError("not yet")
            replica = made.group.reconnect(place)
            replica.attach(wait_for_lease_s=0.0)
            made.loaded[place] = replica.prepare(made.config)
        with made.opening(lambda _, died: give_up(died))[place]() as driver:
            yield driver

    opening[place] = open_driver

    async def main():
        async with DataParallelDriver(opening, reopen_s=0.05) as driver:
            rng = random.Random()
            heard = [Heard(random_request(rng, f"s{number}")) for number in range(8)]
            tasks = [asyncio.create_task(each.read(driver)) for each in heard]
            await until(lambda: sum(each.num_tokens for each in heard) > 10, "tokens")
            if keeps_daemon:
                await driver.drivers[place].call(end)
            else:
                follow(made.daemons, place)
            await asyncio.gather(*tasks)
            for each in heard:
                each.check()
            await until(lambda: driver.operations.missing, "the loss")
            await driver.operations.do(PAUSE)
            assert [*(await driver.operations.do(log.operation("a"))).missing] == [place]
            await until(lambda: num_calls[0] > 3, "attempts")
            assert driver.error is None and not log.done[place]
            may_open.set()
            await until(lambda: not driver.operations.missing, "the return")
            assert log.done[place] == ["late a"]
            assert await driver.operations.ask(lambda own: own.is_paused) == [True, True]
            await driver.resume()
            before = made.daemons[place].num_executes
            await read_all(driver, 8)
            assert made.daemons[place].num_executes > before

    asyncio.run(main())


def test_results_that_do_not_go_together_are_taken_back(replicas):
    made = replicas(2)
    log = Log(made)

    def check(results):
        raise StateError(f"they differ: {len(results)}")

    async def main():
        async with DataParallelDriver(made.opening(lambda _, died: give_up(died))) as driver:
            with pytest.raises(StateError, match="they differ: 2"):
                await driver.operations.do(log.operation("a", check=check))
            assert log.done == [["a", "no a"]] * 2

    asyncio.run(main())


def test_operation_without_any_replica(replicas):
    made = replicas(2)
    log = Log(made)

    async def main():
        async with DataParallelDriver(made.opening(lambda _, died: give_up(died))) as driver:
            for daemon in made.daemons:
                daemon.kill()
            await driver.wait_ended()
            for operation in (PAUSE, log.operation("a")):
                with pytest.raises(WorkerDied):
                    await driver.operations.do(operation)
            with pytest.raises(WorkerDied):
                await driver.operations.ask(lambda own: own.is_paused)
            assert log.done == [[], []]

    asyncio.run(main())
