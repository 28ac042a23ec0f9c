"""The counts in each step of replicas in lockstep: how much every replica has to compute. All ranks
have the same bytes, so what they agree on follows from them without an exchange."""

import numpy as np

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
        self._last: tuple[bytes, bytes, int] | None = None
        """Counts, slots and tokens of the last step if they agreed: most steps have the same."""

    def check(self, step: ExecuteModel) -> None:
        """Check a step's counts.

        Raises:
            InvalidStepError: there are no counts of all replicas, one is negative, or those of this
                rank's replica are not its step's.
        """
        given = step.replica_counts, step.scheduled, step.total_num_scheduled_tokens
        if given == self._last:
            return
        self.tokens = self._last = None
        if len(step.replica_counts) != 2 * _INT32.itemsize * self.dp_size:
            size = f"{len(step.replica_counts)} bytes"
            fix = f"replicas in lockstep: int32 [{self.dp_size}, 2]"
            raise invalid("replica_counts", size, fix)
        counts = np.frombuffer(step.replica_counts, _INT32).reshape(self.dp_size, 2)
        if (counts < 0).any():
            raise invalid("replica_counts", counts.tolist(), "numbers of requests and tokens")
        are_decodes = bool((counts[:, 0] == counts[:, 1]).all())
        self.tokens = TokensOfReplicas(tuple(counts[:, 1].tolist()), are_decodes)
        own = [read_bitmap(step.scheduled).size, step.total_num_scheduled_tokens]
        if counts[self.dp_rank].tolist() != own:
            fix = f"those of replica {self.dp_rank}'s own step: {own}"
            raise invalid("replica_counts", counts[self.dp_rank].tolist(), fix)
        self._last = given
