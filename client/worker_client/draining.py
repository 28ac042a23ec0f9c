"""Which daemons of a group an operator has told to drain, as a driver hears it: by their
heartbeats. Knows no socket."""

from collections.abc import Sequence

from rpc_schema.errors import ControlErrorReply, ErrorCode, ErrorScope
from rpc_schema.lifecycle import Heartbeat
from worker_client.errors import DrainingError


class DrainNews:
    """Belongs to one thread, which hears the heartbeats of the epoch that it has."""

    def __init__(self) -> None:
        self._ranks: set[int] = set()

    def heard(self, beat: Heartbeat) -> None:
        """Take in a heartbeat."""
        if beat.drains:
            self._ranks.add(beat.rank)
        else:
            self._ranks.discard(beat.rank)

    def check(self, endpoints: Sequence[str]) -> None:
        """Raise DrainingError if a rank drains; endpoints: by rank."""
        if not self._ranks:
            return
        rank = min(self._ranks)
        reply = ControlErrorReply(
            call=0,
            code=ErrorCode.DRAINING,
            scope=ErrorScope.GROUP,
            message=(
                f"ranks {sorted(self._ranks)} drain: no step was sent, what is loaded stays; fix: "
                "go on elsewhere, or here after worker-client drain --undo"
            ),
        )
        raise DrainingError(reply, rank=rank, endpoint=endpoints[rank])
