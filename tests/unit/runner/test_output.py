"""A step's reply: columns as raw little-endian bytes, and failures that came from upstream."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch

from rpc_schema.codec import decode_step_reply, encode_step
from rpc_schema.errors import CommError
from rpc_schema.sampling import TokenLogprobs
from tests.support.fake_daemon import named_slots
from worker_daemon.distributed.link import Link, LinkGroups
from worker_daemon.distributed.pp import STATUS_FAILED, STATUS_MISMATCH, STATUS_OK
from worker_daemon.runner.output import DeliveredOutput, NoTokens, ReplyIdentity, StepOutput
from worker_daemon.runner.parts.interface import Report
from worker_daemon.runner.parts.step_parts import SamplerOutput
from worker_daemon.runner.slot_bitmap import slot_bitmap
from worker_daemon.runner.staging import Delivered
from worker_daemon.runner.token_history import FOLD_AT, Sampled, SampledTokens, TokenHistory
from worker_host.draft_counts import DraftCounts

LINK = Link(1, torch.device("cpu"))
IDENTITY = ReplyIdentity(epoch=4, seq=17, rank=3, weights_version=9)
HISTORY = TokenHistory()


def rows(slots):
    return Sampled(slots, np.ones_like(slots), np.ones_like(slots, np.int32))


def columns(slots):
    return rows(slots), slot_bitmap(slots)


def status(value):
    return torch.full((), value, dtype=torch.int64)


def test_tokens_and_logprobs_come_back_from_their_bytes():
    rng = np.random.default_rng(0)
    slots = np.array([0, 7, 300, 65534])
    token_ids = rng.integers(0, 2**31 - 1, 4)
    reported = (
        torch.from_numpy(rng.integers(0, 1000, (4, 6)).astype(np.int32)),
        torch.from_numpy(rng.standard_normal((4, 6)).astype(np.float32)),
        torch.from_numpy(rng.integers(1, 1000, 4).astype(np.int32)),
    )
    report = Report(TokenLogprobs(width=5), reported)
    sampled = SamplerOutput(torch.from_numpy(token_ids), (report,))
    reply, frames = StepOutput(
        IDENTITY, *columns(slots), sampled, status(STATUS_OK), LINK, HISTORY
    ).result()
    received = decode_step_reply(encode_step(reply, frames))
    assert (received.epoch, received.seq, received.rank) == (4, 17, 3)
    assert received.weights_version == 9
    assert named_slots(received.slots) == slots.tolist()
    assert np.frombuffer(received.sampled_token_ids, "<i4").tolist() == token_ids.tolist()
    assert received.extensions == (TokenLogprobs(width=5),)
    assert frames == [column.numpy().tobytes() for column in reported]


def test_strided_columns_are_sent_row_by_row():
    ids = torch.arange(12, dtype=torch.int32).view(3, 4).t()
    columns_of_report = (ids, ids.float(), torch.arange(4, dtype=torch.int32))
    report = Report(TokenLogprobs(width=2), columns_of_report)
    sampled = SamplerOutput(torch.arange(4), (report,))
    _, frames = StepOutput(
        IDENTITY, *columns(np.arange(4)), sampled, status(STATUS_OK), LINK, HISTORY
    ).result()
    assert np.frombuffer(frames[0], "<i4").reshape(4, 3).tolist() == ids.tolist()


def test_delivered_drafts_are_reported_as_copied_ones():
    rng = np.random.default_rng()
    slots, counts = np.array([0, 3, 4, 9]), rng.integers(1, 6, 4)
    gained = rng.integers(1, counts + 1).astype(np.int32)
    token_ids = rng.integers(0, 1000, counts.sum())
    made = []
    for is_delivered in (False, True):
        history, drafts = SampledTokens(10, 40), DraftCounts()
        row = Sampled(slots, np.ones_like(slots), np.full(4, 7, np.int32), are_bounds=True)
        own = (IDENTITY, row, slot_bitmap(slots))
        if is_delivered:
            delivered = Delivered(token_ids.copy(), gained.copy(), Mock(spec=["synchronize"]))
            output = DeliveredOutput(*own, delivered, LINK, history, counts, drafts)
        else:
            refused = torch.from_numpy((counts - gained).astype(np.int32))
            sampled = SamplerOutput(torch.from_numpy(token_ids), refused=refused)
            output = StepOutput(
                *own, sampled, status(STATUS_OK), LINK, history, counts, drafts=drafts
            )
        reply, frames = output.result()
        assert frames == [] and [*reply.num_sampled] == gained.tolist()
        known = [history.known_to(slot, 1, 0) for slot in slots]
        own_tokens = [
            history.between(slot, 7, end).tolist() for slot, end in zip(slots, known, strict=True)
        ]
        made.append((reply, known, own_tokens, drafts.num_drafted, drafts.accepted_by_place))
    assert made[0] == made[1]
    assert made[0][1] == (7 + gained).tolist()


def test_no_report_means_no_frames():
    sampled = SamplerOutput(torch.tensor([5]))
    reply, frames = StepOutput(
        IDENTITY, *columns(np.array([2])), sampled, status(STATUS_OK), LINK, HISTORY
    ).result()
    assert (reply.extensions, frames) == ((), [])
    reply, frames = NoTokens(IDENTITY, status(STATUS_OK), LINK, HISTORY).result()
    assert (reply.slots, reply.sampled_token_ids, reply.extensions, frames) == (b"", b"", (), [])
    assert reply.weights_version == 9


def test_abort_of_the_link_fails_results_that_are_awaited():
    link, group = Link(1, torch.device("cuda")), Mock(spec=["abort"])
    link.groups = LinkGroups(group, None, None, None)
    sampled = SamplerOutput(torch.tensor([5]))
    delivered = Mock(spec=["wait"])
    awaited = [
        StepOutput(IDENTITY, *columns(np.array([2])), sampled, status(STATUS_OK), link, HISTORY),
        NoTokens(IDENTITY, status(STATUS_OK), link, HISTORY),
        DeliveredOutput(IDENTITY, *columns(np.array([2])), delivered, link, HISTORY),
    ]
    assert link.abort(frees_peers=False)
    for output in awaited:
        with pytest.raises(CommError, match=r"aborted.*relink the group"):
            output.result()


def test_results_are_recorded_before_they_pile_up():
    history, slots = SampledTokens(3, 400), np.array([2])
    for position in range(300):
        sampled = SamplerOutput(torch.tensor([position]))
        row = Sampled(slots, np.array([1]), np.array([position], np.int32))
        identity = ReplyIdentity(epoch=4, seq=position, rank=0, weights_version=0)
        made = StepOutput(identity, row, b"", sampled, status(STATUS_OK), LINK, history)
        made.result()
        assert len(history.unrecorded) < FOLD_AT
    assert history.has_confirmed(4, 299) and not history.has_confirmed(4, 300)
    assert history.between(2, 0, history.known_to(2, 1, 0)).tolist() == list(range(300))


@pytest.mark.parametrize(
    ("value", "message"), [(STATUS_FAILED, "earlier pipeline stage"), (STATUS_MISMATCH, "relink")]
)
def test_failure_upstream_is_raised_when_the_reply_is_taken(value, message):
    sampled = SamplerOutput(torch.tensor([5]))
    for output in (
        StepOutput(IDENTITY, *columns(np.array([2])), sampled, status(value), LINK, HISTORY),
        NoTokens(IDENTITY, status(value), LINK, HISTORY),
    ):
        with pytest.raises(CommError, match=message):
            output.result()


def test_bitmap_names_the_rows():
    rng = np.random.default_rng(1)
    for count in (0, 1, 7, 1024):
        slots = np.sort(rng.choice(4096, count, replace=False))
        made = slot_bitmap(slots)
        assert named_slots(made) == slots.tolist() and not made.endswith(b"\0")
