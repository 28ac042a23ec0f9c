"""Reads what the plots of README and docs/ show: figures of docs/performance.json and
docs/plots.json, which has those of other systems and of the notes, and records of
benchmarks.kill_timeline in docs/. Gives each plot a stamp of its data, which its files carry."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec

from benchmarks.records import DOCS, Record, read_records

SOURCES = DOCS / "plots.json"
IMAGES = DOCS / "images"
MODELS = {
    "llama-8b 1x1": "Llama 8B, bfloat16",
    "llama-8b 1x1 --quantization fp8 --kv-cache-dtype fp8": "Llama 8B, FP8",
    "qwen3-0.6b 1x1": "Qwen3 0.6B, bfloat16",
    "qwen3-30b-a3b 1x1": "Qwen3-30B-A3B, bfloat16",
}
"""Rows of docs/performance.json, and their names in plots."""
DECODE = "decode_bs"
DEVICE = "NVIDIA H200"
LLAMA = "latency llama-8b 1x1"
VLLM_AS_SERVER = f"{LLAMA}, vLLM as the server"
RATES = (4, 8, 16)
"""Requests a second at which the driver was measured."""
TIMELINES = {"one GPU": "kill_timeline.json", "two GPUs": "kill_timeline_x2.json"}
"""Records of benchmarks.kill_timeline in docs/, as far as they are there."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Where figures are from."""

    source: str
    date: str
    device: str


class Vllm025(Measured, frozen=True, kw_only=True):
    """Figures of vLLM 0.25."""

    decode_tok_s: dict[str, dict[str, float]]
    """By row of docs/performance.json and batch."""
    cold_start_s: float


class BesideVllm026(Measured, frozen=True, kw_only=True):
    """Whole workloads of this project and of vLLM 0.26."""

    seconds: dict[str, dict[str, tuple[float, float]]]
    """By model and workload: this project's and vLLM's."""
    cold_start_s: tuple[float, float]
    """vLLM's, from and to."""


class ServerLatency(Measured, frozen=True, kw_only=True):
    """Latencies of worker-client serve at 8 requests a second: p50 and p99."""

    ttft_ms: tuple[float, float]
    itl_ms: tuple[float, float]


class RecoveryTimes(Measured, frozen=True, kw_only=True):
    """Seconds from a kill to tokens."""

    driver_killed_s: float
    rank_killed_s: dict[str, float]


class Sources(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """docs/plots.json."""

    vllm_0_25: Vllm025
    beside_vllm_0_26: BesideVllm026
    server: ServerLatency
    recovery: RecoveryTimes


class Curve(NamedTuple):
    """Output tokens a second by batch, of one model."""

    title: str
    ours: dict[int, float]
    vllm: dict[int, float]


class Workload(NamedTuple):
    """Seconds for a whole workload."""

    model: str
    name: str
    ours: float
    vllm: float


class Latency(NamedTuple):
    """p50 and p99 of a system, in ms."""

    system: str
    ttft_ms: tuple[float, float]
    itl_ms: tuple[float, float]


class Wait(NamedTuple):
    """Seconds until tokens come, from and to; equal if it is one figure."""

    what: str
    least_s: float
    most_s: float
    is_vllm: bool


class Killed(msgspec.Struct, frozen=True):
    """A kill in a timeline."""

    what: str
    at_s: float
    outage_s: float


class Timeline(msgspec.Struct, frozen=True):
    """A record of benchmarks.kill_timeline, as far as it is drawn."""

    pp: int
    tp: int
    requests: int
    bucket_s: float
    tokens: list[int]
    kills: list[Killed]


Throughput: TypeAlias = list[Curve]
Workloads: TypeAlias = list[Workload]
Latencies: TypeAlias = list[Latency]
Recovery: TypeAlias = list[Wait]
Timelines: TypeAlias = dict[str, Timeline]


class PlotData(NamedTuple):
    """What each plot shows."""

    throughput: Throughput
    workloads: Workloads
    latency: Latencies
    recovery: Recovery
    kills: Timelines
    """Empty if there is no record."""


def read_plot_data(docs: Path = DOCS) -> PlotData:
    """Read the data of all plots.

    Raises:
        KeyError: docs/performance.json lacks a figure that a plot shows.
        msgspec.ValidationError: docs/plots.json, or a timeline, has another form.
    """
    figures = Figures(read_records(docs / "performance.json"))
    sources = msgspec.json.decode((docs / SOURCES.name).read_bytes(), type=Sources)
    kills = {
        name: msgspec.json.decode((docs / file).read_bytes(), type=Timeline)
        for name, file in TIMELINES.items()
        if (docs / file).exists()
    }
    return PlotData(
        throughput_of(figures, sources),
        workloads_of(sources),
        latency_of(figures, sources),
        recovery_of(figures, sources),
        kills,
    )


class Figures:
    """The figures of docs/performance.json that were measured on DEVICE."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._values = {
            (record.part, record.name): record.value
            for record in records
            if record.device == DEVICE
        }

    def one(self, part: str, name: str) -> float:
        """Return a figure. Raises KeyError: it is not there."""
        return self._values[part, name]

    def by_batch(self, row: str) -> dict[int, float]:
        """Return a row's output tokens a second of decodes, by batch."""
        found = {
            int(name.removeprefix(DECODE)): value
            for (part, name), value in self._values.items()
            if part == f"e2e {row}" and name.startswith(DECODE)
        }
        return dict(sorted(found.items()))

    def latency(self, system: str, part: str, case: str) -> Latency:
        """Return the latencies of a case."""
        ttft, itl = (
            (self.one(part, f"{case}: {what} p50"), self.one(part, f"{case}: {what} p99"))
            for what in ("ttft", "itl")
        )
        return Latency(system, ttft, itl)


def throughput_of(figures: Figures, sources: Sources) -> Throughput:
    """Return a curve for each of MODELS."""
    vllm = sources.vllm_0_25.decode_tok_s
    return [
        Curve(
            title,
            figures.by_batch(row),
            {int(batch): value for batch, value in vllm[row].items()},
        )
        for row, title in MODELS.items()
    ]


def workloads_of(sources: Sources) -> Workloads:
    """Return the workloads that ran beside vLLM 0.26."""
    return [
        Workload(model, name, *pair)
        for model, by_name in sources.beside_vllm_0_26.seconds.items()
        for name, pair in by_name.items()
    ]


def latency_of(figures: Figures, sources: Sources) -> Latencies:
    """Return latencies under load."""
    server = sources.server
    drivers = {"Driver": "no target", "Driver, --max-itl-ms 25": "target 25 ms"}
    return [
        *(
            figures.latency(f"{system}, {rate}/s", LLAMA, f"poisson_{rate}rps, {target}")
            for system, target in drivers.items()
            for rate in RATES
        ),
        Latency("worker-client serve, 8/s", server.ttft_ms, server.itl_ms),
        figures.latency("vLLM's server on a daemon, 8/s", VLLM_AS_SERVER, "server, 8 requests/s"),
    ]


def recovery_of(figures: Figures, sources: Sources) -> Recovery:
    """Return the seconds until tokens come, after kills and starts."""
    recovery = sources.recovery
    killed = "server killed to first token, engine process by"
    servers = [figures.one(VLLM_AS_SERVER, f"{killed} {how}") for how in ("fork", "spawn")]
    starts = [figures.one(f"startup llama-8b 1x1 {how}", "total") for how in ("warm", "cold")]
    vllm = [sources.vllm_0_25.cold_start_s, *sources.beside_vllm_0_26.cold_start_s]
    return [
        _wait("driver killed, the next one adopts", [recovery.driver_killed_s]),
        *(
            _wait(f"one of two ranks killed, {how}", [seconds])
            for how, seconds in recovery.rank_killed_s.items()
        ),
        _wait("vLLM's server killed, the daemon stays", servers),
        _wait("start, kernels compiled before", starts[:1]),
        _wait("start, nothing compiled", starts[1:]),
        _wait("vLLM's own start, nothing compiled", vllm, is_vllm=True),
    ]


def _wait(what: str, seconds: Sequence[float], is_vllm: bool = False) -> Wait:
    return Wait(what, min(seconds), max(seconds), is_vllm)


def stamp_of(data: object) -> str:
    """Return a plot's stamp: equal if its data is."""
    return hashlib.sha256(msgspec.json.encode(data)).hexdigest()[:16]
