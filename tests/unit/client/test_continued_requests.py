"""Fake daemons of replicas that are lost: their requests go on in the others at once, each as one,
whatever it asks for. Real daemons: tests/e2e/test_lost_replicas.py."""

import asyncio
import random
import threading
from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.support.exhaustive import seeds
from tests.support.fake_daemon import Fault, reference_tokens
from tests.support.waiting import PATIENCE_S
from tests.unit.client.test_data_parallel import follow, hold
from worker_client.async_driver import AsyncDriver
from worker_client.driver import give_up
from worker_client.errors import ReplacementFailed, WorkerDied
from worker_client.replicas.driver import MAX_LOSSES, DataParallelDriver
from worker_client.requests import GenerationRequest, SamplingParams, forked

STOPS = frozenset({7})


@dataclass
class Heard:
    """What the reader of a request has got."""

    request: GenerationRequest
    tokens: dict = field(default_factory=dict)
    logprobs: dict = field(default_factory=dict)
    outputs: dict = field(default_factory=dict)

    async def read(self, driver):
        async for each in driver.generate(self.request):
            self.take(each)
        return self

    def take(self, progress):
        name, reports = progress.req_id, progress.reports
        self.tokens.setdefault(name, []).extend(progress.token_ids)
        if reports is not None and reports.logprobs is not None:
            self.logprobs.setdefault(name, []).extend(reports.logprobs)
        if progress.output is not None:
            assert name not in self.outputs
            self.outputs[name] = progress.output

    @property
    def num_tokens(self):
        return sum(map(len, self.tokens.values()))

    def check(self):
        """Each token came once, and is the one that an undisturbed replica gives."""
        samples = forked(self.request)
        assert self.outputs.keys() == {sample.id for sample in samples}
        for sample in samples:
            output, sampling = self.outputs[sample.id], sample.sampling
            stops = frozenset() if sampling.ignore_eos else STOPS
            seed = sampling.seed if sampling.temperature else 0
            expected = reference_tokens(sample.prompt, sample.max_tokens, stops, seed)
            assert self.tokens[sample.id] == output.token_ids == expected
            assert output.num_prompt_tokens == len(sample.prompt)
            assert sum(run.num_tokens for run in output.weights_versions) == len(expected)
            if sampling.logprobs is not None:
                assert self.logprobs[sample.id] == output.logprobs
                assert [int(each.token_ids[0]) for each in output.logprobs] == expected


def random_request(rng, name) -> GenerationRequest:
    sampling = SamplingParams(
        temperature=rng.choice([0.0, 1.0]),
        seed=rng.randrange(1 << 20),
        n=rng.choice([1, 1, 3]),
        ignore_eos=rng.random() < 0.5,
        logprobs=rng.choice([None, 2]),
    )
    prompt = np.array([rng.randrange(50) for _ in range(rng.randint(1, 30))], np.int32)
    return GenerationRequest(name, prompt, rng.randint(1, 40), sampling)


async def until(condition, what):
    for _ in range(int(PATIENCE_S / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(what)


@pytest.mark.parametrize("comes_back", [False, True])
@pytest.mark.parametrize("seed", seeds(3, of=20))
def test_requests_of_a_lost_replica_go_on_in_the_others_at_once(replicas, seed, comes_back):
    """Its successor comes only once they have ended, or never."""
    rng = random.Random(seed)
    made, may_come, num_recoveries = replicas(3), threading.Event(), [0]
    lost = rng.randrange(3)

    def recover(replica, died):
        num_recoveries[0] += 1
        if not comes_back:
            give_up(died)
        assert may_come.wait(PATIENCE_S)
        follow(made.daemons, lost)
        replica.replace(died.rank)

    async def main():
        requests = [random_request(rng, f"r{number}") for number in range(12)]
        heard = [Heard(request) for request in requests]
        async with DataParallelDriver(made.opening(recover)) as driver:
            tasks = [asyncio.create_task(each.read(driver)) for each in heard]
            least = rng.randint(0, 60)
            await until(lambda: sum(h.num_tokens for h in heard) >= least, "tokens")
            made.daemons[lost].kill()
            await asyncio.gather(*tasks)
            for each in heard:
                each.check()
            later = Heard(random_request(rng, "later"))
            (await later.read(driver)).check()
            may_come.set()
            if comes_back and num_recoveries[0]:
                await until(lambda: driver.drivers[lost].loss is None, "the successor serves")
            before = [daemon.num_executes for daemon in made.daemons]
            heard = [Heard(random_request(rng, f"s{number}")) for number in range(9)]
            await asyncio.gather(*(each.read(driver) for each in heard))
            for each in heard:
                each.check()
            if comes_back and num_recoveries[0]:
                assert made.daemons[lost].num_executes > before[lost], "it gets requests again"
        assert not any(scheduler.has_unfinished_requests() for scheduler in made.schedulers)

    asyncio.run(main())


def test_requests_that_a_lost_replica_has_not_begun_go_on_too(replicas):
    """Its thread waits for a step, then for the successor."""
    made, may_come = replicas(2), threading.Event()

    def recover(replica, died):
        assert may_come.wait(PATIENCE_S)
        give_up(died)

    async def main():
        rng = random.Random()
        async with DataParallelDriver(made.opening(recover)) as driver:
            for daemon in made.daemons:
                hold(daemon)
            heard = [Heard(random_request(rng, f"r{number}")) for number in range(8)]
            tasks = [asyncio.create_task(heard[number].read(driver)) for number in (0, 1)]
            await until(lambda: all(d.num_executes for d in made.daemons), "steps on both")
            tasks += [asyncio.create_task(each.read(driver)) for each in heard[2:]]
            await asyncio.sleep(0)
            made.daemons[0].kill()
            made.daemons[1].let_go.set()
            await asyncio.gather(*tasks)
            for each in heard:
                each.check()
            may_come.set()

    asyncio.run(main())


def test_requests_go_on_elsewhere_before_their_readers_ask_for_more(replicas):
    """They end there, too, so nothing waits for a reader: no place, no block, no deadline."""
    made = replicas(2)

    async def main():
        rng = random.Random()
        async with DataParallelDriver(made.opening(lambda _, died: give_up(died))) as driver:
            endless = SamplingParams(ignore_eos=True)
            heard = [Heard(GenerationRequest(f"r{n}", [n, 1], 20, endless)) for n in range(4)]
            made.daemons[0].faults = [Fault(5, "die")]
            streams = [driver.generate(each.request) for each in heard]
            for each, stream in zip(heard, streams, strict=True):
                each.take(await anext(stream))
            await until(lambda: driver.drivers[0].error is not None, "the end of a driver")
            await until(lambda: not made.schedulers[1].has_unfinished_requests(), "their ends")
            admitted = [
                new.req_id for e in made.daemons[1].executes for new in e.scheduled_new_reqs
            ]
            assert sorted(each.split(":")[1] for each in admitted) == ["r0", "r1", "r2", "r3"]
            (await Heard(random_request(rng, "later")).read(driver)).check()
            for each, stream in zip(heard, streams, strict=True):
                async for progress in stream:
                    each.take(progress)
                each.check()

    asyncio.run(main())


class Broken(Exception):
    """A fault of a scheduler."""


def test_requests_of_a_driver_that_ends_go_on_in_the_others(replicas):
    made = replicas(2)

    async def main():
        rng = random.Random()
        async with DataParallelDriver(made.opening(lambda _, died: give_up(died))) as driver:
            heard = [Heard(random_request(rng, f"r{number}")) for number in range(10)]
            tasks = [asyncio.create_task(each.read(driver)) for each in heard]
            await until(lambda: sum(each.num_tokens for each in heard) > 20, "tokens")

            def fail():
                raise Broken

            made.schedulers[0].schedule = fail
            await asyncio.gather(*tasks)
            for each in heard:
                each.check()
            (await Heard(random_request(rng, "later")).read(driver)).check()
            assert isinstance(driver.drivers[0].error, Broken | None)

    asyncio.run(main())


def test_requests_wait_for_the_first_replica_that_comes_back(replicas):
    """Neither has its successor yet. One attempt fails, and the next one finds it."""
    made, may_come, num_attempts = replicas(2), threading.Event(), [0, 0]

    def recover(replica, died):
        rank = died.rank
        num_attempts[rank] += 1
        if num_attempts[rank] == 1:
            raise ReplacementFailed(rank, "no successor yet")
        assert may_come.wait(PATIENCE_S)
        if rank == 0:
            give_up(died)
        follow(made.daemons, rank)
        replica.replace(rank)

    async def main():
        rng = random.Random()
        async with DataParallelDriver(made.opening(recover)) as driver:
            heard = [Heard(random_request(rng, f"r{number}")) for number in range(8)]
            tasks = [asyncio.create_task(each.read(driver)) for each in heard]
            await until(lambda: sum(each.num_tokens for each in heard) > 20, "tokens")
            made.daemons[0].kill()
            await until(lambda: num_attempts[0] == 2, "the second attempt")
            made.daemons[1].kill()
            await until(lambda: num_attempts[1] == 2, "the second attempt")
            tasks.append(asyncio.create_task(Heard(random_request(rng, "later")).read(driver)))
            may_come.set()
            for each in await asyncio.gather(*tasks):
                each.check()

    asyncio.run(main())


def test_a_request_that_kills_daemons_fails_after_some(replicas):
    """The others that ran with it go on."""
    made = replicas(MAX_LOSSES + 1)
    for daemon in made.daemons:
        admit = daemon._admit

        def dying(requests, arrays, daemon=daemon, admit=admit):
            if any("killer" in new.req_id for new in requests):
                daemon._stop.set()
                daemon._depart = lambda *_, **__: None
            admit(requests, arrays)

        daemon._admit = dying

    async def main():
        rng = random.Random()
        async with DataParallelDriver(made.opening(lambda _, died: give_up(died))) as driver:
            heard = [Heard(random_request(rng, f"r{number}")) for number in range(12)]
            tasks = [asyncio.create_task(each.read(driver)) for each in heard]
            await until(lambda: any(each.num_tokens for each in heard), "tokens")
            with pytest.raises(WorkerDied):
                await Heard(GenerationRequest("killer", [1, 2])).read(driver)
            assert sum(daemon.is_running for daemon in made.daemons) == 1
            await asyncio.gather(*tasks)
            for each in heard:
                each.check()

    asyncio.run(main())


def test_all_replicas_ended(replicas):
    made = replicas(2)

    async def main():
        async with DataParallelDriver(made.opening(lambda _, died: give_up(died))) as driver:
            for daemon in made.daemons:
                daemon.kill()
            for name in ("a", "b"):
                with pytest.raises(WorkerDied):
                    await Heard(GenerationRequest(name, [1])).read(driver)

    asyncio.run(main())


def test_a_driver_alone_keeps_its_requests_for_the_successor(replicas):
    made = replicas(1)

    def recover(replica, died):
        follow(made.daemons, 0)
        replica.replace(died.rank)

    async def main():
        rng = random.Random()
        async with AsyncDriver(*made.opening(recover)) as driver:
            heard = [Heard(random_request(rng, f"r{number}")) for number in range(4)]
            tasks = [asyncio.create_task(each.read(driver)) for each in heard]
            await until(lambda: sum(each.num_tokens for each in heard) > 10, "tokens")
            made.daemons[0].kill()
            for each in await asyncio.gather(*tasks):
                each.check()

    asyncio.run(main())
