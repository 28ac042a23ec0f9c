"""Reads the values of a server's metrics. Belongs to the event loop. What the driver's thread owns
is read without asking it: single numbers, each as of some moment of the last step."""

import time
from collections.abc import Iterator
from typing import Final, NamedTuple, get_args

from rpc_schema.version import SOFTWARE_VERSION
from worker_client.driver_parts.remote_prefill import PrefillCounts
from worker_client.scheduler import Scheduler
from worker_client.service.admission import Admission
from worker_client.service.engine import Engine
from worker_client.service.metrics import table
from worker_client.wire.liveness import Liveness
from worker_host.draft_counts import DraftCounts
from worker_host.metrics import ExportedMetric, HistogramCounts, MetricReadings, Reading

ENGINE: Final = "0"
"""The label of vLLM's metrics that numbers data-parallel engines: replicas are one here."""
FINISHED: Final = ("stop", "length", "abort", "error")
"""Outcomes that vLLM has too."""


class _Load(NamedTuple):
    """The scheduler's present load."""

    num_running: int
    num_waiting: int
    kv_usage: float


class ServiceReadings:
    """Reads the metrics of one server."""

    def __init__(self, engine: Engine, admission: Admission) -> None:
        self._engine = engine
        self._admission = admission

    def read(self) -> Iterator[MetricReadings]:
        """Yield every metric with its present values, in the order of the tables."""
        load = self._load()
        found = {
            **self._server(load),
            **self._requests(),
            **self._driver(),
            **_prefill(self._engine.prefill_counts),
            **self._drafts(),
            **self._vllms(load),
            **self._vllms_of_requests(),
            **self._vllms_information(),
        }
        names = (*table.SERVICE_METRICS, *table.VLLM_METRICS)
        assert found.keys() == set(names)
        return ((metric, found[metric]) for metric in names)

    def _load(self) -> _Load:
        """Return the schedulers' load. Samples on their way to one count as waiting."""
        found = [driver.scheduler for driver in self._engine.inner.values()]
        schedulers = [each for each in found if isinstance(each, Scheduler)]
        if not schedulers:
            return _Load(0, self._engine.counts.num_unfinished, 0.0)
        num_running = sum(each.num_running for each in schedulers)
        num_blocks = sum(each.num_blocks for each in schedulers)
        num_free = sum(each.num_free_blocks for each in schedulers)
        num_waiting = max(0, self._engine.counts.num_unfinished - num_running)
        return _Load(num_running, num_waiting, 1 - num_free / num_blocks)

    def _server(self, load: _Load) -> dict[ExportedMetric, list[Reading]]:
        engine, admission, counts = self._engine, self._admission, self._engine.counts
        responses: list[Reading] = [
            ((path, str(code)), count) for (path, code), count in counts.responses.items()
        ]
        return {
            table.BUILD_INFO: [((SOFTWARE_VERSION, engine.names[0]), 1)],
            table.READY: _one(not admission.closed and engine.driver.error is None),
            table.STARTUP: _one(engine.startup_s) if engine.is_ready else [],
            table.RUNNING: _one(load.num_running),
            table.WAITING: _one(load.num_waiting),
            table.TAKEN: _one(admission.num_taken),
            table.MOST_TAKEN: _one(admission.most),
            table.RESPONSES: responses,
            table.KV_USAGE: _one(load.kv_usage),
        }

    def _requests(self) -> dict[ExportedMetric, list[Reading]]:
        counts = self._engine.counts
        return {
            table.OUTCOMES: [((outcome,), count) for outcome, count in counts.outcomes.items()],
            table.FIRST_TOKEN: _one(counts.first_token),
            table.INTER_TOKEN: _one(counts.inter_token),
            table.REQUEST: _one(counts.seconds),
            table.PROMPT_TOKENS: _one(counts.num_prompt_tokens),
            table.CACHED_TOKENS: _one(counts.num_cached_tokens),
            table.LOADED_TOKENS: _one(counts.num_loaded_tokens),
            table.QUERIED_TOKENS: _one(counts.num_queried_tokens),
            table.GENERATED_TOKENS: _one(counts.num_generated_tokens),
            table.PREEMPTIONS: _one(counts.num_preemptions),
        }

    def _driver(self) -> dict[ExportedMetric, list[Reading]]:
        drivers, ranks = self._engine.inner.values(), list[Reading]()
        liveness = [each for driver in drivers for each in driver.group.watch.liveness]
        for rank, present in enumerate(liveness):
            for state in get_args(Liveness):
                ranks.append(((str(rank), state), float(state == present)))
        return {
            table.IN_FLIGHT: _one(sum(driver.num_in_flight for driver in drivers)),
            table.FAILED_STEPS: _one(sum(driver.num_failures for driver in drivers)),
            table.RECOVERIES: _one(self._engine.counts.num_recoveries),
            table.RANK_STATE: ranks,
        }

    def _drafts(self) -> dict[ExportedMetric, list[Reading]]:
        drafts, changes = DraftCounts(), self._engine.counts.drafting_changes
        for driver in self._engine.inner.values():
            drafts.include(driver.drafts)
        by_place = [(str(place), n) for place, n in enumerate(drafts.accepted_by_place)]
        return {
            table.DRAFTED_ROWS: _one(drafts.num_verified),
            table.DRAFT_TOKENS: _one(drafts.num_drafted),
            table.ACCEPTED_TOKENS: [((place,), count) for place, count in by_place],
            table.DRAFTING_CHANGES: [((change,), count) for change, count in changes.items()],
            table.V_DRAFTED: self._labelled(drafts.num_verified),
            table.V_DRAFT_TOKENS: self._labelled(drafts.num_drafted),
            table.V_ACCEPTED: self._labelled(drafts.num_accepted),
            table.V_ACCEPTED_BY_PLACE: [
                ((*self._labels, place), count) for place, count in by_place
            ],
        }

    def _vllms(self, load: _Load) -> dict[ExportedMetric, list[Reading]]:
        counts = self._engine.counts
        return {
            table.V_RUNNING: self._labelled(load.num_running),
            table.V_WAITING: self._labelled(load.num_waiting),
            table.V_KV_USAGE: self._labelled(load.kv_usage),
            table.V_OLD_KV_USAGE: self._labelled(load.kv_usage),
            table.V_QUERIES: self._labelled(counts.num_queried_tokens),
            table.V_HITS: self._labelled(counts.num_cached_tokens),
            table.V_OLD_QUERIES: self._labelled(counts.num_queried_tokens),
            table.V_OLD_HITS: self._labelled(counts.num_cached_tokens),
            table.V_PREEMPTIONS: self._labelled(counts.num_preemptions),
            table.V_PROMPT: self._labelled(counts.num_prompt_tokens),
            table.V_GENERATION: self._labelled(counts.num_generated_tokens),
        }

    def _vllms_of_requests(self) -> dict[ExportedMetric, list[Reading]]:
        counts = self._engine.counts
        ended: list[Reading] = [
            ((*self._labels, reason), counts.outcomes[reason]) for reason in FINISHED
        ]
        return {
            table.V_SUCCESS: ended,
            table.V_FIRST_TOKEN: self._labelled(counts.first_token),
            table.V_INTER_TOKEN: self._labelled(counts.inter_token),
            table.V_OLD_INTER_TOKEN: self._labelled(counts.inter_token),
            table.V_PER_TOKEN: self._labelled(counts.per_token),
            table.V_LATENCY: self._labelled(counts.seconds),
            table.V_DECODE: self._labelled(counts.decode),
            table.V_PROMPT_LENGTHS: self._labelled(counts.prompt_lengths),
            table.V_LENGTHS: self._labelled(counts.lengths),
            table.V_NS: self._labelled(counts.num_samples),
            table.V_MAX_TOKENS: self._labelled(counts.max_tokens),
        }

    def _vllms_information(self) -> dict[ExportedMetric, list[Reading]]:
        engine, counts = self._engine, self._engine.counts
        config, adapters, caches = engine.plan.config, list[Reading](), list[Reading]()
        if config.lora.max_loras:
            waiting = counts.adapters - counts.running_adapters
            names = (",".join(sorted(waiting)), ",".join(sorted(counts.running_adapters)))
            adapters.append(((str(config.lora.max_loras), *names), time.time()))
        if engine.is_ready:
            cache = config.cache
            size = (str(engine.loaded.block_size), str(engine.loaded.num_blocks))
            share = str(cache.gpu_memory_utilization)
            caches.append(((*size, cache.kv_cache_dtype, share, ENGINE), 1))
        return {table.V_LORA: adapters, table.V_CACHE: caches}

    @property
    def _labels(self) -> tuple[str, str]:
        return self._engine.names[0], ENGINE

    def _labelled(self, value: float | HistogramCounts) -> list[Reading]:
        return [(self._labels, value)]


def _prefill(counts: PrefillCounts | None) -> dict[ExportedMetric, list[Reading]]:
    if counts is None:
        absent = (table.PREFILL_LINKED, table.PREFILL_PROMPTS, table.PREFILL_BLOCKS)
        more = (
            *(table.PREFILL_EARLY, table.PREFILL_FIRST),
            *(table.PREFILL_HELD, table.PREFILL_LINKS),
        )
        return {metric: [] for metric in (*absent, *more)}
    return {
        table.PREFILL_LINKED: _one(counts.is_linked),
        table.PREFILL_PROMPTS: [((end,), count) for end, count in counts.prompts.items()],
        table.PREFILL_BLOCKS: _one(counts.num_blocks),
        table.PREFILL_EARLY: _one(counts.num_early_blocks),
        table.PREFILL_FIRST: _one(counts.num_first_tokens),
        table.PREFILL_HELD: _one(counts.held),
        table.PREFILL_LINKS: _one(counts.num_lost_links),
    }


def _one(value: float | HistogramCounts) -> list[Reading]:
    return [((), value)]
