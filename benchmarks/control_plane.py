"""`python -m benchmarks.control_plane [--quick] [--json FILE]`: what a step costs apart from the model, against a bare
ping-pong and against a pickled payload, all in one run with interleaved rounds."""

import argparse
import json
import multiprocessing
import os
import pickle  # noqa: TID251  # measured as a peer's format, never used by us
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zmq

from benchmarks.control_plane_peers import (
    STOP,
    PeerCachedRequests,
    PeerModelRunnerOutput,
    PeerSchedulerOutput,
    run_codec,
    run_daemon,
    run_echo,
    run_pickle,
)
from benchmarks.state_worker import ALL_RANKS, BLOCK_SIZE
from client.scheduler_output import NewRequest, SchedulerOutput
from client.slots import SlotTable
from client.transport import ResultsChannel, new_driver_id, parse_endpoint
from client.worker_client import StepIds, WorkerClient
from rpc_schema.codec import Frame, decode_step, decode_step_reply, encode_step
from rpc_schema.config import (
    CacheConfig,
    GraphConfig,
    ModelConfig,
    ParallelConfig,
    Rendezvous,
    SchedulerConfig,
)
from rpc_schema.errors import ErrorReply
from rpc_schema.kv_cache import KVCacheConfig
from rpc_schema.sampling import SamplingParams
from rpc_schema.step import ExecuteModel, ModelRunnerOutput

GROUPS = (1, 4, 8)
SIZES = (256, 1024)
WARM_UP = 20
SPACING_S = 0.005
Spawn = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Figure:
    """One line of the table."""

    name: str
    value: float
    unit: str
    target: float | None = None
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        """None where there is no target."""
        if self.target is None:
            return None
        return self.value >= self.target if self.at_least else self.value <= self.target


class Requests:
    """A batch of requests that decode for ever: the scheduler's output of each step, with a new
    block for every BLOCK_SIZE-th request."""

    def __init__(self, size: int, prompt_len: int = 17) -> None:
        self.req_ids = tuple(f"cmpl-{number:032x}-0" for number in range(size))
        self.prompt = np.arange(prompt_len, dtype=np.int32)
        self.prompt_len = prompt_len
        self._next_block = 1
        self._step = 0

    def admission(self) -> SchedulerOutput:
        """Prefill of all, at staggered lengths so that block appends are spread over the steps."""
        new = [self._new_request(index, req_id) for index, req_id in enumerate(self.req_ids)]
        counts = {request.req_id: len(request.token_ids) for request in new}
        return SchedulerOutput(num_scheduled_tokens=counts, scheduled_new_reqs=new)

    def _new_request(self, index: int, req_id: str) -> NewRequest:
        tokens = self.prompt[: 1 + index % BLOCK_SIZE]
        return NewRequest(
            req_id=req_id,
            token_ids=tokens,
            num_prompt_tokens=len(tokens),
            num_computed_tokens=0,
            block_ids=[self._block()],
            sampling=SamplingParams(),
        )

    def decode(self) -> SchedulerOutput:
        """One token each; the requests whose block is full get the next."""
        self._step += 1
        first = (-self._step) % BLOCK_SIZE
        blocks = {req_id: (self._block(),) for req_id in self.req_ids[first::BLOCK_SIZE]}
        return SchedulerOutput(decode_req_ids=self.req_ids, new_block_ids=blocks)

    def _block(self) -> int:
        self._next_block += 1
        return self._next_block


class Echo:
    """N processes on one ROUTER: the transport alone, or with a codec in `run`."""

    def __init__(self, target: Callable[..., None], size: int, reply: bytes, directory: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        address = f"ipc://{directory}/{target.__name__}{size}-{len(reply)}"
        self._socket.bind(address)
        self._processes = [
            Spawn.Process(target=target, args=(address, rank, rank == size - 1, reply))
            for rank in range(size)
        ]
        for process in self._processes:
            process.start()
        self._peers = sorted(self._socket.recv_multipart()[0] for _ in range(size))

    def exchange(self, frames: Sequence[Frame]) -> list[bytes]:
        """Send to all, receive from the output rank."""
        for peer in self._peers:
            self._socket.send_multipart([peer, *frames])
        return self._socket.recv_multipart()[1:]

    def close(self) -> None:
        for peer in self._peers:
            self._socket.send_multipart([peer, STOP])
        for process in self._processes:
            process.join(5)
        self._socket.close()


class DaemonGroup:
    """N daemons and the driver's side of them."""

    def __init__(self, size: int, directory: str) -> None:
        self.size = size
        self._read_end, self._write_end = os.pipe()
        os.set_inheritable(self._read_end, True)
        endpoints = [f"ipc://{directory}/d{size}-{rank}" for rank in range(size)]
        self.pids = [_spawn_daemon(endpoint, self._read_end) for endpoint in endpoints]
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        driver_id = new_driver_id()
        addresses = [parse_endpoint(endpoint) for endpoint in endpoints]
        self._results = ResultsChannel(context, addresses, driver_id)
        self._clients = [
            WorkerClient(context, address, rank, driver_id)
            for rank, address in enumerate(addresses)
        ]
        self._step_sockets = [client._steps for client in self._clients]
        self._seq = 0
        self._link = 0
        for client in self._clients:
            client.hello(30.0)
            client.prepare_attach(1)
            client.commit_attach(1)
        self._receive(size)

    def start(self, max_num_seqs: int, *, all_ranks: bool) -> None:
        """Bring the group to READY with empty rows; every rank answers steps, or the last only."""
        self._all(lambda client, ids: client.reset(ids, "CREATED"))
        link = self._link + 1
        parallel = ParallelConfig(pipeline_parallel_size=self.size)
        scheduler = SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_seqs * BLOCK_SIZE
        )

        def init(client: WorkerClient, ids: StepIds) -> None:
            meeting = Rendezvous(
                link=link, host="127.0.0.1", port=1, rank=client.rank, local_world_size=1
            )
            client.init_device(ids, parallel, meeting, CacheConfig(), scheduler)

        self._all(init)
        self._link = link
        model = ModelConfig(model=ALL_RANKS if all_ranks else "output-rank")
        self._all(lambda c, ids: c.load_model(ids, model, scheduler, CacheConfig(), GraphConfig()))
        plan = (KVCacheConfig(num_blocks=2, block_size=16, groups=(), size_bytes=0),)
        self._all(lambda client, ids: client.initialize_from_config(ids, plan))
        self._all(lambda client, ids: client.compile_or_warm_up_model(ids))

    def step(
        self, table: SlotTable, output: SchedulerOutput, num_replies: int = 1
    ) -> Sequence[int]:
        """Encode, send to all, receive, decode; return the sampled tokens."""
        self._seq += 1
        encoded = table.encode(output, epoch=1, link=self._link, seq=self._seq)
        for channel in self._step_sockets:
            channel.send(encoded.frames)
        frames = self._receive(num_replies)
        reply = decode_step_reply(frames)
        assert isinstance(reply, ModelRunnerOutput), reply
        return table.decode(encoded, reply, frames[1:]).token_ids

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self._results.close()
        os.close(self._write_end)
        os.close(self._read_end)
        for pid in self.pids:
            os.waitpid(pid, 0)

    def _all(self, send: Callable[[WorkerClient, StepIds], None]) -> None:
        self._seq += 1
        for client in self._clients:
            send(client, StepIds(1, self._link, self._seq))
        for _ in self._clients:
            reply = decode_step_reply(self._receive(1))
            assert not isinstance(reply, ErrorReply), reply

    def _receive(self, count: int) -> list[bytes]:
        for _ in range(count):
            frames = self._results.receive(time.monotonic() + 10)
            assert frames is not None, "a daemon does not answer"
        return frames


def _spawn_daemon(endpoint: str, parent_fd: int) -> int:
    code = "import sys; from benchmarks.control_plane_peers import run_daemon as run; "
    code += f"run({endpoint!r}, {parent_fd})"
    return os.posix_spawn(
        sys.executable, [sys.executable, "-c", code], dict(os.environ)
    )


def median_us(work: Callable[[], object], count: int) -> float:
    """Median duration of `work` in microseconds."""
    durations = []
    for _ in range(count):
        began = time.perf_counter()
        work()
        durations.append(time.perf_counter() - began)
    return statistics.median(durations) * 1e6
