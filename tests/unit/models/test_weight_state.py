"""Whole, updating, dirty, discarded: the state after each end of an update."""

import pytest

from rpc_schema.errors import StateError
from worker_daemon.contracts.source_identity import SourceIdentity
from worker_daemon.models.weight_state import MAX_NAMES, WeightState

NAMES = [f"t{number:02}" for number in range(40)]
LOADED, SENT = SourceIdentity(b"files"), SourceIdentity(b"update")


@pytest.fixture
def weights():
    return WeightState(NAMES, LOADED)


def write(weights, *names):
    weights.writing(names)
    weights.written(names)


def test_weights_are_whole_at_first(weights):
    report = weights.report
    assert weights.is_whole
    assert (report.state, report.num_tensors, report.num_updates) == ("whole", 40, 0)
    assert (report.dirty, report.missing, report.cause) == ((), (), "")
    weights.require_whole("a step")


def test_complete_update_needs_every_tensor(weights):
    weights.begin(partial=False)
    assert not weights.is_whole
    write(weights, *NAMES[:-1])
    with pytest.raises(StateError, match=r"1 tensors of this rank.*t39"):
        weights.finish(SENT)
    write(weights, NAMES[-1])
    assert weights.finish(SENT) == 1
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
    assert weights.finish(SENT) == 1
    assert weights.report.num_dirty == 0


def test_partial_update_must_rewrite_what_a_broken_one_touched(weights):
    weights.begin(partial=True)
    write(weights, "t01")
    weights.writing(["t02"])
    weights.interrupt("lost")
    weights.begin(partial=True)
    write(weights, "t02", "t03")
    with pytest.raises(StateError, match="t01"):
        weights.finish(SENT)
    write(weights, "t01")
    weights.finish(SENT)
    assert weights.is_whole


def test_partial_update_cannot_end_a_broken_complete_one(weights):
    weights.begin(partial=False)
    weights.interrupt("lost")
    weights.begin(partial=True)
    write(weights, *NAMES[:39])
    with pytest.raises(StateError, match="t39"):
        weights.finish(SENT)


def test_update_in_place_of_one_that_is_open_inherits_what_it_touched(weights):
    weights.begin(partial=True)
    write(weights, "t05")
    weights.begin(partial=True)
    with pytest.raises(StateError, match="t05"):
        weights.finish(SENT)


def test_discarded_weights_come_back_by_an_update_of_all_of_them(weights):
    weights.discard("asleep")
    assert weights.report.state == "discarded"
    assert weights.report.num_missing == 40
    weights.begin(partial=True)
    write(weights, *NAMES[1:])
    with pytest.raises(StateError, match="t00"):
        weights.finish(SENT)
    write(weights, NAMES[0])
    assert weights.finish(SENT) == 1


def test_interruption_of_nothing_leaves_the_weights_whole(weights):
    weights.interrupt("the driver was replaced")
    assert weights.is_whole
