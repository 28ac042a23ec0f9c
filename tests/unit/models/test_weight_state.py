"""Whole, updating, dirty, discarded: the state after each end of an update."""

import pytest

from rpc_schema.errors import ConfigError, StateError
from worker_daemon.contracts.source_identity import SourceIdentity
from worker_daemon.models.weight_state import MAX_NAMES, WeightState

NAMES = [f"t{number:02}" for number in range(40)]
LOADED, SENT = SourceIdentity(b"files"), SourceIdentity(b"update")


@pytest.fixture
def weights():
    return WeightState(NAMES, LOADED, 3)


def write(weights, *names):
    weights.writing(names)
    weights.written(names)


def test_weights_are_whole_at_first(weights):
    report = weights.report
    assert weights.is_whole
    assert (report.state, report.num_tensors, report.version) == ("whole", 40, 3)
    assert (report.dirty, report.missing, report.cause) == ((), (), "")
    weights.require_whole("a step")


def test_version_of_an_update_is_larger_than_the_present_one(weights):
    assert (weights.next_version(None), weights.next_version(4), weights.next_version(99)) == (
        4,
        4,
        99,
    )
    for wrong in (3, 2, 0):
        with pytest.raises(ConfigError, match="version 3 already") as raised:
            weights.next_version(wrong)
        assert (raised.value.field, raised.value.value) == ("version", wrong)
    weights.begin(partial=False)
    weights.interrupt("lost")
    weights.discard("asleep")
    assert weights.report.version == 3, "that of the last complete weights"


def test_complete_update_needs_every_tensor(weights):
    weights.begin(partial=False)
    assert not weights.is_whole
    write(weights, *NAMES[:-1])
    with pytest.raises(StateError, match=r"1 tensors of this rank.*t39"):
        weights.finish(SENT, 4)
    write(weights, NAMES[-1])
    weights.finish(SENT, 4)
    assert weights.report.version == 4
    weights.require_whole("a step")


def test_failure_names_what_is_new_and_what_is_missing(weights):
    weights.begin(partial=False)
    write(weights, *NAMES[:3])
    weights.writing([NAMES[3]])  # and never written
    weights.interrupt("the trainer died")
    report = weights.report
    assert (report.state, report.cause) == ("dirty", "the trainer died")
    assert report.num_dirty == 4
    assert report.dirty == tuple(NAMES[:4])
    assert report.num_missing == 40
    assert report.missing == tuple(NAMES[:MAX_NAMES])
    with pytest.raises(StateError, match=r"dirty \(the trainer died\).*reload_weights"):
        weights.require_whole("a step")


def test_partial_update_writes_what_it_likes(weights):
    weights.begin(partial=True)
    write(weights, "t07", "not of this rank")
    weights.finish(SENT, 7)
    assert weights.report.num_dirty == 0


def test_partial_update_must_rewrite_what_a_broken_one_touched(weights):
    weights.begin(partial=True)
    write(weights, "t01")
    weights.writing(["t02"])
    weights.interrupt("lost")
    weights.begin(partial=True)
    write(weights, "t02", "t03")
    with pytest.raises(StateError, match="t01"):
        weights.finish(SENT, 4)
    write(weights, "t01")
    weights.finish(SENT, 4)
    assert weights.is_whole


def test_partial_update_cannot_end_a_broken_complete_one(weights):
    weights.begin(partial=False)
    weights.interrupt("lost")
    weights.begin(partial=True)
    write(weights, *NAMES[:39])
    with pytest.raises(StateError, match="t39"):
        weights.finish(SENT, 4)


def test_update_in_place_of_one_that_is_open_inherits_what_it_touched(weights):
    weights.begin(partial=True)
    write(weights, "t05")
    weights.begin(partial=True)
    with pytest.raises(StateError, match="t05"):
        weights.finish(SENT, 4)


def test_discarded_weights_come_back_by_an_update_of_all_of_them(weights):
    weights.discard("asleep")
    assert weights.report.state == "discarded"
    assert weights.report.num_missing == 40
    weights.begin(partial=True)
    write(weights, *NAMES[1:])
    with pytest.raises(StateError, match="t00"):
        weights.finish(SENT, 4)
    write(weights, NAMES[0])
    weights.finish(SENT, 4)
    assert weights.report.version == 4


def test_interruption_of_nothing_leaves_the_weights_whole(weights):
    weights.interrupt("the driver was replaced")
    assert weights.is_whole


def test_other_tensors_can_take_the_place_of_some(weights):
    """Those of an expert that has moved here; an update must bring them from then on."""
    weights.hold(["t00", "u1"], instead_of=["t00", "t01"])
    assert (weights.report.state, weights.report.num_tensors) == ("whole", 40)
    weights.begin(partial=False)
    write(weights, *NAMES[:1], *NAMES[2:])
    with pytest.raises(StateError, match="u1"):
        weights.finish(SENT, 4)
    write(weights, "u1")
    weights.finish(SENT, 4)
    assert weights.is_whole
