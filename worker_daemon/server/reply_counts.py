"""How much the replies to steps have brought, for whoever watches. Knows no socket and no step."""

from rpc_schema.base import StepReply
from rpc_schema.step import ModelRunnerOutput


class ReplyCounts:
    """Since the daemon's start. Written by one thread at a time, read by any."""

    __slots__ = ("num_requests", "num_tokens")

    def __init__(self) -> None:
        self.num_tokens = 0
        """Sampled."""
        self.num_requests = 0
        """That the last step with a sample had."""

    def add(self, reply: StepReply) -> None:
        """Note a reply that is sent for the first time."""
        if type(reply) is ModelRunnerOutput and reply.sampled_token_ids:
            self.num_requests = len(reply.sampled_token_ids) // 4
            self.num_tokens += self.num_requests
