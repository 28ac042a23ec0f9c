"""`python -m benchmarks.observed_driver PLAN`: a driver that benchmarks.kill_timeline starts, kills
and starts again. It adopts what its predecessor has left, generates the requests whose numbers it
reads from standard input, and writes each step's tokens to standard output as soon as it has them,
one line of JSON each. Standard input's end makes it leave."""

import os
import select
import sys
from collections.abc import Sequence

import msgspec
import numpy as np

from rpc_schema.config import WorkerConfig
from rpc_schema.step import NO_TOKEN
from worker_client.driver import Driver
from worker_client.errors import WorkerDied
from worker_client.requests import GenerationRequest, SamplingParams
from worker_client.scheduler import Scheduler, scheduler_limits
from worker_client.scheduler_output import StepResult
from worker_client.worker_group import WorkerGroup

ATTACH_WITHIN_S = 30.0
REPLACE_WITHIN_S = 180.0
IDLE_S = 0.02


class Load(msgspec.Struct, frozen=True):
    """Requests by number: random prompts, greedy tokens, lengths that differ."""

    seed: int
    vocab_size: int
    prompt_len: int
    least_tokens: int
    most_tokens: int

    def prompt(self, number: int) -> list[int]:
        """Return the request's prompt."""
        rng = np.random.default_rng([self.seed, number])
        tokens: list[int] = rng.integers(3, self.vocab_size, self.prompt_len).tolist()
        return tokens

    def num_tokens(self, number: int) -> int:
        """Return how many tokens the request generates."""
        rng = np.random.default_rng([self.seed, number, 1])
        return int(rng.integers(self.least_tokens, self.most_tokens + 1))

    def request(self, number: int) -> GenerationRequest:
        """Return the request."""
        return GenerationRequest(
            str(number),
            self.prompt(number),
            max_tokens=self.num_tokens(number),
            sampling=SamplingParams(ignore_eos=True),
        )


class Plan(msgspec.Struct, frozen=True):
    """What a driver is started with."""

    endpoints: list[str]
    config: WorkerConfig
    load: Load
    open: list[int] = []
    """Requests that were submitted to earlier drivers and have not ended: this one adopts them, or
    begins those that no daemon has."""
    reload: bool = False
    """Load the model again, so that nothing of an earlier run is cached."""


class Told(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line from a driver. The three lists are aligned: a token, its position in its request's
    output, and the number of the request."""

    requests: list[int] = []
    positions: list[int] = []
    tokens: list[int] = []
    replaced_s: dict[str, float] | None = None
    """A lost daemon's successor has joined the group: seconds of each phase
    (ReplacementReport.seconds)."""
    num_adopted: int = 0
    num_kv_tokens_kept: int = 0
    """Of the adopted requests."""


class Teller:
    """Numbers each request's tokens, and writes them to standard output."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._num_told: dict[int, int] = {}

    def adopted(self, number: int, tokens: Sequence[int]) -> None:
        """Tell the tokens that a request has from an earlier driver. Those of steps whose results
        it did not read are among them."""
        tokens = tokens[: self._load.num_tokens(number)]
        self._num_told[number] = len(tokens)
        tell(Told([number] * len(tokens), list(range(len(tokens))), list(tokens)))

    def take(self, result: StepResult) -> None:
        """Tell the tokens of a step, without those past a request's end.

        Raises:
            RuntimeError: a request has failed.
        """
        requests, positions, tokens = [], [], []
        for req_id, token in zip(result.req_ids, result.token_ids, strict=True):
            number = int(req_id)
            if token == NO_TOKEN:
                raise RuntimeError(f"the logits of request {number} are not finite")
            position = self._num_told.get(number, 0)
            if position < self._load.num_tokens(number):
                self._num_told[number] = position + 1
                requests.append(number)
                positions.append(position)
                tokens.append(int(token))
        if tokens:
            tell(Told(requests, positions, tokens))


def tell(told: Told) -> None:
    """Write a line, at once."""
    left = memoryview(msgspec.json.encode(told) + b"\n")
    while left:
        left = left[os.write(1, left) :]


def read_numbers(wait_s: float) -> list[int] | None:
    """Return the numbers that have arrived on standard input; None at its end."""
    if not select.select([0], [], [], wait_s)[0]:
        return []
    data = os.read(0, 1 << 16)
    while data and not data.endswith(b"\n"):
        data += os.read(0, 1 << 16)
    return [int(word) for word in data.split()] if data else None


def adopt(
    group: WorkerGroup, driver: Driver, scheduler: Scheduler, teller: Teller, plan: Plan
) -> None:
    """Continue the open requests; begin those that no daemon has."""
    wanted = set(plan.open)
    found = {int(each.req_id): each for each in group.adopt_requests()}
    found = {number: each for number, each in found.items() if number in wanted}
    scheduler.adopt_requests(list(found.values()))
    kept = sum(each.num_computed_tokens for each in found.values())
    tell(Told(num_adopted=len(found), num_kv_tokens_kept=kept))
    for number, each in found.items():
        teller.adopted(number, each.token_ids[each.num_prompt_tokens :].tolist())
    for number in sorted(wanted - found.keys()):
        driver.add_request(plan.load.request(number))


def drive(plan: Plan) -> None:
    """Serve until standard input ends."""
    with WorkerGroup(plan.endpoints, plan.config.parallel) as group:

        def recover(died: WorkerDied) -> None:
            report = group.replace(died.rank, within_s=REPLACE_WITHIN_S)
            tell(Told(replaced_s=report.seconds))

        group.attach(keep_requests=True, wait_for_lease_s=ATTACH_WITHIN_S)
        loaded = group.prepare(plan.config, reload=plan.reload)
        scheduler = Scheduler(scheduler_limits(loaded, plan.config))
        teller = Teller(plan.load)
        driver = Driver(group, scheduler, teller.take, recover=recover)
        adopt(group, driver, scheduler, teller, plan)
        while (numbers := read_numbers(0.0 if driver.busy else IDLE_S)) is not None:
            for number in numbers:
                driver.add_request(plan.load.request(number))
            if driver.busy:
                driver.step()
            else:
                driver.look()
        for _ in driver.run():
            pass
        group.detach()


if __name__ == "__main__":
    drive(msgspec.json.decode(sys.argv[1], type=Plan))
