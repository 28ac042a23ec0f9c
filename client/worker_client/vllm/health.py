"""vLLM's /health with the state of the daemons: `vllm serve --middleware
worker_client.vllm.health.DaemonsHealth`. Without it, /health tells only that the server's engine
lives."""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any, Final

import zmq

from rpc_schema.errors import WireError
from worker_client.errors import ClientError
from worker_client.keys import Keys, read_keys
from worker_client.transport import new_driver_id, parse_endpoint
from worker_client.vllm.settings import read_endpoints
from worker_client.worker_client import AskingClient

ANSWER_S: Final = 2.0
"""Limit on a daemon's answer."""
KEY_VARIABLES: Final = ("WORKER_CLIENT_KEY_FILE", "WORKER_CLIENT_KNOWN_DAEMONS")
"""Variables with the files of this driver's key and of the daemons' keys, as for worker-client."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class DaemonsHealth:
    """ASGI middleware. GET /health is answered with 503 if a daemon is not healthy, and otherwise
    as the server answers it; the header worker-daemons has the state of each daemon as JSON."""

    def __init__(self, application: Application) -> None:
        self._application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http" or scope["path"] != "/health":
            await self._application(scope, receive, send)
            return
        reports = await asyncio.to_thread(report_daemons)
        header = b"worker-daemons", json.dumps(reports).encode()
        is_healthy = all(each["healthy"] for each in reports)

        async def send_with_reports(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                status = message["status"] if is_healthy else 503
                headers = [*message.get("headers", ()), header]
                message = {**message, "status": status, "headers": headers}
            await send(message)

        await self._application(scope, receive, send_with_reports)


def report_daemons() -> list[dict[str, Any]]:
    """Return endpoint, health and state of each daemon that WORKER_DAEMON_ENDPOINTS names."""
    key_file, known = (os.environ.get(name, "") for name in KEY_VARIABLES)
    try:
        keys = read_keys(key_file or None, Path(known) if known else None)
    except ClientError as error:
        return [
            {"endpoint": each, "healthy": False, "why": str(error)} for each in read_endpoints()
        ]
    with zmq.Context() as context:
        return [_report(context, each, keys) for each in read_endpoints()]


def _report(context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, keys: Keys) -> dict[str, Any]:
    try:
        client = AskingClient(context, parse_endpoint(endpoint, keys), 0, new_driver_id())
    except ClientError as error:
        return {"endpoint": endpoint, "healthy": False, "why": str(error)}
    try:
        health, status = client.check_health(ANSWER_S), client.get_status(ANSWER_S)
    except (ClientError, WireError) as error:
        return {"endpoint": endpoint, "healthy": False, "why": str(error)}
    finally:
        client.close()
    state = {"load": status.load, "link": status.link_state, "serving": status.serving}
    return {"endpoint": endpoint, "healthy": health.healthy, "why": health.detail, **state}
