"""`worker-client top`: a view of each daemon, refreshed every second. Owns the terminal while it
runs. Each daemon has a thread, so that a silent one does not delay the others."""

import contextlib
import os
import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator, Sequence
from typing import Annotated, Final

import typer
import zmq
from rich.console import Console
from rich.live import Live

from rpc_schema import lifecycle as lc
from rpc_schema.codec import EventMessage
from rpc_schema.errors import WorkerDaemonError
from rpc_schema.expert_placement import ExpertMoveEnded
from worker_client.cli.daemons import RunningDaemons
from worker_client.cli.options import takes_groups
from worker_client.cli.output_file import print_text
from worker_client.cli.terminal import shown_on
from worker_client.cli.top_frame import Sample, Seen, frame, title
from worker_client.cli.top_history import History
from worker_client.errors import AuthenticationError, DeadlineExceeded, NothingListens
from worker_client.wire.endpoint import Endpoint, new_driver_id, parse_endpoint
from worker_client.wire.keys import Keys
from worker_client.wire.transport import EventsChannel
from worker_client.wire.worker_client import AskingClient

INTERVAL_S: Final = 1.0
ANSWER_WITHIN_S: Final = 1.0
KEY_POLL_S: Final = 0.1
_QUITTING: Final = (b"q", b"Q", b"\x04")
PLAIN_WIDTH: Final = 160
"""Width of lines without a terminal."""


class Feed:
    """Polls one daemon's status every INTERVAL_S and reads its events, on its own thread and
    connections, from start() to stop()."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.seen = Seen(endpoint.control)
        """The daemon's state. The thread replaces it as a whole; any thread may read it."""
        self.refusal: AuthenticationError | None = None
        """The daemon's refusal, after which polling stops."""
        self._endpoint = endpoint
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="top", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread within ANSWER_WITHIN_S."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        with zmq.Context() as context:
            client = AskingClient(context, self._endpoint, 0, new_driver_id())
            events = EventsChannel(context, [self._endpoint])
            try:
                self._watch(client, events)
            except AuthenticationError as error:
                self.refusal = error
            finally:
                client.close()
                events.close()

    def _watch(self, client: AskingClient, events: EventsChannel) -> None:
        met = False
        while not self._ended.is_set():
            due = time.monotonic() + INTERVAL_S
            try:
                if not met:
                    client.hello(ANSWER_WITHIN_S)
                    met = True
                sample = Sample(client.get_status(ANSWER_WITHIN_S), time.monotonic())
                self.seen = self.seen._replace(last=sample, before=self.seen.last, error="")
            except AuthenticationError:
                raise
            except NothingListens as error:
                self.seen = self.seen._replace(error=f"nothing listens there: {error.why}")
            except DeadlineExceeded:
                self.seen = self.seen._replace(error="it does not answer")
            except WorkerDaemonError as error:
                self.seen = self.seen._replace(error=str(error))
            self._read_events(events)
            self._ended.wait(max(0.0, due - time.monotonic()))

    def _read_events(self, events: EventsChannel) -> None:
        for event in events.receive_all():
            text = _event_text(event)
            if text:
                self.seen = self.seen._replace(event=text, event_at=time.monotonic())


def _event_text(event: EventMessage) -> str:
    match event:
        case lc.StateChanged():
            return event.transition
        case lc.Hung():
            return f"hung: {event.phase} for {event.phase_ms} ms; stacks: {event.stacks}"
        case lc.Slow():
            return f"slow: {event.phase} for {event.phase_ms} ms, usually {event.usual_ms} ms"
        case ExpertMoveEnded() if event.fault:
            return f"layer {event.layer} keeps its experts where they are: {event.fault}"
    return ""


@takes_groups
def top(
    daemons: RunningDaemons,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
) -> None:
    """Watch daemons: state, lease, requests, speed, memory, GPU. q or Ctrl-C ends it. With --once
    the exit code is 1 if a daemon does not answer."""
    keys = daemons.keys()
    with _feeds(daemons.names, keys) as feeds, contextlib.suppress(KeyboardInterrupt):
        if once:
            _wait_for_two_samples(feeds, time.monotonic() + daemons.wait)
            _print(feeds)
            if any(feed.seen.error for feed in feeds):
                raise typer.Exit(1)
        elif sys.stdout.isatty():
            _show(feeds)
        else:
            while True:
                _wait_for_two_samples(feeds, time.monotonic())
                _print(feeds)
                time.sleep(INTERVAL_S)


@contextlib.contextmanager
def _feeds(endpoints: Sequence[str], keys: Keys) -> Iterator[list[Feed]]:
    feeds = [Feed(parse_endpoint(endpoint, keys)) for endpoint in endpoints]
    for feed in feeds:
        feed.start()
    try:
        yield feeds
    finally:
        for feed in feeds:
            feed.stop()


def _wait_for_two_samples(feeds: Sequence[Feed], until: float) -> None:
    """Wait for two samples of each daemon, which rates need. until: limit on the wait for a daemon
    that does not answer."""
    while any(
        feed.seen.before is None and (not feed.seen.error or time.monotonic() < until)
        for feed in feeds
    ):
        _check(feeds)
        time.sleep(KEY_POLL_S)
    _check(feeds)


def _check(feeds: Sequence[Feed]) -> None:
    """Raise AuthenticationError if a daemon refuses us."""
    for feed in feeds:
        if feed.refusal is not None:
            raise feed.refusal


def _print(feeds: Sequence[Feed]) -> None:
    seen = [feed.seen for feed in feeds]
    lines = frame(seen, time.monotonic(), PLAIN_WIDTH, None)
    print_text("".join(f"{line.text.rstrip()}\n" for line in lines))


def _show(feeds: Sequence[Feed]) -> None:
    """Show frames on the terminal's alternate screen until a key ends it; always restores the
    terminal."""
    console = Console()
    history = History(time.monotonic())
    due = history.began
    with (
        _single_keys() as keys,
        Live(console=console, screen=True, auto_refresh=False, transient=True) as live,
    ):
        while True:
            _check(feeds)
            width, height = console.size
            seen, now = [feed.seen for feed in feeds], time.monotonic()
            if now >= due:
                history.note(seen)
                due = max(due + INTERVAL_S, now)
            lines = frame(seen, now, width, height, history.lines(title(seen), seen, now, width))
            live.update(shown_on(console, lines), refresh=True)
            if _quits(keys, INTERVAL_S / 2):
                return


@contextlib.contextmanager
def _single_keys() -> Iterator[int | None]:
    """Read keys one by one; yields the descriptor, None without a terminal."""
    if not sys.stdin.isatty():
        yield None
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield descriptor
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _quits(keys: int | None, within_s: float) -> bool:
    if keys is None:
        time.sleep(within_s)
        return False
    until = time.monotonic() + within_s
    while (left := until - time.monotonic()) > 0:
        if select.select([keys], [], [], left)[0]:
            typed = os.read(keys, 64)
            if not typed or any(key in typed for key in _QUITTING):
                return True
    return False
