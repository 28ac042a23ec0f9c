"""Conditions for giving up a failing link, for different orders of events."""

from worker_client.errors import ClientError, LinkGivenUp
from worker_client.group.failure_state import LinkTries


def fail(tries, *seqs):
    return [tries.failed(seq, ClientError(str(seq))) for seq in seqs]


def test_three_failures_in_a_row_are_enough():
    *before, last = fail(LinkTries(), 5, 0, 0)
    assert before == [None, None] and isinstance(last, LinkGivenUp) and last.num_failures == 3


def test_step_that_ended_well_takes_away_what_failed_before_it_alone():
    """Results of several ranks overtake each other."""
    tries = LinkTries()
    assert fail(tries, 5, 0) == [None, None]
    tries.worked(4)  # sent before the link broke
    tries.worked(8)  # on the new link
    assert fail(tries, 9, 0) == [None, None]
    tries.worked(7)
    assert isinstance(fail(tries, 10)[0], LinkGivenUp)


def test_nothing_is_left_where_all_begins_anew():
    tries = LinkTries()
    fail(tries, 5, 6)
    tries.clear()
    assert fail(tries, 7, 8) == [None, None]
