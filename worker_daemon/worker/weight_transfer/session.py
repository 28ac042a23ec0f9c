"""Weight updates of a loaded model: start, receive, finish, and the state after a failure. Owns the
engine and the open update; `models/weight_state.py` tracks whether the weights are complete.

Used on the step thread, except abort().
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from rpc_schema import weight_transfer as wt
from rpc_schema.errors import ConfigError, StateError
from worker_daemon.contracts.source_identity import SourceIdentity
from worker_daemon.distributed.transfer_group import TrainerRendezvous
from worker_daemon.errors import config_error
from worker_daemon.lora.adapter_files import TENSORS_NAME
from worker_daemon.models.decoder import DecoderStage
from worker_daemon.models.sparse_delta import DeltaIndices
from worker_daemon.models.update_coverage import Box, Coverage
from worker_daemon.models.update_identity import UpdateIdentity
from worker_daemon.models.weight_places import Manifest, Places, checkpoint_places, kernel_places
from worker_daemon.models.weight_state import WeightState
from worker_daemon.phases import SetPhase
from worker_daemon.worker.loading import LoadedModel
from worker_daemon.worker.resolve import ResolvedModel
from worker_daemon.worker.stage_loading import RankPlace, Roots
from worker_daemon.worker.weight_transfer.engines import (
    BroadcastReceiver,
    DiskReader,
    Expected,
    IpcReader,
    TensorFiles,
    TransferEngine,
)
from worker_daemon.worker.weight_transfer.rows import Rows

_LOG = logging.getLogger(__name__)
_SLACK_S: Final = 30.0
"""Waits for the trainer have their own limit; a phase that exceeds it by this much hangs
elsewhere."""
_DISPOSAL_S: Final = 0.5
_PHASE_EVERY_S: Final = 0.25


@dataclass
class _Update:
    """An update that is open."""

    changed: "_Changed"
    partial: bool
    version: int
    identity: UpdateIdentity
    received: set[str] = field(default_factory=set)
    """Incoming names that are complete."""
    coverage: Coverage = field(default_factory=Coverage)
    """Pieces that have arrived."""

    @property
    def places(self) -> Places:
        return self.changed.expected.places

    @property
    def weights(self) -> WeightState:
        return self.changed.weights


@dataclass(frozen=True, slots=True)
class RoundReport:
    """The result of one update_weights."""

    num_tensors: int
    """Tensors of this rank."""
    size_bytes: int
    seconds: float


class WeightTransfer:
    """One rank's updates, one open at a time."""

    def __init__(self, set_phase: SetPhase) -> None:
        self._set_phase = set_phase
        self._engine: TransferEngine | None = None
        self._timeout_s = 60.0
        self._former: Manifest | None = None
        self._update: _Update | None = None
        self._may_wait = False
        """True while the step thread may wait for a trainer."""

    def init_engine(self, engine: wt.Engine, timeout_s: float, place: RankPlace) -> int:
        """Close the former engine, and open this one; return the rank in its communicator.

        Raises:
            ConfigError: the engine is not for this device, or there is no such rank.
            TransferError: the trainer, or another worker, did not connect. There is no engine then.
        """
        self.close_engine()
        self._timeout_s = timeout_s
        if isinstance(engine, wt.BroadcastEngine):
            receiver = BroadcastReceiver(_meeting(engine, timeout_s, place), place.device)
            self._engine = receiver  # for abort() to see while it opens
            self._set_phase("MEETING TRAINER", timeout_s + _SLACK_S)
            try:
                with self._waiting():
                    receiver.open()
            except BaseException:
                self._engine = None
                raise
        elif isinstance(engine, wt.IpcEngine):
            self._engine = IpcReader(place.device)
        else:
            self._engine = DiskReader(place.device)
        return self._engine.transfer_rank

    def start(
        self, message: wt.StartWeightUpdate, model: LoadedModel, place: RankPlace, roots: Roots
    ) -> None:
        """Open an update; one that is open is dropped, and its tensors must be sent again.

        Raises:
            ConfigError: the version is not a larger one, or there is no such draft model or
                adapter, or it has no names of this format.
            StateError: it is for a draft model or an adapter, and the model's weights are
                incomplete.
            CapacityError: there is no host memory for a copy of the adapter.
        """
        if message.target == "lora":
            changed = _adapter_of(model, message, roots)
        elif message.target == "draft_model":
            changed = _draft_of(model, message.format, place, roots)
        else:
            changed = _model_of(model, message.format, place, roots)
        weights = changed.weights
        version = weights.next_version(message.version)
        base = weights.identity if message.partial else None
        identity = UpdateIdentity(base, message.epoch, message.seq)
        if self._update is not None and self._update.changed.weights is not weights:
            self.interrupt("another update was started")
        self._update = _Update(changed, message.partial, version, identity)
        weights.begin(partial=message.partial)

    def update(self, message: wt.UpdateWeights) -> RoundReport:
        """Receive the tensors of one request.

        A request that is refused before its first byte leaves the update open.

        Raises:
            StateError: no update is open.
            ConfigError: the tensors are not the model's, or the request is for another engine; or
                indices of a sparse delta are wrong, which is known once they have been received:
                then nothing of the request is written.
            CheckpointError: files are missing, truncated or not the model's.
            CapacityError: there is no memory for the buffers.
            TransferError: the transfer failed, and the update with it: the weights are dirty (an
                adapter is as it was), and the communicator is closed.
        """
        began = time.monotonic()
        update, engine = self._open_update(), self._engine
        if engine is None:
            problem = "there is no weight transfer engine"
            fix = "init_weight_transfer_engine for this source first"
            raise config_error("source", type(message.source).__name__, problem, fix)
        try:
            manifest = engine.describe(message, self._former, update.changed.expected)
            before = (*update.received, *update.coverage.incomplete)
            update.places.check(manifest, before, partial=update.partial)
            update.coverage.check(manifest.pieces)
            engine.reserve(manifest, message.source)
        except Exception:
            engine.refuse(message.source)
            raise
        self._former = manifest
        writer = _Writer(update, manifest, self._timeout_s, self._set_phase)
        try:
            with self._waiting():
                engine.accept(message.source)
                update.identity.add(engine.contents(message.source))
                size_bytes = engine.receive(manifest, message.source, writer.place)
        except BaseException as error:
            self._fail(f"{type(error).__name__} in update_weights: {error}")
            raise
        if writer.fault is not None:
            raise writer.fault
        incomplete = update.coverage.incomplete
        update.received.update(update.places.received(manifest, incomplete))
        update.weights.publish()
        return RoundReport(len(writer.held), size_bytes, time.monotonic() - began)

    def finish(self) -> int:
        """Close the update; return the number of the weights' version.

        Raises:
            StateError: no update is open, or tensors of this rank are missing; or the adapter is
                there no more.
            ConfigError: tensors of the model, or pieces of some, are missing. The update stays
                open.
        """
        update = self._open_update()
        update.coverage.check_complete()
        if not update.partial:
            update.places.check_complete(update.received)
        update.changed.finish(update.identity.value(), update.version)
        self._update = None
        return update.version

    def drop_update(self) -> None:
        """Drop an open update: the weights have been reloaded meanwhile."""
        self._update = None

    def abandon(self, cause: str) -> None:
        """Drop the update of a replaced driver, which leaves the weights dirty, and its engine."""
        self.interrupt(cause)
        self.close_engine()

    def interrupt(self, cause: str) -> None:
        """Drop an open update, which leaves the weights dirty."""
        if self._update is not None:
            self._update.weights.interrupt(cause)
            self._update = None

    def abort(self) -> bool:
        """Abort an operation that may wait for a trainer; return True if one runs. From any
        thread."""
        engine = self._engine
        if not self._may_wait or engine is None:
            return False
        engine.abort()
        return True

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self._may_wait = True
        try:
            yield
        finally:
            self._may_wait = False

    def close_engine(self) -> None:
        """Close the engine, in the background if that takes time."""
        engine, self._engine = self._engine, None
        self._former = None
        disposal = None if engine is None else engine.close()
        if disposal is not None:
            disposal.join(_DISPOSAL_S)

    def _open_update(self) -> _Update:
        if self._update is None:
            raise StateError("no weight update is open", fix="start_weight_update first")
        return self._update

    def _fail(self, cause: str) -> None:
        _LOG.error("the weight update has failed: %s", cause)
        self.abandon(cause)


class _Writer:
    """Writes received rows to their places, and updates the weights' state and the phase."""

    def __init__(
        self, update: _Update, manifest: Manifest, timeout_s: float, set_phase: SetPhase
    ) -> None:
        self.held: set[str] = set()
        """Names of tensors that this rank holds completely or in part."""
        self.fault: ConfigError | None = None
        """The error of indices that have arrived. Nothing is written then, but the rest of the
        request is received, so that the communicator stays usable."""
        self._update = update
        self._manifest = manifest
        self._indices = DeltaIndices()
        self._whole_after: dict[str, frozenset[str]] = {}
        """Tensor whose delta is being written -> those of this rank that are complete after it."""
        self._num_complete = 0
        self._silence_s = timeout_s + _SLACK_S
        self._set_phase = set_phase
        self._phase_s = 0.0
        self._show()

    def place(self, pieces: Sequence[Rows]) -> None:
        for rows in pieces:
            if self.fault is None:
                self._place(rows)
            self._num_complete += rows.is_last
        self._show()

    def _place(self, rows: Rows) -> None:
        name = self._manifest.names[rows.tensor]
        delta = self._update.places.delta_part(name)
        if delta is None:
            self._fill(name, rows)
        elif delta.part == "values":
            self._change(delta.name, rows)
        else:
            size = self._manifest.shapes[rows.tensor][0]
            self._indices.take(delta.name, rows.first_row, rows.values, size)
            if rows.is_last:
                shape = self._update.places.specs[delta.name].shape
                self.fault = self._indices.fault(delta.name, math.prod(shape))

    def _fill(self, name: str, rows: Rows) -> None:
        places, weights = self._update.places, self._update.weights
        names = places.names_of(name, rows.values.dtype)
        origin = self._manifest.origin(rows.tensor) if rows.origin is None else rows.origin
        if names:
            self.held.add(name)
            weights.writing(names)
            places.fill(name, rows.first_row, rows.values, origin)
        if rows.is_last and self._completes(name, rows.tensor):
            weights.written(names)

    def _completes(self, name: str, tensor: int) -> bool:
        """Record a tensor, or a piece of one; return True unless pieces are missing."""
        origin, coverage = self._manifest.origin(tensor), self._update.coverage
        if not origin:
            coverage.replace(name)
            return True
        size = math.prod(self._update.places.specs[name].shape)
        return coverage.add(name, Box.at(origin, self._manifest.shapes[tensor]), size)

    def _change(self, name: str, rows: Rows) -> None:
        places, weights = self._update.places, self._update.weights
        names = places.names_of(name, rows.values.dtype)
        if rows.first_row == 0:
            self._whole_after[name] = weights.changing(names)
        if names:
            self.held.add(name)
            indices = self._indices.of(name, rows.first_row, len(rows.values))
            places.scatter(name, indices, rows.values)
        if rows.is_last:
            weights.written(self._whole_after.pop(name))

    def _show(self) -> None:
        now = time.monotonic()
        if now - self._phase_s >= _PHASE_EVERY_S:
            self._phase_s = now
            num_tensors = len(self._manifest.names)
            self._set_phase(f"UPDATING {self._num_complete} of {num_tensors}", self._silence_s)


class _Changed(NamedTuple):
    """The weights that an update changes."""

    expected: Expected
    weights: WeightState
    finish: Callable[[SourceIdentity, int], None]
    """Records that all of them were written."""


def _model_of(
    model: LoadedModel, format: wt.WeightFormat, place: RankPlace, roots: Roots
) -> _Changed:
    places = _places(model.stage, model.resolved, format, place)
    expected = Expected(places, TensorFiles(roots.model_roots))
    return _Changed(expected, model.weights, model.finish_update)


def _draft_of(
    model: LoadedModel, format: wt.WeightFormat, place: RankPlace, roots: Roots
) -> _Changed:
    draft, weights = model.draft, model.draft_weights
    if draft is None or weights is None:
        problem = "the model was loaded without a draft model"
        raise config_error(
            "target", "draft_model", problem, "load it with one, or update the model"
        )
    model.weights.require_whole("an update of the draft model")
    places = _places(draft.stage, draft.resolved, format, place)
    if not draft.is_local:
        places = places.elsewhere()
    return _Changed(Expected(places, TensorFiles(roots.model_roots)), weights, weights.finish)


def _adapter_of(model: LoadedModel, message: wt.StartWeightUpdate, roots: Roots) -> _Changed:
    update = model.require_adapters().update(message.lora_id)
    model.weights.require_whole("an update of an adapter")
    if message.format == "kernel":
        problem = "an adapter's tensors have PEFT's names alone"
        raise config_error("format", message.format, problem, "checkpoint")
    adapter, places = update.adapter, update.places
    weights = WeightState(places.places, adapter.identity, adapter.weights_version)

    def finish(identity: SourceIdentity, version: int) -> None:
        model.weights.require_whole("an update of an adapter")
        weights.finish(identity, version)
        update.finish(identity, version)

    files = TensorFiles(
        roots.lora_roots,
        "adapter",
        "--lora-root",
        single=TENSORS_NAME,
        reads_all=True,
        check=update.check_directory,
    )
    return _Changed(Expected(places, files), weights, finish)


def _places(
    stage: DecoderStage, resolved: ResolvedModel, format: wt.WeightFormat, place: RankPlace
) -> Places:
    decoder, parallel = resolved.decoder, place.parallel
    if format == "kernel" and decoder.num_redundant_experts is not None:
        problem = "experts can move between ranks"
        raise config_error("format", format, problem, "checkpoint: each rank takes its experts")
    if format == "kernel" and place.sharing_experts(decoder) is not None:
        problem = "replicas share the experts, so ranks of equal tp_rank have different ones"
        raise config_error("format", format, problem, "checkpoint: each rank takes its experts")
    if format == "kernel":
        return kernel_places(stage, decoder, parallel.tp_rank, parallel.tp_size, resolved.dtype)
    return checkpoint_places(stage, decoder)


def _meeting(engine: wt.BroadcastEngine, timeout_s: float, place: RankPlace) -> TrainerRendezvous:
    rank = engine.rank_offset + place.parallel.rank_in_group
    needed = engine.rank_offset + place.parallel.group_size
    if engine.world_size < needed:  # all ranks refuse, even those with room for it
        problem = "the communicator has no such rank"
        fix = f"a world_size of {needed} at least"
        raise config_error("rank_offset", engine.rank_offset, problem, fix)
    if engine.rank_offset < engine.num_trainers:
        problem = f"the trainer has the first {engine.num_trainers} ranks"
        raise config_error("rank_offset", engine.rank_offset, problem, str(engine.num_trainers))
    if engine.backend == "nccl" and place.device.type != "cuda":
        raise config_error("backend", engine.backend, "NCCL needs a GPU", "gloo on this device")
    return TrainerRendezvous(
        engine.backend,
        engine.place.host,
        engine.place.port,
        engine.place.secret,
        rank,
        engine.world_size,
        timeout_s,
        engine.num_trainers,
    )
