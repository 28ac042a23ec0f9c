"""Updates of adapters' weights while their requests run: which steps sample with the new ones, and
what becomes of the requests."""

from worker_client.group.loras import GroupAdapter
from worker_client.group.running import RunningRequests
from worker_client.requests import RequestOutput
from worker_client.scheduler.open_steps import OpenSteps
from worker_client.scheduler.request import Request
from worker_client.scheduler.request_exits import RequestExits
from worker_client.scheduler.request_queues import RequestQueues
from worker_client.scheduler.sampling_weights import SamplingWeights


class AdapterUpdates:
    """The updates that steps in flight do not have yet. Owned by a scheduler."""

    def __init__(
        self,
        weights: SamplingWeights,
        steps: OpenSteps,
        queues: RequestQueues,
        exits: RequestExits,
    ) -> None:
        self._weights = weights
        self._steps = steps
        self._queues = queues
        self._exits = exits
        self.aborting: list[Request] = []
        """Requests that an update ends once no step in flight names them. Others may read it."""

    def begin(self, adapter: GroupAdapter, running: RunningRequests, num_sent: int) -> None:
        """Compute an adapter's requests with its new weights; see AdaptingScheduler. num_sent:
        steps in flight that were sent before the update."""
        first = self._steps.first_after(num_sent)
        users = self._weights.change(adapter, first, self._queues.unfinished.values())
        if running == "keep":
            return
        for request in users:
            if running != "abort":
                if request.is_running:
                    self._exits.preempt(request)
            elif request.is_running or len(request.tokens) > request.num_prompt_tokens:
                self._exits.preempt(request)
                self._queues.hold(request)
                self.aborting.append(request)

    def follow(self) -> list[RequestOutput]:
        """Note which weights have sampled the oldest step in flight, whose result has come. Return
        the requests that an update ends."""
        if self._steps.numbers and self._weights.changes:
            unfinished = self._queues.unfinished.values()
            self._weights.follow_adapters(self._steps.oldest, unfinished)
        return self.end_aborting()

    def end_aborting(self) -> list[RequestOutput]:
        """End the requests that updates abort, and return them."""
        ending, self.aborting = self.aborting, []
        find = self._queues.unfinished.get
        return [self._exits.finish(each, "abort") for each in ending if find(each.id) is each]
