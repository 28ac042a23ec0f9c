"""The error tree of both sides: one class for each code, which a daemon raises and a driver raises
again."""

import subprocess
import sys

import pytest

from rpc_schema.codec import (
    decode_control,
    decode_control_reply,
    decode_step_reply,
    encode_control,
    encode_step,
)
from rpc_schema.errors import (
    WORKER_ERRORS,
    BadFrameError,
    ErrorCode,
    ErrorScope,
    GapError,
    LeaseHeldError,
    OutOfMemoryError,
    WorkerDaemonError,
    WorkerError,
)
from rpc_schema.lease import LeaseStatus
from worker_client.errors import ClientError, remote_error
from worker_daemon.server.wire.replies import control_error_reply, error_reply

PEER = {"rank": 3, "endpoint": "ipc:///run/w"}


def subclasses(base):
    for direct in base.__subclasses__():
        yield direct
        yield from subclasses(direct)


def raised(kind):
    """Return an error with a traceback, as the daemon makes it."""
    arguments = {
        GapError: lambda: GapError(4, 5),
        LeaseHeldError: lambda: LeaseHeldError("taken", fix="wait"),
        OutOfMemoryError: lambda: OutOfMemoryError("full", needed_bytes=8, free_bytes=1, fix="-"),
    }
    make = arguments.get(kind, lambda: kind("why", field="name", value="x", fix="change it"))
    try:
        raise make()
    except WorkerError as error:
        return error


def test_every_code_has_one_class():
    assert set(WORKER_ERRORS) == set(ErrorCode)
    assert len({*WORKER_ERRORS.values()}) == len(ErrorCode)
    assert {error.scope for error in subclasses(WorkerError)} <= {*ErrorScope}


@pytest.mark.parametrize("code", ErrorCode)
def test_driver_raises_the_daemons_class_again(code):
    error = raised(WORKER_ERRORS[code])
    assert not error.is_reported
    step = encode_step(error_reply(error, epoch=1, seq=2, rank=3))
    control = [encode_control(control_error_reply(error, call=1))]
    for reply in (decode_step_reply(step), decode_control_reply(control)):
        again = remote_error(reply, **PEER)
        assert type(again) is type(error)
        assert (again.code, again.scope, again.message) == (code, error.scope, str(error))
        assert (again.rank, again.endpoint) == (3, "ipc:///run/w")
        assert again.is_reported
        text = f"rank 3 at ipc:///run/w: {code}: {error}"
        assert str(again) == f"{text}\n{again.remote_traceback}".rstrip()
        assert again.remote_traceback == reply.traceback
        with pytest.raises(WorkerDaemonError):
            raise again


def test_refused_driver_learns_who_holds_the_lease():
    lease = LeaseStatus(state="claimable", holder=b"1234", holder_name="host:7", remaining_ms=1500)
    error = LeaseHeldError("taken", fix="wait", lease=lease)
    again = remote_error(control_error_reply(error, call=1), **PEER)
    assert isinstance(again, LeaseHeldError)
    assert (again.holder, again.holder_name) == (b"1234", "host:7")
    assert again.remaining_s == 1.5
    assert again.is_claim


def test_unreadable_message_is_no_report_of_a_rank():
    with pytest.raises(WorkerDaemonError) as caught:
        decode_control([b"\x00"])
    error = caught.value
    assert type(error) is BadFrameError
    assert not error.is_reported and error.rank is None
    assert not isinstance(error, ClientError)
    assert issubclass(ClientError, WorkerDaemonError)


def test_tree_needs_the_standard_library_only():
    """Layers that must not know the wire import it."""
    code = "import rpc_schema.errors, sys; print('msgspec' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout == "False\n"
