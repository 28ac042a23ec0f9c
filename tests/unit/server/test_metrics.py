"""Metrics and health of a daemon: what is exported, who may read it, and how readers are bounded.
Texts are read by prometheus-client's parser."""

import asyncio
import http.client
import os
import socket
import struct
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from msgspec import structs
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from rpc_schema import lifecycle as lc
from rpc_schema.config import ModelConfig, ParallelConfig, WorkerConfig
from rpc_schema.errors import ConfigError
from rpc_schema.expert_placement import ExpertMoves, RankPlacement
from rpc_schema.host_tier import HostTierStatus
from rpc_schema.kv_files import KVFilesStatus
from rpc_schema.moved_blocks import BlockTraffic
from tests.contract.random_messages import fixed_example
from tests.support.waiting import wait_until
from tests.unit.server.driver import DaemonProcess, Driver
from worker_daemon.server.metrics import http_server
from worker_daemon.server.metrics.counted_times import CountedTimes
from worker_daemon.server.metrics.http_server import MetricsServer
from worker_daemon.server.metrics.listener import MetricsListener, open_listener
from worker_daemon.server.metrics.readings import DaemonReadings
from worker_daemon.server.metrics.table import DAEMON_METRICS
from worker_daemon.server.progress import Progress
from worker_daemon.server.wire.endpoints import MAX_PATH_BYTES, EndpointInUseError
from worker_daemon.server.wire.reply_channel import ReplyCounts
from worker_daemon.settings import build_settings
from worker_host.exposition import render_metric
from worker_host.metrics import ExportedMetric, HistogramCounts, MetricKind, Reading

TOKEN = "0123456789abcdef0123"


class UnixConnection(http.client.HTTPConnection):
    """The standard library's client on a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=30)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(str(self._path))


def get(path: Path, target: str) -> tuple[int, str]:
    connection = UnixConnection(path)
    connection.request("GET", target)
    reply = connection.getresponse()
    return reply.status, reply.read().decode()


def scrape(path: Path) -> dict[str, Metric]:
    status, text = get(path, "/metrics")
    assert status == 200
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(families: dict[str, Metric], name: str, **labels: str) -> float:
    full = f"worker_daemon_{name}"
    samples = [each for family in families.values() for each in family.samples]
    found = [each.value for each in samples if each.name == full and each.labels == labels]
    assert len(found) == 1, (full, labels, found)
    return found[0]


# A daemon.


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


@pytest.fixture(scope="module")
def daemon(directory: Path) -> Iterator[DaemonProcess]:
    started = DaemonProcess(directory / "d", "--metrics-listen", f"unix:{directory}/d/metrics")
    yield started
    started.stop()


def test_scrape_counts_what_the_daemon_did(daemon: DaemonProcess, directory: Path) -> None:
    place = directory / "d" / "metrics"
    wait_until(lambda: get(place, "/startupz")[0] == 200, "its worker is made")
    assert get(place, "/readyz") == (
        503,
        '{"status":"unavailable","reasons":["its model is not ready: CREATED"]}',
    )
    driver = Driver(daemon.endpoint)
    driver.attach()
    driver.make_ready()
    for _ in range(3):
        driver.fault()
    sent = driver.send_fault("none")
    driver.frames()
    driver.step.send_multipart(sent)
    driver.replay()
    driver.fault("raise:INVALID_STEP")
    driver.fault("late:COMM")
    seq, driver.seq = driver.seq, driver.seq + 5
    driver.fault()  # a gap
    driver.seq = seq
    wait_until(lambda: driver.status().link_state == "broken", "it is told of the late failure")
    assert get(place, "/livez") == (200, '{"status":"ok","reasons":[]}')
    seen = scrape(place)  # the first one: later ones may be a second old
    driver.close()
    assert value(seen, "steps_total", result="ok") == 4
    assert value(seen, "step_seconds_count") == 4
    assert value(seen, "step_phase_seconds_count", phase="launch") == 4
    assert value(seen, "step_phase_seconds_bucket", phase="send", le="+Inf") == 4
    assert value(seen, "steps_total", result="failed") == 2
    assert value(seen, "errors_total", code="INVALID_STEP") == 1
    assert value(seen, "errors_total", code="COMM") == 1
    assert value(seen, "step_replays_total") == 1
    assert value(seen, "tokens_total", kind="sampled") == 4
    assert value(seen, "lease_epoch") == driver.epoch
    assert value(seen, "state", axis="load", state="READY") == 1
    assert value(seen, "state", axis="load", state="CREATED") == 0
    assert value(seen, "state", axis="link", state="broken") == 1
    assert value(seen, "operation_seconds", operation="LoadModel") >= 0
    worker, bound = (value(seen, "startup_seconds", phase=name) for name in ("worker", "bound"))
    assert worker >= bound > 0
    assert value(seen, "build_info", **labels_of(seen, "worker_daemon_build_info")) == 1
    assert seen["process_resident_memory_bytes"].samples[0].value > 1 << 20


def labels_of(families: dict[str, Metric], name: str) -> dict[str, str]:
    return families[name].samples[0].labels


def test_every_metric_of_the_table_is_exported_as_it_says(
    daemon: DaemonProcess, directory: Path
) -> None:
    families = scrape(directory / "d" / "metrics")
    for metric in DAEMON_METRICS:
        counted = metric.kind is MetricKind.COUNTER
        family = families.pop(metric.name.removesuffix("_total") if counted else metric.name)
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        for sample in family.samples:
            assert sample.name in metric.series
            assert set(sample.labels) - {"le"} == set(metric.labels)
    assert all(name.startswith("process_") for name in families)


def test_socket_is_for_this_user_and_is_removed(daemon: DaemonProcess, directory: Path) -> None:
    place = directory / "d" / "metrics"
    assert place.stat().st_mode & 0o077 == 0
    daemon.process.terminate()
    assert daemon.wait() == 0
    assert not place.exists()


# Rendering.


def test_histogram_is_cumulative_with_inclusive_bounds() -> None:
    counts = HistogramCounts((0.1, 1.0))
    for seconds in (0.1, 0.1000001, 1.0, 5.0):
        counts.observe(seconds)
    metric = ExportedMetric("x_seconds", MetricKind.HISTOGRAM, "Help.", ("a",))
    text = render_metric(metric, [(('q"\n',), counts)]).decode()
    (family,) = text_string_to_metric_families(text)
    found = {(each.name, each.labels.get("le")): each.value for each in family.samples}
    assert {each.labels["a"] for each in family.samples} == {'q"\n'}
    assert found["x_seconds_bucket", "0.1"] == 1
    assert found["x_seconds_bucket", "1.0"] == 3
    assert found["x_seconds_bucket", "+Inf"] == found["x_seconds_count", None] == 4
    assert found["x_seconds_sum", None] == pytest.approx(6.2000001)


# Readings of a status.


def readings(status: lc.Status) -> dict[str, list[Reading]]:
    """Return the values that are read from a status and from counts."""
    progress = Progress("cpu")
    progress.set_phase("LOADING 25%", 60.0, done=0.25)
    watch = SimpleNamespace(xids={31: 2, 0: 1})
    guard = SimpleNamespace(num_hangs=1, num_aborts=2, device=SimpleNamespace(problem="hot"))
    channel = SimpleNamespace(counts=ReplyCounts())
    report = SimpleNamespace(
        status=lambda: status,
        progress=progress,
        guard=guard,
        device_watch=watch,
        completion=SimpleNamespace(channel=channel, num_waiting=3),
    )
    read = DaemonReadings(report, CountedTimes(), {"bound": 1.5}).read()
    return {metric.name.removeprefix("worker_daemon_"): found for metric, found in read}


def test_readings_say_what_the_status_says() -> None:
    experts = struct.pack("<4q", 10, 0, 20, 10)
    status = structs.replace(
        fixed_example(lc.Status),
        kv_cache=lc.KVCacheConfig(num_blocks=101, block_size=16, groups=(), size_bytes=1),
        num_kv_blocks_held=25,
        memory_bytes={"weights": 7, "free": 9},
        gpu_load=lc.GpuLoad(utilization_percent=40, temperature_c=50, power_w=None),
        expert_loads=(
            lc.ExpertLoad(layer=2, counts=experts),
            lc.ExpertLoad(layer=5, counts=bytes(32)),
        ),
        config=WorkerConfig(
            parallel=ParallelConfig(
                tensor_parallel_size=1, data_parallel_size=2, data_parallel_lockstep=True
            ),
            model=ModelConfig(model="m"),
        ),
        expert_placements=(
            RankPlacement(layer=2, experts=struct.pack("<6H", 0, 1, 2, 3, 2, 0)),
            RankPlacement(
                layer=5,
                experts=struct.pack("<6H", 0, 1, 2, 3, 2, 0),
                counts_before=struct.pack("<4q", 0, 0, 0, 0),
            ),
        ),
        expert_moves=ExpertMoves(num_moved=7, num_switches=2, num_failed=3),
        memory_tags={"weights": "asleep"},
        providers={"attention": "own", "graphs": "12"},
    )
    seen = readings(status)
    assert seen["kv_blocks"] == [(("total",), 100), (("held",), 25)]
    assert seen["kv_usage_ratio"] == [((), 0.25)]
    assert seen["memory_bytes"] == [(("weights",), 7), (("free",), 9)]
    assert seen["gpu_utilization_ratio"] == [((), 0.4)]
    assert seen["gpu_temperature_celsius"] == [((), 50)] and seen["gpu_power_watts"] == []
    assert seen["expert_tokens_total"] == [(("2",), 40), (("5",), 0)]
    assert seen["expert_imbalance_ratio"] == [(("2",), 2.0)]
    # 10 / 2 + 0 + 20 / 2 tokens on rank 0, 10 + 20 / 2 + 10 / 2 on rank 1
    assert seen["expert_rank_imbalance_ratio"] == [(("2",), 1.25)]
    before = struct.pack("<4q", 10, 0, 0, 6)  # since then, 20 of expert 2 and 4 of expert 3
    placed = structs.replace(status.expert_placements[0], counts_before=before)
    later = readings(structs.replace(status, expert_placements=(placed,)))
    assert later["expert_rank_imbalance_ratio"] == [(("2",), pytest.approx(14 / 12))]
    assert seen["experts_moved_total"] == [((), 7)]
    assert seen["expert_moves_failed_total"] == [((), 3)]
    assert (("weights", "asleep"), 1.0) in seen["state"]
    assert (("weights", "awake"), 0.0) in seen["state"]
    assert "kv_cache" not in {axis for (axis, _), _ in seen["state"]}
    assert seen["graphs"] == [((), 12)]
    assert seen["load_progress_ratio"] == [((), 0.25)]
    assert seen["xid_total"] == [(("31",), 2), (("0",), 1)]
    assert (seen["hangs_total"], seen["comm_aborts_total"]) == ([((), 1)], [((), 2)])
    assert seen["device_degraded"] == [((), True)] and seen["inflight_steps"] == [((), 3)]
    assert seen["watchdog_age_seconds"][0][1] > 0 and seen["overdue"] == [((), False)]
    assert seen["startup_seconds"] == [(("bound",), 1.5)]


def test_readings_of_moved_blocks() -> None:
    """A counter for each place that there is, and each way."""
    status = fixed_example(lc.Status)
    ways = [BlockTraffic(num_bytes=number, num_us=500_000 * number) for number in range(6)]
    tier = structs.replace(
        fixed_example(HostTierStatus), stored=ways[0], loaded=ways[1], num_failed=9
    )
    tier = structs.replace(tier, sent=ways[2], received=ways[3])
    files = structs.replace(fixed_example(KVFilesStatus), written=ways[4], read=ways[5])
    places = [(place, way) for place in ("host", "groups", "files") for way in ("out", "in")]
    seen = readings(structs.replace(status, host_tier=tier, kv_files=files))
    assert seen["kv_moved_bytes_total"] == list(zip(places, range(6), strict=True))
    assert seen["kv_move_seconds_total"] == [
        (place, number / 2) for number, place in enumerate(places)
    ]
    assert (("failed",), 9) in seen["kv_host_moved_blocks_total"]
    seen = readings(structs.replace(status, host_tier=None, kv_files=files))
    assert seen["kv_moved_bytes_total"] == [(("files", "out"), 4), (("files", "in"), 5)]


def test_an_idle_daemon_waits_for_nothing() -> None:
    progress = Progress("cpu")
    progress.idle()
    assert progress.waiting_s() == 0
    progress.await_result(7)
    time.sleep(0.01)
    progress.begin("ExecuteModel", 60.0, True)
    assert progress.waiting_s() >= 0.01, "the older of the two counts"


def test_counted_times_are_those_of_the_step() -> None:
    times = CountedTimes().steps
    times.add(10.0, 10.004, 10.001)
    times.add(10.002, 10.006)  # it overlaps, and has no result
    assert sum(times.steps.counts) == 2 and times.steps.total == pytest.approx(0.006)
    assert sum(times.launched.counts) == sum(times.awaited.counts) == 1
    assert times.launched.total == pytest.approx(0.001)
    assert times.awaited.total == pytest.approx(0.003)


# The server, in this process.


@dataclass
class Text:
    content_type: str = "text/plain; version=0.0.4"
    body: bytes = b"x 1\n"

    async def text(self) -> bytes:
        return self.body


@dataclass
class Report:
    """The part of a StatusReport that the server reads."""

    reason: str = ""
    draining: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(serving="SERVING"))
    progress: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(
            snapshot=SimpleNamespace(state=SimpleNamespace(load="READY"))
        )
    )

    def problem(self) -> str:
        return self.reason


@asynccontextmanager
async def serving(
    directory: Path,
    token: str | None = None,
    text: Text | None = None,
    report: Report | None = None,
) -> AsyncIterator[Callable[[bytes], Awaitable[bytes]]]:
    """Serve on a Unix socket; yield a function that sends bytes and returns the answer."""
    path = directory / "m"
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    bound.bind(str(path))
    bound.setblocking(False)
    listener = MetricsListener(bound, str(path), token, path)
    server = MetricsServer(listener, report or Report(), text or Text(), lambda: True)
    await server.serve()

    async def ask(request: bytes) -> bytes:
        return await asyncio.to_thread(exchange, path, request)

    yield ask
    server.close()
    listener.release()
    assert not path.exists()


def exchange(path: Path, request: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(30)
        client.connect(str(path))
        try:
            client.sendall(request)
            return b"".join(iter(lambda: client.recv(1 << 16), b""))
        except ConnectionError:
            return b""


def head(*lines: str) -> bytes:
    return "\r\n".join((*lines, "", "")).encode()


@pytest.mark.parametrize(
    ("request_head", "status"),
    [
        (head("GET /metrics HTTP/1.1", "Host: x"), 200),
        (head("GET /metrics?x=1 HTTP/1.0"), 200),
        (head("POST /metrics HTTP/1.1", "Content-Length: 0"), 405),
        (head("GET /else HTTP/1.1"), 404),
        (head("GET  /metrics HTTP/1.1"), 400),
        (head("GET /metrics SPDY/3"), 400),
        (head("\x00\xff"), 400),
        (head("GET /metrics HTTP/1.1", "X: " + "y" * 20_000), 431),
    ],
)
def test_only_gets_of_known_paths_are_answered(
    tmp_path: Path, request_head: bytes, status: int
) -> None:
    async def run() -> bytes:
        async with serving(tmp_path) as ask:
            return await ask(request_head)

    answer = asyncio.run(run())
    assert int(answer.split(b" ")[1]) == status
    assert b"Connection: close" in answer


@pytest.mark.parametrize(
    ("line", "may_read"),
    [
        (f"Authorization: Bearer {TOKEN}", True),
        (f"authorization:  bearer {TOKEN} ", True),
        (f"Authorization: Bearer {TOKEN}x", False),
        (f"Authorization: Basic {TOKEN}", False),
        ("Authorization:", False),
        (f"X-Authorization: Bearer {TOKEN}", False),
    ],
)
def test_a_port_shows_metrics_and_reasons_to_who_knows_the_token(
    tmp_path: Path, line: str, may_read: bool
) -> None:
    async def run() -> list[bytes]:
        async with serving(tmp_path, TOKEN, report=Report("it hangs")) as ask:
            targets = ("/metrics", "/livez")
            return [await ask(head(f"GET {each} HTTP/1.1", line)) for each in targets]

    metrics, health = asyncio.run(run())
    assert metrics.startswith(b"HTTP/1.1 200" if may_read else b"HTTP/1.1 401")
    assert (b"x 1" in metrics) == may_read
    assert health.startswith(b"HTTP/1.1 503")
    assert (b"it hangs" in health) == may_read
    body = msgspec.json.decode(health.partition(b"\r\n\r\n")[2])
    assert body["status"] == "unavailable"


def test_slow_and_silent_readers_are_cut_off_and_keep_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "EXCHANGE_LIMIT_S", 1.0)
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 3)
    large = Text(body=b"x" * (4 << 20))

    async def run() -> None:
        async with serving(tmp_path, text=large) as ask:
            readers = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(3)]
            for reader in readers:
                reader.connect(str(tmp_path / "m"))
            readers[0].sendall(head("GET /metrics HTTP/1.1"))  # and reads nothing
            await asyncio.sleep(0.1)
            assert await ask(head("GET /livez HTTP/1.1")) == b""  # all connections are taken
            while not (answer := await ask(head("GET /livez HTTP/1.1"))):
                await asyncio.sleep(0.05)
            assert answer.startswith(b"HTTP/1.1 200")
            for reader in readers:
                reader.close()

    asyncio.run(run())


# Where it listens.


def settings(place: str, token_file: Path | None = None) -> object:
    given = {"endpoint": "ipc:///x/y", "device": "cpu", "metrics-listen": place}
    return build_settings({**given, "metrics-token-file": token_file and str(token_file)})


def token_file(directory: Path, text: str = TOKEN, mode: int = 0o600) -> Path:
    path = directory / "token"
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("unix:relative/m", "absolute path"),
        ("unix:", "absolute path"),
        ("unix:/" + "d" * MAX_PATH_BYTES, f"{MAX_PATH_BYTES + 1} bytes"),
        ("localhost:9000", "ADDRESS:PORT"),
        ("127.0.0.1", "ADDRESS:PORT"),
        ("::1:9000", "ADDRESS:PORT"),
        ("127.0.0.1:70000", "70000 is no port"),
        ("0.0.0.0:9000", "every interface"),
        ("127.0.0.1:9000", "give --metrics-token-file"),
    ],
)
def test_place_that_cannot_be_used_is_refused_with_the_fix(place: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        open_listener(settings(place))
    assert "fix:" in str(refused.value)


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        (TOKEN, 0o644, "others may read"),
        ("short", 0o600, "16 to 512"),
        ("two words of length", 0o600, "one word"),
        ("\u00e4" * 20, 0o600, "one word"),
    ],
)
def test_token_that_is_weak_or_open_to_others_is_refused(
    tmp_path: Path, text: str, mode: int, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        open_listener(settings("127.0.0.1:9", token_file(tmp_path, text, mode)))
    assert text not in str(refused.value)


def test_missing_token_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        open_listener(settings("127.0.0.1:9", tmp_path / "none"))


def test_port_and_file_in_use_are_refused_and_a_dead_daemons_file_is_taken(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    place, token = f"unix:{tmp_path}/m", token_file(tmp_path, f"{TOKEN}\n")
    first = open_listener(settings(place))
    assert first is not None
    with pytest.raises(EndpointInUseError, match="another process listens"):
        open_listener(settings(place))
    os.close(first.socket.detach())  # as if its process had been killed
    second = open_listener(settings(place))
    assert second is not None
    first.release()
    assert (tmp_path / "m").exists(), "the file is the second one's"
    second.release()
    assert not (tmp_path / "m").exists()
    (tmp_path / "m").write_text("a file")
    with pytest.raises(ConfigError, match="is no socket"):
        open_listener(settings(place))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EndpointInUseError, match=f"127.0.0.1:{port}"):
            open_listener(settings(f"127.0.0.1:{port}", token))
    bound = open_listener(settings(f"127.0.0.1:{port}", token))
    assert bound is not None and bound.token == TOKEN
    bound.release()


def test_socket_in_a_directory_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 0700"):
        open_listener(settings(f"unix:{tmp_path}/m"))
