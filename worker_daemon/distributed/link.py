"""A link: one generation of communicators between the daemons of a replica, or of all replicas in
lockstep. Only this module creates process groups.

Transfers over the groups are in tp.py, pp.py and tokens.py.
"""

import hmac
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

from rendezvous.listeners import ListenerWatch, Sockets, end, inheritable_connections
from rendezvous.store import member_proof
from rpc_schema.errors import CommError
from worker_daemon.distributed.parallel_state import ParallelState
from worker_daemon.distributed.rendezvous import RendezvousStore, connect_store
from worker_daemon.distributed.symmetric import Peers, open_peers
from worker_daemon.distributed.tp import all_gather, communication
from worker_daemon.raising import Translation


@dataclass(frozen=True, slots=True)
class LinkGroups:
    """The process groups of which this rank is a member; None if the group would have one
    member."""

    stage: dist.ProcessGroup | None
    """All tensor-parallel ranks of this pipeline stage."""
    from_previous: dist.ProcessGroup | None
    """The same tensor-parallel rank of the previous stage (group rank 0), and this rank (1)."""
    to_next: dist.ProcessGroup | None
    """This rank (0), and the same tensor-parallel rank of the next stage (1)."""
    pipeline: dist.ProcessGroup | None
    """This tensor-parallel rank of every stage, first to last. Sampled tokens return over it."""
    experts: dist.ProcessGroup | None = None
    """All tensor-parallel ranks of this stage of all replicas in lockstep, replica after replica:
    they may share experts. None for one replica."""

    @property
    def all(self) -> tuple[dist.ProcessGroup | None, ...]:
        """Every field."""
        return self.stage, self.from_previous, self.to_next, self.pipeline, self.experts


ABORT_LIMIT_S = 2.0
"""Limit on the wait for an abort. With a working device an abort takes half a second. It unblocks
waits at once, but ends only when no graph holds the communicator's kernels, and it may hang."""

RENDEZVOUS_SLACK_S = 5.0

_NCCL_NEVER = timedelta(days=30)
"""NCCL's own timeout, which must never expire: if its watchdog times out, the communicator's next
user blocks forever. Instead, the guard aborts a hanging link at the deadline of its phase. A peer
may compile kernels for longer than a step's deadline."""


@dataclass(frozen=True, slots=True)
class RendezvousPoint:
    """A rendezvous of a link's ranks, and the secret by which they prove their identity."""

    host: str
    port: int
    secret: bytes


NO_GROUPS = LinkGroups(stage=None, from_previous=None, to_next=None, pipeline=None)


class Link:
    """The process groups and shared memory of one link. Owned by the worker, used on the step
    thread; only abort and dump may be called from the guard thread."""

    def __init__(self, generation: int, device: torch.device) -> None:
        """Create a link without groups, so that it can be aborted while it is opened."""
        self.generation = generation
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self.groups = NO_GROUPS
        self.peers = Peers()
        """Memory that the ranks of this stage share."""
        self.expert_peers = Peers()
        """Memory that those of this stage of all replicas in lockstep share."""
        self._device = device
        self._store: RendezvousStore | None = None
        self._connections: Sockets = frozenset()
        """Those of gloo's groups; empty with NCCL."""
        self.is_aborted = False
        """True once the output of the link's kernels is invalid. Any thread may read it."""

    def open(self, state: ParallelState, place: RendezvousPoint | None, timeout_s: float) -> None:
        """Connect to the other ranks, create every group, and pass one message over each pair.

        place: None for a link of one, which needs no rendezvous and does not listen.

        gloo accepts every connection while groups are created. So creation begins only once all
        ranks have connected, gloo's listeners are shut when it ends, and each pair proves that it
        holds the secret. NCCL creates a collective's communicator at its first message, which
        blocks and takes memory, so the first messages are sent here, before any memory baseline.
        Blocks until all ranks have connected. timeout_s bounds every later wait on gloo, if abort()
        has not ended it; on NCCL only abort() ends a wait.

        Raises:
            CommError: they did not connect within rendezvous_limit_s(timeout_s), or a stranger did.
        """
        if state.group_size == 1:
            return
        assert place is not None, "resolved before"
        try:
            self._store = connect_store(
                place.host, place.port, place.secret, rendezvous_limit_s(timeout_s)
            )
            store = distributed_c10d.PrefixStore(f"link{self.generation}", self._store)
            _await_all(self._store, state)
            with communication("creating the process groups"):
                self._make_groups(store, state, timeout_s)
                if self.backend == "gloo":
                    _prove(self.groups, place.secret)
                _warm_up(self.groups, state, self._device)
            with communication("mapping the peers' memory"):
                self.peers = open_peers(
                    distributed_c10d.PrefixStore(
                        f"windows{state.rank_in_group // state.tp_size}", store
                    ),
                    state.tp_rank,
                    state.tp_size,
                    self._device,
                    timeout_s,
                )
                experts = self.groups.experts
                if experts is not None:
                    self.expert_peers = open_peers(
                        distributed_c10d.PrefixStore(f"expert-windows{state.pp_rank}", store),
                        experts.rank(),
                        experts.size(),
                        self._device,
                        timeout_s,
                    )
            self._store.end()
        except BaseException:
            self.leave()
            raise

    def _make_groups(
        self, store: distributed_c10d.PrefixStore, state: ParallelState, timeout_s: float
    ) -> None:
        """Return a context that shuts gloo's listeners once its groups exist, or when strangers
        open too many connections."""
        if self.backend != "gloo":
            self._make_open_groups(store, state, timeout_s)
            return
        others, watch = inheritable_connections(), ListenerWatch()
        with _flooding(watch), watch:
            self._make_open_groups(store, state, timeout_s)
        self._connections = inheritable_connections() - others

    def _make_open_groups(
        self, store: distributed_c10d.PrefixStore, state: ParallelState, timeout_s: float
    ) -> None:
        dist.init_process_group(
            self.backend,
            store=store,
            rank=state.rank_in_group,
            world_size=state.group_size,
            timeout=self._longest_wait(rendezvous_limit_s(timeout_s)),
            group_name=f"link{self.generation}",
        )
        self.groups = _make_groups(state, self._longest_wait(timeout_s), self._device)

    def _longest_wait(self, timeout_s: float) -> timedelta:
        return _NCCL_NEVER if self.backend == "nccl" else timedelta(seconds=timeout_s)

    def raise_if_aborted(self) -> None:
        """Raise CommError if the link was aborted: the output of its kernels is then invalid."""
        if self.is_aborted:
            raise CommError("the link was aborted", fix="relink the group")

    def abort(self, *, frees_peers: bool) -> bool:
        """Unblock all waits for other ranks at once; return True if that could be done.

        gloo has no abort. With frees_peers its connections end, so the peers' waits for this rank
        fail too, as with a lost peer. Without it, waits on gloo last until their timeout, and each
        peer that hangs finds that out itself.

        All of NCCL's groups are aborted at once: an abort frees memory, and CUDA delays that until
        the kernels of the other groups have ended too. Sequential aborts would wait for each other.
        """
        members = [group for group in self.groups.all if group is not None]
        if not members:
            return False
        if self.backend == "gloo":
            if frees_peers:
                end(self._connections)
            return frees_peers
        self.is_aborted = True
        self.peers.stop()
        self.expert_peers.stop()
        aborts = [threading.Thread(target=group.abort, daemon=True) for group in members]
        for thread in aborts:
            thread.start()
        for thread in aborts:
            thread.join(ABORT_LIMIT_S)
        return True

    def dump(self) -> bytes:
        """Return the last operations of NCCL's communicators, as JSON from torch's flight recorder;
        empty if there is none. Any thread may call it, even while another one waits inside a
        communicator."""
        dump_json = getattr(_distributed_c10d, "_dump_nccl_trace_json", None)
        if self.backend != "nccl" or dump_json is None:
            return b""
        record: bytes | str = dump_json(includeCollectives=True, onlyActive=False)
        return record if isinstance(record, bytes) else record.encode()

    def leave(self) -> threading.Thread | None:
        """Abandon the groups without contacting any peer.

        Returns the thread that disposes of them; it may take until their timeout.
        """
        self.abort(frees_peers=True)
        if self._store is not None:
            self._store.end()
        left_behind: list[object] = [*self.groups.all, dist.group.WORLD, self._store]
        self.groups = NO_GROUPS
        self._store = None
        for peers in (self.peers, self.expert_peers):
            peers.leave()
        self.peers = self.expert_peers = Peers()
        if not _forget_groups(self.backend):
            return None
        # Dropping gloo groups joins their threads, which wait for dead peers until the timeout. So
        # another thread drops them.
        disposal = threading.Thread(target=left_behind.clear, name="link-disposal", daemon=True)
        disposal.start()
        return disposal


def rendezvous_limit_s(timeout_s: float) -> float:
    """Return the limit of a rendezvous: long enough for a peer to notice within timeout_s that its
    old link is broken."""
    return 2 * timeout_s + RENDEZVOUS_SLACK_S


def _await_all(store: RendezvousStore, state: ParallelState) -> None:
    """Wait until every rank has connected."""
    store.set(f"here/{state.rank_in_group}", b"1")
    store.wait([f"here/{rank}" for rank in range(state.group_size)])


def _forget_groups(backend: str) -> bool:
    """Make torch forget every group, so that the next link starts fresh; return True if it had any.

    torch names groups by a counter that must be equal on all ranks, and a failed start does not
    reset it.
    """
    had_groups = dist.is_initialized()
    if had_groups and backend == "nccl":
        distributed_c10d._abort_process_group()
    elif had_groups:
        dist.destroy_process_group()
    distributed_c10d._world.group_count = 0
    return had_groups


def _make_groups(state: ParallelState, timeout: timedelta, device: torch.device) -> LinkGroups:
    """Create every group of the link, on every rank in the same order, one replica after the other;
    return those that include this rank.

    On CUDA the pairs' communicators are created eagerly: memory cannot be registered with a
    communicator that NCCL creates at a pair's first message (pp.py).
    """
    device_of_hops = device if device.type == "cuda" else None

    def make(ranks: list[int], device_id: torch.device | None = None) -> dist.ProcessGroup | None:
        if len(ranks) == 1:
            return None
        group = dist.new_group(ranks, timeout=timeout, device_id=device_id)
        return group if state.rank_in_group in ranks else None

    def keep(candidates: list[dist.ProcessGroup | None]) -> dist.ProcessGroup | None:
        return next((group for group in candidates if group is not None), None)

    firsts = range(0, state.group_size, state.world_size)

    def in_each_replica(
        ranks: list[int], device_id: torch.device | None = None
    ) -> dist.ProcessGroup | None:
        return keep([make([first + rank for rank in ranks], device_id) for first in firsts])

    stages = [in_each_replica(state.stage_ranks(pp_rank)) for pp_rank in range(state.pp_size)]
    pipelines = [in_each_replica(state.pipeline_ranks(tp_rank)) for tp_rank in range(state.tp_size)]
    hops = {
        (pp_rank, tp_rank): in_each_replica(
            [state.rank_of(pp_rank, tp_rank), state.rank_of(pp_rank + 1, tp_rank)], device_of_hops
        )
        for pp_rank in range(state.pp_size - 1)
        for tp_rank in range(state.tp_size)
    }
    return LinkGroups(
        stage=keep(stages),
        from_previous=hops.get((state.pp_rank - 1, state.tp_rank)),
        to_next=hops.get((state.pp_rank, state.tp_rank)),
        pipeline=keep(pipelines),
        experts=keep([make(state.expert_ranks(pp_rank)) for pp_rank in range(state.pp_size)])
        if state.lockstep
        else None,
    )


def _warm_up(groups: LinkGroups, state: ParallelState, device: torch.device) -> None:
    """Pass one byte over every pair and every collective group, and wait for their arrival."""
    byte = torch.zeros(1, dtype=torch.uint8, device=device)
    waits: list[Callable[[], object]] = []
    if groups.from_previous is not None:
        work = dist.irecv(byte.clone(), group=groups.from_previous, group_src=0)
        waits.append(_waiter(work))
    if groups.to_next is not None:
        work = dist.isend(byte, group=groups.to_next, group_dst=1)
        waits.append(_waiter(work))
    for wait in waits:
        wait()
    if groups.stage is not None:
        dist.all_reduce(byte.clone(), group=groups.stage)
        gathered = torch.zeros(state.tp_size, dtype=torch.uint8, device=device)
        all_gather(gathered, byte, groups.stage)
    if groups.pipeline is not None:
        dist.broadcast(byte.clone(), group=groups.pipeline, group_src=state.pp_size - 1)
    if groups.experts is not None:
        gathered = torch.zeros(groups.experts.size(), dtype=torch.uint8, device=device)
        all_gather(gathered, byte, groups.experts)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _flooding(watch: ListenerWatch) -> Translation:
    """Return a context that raises CommError if strangers opened so many connections that the ranks
    could not connect."""

    def translate(error: Exception) -> CommError | None:
        if not watch.is_flooded:
            return None
        problem = f"strangers opened too many connections while the ranks met: {error}"
        return CommError(problem, fix="see who else uses the data interface, then relink")

    return Translation((RuntimeError, ValueError), translate)


def _prove(groups: LinkGroups, secret: bytes) -> None:
    """Exchange proofs in each group of this rank: a stranger that connected in a rank's place has
    none.

    Raises:
        CommError: a peer has no proof.
    """
    for group in groups.all:
        if group is not None:
            name = f"link ranks {dist.get_process_group_ranks(group)}"
            prove_members(secret, name, group)


def prove_members(secret: bytes, name: str, group: dist.ProcessGroup) -> None:
    """Exchange proofs with every other member of a group, or of a backend without a group.

    Raises:
        CommError: a member does not hold the secret.
    """
    rank = group.rank()
    peers = [peer for peer in range(group.size()) if peer != rank]
    received = {peer: torch.zeros(32, dtype=torch.uint8) for peer in peers}
    codes = [member_proof(secret, name, rank, peer) for peer in peers]
    sent = [torch.frombuffer(bytearray(code), dtype=torch.uint8) for code in codes]
    works = [group.recv([received[peer]], peer, 0) for peer in peers]
    works += [group.send([message], peer, 0) for message, peer in zip(sent, peers, strict=True)]
    for work in works:
        work.wait()
    strangers = [
        peer
        for peer in peers
        if not hmac.compare_digest(
            received[peer].numpy().tobytes(), member_proof(secret, name, peer, rank)
        )
    ]
    if strangers:
        problem = f"a stranger has connected in the place of members {strangers} of {name}"
        raise CommError(problem, fix="see who else uses the data interface, then relink")


def _waiter(work: dist.Work | None) -> Callable[[], object]:
    assert work is not None, "this rank is in the group"
    return work.wait
