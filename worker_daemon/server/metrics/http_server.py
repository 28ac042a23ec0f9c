"""A small HTTP server for metrics and health, on the main thread's event loop: GET only, one answer
for each connection. Owns the listening socket while it serves."""

import asyncio
import hmac
import logging
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, Protocol

import msgspec

from worker_daemon.server.metrics.listener import MetricsListener
from worker_daemon.server.session.status import StatusReport

MAX_CONNECTIONS: Final = 16
MAX_HEAD_BYTES: Final = 8192
EXCHANGE_LIMIT_S: Final = 5.0
"""Limit of a whole exchange: a reader that is slow to ask or to read is cut off."""
_JSON: Final = "application/json"
_TEXT: Final = "text/plain; charset=utf-8"

logger = logging.getLogger(__name__)


class HealthReply(msgspec.Struct, frozen=True):
    """Body of an answer to a probe."""

    status: str
    """ok or unavailable."""
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Answer:
    status: HTTPStatus
    content_type: str
    body: bytes
    headers: tuple[str, ...] = ()

    def encode(self) -> bytes:
        lines = (
            f"HTTP/1.1 {self.status.value} {self.status.phrase}",
            f"Content-Type: {self.content_type}",
            f"Content-Length: {len(self.body)}",
            "Cache-Control: no-store",
            "Connection: close",
            *self.headers,
        )
        return "\r\n".join((*lines, "", "")).encode("latin-1") + self.body


class MetricsText(Protocol):
    """The metrics as text."""

    content_type: str

    async def text(self) -> bytes:
        """Return the metrics."""


class MetricsServer:
    """Serves /metrics, /livez, /readyz and /startupz. Main thread only."""

    def __init__(
        self,
        listener: MetricsListener,
        report: StatusReport,
        metrics: MetricsText,
        is_started: Callable[[], bool],
    ) -> None:
        """is_started: returns True once the worker is made."""
        self._listener = listener
        self._report = report
        self._metrics = metrics
        self._is_started = is_started
        self._num_connections = 0
        self._server: asyncio.Server | None = None
        self._probes: dict[str, Callable[[], list[str]]] = {
            "/livez": self._not_alive,
            "/startupz": self._not_started,
            "/readyz": self._not_ready,
        }

    async def serve(self) -> None:
        """Answer until closed."""
        self._server = await asyncio.start_server(
            self._exchange, sock=self._listener.socket, limit=MAX_HEAD_BYTES
        )
        logger.info("metrics at %s", self._listener.shown)

    def close(self) -> None:
        """Take no more connections."""
        if self._server is not None:
            self._server.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request and end the connection, within its limit."""
        if self._num_connections >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._num_connections += 1
        writer.transport.set_write_buffer_limits(0)  # drain() waits until all is sent
        try:
            async with asyncio.timeout(EXCHANGE_LIMIT_S):
                try:
                    head = await reader.readuntil(b"\r\n\r\n")
                except asyncio.LimitOverrunError:
                    answer = _refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
                else:
                    answer = await self._answer(head)
                writer.write(answer.encode())
                await writer.drain()
            writer.close()
        except (TimeoutError, asyncio.IncompleteReadError, OSError):
            writer.transport.abort()
        except Exception:
            logger.exception("a request for metrics failed")
            writer.transport.abort()
        finally:
            self._num_connections -= 1

    async def _answer(self, head: bytes) -> _Answer:
        request, *lines = head.decode("latin-1").split("\r\n")
        words = request.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _refusal(HTTPStatus.BAD_REQUEST)
        if words[0] != "GET":
            return _refusal(HTTPStatus.METHOD_NOT_ALLOWED, "Allow: GET")
        path, knows_token = words[1].partition("?")[0], self._knows_token(lines)
        if path in self._probes:
            return self._health(self._probes[path](), shows_reasons=knows_token)
        if path != "/metrics":
            return _refusal(HTTPStatus.NOT_FOUND)
        if not knows_token:
            return _refusal(HTTPStatus.UNAUTHORIZED, "WWW-Authenticate: Bearer")
        return _Answer(HTTPStatus.OK, self._metrics.content_type, await self._metrics.text())

    def _knows_token(self, lines: list[str]) -> bool:
        """Return True if a token is not needed, or one of the header's lines has it."""
        token = self._listener.token
        if token is None:
            return True
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip().lower() == "authorization":
                scheme, _, shown = value.strip().partition(" ")
                is_right = hmac.compare_digest(shown.strip().encode(), token.encode())
                return scheme.lower() == "bearer" and is_right
        return False

    def _health(self, reasons: list[str], *, shows_reasons: bool) -> _Answer:
        status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
        word = "unavailable" if reasons else "ok"
        shown = tuple(reasons) if shows_reasons else ()
        return _Answer(status, _JSON, msgspec.json.encode(HealthReply(word, shown)))

    def _not_started(self) -> list[str]:
        return [] if self._is_started() else ["it is starting"]

    def _not_alive(self) -> list[str]:
        """Return why the daemon cannot work, as CheckHealth does."""
        problem = self._report.problem()
        return [problem] if problem else []

    def _not_ready(self) -> list[str]:
        """Return why the daemon has no model that is ready, or takes no drivers."""
        serving, load = self._report.draining.serving, self._report.progress.snapshot.state.load
        reasons = self._not_started() + self._not_alive()
        if serving != "SERVING":
            reasons.append(f"it is {serving}")
        if load != "READY":
            reasons.append(f"its model is not ready: {load}")
        return reasons


def _refusal(status: HTTPStatus, *headers: str) -> _Answer:
    return _Answer(status, _TEXT, f"{status.phrase}\n".encode(), headers)
