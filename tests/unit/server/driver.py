"""A bare driver for one daemon process: sockets, frames and nothing else, so that a test can break
every rule."""

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import zmq

from rpc_schema import lifecycle as lc
from rpc_schema import step
from rpc_schema.codec import (
    ControlMessage,
    ControlReplyMessage,
    StepMessage,
    StepReplyMessage,
    decode_control_reply,
    decode_step_reply,
    encode_control,
    encode_step,
    split_replayed,
)
from rpc_schema.config import (
    CacheConfig,
    GraphConfig,
    ModelConfig,
    ParallelConfig,
    Rendezvous,
    RendezvousAddress,
    SchedulerConfig,
)
from rpc_schema.health import Hello, HelloReply
from rpc_schema.kv_cache import KVCacheConfig
from rpc_schema.version import PROTOCOL_VERSION
from tests.support.waiting import PATIENCE_S

START_LIMIT_S = PATIENCE_S
REPLY_LIMIT_MS = 30_000
STEP_DEADLINE_MS = 30_000
"""However busy the tests' host is."""
SERVE = (
    *(sys.executable, "-m", "tests.unit.server.fake_serve", "serve"),
    *("--device", "cpu", "--log-level", "error"),
)


class DaemonProcess:
    """A daemon with the fake worker, in its own directory."""

    def __init__(
        self,
        directory: Path,
        *options: str,
        pass_fds: Iterable[int] = (),
        serve: Sequence[str] = SERVE,
    ) -> None:
        """serve: the command, up to its options."""
        self.endpoint = f"ipc://{directory}/w0"
        self._stderr = directory.with_name(f"{directory.name}.stderr")
        with self._stderr.open("a") as stderr:
            self.process = subprocess.Popen(
                [*serve, "--endpoint", self.endpoint, *options],
                pass_fds=tuple(pass_fds),
                stderr=stderr,
            )
        self._wait_for(directory / "w0.events")

    def _wait_for(self, last_socket: Path) -> None:
        """Wait until it listens, or has ended."""
        deadline = time.monotonic() + START_LIMIT_S
        while self.process.poll() is None and not last_socket.exists():
            assert time.monotonic() < deadline, f"{last_socket} is not there"
            time.sleep(0.01)

    def wait(self, timeout_s: float = START_LIMIT_S) -> int:
        return self.process.wait(timeout_s)

    def stderr(self) -> str:
        return self._stderr.read_text()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE_S)


class Driver:
    """One driver's sockets to one daemon, and its place in the order of steps."""

    def __init__(self, endpoint: str) -> None:
        self.context = zmq.Context()
        self.driver_id = b"\x01" + os.urandom(15)
        self.control = self._connect(zmq.DEALER, endpoint)
        self.step = self._connect(zmq.DEALER, f"{endpoint}.step")
        self.results_route = b"\x01" + os.urandom(15)
        self.results = self._connect(zmq.DEALER, f"{endpoint}.results", self.results_route)
        self.events = self._connect(zmq.SUB, f"{endpoint}.events")
        self.events.subscribe(b"")
        self.epoch = 0
        self.link = 0
        self.seq = 0
        self.calls = 0

    def _connect(self, kind: int, address: str, routing_id: bytes = b"") -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        if routing_id:
            socket.setsockopt(zmq.ROUTING_ID, routing_id)
        socket.connect(address)
        return socket

    def close(self) -> None:
        self.context.destroy(linger=0)

    def send_control(self, kind: type[ControlMessage], **fields: object) -> int:
        self.calls += 1
        self.control.send(encode_control(kind(call=self.calls, **fields)))
        return self.calls

    def control_reply(self, timeout_ms: int = REPLY_LIMIT_MS) -> ControlReplyMessage:
        assert self.control.poll(timeout_ms), "no control reply"
        return decode_control_reply(self.control.recv_multipart())

    def call(self, kind: type[ControlMessage], **fields: object) -> ControlReplyMessage:
        number = self.send_control(kind, **fields)
        reply = self.control_reply(int(START_LIMIT_S * 1000))
        assert reply.call == number
        return reply

    def attach(
        self, epoch: int | None = None, *, force: bool = True, lease_ttl_ms: int = 60_000
    ) -> lc.CommitAttachReply:
        """By default over a driver that left without a word, and for longer than any test."""
        self.hello()
        prepared = self.prepare(epoch or 1, force=force)
        if not prepared.granted:
            prepared = self.prepare(prepared.last_epoch + 1, force=force)
        self.epoch, self.seq = prepared.last_epoch, 0
        committed = self.call(
            lc.CommitAttach,
            driver_id=self.driver_id,
            epoch=self.epoch,
            results_route=self.results_route,
            lease_ttl_ms=lease_ttl_ms,
        )
        assert isinstance(committed, lc.CommitAttachReply), committed
        self.link = committed.status.link
        attached = self.reply()
        assert isinstance(attached, lc.Attached)
        assert (attached.epoch, attached.seq) == (self.epoch, 0)
        return committed

    def hello(self, version: int = PROTOCOL_VERSION) -> HelloReply:
        reply = self.call(Hello, protocol_version=version, driver_id=self.driver_id)
        assert isinstance(reply, HelloReply)
        return reply

    def prepare(self, epoch: int, *, force: bool = False) -> lc.PrepareAttachReply:
        reply = self.call(lc.PrepareAttach, driver_id=self.driver_id, epoch=epoch, force=force)
        assert isinstance(reply, lc.PrepareAttachReply)
        return reply

    def status(self) -> lc.Status:
        reply = self.call(lc.GetStatus)
        assert isinstance(reply, lc.GetStatusReply)
        return reply.status

    def build(self, kind: type[StepMessage], **fields: object) -> StepMessage:
        self.seq += 1
        return kind(**{"epoch": self.epoch, "link": self.link, "seq": self.seq, **fields})

    def send(self, kind: type[StepMessage], **fields: object) -> list[bytes]:
        frames = encode_step(self.build(kind, **fields))
        self.step.send_multipart(frames)
        return frames

    def frames(self, timeout_ms: int = REPLY_LIMIT_MS) -> list[bytes]:
        """The next reply, without the empty messages by which the daemon looks for us."""
        while True:
            assert self.results.poll(timeout_ms), "no reply"
            frames = self.results.recv_multipart()
            if frames != [b""]:
                return frames

    def replay(self) -> list[bytes]:
        """A reply that is marked as sent before, without the mark."""
        replayed, frames = split_replayed(self.frames())
        assert replayed, frames
        return list(frames)

    def reply(self, timeout_ms: int = REPLY_LIMIT_MS) -> StepReplyMessage:
        return decode_step_reply(split_replayed(self.frames(timeout_ms))[1])

    def run(self, kind: type[StepMessage], **fields: object) -> StepReplyMessage:
        self.send(kind, **fields)
        return self.reply()

    def init_device(self, link: int | None = None) -> StepReplyMessage:
        new_link = link or self.link + 1
        reply = self.run(
            lc.InitDevice,
            parallel=ParallelConfig(),
            rendezvous=rendezvous(new_link),
            cache=CacheConfig(),
            scheduler=SchedulerConfig(step_deadline_ms=STEP_DEADLINE_MS),
        )
        self.link = new_link
        return reply

    def load(self, model: str = "/m", step_deadline_ms: int = STEP_DEADLINE_MS) -> StepReplyMessage:
        self.send_load(model, step_deadline_ms)
        return self.reply()

    def send_load(self, model: str, step_deadline_ms: int = STEP_DEADLINE_MS) -> None:
        self.send(
            lc.LoadModel,
            model=ModelConfig(model=model),
            scheduler=SchedulerConfig(step_deadline_ms=step_deadline_ms),
            cache=CacheConfig(),
            graph=GraphConfig(),
        )

    def make_ready(self, step_deadline_ms: int = STEP_DEADLINE_MS) -> None:
        """Reset any loaded state and continue to READY."""
        self.run(lc.Reset, to="CREATED")
        self.init_device()
        self.load(step_deadline_ms=step_deadline_ms)
        config = KVCacheConfig(num_blocks=2, block_size=16, groups=(), size_bytes=0)
        self.run(lc.InitializeFromConfig, kv_cache_configs=(config,))
        reply = self.run(lc.CompileOrWarmUpModel)
        assert isinstance(reply, lc.CompileOrWarmUpModelReply), reply

    def send_fault(self, fault: str, **fields: object) -> list[bytes]:
        return self.send(
            step.ExecuteModel,
            total_num_scheduled_tokens=0,
            scheduled_new_reqs=(new_request(fault),),
            **fields,
        )

    def send_step_until(self, file: Path) -> None:
        """Send a step that runs until this file exists; return once it runs."""
        self.send_fault(f"held:{file}")
        wait_for(lambda: self.status().phase == "ExecuteModel")

    def fault(self, fault: str = "none", **fields: object) -> StepReplyMessage:
        self.send_fault(fault, **fields)
        return self.reply()


def new_request(req_id: str) -> step.NewRequestData:
    return step.NewRequestData(
        slot=0,
        req_id=req_id,
        num_tokens=1,
        num_prompt_tokens=1,
        num_computed_tokens=0,
    )


def rendezvous(link: int, host: str = "127.0.0.1") -> Rendezvous:
    place = RendezvousAddress(host=host, port=1, secret=bytes(32))
    return Rendezvous(link=link, place=place, rank=0, local_world_size=1)


def wait_for(condition: object, limit_s: float = 30.0) -> None:
    """Wait until a function returns a true value."""
    deadline = time.monotonic() + limit_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)
