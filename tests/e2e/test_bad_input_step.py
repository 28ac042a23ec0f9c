"""Steps and frames that break a rule: refused completely, by name, and the daemon keeps serving,
including the current driver."""

import contextlib
import random
import threading
import time
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import zmq

from rpc_schema.codec import MAX_CONTROL_BYTES, MAX_FRAMES, MAX_STEP_BYTES, decode_step, encode_step
from rpc_schema.error_replies import ControlErrorReply, ErrorReply
from rpc_schema.errors import ErrorCode, InvalidStepError, StateError
from rpc_schema.health import CheckHealth
from rpc_schema.sampling import RandomSampling
from rpc_schema.step import ExecuteDummyBatch, ExecuteModel, NewRequestData
from tests.support.driving import RecordingGroup, assert_serves, random_cases
from tests.support.serving import LONG_LEASE, connect, generate, worker_config
from tests.unit.server.driver import Driver
from worker_client.errors import InvalidSchedulerOutput, StepFailed
from worker_client.scheduler_output import NewRequest, SchedulerOutput
from worker_client.steps.slots import SlotTable
from worker_client.wire.worker_client import WorkerClient
from worker_client.worker_group import WorkerGroup

NUM_BLOCKS = 32
BLOCK_SIZE = 4
MAX_MODEL_LEN = 64
MAX_NUM_SEQS = 8
VOCAB_SIZE = 331


@pytest.fixture
def serving(serve, checkpoint):
    """A group with a small plan."""
    with serve(
        checkpoint().path,
        num_gpu_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=128,
    ) as (group, loaded):
        yield RecordingGroup(group), loaded


@pytest.fixture
def raw(serving, daemons):
    """A bare driver on the daemon that `serving` has loaded."""
    driver = Driver(daemons.endpoints(1)[0])
    driver.attach()
    yield driver
    driver.close()


def admission(token_ids=(1, 2, 3), block_ids=(1,), num_computed=0):
    request = NewRequest(
        req_id="a",
        token_ids=np.array(token_ids, np.int32),
        num_prompt_tokens=len(token_ids),
        num_computed_tokens=num_computed,
        block_ids=block_ids,
    )
    scheduled = {"a": len(token_ids) - num_computed}
    return SchedulerOutput(num_scheduled_tokens=scheduled, scheduled_new_reqs=(request,))


def is_left_to_daemons(output):
    """Return True if blocks and tokens do not match, which the driver library does not check."""
    (request,) = output.scheduled_new_reqs
    return request.block_ids in ((3,), range(1, 25))


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (admission(block_ids=(0,)), ("new_block_ids", "0", "from 1 to 31")),
        (admission(block_ids=(NUM_BLOCKS,)), ("new_block_ids", "32", "from 1 to 31")),
        (admission(block_ids=(2**31 - 1,)), ("new_block_ids", "2147483647")),
        (admission(block_ids=(-5,)), ("new_block_ids", "-5")),
        (admission(range(1, 7), block_ids=(3,)), ("block",)),
        (admission((1, VOCAB_SIZE)), ("tokens", "331", "from 0 to 330")),
        (admission((-1, 2)), ("tokens", "-1")),
        (
            admission((1,) * (MAX_MODEL_LEN + 1), range(1, 18)),
            ("num_tokens", "65", "max_model_len is 64"),
        ),
        (admission((1,) * 4, range(1, 25)), ("at most 16 blocks",)),
    ],
)
def test_step_with_a_value_that_no_kernel_may_see(serving, checkpoint, monkeypatch, output, words):
    group, loaded = serving
    steps = group._steps
    if not is_left_to_daemons(output):
        with pytest.raises(InvalidSchedulerOutput) as refused:
            group.execute_model(output)
        assert refused.value.req_id == "a"
    with monkeypatch.context() as patched:  # a driver library that does not look
        patched.setattr(
            "worker_client.steps.step_checks.read_tokens", lambda new, _: new[0].token_ids
        )
        patched.setattr(steps, "slots", SlotTable(MAX_NUM_SEQS))
        steps.slots.require_resync()
        with pytest.raises(StepFailed) as raised:
            group.execute_model(output).result()
    steps.slots.require_resync()
    assert isinstance(raised.value.__cause__, InvalidStepError)
    assert raised.value.code == ErrorCode.INVALID_STEP
    assert raised.value.lost_req_ids == {"a"}
    for word in ("field ", "fix: ", *words):
        assert word in raised.value.message
    cases = random_cases(checkpoint(), seed=50, count=2, max_tokens=4)
    assert generate(group, loaded, cases.requests).tokens == cases.expected


def new_request(slot, num_tokens=1, **fields):
    wanted = {"num_prompt_tokens": num_tokens, "num_computed_tokens": 0, **fields}
    return NewRequestData(slot=slot, req_id="a", num_tokens=num_tokens, **wanted)


def columns(*values, dtype="<i4"):
    return np.array(values, dtype).tobytes()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"scheduled": b"\x04", "total_num_scheduled_tokens": 1}, ("scheduled", "2")),
        ({"scheduled": b"\x00" * 8191 + b"\x80", "total_num_scheduled_tokens": 1}, ("65535",)),
        ({"finished": columns(3, dtype="<u2")}, ("finished", "3")),
        ({"finished": b"\x01"}, ("finished",)),
        ({"new_block_slots": columns(5, dtype="<u2"), "new_block_ids": columns(1)}, ("5",)),
        ({"new_block_slots": columns(5, 6, dtype="<u2"), "new_block_ids": columns(1)}, ("slot",)),
        ({"resync": columns(4, 0, 1, 1)}, ("resync", "4")),
        ({"resync": columns(-2, 0, 0, 0)}, ("resync", "-2")),
        ({"resync": columns(0, 0)}, ("resync",)),
        ({"scheduled_new_reqs": (new_request(MAX_NUM_SEQS),)}, ("slot", "8", "from 0 to 7")),
        ({"scheduled_new_reqs": (new_request(0), new_request(0))}, ("slot", "0")),
        ({"scheduled_new_reqs": (new_request(0, num_computed_tokens=1),)}, ("num_computed",)),
        ({"scheduled_new_reqs": (new_request(0, 2**31 - 1),)}, ("tokens",)),
        ({"total_num_scheduled_tokens": 7}, ("total_num_scheduled_tokens", "7")),
        ({"num_scheduled_tokens": columns(0, 2**30)}, ("num_scheduled_tokens",)),
    ],
)
def test_step_that_names_what_is_not_there(raw, daemons, checkpoint, fields, words):
    message = raw.build(ExecuteModel, **{"total_num_scheduled_tokens": 0, **fields})
    tokens = [columns(*[1] * len(message.scheduled_new_reqs))] if message.scheduled_new_reqs else []
    raw.step.send_multipart(encode_step(message, tokens))
    reply = raw.reply()
    assert isinstance(reply, ErrorReply)
    assert reply.code is ErrorCode.INVALID_STEP
    for word in ("field ", "fix: ", *words):
        assert word in reply.message
    assert_serves(daemons.endpoints(1), checkpoint())


OPERATIONS_BEFORE_LOAD: dict[str, Callable[[WorkerGroup], object]] = {
    "ExecuteModel": lambda group: group.execute_model(admission()).result(),
    "ExecuteDummyBatch": lambda group: group.execute_dummy_batch().result(),
    "GetKVCacheSpec": lambda group: group.load_chain.get_kv_cache_spec(),
    "DetermineAvailableMemory": lambda group: group.load_chain.determine_available_memory(),
    "InitializeCache": lambda group: group.load_chain.initialize_cache(2),
    "CompileOrWarmUpModel": lambda group: group.load_chain.compile_or_warm_up_model(),
    "GetModelMetadata": lambda group: group.load_chain.get_model_metadata(),
    "Reset": lambda group: group.reset("MODEL_LOADED"),
}


@pytest.mark.parametrize("operation", OPERATIONS_BEFORE_LOAD)
def test_operation_before_its_time(daemons, checkpoint, operation):
    config = worker_config(checkpoint().path)
    endpoints = daemons.endpoints(1)
    with WorkerGroup(endpoints, config.parallel, lease=LONG_LEASE) as group:
        group.attach()
        group.reset("CREATED")
        with pytest.raises((StateError, StepFailed)) as raised:
            OPERATIONS_BEFORE_LOAD[operation](group)
        assert raised.value.code == ErrorCode.ILLEGAL_STATE
        for words in (f"{operation}", "is not legal in CREATED", "legal are: InitDevice"):
            assert words in raised.value.message
    assert_serves(endpoints, checkpoint())


def test_second_load_without_reset(serving, checkpoint):
    group, loaded = serving
    with pytest.raises(StateError, match=r"LoadModel is not legal in READY.*Reset"):
        group.load_chain.load_model(worker_config(checkpoint().path))
    cases = random_cases(checkpoint(), seed=51, count=2, max_tokens=4)
    assert generate(group, loaded, cases.requests).tokens == cases.expected


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\x00"


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([b"\xc1", b""], ErrorCode.BAD_FRAME),
        ([b"\xc1"], ErrorCode.BAD_FRAME),
        ([nested(100_000)], ErrorCode.BAD_FRAME),
        ([b"\xdd\xff\xff\xff\xff\x01"], ErrorCode.BAD_FRAME),
        ([b"\x93\xcd\x03\xe7\x01\x01"], ErrorCode.BAD_FRAME),
        ([b"x"] * (MAX_FRAMES + 1), ErrorCode.TOO_LARGE),
        ([b"x", bytes(MAX_STEP_BYTES)], ErrorCode.TOO_LARGE),
    ],
)
def test_frames_that_do_not_decode_on_the_step_socket(raw, daemons, checkpoint, frames, code):
    assert raw.run(ExecuteDummyBatch).seq == 1
    raw.step.send_multipart(frames)
    reply = raw.reply()
    assert isinstance(reply, ErrorReply)
    assert (reply.code, reply.seq) == (code, 0)
    assert not isinstance(raw.run(ExecuteDummyBatch), ErrorReply)


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([b"\xc1"], ErrorCode.BAD_FRAME),
        ([nested(100_000)], ErrorCode.BAD_FRAME),
        ([b"x"] * (MAX_FRAMES + 1), ErrorCode.TOO_LARGE),
        ([b"x", bytes(MAX_CONTROL_BYTES)], ErrorCode.TOO_LARGE),
    ],
)
def test_frames_that_do_not_decode_on_the_control_socket(raw, frames, code):
    raw.control.send_multipart(frames)
    reply = raw.control_reply()
    assert isinstance(reply, ControlErrorReply)
    assert reply.code is code
    assert raw.call(CheckHealth).healthy


@pytest.mark.parametrize(
    ("suffix", "size"),
    [("", MAX_CONTROL_BYTES + 1), (".step", MAX_STEP_BYTES + 1), (".results", MAX_STEP_BYTES + 1)],
)
def test_frame_over_a_socket_s_bound_costs_its_sender_the_connection(
    raw, daemons, checkpoint, suffix, size
):
    """libzmq drops the connection; no other peer is affected."""
    socket = raw.context.socket(zmq.DEALER)
    monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    socket.connect(daemons.endpoints(1)[0] + suffix)
    socket.send(bytes(size))
    assert monitor.poll(10_000)
    socket.disable_monitor()
    monitor.close()
    socket.close()
    assert raw.call(CheckHealth).healthy
    assert not isinstance(raw.run(ExecuteDummyBatch), ErrorReply)
    assert_serves(daemons.endpoints(1), checkpoint())


def bombard(endpoint: str, stop: threading.Event, seed: int) -> None:
    """Send garbage, and requests of an epoch that was never granted, to all sockets of a daemon."""
    randomness = random.Random(seed)
    valid = bytes(encode_step(ExecuteDummyBatch(epoch=1 << 40, link=0, seq=1))[0])
    with zmq.Context() as context, contextlib.ExitStack() as stack:
        sockets = []
        for suffix in ("", ".step", ".results", ".events"):
            kind = zmq.SUB if suffix == ".events" else zmq.DEALER
            sockets.append(stack.enter_context(context.socket(kind)))
            sockets[-1].linger = 0
            sockets[-1].connect(endpoint + suffix)
        sockets.pop().subscribe(b"")
        while not stop.is_set():
            frame = bytearray(valid if randomness.random() < 0.5 else randomness.randbytes(40))
            frame[randomness.randrange(len(frame))] = randomness.randrange(256)
            count = randomness.choice((1, 1, 2, MAX_FRAMES + 1))
            with contextlib.suppress(zmq.Again):
                randomness.choice(sockets).send_multipart([bytes(frame)] * count, zmq.NOBLOCK)
            if sockets[0].poll(0):
                sockets[0].recv_multipart()


def test_rubbish_from_others_harms_no_running_request(daemons, checkpoint):
    cases = random_cases(checkpoint(), seed=52, count=6, max_tokens=24)
    stop = threading.Event()
    endpoints = daemons.endpoints(2)
    threads = [
        threading.Thread(target=bombard, args=(endpoint, stop, index))
        for index, endpoint in enumerate(endpoints)
    ]
    with connect(endpoints, worker_config(checkpoint().path, 2)) as (group, loaded):
        for thread in threads:
            thread.start()
        try:
            assert generate(group, loaded, cases.requests).tokens == cases.expected
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    assert daemons.endpoints(2) == endpoints, "a dead daemon was replaced"


SEQ, ADMISSIONS, EXTENSIONS = 3, 10, 5
"""Places in an ExecuteModel, and in its admissions."""


class HostileWire:
    """Corrupts admissions after the driver library's checks."""

    def __init__(self, monkeypatch, *spoiled: int) -> None:
        """spoiled: index of the step with admissions to corrupt, from 0."""
        self.spoiled = spoiled
        self.seqs: dict[int, int] = {}
        send = WorkerClient.send
        monkeypatch.setattr(
            WorkerClient, "send", lambda client, frames: send(client, self.spoil(frames))
        )

    def spoil(self, frames):
        if not isinstance(decode_step(frames), ExecuteModel):
            return frames
        message = msgspec.msgpack.decode(frames[0])
        if not message[ADMISSIONS]:
            return frames
        number = self.seqs.setdefault(message[SEQ], len(self.seqs))
        if number not in self.spoiled:
            return frames
        negative = [RandomSampling.__struct_config__.tag, -1.0, 0, 1.0, 0.0, 0]
        message[ADMISSIONS][0][EXTENSIONS] = [negative]
        return [msgspec.msgpack.encode(message), *frames[1:]]


def test_step_that_no_rank_can_decode_costs_nobody_else(serve, checkpoint, monkeypatch):
    cases = random_cases(checkpoint(), seed=53, count=12, max_tokens=8)
    with serve(checkpoint().path, 3) as (group, loaded):
        before = [status.num_bad_frames for status in group.get_status()]
        with monkeypatch.context() as patched:
            HostileWire(patched, 1)
            recording = RecordingGroup(group)
            run = generate(recording, loaded, cases.requests, max_num_batched_tokens=64)
        assert run.tokens == cases.expected
        (failure,) = recording.failures
        assert failure.code is ErrorCode.INVALID_STEP
        assert "field scheduled_new_reqs[0].extensions[0].temperature = -1.0" in failure.message
        with monkeypatch.context() as patched:
            HostileWire(patched, *range(6))
            for _ in range(6):
                with pytest.raises(StepFailed) as raised:
                    group.execute_model(admission()).result()
                assert isinstance(raised.value.__cause__, InvalidStepError)
        began = time.monotonic()
        group.execute_model(admission()).result()
        assert time.monotonic() - began < 10, "it is not listened to"
        assert [status.num_bad_frames for status in group.get_status()] == before
