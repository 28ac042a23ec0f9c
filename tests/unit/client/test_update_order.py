"""The order in which an asyncio program gets the tokens of a step."""

import asyncio
import contextlib

from worker_client.async_driver import AsyncDriver
from worker_client.requests import GenerationRequest, RequestOutput


class MadeUpDriver:
    """Gives each request a token in every step that the test allows."""

    def __init__(self):
        self.scheduler = self
        self.may_step = False
        self._left = {}
        self._tokens = {}

    @property
    def busy(self):
        return self.may_step

    def allow_step(self):
        self.may_step = True

    def generated_tokens(self, req_id, first):
        return self._tokens[req_id][first:] if req_id in self._left else []

    def add_request(self, request):
        self._left[request.id], self._tokens[request.id] = request.max_tokens, []

    def names(self):
        return {req_id.partition(":")[2] for req_id in self._left}

    def abort_request(self, req_id):
        self._left.pop(req_id, None)

    def run(self):
        return ()

    def step(self):
        self.may_step = False
        for req_id in self._left:
            self._tokens[req_id].append(1)
            self._left[req_id] -= 1
        ended = [req_id for req_id, left in self._left.items() if not left]
        for req_id in ended:
            del self._left[req_id]
        return [RequestOutput(e, self._tokens[e], "length", 1, 0, 0, None) for e in ended]


def test_first_tokens_of_a_step_come_before_the_others():
    """Those of a request that ends with it, too, although another one ends in the same step."""
    order = []

    async def main():
        async with AsyncDriver(lambda: contextlib.nullcontext(MadeUpDriver())) as driver:

            async def read(name, max_tokens):
                async for progress in driver.generate(GenerationRequest(name, [1], max_tokens)):
                    order.append((name, progress.token_ids))

            async def step(**lengths):
                """Add requests, run a step, and return who got its tokens."""
                tasks.extend([asyncio.create_task(read(*each)) for each in lengths.items()])
                while not lengths.keys() <= await driver.call(MadeUpDriver.names):
                    await asyncio.sleep(0.001)
                order.clear()
                num_unfinished = sum(not task.done() for task in tasks)
                await driver.call(MadeUpDriver.allow_step)
                async with asyncio.timeout(60):
                    while len(order) < num_unfinished:
                        await asyncio.sleep(0.001)
                return [*order]

            tasks = []
            begun = await step(old=9, ends=2, other=9)
            both = await step(new=9, once=1)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return begun, both

    begun, both = asyncio.run(main())
    assert begun == [("old", [1]), ("ends", [1]), ("other", [1])]
    assert both == [("once", [1]), ("new", [1]), ("ends", [1]), ("old", [1]), ("other", [1])]
