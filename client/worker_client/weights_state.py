"""Completeness of a group's weights, from its daemons' states, as events for the failure state. The
daemons themselves refuse steps on incomplete weights."""

from collections.abc import Sequence
from typing import Literal

from rpc_schema.lifecycle import Status
from worker_client.failure_state import Change, WeightsGone

_FIX = "fix: finish a complete update, or reload_weights()"


def given_up(cause: str) -> WeightsGone:
    """Return the event of weights that are being replaced."""
    return WeightsGone(f"{cause}; {_FIX}")


def learned(
    statuses: Sequence[Status], newcomers: Sequence[int] = ()
) -> WeightsGone | Literal[Change.WEIGHTS_FILLED]:
    """Return the event for the daemons' states. newcomers: ranks that have loaded the checkpoint
    while others already had weights."""
    cause = _updated_beside(statuses, newcomers) or _not_whole(statuses)
    return WeightsGone(cause) if cause else Change.WEIGHTS_FILLED


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
    """Return the cause if the others' weights are not those of the checkpoint that a new rank
    reads."""
    for rank, status in enumerate(statuses):
        weights = status.weights
        if newcomers and rank not in newcomers and weights is not None and weights.num_updates:
            return (
                f"rank {newcomers[0]} was replaced and has the weights of the checkpoint, rank "
                f"{rank} those of update {weights.num_updates}; {_FIX}"
            )
    return ""
