"""The last frame of each step of replicas in lockstep: how much every replica has to compute. All
ranks have the same bytes, so what they agree on follows from it without an exchange."""

from collections.abc import Sequence

import numpy as np

from rpc_schema.codec import Frame
from rpc_schema.step import ExecuteModel
from worker_daemon.runner.scheduled_step import TokensOfReplicas, invalid
from worker_daemon.runner.slot_bitmap import read_bitmap

_INT32 = np.dtype("<i4")


class ReplicaCounts:
    """Checks the counts in a rank's steps. Owned by its RequestState."""

    def __init__(self, dp_rank: int, dp_size: int) -> None:
        """dp_rank: the rank's replica, of dp_size."""
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.tokens: TokensOfReplicas | None = None
        """Those of each replica in the last step that was taken, or refused for what else it has;
        None if it had no such counts."""

    def take(self, step: ExecuteModel, arrays: Sequence[Frame]) -> Sequence[Frame]:
        """Check the counts, and return the step's other frames.

        Raises:
            InvalidStepError: there are no counts of all replicas, one is negative, or those of this
                rank's replica are not its step's.
        """
        self.tokens = None
        if not arrays or len(arrays[-1]) != 2 * _INT32.itemsize * self.dp_size:
            size = f"{len(arrays[-1])} bytes" if arrays else "no frame"
            fix = f"replicas in lockstep: a last frame of int32 [{self.dp_size}, 2]"
            raise invalid("replica_counts", size, fix)
        counts = np.frombuffer(arrays[-1], _INT32).reshape(self.dp_size, 2)
        if (counts < 0).any():
            raise invalid("replica_counts", counts.tolist(), "numbers of requests and tokens")
        are_decodes = bool((counts[:, 0] == counts[:, 1]).all())
        self.tokens = TokensOfReplicas(tuple(counts[:, 1].tolist()), are_decodes)
        own = [read_bitmap(step.scheduled).size, step.total_num_scheduled_tokens]
        if counts[self.dp_rank].tolist() != own:
            fix = f"those of replica {self.dp_rank}'s own step: {own}"
            raise invalid("replica_counts", counts[self.dp_rank].tolist(), fix)
        return arrays[:-1]
