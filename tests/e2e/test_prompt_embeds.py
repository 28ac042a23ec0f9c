"""Prompts with embeddings through real daemons: the tokens are those that transformers generates
from inputs_embeds in float32."""

import json
import random
import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rpc_schema.config import LoraConfig
from rpc_schema.extensions import extension_of
from rpc_schema.pooling import PoolingParams
from rpc_schema.prompt_embeds import EmbeddedRange, PromptEmbeds
from tests.support.driving import random_cases
from tests.support.embedded_prompts import (
    EmbeddedPrompt,
    clear_cases,
    clear_tokens,
    random_prompts,
    random_rows,
    save,
)
from tests.support.exhaustive import exhaustively
from tests.support.killed_driver import DriverNursery, Plan, begin
from tests.support.lora_adapters import make_adapter
from tests.support.pooling_reference import embedding
from tests.support.serving import (
    LONG_LEASE,
    connect,
    generate,
    greedy_request,
    scheduler_limits,
    worker_config,
)
from tests.support.waiting import wait_until
from worker_client.driver import Driver
from worker_client.driver_parts.request_uploads import UPLOADS_LOST
from worker_client.errors import RequestError, StepFailed
from worker_client.inputs.prompt_embeds import host_tensor
from worker_client.scheduler import Scheduler
from worker_client.worker_group import WorkerGroup

MAX_TOKENS = 24
LONGEST = 20
"""Tokens, and rows, of a prompt."""
SIZES = {"max_num_batched_tokens": 16, "max_num_seqs": 16, "max_model_len": 72}
"""Steps that cut prompts."""


@pytest.mark.parametrize(
    ("architecture", "pp", "tp"),
    [
        exhaustively("LlamaForCausalLM", 1, 1),
        ("Qwen3ForCausalLM", 2, 1),
        exhaustively("LlamaForCausalLM", 1, 2),
    ],
)
def test_embedded_prompts_are_served_beside_others(serve, checkpoint, architecture, pp, tp):
    """With too few blocks for all."""
    seed = random.randrange(1 << 30)
    model = checkpoint(architecture)
    cases = clear_cases(model, seed, 6, MAX_TOKENS, LONGEST)
    plain = random_cases(model, seed, 4, MAX_TOKENS)
    mixed = [*cases.requests, *plain.requests]
    random.Random(seed).shuffle(mixed)
    with serve(model.path, pp, tp, num_gpu_blocks=26, **SIZES) as (group, loaded):
        run = generate(group, loaded, mixed)
        statuses = group.get_status()
    assert run.tokens == cases.expected | plain.expected, seed
    assert sum(output.num_preemptions for output in run.outputs.values()) > 0
    assert [status.upload_bytes for status in statuses] == [0] * (pp * tp)


def test_prefixes_are_shared_by_equal_embeddings_alone(serve, checkpoint):
    """The placeholders of all of them are the same tokens."""
    model = checkpoint()
    cases = clear_cases(model, random.randrange(1 << 30), 1, MAX_TOKENS, 30)
    prompt, rng = cases.prompts["e0"], np.random.default_rng()
    different, expected = prompt, None
    while expected is None:
        different = replace(prompt, rows=random_rows(rng, *prompt.rows.shape))
        expected = clear_tokens(model, different, MAX_TOKENS)
    with serve(model.path, max_num_batched_tokens=64) as (group, loaded):
        scheduler = Scheduler(scheduler_limits(group, loaded))

        def run(request):
            driver = Driver(group, scheduler)
            driver.add_request(request)
            (output,) = driver.run()
            return output

        first = run(prompt.request("first", MAX_TOKENS))
        again = run(prompt.request("again", MAX_TOKENS))
        other = run(different.request("other", MAX_TOKENS))
        plain = run(greedy_request("plain", prompt.ids, MAX_TOKENS))
    assert first.token_ids == again.token_ids == cases.expected["e0"]
    assert again.num_cached_tokens >= len(prompt.ids) - loaded.block_size
    assert other.num_cached_tokens == plain.num_cached_tokens == 0
    assert other.token_ids == expected


def states_of(checkpoint, prompt):
    """Last hidden states of transformers, float32 [tokens, hidden size]."""
    embeds = prompt.whole(checkpoint)[None]
    with torch.no_grad():
        return checkpoint.model.base_model(inputs_embeds=embeds).last_hidden_state[0]


def pooling(prompt, req_id, task):
    return replace(prompt.request(req_id, 1), pooling=PoolingParams(task=task))


def check_pooled(output, expected):
    np.testing.assert_allclose(output.pooled, expected, rtol=1e-4, atol=1e-5)


def test_embeddings_go_with_adapters_pooling_and_logprobs_of_prompts(serve, checkpoint):
    """In the same steps, which are cut, on two stages."""
    base = checkpoint(seed=31)
    merged = make_adapter(base, "embedded", seed=6)
    cases = clear_cases(merged, random.randrange(1 << 30), 3, MAX_TOKENS, LONGEST)
    with serve(base.path, 2, lora=LoraConfig(max_loras=1), **SIZES) as (group, loaded):
        adapter = group.loras.add("embedded").extension
        requests = []
        for (name, prompt), adapted in zip(cases.prompts.items(), cases.requests, strict=True):
            requests += [
                replace(adapted, features=(adapter,)),
                pooling(prompt, f"{name}-pooled", "token_embed"),
                prompt.request(f"{name}-told", 1, prompt_logprobs=0),
            ]
        run = generate(group, loaded, requests)
    for name, prompt in cases.prompts.items():
        assert run.tokens[name] == cases.expected[name]
        states = states_of(base, prompt)
        check_pooled(run.outputs[f"{name}-pooled"], embedding(states))
        with torch.no_grad():
            exact = base.model.lm_head(states).log_softmax(-1)
        told = run.outputs[f"{name}-told"].prompt_logprobs[1:]
        tokens = prompt.ids[1:].tolist()
        assert [each.token_ids.tolist() for each in told] == [[token] for token in tokens]
        np.testing.assert_allclose(
            np.concatenate([each.logprobs for each in told]),
            exact[range(len(tokens)), tokens],
            rtol=1e-3,
            atol=1e-3,
        )


def test_encoders_take_embeddings(serve, checkpoint):
    """To which they add positions and types."""
    model = checkpoint("BertModel")
    prompts = dict(zip("abcde", random_prompts(model, random.randrange(1 << 30)), strict=False))
    with serve(model.path, max_num_batched_tokens=96) as (group, loaded):
        requests = [pooling(prompt, name, "embed") for name, prompt in prompts.items()]
        run = generate(group, loaded, requests)
    for name, prompt in prompts.items():
        check_pooled(run.outputs[name], embedding(states_of(model, prompt).mean(0)))


def test_uploads_go_to_the_first_stage_while_others_decode(serve, checkpoint):
    model = checkpoint()
    plain = random_cases(model, 5, 3, 40)
    cases = clear_cases(model, 5, 2, MAX_TOKENS)
    with serve(model.path, 2, max_num_batched_tokens=64) as (group, loaded):
        driver = Driver(group, Scheduler(scheduler_limits(group, loaded)))
        for each in plain.requests:
            driver.add_request(each)
        outputs = driver.step()
        for each in cases.requests:
            driver.add_request(each)
        seen = set()
        while driver.busy:
            outputs += driver.step()
            seen.add(tuple(status.upload_bytes > 0 for status in group.get_status()))
    found = {output.req_id: output.token_ids for output in outputs}
    assert found == plain.expected | cases.expected
    assert seen == {(True, False), (False, False)}


def test_example_of_the_document_runs(serve, checkpoint):
    text = (Path(__file__).parents[2] / "docs" / "prompt-embeddings.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    model = checkpoint()
    with serve(model.path) as (group, loaded):
        driver = Driver(group, Scheduler(scheduler_limits(group, loaded)))
        hidden_size = loaded.metadata.hidden_size
        names = {"driver": driver, "hidden_size": hidden_size}
        exec(example, names)  # noqa: S102  # our own document
        (output,) = driver.run()
    assert names["prompt"].tolist() == [0, 0, 0, 11, 12, 13, 0, 0]
    rows = torch.from_numpy(names["rows"])
    prompt = EmbeddedPrompt([11, 12, 13], rows, tuple(names["at"]))
    logits = model.model(inputs_embeds=prompt.whole(model)[None]).logits[0, -1]
    assert output.num_prompt_tokens == 8 and len(output.token_ids) == 8
    assert output.token_ids[0] == int(logits.argmax())


def test_aborted_request_takes_nobody_with_it(serve, checkpoint):
    """Its upload is dropped once no step in flight reads it."""
    model = checkpoint()
    cases = clear_cases(model, 6, 3, MAX_TOKENS, 40)
    with serve(model.path, **SIZES | {"max_model_len": 128}) as (group, loaded):
        for num_steps in range(6):
            driver = Driver(group, Scheduler(scheduler_limits(group, loaded)))
            for request in cases.requests:
                driver.add_request(request)
            outputs = [output for _ in range(num_steps) for output in driver.step()]
            driver.abort_request("e0")
            outputs += driver.run()
            assert driver.num_failures == 0
            assert {output.req_id: output.token_ids for output in outputs} == {
                name: tokens for name, tokens in cases.expected.items() if name != "e0"
            }
        assert group.get_status()[0].upload_bytes == 0


def test_missing_upload_fails_the_step_and_says_so(serve, checkpoint):
    model = checkpoint()
    lacking = PromptEmbeds(
        content_hash=bytes(32),
        dtype="float32",
        width=64,
        ranges=(EmbeddedRange(start=1, length=3),),
    )
    with serve(model.path, **SIZES) as (group, loaded):
        scheduler = Scheduler(scheduler_limits(group, loaded))
        lacks = greedy_request("lacks", [1, 0, 0, 0], 4, features=(lacking,))
        with pytest.raises(RequestError, match="the daemons have no such upload"):
            Driver(group, scheduler).add_request(lacks)
        assert not scheduler.has_unfinished_requests()
        scheduler.add_request(lacks)
        failed = group.execute_model(scheduler.schedule())
        with pytest.raises(StepFailed, match=r"request lacks needs an upload of float32 \[3, 64\]"):
            failed.result()
        cases = clear_cases(model, 7, 2, MAX_TOKENS, LONGEST)
        assert generate(group, loaded, cases.requests).tokens == cases.expected


def test_killed_drivers_requests_go_on_without_their_files(daemons, checkpoint, tmp_path):
    """Daemons keep the uploads of the requests that they keep; the next driver has no line of
    input."""
    model = checkpoint()
    seed = random.randrange(1 << 30)
    print("seed", seed)
    cases = clear_cases(model, seed, 5, MAX_TOKENS, 40)
    lines = [
        json.dumps(save(prompt, tmp_path, name) | {"max_tokens": MAX_TOKENS})
        for name, prompt in cases.prompts.items()
    ]
    sizes = SIZES | {"max_model_len": 128}
    config = worker_config(model.path, 2, step_deadline_ms=1000, **sizes)
    # Where a driver dies, the last prompt of a step may just have ended with it.
    for num_results in (5, 6, 7):
        plan = Plan(
            daemons.endpoints(2), config, lines, directory=str(tmp_path), num_results=num_results
        )
        if are_adopted_within_prompts(plan, cases):
            return
    pytest.fail("no driver died within a prompt")


def are_adopted_within_prompts(plan, cases):
    """Kill a driver and adopt its requests; check their tokens. Return True if the prompt of any
    was computed in part only."""
    config = plan.config
    with connect(plan.endpoints, config, num_gpu_blocks=plan.num_gpu_blocks):
        pass  # loaded, and free
    with closing(DriverNursery()) as nursery:
        nursery.live(plan)
    with WorkerGroup(plan.endpoints, config.parallel, lease=LONG_LEASE) as group:
        group.attach(keep_requests=True)
        loaded = group.prepare(config, num_gpu_blocks=plan.num_gpu_blocks)
        serving = begin(group, loaded, Plan(plan.endpoints, config, [], adopt=True))
        assert {request.req_id for request in serving.adopted} <= cases.expected.keys()
        found = any(r.num_computed_tokens < r.num_prompt_tokens for r in serving.adopted)
        outputs = {output.req_id: output for output in [*serving.done, *serving.driver.run()]}
        assert serving.adopted and outputs.keys() == {r.req_id for r in serving.adopted}
        found = {name: (own.token_ids, own.error) for name, own in outputs.items()}
        assert found == {name: (cases.expected[name], "") for name in outputs}
        assert group.get_status()[0].upload_bytes == 0
    return found


def test_adopted_request_without_its_upload_ends_alone(daemons, checkpoint):
    model = checkpoint()
    cases = clear_cases(model, 8, 3, MAX_TOKENS, 40)
    config = worker_config(model.path, 1, **SIZES | {"max_model_len": 128})
    endpoints = daemons.endpoints(1)
    with WorkerGroup(endpoints, config.parallel, lease=LONG_LEASE) as first:
        first.attach(force=True)
        loaded = first.prepare(config, num_gpu_blocks=256, reload=True)
        driver = Driver(first, Scheduler(scheduler_limits(first, loaded)))
        for request in cases.requests:
            driver.add_request(request)
        while len(first.slots) < 3:
            driver.step()
        wait_until(lambda: first.get_status()[0].num_requests == 3, "the daemon has all three")
        with WorkerGroup(endpoints, config.parallel, lease=LONG_LEASE) as group:
            group.attach(force=True, keep_requests=True)
            loaded = group.prepare(config, num_gpu_blocks=256)
            adopted = group.adopt_requests()
            assert {request.req_id for request in adopted} == cases.expected.keys()
            names = [extension_of(r.extensions, PromptEmbeds).content_hash for r in adopted]
            assert group.uploads.find(names) == [True] * 3
            tensors = {r.id: host_tensor(r.prompt_embeds) for r in cases.requests}
            group.uploads.drop([tensors[name].content_hash for name in ("e0", "e1")])
            scheduler = Scheduler(scheduler_limits(group, loaded))
            driver = Driver(group, scheduler)
            kept, lost = driver.claim(adopted, [tensors["e1"]])
            assert [(output.req_id, output.error) for output in lost] == [("e0", UPLOADS_LOST)]
            assert not scheduler.adopt_requests(kept)
            assert {output.req_id: output.token_ids for output in driver.run()} == {
                name: cases.expected[name] for name in ("e1", "e2")
            }
            assert group.get_status()[0].upload_bytes == 0
