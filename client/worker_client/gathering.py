"""The replies of a group's ranks to one operation, as they come in. Knows no socket, no clock."""

from rpc_schema.codec import StepReplyMessage
from rpc_schema.errors import ErrorCode, ErrorReply

_CONSEQUENCES = (ErrorCode.UPSTREAM_FAILED, ErrorCode.COMM)
"""What a rank fails with when another one has."""


class Gathering:
    """By arrival: ranks are told apart only once they have numbers."""

    def __init__(self, operation: str, seq: int, num_ranks: int) -> None:
        self.operation = operation
        self.seq = seq
        self.replies: list[StepReplyMessage] = []
        self._errors: list[ErrorReply] = []
        self._num_ranks = num_ranks

    @property
    def num_missing(self) -> int:
        """Ranks that have not answered, or with an error."""
        return self._num_ranks - len(self.replies)

    @property
    def has_failed(self) -> bool:
        """Whether a rank has answered with an error."""
        return bool(self._errors)

    @property
    def may_learn_cause(self) -> bool:
        """Whether all errors so far tell of a peer's only, and somebody has yet to answer."""
        told = all(error.code in _CONSEQUENCES for error in self._errors)
        return told and self.num_missing > len(self._errors)

    @property
    def cause(self) -> ErrorReply:
        """The first error that is not the consequence of another; else the first."""
        causes = (error for error in self._errors if error.code not in _CONSEQUENCES)
        return next(causes, self._errors[0])

    def has_heard(self, rank: int) -> bool:
        """Whether a rank, by its number, has answered."""
        return any(reply.rank == rank for reply in (*self.replies, *self._errors))

    def take(self, reply: StepReplyMessage) -> None:
        """Take an answer in."""
        if isinstance(reply, ErrorReply):
            self._errors.append(reply)
        else:
            self.replies.append(reply)
