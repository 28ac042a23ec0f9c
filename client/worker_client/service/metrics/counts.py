"""Counts of a server's requests and answers. Belong to its event loop."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from worker_client.errors import RequestError
from worker_client.request_stream import RequestProgress
from worker_client.requests import GenerationRequest, RequestOutput, forked
from worker_host.metrics import HistogramCounts

TOKEN_BOUNDS_S: Final = (
    *(0.002, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2),
    *(0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 40.0),
)
FIRST_BOUNDS_S: Final = (
    *(0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
    *(20.0, 60.0, 300.0, 1200.0),
)
REQUEST_BOUNDS_S: Final = (
    *(0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0),
    *(900.0, 3600.0),
)
LENGTH_BOUNDS: Final = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))
"""1 to 500,000 tokens."""
SAMPLES_BOUNDS: Final = (1, 2, 5, 10, 20)


class ServiceCounts:
    """Counts since the start."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter(
            dict.fromkeys(("stop", "length", "abort", "error"), 0)
        )
        """Samples that have ended."""
        self.responses: Counter[tuple[str, int]] = Counter()
        """HTTP answers, by route and status."""
        self.num_unfinished = 0
        """Samples that the driver was given and that have not ended."""
        self.adapters: Counter[str] = Counter()
        """Unfinished requests of each adapter."""
        self.running_adapters: Counter[str] = Counter()
        """Those of them that have a token."""
        self.num_prompt_tokens = 0
        self.num_queried_tokens = 0
        self.num_cached_tokens = 0
        self.num_loaded_tokens = 0
        self.num_generated_tokens = 0
        self.num_preemptions = 0
        self.num_recoveries = 0
        """Deaths of daemons that were to be recovered from. Written by the driver's thread."""
        self.drafting_changes: Counter[str] = Counter(stopped=0, resumed=0)
        """Changes for good of whether drafts of all requests pay. Written by the driver's
        thread."""
        self.first_token = HistogramCounts(FIRST_BOUNDS_S)
        self.inter_token = HistogramCounts(TOKEN_BOUNDS_S)
        self.per_token = HistogramCounts(TOKEN_BOUNDS_S)
        self.seconds = HistogramCounts(REQUEST_BOUNDS_S)
        self.decode = HistogramCounts(REQUEST_BOUNDS_S)
        self.prompt_lengths = HistogramCounts(LENGTH_BOUNDS)
        self.lengths = HistogramCounts(LENGTH_BOUNDS)
        self.max_tokens = HistogramCounts(LENGTH_BOUNDS)
        self.num_samples = HistogramCounts(SAMPLES_BOUNDS)

    @contextmanager
    def counting(self, request: GenerationRequest) -> Iterator["CountedRequest"]:
        """Count a request while it is served. Samples that have not ended at the end were refused,
        have failed with the driver, or were aborted."""
        counted = CountedRequest(self, request)
        outcome = "abort"
        try:
            yield counted
        except RequestError:
            outcome = "refused"
            raise
        except Exception:
            outcome = "error"
            raise
        finally:
            counted.close(outcome)


class CountedRequest:
    """A request that is being served."""

    def __init__(self, counts: ServiceCounts, request: GenerationRequest) -> None:
        self._counts = counts
        self._began = time.monotonic()
        self._last: dict[str, float] = {}
        """Time of the newest tokens of each sample that has any."""
        self._first: dict[str, float] = {}
        self._left = {sample.id for sample in forked(request)}
        self._adapter = request.lora or ""
        self._num_prompt_tokens = len(request.prompt)
        counts.num_unfinished += len(self._left)
        counts.num_samples.observe(len(self._left))
        counts.max_tokens.observe(request.max_tokens)
        if self._adapter:
            counts.adapters[self._adapter] += 1

    def take(self, progress: RequestProgress) -> None:
        """Count the progress of a sample."""
        now, num_new, counts = time.monotonic(), len(progress.token_ids), self._counts
        if num_new:
            last = self._last.get(progress.req_id)
            if last is None:
                self._begin(progress.req_id, now)
                num_later, last = num_new - 1, now
            else:
                num_later = num_new
            if num_later:
                counts.inter_token.observe((now - last) / num_later, num_later)
            self._last[progress.req_id] = now
            counts.num_generated_tokens += num_new
        if progress.output is not None:
            self._end(progress.req_id, progress.output, now)

    def _begin(self, sample: str, now: float) -> None:
        counts = self._counts
        if not self._first:
            counts.num_prompt_tokens += self._num_prompt_tokens
            if self._adapter:
                counts.running_adapters[self._adapter] += 1
        self._first[sample] = now
        counts.first_token.observe(now - self._began)

    def _end(self, sample: str, output: RequestOutput, now: float) -> None:
        counts = self._counts
        self._left.discard(sample)
        counts.num_unfinished -= 1
        counts.outcomes[output.finish_reason] += 1
        counts.num_preemptions += output.num_preemptions
        if output.finish_reason == "error":
            return
        counts.num_queried_tokens += output.num_prompt_tokens
        counts.num_cached_tokens += output.num_cached_tokens
        counts.num_loaded_tokens += output.num_loaded_tokens
        counts.prompt_lengths.observe(output.num_prompt_tokens)
        counts.lengths.observe(len(output.token_ids))
        counts.seconds.observe(now - self._began)
        first = self._first.get(sample)
        if first is not None:
            counts.decode.observe(now - first)
            if len(output.token_ids) > 1:
                counts.per_token.observe((now - first) / (len(output.token_ids) - 1))

    def close(self, outcome: str) -> None:
        """Count the samples that have not ended; nothing if all have."""
        counts = self._counts
        counts.num_unfinished -= len(self._left)
        if self._left:
            counts.outcomes[outcome] += len(self._left)
            self._left.clear()
        if self._adapter:
            counts.adapters -= Counter((self._adapter,))
            if self._first:
                counts.running_adapters -= Counter((self._adapter,))
