"""The placement of experts on the ranks that share them, and the messages that change it.

Each of R ranks has S physical slots for a layer's E experts; R S is E and the redundant experts. A
placement names the expert in each slot, those of the first rank first. Every expert has a slot, and
none has two on one rank.
"""

from typing import Annotated

from msgspec import Meta

from rpc_schema.base import Count, StepReply, StepRequest, Unsigned, Value
from rpc_schema.step import Done

MAX_SLOTS = 8192
"""Bound on the slots of a layer over all ranks."""

MAX_EXPERTS = 1024
"""Experts of a layer: more than any model has."""

SlotExperts = Annotated[bytes, Meta(max_length=2 * MAX_SLOTS)]
"""Little-endian uint16 [R S]: the number of the expert in each slot."""


class ExpertPlacement(Value, frozen=True, kw_only=True):
    """The experts of one layer."""

    layer: Count
    """Layer of the model."""
    experts: SlotExperts


class RankPlacement(ExpertPlacement, frozen=True, kw_only=True):
    """The experts of one layer, as a rank's status has them."""

    moved: SlotExperts = b""
    """The placement whose weights this rank has received, for SwitchExperts; empty: none."""
    counts_before: Annotated[bytes, Meta(max_length=8 * MAX_EXPERTS)] = b""
    """The ExpertLoad.counts that were known when the layer was switched to `experts`: later tokens
    went to this placement. Empty: it was not switched."""


class ExpertMoves(Value, frozen=True, kw_only=True):
    """Counts of a rank's moves since the model was loaded."""

    num_moved: Unsigned = 0
    """Experts that came into a slot of this rank with a switch, from a peer or from another slot of
    its own."""
    num_switches: Unsigned = 0
    """Layers that were switched to another placement."""
    num_failed: Unsigned = 0
    """MoveExperts and SwitchExperts that failed or were refused."""


class MoveExperts(StepRequest["MoveExpertsReply"], frozen=True, tag=57, kw_only=True):
    """Receive from the peers what this rank's slots of a layer lack under another placement, into
    spare memory. The layer's ranks exchange weights; steps go on with the present placement until
    SwitchExperts. What an earlier MoveExperts has brought is dropped. Takes a step's deadline."""

    placement: ExpertPlacement


class MoveExpertsReply(StepReply, frozen=True, tag=57, kw_only=True):
    num_moved: Count
    """Slots of this rank that get another expert."""
    num_bytes: Unsigned
    """Bytes received from peers."""
    seconds: float


class SwitchExperts(StepRequest[Done], frozen=True, tag=58, kw_only=True):
    """Use the weights that MoveExperts has brought from the next step on. Asks no peer. A rank that
    has the placement already does nothing; one that has not received it refuses, and so does one
    whose weights have changed since."""

    placement: ExpertPlacement
