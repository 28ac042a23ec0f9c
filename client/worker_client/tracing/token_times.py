"""Times between a request's tokens."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence

from worker_client.scheduler_output import StepResult


class TokenTimes:
    """Notes when tokens come. Belongs to the driver's thread, whose steps wait for note(): it only
    keeps references."""

    def __init__(self) -> None:
        self._results: list[tuple[float, Sequence[str]]] = []

    def note(self, result: StepResult) -> None:
        """Note the tokens of a step."""
        self._results.append((time.monotonic(), result.req_ids))

    def gaps_s(self, num_tokens: Mapping[str, int]) -> list[float]:
        """Return the time between each two results with consecutive tokens of a request, in
        seconds: several tokens of one step have come at once. num_tokens: of each request that
        counts; what came after its end does not."""
        left = dict(num_tokens)
        last: dict[str, float] = {}
        gaps: list[float] = []
        for at, req_ids in self._results:
            for req_id, count in Counter(req_ids).items():
                if left.get(req_id, 0) > 0:
                    left[req_id] -= count
                    if req_id in last:
                        gaps.append(at - last[req_id])
                    last[req_id] = at
        return gaps
