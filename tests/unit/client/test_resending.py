"""Handling of late refusals; tests/faults has lost messages."""

import pytest

from rpc_schema.lifecycle import Heartbeat
from worker_client.group.resending import Resending


class Rank:
    """A daemon's place, as a status tells of it, and what it was sent again."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.worker_uid = bytes([rank]) * 16
        self.again: list[list[bytes]] = []

    def send_again(self, frames: list[bytes]) -> None:
        self.again.append(frames)

    def heartbeat(self, last_seq: int) -> Heartbeat:
        return Heartbeat(
            worker_uid=self.worker_uid,
            rank=self.rank,
            serving="SERVING",
            load="READY",
            link_state="up",
            epoch=1,
            link=1,
            last_seq=last_seq,
            phase="IDLE",
            phase_ms=0,
        )


@pytest.fixture
def ranks():
    return [Rank(0), Rank(1)]


@pytest.fixture
def resending(ranks):
    """Steps 1 to 4 were sent to both."""
    resending = Resending(ranks, [1])
    resending.begin_epoch()
    resending.meet((0, 1), ranks)
    for seq in range(1, 5):
        for rank in (0, 1):
            resending.sent(rank, seq, [bytes([seq])])
    return resending


def test_gap_is_mended_from_the_missing_step_on(ranks, resending):
    assert resending.mend_gap(0, 3)
    assert ranks[0].again == [[b"\x03"], [b"\x04"]]


def test_refusal_that_the_rank_has_overtaken_is_no_failure(ranks, resending):
    """It has run since, the outcome is known, and nothing of it is kept any more."""
    resending.heard(ranks[0].heartbeat(last_seq=3), outstanding=4)
    assert resending.mend_gap(0, 2)
    assert ranks[0].again == []


def test_gap_before_what_is_kept_cannot_be_mended(ranks, resending):
    resending.restart_from(5)
    assert not resending.mend_gap(0, 2)
