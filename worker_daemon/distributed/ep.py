"""The exchange of tokens between the ranks that share a layer's experts: those of one stage, of all
replicas in lockstep.

Dispatch is an all-gather, combine a reduce-scatter, so that a token's way does not depend on its
experts. Each rank brings an equal share of its replica's tokens, padded to as many rows on every
rank. That number follows from the counts in the step's message: no sizes are exchanged. Rows that
fit go over windows of shared memory, others over torch.distributed.

Shapes: R ranks, n rows of each rank in an exchange, H hidden size, K experts of a token.
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from worker_daemon.contracts.experts import RoutedTokens
from worker_daemon.contracts.window import Window
from worker_daemon.distributed.parallel_state import ParallelState
from worker_daemon.distributed.symmetric import Peers, is_device_done
from worker_daemon.distributed.tp import all_gather, communication, smallest
from worker_daemon.distributed.trials import NUM_TRIALS, TRIAL_S, on_trial

_TRIAL_TOP_K = 2

Multiply = Callable[[Tensor, RoutedTokens], Tensor]
"""Returns the sums of this rank's experts, [N, H], of tokens [N, H]: ExpertOps.multiply."""


class RowExchange(Protocol):
    """Exchanges rows over the windows of a link."""

    def most_rows(self, hidden_size: int, top_k: int, dtype: torch.dtype) -> int:
        """Return the most rows of a rank that it accepts; the same on every rank."""

    def gather(self, x: Tensor, routed: RoutedTokens, num_rows: int) -> tuple[Tensor, RoutedTokens]:
        """Return all ranks' rows, [R n, H] and [R n, K], of x [N, H] and routed [N, K]; those of
        padding have no experts. num_rows: n."""

    def sum_rows(self, total: Tensor) -> Tensor:
        """Return this rank's rows [n, H] of the sum of every rank's total [R n, H]."""


MakeRowExchange = Callable[[Window], RowExchange]


class ReplicaExperts:
    """One rank's view of the ranks of its stage in all replicas. Layers keep this object as long as
    they exist; a link gives it a process group. Every rank makes the same exchanges in the same
    order, whether it has tokens or not. Used on the step thread only."""

    def __init__(
        self, state: ParallelState, make_row_exchange: MakeRowExchange | None = None
    ) -> None:
        """state: of replicas in lockstep. make_row_exchange: None to use only torch.distributed;
        the same on every rank."""
        self.rank = state.dp_rank * state.tp_size + state.tp_rank
        self.size = state.dp_size * state.tp_size
        self.dp_size = state.dp_size
        self.num_done = 0
        """Exchanges of the present forward pass that have ended."""
        self.is_torn = False
        """True if an exchange has begun and not ended."""
        self._tp_rank, self._tp_size = state.tp_rank, state.tp_size
        self._num_tokens = self._num_rows = 0
        self._reaches_peers = True
        self._make_row_exchange = make_row_exchange
        self._group: dist.ProcessGroup | None = None
        self._windows: RowExchange | None = None

    @property
    def name(self) -> str:
        """Name of the exchange, as a daemon reports it."""
        library = "none" if self._group is None else dist.get_backend(self._group)
        ways = library if self._windows is None else f"peer memory for few tokens, {library}"
        return f"all-gather and reduce-scatter of {self.size} ranks, {ways}"

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The link's process group; None without one."""
        return self._group

    @property
    def is_open(self) -> bool:
        """True within a forward pass in which any replica has tokens."""
        return self._num_rows > 0

    def bind(self, group: dist.ProcessGroup | None, peers: Peers | None = None) -> None:
        """Use another link's process group from now on, and its windows if a trial exchange over
        them succeeds on every rank. Collective.

        Raises:
            CommError: another rank is gone.
        """
        self._group, self._windows = group, None
        self.is_torn = False
        self.end()
        if group is None or self._make_row_exchange is None or peers is None:
            return
        if peers.window is None:
            return
        purpose = "experts' tokens are not exchanged"
        exchange = on_trial(peers, self._make_row_exchange, _exchanges, purpose)
        works, choice = int(exchange is not None), "how to exchange the experts' tokens"
        if smallest(works, peers.window.device, group, choice):
            self._windows = exchange

    @property
    def can_be_graphed(self) -> bool:
        """True if graphs may hold exchanges: see most_graphed."""
        return self._windows is not None

    def most_graphed(self, hidden_size: int, top_k: int, dtype: torch.dtype) -> int:
        """Return the most tokens of a replica whose exchanges a graph may hold: those over windows.
        What one rank replays, another may launch one by one, which NCCL does not allow."""
        if self._windows is None:
            return 0
        return self._windows.most_rows(hidden_size, top_k, dtype) * self._tp_size

    def begin(self, num_tokens: int, *, reaches_peers: bool = True) -> None:
        """Begin the exchanges of a forward pass. num_tokens: those of each replica, with padding;
        equal on every rank. reaches_peers: False to multiply as many rows of any values without the
        peers, so that the kernels are compiled."""
        self._reaches_peers = reaches_peers
        self._num_tokens = num_tokens
        self._num_rows = -(-num_tokens // self._tp_size)
        self.num_done = 0

    def has_size_of(self, num_tokens: int) -> bool:
        """Return True if a graph of so many tokens makes the exchanges of this forward pass."""
        return num_tokens == self._num_tokens

    def replay(self, launch: Callable[[], None]) -> None:
        """Make all exchanges of the forward pass by launching the graph that holds them."""
        self.is_torn = True
        launch()
        self.is_torn = False
        self.end()

    def end(self) -> None:
        """End the exchanges of a forward pass."""
        self._num_rows = 0

    def run(self, x: Tensor, routed: RoutedTokens, multiply: Multiply) -> Tensor:
        """Return this rank's part [N, H] of the experts' sums of its replica's tokens, x [N, H]:
        its tensor-parallel ranks' parts are to be added. N may be 0, but is the same on all ranks
        of a replica. Without an open forward pass, x has no tokens.

        Raises:
            CommError: a peer is gone, or did not respond within the group's timeout.
        """
        if not self._num_rows:
            return torch.zeros_like(x)
        if not self._reaches_peers:
            rows = torch.zeros(self.size * self._num_rows, dtype=torch.int64, device=x.device)
            multiply(x[rows], RoutedTokens(*(each[rows] for each in routed)))
            return torch.zeros_like(x)
        self.is_torn = True
        own = slice(self._tp_rank * self._num_rows, (self._tp_rank + 1) * self._num_rows)
        here = RoutedTokens(*(each[own] for each in routed))
        top_k, windows = routed.experts.shape[1], self._windows
        if windows is None or self._num_rows > windows.most_rows(x.shape[1], top_k, x.dtype):
            sums = self._reduce_scatter(multiply(*self._gather(x[own], here)))
        else:
            sums = windows.sum_rows(multiply(*windows.gather(x[own], here, self._num_rows)))
        self.is_torn = False
        self.num_done += 1
        if self._tp_size == 1:
            return sums[: x.shape[0]]
        part = torch.zeros_like(x)
        part[own] = sums[: part[own].shape[0]]
        return part

    def _gather(self, x: Tensor, routed: RoutedTokens) -> tuple[Tensor, RoutedTokens]:
        """Return all ranks' rows, [R n, H] and [R n, K]; those of padding have no experts. x:
        [N, H] with N <= n."""
        values = (x, *routed)
        fills = (0, -1, 0)  # no token, no expert, no weight
        columns = [
            _as_bytes(_padded(value, self._num_rows, fill))
            for value, fill in zip(values, fills, strict=True)
        ]
        own = torch.cat(columns, dim=1)
        everyone = own.new_empty((self.size * self._num_rows, own.shape[1]))
        with communication("all-gather of the experts' tokens"):
            all_gather(everyone.view(-1), own.view(-1), self._group)
        parts = torch.split(everyone, [column.shape[1] for column in columns], dim=1)
        tokens, experts, weights = (
            part.contiguous().view(value.dtype) for part, value in zip(parts, values, strict=True)
        )
        return tokens, RoutedTokens(experts, weights)

    def _reduce_scatter(self, total: Tensor) -> Tensor:
        """Return this rank's rows [n, H] of the sum of all ranks' total, contiguous [R n, H], which
        may be overwritten."""
        with communication("reduce-scatter of the experts' sums"):
            if self._group is not None and dist.get_backend(self._group) == "nccl":
                own = total.new_empty((self._num_rows, total.shape[1]))
                reduce_scatter(own, total, self._group)
                return own
            dist.all_reduce(total, group=self._group)  # gloo of torch 2.11 cannot scatter
        return total[self.rank * self._num_rows : (self.rank + 1) * self._num_rows]


def reduce_scatter(own: Tensor, total: Tensor, group: dist.ProcessGroup | None) -> None:
    """Fill own [n, ...] with this rank's rows of the sum of every rank's total [size * n, ...]."""
    if hasattr(dist, "reduce_scatter_single"):  # torch >= 2.13, which deprecates the other name
        dist.reduce_scatter_single(own, total, group=group)
    else:
        dist.reduce_scatter_tensor(own, total, group=group)


def replica_experts(
    state: ParallelState, make_row_exchange: MakeRowExchange | None = None
) -> ReplicaExperts | None:
    """Return a rank's view of those that may share its experts, not bound to a link yet; None
    unless replicas are in lockstep."""
    return ReplicaExperts(state, make_row_exchange) if state.lockstep else None


def _exchanges(exchange: RowExchange, window: Window) -> bool:
    """Return True if rows and sums of all ranks arrive and are correct, in first and in reused
    slots."""
    rank, size, device = window.rank, len(window.addresses), window.device
    x = torch.full((1, 16), rank + 1, dtype=torch.bfloat16, device=device)
    experts = torch.full((1, _TRIAL_TOP_K), rank, dtype=torch.int32, device=device)
    routed = RoutedTokens(experts, experts.float())
    arrived = [exchange.gather(x, routed, 2) for _ in range(NUM_TRIALS)]
    sums = [exchange.sum_rows(tokens) for tokens, _ in arrived]
    if not is_device_done(device, TRIAL_S):
        return False
    ranks = torch.arange(size, device=device)
    places = torch.stack((ranks, torch.full_like(ranks, -1)), dim=1).flatten()  # padding behind
    expected = places.to(torch.int32).unsqueeze(1).expand(-1, _TRIAL_TOP_K)
    own = torch.stack((x[0] * size, torch.zeros_like(x[0])))
    return all(torch.equal(own, each) for each in sums) and all(
        torch.equal(found.experts, expected) for _, found in arrived
    )


def _padded(value: Tensor, num_rows: int, fill: int) -> Tensor:
    """Return value [N, ...] as [num_rows, ...]."""
    if value.shape[0] == num_rows:
        return value
    padded = value.new_full((num_rows, *value.shape[1:]), fill)
    padded[: value.shape[0]] = value
    return padded


def _as_bytes(value: Tensor) -> Tensor:
    """Return rows [N, C] as uint8 [N, C * itemsize]."""
    return value.contiguous().view(torch.uint8)
