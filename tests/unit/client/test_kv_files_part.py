"""A driver whose scheduler keeps blocks in files: a request waits until all ranks have read what it
may begin with, and no longer, whatever becomes of the reads."""

from types import SimpleNamespace

import numpy as np
import pytest

from rpc_schema.errors import CommError
from tests.support.serving import greedy_request
from worker_client.driver_parts import kv_files
from worker_client.driver_parts.driver_parts import DriverParts
from worker_client.driver_parts.interface import DriverPart
from worker_client.driver_parts.kv_files import kv_files_parts
from worker_client.driver_parts.live_requests import LiveRequests
from worker_client.errors import RequestError
from worker_client.group.kv_files import FetchProgress
from worker_client.scheduler import Scheduler, SchedulerLimits
from worker_client.tracing.run_times import RunTimes


class Files:
    """A group's files, with answers that a test gives in turn."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []

    def fetch(self, tag, hashes):
        self.asked.append(list(hashes))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


class Behind(DriverPart):
    """A feature that hears of requests after the files."""

    def __init__(self, error=None):
        self.error, self.heard = error, []

    def queued(self, request):
        self.heard.append(request.id)
        if self.error is not None:
            raise self.error


def scheduler(**fields):
    usual = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "num_blocks": 32,
        "block_size": 4,
        "has_kv_files": True,
    }
    return Scheduler(SchedulerLimits(**{**usual, **fields}))


def made(*answers, behind=None, **fields):
    files, own = Files(*answers), scheduler(**fields)
    requests = LiveRequests(own, RunTimes(None))
    context = SimpleNamespace(
        group=SimpleNamespace(kv_files=files), scheduler=own, requests=requests
    )
    (part,) = kv_files_parts(context)
    requests.serve_with(DriverParts([part] if behind is None else [part, behind]))
    part.requests = requests
    return part, own, files


def queue(part, own, name="a", length=17):
    request = greedy_request(name, np.arange(1, length + 1).tolist(), 4)
    part.requests.add(request)


def test_a_request_waits_for_what_all_ranks_have_read():
    waits, done = FetchProgress(1, is_done=False), FetchProgress(3, is_done=True)
    part, own, files = made(waits, done)
    queue(part, own)
    assert own.schedule() is None
    part.attend()
    assert own.schedule() is None
    assert part.wait()
    part.attend()
    step = own.schedule()
    (moves,) = step.extensions
    assert list(moves.loaded.hashes) == files.asked[0][:3]
    assert len(files.asked[0]) == 4
    (new,) = step.scheduled_new_reqs
    assert new.num_computed_tokens == 12
    assert moves.loaded.block_ids == tuple(new.block_ids[:3])
    assert step.num_scheduled_tokens == {"a": 5}
    assert not part.wait()


def test_other_features_hear_of_a_request_once_its_files_are_read():
    behind = Behind()
    waits, done = FetchProgress(1, is_done=False), FetchProgress(3, is_done=True)
    part, own, _ = made(waits, done, behind=behind)
    queue(part, own)
    queue(part, own, "short", length=4)
    part.attend()
    assert behind.heard == ["short"]
    part.attend()
    assert behind.heard == ["short", "a"]


def test_a_request_ends_if_another_feature_fails_then():
    error = RequestError("no", field="id", value="a", fix="another")
    part, own, _ = made(FetchProgress(4, is_done=True), behind=Behind(error))
    queue(part, own)
    part.attend()
    (output,) = part.requests.take_ended()
    assert (output.req_id, output.refusal) == ("a", error)
    assert not own.has_unfinished_requests()


def test_short_requests_do_not_wait():
    part, own, files = made()
    queue(part, own, length=4)
    assert own.schedule() is not None
    assert files.asked == []


def test_reads_that_fail_or_take_too_long_are_not_waited_for(monkeypatch, caplog):
    part, own, _ = made(CommError("lost"), CommError("lost"), FetchProgress(0, is_done=False))
    for name in ("a", "b"):
        queue(part, own, name)
        part.attend()
        assert own.schedule().extensions == ()
    assert len(caplog.records) == 1
    monkeypatch.setattr(kv_files, "FETCH_TIMEOUT_S", -1.0)
    queue(part, own, "c")
    part.attend()
    assert "c" in own.schedule().num_scheduled_tokens


def test_requests_that_others_hold_are_left_to_them():
    part, own, files = made()
    request = greedy_request("a", [*range(1, 18)], 4)
    own.add_request(request)
    own.hold_request("a")
    part.queued(request)
    part.attend()
    assert own.schedule() is None
    assert files.asked == []


def test_an_aborted_request_is_forgotten_and_a_replaced_rank_has_nothing():
    part, own, files = made(FetchProgress(4, is_done=True))
    queue(part, own, "a")
    own.abort_request("a")
    part.ended("a")
    part.attend()
    assert files.asked == []
    queue(part, own, "b")
    part.attend()
    part.group_replaced()
    (new,) = own.schedule().scheduled_new_reqs
    assert new.num_computed_tokens == 0


@pytest.mark.parametrize("fields", [{"has_kv_files": False}, {"enable_prefix_caching": False}])
def test_schedulers_without_files_have_no_part(fields):
    context = SimpleNamespace(
        group=SimpleNamespace(kv_files=Files()), scheduler=scheduler(**fields)
    )
    assert list(kv_files_parts(context)) == []
