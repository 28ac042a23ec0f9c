"""Checks the table of operations against its users: declared replies, the worker's and the group's
methods, and refusals of requests without a row."""

import inspect
import typing

import msgspec
import pytest

from rpc_schema import codec
from rpc_schema import lifecycle as lc
from rpc_schema.base import StepReply, StepRequest
from rpc_schema.errors import BadFrameError, ForbiddenError
from rpc_schema.operations import (
    CONTROL_OPERATIONS,
    STEP_OPERATIONS,
    ControlOperation,
    StepOperation,
    operation_name,
)
from worker_client.group.load_chain import LoadChain
from worker_client.worker_group import WorkerGroup
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


@pytest.mark.parametrize("row", STEP_OPERATIONS.values(), ids=named)
def test_group_has_a_method_for_each_operation(row: StepOperation) -> None:
    inside = {"adopt_requests", "finish_sharded_state", "prepare_lora"}  # of attach and of saves
    name = operation_name(row.request)
    assert name in inside or hasattr(WorkerGroup, name) or hasattr(LoadChain, name)


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
