"""The connection of a trainer's sender with the workers: RPCs, beside the trainer's side of them.
An update from its start to its report."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from rpc_schema import weight_transfer as wt
from rpc_schema.errors import ConfigError
from worker_client.group.running import RunningRequests
from worker_client.group.weights import GroupWeights, Target
from worker_client.trainer.communicator import TransferStopped

REFUSAL_S: Final = 2.0
"""Maximum time between a worker's refusal of the RPC and its refusal at the communicator."""


class Channel(Protocol):
    """The trainer's side of a communicator with the workers."""

    def open(self) -> None:
        """Connect to all members. Raises TransferStopped."""

    def stop(self) -> None:
        """End a wait, from any thread."""

    def close(self) -> None:
        """Leave the members."""


ChannelT = TypeVar("ChannelT", bound=Channel)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class SendReport:
    """Summary of one update."""

    num_tensors: int
    size_bytes: int
    seconds: float
    """Time from the first byte to the last on the slowest rank."""
    version: int
    """Number of the weights' version from now on."""


class UpdateOptions(NamedTuple):
    """Arguments of GroupWeights.start_update, as a sender is given them."""

    format: wt.WeightFormat
    partial: bool
    version: int | None
    target: Target
    running: RunningRequests
    recompute_budget: int | None

    def update(
        self,
        weights: GroupWeights,
        transfer: Callable[[], Sequence[wt.UpdateWeightsReply]],
        *,
        num_tensors: int,
    ) -> SendReport:
        """Run one complete update; transfer: sends the tensors."""
        weights.start_update(
            self.format,
            partial=self.partial,
            version=self.version,
            target=self.target,
            running=self.running,
            recompute_budget=self.recompute_budget,
        )
        replies = transfer()
        finished = weights.finish_update()
        return SendReport(
            num_tensors=num_tensors,
            size_bytes=max((reply.size_bytes for reply in replies), default=0),
            seconds=max((reply.seconds for reply in replies), default=0.0),
            version=finished[0].version,
        )


class Connection(Generic[ChannelT]):
    """A sender's connection with the workers; owns its channel. Belongs to the sender's thread."""

    def __init__(self, weights: GroupWeights | None, timeout_s: float) -> None:
        """weights: of the group; None on the trainer's ranks that are not its driver. timeout_s:
        how long a worker waits for the trainer."""
        self._weights = weights
        self._timeout_s = timeout_s
        self.channel: ChannelT | None = None
        """None: it is closed, or the engine has none."""
        self.is_open = False
        """The next transfer can use it."""

    def open(self, engine: wt.Engine, channel: ChannelT | None) -> None:
        """Have the workers use an engine, and connect its channel, if it has one. It was closed
        before, and is after an error.

        Raises:
            TransferError, TransferStopped: not all members have connected.
            ConfigError: the engine is not for this group.
        """
        self.channel = channel
        weights, timeout_s = self._weights, self._timeout_s
        try:
            if weights is not None:
                connect = None if channel is None else channel.open
                self.run(connect, lambda: weights.init_transfer_engine(engine, timeout_s))
            else:
                assert channel is not None, "the trainer's other ranks need one"
                channel.open()
        except BaseException:
            self.close()
            raise
        self.is_open = True

    def run(self, communicate: Callable[[], None] | None, call: Callable[[], _T]) -> _T:
        """Run an RPC here and the channel's side of it, if there is a channel, in a thread, since
        each waits for the other. If both fail, the RPC's error has the reason. After an error, the
        connection is open only if it was a refusal before the first byte."""
        was_open, self.is_open = self.is_open, False
        with ThreadPoolExecutor(1, thread_name_prefix="weights") as pool:
            sending = None if communicate is None else pool.submit(communicate)
            try:
                result = call()
            except BaseException as error:
                if isinstance(error, ConfigError) and _is_intact(sending):
                    self.is_open = was_open
                elif self.channel is not None:
                    self.channel.stop()
                raise
            if sending is not None:
                sending.result()
        self.is_open = was_open
        return result

    def close(self) -> None:
        """Leave the workers; their weights do not change."""
        self.is_open = False
        channel, self.channel = self.channel, None
        if channel is not None:
            channel.close()


def _is_intact(sending: "Future[None] | None") -> bool:
    """Return True if the workers refused at the communicator too, or have received everything, or
    there is none: it can be used again."""
    if sending is None:
        return True
    try:
        error = sending.exception(REFUSAL_S)
    except TimeoutError:
        return False
    return error is None or isinstance(error, TransferStopped)
