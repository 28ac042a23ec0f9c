"""The content of top's frame and of its history, and that they fit the terminal."""

import msgspec
import pytest

from rpc_schema.config import (
    CacheConfig,
    GraphConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    WorkerConfig,
)
from rpc_schema.kv_cache import KVCacheConfig
from rpc_schema.lease import LeaseStatus
from rpc_schema.lifecycle import GpuLoad, ReplyDelay, Status
from worker_client.cli.top_frame import Sample, Seen, frame, rates, title, totals
from worker_client.cli.top_history import NUM_SAMPLES, History

STATUS = Status(
    worker_uid=b"u" * 16,
    pid=12,
    endpoint="ipc:///d/w0",
    device="cuda:0",
    serving="SERVING",
    load="READY",
    link_state="up",
    link=1,
    epoch=4,
    last_seq=100,
    rank=1,
    phase="IDLE",
    phase_ms=3,
    config=None,
    kv_cache=None,
    memory_bytes={"weights": 3 << 30, "graphs": 5 << 20, "free": 1 << 30, "total": 8 << 30},
    providers={},
    input_wait_share=0.0,
    reply_delay=ReplyDelay(num_replies=0, p50_us=0.0, p99_us=0.0),
    transitions=(),
    lease=LeaseStatus(
        state="held", holder=b"h" * 16, holder_name="host:7", remaining_ms=3100, silent_ms=26900
    ),
    num_tokens=1000,
    num_requests=8,
    gpu_load=GpuLoad(utilization_percent=87, temperature_c=61, power_w=400),
)


def seen(before: dict[str, object] | None = None, **now: object) -> Seen:
    earlier = None if before is None else Sample(changed(before), 10.0)
    return Seen("ipc:///d/w0", Sample(changed(now), 12.0), earlier)


def changed(fields: dict[str, object]) -> Status:
    return msgspec.structs.replace(STATUS, **fields)


def text(*daemons: Seen, width: int = 80, height: int | None = None) -> str:
    return "\n".join(line.text for line in frame(daemons, 15.0, width, height))


def test_rates_are_those_between_two_samples():
    busy = seen({"last_seq": 60, "num_tokens": 200})
    assert rates(busy) == (20.0, 400.0)
    row = text(busy).splitlines()[2].split()
    assert row == ["1", "SERVING", "READY", "8", "20.0", "400", "50.00", "87%", "61C", "400W", "-"]


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        (None, (None, None)),
        ({"worker_uid": b"v" * 16}, (None, None)),
        ({"epoch": 3, "last_seq": 9000, "num_tokens": 0}, (None, 500.0)),
    ],
)
def test_what_cannot_be_compared_gives_no_rate(before, expected):
    assert rates(seen(before)) == expected


def test_rank_without_answers_has_no_tokens():
    shown = text(seen({"last_seq": 98, "num_tokens": 0}, num_tokens=0))
    assert shown.splitlines()[2].split()[3:6] == ["8", "1.0", "-"]


GROUP = WorkerConfig(
    parallel=ParallelConfig(pipeline_parallel_size=2),
    model=ModelConfig(model="/m"),
    scheduler=SchedulerConfig(),
    cache=CacheConfig(),
    graph=GraphConfig(),
)


def of_replicas(lockstep: bool) -> list[Seen]:
    """Two replicas of two ranks: 8 and 5 requests, 400 and 100 tokens a second."""
    parallel = ParallelConfig(
        pipeline_parallel_size=2, data_parallel_size=2, data_parallel_lockstep=lockstep
    )
    config = msgspec.structs.replace(GROUP, parallel=parallel)
    return [
        seen(
            {"last_seq": 60, "num_tokens": then},
            config=config,
            rank=rank,
            num_tokens=now,
            num_requests=requests,
        )
        for rank, then, now, requests in (
            (0, 0, 0, 8),
            (1, 200, 1000, 8),
            (2, 0, 0, 5),
            (3, 800, 1000, 5),
        )
    ]


def test_each_replica_is_a_group_or_all_in_lockstep_are():
    rows = [line.split() for line in text(*of_replicas(lockstep=False)).splitlines()[2:4]]
    assert [row[:8] for row in rows] == [
        ["all", "2", "of", "2", "ranks", "8", "20.0", "400"],
        ["all", "2", "of", "2", "ranks", "5", "20.0", "100"],
    ]
    row, other = (line.split() for line in text(*of_replicas(lockstep=True)).splitlines()[2:4])
    assert row[:8] == ["all", "4", "of", "4", "ranks", "13", "20.0", "500"]
    assert other[0] != "all"


def test_group_has_a_line_of_its_own():
    cache = KVCacheConfig(num_blocks=101, block_size=16, groups=(), size_bytes=1)
    first = seen(
        {"last_seq": 60, "num_tokens": 0, "config": GROUP},
        config=GROUP,
        rank=0,
        num_tokens=0,
        kv_cache=cache,
        num_kv_blocks_held=50,
        gpu_load=GpuLoad(utilization_percent=50, temperature_c=70, power_w=300),
    )
    last = seen({"last_seq": 60, "num_tokens": 200, "config": GROUP}, config=GROUP)
    spare = seen(load="CREATED", epoch=0)
    row = text(first, last, spare).splitlines()[2].split()
    assert row[:5] == ["all", "2", "of", "2", "ranks"]
    assert row[5:] == ["8", "20.0", "400", "50.00", "68%", "70C", "700W", "50%"]
    lost = last._replace(error="gone")
    assert "1 of 2 ranks" in text(first, lost) and "400W" not in text(first, lost).splitlines()[2]
    other = seen({"config": GROUP}, config=GROUP, epoch=5)
    for none in ([first], [first, other], [spare, spare]):
        assert "ranks" not in text(*none)
    lines = frame([first, last], 15.0, 80, 24)
    assert all(len(line.text) == 80 for line in lines[1:4]) and len(lines) <= 24
    assert len(frame([first, last], 15.0, 80, 3)) == 3


def test_daemon_without_a_ready_model_runs_no_requests():
    row = text(seen(load="KV_READY", num_requests=0)).splitlines()[2].split()
    assert row[1:4] == ["SERVING", "KV_READY", "-"]


def test_details_name_lease_memory_event_and_trouble():
    shown = text(
        seen(degraded="NVML is lost", gpu_load=None)._replace(event="a -> b (c)\nd", event_at=11.0),
        width=200,
    )
    assert "lease: host:7, silent for 27 s (its lease ends in 3 s)" in shown
    assert "memory: weights 3.0 GiB, graphs 5 MiB, free 1.0 GiB of 8.0 GiB" in shown
    assert "4 s ago: a -> b (c) d" in shown
    assert "degraded: NVML is lost" in shown
    assert "no answer for 3 s: it is gone" in text(seen()._replace(error="it is gone"))
    lost = LeaseStatus(state="claimable", holder_name="host:7")
    assert "lease: host:7, not connected (another driver may attach)" in text(
        seen(lease=lost), width=200
    )
    assert "lease: free" in text(seen(lease=LeaseStatus(state="free")), width=200)
    assert "? ipc:///x: it is gone" in text(Seen("ipc:///x", error="it is gone"))


@pytest.mark.parametrize(("count", "width", "height"), [(1, 40, 3), (5, 80, 24), (40, 80, 24)])
def test_frame_fits_its_terminal(count, width, height):
    daemons = [seen({})._replace(event="x" * 500, error="gone" * 100)] * count
    lines = frame(daemons, 15.0, width, height)
    assert len(lines) <= height
    assert all(len(line.text) <= width and "\n" not in line.text for line in lines)
    shown = sum("SERVING READY" in line.text for line in lines)
    rest = next((int(line.text.split()[1]) for line in lines if line.text.endswith("more")), 0)
    assert shown + rest == count


def test_idle_daemon_shows_no_step_time():
    row = ["1", "SERVING", "READY", "8", "0.0", "0.0", "-", "87%", "61C", "400W", "-"]
    assert text(seen({}, usual_step_us=4000)).splitlines()[2].split() == row
    assert text(seen(None, usual_step_us=4000)).splitlines()[2].split()[6] == "-"
    mostly_idle = seen({"last_seq": 98, "num_tokens": 984}, usual_step_us=4000)
    assert mostly_idle.last.status.last_seq == 100
    assert text(mostly_idle).splitlines()[2].split()[4:7] == ["1.0", "8.0", "4.00"]


def test_epoch_and_use_of_the_kv_cache_are_shown():
    cache = KVCacheConfig(num_blocks=129, block_size=16, groups=(), size_bytes=1)
    shown = text(seen(kv_cache=cache, num_kv_blocks_held=31), width=200)
    assert shown.splitlines()[2].split()[-1] == "25%"
    assert (
        "epoch 4, lease: host:7, silent for 27 s (its lease ends in 3 s), KV 31 of 128 blocks held"
        in shown
    )
    assert "100%" in text(seen(kv_cache=cache, num_kv_blocks_held=300))


@pytest.mark.parametrize("width", [40, 80, 160])
def test_long_texts_go_on_in_the_next_line(width):
    event = "READY.up.held -> READY.broken.held (the link to rank 1 of 2 at 10.0.0.7 has ended)"
    shown = text(seen()._replace(event=event, event_at=11.0), width=width)
    assert event in " ".join(shown.split())
    assert "ipc:///d/w0, pid 12, cuda:0" in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= width
    assert "..." in text(seen()._replace(event="so " * 500), width=width)


def history_of(*moments: list[Seen]) -> History:
    history = History(100.0)
    for daemons in moments:
        history.note(daemons)
    return history


def test_history_plots_totals_and_leaves_gaps_where_nobody_answers():
    cache = KVCacheConfig(num_blocks=101, block_size=16, groups=(), size_bytes=1)

    def at(tokens: int, requests: int, held: int) -> list[Seen]:
        """One replica that samples in its last rank, and a daemon that is not used."""
        common = {"config": GROUP, "kv_cache": cache, "num_requests": requests}
        before = {"config": GROUP, "num_tokens": 0}
        daemons = [
            seen({**before, "rank": 0}, **common, rank=0, num_tokens=0),
            seen(before, **common, num_kv_blocks_held=held, num_tokens=2 * tokens),
            seen(load="CREATED", epoch=0, num_requests=0, num_tokens=0, worker_uid=b"s" * 16),
        ]
        return [each._replace(endpoint=f"w{number}") for number, each in enumerate(daemons)]

    lost = [each._replace(error="gone") for each in at(300, 8, 50)]
    moments = [at(0, 0, 0), at(100, 4, 25), at(400, 8, 100), lost, at(200, 8, 50)]
    daemons = moments[-1]
    title_, tokens, requests, used, total = history_of(*moments).lines("t", daemons, 142.0, 80)
    assert title_.text.split() == ["t", "now", "most"]
    assert tokens.text.startswith("tokens/s  ▃█ ▅ ") and tokens.text.split()[-2:] == ["200", "400"]
    assert requests.text.startswith("requests ▁▅█ █ ") and requests.text.split()[-2:] == ["8", "8"]
    assert used.text.startswith("KV used  ▁▃█ ▅ ") and used.text.split()[-2:] == ["50%", "100%"]
    assert total.text == "total    400 tokens in 42 s (10/s), 400 since the daemons' start"
    assert all(len(line.text) == 80 for line in (title_, tokens, requests, used))


def test_history_counts_the_tokens_of_a_daemon_that_was_restarted():
    moments = [
        [seen(num_tokens=1000)],
        [seen(num_tokens=1500)],
        [seen(num_tokens=1500)._replace(error="gone")],
        [seen(num_tokens=70, worker_uid=b"v" * 16)],
        [seen(num_tokens=100, worker_uid=b"v" * 16)],
    ]
    history = history_of(*moments)
    assert history.num_tokens == 600
    assert "600 tokens in 3 h 0 min" in history.lines("t", [], 10900.0, 80)[-1].text


def test_replicas_are_added_up():
    for lockstep in (True, False):
        assert totals(of_replicas(lockstep)) == (500.0, 13, None)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_history_scrolls_and_fits_its_terminal(width):
    history = history_of(*([seen({"num_tokens": 300 + n})] for n in range(700)))
    assert len(history.samples) == NUM_SAMPLES
    daemons = [seen({})] * 2
    top = history.lines(title(daemons), daemons, 800.0, width)
    for height in (24, 12, 6, 3):
        lines = frame(daemons, 15.0, width, height, top)
        assert len(lines) <= height and max(len(line.text) for line in lines) <= width
        has_history = lines[1].text.startswith("tokens/s")
        assert has_history == (height > 6)
        assert lines[0].text.startswith("2 daemons")
    assert top[1].text.split()[-2:] == ["0", "300"], "the largest that is kept"
