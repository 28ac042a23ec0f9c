"""Completeness and version of a group's weights, and that all ranks have the same, from its
daemons' states, as events for the failure state. The daemons themselves refuse steps on incomplete
weights."""

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from rpc_schema.identity import ContentIdentity, DifferingRanks, first_difference
from rpc_schema.lifecycle import Status
from worker_client.errors import ContentMismatchError, config_error
from worker_client.group.failure_state import Change, WeightsGone

MAX_VERSION: Final = 2**63 - 1
"""Largest number of a version."""

_FIX = "fix: finish a complete update, or reload_weights (group.weights.reload)"


class WeightsVersion(NamedTuple):
    """Version of the weights that all ranks of a group have."""

    number: int
    """Grows with every change of the weights that were loaded."""
    identity: ContentIdentity
    """Identity of the weights, as rank 0 has it."""

    @property
    def key(self) -> bytes:
        """40 bytes that the weights of no other version have."""
        return self.number.to_bytes(8, "little") + self.identity.content


def next_number(known: Sequence[int], version: int | None) -> int:
    """Return the number of a new version: larger than the known ones. Raises ClientConfigError."""
    if version is None:
        return max(known) + 1
    if type(version) is not int or not max(known) < version <= MAX_VERSION:
        problem = f"the weights have version {max(known)} already"
        fix = f"give a number from {max(known) + 1} to {MAX_VERSION}, or None for the next one"
        raise config_error("version", version, problem, fix)
    return version


def given_up(cause: str) -> WeightsGone:
    """Return the event of weights that are being replaced."""
    return WeightsGone(f"{cause}; {_FIX}")


def learned(statuses: Sequence[Status]) -> WeightsGone | Literal[Change.WEIGHTS_FILLED]:
    """Return the event for the daemons' states."""
    cause = _not_whole(statuses)
    if not cause and (ranks := differing_ranks(statuses)) is not None:
        cause = f"{_describe(ranks, statuses)}; {_FIX}"
    return WeightsGone(cause) if cause else Change.WEIGHTS_FILLED


def common_version(statuses: Sequence[Status]) -> WeightsVersion | None:
    """Return the version that all ranks have completely; None if there is none."""
    first = statuses[0].weights
    if first is None or first.identity is None or _not_whole(statuses):
        return None
    if any(status.weights is None for status in statuses) or differing_ranks(statuses) is not None:
        return None
    return WeightsVersion(first.version, first.identity)


def differing_ranks(statuses: Sequence[Status]) -> DifferingRanks | None:
    """Return two ranks that hold weights of different versions or contents, or None."""
    weights = [status.weights for status in statuses]
    contents = first_difference([None if each is None else each.identity for each in weights])
    if contents is not None:
        return contents
    numbers = [(rank, each.version) for rank, each in enumerate(weights) if each is not None]
    for rank, number in numbers:
        if number != numbers[0][1]:
            return DifferingRanks(numbers[0][0], rank)
    return None


def check_same_weights(statuses: Sequence[Status], model: str) -> None:
    """Raise ContentMismatchError if two ranks hold different weights. model: what they hold by
    name."""
    ranks = differing_ranks(statuses)
    if ranks is not None:
        raise ContentMismatchError(
            _describe(ranks, statuses),
            field="model.model",
            value=model,
            fix="give all hosts the same files, and write none while they are read; then load "
            "again with reload=True (--reload)",
        )


def _describe(ranks: DifferingRanks, statuses: Sequence[Status]) -> str:
    both = [statuses[index] for index in ranks]
    first, second = (f"rank {each.rank} ({_source(each)})" for each in both)
    return f"{first} and {second} hold different weights"


def _source(status: Status) -> str:
    weights = status.weights
    assert weights is not None and weights.identity is not None, "it differs from another"
    source = "read from files" if weights.identity.stamps else "sent"
    digest = weights.identity.content.hex()[:12]
    return f"{status.endpoint}: version {weights.version}, {source}, {digest}"


def _not_whole(statuses: Sequence[Status]) -> str:
    for status in statuses:
        weights = status.weights
        if weights is not None and weights.state != "whole":
            names = ", ".join(weights.missing[:4])
            return (
                f"the weights of rank {status.rank} are {weights.state} "
                f"({weights.cause or 'open'}): {weights.num_missing} of {weights.num_tensors} "
                f"tensors are missing ({names}...); {_FIX}"
            )
    return ""
