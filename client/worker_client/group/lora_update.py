"""An update of an adapter's weights, as a whole: it has a version of its own, and steps go on."""

import contextlib

from rpc_schema import weight_transfer as wt
from rpc_schema.errors import ConfigError, WorkerDaemonError, WorkerError
from worker_client.group.group_channel import GroupChannel
from worker_client.group.loras import GroupAdapter, GroupLoras
from worker_client.group.running import RunningRequests
from worker_client.group.weights_state import next_number


class LoraUpdate:
    """Belongs to the group's thread. The adapter stays as it was until finish(), and if that
    fails."""

    def __init__(
        self,
        channel: GroupChannel,
        loras: GroupLoras,
        adapter: GroupAdapter,
        running: RunningRequests,
    ) -> None:
        """running: what the driver's scheduler does with the requests that use it. Raises
        ClientConfigError: the ranks have no such adapter, or the driver cannot have it updated."""
        self._channel = channel
        self._loras = loras
        self._adapter = loras.find(adapter)
        self._running = running
        self.is_open = False

    def start(self, format: wt.WeightFormat, *, partial: bool, version: int | None) -> None:
        """Open it on every rank. Takes and raises as GroupWeights.start_update does."""
        self._channel.check_usable()
        number = next_number([self._adapter.weights_version], version)
        self._channel.ask(
            lambda **ids: wt.StartWeightUpdate(
                format=format,
                partial=partial,
                version=number,
                target="lora",
                lora_id=self._adapter.lora_id,
                running="keep",
                **ids,
            )
        )
        self.is_open = True

    def finish(self) -> list[wt.FinishWeightUpdateReply]:
        """Close it on every rank. Raises as GroupWeights.finish_update does."""
        try:
            replies = self._channel.ask(wt.FinishWeightUpdate)
        except ConfigError:
            raise  # all ranks refuse, before any of them changes the adapter
        except WorkerError:
            self.is_open = False
            with contextlib.suppress(WorkerDaemonError):  # if ranks differ now, it is removed
                self._loras.learn()
            raise
        self.is_open = False
        self._loras.updated(self._adapter, self._running)
        return replies
