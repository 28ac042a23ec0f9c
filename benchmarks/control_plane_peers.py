"""The processes that the control-plane benchmark talks to: bare echo, echo with our codec, vLLM's
payload in pickle, and our daemon. Each runs until it is killed or its sockets' owner says so."""

import pickle  # noqa: TID251  # measured as a peer's format, never used by us
from dataclasses import dataclass, field

import zmq

from benchmarks.state_worker import make_worker
from rpc_schema.codec import decode_step, encode_step
from rpc_schema.step import ExecuteModel, ModelRunnerOutput
from worker_daemon.server.daemon import serve
from worker_daemon.server.dispatch import RendezvousServerLike
from worker_daemon.settings import build_settings

STOP = b"stop"


@dataclass
class PeerCachedRequests:
    """The running requests as vLLM's scheduler sends them: by string id, all in each step."""

    req_ids: list[str]
    resumed_req_ids: set[str]
    new_token_ids: list[list[int]]
    all_token_ids: dict[str, list[int]]
    new_block_ids: list[tuple[list[int], ...] | None]
    num_computed_tokens: list[int]
    num_output_tokens: list[int]


@dataclass
class PeerSchedulerOutput:
    """A decode step with the fields of vLLM's SchedulerOutput."""

    scheduled_new_reqs: list[object]
    scheduled_cached_reqs: PeerCachedRequests
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    scheduled_encoder_inputs: dict[str, list[int]] = field(default_factory=dict)
    num_common_prefix_blocks: list[int] = field(default_factory=lambda: [0])
    finished_req_ids: set[str] = field(default_factory=set)
    free_encoder_mm_hashes: list[str] = field(default_factory=list)


@dataclass
class PeerModelRunnerOutput:
    """Its answer."""

    req_ids: list[str]
    req_id_to_index: dict[str, int]
    sampled_token_ids: list[list[int]]
    logprobs: None = None
    prompt_logprobs_dict: dict[str, None] = field(default_factory=dict)


def _connect(address: str, rank: int) -> zmq.Socket[bytes]:
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.ROUTING_ID, b"rank%04d" % rank)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(address)
    socket.send(b"here")
    return socket


def run_echo(address: str, rank: int, answers: bool, reply: bytes) -> None:
    """Answer each frame with `reply`: the floor."""
    socket = _connect(address, rank)
    while socket.recv() != STOP:
        if answers:
            socket.send(reply)


def run_codec(address: str, rank: int, answers: bool, reply: bytes) -> None:
    """The same with our codec at both ends; `reply` is decoded once and encoded for each answer."""
    socket = _connect(address, rank)
    columns = ModelRunnerOutput(epoch=1, seq=1, rank=rank, sampled_token_ids=reply)
    while (frames := socket.recv_multipart()) != [STOP]:
        message = decode_step(frames)
        assert isinstance(message, ExecuteModel)
        if answers:
            socket.send_multipart(
                encode_step(
                    ModelRunnerOutput(
                        epoch=message.epoch,
                        seq=message.seq,
                        rank=rank,
                        slots=columns.slots,
                        sampled_token_ids=columns.sampled_token_ids,
                    )
                )
            )


def run_pickle(address: str, rank: int, answers: bool, reply: bytes) -> None:
    """vLLM's payload: unpickle, apply by string ids, pickle the answer."""
    socket = _connect(address, rank)
    rows: dict[str, list[int]] = {}
    while (frame := socket.recv()) != STOP:
        output = pickle.loads(frame)  # noqa: S301  # a peer's format, between our own processes
        cached = output.scheduled_cached_reqs
        for index, req_id in enumerate(cached.req_ids):
            row = rows.setdefault(req_id, [0, 0])
            row[0] = cached.num_computed_tokens[index]
            row[1] = output.num_scheduled_tokens[req_id]
            blocks = cached.new_block_ids[index]
            if blocks is not None:
                row.extend(blocks[0])
        if answers:
            socket.send(
                pickle.dumps(
                    PeerModelRunnerOutput(
                        cached.req_ids,
                        {req_id: index for index, req_id in enumerate(cached.req_ids)},
                        [[index] for index in range(len(cached.req_ids))],
                    ),
                    pickle.HIGHEST_PROTOCOL,
                )
            )


def run_daemon(endpoint: str, parent_fd: int) -> None:
    """Our daemon, with the worker that validates and applies."""
    settings = build_settings(
        {"endpoint": endpoint, "device": "cpu", "exit-with-parent-fd": parent_fd}
    )
    serve(settings, make_worker, _no_rendezvous)


def _no_rendezvous(host: str) -> RendezvousServerLike:
    raise AssertionError("the benchmark's workers have no link")
