"""The server's process: its socket and signals, the engine's life, and the drain at the end."""

import asyncio
import contextlib
import logging
import math
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any, Final, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from worker_client.driven_group import DrivenGroup
from worker_client.errors import config_error
from worker_client.service.access import KeyCheck
from worker_client.service.admission import Admission
from worker_client.service.app import make_app
from worker_client.service.context import ServiceContext
from worker_client.service.engine import Engine
from worker_client.service.logs import configure_logs
from worker_client.service.settings import ServiceSettings

BACKLOG: Final = 2048
KEEP_ALIVE_S: Final = 30
LOOPBACK: Final = frozenset(("127.0.0.1", "::1", "localhost"))
SWITCH_S: Final = 0.001
"""Time that the event loop may hold the GIL while the driver's thread waits for it. The default,
5 ms, is half a step of a small model."""
MAX_DESCRIPTORS: Final = 1 << 16
CLOSE_S: Final = 2
"""Seconds in which answers are sent after the engine has ended."""
MAX_HEADER_BYTES: Final = 32 << 10

_LOG = logging.getLogger(__name__)
SEND_BUFFER_BYTES: Final = 128 << 10
"""Bound on what the kernel keeps for a connection: without it, megabytes for a slow reader."""


def serve(plan: DrivenGroup, settings: ServiceSettings) -> None:
    """Serve until a signal comes, or the driver ends. Exits at once, by the signal's number, when
    it comes before the model is loaded, or a second time.

    Raises:
        ClientConfigError: the port is in use, the model cannot be served, or logs not be written.
        WorkerDaemonError: the driver has ended.
    """
    _raise_descriptor_limit()
    configure_logs(settings.log_format)
    sys.setswitchinterval(SWITCH_S)
    with _listening(settings.host, settings.port) as listener:
        engine = Engine(plan, settings)
        try:
            access = KeyCheck(settings.api_keys, settings.admin_keys)
            context = ServiceContext(settings, engine, access, Admission())
            config = uvicorn.Config(
                make_app(context),
                http=cast("type[asyncio.Protocol]", partial(_Protocol, head_s=settings.read_s)),
                ws="none",
                lifespan="off",
                log_config=None,  # its records are logged as ours
                access_log=False,
                backlog=BACKLOG,
                timeout_keep_alive=max(KEEP_ALIVE_S, math.ceil(settings.write_s)),
                timeout_graceful_shutdown=CLOSE_S,
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                server_header=False,
            )
            with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
                runner.run(_Service(context, _Server(config), listener).run())
        finally:
            engine.close()


def _raise_descriptor_limit() -> None:
    """Allow as many connections as the hard limit does: the soft one is often 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """Yield a socket that is bound. Raises ClientConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        with contextlib.ExitStack() as stack:
            stack.enter_context(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            listener.bind(address)
            stack.pop_all()
    except OSError as error:
        fix = "choose another --port, or 0 for a free one; --host is an address of this host"
        problem = f"nothing can listen there: {error.strerror}"
        raise config_error("port", f"{host}:{port}", problem, fix) from None
    with listener:
        yield listener


class _Protocol(H11Protocol):
    """Gives requests a way to end their connection at once, `scope["state"]["abort"]`, and bounds
    the time in which the head of a request must be here."""

    def __init__(self, *, head_s: float, **options: Any) -> None:
        super().__init__(**options)
        self._head_s = head_s
        self._head_timer: asyncio.TimerHandle | None = None
        """Ends a connection with half a head, or nothing yet."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as its base
        """Note the connection."""
        self.app_state = {**self.app_state, "abort": transport.abort}
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        """Take bytes of a head or a body."""
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note the end."""
        super().connection_lost(exc)
        self._unwatch_head()

    def _watch_head(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._unwatch_head()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self._head_s, self.transport.abort)

    def _unwatch_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def timeout_keep_alive_handler(self) -> None:
        """End an idle connection, without waiting for a client that has not read its answer."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()


class _Server(uvicorn.Server):
    """A server that leaves signals to _Service."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


class _Service:
    """Runs once."""

    def __init__(
        self, context: ServiceContext, server: uvicorn.Server, listener: socket.socket
    ) -> None:
        self._context = context
        self._server = server
        self._listener = listener
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Serve."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        http = asyncio.create_task(self._server.serve([self._listener]))
        try:
            await self._serve_engine()
        finally:
            self._server.should_exit = True
            await http

    async def _serve_engine(self) -> None:
        context, url = self._context, _url(self._listener)
        engine, admission, settings = context.engine, context.admission, context.settings
        _LOG.info("loading %s; %s answers 503 meanwhile", engine.names[0], url)
        if not settings.api_keys and settings.host not in LOOPBACK:
            _LOG.info("there is no API key: all who reach %s may use it", url)
        async with engine:
            admission.open(engine.max_unfinished)
            _LOG.info("serving %s at %s", engine.names[0], url)
            ended = asyncio.ensure_future(engine.driver.wait_ended())
            stopped = asyncio.ensure_future(self._stop.wait())
            await asyncio.wait((ended, stopped), return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                admission.close("the server is shutting down")
                await self._drain(ended)
            stopped.cancel()
            if ended.done():
                raise ended.result()
            ended.cancel()

    async def _drain(self, ended: "asyncio.Future[Any]") -> None:
        """Wait until the running requests have ended, or the driver, or their time is over."""
        admission, limit_s = self._context.admission, self._context.settings.drain_s
        if admission.num_taken:
            _LOG.info("waiting up to %g s for running requests; a second signal ends them", limit_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while admission.num_taken and not ended.done():
                    await asyncio.sleep(0.05)

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set() or not self._context.engine.is_ready:
            # Daemons that we have started end with us, and so do all other processes.
            sys.stderr.flush()
            os._exit(128 + number)
        self._stop.set()


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
