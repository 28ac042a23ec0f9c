"""Checks the table of operations against its users: declared replies, the worker's methods, what
the driver library sends, and refusals of requests without a row."""

import ast
import inspect
import typing
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect as mi

from rpc_schema import codec
from rpc_schema import lifecycle as lc
from rpc_schema.base import StepReply, StepRequest
from rpc_schema.control import ControlOperation
from rpc_schema.errors import BadFrameError, ForbiddenError
from rpc_schema.operations import CONTROL_OPERATIONS, STEP_OPERATIONS, StepOperation, operation_name
from tests.contract.random_messages import strategy
from tests.support.default_replies import control_reply, step_reply
from worker_daemon.server.auth.access import Access
from worker_daemon.server.dispatch import STEPS
from worker_daemon.worker.worker import Worker

ROWS = [*CONTROL_OPERATIONS.values(), *STEP_OPERATIONS.values()]
OPERATIONS = [row for row in STEP_OPERATIONS.values() if row.request not in STEPS]


def named(row: ControlOperation | StepOperation) -> str:
    return row.request.__name__


@pytest.mark.parametrize("row", ROWS, ids=named)
def test_reply_is_what_the_request_declares(row: ControlOperation | StepOperation) -> None:
    (declared,) = [
        argument for base in row.request.__orig_bases__ for argument in typing.get_args(base)
    ]
    name = (
        declared.__forward_arg__ if isinstance(declared, typing.ForwardRef) else declared.__name__
    )
    assert row.reply.__name__ == name


@pytest.mark.parametrize("row", OPERATIONS, ids=named)
def test_worker_has_a_method_for_each_operation(row: StepOperation) -> None:
    method = getattr(Worker, operation_name(row.request))
    hints = typing.get_type_hints(method)
    (message,) = list(inspect.signature(method).parameters)[1:]
    assert hints[message] is row.request
    assert issubclass(row.reply, hints["return"])


def test_driver_library_sends_each_operation() -> None:
    library = Path(__file__).parents[2] / "client/worker_client"
    nodes = [
        node for file in library.rglob("*.py") for node in ast.walk(ast.parse(file.read_text()))
    ]
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    used |= {node.id for node in nodes if isinstance(node, ast.Name)}
    assert {named(row) for row in ROWS} <= used


@pytest.mark.parametrize("row", ROWS, ids=named)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_every_request_has_a_least_reply(
    row: ControlOperation | StepOperation, data: st.DataObject
) -> None:
    request = data.draw(strategy(mi.type_info(row.request)))
    own = [
        f for f in mi.type_info(row.reply).fields if f.name not in ("epoch", "seq", "rank", "call")
    ]
    chosen = data.draw(st.lists(st.sampled_from(own), max_size=1)) if own else []
    fields = {each.name: data.draw(strategy(each.type)) for each in chosen}
    if isinstance(row, StepOperation):
        reply = step_reply(request, 3, **fields)
        assert (reply.epoch, reply.seq, reply.rank) == (request.epoch, request.seq, 3)
        assert codec.decode_step_reply(codec.encode_step(reply)) == reply
    else:
        reply = control_reply(request, **fields)
        assert reply.call == request.call
        assert codec.decode_control_reply([codec.encode_control(reply)]) == reply
    assert type(reply) is row.reply
    assert all(getattr(reply, name) == value for name, value in fields.items())


class Unlisted(StepRequest[StepReply], frozen=True, tag=999, kw_only=True):
    """A request without a row."""


def test_request_without_a_row_is_unknown_and_denied() -> None:
    request = Unlisted(epoch=1, link=0, seq=1)
    with pytest.raises(BadFrameError, match="not a known message"):
        codec.decode_step([msgspec.msgpack.encode(request)])
    with pytest.raises(ForbiddenError, match="Unlisted"):
        Access().check(("step", b"", ""), request)


def test_names_of_methods_are_made_of_the_requests() -> None:
    names = {lc.GetKVCacheSpec: "get_kv_cache_spec", lc.InitDevice: "init_device"}
    assert {kind: operation_name(kind) for kind in names} == names
