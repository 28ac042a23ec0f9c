"""Shared by the fault tests: requests with transformers' tokens, a group that records its failures,
and a check that daemons still serve."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.checkpoints import Checkpoint, NearTie, prompts
from tests.support.serving import connect, generate, greedy_request, worker_config
from worker_client.errors import StepFailed
from worker_client.group.outcomes import StepFuture
from worker_client.requests import GenerationRequest
from worker_client.scheduler_output import SchedulerOutput, StepResult
from worker_client.steps.cached_blocks import CachedBlocks
from worker_client.worker_group import WorkerGroup


@dataclass(frozen=True)
class Cases:
    """Greedy requests and their expected tokens."""

    requests: list[GenerationRequest]
    expected: dict[str, list[int]]


def random_cases(checkpoint: Checkpoint, seed: int, count: int = 5, max_tokens: int = 16) -> Cases:
    """Return requests with random prompts; those that rounding could change are left out."""
    requests: list[GenerationRequest] = []
    expected: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts(seed, [3 + 7 * i % 41 for i in range(4 * count)])):
        name = f"{seed}-{index}"
        try:
            expected[name] = checkpoint.greedy(prompt.tolist(), max_tokens)
        except NearTie:
            continue
        requests.append(greedy_request(name, prompt, max_tokens))
        if len(requests) == count:
            return Cases(requests, expected)
    raise AssertionError("too few prompts have a clear continuation: choose another seed")


@dataclass
class RecordingFuture:
    future: StepFuture
    failures: list[StepFailed]

    def result(self, timeout_s: float | None = None) -> StepResult:
        try:
            return self.future.result(timeout_s)
        except StepFailed as error:
            self.failures.append(error)
            raise


class RecordingGroup:
    """A group that records the failures that it raised."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self.failures: list[StepFailed] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._group, name)

    def execute_model(self, output: SchedulerOutput) -> RecordingFuture:
        return RecordingFuture(self._group.execute_model(output), self.failures)

    @property
    def prefixes(self) -> "RecordingPrefixes":
        return RecordingPrefixes(self._group)


@dataclass
class RecordingPrefixes:
    group: WorkerGroup

    def note(
        self, tag: bytes, blocks: CachedBlocks, after: RecordingFuture, **options: Any
    ) -> bool:
        return self.group.prefixes.note(tag, blocks, after.future, **options)

    def get(self, tag: bytes) -> CachedBlocks:
        return self.group.prefixes.get(tag)


def assert_serves(
    endpoints: Sequence[str], checkpoint: Checkpoint, pp: int = 1, tp: int = 1
) -> None:
    """Check that a new driver can load the model, regardless of earlier state, and gets the right
    tokens."""
    cases = random_cases(checkpoint, seed=77, count=2, max_tokens=6)
    config = worker_config(checkpoint.path, pp, tp)
    with connect(endpoints, config) as (group, loaded):
        assert generate(group, loaded, cases.requests).tokens == cases.expected
