"""What a layer may ask of its tensor-parallel group: the group of one, and the real one over
torch.distributed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from worker_daemon.errors import CommError


class TensorParallel(Protocol):
    """One rank's view of its tensor-parallel group. Every rank makes the same calls in the same
    order."""

    @property
    def rank(self) -> int:
        """0 <= rank < size."""

    @property
    def size(self) -> int:
        """Number of ranks in the group."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum of x over the ranks, same shape and dtype; may overwrite x and return it."""

    def all_gather_last_dim(self, x: Tensor) -> Tensor:
        """[..., n] of each rank, concatenated in rank order to [..., n * size]."""


class LinkedTensorParallel(TensorParallel, Protocol):
    """A group whose process group comes with a link, and goes with it."""

    def bind(self, group: dist.ProcessGroup | None) -> None:
        """Use another link's process group from here on."""


class SingleRank:
    """The group of one: no communication at all."""

    rank = 0
    size = 1

    def bind(self, group: dist.ProcessGroup | None) -> None:
        return None

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather_last_dim(self, x: Tensor) -> Tensor:
        return x


class GroupTensorParallel:
    """The ranks of one stage. Layers keep this object for life; a new link gives it a new process
    group."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._group: dist.ProcessGroup | None = None

    def bind(self, group: dist.ProcessGroup | None) -> None:
        """Use another link's process group from here on."""
        self._group = group

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        with communication("all-reduce in the tensor-parallel group"):
            dist.all_reduce(x, group=self._group)
        return x

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


def tensor_parallel(rank: int, size: int) -> LinkedTensorParallel:
    """Return the rank's view of a tensor-parallel group of this size, not bound to a link yet."""
    return SingleRank() if size == 1 else GroupTensorParallel(rank, size)


@contextmanager
def communication(what: str) -> Iterator[None]:
    """Turn torch.distributed's errors into ours: whatever fails in here has broken the link.

    Raises:
        CommError: a peer is gone, or did not come within the group's timeout.
    """
    try:
        yield
    except (torch.AcceleratorError, torch.OutOfMemoryError):
        raise  # the device's trouble, not a peer's
    except (RuntimeError, ValueError) as error:
        raise CommError(f"{what} failed: {error}", fix="relink the group") from error
