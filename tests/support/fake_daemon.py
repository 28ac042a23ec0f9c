"""A scripted daemon in a thread: speaks rpc_schema on real sockets, with the real daemon's lease,
gate and reply ring, and instead of a model has a KV cache of tokens. A sampled token is a function
of what the row's blocks hold, so a wrong block, a wrong prefix hit, a lost row or a step that ran
twice shows as a wrong token.
"""

import math
import threading
import time
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import zmq

from rpc_schema import codec, step
from rpc_schema import lease as ls
from rpc_schema import lifecycle as lc
from rpc_schema.config import RendezvousAddress, WorkerConfig
from rpc_schema.error_replies import ErrorReply
from rpc_schema.errors import ErrorCode, ErrorScope, WorkerError
from rpc_schema.health import CheckHealth, Hello
from rpc_schema.kv_cache import KVCacheConfig, KVPages
from rpc_schema.sampling import TokenLogprobs
from rpc_schema.uploads import FindUploads, UploadChunk
from rpc_schema.version import PROTOCOL_VERSION
from tests.support.default_replies import control_reply, step_reply
from tests.support.waiting import PATIENCE_S
from worker_client.requests import SamplingParams
from worker_daemon.server.lifecycle import shutting_down
from worker_daemon.server.sequence import GateResult, StepGate, drained
from worker_daemon.server.session.lease import DriverIdentity, Lease, lease_terms
from worker_daemon.server.wire.replies import control_error_reply, error_reply
from worker_daemon.server.wire.reply_channel import ReplyRing

VOCAB_SIZE = 1000
EOS = 7
NAN = step.NO_TOKEN
HELD = math.inf
CHAIN = ("CREATED", "DEVICE_READY", "MODEL_LOADED", "KV_READY", "READY")


def next_token(tokens: Sequence[int], seed: int = 0) -> int:
    """Return the token after `tokens`, which every reply must equal."""
    data = np.array(tokens, "<i4").tobytes() + seed.to_bytes(8, "little")
    return int.from_bytes(blake2b(data, digest_size=4).digest(), "little") % VOCAB_SIZE


def bitmap(slots: Sequence[int]) -> bytes:
    """Return slots as a reply's bitmap."""
    named = sum(1 << slot for slot in slots)
    return named.to_bytes((named.bit_length() + 7) // 8, "little")


def named_slots(named: bytes) -> list[int]:
    """Return the slots of a bitmap, ascending."""
    return [8 * i + bit for i, byte in enumerate(named) for bit in range(8) if byte >> bit & 1]


def reference_tokens(prompt: Sequence[int], num: int, stop: frozenset[int], seed: int = 0) -> list:
    """Return a request's expected tokens, computed independently."""
    tokens = list(prompt)
    for _ in range(num):
        tokens.append(next_token(tokens, seed))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


@dataclass
class Fault:
    """A fault at the execute-th ExecuteModel (from 0) that this daemon receives."""

    execute: int
    kind: str = "error"
    """error: answer with `code`; hang: never answer; die: close everything; swallow: ignore the
    message."""
    code: ErrorCode = ErrorCode.INTERNAL
    scope: ErrorScope = ErrorScope.STEP
    message: str = "scripted"
    traceback: str = "Traceback: scripted"
    delay_s: float = 0.0
    """HELD: this answer and later ones are sent once the daemon's `let_go` is set."""


@dataclass
class Row:
    """One slot."""

    req_id: str
    tokens: list[int]
    num_computed: int
    seed: int
    logprobs: int | None
    blocks: list[int] = field(default_factory=list)


class Refused(Exception):
    """A step breaks a rule."""


def _driver(request) -> DriverIdentity:
    """Return the driver of a request; all peers of a fake daemon are one user's."""
    return DriverIdentity("", request.driver_id)


class FakeDaemon:
    """One daemon; start() binds and runs, stop() ends it, kill() ends it silently."""

    def __init__(
        self, endpoint: str, *, available_bytes: int = 1 << 20, version: int | None = None
    ):
        self.endpoint = endpoint
        self.available_bytes = available_bytes
        self.profiles: list[tuple[int, tuple[lc.MemoryChange, ...]]] = []
        """Results of the next memory profiles: available_bytes, and changes by other processes."""
        self.version = PROTOCOL_VERSION if version is None else version
        self.model_max_len = 512
        self.poison: frozenset[int] = frozenset()
        """Tokens whose keys and values are NaN, like all that are written together with them."""
        self.faults: list[Fault] = []
        self.uid = uuid.uuid4().bytes
        self.operations: list[str] = []
        self.executes: list[step.ExecuteModel] = []
        self.replica_counts: list[list[list[int]]] = []
        """The counts in steps of replicas in lockstep."""
        self.mute = False
        self.shuts_down = False
        self.tells_drain = True
        """False: its heartbeats are like those from before a drain."""
        self.load = "CREATED"
        self.rank = 0
        self.link_state = "none"
        self.granted = 0
        self.gate = StepGate()
        self.ring = ReplyRing()
        self.lease = Lease(time.monotonic)
        self.drivers: dict[int, bytes] = {}
        self.config: WorkerConfig | None = None
        self.kv_cache: KVCacheConfig | None = None
        self.rows: dict[int, Row] = {}
        self.kv: dict[tuple[int, int], int] = {}
        self.failed = False
        self.deferred: dict[int, dict[int, Row]] = {}
        self.relink_faults: list[Fault] = []
        """Faults of the next Relinks."""
        self.warm_up_faults: list[Fault] = []
        """Faults of the next CompileOrWarmUpModels."""
        self.attach_gate = threading.Event()
        """CommitAttach is answered once it is set."""
        self.attach_gate.set()
        self.let_go = threading.Event()
        """See Fault.delay_s."""
        self.num_executes = 0
        """Number of ExecuteModel received."""
        self._outbox: deque[tuple[float, int, list[bytes]]] = deque()
        self._stop = threading.Event()
        self._bound = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> "FakeDaemon":
        self._thread.start()
        assert self._bound.wait(PATIENCE_S)
        return self

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    kill = stop

    def shut_down(self) -> None:
        """Refuse steps, operations, uploads and drivers from now on, as after SIGTERM."""
        self.shuts_down = True

    @property
    def is_running(self) -> bool:
        return not self._stop.is_set()

    @property
    def epoch(self) -> int:
        return self.gate.epoch

    @property
    def link(self) -> int:
        return self.gate.link

    @property
    def last_seq(self) -> int:
        return self.gate.last_seq

    # ------------------------------------------------------------------ sockets

    def _run(self) -> None:
        context = zmq.Context()
        sockets = []
        for kind, suffix in (
            (zmq.ROUTER, ""),
            (zmq.ROUTER, ".step"),
            (zmq.ROUTER, ".results"),
            (zmq.PUB, ".events"),
        ):
            socket = context.socket(kind)
            socket.setsockopt(zmq.LINGER, 0)
            if kind == zmq.ROUTER:
                socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
            if suffix == ".results":
                socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            if suffix == ".step":
                socket.setsockopt(zmq.MAXMSGSIZE, codec.MAX_STEP_BYTES)
            socket.bind(self.endpoint + suffix)
            sockets.append(socket)
        self._control, self._steps, self._results, self._events = sockets
        self._bound.set()
        poller = zmq.Poller()
        poller.register(self._control, zmq.POLLIN)
        poller.register(self._steps, zmq.POLLIN)
        last_beat = 0.0
        while not self._stop.is_set():
            ready = dict(poller.poll(2 if self._outbox else 20))
            if self._control in ready:
                self._on_control(self._control.recv_multipart())
            expired = self.lease.take_expiry()
            if expired:
                self.gate.expire(expired)
            if self._steps in ready:
                self._arrive(self._steps.recv_multipart())
            self._flush()
            if time.monotonic() - last_beat > 0.25:
                last_beat = time.monotonic()
                self._events.send(codec.encode_control(self._heartbeat()))
        for socket in sockets:
            socket.close()
        context.term()

    def _flush(self) -> None:
        now = HELD if self.let_go.is_set() else time.monotonic()
        while self._outbox and self._outbox[0][0] <= now:
            try:
                _, epoch, frames = self._outbox[0]
                self._results.send_multipart([self.drivers[epoch], *frames])
            except zmq.ZMQError as error:
                if error.errno == zmq.EHOSTUNREACH:
                    return
                raise
            self._outbox.popleft()

    def _arrive(self, frames) -> None:
        """Receive a step request; a faulty network may override this."""
        self._on_step(frames)

    def _depart(self, epoch: int, frames, delay_s: float = 0.0) -> None:
        """Send a step reply; a faulty network may override this."""
        self._outbox.append((time.monotonic() + delay_s, epoch, frames))
        self._flush()

    def _reply(self, message, arrays=(), delay_s: float = 0.0, *, keep: bool = True) -> None:
        frames = codec.encode_step(message, arrays)
        if keep:
            self.ring.keep(message.seq, frames)
        self._depart(message.epoch, frames, delay_s)

    # ------------------------------------------------------------------ control

    def _on_control(self, frames) -> None:
        if self.mute:
            return
        request = codec.decode_control(frames[1:])
        self.operations.append(type(request).__name__)
        if isinstance(request, lc.CommitAttach):
            self.attach_gate.wait(PATIENCE_S)
        try:
            reply = self._control_reply(request)
        except WorkerError as error:
            reply = control_error_reply(error, call=request.call)
        self._control.send_multipart([frames[0], codec.encode_control(reply)])

    def _control_reply(self, request):  # noqa: PLR0911, PLR0912
        match request:
            case Hello():
                return control_reply(
                    request, protocol_version=self.version, worker_uid=self.uid, software="fake"
                )
            case lc.PrepareAttach() | UploadChunk() if self.shuts_down:
                raise shutting_down()
            case lc.PrepareAttach() if self.gate.draining:
                raise drained()
            case lc.PrepareAttach(epoch=epoch):
                self.lease.check_free_for(_driver(request), force=request.force)
                granted = epoch > max(self.epoch, self.granted)
                last = max(self.epoch, self.granted)
                if granted:
                    self.granted = epoch
                    self.lease.claim(_driver(request), epoch, force=request.force)
                return control_reply(request, granted=granted, last_epoch=last)
            case lc.CommitAttach():
                reply = control_reply(
                    request,
                    previous_epoch=self.epoch,
                    previous_seq=self.last_seq,
                    previous_clean=True,
                    status=self.status(),
                )
                terms = lease_terms(
                    request.lease_ttl_ms, request.orphan_kv_ttl_ms, request.holder_name
                )
                self.lease.check_claim(_driver(request), request.epoch)
                self.lease.grant(_driver(request), request.epoch, terms)
                self.gate.attach(request.epoch)
                self.ring = ReplyRing()
                self.drivers[request.epoch] = request.results_route
                self.rows.clear()
                self.failed = False
                self._outbox.clear()
                self._reply(lc.Attached(epoch=self.epoch, seq=0, rank=self.rank), keep=False)
                return reply
            case lc.Detach(epoch=epoch):
                if self.lease.release(epoch):
                    self.gate.detach(epoch)
                elif not self.lease.give_up(epoch):
                    self.lease.need_held(epoch)
                    self.gate.detach(epoch)
            case ls.RenewLease():
                driver, yields = _driver(request), request.yields
                is_renewed = self.lease.renew(driver, request.epoch, yields=yields)
                return control_reply(request, remaining_ms=1, is_claimed=not is_renewed)
            case lc.OpenRendezvous():
                place = RendezvousAddress(host="127.0.0.1", port=1234, secret=bytes(32))
                return control_reply(request, place=place)
            case CheckHealth():
                return control_reply(request, healthy=True, phase="IDLE")
            case FindUploads(content_hashes=names):
                return control_reply(request, are_complete=(False,) * len(names))
            case lc.GetStatus():
                return control_reply(request, status=self.status())
        return control_reply(request)

    @property
    def serving(self):
        return "DRAINING" if self.shuts_down or self.gate.draining else "SERVING"

    def status(self) -> lc.Status:
        return lc.Status(
            worker_uid=self.uid,
            pid=1,
            endpoint=self.endpoint,
            device="cpu",
            serving=self.serving,
            load=self.load,
            link_state=self.link_state,
            link=self.link,
            epoch=self.epoch,
            last_seq=self.last_seq,
            rank=self.rank,
            phase="IDLE",
            phase_ms=0,
            config=self.config if CHAIN.index(self.load) >= 2 else None,
            kv_cache=self.kv_cache,
            memory_bytes={"weights": 10, "kv_cache": 20},
            providers={"attention": "none"},
            input_wait_share=0.25,
            reply_delay=lc.ReplyDelay(num_replies=7, p50_us=20.5, p99_us=80.0),
            transitions=(),
            kv_cache_advice=lc.KVCacheAdvice(request_bytes=123456, card_bytes=234567),
            lease=self.lease.status(),
        )

    def _heartbeat(self) -> lc.Heartbeat:
        return lc.Heartbeat(
            worker_uid=self.uid,
            rank=self.rank,
            serving=self.serving,
            load=self.load,
            link_state=self.link_state,
            epoch=self.epoch,
            link=self.link,
            last_seq=self.last_seq,
            phase="IDLE",
            phase_ms=0,
            drains=self.gate.draining and self.tells_drain,
        )

    # ------------------------------------------------------------------ steps

    def _on_step(self, frames) -> None:
        request = codec.decode_step(frames[1:])
        result = self.gate.check(request)
        fault = None
        if isinstance(request, step.ExecuteModel) and result is GateResult.RUN:
            fault = next((f for f in self.faults if f.execute == self.num_executes), None)
            self.num_executes += 1
        if fault is not None and fault.kind == "swallow":
            return
        if fault is not None and fault.kind == "die":
            self._stop.set()
            return
        if result is GateResult.RUN:
            self.operations.append(type(request).__name__)
            self.ring.keep(request.seq, ())
            self._handle(request, frames[2:], fault)
            self.gate.accept(request)  # last: tests wait for it, and look at what was noted
        elif result is GateResult.REPLAY:
            kept = self.ring.get(request.seq)
            if kept:
                self._depart(request.epoch, codec.mark_replayed(kept))
        elif request.epoch in self.drivers:
            refusal = self.gate.refusal(result, request)
            ids = {"epoch": request.epoch, "seq": request.seq, "rank": self.rank}
            self._reply(error_reply(refusal, **ids), keep=False)

    def _error(self, request, code, message, *, fault: Fault | None = None) -> None:
        self._reply(
            ErrorReply(
                epoch=request.epoch,
                seq=request.seq,
                rank=self.rank,
                code=code,
                scope=ErrorScope.STEP if fault is None else fault.scope,
                message=message,
                traceback="" if fault is None else fault.traceback,
            ),
            delay_s=0.0 if fault is None else fault.delay_s,
        )

    def _handle(self, request, arrays, fault) -> None:
        ids = {"epoch": request.epoch, "seq": request.seq, "rank": self.rank}
        if self.shuts_down:
            self._reply(error_reply(shutting_down(), **ids))
            return
        match request:
            case step.ExecuteModel():
                self.executes.append(request)
                if self._parallel.data_parallel_lockstep:
                    self._check_counts(request)
                self._execute(request, arrays, fault, ids)
            case step.SampleTokens():
                self._sample(request, ids)
            case step.ExecuteDummyBatch():
                if self._is_output:
                    self._reply(step_reply(request, self.rank))
            case _:
                self._lifecycle(request)

    @property
    def _is_output(self) -> bool:
        parallel = self._parallel
        output = (parallel.pipeline_parallel_size - 1) * parallel.tensor_parallel_size
        return self.rank % parallel.world_size == output

    def _lifecycle(self, request) -> None:  # noqa: PLR0912
        said: dict[str, object] = {}
        match request:
            case lc.InitDevice(rendezvous=meeting):
                self.gate.begin_link(request)
                self.rank, self.link_state = meeting.rank, "up"
                self._parallel = request.parallel
                if self.load != "CREATED":
                    self._error(request, ErrorCode.ILLEGAL_STATE, self.load)
                    return
                self.load = "DEVICE_READY"
            case lc.CompileOrWarmUpModel() if self.warm_up_faults:
                fault = self.warm_up_faults.pop(0)
                self._error(request, fault.code, fault.message, fault=fault)
                return
            case lc.Relink() if self.relink_faults:
                fault = self.relink_faults.pop(0)
                if fault.kind == "error":
                    self._error(request, fault.code, fault.message, fault=fault)
                return
            case lc.Relink():
                self.gate.begin_link(request)
                self.link_state = "up"
            case lc.Reset(to=to):
                self.load = to
                self.rows.clear()
                self.kv_cache = None
                if to == "CREATED":
                    self.link_state = "none"
            case lc.LoadModel():
                if self.load != "DEVICE_READY":
                    self._error(request, ErrorCode.ILLEGAL_STATE, self.load)
                    return
                self.load = "MODEL_LOADED"
                self.config = WorkerConfig(
                    parallel=self._parallel,
                    model=request.model,
                    scheduler=request.scheduler,
                    cache=request.cache,
                    graph=request.graph,
                )
                self.max_len = request.model.max_model_len or self.model_max_len
                said = {"max_model_len": self.max_len}
            case lc.GetKVCacheSpec():
                layer = KVPages(
                    layer_name=f"layers.{self.rank}",
                    num_kv_heads=1,
                    head_size=4,
                    dtype="float32",
                    bytes_per_token=32,
                )
                said = {"layers": (layer,)}
            case lc.DetermineAvailableMemory():
                available, changes = self.available_bytes, ()
                if self.profiles:
                    available, changes = self.profiles.pop(0)
                said = {"available_bytes": available, "changes": changes}
            case lc.InitializeFromConfig(kv_cache_configs=configs):
                own = configs[self.rank % self._parallel.world_size]
                self.kv_cache, self.load = own, "KV_READY"
                self.kv.clear()
            case lc.UpdateMaxModelLen(max_model_len=length):
                self.max_len = length
            case lc.CompileOrWarmUpModel():
                self.load = "READY"
            case lc.GetModelMetadata():
                said = {
                    "vocab_size": VOCAB_SIZE,
                    "max_model_len": self.max_len,
                    "eos_token_ids": (EOS,),
                }
        self._reply(step_reply(request, self.rank, **said))

    def _check_counts(self, request: step.ExecuteModel) -> None:
        shape = self._parallel.data_parallel_size, 2
        counts = np.frombuffer(request.replica_counts, "<i4").reshape(shape)
        own = [len(named_slots(request.scheduled)), request.total_num_scheduled_tokens]
        assert counts[self.rank // self._parallel.world_size].tolist() == own
        self.replica_counts.append(counts.tolist())

    def _execute(self, request: step.ExecuteModel, arrays, fault, ids) -> None:
        if self.failed and request.resync is None:
            self._error(request, ErrorCode.PRECEDED_BY, "an earlier step failed")
            return
        if fault is not None:
            self.failed = True
            if fault.kind == "error":
                self._error(request, fault.code, fault.message, fault=fault)
            return
        try:
            sampled = self._apply(request, arrays)
        except Refused as error:
            self.failed = True
            self._error(request, ErrorCode.INVALID_STEP, str(error))
            return
        self.failed = False
        if request.resync is not None:
            self.deferred.clear()
        if request.deferred is not None:
            later = named_slots(request.deferred)
            assert later and {*later} <= {*sampled}
            held = sum(len(waiting) for waiting in self.deferred.values())
            assert held + len(sampled) <= self.config.scheduler.max_num_seqs
            self.deferred[request.seq] = {slot: self.rows[slot] for slot in later}
            sampled = [slot for slot in sampled if slot not in later]
        self._emit(sampled, ids)

    def _apply(self, request: step.ExecuteModel, arrays) -> list[int]:
        for slot in np.frombuffer(request.finished, "<u2").tolist():
            if self.rows.pop(slot, None) is None:
                raise Refused(f"finished slot {slot} is not in use")
        if request.resync is not None:
            self._resync(np.frombuffer(request.resync, "<i4").reshape(-1, 4).tolist())
        self._admit(request.scheduled_new_reqs, arrays)
        num_blocks = self.kv_cache.num_blocks
        for slot, block in zip(
            np.frombuffer(request.new_block_slots, "<u2").tolist(),
            np.frombuffer(request.new_block_ids, "<i4").tolist(),
            strict=True,
        ):
            if not 1 <= block < num_blocks:
                raise Refused(f"block {block}")
            self.rows[slot].blocks.append(block)
        bits = np.unpackbits(np.frombuffer(request.scheduled, np.uint8), bitorder="little")
        counts = dict.fromkeys(np.flatnonzero(bits).tolist(), 1)
        pairs = np.frombuffer(request.num_scheduled_tokens, "<i4").reshape(-1, 2).tolist()
        for slot, count in pairs:
            if slot not in counts:
                raise Refused(f"slot {slot} has tokens, but is not scheduled")
            counts[slot] = count
        if sum(counts.values()) != request.total_num_scheduled_tokens:
            raise Refused("the sum is wrong")
        if sum(counts.values()) > self.config.scheduler.max_num_batched_tokens:
            raise Refused("too many tokens")
        return self._forward(counts)

    def _resync(self, rows) -> None:
        for slot, computed, tokens, blocks in rows:
            row = self.rows.get(slot)
            if row is None or (row.num_computed, len(row.tokens), len(row.blocks)) != (
                computed,
                tokens,
                blocks,
            ):
                raise Refused(f"resync: slot {slot} is {row}, not {computed, tokens, blocks}")
        keep = {row[0] for row in rows}
        self.rows = {slot: row for slot, row in self.rows.items() if slot in keep}

    def _admit(self, requests, arrays) -> None:
        tokens = np.frombuffer(arrays[0], "<i4").tolist() if requests else []
        for new in requests:
            if new.slot in self.rows or new.slot >= self.config.scheduler.max_num_seqs:
                raise Refused(f"slot {new.slot} cannot be taken")
            own, tokens = tokens[: new.num_tokens], tokens[new.num_tokens :]
            assert len(own) == new.num_tokens > new.num_computed_tokens
            self.rows[new.slot] = Row(
                new.req_id,
                own,
                new.num_computed_tokens,
                SamplingParams.of(new.extensions).seed or 0,
                SamplingParams.of(new.extensions).logprobs,
            )
        assert not tokens

    def _forward(self, counts: dict[int, int]) -> list[int]:
        size = self.kv_cache.block_size
        for slot, count in counts.items():
            row = self.rows.get(slot)
            if row is None:
                raise Refused(f"slot {slot} is not in use")
            end = row.num_computed + count
            if not 1 <= count <= len(row.tokens) - row.num_computed:
                raise Refused(f"slot {slot}: {count} tokens")
            if end > len(row.blocks) * size:
                raise Refused(f"slot {slot}: {len(row.blocks)} blocks for {end} tokens")
            places = [(row.blocks[p // size], p % size) for p in range(end)]
            chunk = row.tokens[row.num_computed : end]
            before = [self.kv[place] for place in places[: row.num_computed]]
            tainted = NAN in before or not self.poison.isdisjoint(chunk)
            for place, token in zip(places[row.num_computed :], chunk, strict=True):
                self.kv[place] = NAN if tainted else token
        sampled = []
        for slot, count in counts.items():
            row = self.rows[slot]
            row.num_computed += count
            if row.num_computed == len(row.tokens):
                seen = [self.kv[row.blocks[p // size], p % size] for p in range(row.num_computed)]
                row.tokens.append(NAN if NAN in seen else next_token(seen, row.seed))
                sampled.append(slot)
        return sampled

    def _sample(self, request: step.SampleTokens, ids) -> None:
        if self.failed:
            self._error(request, ErrorCode.PRECEDED_BY, "an earlier step failed")
            return
        waiting = self.deferred[request.step_seq]
        chosen = [*waiting] if request.slots is None else named_slots(request.slots)
        rows = {slot: waiting.pop(slot) for slot in chosen}
        if not waiting:
            del self.deferred[request.step_seq]
        self._emit([slot for slot, row in rows.items() if self.rows.get(slot) is row], ids)

    def _emit(self, slots: list[int], ids) -> None:
        if not self._is_output:
            return
        rows = [self.rows[slot] for slot in slots]
        tokens = np.array([row.tokens[-1] for row in rows], "<i4")
        width = max((-1 if row.logprobs is None else row.logprobs for row in rows), default=-1)
        arrays, extensions = [], ()
        if width >= 0:
            extensions = (TokenLogprobs(width=width),)
            ids_np = np.repeat(tokens[:, None], width + 1, axis=1) + np.arange(width + 1)
            logprobs = -np.arange(width + 1, dtype="<f4")[None].repeat(len(rows), 0)
            arrays = [
                ids_np.astype("<i4").tobytes(),
                logprobs.tobytes(),
                np.ones(len(rows), "<i4").tobytes(),
            ]
        self._reply(
            step.ModelRunnerOutput(
                **ids,
                slots=bitmap(slots),
                sampled_token_ids=tokens.tobytes(),
                extensions=extensions,
            ),
            arrays,
        )


class FakeGroup:
    """world_size fake daemons under a directory."""

    def __init__(self, directory, world_size: int, **options) -> None:
        self.daemons = [
            FakeDaemon(f"ipc://{directory}/w{rank}", **options).start()
            for rank in range(world_size)
        ]

    @property
    def endpoints(self) -> list[str]:
        return [daemon.endpoint for daemon in self.daemons]

    def stop(self) -> None:
        for daemon in self.daemons:
            daemon.stop()
