"""Uploads of requests, with a group that keeps them in a dictionary: waiting, dropping and
resending."""

from collections import deque

import numpy as np
import pytest

from rpc_schema.errors import DrainingError, ErrorCode
from rpc_schema.frames import MAX_STEP_BYTES
from rpc_schema.routed_experts import RoutedExpertsShape
from rpc_schema.uploads import MAX_UPLOAD_BYTES
from tests.support.flat_requests import flat_request
from tests.support.uploading_ranks import CHUNK_ROWS, HIDDEN, UploadingRanks, refusal, tensor
from worker_client.driver import Driver
from worker_client.driver_parts.request_uploads import (
    CHUNKS_AT_ONCE,
    Needed,
    RequestUploads,
    UploadsPart,
)
from worker_client.errors import RequestError, WorkerDied
from worker_client.requests import GenerationRequest
from worker_client.scheduler import Scheduler, SchedulerLimits
from worker_client.scheduler_output import StepResult
from worker_client.steps.slots import SlotTable
from worker_client.steps.step_checks import MAX_ADMITTED_TOKENS, GroupLimits

LIMITS = SchedulerLimits(8, 64, 128, 100, 4, hidden_size=HIDDEN)


class Ranks(UploadingRanks):
    """Steps give each scheduled request a token."""

    max_in_flight = 2

    def __init__(self, room: int = 1 << 40) -> None:
        super().__init__(room)
        self.steps = []
        self.dies = False

    def execute_model(self, output):
        self.steps.append(output)
        return Answer(output, self)

    def withdraw(self, output):
        return frozenset()


class Answer:
    def __init__(self, output, ranks):
        self.output, self.ranks = output, ranks

    def result(self, timeout_s=None):
        if self.ranks.dies:
            self.ranks.dies = False
            raise WorkerDied(0, "ipc:///w0", "killed")
        ids = [*self.output.decode_req_ids, *self.output.num_scheduled_tokens]
        return StepResult(ids, [7] * len(ids), {})


def request(req_id, embeds=None, max_tokens=3, **fields):
    rows = 5 if embeds is None else embeds.shape[0]
    ids = np.zeros(min(rows, 100), np.int32)
    return flat_request(req_id, ids, max_tokens, prompt_embeds=embeds, **fields)


def admitted(ranks):
    return [new.req_id for output in ranks.steps for new in output.scheduled_new_reqs]


def uploads_part(driver):
    (part,) = [part for part in driver._parts._all if isinstance(part, UploadsPart)]
    return part


def uploads_of(driver):
    """The uploads of a driver's requests."""
    return uploads_part(driver)._uploads


def add(uploads, req_id, *tensors):
    uploads.add(req_id, {Needed(each.content_hash): each for each in tensors})


def test_held_requests_wait_for_their_chunks_and_others_do_not():
    ranks = Ranks()
    uploads = RequestUploads(ranks)
    long, short = tensor(10 * CHUNK_ROWS), tensor(3, 1)
    for name, each in (("a", long), ("b", short), ("c", long)):
        add(uploads, name, each)
    ready = []
    while uploads.can_proceed:
        before = ranks.num_chunks.total()
        ready += uploads.proceed().ready
        assert ranks.num_chunks.total() - before <= CHUNKS_AT_ONCE
    assert ready == ["a", "b", "c"]
    assert ranks.num_chunks == {long.content_hash: 10, short.content_hash: 1}
    uploads.end("a", 5)
    assert not uploads.to_drop, "c needs it"
    uploads.end("c", 7)
    uploads.drop_unused(6)
    assert long.content_hash in ranks.there, "a step in flight may read it"
    uploads.drop_unused(7)
    assert ranks.there.keys() == {short.content_hash}


def test_request_that_was_ready_before_an_error_is_still_told():
    """The error is one after which the same uploads go on."""
    ranks = Ranks()
    uploads = RequestUploads(ranks)
    add(uploads, "a", tensor(3))
    add(uploads, "b", tensor(3, 1))
    ranks.errors = deque([None, refusal(ErrorCode.DRAINING)])
    with pytest.raises(DrainingError):
        uploads.proceed()
    assert uploads.can_proceed
    assert uploads.proceed().ready == ["a", "b"]
    assert not uploads.can_proceed


def test_request_that_ended_after_an_error_is_not_told():
    ranks = Ranks()
    uploads = RequestUploads(ranks)
    for index, name in enumerate("abc"):
        add(uploads, name, tensor(3, index))
    ranks.errors = deque([None, refusal(ErrorCode.CONFIG), refusal(ErrorCode.DRAINING)])
    with pytest.raises(DrainingError):
        uploads.proceed()
    uploads.end("a", 0)
    uploads.end("b", 0)
    progress = uploads.proceed()
    assert (progress.ready, progress.refused) == (["c"], [])


def test_driver_goes_on_with_what_was_ready_before_a_rank_died():
    ranks = Ranks()
    driver = Driver(ranks, Scheduler(LIMITS), recover=lambda died: ranks.there.clear())
    driver.add_request(request("first", tensor(8)))
    driver.add_request(request("second", tensor(8, 1)))
    ranks.errors = deque([None, WorkerDied(0, "ipc:///w0", "killed")])
    assert sorted(output.req_id for output in driver.run()) == ["first", "second"]


def test_driver_admits_others_while_it_uploads():
    ranks = Ranks()
    driver = Driver(ranks, Scheduler(LIMITS))
    embeds = tensor(40)
    add(uploads_of(driver), "elsewhere", tensor(50 * CHUNK_ROWS, 1))  # goes first
    driver.add_request(request("embedded", embeds))
    driver.add_request(request("plain"))
    outputs = [output.req_id for output in driver.run()]
    assert outputs == ["plain", "embedded"]
    assert admitted(ranks) == ["plain", "embedded"]
    assert embeds.content_hash not in ranks.there


def test_request_without_room_waits_for_that_of_others():
    own = tensor(8)
    ranks = Ranks(room=len(own.data))
    driver = Driver(ranks, Scheduler(LIMITS))
    for index in range(3):
        driver.add_request(request(f"r{index}", tensor(8, index)))
    outputs = list(driver.run())
    assert [(output.req_id, output.error) for output in outputs] == [
        (f"r{index}", "") for index in range(3)
    ]
    assert not ranks.there


def test_room_comes_when_the_only_other_request_is_aborted():
    own = tensor(8)
    ranks = Ranks(room=len(own.data))
    driver = Driver(ranks, Scheduler(LIMITS))
    driver.add_request(request("first", own))
    driver.add_request(request("second", tensor(8, 1)))
    driver.step()
    driver.abort_request("first")
    assert [output.req_id for output in driver.run()] == ["second"]


@pytest.mark.parametrize("why", ["too large", "wrong hash"])
def test_refused_upload_ends_its_request_alone(why):
    ranks = Ranks(room=100 if why == "too large" else 1 << 40)
    ranks.refuses = why == "wrong hash"
    driver = Driver(ranks, Scheduler(LIMITS))
    driver.add_request(request("embedded", tensor(8)))
    driver.add_request(request("plain"))
    outputs = {output.req_id: output for output in driver.run()}
    assert outputs["plain"].token_ids == [7, 7, 7]
    assert outputs["embedded"].finish_reason == "error"
    assert "its upload is refused" in outputs["embedded"].error
    assert admitted(ranks) == ["plain"]


def test_request_with_two_tensors_waits_for_both():
    """The second one finds no room, which its own first one does not free."""
    ranks, both = Ranks(), (tensor(8), tensor(9 * CHUNK_ROWS, 1))
    uploads = RequestUploads(ranks)
    add(uploads, "a", *both)
    assert uploads.proceed().ready == []
    ranks.room = len(both[1].data)
    ((req_id, _),) = uploads.proceed().refused
    assert req_id == "a"
    uploads.end("a", 0)
    uploads.drop_unused(0)
    assert not ranks.there


def test_replaced_ranks_get_again_what_requests_need_adopted_ones_too():
    ranks = Ranks()

    def recover(died):
        ranks.there.clear()

    tensors = {"mine": tensor(8, 1), "adopted": tensor(9, 2)}
    driver = Driver(ranks, Scheduler(LIMITS), recover=recover)
    driver.add_request(request("mine", tensors["mine"], max_tokens=30))
    driver.step()
    driver.step()
    name = tensors["adopted"].content_hash
    ranks.elsewhere[name] = tensors["adopted"]
    claims = {"adopted": [Needed(name)], "gone": [Needed(bytes(32))]}
    assert uploads_of(driver).claim(claims, []) == {"gone"}
    assert ranks.there.keys() == {each.content_hash for each in tensors.values()}
    ranks.there.clear()
    ranks.elsewhere.clear()
    uploads_part(driver).group_replaced()
    assert not driver.step()
    assert ranks.there.keys() == {each.content_hash for each in tensors.values()}


def test_steps_of_replayed_experts_fit_into_messages_whatever_they_admit():
    """Experts of as many tokens as a reply reports at most (Qwen3-30B-A3B's 48 layers, 8 of 128
    experts), in a step with as many admissions as one takes."""
    shape, rng = (
        RoutedExpertsShape(num_layers=48, top_k=8, num_experts=128),
        np.random.default_rng(),
    )
    most, sizes = shape.max_positions, []
    table = SlotTable(8, GroupLimits(1 << 22, 1 << 20, routed_experts=shape))

    class Encoding(Ranks):
        def execute_model(self, output):
            step = table.encode(output, epoch=1, link=1, seq=len(sizes) + 1)
            sizes.append((sum(map(len, step.frames)), len(output.scheduled_new_reqs)))
            return super().execute_model(output)

    size = SchedulerLimits(
        8, 1 << 22, 1 << 20, 1 << 18, 16, routed_experts=shape, enable_prefix_caching=False
    )
    driver = Driver(Encoding(), Scheduler(size))
    experts = rng.integers(0, 128, (most, 48, 8), np.uint8)
    driver.add_request(
        GenerationRequest("r", np.zeros(most, np.int32), 2, replay_experts=experts, priority=-1)
    )
    while not driver._requests.has_ended and uploads_of(driver).can_proceed:
        uploads_part(driver).work_in_flight()
    for index in range(5):
        driver.add_request(GenerationRequest(f"{index}", rng.integers(0, 1000, 740_000), 1))
    outputs = [output.req_id for output in driver.run()]
    assert sorted(outputs) == ["0", "1", "2", "3", "4", "r"]
    assert sizes[0][1] == 4 + 1 and sizes[0][0] > MAX_ADMITTED_TOKENS * 4 * 0.9
    assert max(size for size, _ in sizes) <= MAX_STEP_BYTES


def test_tensor_for_which_there_is_never_room_is_refused_at_once():
    ranks = Ranks()
    ranks.num_bytes = 5 * HIDDEN * 4
    driver = Driver(ranks, Scheduler(LIMITS))
    with pytest.raises(RequestError, match="--upload-memory-bytes") as caught:
        driver.add_request(request("r", tensor(6)))
    assert (caught.value.field, caught.value.value) == ("prompt_embeds", [6, HIDDEN])
    experts = np.zeros((6, 40, 8), np.uint8)
    with pytest.raises(RequestError, match="--upload-memory-bytes") as caught:
        driver.add_request(GenerationRequest("r", [1] * 6, replay_experts=experts))
    assert (caught.value.field, caught.value.value) == ("replay_experts", [6, 40, 8])
    driver.add_request(request("r", tensor(5)))
    assert [output.req_id for output in driver.run()] == ["r"]


def test_experts_that_no_daemon_can_take_are_refused_at_once():
    most = MAX_UPLOAD_BYTES // (48 * 8)
    experts = np.broadcast_to(np.uint8(0), (most + 1, 48, 8))
    request = GenerationRequest("r", np.zeros(most + 1, np.int32), replay_experts=experts)
    with pytest.raises(RequestError) as caught:
        Driver(Ranks(), Scheduler(LIMITS)).add_request(request)
    assert (caught.value.field, caught.value.value) == ("replay_experts", [most + 1, 48, 8])
    assert f"at most {most} tokens" in caught.value.fix


def test_scheduler_that_cannot_hold_a_request_is_told():
    class Plain:
        def add_request(self, request):
            raise AssertionError("not reached")

    with pytest.raises(RequestError, match="hold_request"):
        Driver(Ranks(), Plain()).add_request(request("r", tensor(4)))


def wrong(**fields):
    return {"prompt_embeds": np.zeros((5, HIDDEN), np.float32), **fields}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        (wrong(prompt_embeds=np.zeros((5, HIDDEN), np.int64)), "prompt_embeds"),
        (wrong(prompt_embeds=np.zeros((5, HIDDEN), np.float64)), "prompt_embeds"),
        (wrong(prompt_embeds=np.zeros(5 * HIDDEN, np.float32)), "prompt_embeds"),
        (wrong(prompt_embeds=np.zeros((0, HIDDEN), np.float32)), "prompt_embeds"),
        (wrong(prompt_embeds=[[0.0] * HIDDEN]), "prompt_embeds"),
        (wrong(prompt_embeds=np.zeros((5, HIDDEN + 1), np.float32)), "PromptEmbeds.width"),
        (wrong(prompt_embeds=None, prompt_embeds_at=[(0, 5)]), "prompt_embeds_at"),
        (wrong(prompt_embeds_at=[(0, 4)]), "prompt_embeds_at"),
        (wrong(prompt_embeds_at=[(0, 4, 1)]), "prompt_embeds_at"),
        (wrong(prompt_embeds_at=[(-1, 5)]), "prompt_embeds_at"),
        (wrong(prompt_embeds_at=[(0, 3), (2, 2)]), "PromptEmbeds.ranges"),
        (wrong(prompt_embeds_at=[(4, 5)]), "PromptEmbeds.ranges"),
        (wrong(prompt=np.zeros(200, np.int32)), "prompt"),
    ],
)
def test_what_no_daemon_would_take_is_refused_before_anything_is_sent(fields, field):
    ranks = Ranks()
    driver = Driver(ranks, Scheduler(LIMITS))
    with pytest.raises(RequestError) as refused:
        driver.add_request(flat_request(**{"id": "r", "prompt": np.zeros(8, np.int32), **fields}))
    assert refused.value.field == field
    assert refused.value.fix
    assert not driver.busy and not ranks.num_chunks
