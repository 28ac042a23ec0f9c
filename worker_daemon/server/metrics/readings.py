"""Reads the values of the daemon's metrics from its status and from the counts that other threads
keep. Main thread only, like the status."""

import platform
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import Final, TypeVar, get_args

from rpc_schema import lifecycle as lc
from rpc_schema.config import ParallelConfig
from rpc_schema.health import LoadState, ServingState
from rpc_schema.host_tier import HostTierStatus
from rpc_schema.kv_files import KVFilesStatus
from rpc_schema.lease import LeaseState
from rpc_schema.moved_blocks import BlockTraffic
from rpc_schema.version import PROTOCOL_VERSION, SOFTWARE_VERSION
from worker_daemon.server.metrics import table
from worker_daemon.server.metrics.counted_times import CountedTimes
from worker_daemon.server.session.status import StatusReport
from worker_host.metrics import ExportedMetric, MetricReadings, Reading

_AXES: Final[Mapping[str, tuple[str, ...]]] = {
    "load": get_args(LoadState),
    "link": get_args(lc.LinkState),
    "serving": get_args(ServingState),
    "lease": get_args(LeaseState),
}
_NCCL: Final = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
_ALONE: Final = ()

_KeyT = TypeVar("_KeyT", bound=str | int)


class DaemonReadings:
    """Reads the metrics of one daemon."""

    def __init__(
        self, report: StatusReport, counted: CountedTimes, startup_s: Mapping[str, float]
    ) -> None:
        """startup_s: seconds from the process's start to each of its phases' ends; it grows until
        the worker is made."""
        self._report = report
        self._counted = counted
        self._startup_s = startup_s
        self._versions = {"torch": _version("torch"), "nccl": _version(*_NCCL)}

    def read(self) -> Iterator[MetricReadings]:
        """Yield every metric with its present values, in the order of the table."""
        status = self._report.status()
        found = {
            **self._identity(status),
            **self._steps(status),
            **self._resources(status),
            **self._faults(status),
        }
        assert found.keys() == set(table.DAEMON_METRICS)
        return ((metric, found[metric]) for metric in table.DAEMON_METRICS)

    def _identity(self, status: lc.Status) -> dict[ExportedMetric, list[Reading]]:
        providers, progress = status.providers, self._report.progress
        build = (
            *(SOFTWARE_VERSION, str(PROTOCOL_VERSION), platform.python_version()),
            *(self._versions["torch"], self._versions["nccl"], status.device),
            *(providers.get(part, "") for part in ("attention", "layers", "all_reduce")),
        )
        lease, done = status.lease, progress.stamp.done
        return {
            table.BUILD_INFO: [(build, 1)],
            table.STATE: list(_states(status)),
            table.RANK: _one(status.rank),
            table.LEASE_EPOCH: _one(lease.epoch),
            table.LEASE_REMAINING: _one(lease.remaining_ms / 1000),
            table.STARTUP: _by(self._startup_s),
            table.OPERATION: _by(progress.operation_s),
            table.LOAD_PROGRESS: _one(done) if done else [],
            table.WEIGHTS_VERSION: [] if status.weights is None else _one(status.weights.version),
        }

    def _steps(self, status: lc.Status) -> dict[ExportedMetric, list[Reading]]:
        progress, channel = self._report.progress, self._report.completion.channel
        times = self._counted.steps
        num_failed = progress.num_failed_steps + channel.counts.num_failed_results
        return {
            table.STEP: [(_ALONE, times.steps)],
            table.STEP_PHASE: [
                (("launch",), times.launched),
                (("result",), times.awaited),
                (("send",), self._counted.delays.since_start),
            ],
            table.STEPS: [(("ok",), sum(times.steps.counts)), (("failed",), num_failed)],
            table.STEP_REPLAYS: _one(channel.counts.num_replays),
            table.STEP_REJECTED: _by(progress.refusals),
            table.ERRORS: _by(channel.counts.errors),
            table.INFLIGHT_STEPS: _one(self._report.completion.num_waiting),
            table.INPUT_WAIT: _one(status.input_wait_share),
            table.TOKENS: [(("sampled",), status.num_tokens)],
            table.REQUESTS: _one(status.num_requests),
            **_drafts(status.drafts),
        }

    def _resources(self, status: lc.Status) -> dict[ExportedMetric, list[Reading]]:
        num_blocks = 0 if status.kv_cache is None else status.kv_cache.num_blocks - 1
        held, load = status.num_kv_blocks_held, status.gpu_load
        percent = None if load is None else load.utilization_percent
        return {
            table.KV_BLOCKS: [(("total",), num_blocks), (("held",), held)],
            table.KV_USAGE: _one(min(1.0, held / num_blocks) if num_blocks else 0.0),
            **_host_tier(status.host_tier),
            **_kv_files(status.kv_files),
            **_kv_traffic(status.host_tier, status.kv_files),
            table.MEMORY: _by(status.memory_bytes),
            table.UPLOADS: _one(status.upload_bytes),
            table.GRAPHS: _one(int(status.providers.get("graphs", "0"))),
            **_experts(status.expert_loads),
            **_expert_moves(status),
            table.UTILIZATION: _known(None if percent is None else percent / 100),
            table.TEMPERATURE: _known(None if load is None else load.temperature_c),
            table.POWER: _known(None if load is None else load.power_w),
        }

    def _faults(self, status: lc.Status) -> dict[ExportedMetric, list[Reading]]:
        report = self._report
        return {
            table.WATCHDOG_AGE: _one(report.progress.waiting_s()),
            table.OVERDUE: _one(bool(report.progress.overdue())),
            table.HANGS: _one(report.guard.num_hangs),
            table.COMM_ABORTS: _one(report.guard.num_aborts),
            table.XID: _by(report.device_watch.xids),
            table.DEGRADED: _one(bool(report.guard.device.problem)),
            table.BAD_FRAMES: _one(status.num_bad_frames),
            table.AUTH_FAILURES: _one(status.num_refused),
        }


def _host_tier(tier: HostTierStatus | None) -> dict[ExportedMetric, list[Reading]]:
    if tier is None:
        return {table.HOST_BLOCKS: [], table.HOST_MOVES: []}
    moves = (
        ("stored", tier.num_stored),
        ("loaded", tier.num_loaded),
        ("invalid", tier.num_invalid),
        ("restored", tier.num_restored),
        ("rejected", tier.num_rejected),
        ("sent", tier.num_sent),
        ("received", tier.num_received),
        ("failed", tier.num_failed),
    )
    return {
        table.HOST_BLOCKS: [(("total",), tier.num_slots), (("held",), tier.num_held)],
        table.HOST_MOVES: [((kind,), count) for kind, count in moves],
    }


def _kv_files(files: KVFilesStatus | None) -> dict[ExportedMetric, list[Reading]]:
    if files is None:
        return {table.FILE_BYTES: [], table.FILE_MOVES: []}
    moves = (
        ("stored", files.num_stored),
        ("dropped", files.num_dropped),
        ("failed", files.num_failed),
        ("loaded", files.num_loaded),
        ("bad", files.num_bad_files),
        ("invalid", files.num_invalid),
    )
    return {
        table.FILE_BYTES: [(("held",), files.size_bytes), (("bound",), files.most_bytes)],
        table.FILE_MOVES: [((kind,), count) for kind, count in moves],
    }


def _kv_traffic(
    tier: HostTierStatus | None, files: KVFilesStatus | None
) -> dict[ExportedMetric, list[Reading]]:
    moved: list[tuple[str, str, BlockTraffic]] = []
    if tier is not None:
        moved += [("host", "out", tier.stored), ("host", "in", tier.loaded)]
        moved += [("groups", "out", tier.sent), ("groups", "in", tier.received)]
    if files is not None:
        moved += [("files", "out", files.written), ("files", "in", files.read)]
    return {
        table.KV_MOVED_BYTES: [((place, way), each.num_bytes) for place, way, each in moved],
        table.KV_MOVE_TIME: [((place, way), each.num_us / 1e6) for place, way, each in moved],
    }


def _one(value: float) -> list[Reading]:
    return [(_ALONE, value)]


def _known(value: float | None) -> list[Reading]:
    return [] if value is None else _one(value)


def _by(values: Mapping[_KeyT, float]) -> list[Reading]:
    # Copied first: another thread may add a key.
    return [((str(key),), value) for key, value in dict(values).items()]


def _states(status: lc.Status) -> Iterator[Reading]:
    present: dict[str, str] = {
        "load": status.load,
        "link": status.link_state,
        "serving": status.serving,
        "lease": status.lease.state,
    }
    axes = dict(_AXES)
    for tag, state in status.memory_tags.items():
        present[tag], axes[tag] = state, get_args(lc.TagState)
    for axis, states in axes.items():
        yield from (((axis, state), float(state == present[axis])) for state in states)


def _drafts(drafts: lc.DraftsVerified | None) -> dict[ExportedMetric, list[Reading]]:
    accepted = () if drafts is None else drafts.accepted_by_place
    return {
        table.DRAFTED_ROWS: _one(0 if drafts is None else drafts.num_verified),
        table.DRAFT_TOKENS: _one(0 if drafts is None else drafts.num_drafted),
        table.ACCEPTED_TOKENS: [((str(place),), count) for place, count in enumerate(accepted)],
    }


def _experts(loads: Iterable[lc.ExpertLoad]) -> dict[ExportedMetric, list[Reading]]:
    tokens: list[Reading] = []
    imbalances: list[Reading] = []
    for load in loads:
        counts, layer = array("q", load.counts), (str(load.layer),)
        total = sum(counts)
        tokens.append((layer, total))
        if total:
            imbalances.append((layer, max(counts) * len(counts) / total))
    return {table.EXPERT_TOKENS: tokens, table.EXPERT_IMBALANCE: imbalances}


def _expert_moves(status: lc.Status) -> dict[ExportedMetric, list[Reading]]:
    counts = {load.layer: array("q", load.counts) for load in status.expert_loads}
    imbalances: list[Reading] = []
    parallel = ParallelConfig() if status.config is None else status.config.parallel
    num_ranks = parallel.tensor_parallel_size * parallel.replicas_in_step
    for entry in status.expert_placements:
        since = _since(counts.get(entry.layer, array("q")), array("q", entry.counts_before))
        ranks = _loads_of_ranks(array("H", entry.experts), since, num_ranks)
        if sum(ranks) > 0:
            ratio = max(ranks) * num_ranks / sum(ranks)
            imbalances.append(((str(entry.layer),), ratio))
    moves = status.expert_moves
    return {
        table.EXPERT_RANK_IMBALANCE: imbalances,
        table.EXPERTS_MOVED: [] if moves is None else _one(moves.num_moved),
        table.EXPERT_MOVES_FAILED: [] if moves is None else _one(moves.num_failed),
    }


def _since(counts: Sequence[int], before: Sequence[int]) -> Sequence[int]:
    """Return what was counted since `before`; all of it if the counters were set to 0 meanwhile."""
    if len(before) != len(counts):
        return counts
    since = [new - old for new, old in zip(counts, before, strict=True)]
    return counts if min(since, default=0) < 0 else since


def _loads_of_ranks(placement: Sequence[int], counts: Sequence[int], num_ranks: int) -> list[float]:
    """Return the tokens of each rank, if an expert's copies have equal parts of its tokens. counts:
    of each expert; empty if they are not known."""
    if not counts:
        return []
    size, copies = len(placement) // num_ranks, Counter(placement)
    parts = [counts[expert] / copies[expert] for expert in placement]
    return [sum(parts[first : first + size]) for first in range(0, len(parts), size)]


def _version(*packages: str) -> str:
    """Return the version of the first of the packages that is installed. Imports none."""
    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return ""
