"""A communicator beside the links: of the ranks of two groups, between which KV blocks move, or of
those between which experts move. No link ends with it.

Like transfer_group.py it uses torch.distributed's backend directly. Messages are tensors that one
member sends and one receives, in the order of each pair: NCCL would take the same calls, with
buffers on the device.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public nevertheless

from rendezvous.listeners import ListenerWatch, Sockets, end, has_ended, inheritable_connections
from rpc_schema.errors import CommError, TransferError
from worker_daemon.distributed.link import prove_members
from worker_daemon.distributed.rendezvous import RendezvousStore, connect_store
from worker_daemon.raising import Translation

Messages: TypeAlias = Sequence[tuple[int, Tensor]]
"""Members, and a contiguous tensor for or from each."""


@dataclass(frozen=True, slots=True)
class PeerMeeting:
    """The rendezvous of a channel's members."""

    name: str
    """Purpose of the channel: members of another one are strangers."""
    fix: str
    """Advice for when it breaks."""
    host: str
    port: int
    secret: bytes
    rank: int
    size: int
    timeout_s: float
    """Limit on the meeting, and on every wait for a member."""


class PeerChannel:
    """Belongs to one thread; only abort() may be called from others."""

    def __init__(self, meeting: PeerMeeting) -> None:
        """Create a channel without connections, so that it can be aborted while it opens."""
        self._meeting = meeting
        self._is_aborted = False
        self._store: RendezvousStore | None = None
        self._group: dist.ProcessGroup | None = None
        self._connections: Sockets = frozenset()

    def open(self, meeting: threading.Lock) -> None:
        """Connect to all members. meeting: held while gloo connects.

        Raises:
            TransferError: not all have connected within the timeout, or a stranger has.
        """
        own = self._meeting
        with self._failing("meeting the other members"):
            store = connect_store(own.host, own.port, own.secret, own.timeout_s)
            self._store = store
            store.set(f"here/{own.rank}", b"1")
            store.wait([f"here/{rank}" for rank in range(own.size)])
            with meeting:
                others = inheritable_connections()
                with ListenerWatch():
                    timeout = timedelta(seconds=own.timeout_s)
                    named = PrefixStore(own.name, store)
                    gloo = dist.ProcessGroupGloo(named, own.rank, own.size, timeout)
                    self._group = cast(dist.ProcessGroup, gloo)  # torch's stubs lack its methods
                self._connections = inheritable_connections() - others
            prove_members(own.secret, own.name, self._group)
            store.end()
        if self._is_aborted:
            self.abort()

    def send(self, messages: Messages) -> None:
        """Send a message to each of several members, and wait until all have left.

        Raises:
            TransferError: a member is lost, or does not receive within the timeout.
        """
        assert self._group is not None, "after open() only"
        with self._failing("sending"):
            works = [self._group.send([tensor], rank, 0) for rank, tensor in messages]
            for work in works:
                work.wait()

    def receive(self, messages: Messages) -> None:
        """Receive a message from each of several members, and wait until all are there. A tensor's
        storage should have room for any message of the channel: of one that is out of step and
        larger than that, gloo ends the process.

        Raises:
            TransferError: a member is lost, or does not send within the timeout.
        """
        assert self._group is not None, "after open() only"
        with self._failing("receiving"):
            works = [self._group.recv([_storage(tensor)], rank, 0) for rank, tensor in messages]
            for work in works:
                work.wait()

    def exchange(self, sent: Messages, received: Messages, timeout_s: float) -> None:
        """Send and receive messages of sizes that both sides know, and wait until all have left
        and arrived.

        Raises:
            TransferError: a member is lost, or this has taken timeout_s.
        """
        assert self._group is not None, "after open() only"
        until = time.monotonic() + timeout_s
        with self._failing("exchanging"):
            works = [self._group.recv([tensor], rank, 0) for rank, tensor in received]
            works += [self._group.send([tensor], rank, 0) for rank, tensor in sent]
            for work in works:
                left_s = max(until - time.monotonic(), 0.001)
                work.wait(timedelta(seconds=left_s))

    def abort(self) -> None:
        """End all waits, of the other members too: a channel without its connections is of no
        use to them. Before it is open, it ends once it is."""
        self._is_aborted = True
        end(self._connections)
        if self._store is not None:
            self._store.end()

    @property
    def is_lost(self) -> bool:
        """True once a member has ended its connection, or has died."""
        return has_ended(self._connections)

    def leave(self) -> None:
        """Abandon the channel. gloo's threads end with its group, which this may wait for."""
        self.abort()
        self._group = self._store = None

    def _failing(self, what: str) -> Translation:
        own = self._meeting

        def translate(error: Exception) -> TransferError:
            return TransferError(
                f"{what} failed: {error}",
                field="peers",
                value=f"{own.host}:{own.port}, rank {own.rank} of {own.size}",
                fix=own.fix,
            )

        return Translation((RuntimeError, ValueError, CommError), translate)


def _storage(tensor: Tensor) -> Tensor:
    """Return all of a tensor's storage, uint8 [n], which begins with it."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
