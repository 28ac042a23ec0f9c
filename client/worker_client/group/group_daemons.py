"""A driver's connections to the daemons of a group: a client for each rank, the shared sockets for
results and events, and the watch over liveness."""

import contextlib
from collections.abc import Callable, Sequence

import zmq

from rpc_schema.errors import IncompatibleError
from rpc_schema.lifecycle import Status
from worker_client.errors import DeadlineExceeded, WorkerDied
from worker_client.wire.control_channel import CheckDeaths
from worker_client.wire.endpoint import Endpoint, new_driver_id
from worker_client.wire.liveness import Watch
from worker_client.wire.processes import Process, find_process
from worker_client.wire.transport import EventsChannel, ResultsChannel
from worker_client.wire.worker_client import OnSent, WorkerClient

SUCCESSOR_ASK_S = 1.0
"""Limit on asking one daemon who it is."""
_ASK_S = 0.25
_STATUS_S = 1.0


class GroupDaemons:
    """Owned by the group's channel. Belongs to one thread; close() frees the sockets."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        driver_id: bytes,
        look: CheckDeaths,
        listen: Callable[[], None],
        on_sent: OnSent,
        first_rank: int = 0,
    ) -> None:
        """Connect; nothing is sent yet. look: called while a daemon's step socket or results are
        waited for; see StepChannel and ResultsChannel. listen: called while a control reply is
        waited for; it passes events to the watch. on_sent: see WorkerClient. first_rank: global
        rank of the first daemon."""
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._driver_id = driver_id
        self._look = look
        self._listen = listen
        self._on_sent = on_sent
        self._keyed = {endpoint.results for endpoint in endpoints if endpoint.lock is not None}
        self.watch = Watch(
            [e.results for e in endpoints],
            [e.control for e in endpoints],
            find=self._find_process,
            first_rank=first_rank,
        )
        self.results_route = new_driver_id()
        """Routing id of the results socket. A secret: another connection with it would receive the
        results."""
        self.results = ResultsChannel(
            self.context, endpoints, self.results_route, self.watch, look, first_rank
        )
        self.events = EventsChannel(self.context, endpoints)
        self.ranks = range(first_rank, first_rank + len(endpoints))
        """Their global ranks."""
        self.clients = list(map(self._connect, self.ranks, endpoints))
        """In rank order."""
        self.absent: frozenset[int] = frozenset()
        """Lost ranks: nothing is sent to them, nor expected of them."""

    def close(self) -> None:
        """Close all sockets, and the context."""
        for client in self.clients:
            client.close()
        self.results.close()
        self.events.close()
        self.watch.close()
        self.context.term()

    @property
    def present(self) -> Sequence[WorkerClient]:
        """Clients of the daemons that the group has at the moment."""
        if not self.absent:
            return self.clients
        return [client for client in self.clients if client.rank not in self.absent]

    def get_status(self) -> list[Status]:
        """Return every daemon's state."""
        return [client.get_status() for client in self.clients]

    def client(self, rank: int) -> WorkerClient:
        """Return the client of a rank."""
        return self.clients[self.ranks.index(rank)]

    def are_connected(self) -> bool:
        """Return True if the results of all present daemons have a connection. Raises
        AuthenticationError if a daemon refused us."""
        self.results.read_connection_events()
        return all(self.results.is_connected(client.endpoint) for client in self.present)

    def new_client(self, rank: int, endpoint: Endpoint) -> WorkerClient:
        """Return a client for a daemon that does not belong to the group (yet); the caller closes
        it."""
        return WorkerClient(self.context, endpoint, rank, self._driver_id)

    def move(self, rank: int, endpoint: Endpoint) -> None:
        """Replace a rank's daemon by the one that listens at `endpoint` now."""
        place = self.ranks.index(rank)
        old = self.clients[place].endpoint
        self.clients[place].close()
        if endpoint.lock is not None:
            self._keyed.add(endpoint.results)
        self.watch.expect(rank, endpoint.results, endpoint.control)
        self.results.move(old, endpoint)
        self.events.move(old, endpoint)
        self.clients[place] = self._connect(rank, endpoint)

    def check_lives(self) -> None:
        """Raise WorkerDied for a dead rank that is not known to be absent."""
        try:
            self.watch.look()
        except WorkerDied as error:
            if error.rank not in self.absent:
                raise

    def find_successors(self) -> None:
        """Have the watch count ranks as dead in whose places other daemons answer: successors that
        were started while this driver did not look."""
        for client in self.present:
            try:
                uid = client.hello(SUCCESSOR_ASK_S).worker_uid
            except (DeadlineExceeded, WorkerDied):
                continue
            except IncompatibleError:
                uid = None
            self.watch.answers_as(client.rank, uid)

    def _check_alive(self, rank: int) -> None:
        """Raise WorkerDied if this rank answers no more: the others may be asked even then."""
        self.results.read_connection_events()
        self._listen()
        with contextlib.suppress(WorkerDied):
            self.watch.look()
        if not self.watch.answers(rank):
            raise self.watch.death_of(rank)

    def _connect(self, rank: int, endpoint: Endpoint) -> WorkerClient:
        return WorkerClient(
            self.context,
            endpoint,
            rank,
            self._driver_id,
            self._look,
            lambda: self._check_alive(rank),
            self._on_sent,
        )

    def _find_process(self, address: str) -> Process:
        """Return the process at an address. Daemons with keys are not probed: they would refuse the
        connection and log it."""
        keyed = address in self._keyed
        return self.results.process_at(address) if keyed else find_process(address)


def obstacle_to(client: WorkerClient) -> str | None:
    """Return why no driver can attach to the daemon of a client yet, such as the end of another one
    that was there before; None if nothing shows."""
    try:
        client.hello(_ASK_S)
    except (DeadlineExceeded, WorkerDied):
        return "no daemon has answered"
    try:
        serving = client.get_status(_STATUS_S).serving
    except DeadlineExceeded:
        return None  # it is busy
    except WorkerDied:
        return "no daemon has answered"
    return None if serving == "SERVING" else f"no daemon but one that is {serving} has answered"
