"""`python -m benchmarks.control_plane [--quick] [--json FILE]`: measures the cost of a step without
the model, compared with a bare ping-pong and with a pickled payload, in one run with interleaved
rounds."""

import argparse
import json
import multiprocessing
import os
import pickle  # noqa: TID251  # measured as a peer's format, never used by us
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import zmq

from benchmarks.control_plane_peers import (
    STOP,
    PeerModelRunnerOutput,
    PeerScheduler,
    run_codec,
    run_echo,
    run_pickle,
)
from benchmarks.state_worker import ALL_RANKS, BLOCK_SIZE, NUM_BLOCKS
from rpc_schema import lifecycle as lc
from rpc_schema.codec import Frame, decode_step, decode_step_reply, encode_step
from rpc_schema.config import (
    CacheConfig,
    GraphConfig,
    ModelConfig,
    ParallelConfig,
    Rendezvous,
    SchedulerConfig,
)
from rpc_schema.error_replies import ErrorReply
from rpc_schema.kv_cache import KVCacheConfig
from rpc_schema.operations import StepMessage
from rpc_schema.step import ExecuteModel, ModelRunnerOutput
from worker_client.scheduler_output import LockstepOutput, NewRequest, SchedulerOutput
from worker_client.steps.encoded_step import decode_reply
from worker_client.steps.lockstep import LockstepSlots
from worker_client.steps.lockstep_step import ReplicaReplies
from worker_client.steps.slots import SlotTable
from worker_client.steps.step_checks import GroupLimits
from worker_client.wire.endpoint import new_driver_id, parse_endpoint
from worker_client.wire.keys import NO_KEYS, Keys
from worker_client.wire.lease import LeaseKeeper, LeaseTerms
from worker_client.wire.liveness import Watch
from worker_client.wire.transport import ResultsChannel
from worker_client.wire.worker_client import WorkerClient
from worker_daemon.server.auth.keygen import make_key_files
from worker_daemon.server.auth.security import SLOW_CIPHER_MB_S, cipher_mb_s
from worker_host.key_files import read_secret_key

GROUPS = (1, 4, 8)
SIZES = (256, 1024)
WARM_UP = 20
SPACING_S = 0.005
LEASE = LeaseTerms(ttl_s=60.0)
LIMITS = GroupLimits(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
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
        """True if the target is met; None without a target."""
        if self.target is None:
            return None
        return self.value >= self.target if self.at_least else self.value <= self.target


class Requests:
    """A batch of requests that decode forever: the scheduler's output of each step, with a new
    block for every BLOCK_SIZE-th request."""

    def __init__(self, size: int, prompt_len: int = 17, name: str = "cmpl") -> None:
        """name: that their ids begin with."""
        self.req_ids = tuple(f"{name}-{number:032x}-0" for number in range(size))
        self.prompt = np.arange(prompt_len, dtype=np.int32)
        self.prompt_len = prompt_len
        self._next_block = 1
        self._step = 0

    def admission(self) -> SchedulerOutput:
        """Return a prefill of all, with staggered lengths so that block appends are spread over the
        steps."""
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
        )

    def decode(self) -> SchedulerOutput:
        """Return a step of one token each; requests whose block is full get another."""
        self._step += 1
        first = (-self._step) % BLOCK_SIZE
        blocks = {req_id: (self._block(),) for req_id in self.req_ids[first::BLOCK_SIZE]}
        return SchedulerOutput(decode_req_ids=self.req_ids, new_block_ids=blocks)

    def turnover(self, count: int) -> Iterator[SchedulerOutput]:
        """Yield steps that each admit one request and end the one that the previous step admitted,
        while all others decode."""
        ended: tuple[str, ...] = ()
        for number in range(count):
            new = self._new_request(number, f"turnover-{number}")
            counts = {new.req_id: len(new.token_ids)}
            yield SchedulerOutput(counts, self.req_ids, [new], finished_req_ids=ended)
            ended = (new.req_id,)

    def _block(self) -> int:
        self._next_block += 1
        return self._next_block


class Echo:
    """N processes on one ROUTER: the transport alone, or with a codec in `run`."""

    def __init__(
        self, target: Callable[..., None], size: int, reply: bytes, directory: str
    ) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        address = f"ipc://{directory}/{target.__name__}{size}-{len(reply)}"
        self._socket.bind(address)
        self._processes = [
            Spawn.Process(target=target, args=(address, rank, rank == size - 1, reply))
            for rank in range(size)
        ]
        for process in self._processes:
            process.start()
        self._peers: list[bytes] = sorted(self._socket.recv_multipart()[0] for _ in range(size))

    def exchange(self, frames: Sequence[Frame]) -> list[bytes]:
        """Send to all; receive from the output rank."""
        for peer in self._peers:
            self._socket.send_multipart([peer, *frames])
        return self._socket.recv_multipart()[1:]

    def close(self) -> None:
        for peer in self._peers:
            self._socket.send_multipart([peer, STOP])
        for process in self._processes:
            process.join(5)
        self._socket.close()


class KeyPairs:
    """A driver's key and a key for all daemons, in a directory."""

    def __init__(self, directory: str) -> None:
        root = Path(directory)
        daemon, self._driver = (make_key_files(root / name) for name in ("daemon", "driver"))
        self._daemon_key = daemon.public_key
        authorized = root / "authorized.json"
        entry = {"key": self._driver.public_key, "role": "driver", "name": "benchmark"}
        authorized.write_text(json.dumps([entry]))
        self.daemon_files = {"key-file": str(daemon.secret), "authorized-keys": str(authorized)}

    def driver_keys(self, endpoints: Sequence[str]) -> Keys:
        """Return the driver's keys."""
        known = dict.fromkeys(endpoints, self._daemon_key)
        return Keys(read_secret_key(self._driver.secret, "key_file"), known)


class DaemonGroup:
    """N daemons and the driver's side of them."""

    def __init__(self, size: int, directory: str, keys: KeyPairs | None = None) -> None:
        """keys: both sides' keys; None: no keys."""
        self.size = size
        self._read_end, self._write_end = os.pipe()
        os.set_inheritable(self._read_end, True)
        locked = "k" if keys else "d"
        endpoints = [f"ipc://{directory}/{locked}{size}-{rank}" for rank in range(size)]
        files = keys.daemon_files if keys else {}
        self.pids = [_spawn_daemon(endpoint, self._read_end, files) for endpoint in endpoints]
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        driver_id, route = new_driver_id(), new_driver_id()
        own = keys.driver_keys(endpoints) if keys else NO_KEYS
        addresses = [parse_endpoint(endpoint, own) for endpoint in endpoints]
        self._watch = Watch([a.results for a in addresses], [a.control for a in addresses])
        self._results = ResultsChannel(context, addresses, route, self._watch, self._look)
        self._clients = [
            WorkerClient(context, address, rank, driver_id)
            for rank, address in enumerate(addresses)
        ]
        self._seq = 0
        self._link = 0
        self._lease = LeaseKeeper(context, driver_id, LEASE, self)
        for client in self._clients:
            client.greet(30.0, time.monotonic() + 30.0)
            client.prepare_attach(1)
            client.send_commit_attach(1, route, terms=LEASE).result()
        self._lease.start(1, list(enumerate(addresses)))
        self._lease.confirm()
        self._receive(size)

    def start(self, max_num_seqs: int, *, all_ranks: bool, are_replicas: bool = False) -> None:
        """Bring the group to READY with empty rows; every rank answers steps, or only the last.
        are_replicas: the ranks are replicas in lockstep, with so many rows each."""
        self._all(lambda _: partial(lc.Reset, to="CREATED"))
        link = self._link + 1
        parallel = ParallelConfig(
            pipeline_parallel_size=1 if are_replicas else self.size,
            data_parallel_size=self.size if are_replicas else 1,
            data_parallel_lockstep=are_replicas,
        )
        scheduler = SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_seqs * BLOCK_SIZE
        )
        self._all(
            lambda rank: partial(
                lc.InitDevice,
                parallel=parallel,
                rendezvous=Rendezvous(link=link, place=None, rank=rank, local_world_size=1),
                cache=CacheConfig(),
                scheduler=scheduler,
            )
        )
        self._link = link
        model = ModelConfig(model=ALL_RANKS if all_ranks else "output-rank")
        self._all(
            lambda _: partial(
                lc.LoadModel,
                model=model,
                scheduler=scheduler,
                cache=CacheConfig(),
                graph=GraphConfig(),
            )
        )
        plan = (KVCacheConfig(num_blocks=2, block_size=16, groups=(), size_bytes=0),)
        self._all(lambda _: partial(lc.InitializeFromConfig, kv_cache_configs=plan))
        self._all(lambda _: lc.CompileOrWarmUpModel)

    def step(
        self, table: SlotTable, output: SchedulerOutput, num_replies: int = 1
    ) -> Sequence[int]:
        """Encode, send to all, receive, decode; return the sampled tokens."""
        self._seq += 1
        encoded = table.encode(output, epoch=1, link=self._link, seq=self._seq)
        for client in self._clients:
            client.send(encoded.frames)
        frames = self._receive(num_replies)
        reply = decode_step_reply(frames)
        assert isinstance(reply, ModelRunnerOutput), reply
        return decode_reply(encoded, reply, frames[1:]).token_ids

    def step_of_replicas(self, table: LockstepSlots, output: LockstepOutput) -> Sequence[int]:
        """Encode, send each replica its part, receive all replies, decode; return the sampled
        tokens."""
        self._seq += 1
        encoded = table.encode(output, epoch=1, link=self._link, seq=self._seq)
        for client, frames in zip(self._clients, encoded.by_replica, strict=True):
            client.send(frames)
        replies = ReplicaReplies(encoded, self.size)
        for _ in self._clients:
            frames = self._receive(1)
            reply = decode_step_reply(frames)
            replies.take(reply.rank, reply, frames[1:])
        return replies.result().token_ids

    def close(self) -> None:
        self._lease.stop()
        for client in self._clients:
            client.close()
        self._results.close()
        self._watch.close()
        os.close(self._write_end)
        os.close(self._read_end)
        for pid in self.pids:
            os.waitpid(pid, 0)

    def _all(self, build_for: Callable[[int], Callable[..., StepMessage]]) -> None:
        self._seq += 1
        for client in self._clients:
            request = build_for(client.rank)(epoch=1, link=self._link, seq=self._seq)
            client.send(encode_step(request))
        for _ in self._clients:
            reply = decode_step_reply(self._receive(1))
            assert not isinstance(reply, ErrorReply), reply

    def _look(self) -> None:
        self._results.read_connection_events()
        self._watch.look()
        self._lease.check()

    def _receive(self, count: int) -> list[bytes]:
        frames: list[bytes] | None = []
        for _ in range(count):
            frames = self._results.receive(time.monotonic() + 10)
            assert frames, "a daemon does not answer"
        return frames or []


def _spawn_daemon(endpoint: str, parent_fd: int, key_files: Mapping[str, str]) -> int:
    code = "import sys; from benchmarks.control_plane_peers import run_daemon as run; "
    code += f"run({endpoint!r}, {parent_fd}, {dict(key_files)!r})"
    return os.posix_spawn(sys.executable, [sys.executable, "-c", code], dict(os.environ))


def median_us(work: Callable[[], object], count: int) -> float:
    """Return the median duration of `work` in microseconds."""
    durations = []
    for _ in range(count):
        began = time.perf_counter()
        work()
        durations.append(time.perf_counter() - began)
    return statistics.median(durations) * 1e6


class Prepared:
    """The inputs of one (N, size): real bytes of a step and of its reply."""

    def __init__(self, size: int) -> None:
        requests, table = Requests(size), SlotTable(size, LIMITS)
        table.encode(requests.admission(), epoch=1, link=1, seq=1)
        self.steps = [
            table.encode(requests.decode(), epoch=1, link=1, seq=2 + index).frames
            for index in range(BLOCK_SIZE)
        ]
        self.step_bytes = statistics.mean(sum(map(len, frames)) for frames in self.steps)
        self.reply = ModelRunnerOutput(
            epoch=1,
            seq=2,
            rank=0,
            slots=np.packbits(np.ones(size, np.bool_)).tobytes(),
            sampled_token_ids=np.zeros(size, "<i4").tobytes(),
        )
        self.reply_frame = bytes(encode_step(self.reply)[0])


def measure_group(
    size: int, num_requests: int, group: DaemonGroup, rounds: int, count: int, directory: str
) -> dict[str, list[float]]:
    """Return the medians (us) of each variant, one entry per round; the variants take turns."""
    prepared = Prepared(num_requests)
    columns = bytes(4 * num_requests + num_requests // 8)
    floor = Echo(run_echo, size, prepared.reply_frame, directory)
    codec = Echo(run_codec, size, columns, directory)
    peer = Echo(run_pickle, size, bytes(num_requests), directory)
    table, requests = SlotTable(num_requests, LIMITS), Requests(num_requests)
    table.encode(requests.admission(), epoch=1, link=1, seq=1)
    peer_scheduler = PeerScheduler(requests.req_ids)
    peer_count = max(count // 3, 20)
    steps = iter([requests.decode() for _ in range(rounds * count)])
    peer_steps = iter([requests.decode().new_block_ids for _ in range(rounds * peer_count)])

    def codec_step() -> None:
        encoded = table.encode(next(steps), epoch=1, link=1, seq=2)
        decode_step_reply(codec.exchange(encoded.frames))

    def peer_step() -> None:
        output = peer_scheduler.state_step(next(peer_steps))
        frame = pickle.dumps(output, pickle.HIGHEST_PROTOCOL)
        reply = pickle.loads(peer.exchange([frame])[0])  # noqa: S301  # a peer's format
        assert isinstance(reply, PeerModelRunnerOutput)

    results: dict[str, list[float]] = {}
    for _ in range(rounds):
        ways: dict[str, float] = {
            "floor": median_us(lambda: floor.exchange(prepared.steps[0]), count),
            "codec": median_us(codec_step, count),
            "whole": measure_daemons(group, num_requests, count, 1),
            "all": measure_daemons(group, num_requests, count, size),
            "replicas": measure_replicas(group, num_requests, count),
            "pickle": median_us(peer_step, peer_count),
        }
        for way, duration in ways.items():
            results.setdefault(way, []).append(duration)
    for echo in (floor, codec, peer):
        echo.close()
    return results


def measure_daemons(group: DaemonGroup, num_requests: int, count: int, num_replies: int) -> float:
    """Return the median us of a whole step through the daemons, answered by the last rank or by
    all."""
    group.start(num_requests, all_ranks=num_replies > 1)
    table, requests = SlotTable(num_requests, LIMITS), Requests(num_requests)
    group.step(table, requests.admission(), num_replies)
    for _ in range(WARM_UP):
        group.step(table, requests.decode(), num_replies)
    outputs = iter([requests.decode() for _ in range(count)])
    return median_us(lambda: group.step(table, next(outputs), num_replies), count)


def measure_replicas(group: DaemonGroup, num_requests: int, count: int) -> float:
    """Return the median us of a whole step of replicas in lockstep, a rank each, that share the
    requests and all answer."""
    size = group.size
    own = num_requests // size
    group.start(own, all_ranks=True, are_replicas=True)
    table = LockstepSlots(own, LIMITS, size)
    replicas = [Requests(own, name=f"cmpl{place}") for place in range(size)]
    admission = LockstepOutput.of([each.admission() for each in replicas])
    group.step_of_replicas(table, admission)

    def decode() -> LockstepOutput:
        return LockstepOutput.of([each.decode() for each in replicas])

    for _ in range(WARM_UP):
        group.step_of_replicas(table, decode())
    outputs = iter([decode() for _ in range(count)])
    return median_us(lambda: group.step_of_replicas(table, next(outputs)), count)


def measure_curve(quick: bool) -> list[Figure]:
    """Measure whole steps through a daemon with keys and one without, taking turns."""
    rounds, count = (3, 100) if quick else (10, 300)
    speed = cipher_mb_s()
    figures = [Figure("cipher", speed or 0.0, "MB/s", SLOW_CIPHER_MB_S, at_least=True)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        groups = {
            "without keys": DaemonGroup(1, directory),
            "with keys": DaemonGroup(1, directory, KeyPairs(directory)),
        }
        for num_requests in SIZES:
            results: dict[str, list[float]] = {way: [] for way in groups}
            for _ in range(rounds):
                for way, group in groups.items():
                    results[way].append(measure_daemons(group, num_requests, count, 1))
            figures += [
                Figure(f"whole step {way}, {num_requests} requests", statistics.median(us), "us")
                for way, us in results.items()
            ]
            more = 100 * (ratio(results, "with keys", "without keys") - 1)
            figures.append(Figure(f"keys cost a step, {num_requests} requests", more, "%", 20.0))
        for group in groups.values():
            group.close()
    return figures


def ratio(results: dict[str, list[float]], over: str, under: str) -> float:
    """Return the median over the rounds of the ratios within each round."""
    pairs = zip(results[over], results[under], strict=True)
    return statistics.median(upper / lower for upper, lower in pairs)


def measure_steps(quick: bool) -> list[Figure]:
    """Measure whole steps in every group shape and size."""
    rounds, count = (3, 60) if quick else (10, 300)
    figures = []
    for size in GROUPS:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
            group = DaemonGroup(size, directory)
            for num_requests in SIZES:
                results = measure_group(size, num_requests, group, rounds, count, directory)
                figures += step_figures(size, num_requests, results)
            if size == 1:
                figures += measure_cpu(group, quick)
            group.close()
    return figures


def step_figures(size: int, num_requests: int, results: dict[str, list[float]]) -> list[Figure]:
    """Return ratios with their targets, and the medians."""
    at = f"N={size}, {num_requests} requests"
    medians = [
        Figure(f"{way}, {at}", statistics.median(values), "us") for way, values in results.items()
    ]
    faster = 5.0 if num_requests == 256 else 12.0
    return [
        *medians,
        Figure(f"wire and codec / floor, {at}", ratio(results, "codec", "floor"), "x", 1.5),
        Figure(f"whole step / floor, {at}", ratio(results, "whole", "floor"), "x", 2.0),
        Figure(f"from all ranks / floor, {at}", ratio(results, "all", "floor"), "x", 2.25),
        Figure(f"replicas / from all ranks, {at}", ratio(results, "replicas", "all"), "x", 1.15),
        Figure(
            f"pickled payload / whole step, {at}",
            ratio(results, "pickle", "whole"),
            "x",
            faster,
            at_least=True,
        ),
    ]


def measure_cpu(group: DaemonGroup, quick: bool) -> list[Figure]:
    """Measure the CPU use of one daemon at one step every SPACING_S, and when idle."""
    count, idle_s = (100, 2.0) if quick else (600, 10.0)
    group.start(256, all_ranks=False)
    table, requests = SlotTable(256, LIMITS), Requests(256)
    group.step(table, requests.admission())
    before = cpu_s(group.pids[0])
    for _ in range(count):
        time.sleep(SPACING_S)
        group.step(table, requests.decode())
    per_step_us = (cpu_s(group.pids[0]) - before) / count * 1e6
    before = cpu_s(group.pids[0])
    time.sleep(idle_s)
    idle = (cpu_s(group.pids[0]) - before) / idle_s * 100
    return [
        Figure("worker CPU a step, one every 5 ms, 256 requests", per_step_us, "us", 200.0),
        Figure("worker CPU when idle", idle, "% of a core", 0.5),
    ]


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of all threads of a process, from the Linux scheduler's accounting."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def measure_codec(quick: bool) -> list[Figure]:
    """Measure bytes and encode + decode times of steady steps, resynchronization and prompts."""
    count = 200 if quick else 2000
    figures = []
    for size in SIZES:
        prepared = Prepared(size)
        message = decode_step(prepared.steps[0])
        assert isinstance(message, ExecuteModel)
        encode_us = median_us(partial(encode_step, message), count)
        decode_us = median_us(partial(decode_step, prepared.steps[0]), count)
        at = f"{size} requests"
        figures += [
            Figure(f"decode step, mean, {at}", prepared.step_bytes, "bytes", 1024.0),
            Figure(f"encode step, {at}", encode_us, "us"),
            Figure(f"decode step, {at}", decode_us, "us"),
            Figure(
                f"encode + decode, {at}", encode_us + decode_us, "us", 10.0 if size == 256 else None
            ),
            Figure(f"one comes, one goes, encode, {at}", turnover_us(size, count), "us"),
            Figure(f"full resynchronisation, {at}", resync_bytes(size), "bytes/request", 20.0),
        ]
    figures.append(Figure("prompt tokens", prompt_bytes(8192), "bytes/token", 4.3))
    return figures


def turnover_us(size: int, count: int) -> float:
    """Return the median us of the driver's part of a step that admits a request and ends
    another."""
    requests, table = Requests(size), SlotTable(size + 1, LIMITS)
    table.encode(requests.admission(), epoch=1, link=1, seq=1)
    steps = iter(list(requests.turnover(count)))
    return median_us(lambda: table.encode(next(steps), epoch=1, link=1, seq=2), count)


def resync_bytes(size: int) -> float:
    """Return the bytes per request of a resynchronization."""
    requests, table = Requests(size), SlotTable(size, LIMITS)
    table.encode(requests.admission(), epoch=1, link=1, seq=1)
    table.require_resync()
    frames = table.encode(requests.decode(), epoch=1, link=1, seq=2).frames
    return sum(map(len, frames)) / size


def prompt_bytes(num_tokens: int) -> float:
    """Return the bytes per token of an admission."""
    request = NewRequest(
        req_id="cmpl-0",
        token_ids=np.arange(num_tokens, dtype=np.int32),
        num_prompt_tokens=num_tokens,
        num_computed_tokens=0,
        block_ids=list(range(1, 1 + num_tokens // BLOCK_SIZE)),
    )
    output = SchedulerOutput(
        num_scheduled_tokens={"cmpl-0": num_tokens}, scheduled_new_reqs=[request]
    )
    frames = SlotTable(1).encode(output, epoch=1, link=1, seq=1).frames
    blocks_bytes = 6 * (num_tokens // BLOCK_SIZE)
    return (sum(map(len, frames)) - blocks_bytes) / num_tokens


def print_table(figures: Sequence[Figure]) -> None:
    """Print one line per figure: name, value, target, met."""
    for figure in figures:
        target = ""
        if figure.target is not None:
            sign = ">=" if figure.at_least else "<="
            target = f"{sign} {figure.target:g}  {'met' if figure.met else 'NOT MET'}"
        print(f"{figure.name:<52} {figure.value:>10.2f} {figure.unit:<14} {target}")


def main() -> None:
    """Measure and print; with --json also write the figures to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds; figures are rough")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    options = parser.parse_args()
    figures = measure_codec(options.quick) + measure_steps(options.quick)
    figures += measure_curve(options.quick)
    print_table(figures)
    if options.json is not None:
        rows = [
            {"name": f.name, "value": f.value, "unit": f.unit, "target": f.target, "met": f.met}
            for f in figures
        ]
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
