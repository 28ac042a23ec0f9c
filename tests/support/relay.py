"""A proxy of a daemon's four ipc sockets, whose connections a test can cut and refuse, as
a network does."""

import asyncio
import contextlib
import threading
from functools import partial
from pathlib import Path
from typing import Self

SOCKETS = ("", ".step", ".results", ".events")


class Relay:
    """Listens at an endpoint in a directory of its own, in a thread. For the daemon, the driver's
    process is this one."""

    def __init__(self, directory: Path, endpoint: str) -> None:
        """endpoint: the daemon's, ipc://DIR/NAME."""
        directory.mkdir(mode=0o700)
        self.endpoint = f"ipc://{directory}/relay"
        self.num_made = dict.fromkeys(SOCKETS, 0)
        """Connections by socket, since the start."""
        self._own = self.endpoint.removeprefix("ipc://")
        self._daemon = endpoint.removeprefix("ipc://")
        self._connections: dict[str, set[asyncio.StreamWriter]] = {name: set() for name in SOCKETS}
        self._refused: set[str] = set()
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._is_up.wait(60)
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(60)

    def cut(self, *names: str, refuse: bool = False) -> None:
        """End the connections of these sockets; refuse: and new ones, until restore()."""

        async def end() -> None:
            self._refused.update(names if refuse else ())
            for name in names:
                _abort(*self._connections[name])

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(60)

    def restore(self) -> None:
        """Accept connections again."""
        self._refused.clear()

    async def _run(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        servers = [
            await asyncio.start_unix_server(partial(self._serve, name), self._own + name)
            for name in SOCKETS
        ]
        self._is_up.set()
        await self._end.wait()
        for server in servers:
            server.close()
        for connections in self._connections.values():
            _abort(*connections)

    async def _serve(
        self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        ends = [writer]
        with contextlib.suppress(OSError, asyncio.CancelledError):
            if name not in self._refused:
                from_daemon, to_daemon = await asyncio.open_unix_connection(self._daemon + name)
                ends.append(to_daemon)
                self._connections[name].update(ends)
                self.num_made[name] += 1
                await asyncio.gather(_pump(reader, to_daemon), _pump(from_daemon, writer))
        self._connections[name].difference_update(ends)
        _abort(*ends)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass bytes on until the end, then end both ways."""
    while content := await reader.read(1 << 16):
        writer.write(content)
        await writer.drain()
    raise ConnectionResetError


def _abort(*writers: asyncio.StreamWriter) -> None:
    for writer in writers:
        writer.transport.abort()
