"""The summary of the last replies' delays."""

from rpc_schema.lifecycle import ReplyDelay
from worker_daemon.server.wire.reply_channel import MAX_DELAYS, ReplyDelays


def test_percentiles_are_delays_that_occurred() -> None:
    delays = ReplyDelays()
    for delay_us in range(200, 0, -1):
        delays.add(delay_us * 1000)
    assert delays.summary() == ReplyDelay(num_replies=200, p50_us=100.0, p99_us=198.0)
    delays.clear()
    assert delays.summary() == ReplyDelay(num_replies=0, p50_us=0.0, p99_us=0.0)
    delays.add(1500)
    assert delays.summary() == ReplyDelay(num_replies=1, p50_us=1.5, p99_us=1.5)


def test_only_the_last_delays_count() -> None:
    delays = ReplyDelays()
    for _ in range(MAX_DELAYS):
        delays.add(9_000_000)
    for _ in range(MAX_DELAYS):
        delays.add(1000)
    assert delays.summary() == ReplyDelay(num_replies=MAX_DELAYS, p50_us=1.0, p99_us=1.0)
