"""Composes the daemon's reports: status, health, heartbeat. Reads the state that other threads
publish and that of the main thread's objects; owns the daemon's uid."""

import os
import time
from dataclasses import asdict, dataclass, field
from typing import Final

from msgspec import msgpack, structs

from rpc_schema import lifecycle as lc
from rpc_schema.codec import MAX_CONTROL_BYTES, ControlReplyMessage
from rpc_schema.health import CheckHealth, CheckHealthReply
from rpc_schema.weight_transfer import WeightsStatus
from worker_daemon.models.weight_state import WeightReport
from worker_daemon.server.auth.security import Security
from worker_daemon.server.completion import Completion
from worker_daemon.server.health.device_watch import DeviceWatch
from worker_daemon.server.health.guard import Guard
from worker_daemon.server.progress import Progress
from worker_daemon.server.session.draining import Draining
from worker_daemon.server.session.expert_loads import ExpertLoadReader
from worker_daemon.server.session.lease import Lease
from worker_daemon.server.step_thread import MAX_FAILURE_BYTES, UID_BYTES
from worker_daemon.server.wire.endpoints import AnyEndpoint
from worker_daemon.worker.uploads import Uploads
from worker_daemon.worker.wire_identity import on_wire
from worker_host.draft_counts import DraftCounts
from worker_host.plain_text import one_line

MAX_STATUS_BYTES: Final = MAX_CONTROL_BYTES // 2
_ENCODER: Final = msgpack.Encoder()


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusReport:
    """Composes each report from the current state. Main thread only, like lease and draining."""

    endpoint: AnyEndpoint
    progress: Progress
    guard: Guard
    lease: Lease
    draining: Draining
    security: Security
    completion: Completion
    device_watch: DeviceWatch
    uploads: Uploads
    expert_loads: ExpertLoadReader
    worker_uid: bytes = field(default_factory=lambda: os.urandom(UID_BYTES))
    """Random id that distinguishes this process from others on the endpoint."""

    async def get_status(self, message: lc.GetStatus) -> ControlReplyMessage:
        """Answer with the status, once the expert loads have been read."""
        await self.expert_loads.refresh()
        return lc.GetStatusReply(call=message.call, status=self.status())

    def problem(self) -> str:
        """Return why the daemon cannot work; empty if it can."""
        return self.progress.snapshot.failure or self.progress.overdue()

    def check_health(self, message: CheckHealth) -> ControlReplyMessage:
        """Report whether the daemon can work, and its last hang."""
        stamp, failure = self.progress.stamp, self.problem()
        return CheckHealthReply(
            call=message.call,
            healthy=not failure,
            phase=stamp.phase,
            phase_ms=stamp.age_ms(time.monotonic()),
            detail=failure or self.guard.last_hang,
        )

    def status(self) -> lc.Status:
        """Return the status. If it would not fit into a reply, the fields that can be large are
        left out: a driver that attaches needs a status, even if only to reset."""
        status = self._whole_status()
        num_bytes = len(_ENCODER.encode(status))
        if num_bytes <= MAX_STATUS_BYTES:
            return status
        left_out = "config, kv_cache, memory, providers, expert loads and placements"
        note = f"{left_out} are left out: the whole status would have {num_bytes} bytes"
        return structs.replace(
            status,
            config=None,
            kv_cache=None,
            memory_bytes={},
            providers={},
            expert_loads=(),
            expert_placements=(),
            model_names=(),
            degraded=note,
        )

    def _whole_status(self) -> lc.Status:
        progress, replied = self.progress, self.completion.channel.counts
        stamp, snapshot = progress.stamp, progress.snapshot
        load, weights = self.device_watch.load, snapshot.description.weights()
        draft_weights = snapshot.description.draft_weights()
        filed = snapshot.description.filed
        return lc.Status(
            worker_uid=self.worker_uid,
            pid=os.getpid(),
            endpoint=str(self.endpoint),
            device=snapshot.description.device,
            serving=self.draining.serving,
            load=snapshot.state.load,
            link_state=snapshot.state.link,
            link=progress.link,
            epoch=progress.epoch,
            last_seq=progress.last_seq,
            rank=snapshot.rank,
            phase=stamp.phase,
            phase_ms=stamp.age_ms(time.monotonic()),
            config=snapshot.description.config,
            kv_cache=snapshot.description.kv_cache,
            memory_bytes=dict(snapshot.description.memory_bytes),
            providers=dict(snapshot.description.providers),
            input_wait_share=snapshot.description.input_wait_share(),
            reply_delay=self.completion.channel.delays.summary(),
            transitions=snapshot.transitions,
            failure=snapshot.failure,
            degraded=one_line(self.guard.device.problem, MAX_FAILURE_BYTES),
            kv_cache_advice=snapshot.description.kv_cache_advice,
            memory_tags=dict(snapshot.description.memory_tags),
            weights=None if weights is None else _weights_status(weights),
            draft_weights=None if draft_weights is None else _weights_status(draft_weights),
            lease=self.lease.status(),
            num_bad_frames=self.security.bad_peers.num_bad_frames,
            num_refused=self.security.num_refused,
            num_tokens=replied.num_tokens,
            num_requests=snapshot.description.num_requests(),
            usual_step_us=min(int(progress.step_times.usual_s * 1e6), 2**31 - 1),
            gpu_load=None if load is None else lc.GpuLoad(**asdict(load)),
            num_kv_blocks_held=snapshot.description.num_kv_blocks_held(),
            upload_bytes=self.uploads.num_bytes,
            max_upload_bytes=self.uploads.max_bytes,
            drafts=_drafts_verified(snapshot.description.draft_counts),
            expert_loads=tuple(
                lc.ExpertLoad(layer=layer, counts=counts)
                for layer, counts in snapshot.description.expert_loads().items()
            ),
            model_names=snapshot.description.model_names,
            host_tier=snapshot.description.host_tier(),
            expert_placements=snapshot.description.expert_placements(),
            expert_moves=snapshot.description.expert_moves(),
            kv_files=None if filed is None else filed.status(),
        )

    def heartbeat(self) -> lc.Heartbeat:
        """Return the heartbeat, which is published four times a second."""
        progress, lease = self.progress, self.lease.status()
        stamp, snapshot = progress.stamp, progress.snapshot
        return lc.Heartbeat(
            worker_uid=self.worker_uid,
            rank=snapshot.rank,
            serving=self.draining.serving,
            load=snapshot.state.load,
            link_state=snapshot.state.link,
            epoch=progress.epoch,
            link=progress.link,
            last_seq=progress.last_seq,
            phase=stamp.phase,
            phase_ms=stamp.age_ms(time.monotonic()),
            phase_limit_ms=stamp.limit_ms,
            drains=self.draining.is_on,
            lease=lease.state,
            lease_remaining_ms=lease.remaining_ms,
        )


def _weights_status(weights: WeightReport) -> WeightsStatus:
    values = asdict(weights) | {"identity": on_wire(weights.identity)}
    return WeightsStatus(**values)


def _drafts_verified(counts: DraftCounts | None) -> lc.DraftsVerified | None:
    if counts is None or not counts.num_drafted:
        return None
    return lc.DraftsVerified(
        num_verified=counts.num_verified,
        num_drafted=counts.num_drafted,
        accepted_by_place=tuple(counts.accepted_by_place),
    )
