"""The placement of experts on the ranks that share them, and the messages that change it.

Each of R ranks has S physical slots for a layer's E experts; R S is E and the redundant experts. A
placement names the expert in each slot, those of the first rank first. Every expert has a slot, and
none has two on one rank.
"""

from typing import Annotated

from msgspec import Meta

from rpc_schema.base import Count, Event, StepReply, StepRequest, Text, Unsigned, Value
from rpc_schema.config import RendezvousAddress
from rpc_schema.step import Done

MAX_SLOTS = 8192
"""Bound on the slots of a layer over all ranks."""

MAX_EXPERTS = 1024
"""Experts of a layer: more than any model has."""

MAX_TIMEOUT_MS = 3_600_000

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
    """Moves that failed, and MoveExperts and SwitchExperts that were refused."""
    num_dropped: Unsigned = 0
    """Moves that ended for another operation, such as a weight update, before a switch."""


class MoveExperts(StepRequest["MoveExpertsReply"], frozen=True, tag=57, kw_only=True):
    """Begin to receive from the peers what this rank's slots of a layer lack under another
    placement, into spare memory. The layer's ranks meet and exchange weights beside the steps,
    which go on with the present placement until SwitchExperts; an ExpertMoveEnded tells the end.
    Drops the move before, and what it has brought. So do weight updates, reloads, sleep and
    Reset; a Relink and another driver drop only a move in progress."""

    placement: ExpertPlacement
    place: RendezvousAddress | None = None
    """Rendezvous of the ranks that share the layer's experts, served by one of their daemons. None
    is refused."""
    timeout_ms: Annotated[int, Meta(ge=1, le=MAX_TIMEOUT_MS)] = 60_000
    """Limit on the whole exchange: the move fails then."""


class MoveExpertsReply(StepReply, frozen=True, tag=57, kw_only=True):
    num_moved: Count
    """Slots of this rank that get another expert."""
    num_bytes: Unsigned
    """Bytes to come from peers."""
    seconds: float
    """Time that it has taken to begin."""


class ExpertMoveEnded(Event, frozen=True, tag=21, kw_only=True):
    """Published when the weights of a MoveExperts have come, or will not come."""

    epoch: Unsigned
    seq: Unsigned
    """Seq of the MoveExperts, as epoch is its epoch."""
    layer: Count
    fault: Text = ""
    """Empty: the weights are there, for SwitchExperts."""
    is_dropped: bool = False
    """True if the move was dropped for another operation, rather than failed; also after the
    weights had come."""


class SwitchExperts(StepRequest[Done], frozen=True, tag=58, kw_only=True):
    """Use the weights that MoveExperts has brought from the next step on. Asks no peer. A rank that
    has the placement already does nothing; one that has not received it refuses, and so does one
    whose weights have changed since."""

    placement: ExpertPlacement
