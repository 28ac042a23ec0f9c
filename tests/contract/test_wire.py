"""The wire's bytes, bounds and strictness, message by message."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect as mi

from rpc_schema import codec, step
from rpc_schema import lifecycle as lc
from rpc_schema.base import Value
from rpc_schema.control import PROBE_OPERATIONS
from rpc_schema.errors import BadFrameError, TooLargeError
from rpc_schema.health import GetStatusHead, GetStatusHeadReply, Hello, HelloReply, StatusHead
from rpc_schema.version import PROTOCOL_VERSION
from tests.contract import make_golden
from tests.contract.make_golden import GOLDEN, VERSIONS, digest_of_bytes, golden
from tests.contract.random_messages import DIRECTIONS, fixed_example, messages, strategy

DECODE: dict[str, Callable[[Sequence[codec.Frame]], Any]] = {
    "step": codec.decode_step,
    "step_reply": codec.decode_step_reply,
    "control": codec.decode_control,
    "control_reply": codec.decode_control_reply,
    "event": codec.decode_event,
}
ALL = [(direction, kind) for direction in DIRECTIONS for kind in messages(direction)]
FROZEN = (Hello, HelloReply)


def name(value: object) -> str:
    return value.__name__ if isinstance(value, type) else str(value)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_bytes_are_the_golden_ones(direction: str) -> None:
    """A difference is a change of protocol: raise PROTOCOL_VERSION and run make_golden."""
    assert json.loads((GOLDEN / f"{direction}.json").read_text()) == golden(direction)


def test_bytes_are_those_of_the_protocols_version() -> None:
    """No version has ever had two kinds of bytes, so that drivers and daemons can go by its
    number."""
    assert json.loads(VERSIONS.read_text())[str(PROTOCOL_VERSION)] == digest_of_bytes()


def test_changed_bytes_are_written_under_a_new_version_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.contract.make_golden.digest_of_bytes", lambda: "of other bytes")
    before = VERSIONS.read_text()
    with pytest.raises(SystemExit, match="raise PROTOCOL_VERSION"):
        make_golden.main()
    assert VERSIONS.read_text() == before


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_golden_bytes_decode_into_what_they_were_made_of(direction: str) -> None:
    kept = json.loads((GOLDEN / f"{direction}.json").read_text())["messages"]
    for kind in messages(direction):
        assert DECODE[direction]([bytes.fromhex(kept[kind.__name__])]) == fixed_example(kind)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_beginning_of_a_status_is_read_from_the_whole(data: st.DataObject) -> None:
    """A probe sends the same bytes, and skips what it does not need of the reply."""
    asked = [codec.encode_control(kind(call=7)) for kind in (lc.GetStatus, GetStatusHead)]
    assert asked[0] == asked[1]
    whole = data.draw(strategy(mi.type_info(lc.GetStatusReply)))
    head = PROBE_OPERATIONS.decode_reply([codec.encode_control(whole)])
    assert isinstance(head, GetStatusHeadReply)
    for field in StatusHead.__struct_fields__:
        assert getattr(head.status, field) == getattr(whole.status, field)


@pytest.mark.parametrize(("direction", "kind"), ALL, ids=name)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_every_value_within_bounds_comes_back(
    direction: str, kind: type[msgspec.Struct], data: st.DataObject
) -> None:
    message = data.draw(strategy(mi.type_info(kind)))
    if direction.startswith("step"):
        frames = codec.encode_step(message, [b"array"])
    else:
        frames = [codec.encode_control(message)]
    assert DECODE[direction](frames) == message


@pytest.mark.parametrize(("direction", "kind"), ALL, ids=name)
def test_an_extra_field_is_refused_but_in_hello(direction: str, kind: type[msgspec.Struct]) -> None:
    values = msgspec.msgpack.decode(msgspec.msgpack.encode(fixed_example(kind)))
    frame = msgspec.msgpack.encode([*values, "of a later version"])
    if kind in FROZEN:
        assert DECODE[direction]([frame]) == fixed_example(kind)
    else:
        with pytest.raises(BadFrameError):
            DECODE[direction]([frame])


@pytest.mark.parametrize(("direction", "kind"), ALL, ids=name)
def test_every_cut_and_a_trailing_byte_are_refused(
    direction: str, kind: type[msgspec.Struct]
) -> None:
    frame = msgspec.msgpack.encode(fixed_example(kind))
    for bad in (*(frame[:length] for length in range(len(frame))), frame + b"\0"):
        with pytest.raises(BadFrameError):
            DECODE[direction]([bad])


@pytest.mark.parametrize(("direction", "kind"), ALL, ids=name)
def test_no_field_takes_anything_at_all(direction: str, kind: type[msgspec.Struct]) -> None:
    """Each field refuses a value of a foreign type, so no field is an opaque blob."""
    values = msgspec.msgpack.decode(msgspec.msgpack.encode(fixed_example(kind)))
    for index in range(1, len(values)):
        foreign = [*values[:index], {b"foreign": [[]]}, *values[index + 1 :]]
        with pytest.raises(BadFrameError):
            DECODE[direction]([msgspec.msgpack.encode(foreign)])


@pytest.mark.parametrize("direction", DIRECTIONS)
@settings(max_examples=300, deadline=None)
@given(frame=st.binary(max_size=200))
def test_random_bytes_are_a_message_or_refused(direction: str, frame: bytes) -> None:
    try:
        message = DECODE[direction]([frame])
    except BadFrameError:
        return
    assert type(message) in messages(direction)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1k", b"\xdd\xff\xff\xff\xff"])
def test_deep_nesting_and_huge_headers_are_refused(direction: str, opening: bytes) -> None:
    with pytest.raises(BadFrameError):
        DECODE[direction]([opening * 50_000])


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_unknown_tag_is_refused(direction: str) -> None:
    with pytest.raises(BadFrameError):
        DECODE[direction]([msgspec.msgpack.encode([999, 1, 2, 3])])


def dummy_step() -> step.ExecuteDummyBatch:
    return step.ExecuteDummyBatch(epoch=1, link=0, seq=1)


def test_step_bytes_at_the_bound_and_one_over() -> None:
    size = len(codec.encode_step(dummy_step())[0])
    fits = [bytes(codec.MAX_STEP_BYTES - size)]
    frames = codec.encode_step(dummy_step(), fits)
    assert codec.decode_step(frames) == dummy_step()
    with pytest.raises(TooLargeError, match="16777217 bytes"):
        codec.encode_step(dummy_step(), [*fits, b"x"])
    with pytest.raises(TooLargeError):
        codec.decode_step([*frames, b"x"])


def test_frames_at_the_bound_and_one_over() -> None:
    frames = codec.encode_step(dummy_step(), [b""] * (codec.MAX_FRAMES - 1))
    assert codec.decode_step(frames) == dummy_step()
    with pytest.raises(TooLargeError, match="7 frames"):
        codec.encode_step(dummy_step(), [b""] * codec.MAX_FRAMES)
    with pytest.raises(TooLargeError):
        codec.decode_step([*frames, b""])
    with pytest.raises(TooLargeError):
        codec.decode_step([])


def test_control_bytes_one_over() -> None:
    frame = b"\x93" + bytes(codec.MAX_CONTROL_BYTES - 1)
    with pytest.raises(BadFrameError):
        codec.decode_control([frame])
    with pytest.raises(TooLargeError):
        codec.decode_control([frame + b"\0"])


@pytest.mark.parametrize(
    ("field", "at_bound", "over"),
    [
        ("scheduled", bytes(8192), bytes(8193)),
        ("num_scheduled_tokens", bytes(4 << 20), bytes((4 << 20) + 1)),
        ("new_block_slots", bytes(2 << 20), bytes((2 << 20) + 1)),
        ("new_block_ids", bytes(4 << 20), bytes((4 << 20) + 1)),
        ("finished", bytes(2 << 20), bytes((2 << 20) + 1)),
        ("resync", bytes(4 << 20), bytes((4 << 20) + 1)),
        ("total_num_scheduled_tokens", 2**31 - 1, 2**31),
        ("total_num_scheduled_tokens", 0, -1),
        ("seq", 2**63 - 1, 2**63),
    ],
)
def test_fields_at_their_bounds_and_one_over(field: str, at_bound: object, over: object) -> None:
    base = {"epoch": 1, "link": 0, "seq": 1, "total_num_scheduled_tokens": 0}
    good = step.ExecuteModel(**{**base, field: at_bound})
    assert codec.decode_step(codec.encode_step(good)) == good
    bad = msgspec.msgpack.encode(step.ExecuteModel(**{**base, field: over}))
    with pytest.raises(BadFrameError):
        codec.decode_step([bad])


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_message_is_frozen_and_refuses_unknown_fields(direction: str) -> None:
    for kind in messages(direction):
        assert kind.__struct_config__.frozen
        assert kind.__struct_config__.array_like
        assert kind in FROZEN or issubclass(kind, Value)
        assert kind in FROZEN or kind.__struct_config__.forbid_unknown_fields
