"""The example scheduler serves fake daemons, failures included. The documents on schedulers name
all that one exchanges, and have code for streaming that sends each token once."""

import random
import re
from collections import defaultdict
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from msgspec import Struct

from examples.static_batches import StaticBatches
from rpc_schema.errors import ErrorCode
from rpc_schema.sampling import MAX_STOP_TOKEN_IDS
from tests.support.fake_daemon import EOS, VOCAB_SIZE, Fault
from tests.support.flat_requests import changed, path_of
from tests.unit.client.conftest import worker_config
from tests.unit.client.test_scheduler import Model, expected, make_limits, random_requests
from worker_client.driver import Driver
from worker_client.errors import RequestError
from worker_client.group.adoption import AdoptedRequest
from worker_client.requests import GenerationRequest
from worker_client.scheduler import RequestOutput, SchedulerInterface, SchedulerLimits
from worker_client.scheduler_output import Logprobs, NewRequest, SchedulerOutput, StepResult
from worker_client.steps.slots import SlotTable

DOCS = Path(__file__).parents[3] / "docs"
INTERFACE = (DOCS / "scheduler.md").read_text()
RULES = (DOCS / "scheduler-rules.md").read_text()
COOKBOOK = (DOCS / "scheduler-cookbook.md").read_text()
CODE = re.findall(r"^```python\n(.*?)^```$", COOKBOOK, re.MULTILINE | re.DOTALL)
EXCHANGED = (
    AdoptedRequest,
    Logprobs,
    NewRequest,
    RequestOutput,
    SchedulerLimits,
    SchedulerOutput,
    StepResult,
)


@pytest.mark.parametrize("kind", EXCHANGED)
def test_documents_name_every_field(kind):
    names = kind.__struct_fields__ if issubclass(kind, Struct) else [f.name for f in fields(kind)]
    text = RULES if kind is AdoptedRequest else INTERFACE
    missing = [name for name in names if f"`{name}`" not in text]
    assert f"`{kind.__name__}`" in text and not missing


def test_document_names_every_method():
    methods = [name for name in vars(SchedulerInterface) if not name.startswith("_")]
    assert len(methods) >= 6
    assert [name for name in methods if f"### `{name}(" not in INTERFACE] == []


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("failing", [False, True])
def test_every_request_gets_its_tokens(fakes, connect, pp, failing):
    daemons = fakes(pp)
    group = connect(daemons, pp)
    group.attach()
    model = group.prepare(worker_config(pp, max_model_len=128))
    if failing:
        for daemon in daemons.daemons:
            daemon.faults = [Fault(n, code=ErrorCode.CAPACITY) for n in (3, 20, 21, 60)]
    scheduler = StaticBatches(SchedulerLimits(8, 32, 128, model.num_blocks, 4, pp, (EOS,)))
    sent = defaultdict(list)
    stream = documented("class Stream")((EOS,), lambda req_id, token: sent[req_id].append(token))
    driver = Driver(group, scheduler, stream.on_result)
    requests = random_requests(random.Random(pp), 20)
    for request in requests:
        driver.add_request(request)
        stream.add(request)
    aborted = requests.pop(3)
    outputs = [output for _ in range(4) for output in driver.step()]
    assert aborted.id not in [output.req_id for output in outputs]
    driver.abort_request(aborted.id)
    stream.abort(aborted.id)
    sent.pop(aborted.id, None)
    driver.add_request(aborted)  # its id is free at once, but not for a stream
    outputs += driver.run()
    for output in outputs:
        stream.finish(output)
    tokens = {output.req_id: output.token_ids for output in outputs}
    assert tokens == {request.id: expected(request) for request in [*requests, aborted]}
    assert sent == tokens
    assert (driver.num_failures > 0) == failing
    assert len(scheduler._free_blocks) == len(set(scheduler._free_blocks)) == model.num_blocks - 1
    assert max(record.num_requests for record in driver.records) > 4


def test_prompts_are_cut_at_borders():
    limits = make_limits(keeps_state=True, checkpoint_blocks=2, eos_token_ids=(EOS,))
    model, requests = Model(limits, latency=1), random_requests(random.Random(7), 10)
    model.scheduler = StaticBatches(limits)
    outputs = model.run(requests)
    assert {req_id: output.token_ids for req_id, output in outputs.items()} == {
        request.id: expected(request) for request in requests
    }
    assert model.checkpoints and limits.cut_at_border(13, 20) == 3
    assert make_limits().cut_at_border(13, 20) == 20


def documented(beginning: str):
    """Return the class whose code in the document contains this text."""
    (code,) = (code for code in CODE if beginning in code)
    names: dict[str, type] = {}
    exec(code, names)  # noqa: S102  # our own document's
    return names[beginning.split()[-1]]


def test_what_can_never_be_served_changes_nothing():
    scheduler = StaticBatches(make_limits(num_blocks=8, vocab_size=VOCAB_SIZE))
    (request,) = random_requests(random.Random(0), 1, longest=10)
    for fields_of_another in (
        {"max_tokens": 100},
        {"temperature": -1.0},
        {"stop_token_ids": (VOCAB_SIZE,)},
    ):
        with pytest.raises(RequestError):
            scheduler.add_request(changed(request, **fields_of_another))
    assert not scheduler.has_unfinished_requests() and scheduler.schedule() is None
    scheduler.add_request(replace(request, max_tokens=2))
    with pytest.raises(RequestError, match="in use"):
        scheduler.add_request(replace(request, max_tokens=2))


def test_admissions_that_outgrow_a_message_are_split_over_steps():
    """It admits a request with all the blocks that it may ever need."""
    limits = SchedulerLimits(8, 64, 1 << 20, 1 << 21, 1)
    scheduler, table = StaticBatches(limits), SlotTable(8)
    prompt = np.arange(1, 4, dtype=np.int32)
    for name in "abc":
        scheduler.add_request(GenerationRequest(name, prompt, max_tokens=400_000))
    for seq, names in enumerate(["ab", "c"], 1):
        output = scheduler.schedule()
        assert [new.req_id for new in output.scheduled_new_reqs] == list(names)
        table.encode(output, epoch=1, link=1, seq=seq)
    too_many = tuple(range(MAX_STOP_TOKEN_IDS))
    for fields_of_another, field in (
        ({"max_tokens": 1_000_000}, "max_tokens"),
        ({"stop_token_ids": too_many}, "stop_token_ids"),
    ):
        scheduler = StaticBatches(replace(limits, eos_token_ids=(MAX_STOP_TOKEN_IDS,)))
        request = GenerationRequest("long", prompt, max_tokens=5)
        with pytest.raises(RequestError) as refused:
            scheduler.add_request(changed(request, **fields_of_another))
        assert refused.value.field == path_of(field)
        scheduler.add_request(request)
