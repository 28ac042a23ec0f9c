"""The exchange of weights between the ranks that share a layer's experts."""

from collections.abc import Iterable
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from worker_daemon.distributed.tp import communication


class PeerTensor(NamedTuple):
    """Memory to send to a peer, or to receive into: contiguous uint8 [n]."""

    peer: int
    """Its number in the group."""
    data: Tensor


def exchange(
    sent: Iterable[PeerTensor], received: Iterable[PeerTensor], group: dist.ProcessGroup | None
) -> None:
    """Send and receive tensors, those between two ranks in one order on both. On a GPU this is
    queued on the current stream; on the CPU it returns once all have arrived.

    Raises:
        CommError: a peer is gone, or did not respond within the group's timeout.
    """
    with communication("moving experts"):
        operations = [
            *(dist.P2POp(dist.isend, data, group=group, group_peer=peer) for peer, data in sent),
            *(
                dist.P2POp(dist.irecv, data, group=group, group_peer=peer)
                for peer, data in received
            ),
        ]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
