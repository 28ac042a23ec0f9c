"""Prompts with embeddings before vLLM's scheduler: what is refused, uploads that requests wait for,
and their steps. The uploads are in a dictionary."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpc_schema.errors import (
    ErrorCode,
)
from rpc_schema.prompt_embeds import MAX_EMBEDDED_RANGES, PromptEmbeds
from tests.support import vllm_shapes as vllm
from tests.support.uploading_ranks import CHUNK_ROWS, UploadingRanks, refusal
from tests.support.waiting import wait_until
from worker_client.driver_parts.request_uploads import CHUNKS_AT_ONCE
from worker_client.errors import (
    RequestError,
    WorkerDied,
)
from worker_client.inputs.host_tensor import HostTensor
from worker_client.inputs.prompt_embeds import PLACEHOLDER
from worker_client.parts.interface import ModelBounds
from worker_client.scheduler_output import SchedulerOutput
from worker_client.vllm.embedded_prompts import EmbeddedPrompts, embedded_prompt
from worker_client.vllm.requests import Requests
from worker_client.vllm.settings import Settings
from worker_client.vllm.steps import StepWriter
from worker_client.vllm.workers import LostStep, PendingStep, Workers

WIDTH = 64
VOCAB_SIZE = 1000
BOUNDS = ModelBounds(VOCAB_SIZE, hidden_size=WIDTH)
FLOAT32 = "torch.float32"


def rows(count, seed=0, width=WIDTH):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=generator)


def request(req_id="a", embeds=None, **fields):
    embeds = rows(5) if embeds is None else embeds
    params = vllm.SamplingParams(temperature=0.0, **fields.pop("params", {}))
    return vllm.Request(
        req_id, params, num_prompt_tokens=len(embeds), prompt_embeds=embeds, **fields
    )


def take_rows(embeds, places):
    return HostTensor.from_array(embeds.numpy()[places])


# ------------------------------------------------------------------ what is refused

MIXED = {
    "prompt_token_ids": [7, 8, 9, 10, 11],
    "prompt_is_token_ids": [True, True, False, True, True],
}


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"embeds": rows(5, width=WIDTH + 1)}, "prompt_embeds"),
        ({"embeds": torch.zeros(5)}, "prompt_embeds"),
        ({"embeds": torch.zeros(1, 5, WIDTH)}, "prompt_embeds"),
        ({"embeds": torch.zeros(0, WIDTH)}, "prompt_embeds"),
        ({"embeds": torch.zeros(5, WIDTH, dtype=torch.int64)}, "prompt_embeds"),
        ({"params": {"prompt_logprobs": 0}}, "prompt_logprobs"),
        ({"mm_features": [SimpleNamespace(modality="image")]}, "multi_modal_data"),
        ({"prompt_is_token_ids": [True] * 5}, "prompt_is_token_ids"),
        ({**MIXED, "prompt_token_ids": None}, "prompt_token_ids"),
        ({**MIXED, "prompt_token_ids": [7, VOCAB_SIZE, 9, 10, 11]}, "prompt_token_ids"),
        ({**MIXED, "prompt_token_ids": [7, -1, 9, 10, 11]}, "prompt_token_ids"),
        (
            {
                "embeds": rows(2 * MAX_EMBEDDED_RANGES + 1),
                "prompt_token_ids": [5] * (2 * MAX_EMBEDDED_RANGES + 1),
                "prompt_is_token_ids": [False, True] * MAX_EMBEDDED_RANGES + [False],
            },
            "prompt_is_token_ids",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(wrong, named):
    with pytest.raises(RequestError) as caught:
        embedded_prompt(request(**wrong), BOUNDS)
    assert caught.value.field == named
    assert caught.value.fix


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floating_point_numbers_are_served(dtype):
    embedded_prompt(request(embeds=rows(5).to(dtype)), BOUNDS)


def test_ids_at_embedded_positions_do_not_matter():
    ids = [7, 8, 10**6, 10, 11]  # as that of a token that was added to the tokenizer
    embedded_prompt(request(**{**MIXED, "prompt_token_ids": ids}), BOUNDS)


@given(st.lists(st.booleans(), min_size=1, max_size=40).filter(lambda mask: not all(mask)))
def test_rows_fill_the_positions_without_tokens(is_token):
    fields = {"prompt_token_ids": [5] * len(is_token), "prompt_is_token_ids": is_token}
    prompt = embedded_prompt(request(embeds=rows(len(is_token)), **fields), BOUNDS)
    filled = [place for start, count in prompt.ranges for place in range(start, start + count)]
    assert filled == prompt.places.tolist()
    assert filled == [place for place, counts in enumerate(is_token) if not counts]
    assert all(
        start > before + count
        for (before, count), (start, _) in zip(prompt.ranges, prompt.ranges[1:], strict=False)
    )


# ------------------------------------------------------------------ uploads


class Group(UploadingRanks):
    """Daemons whose uploads end with a replacement or an attach."""

    def __init__(self, room=1 << 40):
        super().__init__(room)
        self.num_attached = self.num_replaced = 0

    def replace(self, rank, within_s):
        self.num_replaced += 1
        self.there.clear()
        return SimpleNamespace(ranks=[rank], seconds={})

    def attach(self):
        self.num_attached += 1
        self.there.clear()

    def prepare(self, config, **options):
        return None


class Front:
    """Accepted requests, as vLLM's scheduler asks for them."""

    def __init__(self, room=1 << 40):
        self.group = Group(room)
        self.workers = Workers(self.group, None, Settings())
        self.embeds = EmbeddedPrompts(self.workers, FLOAT32, take_rows)
        self.requests = Requests(BOUNDS, lambda adapter: None, embeds=self.embeds)
        self.waiting = {}

    def add(self, *requests):
        self.waiting |= {each.request_id: each for each in requests}

    def plan(self):
        """Plan a step: return the requests that may begin, and those that are refused."""
        self.requests.proceed()
        refusals = {name: self.requests.find_refusal(r) for name, r in self.waiting.items()}
        ready = [name for name, why in refusals.items() if not why and self.requests.is_ready(name)]
        return ready, {name: why for name, why in refusals.items() if why}

    def begin(self, *req_ids):
        """Wait until exactly these requests may begin."""
        wait_until(lambda: {*req_ids} <= {*self.plan()[0]}, f"{req_ids} may begin", 20.0)
        assert {*self.plan()[0]} == {*req_ids}

    def refuse(self, req_id):
        """Return why a request is refused, in the end."""
        wait_until(lambda: req_id in self.plan()[1], f"{req_id} is refused", 20.0)
        return self.plan()[1][req_id]

    def hash_of(self, req_id):
        return self.embeds.extension(req_id).content_hash

    def end(self, *req_ids):
        for req_id in req_ids:
            del self.waiting[req_id]
        self.requests.forget(req_ids)
        self.embeds.drop_unused()


@pytest.fixture
def fronts():
    """Makes fronts, and ends their threads."""
    made = []

    def make(room=1 << 40):
        made.append(Front(room))
        return made[-1]

    yield make
    for front in made:
        front.embeds.close()
        front.embeds._hasher.shutdown()


@pytest.fixture
def front(fronts):
    return fronts()


def test_request_waits_for_its_upload_and_others_do_not(front):
    embeds = rows(9 * CHUNK_ROWS)
    front.add(request("long", embeds), vllm.Request("plain", vllm.SamplingParams()))
    front.requests.find_refusal(front.waiting["long"])
    front.embeds._held["long"].hashing.result()
    plans = []
    while "long" not in (ready := front.plan()[0]):
        plans.append(ready)
        assert front.group.num_chunks.total() <= len(plans) * CHUNKS_AT_ONCE
    assert plans == [["plain"]] * 2
    assert front.group.there.keys() == {HostTensor.from_array(embeds.numpy()).content_hash}


def test_equal_embeddings_are_sent_once_and_dropped_after_the_last_step(front):
    front.add(*(request(name) for name in "ab"))
    front.begin("a", "b")
    assert front.hash_of("a") == front.hash_of("b")
    assert front.group.num_chunks.total() == 1
    front.end("a")
    assert front.group.there, "b needs it"
    front.workers._num_sent = 3
    front.end("b")
    assert front.group.there, "steps in flight may read it"
    front.workers._num_done = 3
    front.embeds.drop_unused()
    assert not front.group.there


def test_aborted_request_leaves_no_upload(front):
    front.add(request("hashing", rows(4)), request("sending", rows(9 * CHUNK_ROWS)))
    front.plan()
    front.end("hashing")
    wait_until(lambda: front.plan() and front.group.num_chunks, "it is being sent", 20.0)
    front.end("sending")
    front.add(request("after", rows(3)))
    front.begin("after")
    front.end("after")
    assert not front.group.there


@pytest.mark.parametrize("why", ["too large", "wrong"])
def test_refused_upload_ends_its_request_alone(fronts, why):
    front = fronts(room=5 * WIDTH * 4 if why == "too large" else 1 << 40)
    front.add(request("large", rows(6)))
    front.group.refuses = why == "wrong"
    assert "its upload is refused" in front.refuse("large")
    front.group.refuses = False
    front.end("large")
    front.add(request("small", rows(5)))
    front.begin("small")


def test_tensor_that_no_upload_can_hold_is_refused_with_the_reason(front):
    def take(embeds, places):
        return HostTensor.from_bytes("float32", (1 << 24, WIDTH), b"")

    front.embeds._take_rows = take
    front.add(request("huge"))
    assert "upload parts of at most" in front.refuse("huge")


def test_request_waits_for_room_that_others_give_back(fronts):
    front = fronts(room=5 * WIDTH * 4)
    front.add(request("first"), request("second", rows(5, 1)))
    front.begin("first")
    for _ in range(5):
        assert front.plan() == (["first"], {})
    front.end("first")
    front.begin("second")


@pytest.mark.parametrize("when", ["before", "within", "after"])
def test_replaced_daemons_get_all_embeddings_again(front, when):
    """Requests that run begin again: the rows of all are lost with the daemon."""
    died = WorkerDied(0, "ipc:///w0", "killed")
    front.add(request("one"), request("two", rows(9 * CHUNK_ROWS, 1)))
    if when == "after":
        front.begin("one", "two")
        front.workers._replace(died)
        assert not front.group.there
        assert "two" not in front.plan()[0], "it has to wait again"
    else:
        front.group.errors.extend([None] * (3 if when == "within" else 0) + [died])
    front.begin("one", "two")
    assert front.group.num_replaced == 1
    assert front.group.there.keys() == {front.hash_of("one"), front.hash_of("two")}


def test_lost_lease_is_told_with_the_next_step(front):
    front.add(request())
    front.group.errors.append(refusal(ErrorCode.LEASE_EXPIRED))
    front.begin("a")
    assert (front.group.num_attached, front.workers.generation) == (1, 1)
    sent = front.workers.send(SchedulerOutput(decode_req_ids=("b",)))
    assert isinstance(sent, PendingStep)
    assert sent.future is None
    assert isinstance(front.workers.outcome([sent]), LostStep)
    assert front.workers.num_done == front.workers.num_sent == 1


def test_without_the_option_embeddings_are_refused():
    refused = Requests(BOUNDS, lambda adapter: None).find_refusal(request())
    assert "--enable-prompt-embeds" in refused


# ------------------------------------------------------------------ block hashes and steps


@pytest.mark.parametrize(
    ("fields", "is_salted"),
    [
        ({}, False),
        ({"prompt_token_ids": [0] * 5}, False),
        ({"prompt_token_ids": [7] * 5}, True),
        (MIXED, False),
        ({**MIXED, "prompt_token_ids": [7, 0, 9, 10, 11]}, True),
        ({**MIXED, "prompt_token_ids": [7, 8, 0, 10, 11]}, False),
        ({"embeds": rows(5).half()}, True),
    ],
)
def test_block_hashes_get_what_ids_and_bytes_do_not_tell(front, fields, is_salted):
    salts = set()
    for own in (None, "theirs"):
        made = request(cache_salt=own, block_hashes=[own], **fields)
        front.requests.salt_hashes(made)
        assert made.block_hashes == [made.cache_salt]
        assert isinstance(made.cache_salt, bytes) == is_salted
        salts.add(made.cache_salt)
    assert len(salts) == 2


@pytest.mark.parametrize("has_output", [False, True])
@pytest.mark.parametrize("is_mixed", [False, True])
def test_steps_admit_placeholders_and_the_extension(front, is_mixed, has_output):
    fields = MIXED if is_mixed else {}
    front.add(request(**fields))
    front.begin("a")
    given = fields.get("prompt_token_ids")
    new = vllm.NewRequestData(
        "a",
        given,
        ([1, 2],),
        prompt_embeds=front.waiting["a"].prompt_embeds,
        prompt_is_token_ids=fields.get("prompt_is_token_ids"),
        prefill_token_ids=[*(given or [0] * 5), 42] if has_output else None,
    )
    writer = StepWriter(front.requests, lambda lora_id: None, lambda req_id: False, [4])
    (step,) = writer.write(
        vllm.SchedulerOutput(scheduled_new_reqs=[new], num_scheduled_tokens={"a": 5 + has_output})
    )
    (admitted,) = step.scheduled_new_reqs
    prompt = [7, 8, PLACEHOLDER, 10, 11] if is_mixed else [PLACEHOLDER] * 5
    assert admitted.token_ids.tolist() == prompt + [42] * has_output
    assert admitted.num_prompt_tokens == 5
    (extension,) = [each for each in admitted.extensions if isinstance(each, PromptEmbeds)]
    ranges = [(each.start, each.length) for each in extension.ranges]
    assert ranges == ([(2, 1)] if is_mixed else [(0, 5)])
    places = np.array([2]) if is_mixed else np.arange(5)
    expected = take_rows(front.waiting["a"].prompt_embeds, places)
    assert (extension.content_hash, extension.width) == (expected.content_hash, WIDTH)
