"""Opens rendezvous servers, where the ranks of a link find each other, and aborts links and
rendezvous that a rank waits in. Owns the servers. Main thread only: the guard thread aborts links,
the step thread receives commands."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from rpc_schema import lifecycle as lc
from rpc_schema.codec import ControlReplyMessage
from rpc_schema.config import RendezvousAddress
from rpc_schema.errors import FencedError
from worker_daemon.server.dispatch import OpenRendezvousServer, RendezvousServerLike
from worker_daemon.server.health.guard import Guard
from worker_daemon.server.lifecycle import MAX_CAUSE_BYTES
from worker_daemon.server.progress import Progress
from worker_daemon.server.step_thread import Command, LinkLost
from worker_host.plain_text import one_line


@dataclass(slots=True, eq=False)
class LinkRendezvous:
    """The newest rendezvous server, and the one before it, where ranks may still wait."""

    _open_rendezvous: OpenRendezvousServer
    _host: str
    """Host that the servers listen on."""
    _need_attached: Callable[[int], None]
    """Raises unless the epoch is the attached driver's."""
    _progress: Progress
    _guard: Guard
    _post: Callable[[Command], None]
    """Sends to the step thread."""
    _servers: deque[RendezvousServerLike] = field(default_factory=deque, init=False)

    def open(self, message: lc.OpenRendezvous) -> ControlReplyMessage:
        """Open a rendezvous server for a link above the current one. Raises FencedError for any
        other link, and the errors of need_attached."""
        self._need_attached(message.epoch)
        if message.link <= self._progress.link:
            problem = f"link {message.link} is not above link {self._progress.link}"
            raise FencedError(problem, fix="use a higher link")
        while len(self._servers) > 1:
            self._servers.popleft().close()
        server = self._open_rendezvous(self._host, message.num_ranks)
        self._servers.append(server)
        place = RendezvousAddress(host=server.host, port=server.port, secret=server.secret)
        return lc.OpenRendezvousReply(call=message.call, place=place)

    def abort_link(self, message: lc.AbortLink) -> ControlReplyMessage:
        """Abort waits for other ranks, in the link and in a rendezvous. Raises as need_attached
        does."""
        self._need_attached(message.epoch)
        link, cause = self._progress.link, one_line(message.cause, MAX_CAUSE_BYTES)
        self._guard.hangs.forgive()
        if self._progress.snapshot.state.link != "none":
            self._guard.request_abort(cause)
            self._post(LinkLost(link, cause))
        if self._servers:
            self._servers.pop().close()
        return lc.Acknowledged(call=message.call)

    def close(self) -> None:
        """Close them all."""
        for server in self._servers:
            server.close()
