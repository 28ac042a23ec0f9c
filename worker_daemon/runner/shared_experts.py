"""Keeps the promise of replicas that share experts: whatever becomes of a replica's own step, its
ranks make every exchange that the others expect in theirs."""

from rpc_schema.errors import CommError, DeviceError
from worker_daemon.distributed.ep import ReplicaExperts
from worker_daemon.models.decoder import DecoderStage


class SharedExperts:
    """The exchanges of one rank's stage, step by step. Owned by the model runner, used on the step
    thread only; outlives a link."""

    def __init__(self, exchange: ReplicaExperts, stage: DecoderStage) -> None:
        self._exchange = exchange
        self._stage = stage
        self._can_finish = False

    def begin(self, size: int, *, has_all_layers: bool) -> None:
        """Begin a step that all replicas pad to `size` tokens. has_all_layers: False for one that
        may have a few layers only, as in a warm-up."""
        self._can_finish = has_all_layers
        self._exchange.begin(size)

    def stand_in(self, size: int) -> None:
        """Take part in a forward pass without tokens: this replica has none, or has refused it.
        size: the number of tokens to which all replicas pad it.

        Raises:
            CommError: a peer is gone.
        """
        self._exchange.begin(size)
        self._stage.join_experts()

    def finish(self) -> bool:
        """Make the exchanges that a failed step has left. Return False if one has begun and not
        ended, or they are not known: the ranks are out of step.

        Raises:
            CommError, DeviceError: a peer is gone, or the device is lost.
        """
        if self._exchange.is_torn:
            return False
        if not self._exchange.is_open:
            return True
        if not self._can_finish:
            return False
        try:
            self._stage.join_experts()
        except (CommError, DeviceError):
            raise
        except Exception:  # of the device, in another replica's tokens
            return False
        return True
