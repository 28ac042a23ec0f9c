"""The times that only a daemon with metrics counts."""

from dataclasses import dataclass, field

from worker_daemon.server.progress import CountedStepTimes
from worker_daemon.server.wire.reply_channel import CountedReplyDelays


@dataclass(frozen=True, slots=True)
class CountedTimes:
    """Made by the daemon, before the threads that write them start."""

    steps: CountedStepTimes = field(default_factory=CountedStepTimes)
    delays: CountedReplyDelays = field(default_factory=CountedReplyDelays)
