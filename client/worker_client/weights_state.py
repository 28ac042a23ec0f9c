"""Whether the weights of a group are whole, as far as its driver knows: no step is sent to others.
The daemons know it for certain, and refuse by themselves."""

from collections.abc import Sequence

from rpc_schema.lifecycle import Status
from worker_client.errors import WeightsNotWhole

_FIX = "fix: finish a complete update, or reload_weights()"


class WeightsState:
    """One group's."""

    def __init__(self) -> None:
        self.cause = ""
        """Why no step can be sent. Empty: it can."""

    def require_whole(self) -> None:
        """Raises WeightsNotWhole."""
        if self.cause:
            raise WeightsNotWhole(self.cause)

    def give_up(self, cause: str) -> None:
        """They are being replaced."""
        self.cause = f"{cause}; {_FIX}"

    def are_whole(self) -> None:
        """All of them were written."""
        self.cause = ""

    def learn(self, statuses: Sequence[Status], newcomers: Sequence[int] = ()) -> None:
        """Take in what the daemons know. newcomers: ranks that have loaded the checkpoint beside
        others that had weights already."""
        self.cause = _updated_beside(statuses, newcomers) or _not_whole(statuses)


def _not_whole(statuses: Sequence[Status]) -> str:
    for rank, status in enumerate(statuses):
        weights = status.weights
        if weights is not None and weights.state != "whole":
            names = ", ".join(weights.missing[:4])
            return (
                f"the weights of rank {rank} are {weights.state} ({weights.cause or 'open'}): "
                f"{weights.num_missing} of {weights.num_tensors} tensors are missing "
                f"({names}...); {_FIX}"
            )
    return ""


def _updated_beside(statuses: Sequence[Status], newcomers: Sequence[int]) -> str:
    """Say where the others' weights are not those of the checkpoint that a new rank reads."""
    for rank, status in enumerate(statuses):
        weights = status.weights
        if newcomers and rank not in newcomers and weights is not None and weights.num_updates:
            return (
                f"rank {newcomers[0]} was replaced and has the weights of the checkpoint, rank "
                f"{rank} those of update {weights.num_updates}; {_FIX}"
            )
    return ""
