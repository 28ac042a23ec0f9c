"""Collection of the ranks' replies to one operation."""

from rpc_schema.codec import StepReplyMessage
from rpc_schema.error_replies import ErrorReply
from rpc_schema.errors import ErrorCode

_CONSEQUENCES = (ErrorCode.UPSTREAM_FAILED, ErrorCode.COMM)
"""Codes with which a rank fails because another one has."""


class Gathering:
    """Replies by arrival: ranks are distinguished only once they have numbers."""

    def __init__(self, operation: str, seq: int, num_ranks: int) -> None:
        self.operation = operation
        self.seq = seq
        self.replies: list[StepReplyMessage] = []
        self._errors: list[ErrorReply] = []
        self._num_ranks = num_ranks

    @property
    def num_missing(self) -> int:
        """Number of ranks without a successful reply."""
        return self._num_ranks - len(self.replies)

    @property
    def has_failed(self) -> bool:
        """True if a rank has replied with an error."""
        return bool(self._errors)

    @property
    def may_learn_cause(self) -> bool:
        """True if all errors so far are consequences of a peer's, and a rank has still to reply."""
        all_follow = all(error.code in _CONSEQUENCES for error in self._errors)
        return all_follow and self.num_missing > len(self._errors)

    @property
    def cause(self) -> ErrorReply:
        """First error that is not a consequence of another; else the first."""
        causes = (error for error in self._errors if error.code not in _CONSEQUENCES)
        return next(causes, self._errors[0])

    def has_replied(self, rank: int) -> bool:
        """Return True if a rank, by its number, has replied."""
        return any(reply.rank == rank for reply in (*self.replies, *self._errors))

    def take(self, reply: StepReplyMessage) -> None:
        """Record a reply."""
        if isinstance(reply, ErrorReply):
            self._errors.append(reply)
        else:
            self.replies.append(reply)
