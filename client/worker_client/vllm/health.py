"""vLLM's /health for a group of daemons: `vllm serve --middleware
worker_client.vllm.health.DaemonsHealth`. It reports whether the group can serve. Without it,
/health reports only that the server's engine is up."""

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any, Final

import zmq

from rpc_schema import lifecycle as lc
from rpc_schema.errors import WorkerDaemonError
from rpc_schema.health import CheckHealthReply
from worker_client.vllm.settings import LOGGER, read_endpoints
from worker_client.wire.endpoint import new_driver_id, parse_endpoint
from worker_client.wire.keys import Keys, read_keys
from worker_client.wire.worker_client import AskingClient

ANSWER_S: Final = 2.0
"""Limit on a daemon's answer."""
KEY_VARIABLES: Final = ("WORKER_CLIENT_KEY_FILE", "WORKER_CLIENT_KNOWN_DAEMONS")
"""Variables with the files of this driver's key and of the daemons' keys, as for worker-client."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_LOG = logging.getLogger(LOGGER)


class DaemonsHealth:
    """ASGI middleware. GET /health is answered with 503 unless every daemon of the group would run
    a step of this server, and otherwise as the server answers it; the header worker-daemons has the
    state of each daemon as JSON. An idle engine does not notice that a daemon has died: after a
    503, it is asked to replace dead ones, so that a server to which nobody sends requests because
    of the 503 becomes healthy again."""

    def __init__(self, application: Application) -> None:
        self._application = application
        self._mending: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http" or scope["path"] != "/health":
            await self._application(scope, receive, send)
            return
        reports = await asyncio.to_thread(report_daemons)
        header = b"worker-daemons", json.dumps(reports).encode()
        is_healthy = all(each["healthy"] for each in reports)
        if not is_healthy:
            self._mend(getattr(getattr(scope.get("app"), "state", None), "engine_client", None))

        async def send_with_reports(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                status = message["status"] if is_healthy else 503
                headers = [*message.get("headers", ()), header]
                message = {**message, "status": status, "headers": headers}
            await send(message)

        await self._application(scope, receive, send_with_reports)

    def _mend(self, engine: Any) -> None:
        """Begin to ask the engine to replace dead daemons, unless it is being asked already."""
        if engine is not None and (self._mending is None or self._mending.done()):
            self._mending = asyncio.create_task(_replace_dead(engine))


async def _replace_dead(engine: Any) -> None:
    try:
        await engine.collective_rpc("replace_dead")
    except Exception as error:  # of vLLM's: the engine has failed, or ends
        _LOG.warning("dead daemons are not replaced: %s", error)


def report_daemons() -> list[dict[str, Any]]:
    """Return endpoint, health and state of each daemon that WORKER_DAEMON_ENDPOINTS names. healthy:
    it would run a step; why: what it lacks."""
    key_file, known = (os.environ.get(name, "") for name in KEY_VARIABLES)
    try:
        keys = read_keys(key_file or None, Path(known) if known else None)
    except WorkerDaemonError as error:
        return [
            {"endpoint": each, "healthy": False, "why": str(error)} for each in read_endpoints()
        ]
    with zmq.Context() as context:
        return [_report(context, each, keys) for each in read_endpoints()]


def _report(context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, keys: Keys) -> dict[str, Any]:
    try:
        client = AskingClient(context, parse_endpoint(endpoint, keys), 0, new_driver_id())
    except WorkerDaemonError as error:
        return {"endpoint": endpoint, "healthy": False, "why": str(error)}
    try:
        health, status = client.check_health(ANSWER_S), client.get_status(ANSWER_S)
    except WorkerDaemonError as error:
        return {"endpoint": endpoint, "healthy": False, "why": str(error)}
    finally:
        client.close()
    why = _obstacle(health, status)
    state = {"load": status.load, "link": status.link_state, "serving": status.serving}
    return {"endpoint": endpoint, "healthy": not why, "why": why, **state}


def _obstacle(health: CheckHealthReply, status: lc.Status) -> str:
    """Return why the daemon would not run a step; empty: it would."""
    if not health.healthy:
        return health.detail or "it is not healthy"
    away = [f"{tag} {state}" for tag, state in status.memory_tags.items() if state != "awake"]
    weights = "whole" if status.weights is None else status.weights.state
    obstacles = (
        (status.serving != "SERVING", f"it is {status.serving}"),
        (status.load != "READY", f"it is {status.load}: its model is not loaded yet"),
        (status.link_state != "up", f"its link to the other daemons is {status.link_state}"),
        (bool(away), f"its memory is not there: {', '.join(away)}"),
        (weights != "whole", f"its weights are {weights}"),
    )
    return next((why for is_there, why in obstacles if is_there), "")
