"""Shared by the tests of weight updates under running requests: a driver whose steps are noted, and
its successor. Tests check that outputs have the same tokens as a reference's."""

from collections import defaultdict
from contextlib import contextmanager

from tests.support.serving import LONG_LEASE, greedy_request, scheduler_limits
from worker_client.driver import Driver
from worker_client.replicas.lockstep import LockstepScheduler
from worker_client.scheduler import Scheduler
from worker_client.worker_group import WorkerGroup

TIMEOUT_S = 20.0
"""The longest silence allowed to a trainer."""


class Watched:
    """A driver whose steps are noted."""

    def __init__(self, group, loaded, **limits):
        self.group, self.admitted = group, defaultdict(int)
        self.versions = defaultdict(list)
        """By request, the version of each token, as results said."""
        self.outputs, self._execute = {}, group.execute_model
        group.execute_model = self._note
        found, num_replicas = scheduler_limits(group, loaded, **limits), len(group.slots.tables)
        own = [Scheduler(found) for _ in range(num_replicas)]
        self.scheduler = own[0] if num_replicas == 1 else LockstepScheduler(own)
        self.driver = Driver(group, self.scheduler, self._listen)

    def _note(self, output):
        future = self._execute(output)
        for new in output.scheduled_new_reqs:
            self.admitted[new.req_id] += 1
        return future

    def _listen(self, result):
        for req_id in result.req_ids:
            self.versions[req_id].append(result.weights_version)

    def add(self, texts, max_tokens, first=0, logprobs=1, **fields):
        """Add a greedy request for each text: r0, r1, ..., from the number `first` on."""
        for number, text in enumerate(texts, first):
            request = greedy_request(f"r{number}", text, max_tokens, logprobs=logprobs, **fields)
            self.driver.add_request(request)

    def step(self, count=1):
        for _ in range(count):
            self.outputs |= {output.req_id: output for output in self.driver.step()}

    def settle(self):
        """Take the results of all steps in flight."""
        while self.driver.num_in_flight:
            self.driver._take_oldest()

    def finish(self):
        self.outputs |= {output.req_id: output for output in self.driver.run()}

    def replace_dead(self, daemons):
        """Restart and replace daemons of a FaultyDaemons that die from now on."""

        def recover(died):
            daemons.restart_dead()
            self.group.replace(died.rank)

        self.driver.recover = recover


@contextmanager
def successor(endpoints, config, loaded):
    """The next driver, which takes the daemons by force: (watched, adopted requests). `loaded` is
    its predecessor's."""
    with WorkerGroup(endpoints, config.parallel, lease=LONG_LEASE) as group:
        group.attach(force=True, keep_requests=True)
        assert group.prepare(config, num_gpu_blocks=256).was_loaded
        watched = Watched(group, loaded)
        adopted, _ = watched.driver.claim(group.adopt_requests())
        assert watched.scheduler.adopt_requests(adopted) == []
        yield watched, adopted
