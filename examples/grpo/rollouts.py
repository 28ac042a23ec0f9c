"""`python -m examples.grpo.rollouts DIRECTORY`: the driver. It generates the samples of a run from
its last border on, with the policies that the trainer adds, and hands them to it."""

import sys
import time
from pathlib import Path
from typing import Final

import numpy as np

from examples.grpo.run_files import (
    GROUP_SIZE,
    GROUPS,
    MAX_TOKENS,
    SEGMENT_TOKENS,
    SPAN,
    Border,
    RunFiles,
    Sample,
    Settings,
)
from examples.grpo.scheduler import SegmentScheduler
from examples.grpo.task import has_ended, make_cohort, reward_of
from rpc_schema.config import (
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    WorkerConfig,
)
from rpc_schema.weight_transfer import DiskEngine, DiskSource
from worker_client.driver import Driver
from worker_client.errors import WeightsNotWhole, WorkerDied
from worker_client.group.running import RunningRequests
from worker_client.requests import GenerationRequest, SamplingParams
from worker_client.scheduler import scheduler_limits
from worker_client.wire.worker_client import TensorList
from worker_client.worker_group import WorkerGroup

RUNNING: Final[RunningRequests] = "drop"
"""Samples in flight are computed again by each new policy, from their tokens."""
MAX_STARTUP_S: Final = 60.0
POLL_S: Final = 0.005


class Rollouts:
    """The driver's side of a run. It has lost nothing if it dies: its successor begins with the
    last border."""

    def __init__(self, files: RunFiles, group: WorkerGroup, config: WorkerConfig) -> None:
        """group: attached to daemons, which may hold weights and requests of a predecessor."""
        self._files = files
        self._num_updates = files.settings.num_updates
        self._group = group
        self._scheduler = SegmentScheduler(scheduler_limits(group.prepare(config), config))
        self._driver = Driver(group, self._scheduler, recover=lambda died: group.replace(died.rank))
        self._policy_of: dict[int, int] = {}
        """By number of the weights' version: they count on when a policy is sent again."""
        border = files.read_border()
        self._segment = border.segment
        self._samples: dict[str, Sample] = {}
        self._add(border.samples)
        self._await_policy()  # the trainer may have died too

    def run(self) -> None:
        """Generate until the last batch is complete."""
        while self._segment < self._num_updates + SPAN - 1:
            if self._segment < self._num_updates:
                self._add(make_cohort(self._segment))
            self._generate()
            self._close()
            self._await_policy()

    @property
    def _policy_number(self) -> int:
        """The policy of the present segment. Its batch was complete before the last segment began,
        in which the trainer has learned from it."""
        return max(0, min(self._segment, self._num_updates) - SPAN)

    def _add(self, samples: list[Sample]) -> None:
        """Let samples go on from the tokens that they have."""
        for sample in samples:
            self._samples[sample.req_id] = sample
            if has_ended(sample):
                continue
            request = GenerationRequest(
                sample.req_id,
                np.array([*sample.prompt, *sample.token_ids], np.int32),
                max_tokens=MAX_TOKENS - len(sample.token_ids),
                sampling=SamplingParams(temperature=1.0, seed=sample.seed, full_logprobs=True),
            )
            self._driver.add_request(request)

    def _generate(self) -> None:
        """Serve one segment, whatever dies."""
        self._scheduler.open_segment(SEGMENT_TOKENS)
        while not self._scheduler.is_at_border:
            try:
                self._driver.step()
            except WeightsNotWhole:  # a daemon was replaced, and has loaded the first policy
                self._use(self._policy_number)

    def _close(self) -> None:
        """Note a border, once the cohort that ends there is a batch."""
        for req_id, gain in list(self._scheduler.close_segment()):
            sample = self._samples[req_id]
            sample.token_ids += gain.token_ids
            sample.logprobs += gain.logprobs
            sample.policies += [self._policy_of[version] for version in gain.versions]
            if has_ended(sample):
                sample.reward = reward_of(sample)
                self._driver.abort_request(req_id)
        self._segment += 1
        complete = self._segment - SPAN
        if complete >= 0:
            cohort = [each for each in self._samples.values() if each.cohort == complete]
            self._files.write_batch(complete, cohort)
            for sample in cohort:
                del self._samples[sample.req_id]
        self._files.write_border(Border(self._segment, list(self._samples.values())))

    def _await_policy(self) -> None:
        """Go on with the policy of the segment that begins; the requests in flight wait for it. An
        update comes at each border, even if the policy stays: so all segments begin alike."""
        number = self._policy_number
        while not self._files.policy(number).exists():
            self._driver.look()
            time.sleep(POLL_S)
        self._use(number)

    def _use(self, number: int) -> None:
        """Give the workers a policy, at one step number on all ranks. A daemon that dies meanwhile
        is replaced, and the update begins again."""
        weights, source = self._group.weights, DiskSource(model=str(self._files.policy(number)))
        while True:
            try:
                weights.init_transfer_engine(DiskEngine())
                weights.start_update(running=RUNNING)
                weights.update(TensorList(), source)
                version = weights.finish_update()[0].version
                break
            except WorkerDied as died:
                self._group.replace(died.rank)
        self._policy_of[version] = number


def make_config(files: RunFiles, settings: Settings) -> WorkerConfig:
    """Return the workers' configuration: each stage has room for all samples in flight."""
    num_samples = SPAN * GROUPS * GROUP_SIZE
    num_stages = len(settings.endpoints)
    return WorkerConfig(
        parallel=ParallelConfig(pipeline_parallel_size=num_stages),
        model=ModelConfig(model=str(files.policy(0)), dtype="float32"),
        scheduler=SchedulerConfig(
            max_num_seqs=num_samples, max_num_batched_tokens=2 * num_samples * MAX_TOKENS
        ),
        cache=CacheConfig(kv_cache_memory_bytes=32 << 20),
    )


def main() -> None:
    """Generate what is left of a run."""
    files = RunFiles(Path(sys.argv[1]))
    settings = files.settings
    config = make_config(files, settings)
    with WorkerGroup(settings.endpoints, config.parallel) as group:
        group.attach(force=True, wait_s=MAX_STARTUP_S)  # if a predecessor has died, it has a lease
        Rollouts(files, group, config).run()
        group.detach()


if __name__ == "__main__":
    main()
