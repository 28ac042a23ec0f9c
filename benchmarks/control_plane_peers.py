"""The peer processes of the control-plane benchmark: bare echo, echo with our codec, vLLM's payload
in pickle, and our daemon. Each runs until it is killed or told to end.

The pickling peer does on both sides the work of vLLM's method for the same step, and nothing
without a counterpart in ours. Its scheduler builds the step from scratch each time, as vLLM's
`schedule` and `_make_cached_request_data` do: a dictionary of token counts by request id, lists
with one entry per request, and new dataclasses around them (ours: `SlotTable.encode`). Its worker
finds the requests that left the batch, and applies counts and blocks request by request, as
`_update_states` does (ours: `RequestState.apply`, which also checks the step; this does not). It
answers with ids, an index of ids and a list of tokens for each request. It leaves out work that
ours does elsewhere or not at all: choosing requests, preparing inputs, keeping sampled tokens.
"""

import pickle  # noqa: TID251  # measured as a peer's format, never used by us
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import zmq

from benchmarks.state_worker import StateWorker
from rpc_schema.codec import decode_step, encode_step
from rpc_schema.step import ExecuteModel, ModelRunnerOutput
from worker_daemon.server.daemon import serve
from worker_daemon.server.dispatch import RendezvousServerLike
from worker_daemon.settings import build_settings

STOP = b"stop"
PEER_BLOCK_COLUMNS = 2048
"""Width of the peer's block table; longer rows wrap around."""


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
    """The peer worker's reply."""

    req_ids: list[str]
    req_id_to_index: dict[str, int]
    sampled_token_ids: list[list[int]]
    logprobs: None = None
    prompt_logprobs_dict: dict[str, None] = field(default_factory=dict)


@dataclass
class PeerRequest:
    """A running request in the peer's scheduler."""

    request_id: str
    num_computed_tokens: int
    num_output_tokens: int


class PeerScheduler:
    """The running requests, and the message for a decode step of all of them."""

    def __init__(self, req_ids: Sequence[str]) -> None:
        self._running = [PeerRequest(req_id, 1, 1) for req_id in req_ids]
        self._requests = {request.request_id: request for request in self._running}

    def state_step(self, new_blocks: Mapping[str, Sequence[int]]) -> PeerSchedulerOutput:
        """Return the message for one more token of each request; `new_blocks` are those allocated
        for it."""
        counts = {request.request_id: 1 for request in self._running}
        output = PeerSchedulerOutput([], self._cached(new_blocks), counts, sum(counts.values()))
        for req_id, count in counts.items():
            request = self._requests[req_id]
            request.num_computed_tokens += count
            request.num_output_tokens += 1
        return output

    def _cached(self, new_blocks: Mapping[str, Sequence[int]]) -> PeerCachedRequests:
        cached = PeerCachedRequests([], set(), [], {}, [], [], [])
        for request in self._running:
            req_id = request.request_id
            blocks = new_blocks.get(req_id)
            cached.req_ids.append(req_id)
            cached.new_block_ids.append(None if blocks is None else (list(blocks),))
            cached.num_computed_tokens.append(request.num_computed_tokens)
            cached.num_output_tokens.append(request.num_output_tokens)
        return cached


@dataclass
class PeerRow:
    """A request in the peer's worker, in addition to its row of the arrays."""

    num_computed_tokens: int
    block_ids: tuple[list[int], ...]


class PeerRows:
    """The worker's requests by id, and the arrays of its batch."""

    def __init__(self, capacity: int) -> None:
        self._requests: dict[str, PeerRow] = {}
        self._index: dict[str, int] = {}
        self._num_computed = np.zeros(capacity, np.int32)
        self._num_blocks = np.zeros(capacity, np.int32)
        self._blocks = np.zeros((capacity, PEER_BLOCK_COLUMNS), np.int32)

    def update(self, output: PeerSchedulerOutput) -> None:
        """Apply a step."""
        cached = output.scheduled_cached_reqs
        staying = output.num_scheduled_tokens.keys() - cached.resumed_req_ids
        for req_id in self._index.keys() - staying:
            del self._index[req_id]
        for number, req_id in enumerate(cached.req_ids):
            row = self._requests.get(req_id) or self._add(req_id)
            new_block_ids = cached.new_block_ids[number]
            row.num_computed_tokens = cached.num_computed_tokens[number]
            if new_block_ids is not None:
                for block_ids, new_ids in zip(row.block_ids, new_block_ids, strict=True):
                    block_ids.extend(new_ids)
            index = self._index[req_id]
            self._num_computed[index] = row.num_computed_tokens
            if new_block_ids is not None:
                self._append(index, new_block_ids[0])

    def _add(self, req_id: str) -> PeerRow:
        self._index[req_id] = len(self._index)
        return self._requests.setdefault(req_id, PeerRow(0, ([],)))

    def _append(self, index: int, block_ids: list[int]) -> None:
        start = self._num_blocks[index] % PEER_BLOCK_COLUMNS
        self._num_blocks[index] += len(block_ids)
        self._blocks[index, start : start + len(block_ids)] = block_ids


def _connect(address: str, rank: int) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
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
    """Answer like run_echo, with our codec at both ends; `reply` is decoded once and encoded for
    each answer."""
    socket = _connect(address, rank)
    columns = ModelRunnerOutput(epoch=1, seq=1, rank=rank, sampled_token_ids=reply)
    while (frame := socket.recv()) != STOP:
        message = decode_step([frame])
        assert isinstance(message, ExecuteModel)
        if answers:
            answer = ModelRunnerOutput(
                epoch=message.epoch,
                seq=message.seq,
                rank=rank,
                slots=columns.slots,
                sampled_token_ids=columns.sampled_token_ids,
            )
            socket.send(encode_step(answer)[0])


def run_pickle(address: str, rank: int, answers: bool, reply: bytes) -> None:
    """Answer with vLLM's payload: unpickle, apply by string ids, pickle the answer. `reply` has one
    byte per request."""
    socket = _connect(address, rank)
    rows = PeerRows(len(reply))
    while (frame := socket.recv()) != STOP:
        output = pickle.loads(frame)  # noqa: S301  # a peer's format, between our own processes
        assert isinstance(output, PeerSchedulerOutput)
        rows.update(output)
        if answers:
            req_ids = output.scheduled_cached_reqs.req_ids
            answer = PeerModelRunnerOutput(
                list(req_ids),
                {req_id: index for index, req_id in enumerate(req_ids)},
                [[0] for _ in req_ids],
            )
            socket.send(pickle.dumps(answer, pickle.HIGHEST_PROTOCOL))


def run_daemon(endpoint: str, parent_fd: int, key_files: Mapping[str, str]) -> None:
    """Run our daemon, with a worker that validates and applies steps. key_files: options, if it has
    keys."""
    settings = build_settings(
        {"endpoint": endpoint, "device": "cpu", "exit-with-parent-fd": parent_fd, **key_files}
    )
    serve(
        settings,
        lambda set_phase, find_upload: StateWorker(settings.device),
        _no_rendezvous,
        lambda: None,
        lambda: None,
        str,
    )


def _no_rendezvous(host: str, num_ranks: int) -> RendezvousServerLike:
    raise AssertionError("the benchmark's workers have no link")
