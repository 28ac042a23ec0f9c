"""Requests of an asyncio program: streamed, aborted, bounded, refused; served through faults."""

import asyncio
import contextlib
import threading
import time
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from tests.support.checkpoints import decisive_prompts
from tests.support.flat_requests import flat_request, path_of
from tests.support.forked_daemons import ForkedDaemons
from tests.support.serving import connect, greedy_request, kill_and_wait, worker_config
from tests.support.waiting import PATIENCE_S
from worker_client.async_driver import AsyncDriver
from worker_client.driver import Driver, give_up
from worker_client.errors import (
    DriverClosed,
    InvalidSchedulerOutput,
    NothingListens,
    RequestError,
    WorkerDied,
)
from worker_client.inputs.host_tensor import HostTensor
from worker_client.inputs.prompt_embeds import embeds_extension
from worker_client.requests import GenerationRequest, SamplingParams
from worker_client.scheduler import Scheduler, scheduler_limits

MAX_TOKENS = 12
LONG = 120
"""Tokens of requests that something happens to before their end."""


@pytest.fixture(scope="module")
def model(checkpoint):
    return checkpoint("Qwen3ForCausalLM", seed=67)


@pytest.fixture(scope="module")
def prompts(model):
    return decisive_prompts(model, 68, [5, 9, 17, 4, 11, 7], MAX_TOKENS)


class PacedDriver(Driver):
    """A driver that calls `before_step`."""

    before_step = staticmethod(lambda: None)

    def step(self):
        self.before_step()
        return super().step()


class Pace:
    """Holds a driver after some steps, so that its requests are unfinished until it goes on."""

    def __init__(self, num_steps):
        self._left = num_steps
        self._changed = threading.Condition()
        self._is_held = self._is_over = False

    def before_step(self):
        with self._changed:
            self._left -= 1
            self._is_held = self._left < 0
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._is_held or self._is_over, 60)

    async def held(self):
        """Wait until the driver is held."""

        def wait():
            with self._changed:
                assert self._changed.wait_for(lambda: self._is_held, 60)

        await asyncio.to_thread(wait)

    def go_on(self):
        """Let the driver go on from here."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


class Opened:
    """Opens drivers, and keeps the newest for inspection."""

    def __init__(self, endpoints, config, recover=lambda group, died: give_up(died)):
        self.endpoints = endpoints
        self.config = config
        self.recover = recover
        self.driver = None
        self.scheduler = Scheduler
        self.before_step = lambda: None

    @contextlib.contextmanager
    def __call__(self):
        with connect(self.endpoints, self.config, reload=False) as (group, loaded):
            scheduler = self.scheduler(scheduler_limits(loaded, self.config))
            recover = lambda died: self.recover(group, died)  # noqa: E731
            self.driver = PacedDriver(group, scheduler, recover=recover)
            self.driver.before_step = self.before_step
            yield self.driver


@pytest.fixture
def opened(daemons, model):
    endpoints, config = daemons.endpoints(2), worker_config(model.path, 2)
    with connect(endpoints, config):
        pass
    return Opened(endpoints, config)


async def collect(driver, request):
    """The request's outputs by id, and the tokens of each RequestProgress."""
    outputs, pieces = {}, {}
    async for progress in driver.generate(request):
        pieces.setdefault(progress.req_id, []).append(progress.token_ids)
        if progress.output is not None:
            outputs[progress.req_id] = progress.output
    for name, output in outputs.items():
        assert [token for piece in pieces[name] for token in piece] == output.token_ids
    return outputs, pieces


def greedy(prompts, max_tokens=MAX_TOKENS):
    return [greedy_request(f"r{n}", prompt, max_tokens) for n, prompt in enumerate(prompts)]


def test_tokens_come_one_after_the_other_and_are_those_of_transformers(opened, model, prompts):
    samples = GenerationRequest(
        "many",
        prompts[0],
        MAX_TOKENS,
        sampling=SamplingParams(temperature=1.0, seed=5, n=3),
    )

    async def main():
        loop = asyncio.get_running_loop()
        # A step waits until the readers have what the one before it brought.
        opened.before_step = lambda: asyncio.run_coroutine_threadsafe(
            asyncio.sleep(0), loop
        ).result()
        async with AsyncDriver(opened) as driver:
            return await asyncio.gather(
                *(collect(driver, request) for request in [*greedy(prompts), samples])
            )

    *found, (many, _) = asyncio.run(main())
    for number, (prompt, (outputs, pieces)) in enumerate(zip(prompts, found, strict=True)):
        assert outputs[f"r{number}"].token_ids == model.greedy(prompt, MAX_TOKENS)
        assert len(pieces[f"r{number}"]) > MAX_TOKENS // 2, "they were not streamed"
    assert [many[f"many#{index}"].index for index in range(3)] == [0, 1, 2]


def test_a_reader_that_leaves_aborts_its_request_alone(opened, model, prompts):
    pace = Pace(8)
    opened.before_step = pace.before_step

    async def leave(driver, request):
        async with contextlib.aclosing(driver.generate(request)) as stream:
            async for progress in stream:
                assert progress.output is None
                await pace.held()
                return

    async def main():
        long, *others = greedy(prompts, LONG)[:1] + greedy(prompts)[1:]
        async with AsyncDriver(opened) as driver:
            neighbors = [asyncio.create_task(collect(driver, each)) for each in others]
            stopped = asyncio.create_task(collect(driver, greedy_request("c", prompts[0], LONG)))
            await leave(driver, long)
            stopped.cancel()
            with pytest.raises(asyncio.CancelledError):
                await stopped
            pace.go_on()
            again = await collect(driver, greedy([prompts[0]])[0])  # by the same id
            found = await asyncio.gather(*neighbors)
            assert not opened.driver.scheduler.has_unfinished_requests()
            return [again, *found]

    for number, (outputs, _) in enumerate(asyncio.run(main())):
        assert outputs[f"r{number}"].token_ids == model.greedy(prompts[number], MAX_TOKENS)


def test_log_probabilities_come_with_their_tokens(opened, prompts):
    """Those of the prompt come with the first token. All pieces together are those of the output,
    and a request beside it that asks for none gets none."""
    options = {"temperature": 1.0, "seed": 5, "n": 2, "logprobs": 2, "prompt_logprobs": 1}
    asked = GenerationRequest("a", prompts[0], MAX_TOKENS, sampling=SamplingParams(**options))

    async def read(driver, request):
        pieces = {}
        async for progress in driver.generate(request):
            pieces.setdefault(progress.req_id, []).append(progress)
        return pieces

    async def main():
        loop = asyncio.get_running_loop()
        opened.before_step = lambda: asyncio.run_coroutine_threadsafe(
            asyncio.sleep(0), loop
        ).result()
        async with AsyncDriver(opened) as driver:
            plain, slow = greedy(prompts)[:1], []
            async for progress in driver.generate(asked):  # a slow reader gets them joined
                slow.append(progress)
                await asyncio.sleep(0.01)
            return await asyncio.gather(*(read(driver, each) for each in [asked, *plain])), slow

    (found, others), slow = asyncio.run(main())
    assert all(piece.reports is None for piece in others["r0"])
    joined = {name: [each for each in slow if each.req_id == name] for name in found}
    for pieces in (*found.items(), *joined.items()):
        name, parts = pieces
        output = parts[-1].output
        shown = [entry for part in parts for entry in part.reports.logprobs]
        assert [each.token_ids[0] for each in shown] == output.token_ids
        assert all(len(part.token_ids) == len(part.reports.logprobs) for part in parts)
        assert shown == output.logprobs
        prompt_reports = [part.reports.prompt_logprobs for part in parts]
        assert prompt_reports[0] == output.prompt_logprobs
        assert not any(prompt_reports[1:])
        assert (output.prompt_logprobs is None) == (name != "a#0")
    assert all(len(parts) > MAX_TOKENS // 2 for parts in found.values()), "they were not streamed"


def test_a_trace_is_streamed_as_its_log_probabilities_come(opened, prompts):
    """In chunks; then what is generated behind it. The same tokens and numbers as the output's."""
    given = tuple(int(token) for token in prompts[1])
    asked = GenerationRequest(
        "a",
        prompts[0],
        len(given) + 4,
        output_token_ids=given,
        sampling=SamplingParams(full_logprobs=True, ignore_eos=True),
    )

    async def main():
        async with AsyncDriver(opened) as driver:
            return [progress async for progress in driver.generate(asked)]

    parts = asyncio.run(main())
    output = parts[-1].output
    assert output.token_ids[: len(given)] == [*given]
    assert [token for part in parts for token in part.token_ids] == output.token_ids
    assert all(len(part.token_ids) == len(part.reports.full_logprobs) for part in parts)
    assert [both for part in parts for both in part.reports.full_logprobs] == output.full_logprobs
    assert len(output.full_logprobs) == len(given) + 4


def test_calls_run_on_the_drivers_thread_between_steps(opened, model, prompts):
    """An idle driver is woken, an error is its caller's, and a driver that has ended takes none."""
    pace = Pace(3)
    opened.before_step = pace.before_step

    def fail(_):
        raise KeyError("from a call")

    async def main():
        async with AsyncDriver(opened) as driver:
            name, status = await driver.call(
                lambda own: (threading.current_thread().name, own.group.get_status())
            )
            assert (name, len(status)) == ("driver", 2)
            reading = asyncio.create_task(collect(driver, greedy(prompts)[0]))
            await pace.held()
            with_error = asyncio.create_task(driver.call(fail))
            abandoned = asyncio.create_task(driver.call(lambda _: pytest.fail("it was canceled")))
            await asyncio.sleep(0)
            abandoned.cancel()
            pace.go_on()
            with pytest.raises(KeyError, match="from a call"):
                await with_error
            outputs, _ = await reading
            ending = asyncio.create_task(driver.wait_ended())
        with pytest.raises(DriverClosed):
            await driver.call(lambda own: own)
        assert isinstance(await ending, DriverClosed)
        return outputs

    outputs = asyncio.run(main())
    assert outputs["r0"].token_ids == model.greedy(prompts[0], MAX_TOKENS)


def test_wrong_requests_are_refused_beside_others(opened, model, prompts):
    async def main():
        async with AsyncDriver(opened) as driver:
            good = asyncio.create_task(collect(driver, greedy(prompts)[0]))
            await asyncio.sleep(0)
            for wrong, match in [
                (greedy_request("w", prompts[0], 0), "max_tokens"),
                (greedy_request("w", [10**6], 3), "prompt"),
            ]:
                with pytest.raises(RequestError, match=match):
                    await collect(driver, wrong)
            same = await collect(driver, greedy(prompts)[0])
            assert same[0]["r0"].token_ids == model.greedy(prompts[0], MAX_TOKENS)
            name = "x" * 400
            longest, _ = await collect(driver, greedy_request(name, prompts[0], 2))
            assert longest[name].req_id == name
            return await good

    outputs, _ = asyncio.run(main())
    assert outputs["r0"].token_ids == model.greedy(prompts[0], MAX_TOKENS)


WRONG = [
    *({"prompt": value} for value in ("text", 5, None, np.array([1.5]), [[1]], [True])),
    *({"temperature": "1"}, {"stop": (1,)}, {"lora": 5}, {"n": None}, {"max_tokens": 1.5}),
    *({"id": None}, {"id": "\ud800"}, {"seed": "5"}, {"logit_bias": [1]}, {"features": 5}),
    *({"bad_words": (1,)}, {"pooling": "embed"}, {"structured_outputs": {"regex": "a"}}),
]


def test_a_wrongly_typed_request_ends_alone(opened, model, prompts):
    async def main():
        async with AsyncDriver(opened) as driver:
            good = [asyncio.create_task(collect(driver, each)) for each in greedy(prompts)]
            await asyncio.sleep(0)
            for fields in WRONG:
                own = {"id": "w", "prompt": [1, 2], "max_tokens": 3, **fields}
                with pytest.raises(RequestError) as refused:
                    await collect(driver, flat_request(**own))
                assert [refused.value.field] == [path_of(field) for field in fields]
            lacking = embeds_extension(HostTensor.from_array(np.ones((2, 64), np.float32)), ())
            with pytest.raises(RequestError, match="no such upload"):  # its steps would fail
                await collect(driver, GenerationRequest("w", [1, 2, 3], features=(lacking,)))
            for nothing in (None, 5, "text", {}):
                with pytest.raises(RequestError):
                    await collect(driver, nothing)
            listed, _ = await collect(driver, greedy(prompts)[0])
            assert driver.error is None
            return [listed, *(outputs for outputs, _ in await asyncio.gather(*good))]

    listed, *found = asyncio.run(main())
    for number, outputs in enumerate(found):
        assert outputs[f"r{number}"].token_ids == model.greedy(prompts[number], MAX_TOKENS)
    assert listed["r0"].token_ids == found[0]["r0"].token_ids


class Faulty(Scheduler):
    """A scheduler with faults for requests of some lengths of prompt."""

    def add_request(self, request):
        super().add_request(request)
        if len(request.prompt) == 1:
            raise MemoryError

    def schedule(self):
        output = super().schedule()
        for new in () if output is None else output.scheduled_new_reqs:
            if len(new.token_ids) == 2:  # what no message can carry
                bad = msgspec.structs.replace(new, note="text")
                rest = [each for each in output.scheduled_new_reqs if each is not new]
                return replace(output, scheduled_new_reqs=[bad, *rest])
        return output


def test_faults_of_a_scheduler_end_the_requests_that_they_concern(opened, model, prompts):
    opened.scheduler = Faulty

    async def main():
        async with AsyncDriver(opened) as driver:
            good = [asyncio.create_task(collect(driver, each)) for each in greedy(prompts)]
            await asyncio.sleep(0)
            with pytest.raises(RequestError) as refused:
                await collect(driver, greedy_request("w", [1], 3))
            assert isinstance(refused.value.__cause__, MemoryError)
            for _ in range(5):
                with pytest.raises(InvalidSchedulerOutput, match="note"):
                    await collect(driver, greedy_request("w", [1, 2], 3))
            found = await asyncio.gather(*good)
            assert not opened.driver.busy
            return found

    for number, (outputs, _) in enumerate(asyncio.run(main())):
        assert outputs[f"r{number}"].token_ids == model.greedy(prompts[number], MAX_TOKENS)


def test_requests_beyond_the_bound_wait(opened, prompts):
    pace = Pace(0)
    opened.before_step = pace.before_step

    async def let_go():
        await pace.held()
        pace.go_on()

    async def main():
        async with AsyncDriver(opened, max_requests=2) as driver:
            requests = (collect(driver, request) for request in greedy(prompts))
            await asyncio.gather(*requests, let_go())  # it begins when the first two are there

    asyncio.run(main())
    times = list(opened.driver.timings.values())
    assert len(times) == len(prompts)
    # They need not share a step: on two stages they may take turns.
    assert max(sum(o.added <= t.added < o.finished for o in times) for t in times) == 2


def test_closing_ends_what_is_unfinished(opened, model, prompts):
    pace = Pace(3)
    opened.before_step = pace.before_step

    async def main():
        async with AsyncDriver(opened) as driver:
            unfinished = driver.generate(greedy(prompts, LONG)[0])
            await anext(unfinished)
            asyncio.get_running_loop().call_soon(pace.go_on)  # while the driver is closed
        with pytest.raises(DriverClosed):
            async for progress in unfinished:
                assert progress.output is None
        with pytest.raises(DriverClosed):
            await collect(driver, greedy(prompts)[1])

    asyncio.run(main())
    with connect(opened.endpoints, opened.config, reload=False) as (group, _):
        assert [status.num_kv_blocks_held for status in group.get_status()] == [0, 0]


def test_a_group_that_cannot_be_opened(opened, tmp_path):
    @contextlib.contextmanager
    def slow():
        time.sleep(0.3)
        with opened() as driver:
            yield driver

    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05), AsyncDriver(slow):
                pass
        missing = Opened([f"ipc://{tmp_path}/w{rank}" for rank in range(2)], opened.config)
        with pytest.raises(NothingListens):
            async with AsyncDriver(missing):
                pass

    asyncio.run(main())
    for thread in threading.enumerate():
        if thread.name == "driver":
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "a driver that was given up goes on"


@pytest.mark.parametrize("replaces", [True, False])
def test_a_daemon_that_is_killed(model_root, model, prompts, replaces):
    """Replaced: no request notices, and while there is none it is replaced at once, or later if it
    has no successor yet. Else all of them end with the reason, and later ones too."""
    attempts = []
    with ForkedDaemons(["cpu", "cpu"], model_root) as daemons:

        def recover(group, died):
            attempts.append(died.rank)
            if len(attempts) == 2:
                group.replace(died.rank, within_s=0.2)
            daemons.restart_dead()
            group.replace(died.rank)

        async def kill_an_idle_one(driver):
            kill_and_wait(daemons.pids[0])
            async with asyncio.timeout(PATIENCE_S):
                while len(attempts) < 3:
                    await asyncio.sleep(0.01)
            found, _ = await collect(driver, greedy_request("meanwhile", prompts[1], MAX_TOKENS))
            assert found["meanwhile"].token_ids == model.greedy(prompts[1], MAX_TOKENS)
            assert attempts == [1, 0, 0]

        config = worker_config(model.path, 2)
        options = (recover,) if replaces else ()
        opened, pace = Opened(daemons.endpoints, config, *options), Pace(4)
        opened.before_step = pace.before_step

        async def kill(driver):
            async for progress in driver.generate(greedy_request("first", prompts[0], LONG)):
                if progress.token_ids:
                    await pace.held()
                    kill_and_wait(daemons.pids[1])
                    pace.go_on()
                    return

        async def main():
            async with AsyncDriver(opened) as driver:
                tasks = [asyncio.create_task(collect(driver, each)) for each in greedy(prompts)]
                await kill(driver)
                results = await asyncio.gather(*tasks, return_exceptions=True)
                assert (driver.error is None) == replaces
                if replaces:
                    await kill_an_idle_one(driver)
                return [
                    *results,
                    *await asyncio.gather(
                        collect(driver, greedy_request("last", prompts[0], MAX_TOKENS)),
                        return_exceptions=True,
                    ),
                ]

        *found, last = asyncio.run(main())
        if replaces:
            for number, (outputs, _) in enumerate(found):
                assert outputs[f"r{number}"].token_ids == model.greedy(prompts[number], MAX_TOKENS)
            assert last[0]["last"].finish_reason == "length"
        else:
            assert all(isinstance(each, (WorkerDied, tuple)) for each in [*found, last])
            assert isinstance(last, WorkerDied)


async def paused_after(driver, pace):
    """Pause a driver while its requests are unfinished."""
    await pace.held()
    pausing = asyncio.ensure_future(driver.pause())
    await asyncio.sleep(0)
    pace.go_on()
    await pausing


def test_pause_holds_requests_on_all_ranks_until_they_go_on(opened, model, prompts):
    """The same tokens as without: of requests that run, of one that comes meanwhile, and over an
    update to equal weights that keeps them."""
    first, late = greedy(prompts[:3]), greedy_request("late", prompts[3], MAX_TOKENS)
    pace = Pace(6)
    opened.before_step = pace.before_step

    async def main():
        async with AsyncDriver(opened) as driver:

            async def steps():
                statuses = await driver.call(lambda inner: inner.group.get_status())
                return [status.last_seq for status in statuses]

            running = [asyncio.ensure_future(collect(driver, each)) for each in first]
            await paused_after(driver, pace)
            last = max(await steps())
            running.append(asyncio.ensure_future(collect(driver, late)))
            await asyncio.sleep(0.3)
            assert opened.driver.is_paused and not opened.driver.num_in_flight
            assert not any(each.done() for each in running)
            while (found := await steps()) != [last] * 2:  # a rank that owes no outcome may follow
                assert max(found) <= last
            await driver.call(lambda inner: inner.group.weights.reload(running="keep"))
            await driver.resume()
            return [await each for each in running]

    outputs = {name: each for found, _ in asyncio.run(main()) for name, each in found.items()}
    for request in (*first, late):
        found = outputs[request.id]
        assert found.token_ids == model.greedy(request.prompt.tolist(), MAX_TOKENS)
        assert len(found.weights_versions) == (1 if request is late else 2)
    assert opened.driver.num_failures == 0


def test_driver_that_is_closed_while_paused_ends_its_requests(opened, prompts):
    pace = Pace(6)
    opened.before_step = pace.before_step

    async def main():
        async with AsyncDriver(opened) as driver:
            running = asyncio.ensure_future(collect(driver, greedy(prompts)[0]))
            await paused_after(driver, pace)
        with pytest.raises(DriverClosed):
            await running

    asyncio.run(main())
    with connect(opened.endpoints, opened.config, reload=False) as (group, _):
        assert [status.num_requests for status in group.get_status()] == [0, 0]


def test_requests_are_held_while_the_weights_are_not_whole(opened, model, prompts):
    pace = Pace(6)
    opened.before_step = pace.before_step

    async def main():
        async with AsyncDriver(opened) as driver:
            running = asyncio.ensure_future(collect(driver, greedy(prompts)[0]))
            await paused_after(driver, pace)
            await driver.call(lambda inner: inner.group.weights.start_update(running="keep"))
            await driver.resume()
            await asyncio.sleep(0.3)
            assert driver.error is None and not running.done()
            await driver.call(lambda inner: inner.group.weights.reload(running="keep"))
            return await running

    outputs, _ = asyncio.run(main())
    assert outputs["r0"].token_ids == model.greedy(prompts[0].tolist(), MAX_TOKENS)
