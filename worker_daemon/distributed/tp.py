"""The collectives of a layer's tensor-parallel group. A group of several ranks uses windows of
shared memory for short messages and torch.distributed for the others; the caller passes in the
reduction over windows.
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rpc_schema.errors import CommError
from worker_daemon.contracts.layer_ops import NormedSum
from worker_daemon.contracts.window import Window
from worker_daemon.distributed.symmetric import Peers, is_device_done
from worker_daemon.distributed.trials import NUM_TRIALS, TRIAL_S, on_trial
from worker_daemon.raising import Translation

SumAndNorm = Callable[[NormedSum], tuple[Tensor, Tensor]]
"""Returns the norm and the sum of a NormedSum: LayerOps.sum_and_norm."""


class Reducer(Protocol):
    """Reduces short messages over the windows of a link."""

    limit_bytes: int
    """The longest message that it accepts."""

    def takes(self, x: Tensor) -> bool:
        """Return True if this reducer accepts x [..., H]; the same on every rank."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of contiguous x over the ranks: a new tensor, with the same bits on every
        rank."""

    def all_reduce_and_norm(self, source: NormedSum) -> tuple[Tensor, Tensor]:
        """Return the norm and the sum of source, whose part is first summed over the ranks."""


MakeReducer = Callable[[Window], Reducer]


class TensorParallel(Protocol):
    """One rank's view of its tensor-parallel group, whose process group and windows come with a
    link, and go with it. Every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int:
        """0 <= rank < size."""

    @property
    def size(self) -> int:
        """Number of ranks in the group."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of x over the ranks, same shape and dtype; may overwrite x and return
        it."""

    def all_reduce_and_norm(
        self, source: NormedSum, sum_and_norm: SumAndNorm
    ) -> tuple[Tensor, Tensor]:
        """Return sum_and_norm of source, whose part is first summed over the ranks, in one kernel
        if that is faster; may overwrite the part, which is not None."""

    def all_gather_last_dim(self, x: Tensor) -> Tensor:
        """Return x [..., n] of all ranks, concatenated in rank order to [..., n * size]."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The link's process group; None without one."""

    @property
    def all_reduce_name(self) -> str:
        """Name of the all-reduce implementation, as a daemon reports it."""

    def bind(self, group: dist.ProcessGroup | None, peers: Peers | None = None) -> None:
        """Use another link's process group and windows from now on. Collective.

        Raises:
            CommError: another rank is gone.
        """


class SingleRank:
    """The group of one rank: no communication."""

    rank = 0
    size = 1
    group: dist.ProcessGroup | None = None
    all_reduce_name = "none"

    def bind(self, group: dist.ProcessGroup | None, peers: Peers | None = None) -> None:
        return None

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_reduce_and_norm(
        self, source: NormedSum, sum_and_norm: SumAndNorm
    ) -> tuple[Tensor, Tensor]:
        return sum_and_norm(source)

    def all_gather_last_dim(self, x: Tensor) -> Tensor:
        return x


class GroupTensorParallel:
    """The ranks of one stage. Layers keep this object as long as they exist; a new link gives it a
    new process group."""

    def __init__(self, rank: int, size: int, make_reducer: MakeReducer | None = None) -> None:
        """make_reducer: None to use only torch.distributed; the same on every rank."""
        self.rank = rank
        self.size = size
        self._make_reducer = make_reducer
        self._group: dist.ProcessGroup | None = None
        self._reducer: Reducer | None = None

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self._group

    @property
    def all_reduce_name(self) -> str:
        library = "none" if self._group is None else dist.get_backend(self._group)
        if self._reducer is None:
            return library
        return f"peer memory up to {self._reducer.limit_bytes >> 10} KiB, {library}"

    def bind(self, group: dist.ProcessGroup | None, peers: Peers | None = None) -> None:
        """Use another link's process group from now on, and its windows if a trial reduction over
        them succeeds on every rank."""
        self._group = group
        self._reducer = None
        if group is None or self._make_reducer is None or peers is None or peers.window is None:
            return
        purpose = "short messages are not reduced"
        reducer = on_trial(peers, self._make_reducer, _reduces, purpose)
        limit_bytes = 0 if reducer is None else reducer.limit_bytes
        limit_bytes = smallest(limit_bytes, peers.window.device, group, "how to reduce")
        if limit_bytes and reducer is not None:
            reducer.limit_bytes = limit_bytes
            self._reducer = reducer

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if self._reducer is not None and self._reducer.takes(x):
            return self._reducer.all_reduce(x)
        with communication("all-reduce in the tensor-parallel group"):
            dist.all_reduce(x, group=self._group)
        return x

    def all_reduce_and_norm(
        self, source: NormedSum, sum_and_norm: SumAndNorm
    ) -> tuple[Tensor, Tensor]:
        part = source.part
        assert part is not None
        if self._reducer is not None and self._reducer.takes(part):
            return self._reducer.all_reduce_and_norm(source)
        return sum_and_norm(source._replace(part=self.all_reduce(part)))

    def all_gather_last_dim(self, x: Tensor) -> Tensor:
        gathered = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        with communication("all-gather in the tensor-parallel group"):
            all_gather(gathered.view(-1), x.contiguous().view(-1), self._group)
        return gathered.movedim(0, -2).flatten(-2)


def all_gather(gathered: Tensor, own: Tensor, group: dist.ProcessGroup | None) -> None:
    """Fill gathered [size * n] with every rank's own [n], in rank order."""
    if hasattr(dist, "all_gather_single"):  # torch >= 2.13, which deprecates the other name
        dist.all_gather_single(gathered, own, group=group)
    else:
        dist.all_gather_into_tensor(gathered, own, group=group)


def tensor_parallel(
    rank: int, size: int, make_reducer: MakeReducer | None = None
) -> TensorParallel:
    """Return the rank's view of a tensor-parallel group of this size, not bound to a link yet."""
    return SingleRank() if size == 1 else GroupTensorParallel(rank, size, make_reducer)


def smallest(value: int, device: torch.device, group: dist.ProcessGroup, choice: str) -> int:
    """Return the smallest value of all ranks, so that all ranks make the same choice: `choice`,
    for the error. Collective. Raises CommError: a peer is gone."""
    least = torch.tensor(value, dtype=torch.int64, device=device)
    with communication(f"agreeing on {choice}"):
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
        return int(least.item())


def _reduces(reducer: Reducer, window: Window) -> bool:
    """Return True if sums over the ranks arrive and are correct, in first and in reused slots."""
    size = len(window.addresses)
    x = torch.full((2, 16), window.rank + 1, dtype=torch.bfloat16, device=window.device)
    sums = [reducer.all_reduce(x) for _ in range(NUM_TRIALS)]
    if not is_device_done(window.device, TRIAL_S):
        return False
    expected = torch.full_like(x, size * (size + 1) // 2)
    return all(torch.equal(total, expected) for total in sums)


def communication(what: str) -> Translation:
    """Return a context that turns torch.distributed's errors into ours: any failure in it breaks
    the link.

    The context raises:
        CommError: a peer is gone, or did not respond within the group's timeout.
    """

    def translate(error: Exception) -> CommError | None:
        if isinstance(error, (torch.AcceleratorError, torch.OutOfMemoryError)):
            return None  # a fault of the device, not of a peer
        return CommError(f"{what} failed: {error}", fix="relink the group")

    return Translation((RuntimeError, ValueError), translate)
