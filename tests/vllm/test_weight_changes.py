"""vLLM's pause, weight-transfer and resume endpoints before daemons: requests go on with the same
tokens as a loop over transformers' models that changes the weights in between, with or without the
KV that there was."""

import concurrent.futures
import random
import time

import pytest
import torch
from transformers import DynamicCache

from tests.support.structured import VOCAB_SIZE
from tests.vllm.models import write_tokenizer
from tests.vllm.serving import serving, start_daemons

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

MAX_TOKENS = 90
CLOSE = 1e-4
"""In nats; float32."""


@pytest.fixture(scope="module")
def models(checkpoint):
    """Three checkpoints of one shape."""
    made = [checkpoint("Qwen3ForCausalLM", vocab_size=VOCAB_SIZE, seed=s) for s in (94, 95, 96)]
    for each in made:
        write_tokenizer(each.path)
    return made


@pytest.fixture(scope="module")
def server(model_root, models):
    with (
        start_daemons(1, model_root) as daemons,
        serving(daemons.endpoints, models[0].path, model_root) as server,
    ):
        yield server


@pytest.fixture(scope="module")
def recomputing_server(model_root, models):
    settings = {"running_requests": "recompute"}
    with (
        start_daemons(1, model_root) as daemons,
        serving(daemons.endpoints, models[0].path, model_root, settings=settings) as server,
    ):
        yield server


def generate(server, prompt, tokens):
    """Append the tokens of a greedy request to a list, as they come."""
    fields = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "return_token_ids": True}
    for event in server.stream(prompt, **fields):
        tokens += event["choices"][0]["token_ids"]


def check(runs, prompt, tokens, *, keeps_kv):
    """Check greedy tokens by transformers. runs: each model, and how many tokens it sampled.
    keeps_kv: each continues with the KV of those before it, instead of computing it again."""
    cache, place, given = DynamicCache(), 0, list(prompt)
    for model, num_tokens in runs:
        if not keeps_kv:
            cache, given = DynamicCache(), [*prompt, *tokens[:place]]
        for _ in range(num_tokens):
            with torch.no_grad():
                out = model.model(torch.tensor([given]), past_key_values=cache, use_cache=True)
            expected = out.logits[0, -1].float().log_softmax(-1)
            token = tokens[place]
            assert expected[token] > expected.max() - CLOSE, (place, runs)
            given, place = [token], place + 1
    assert place == len(tokens) == MAX_TOKENS


def posted(server, path, body=None):
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def update(server, model):
    """Send a model's weights by vLLM's endpoints."""
    posted(server, "/init_weight_transfer_engine", {"init_info": {"engine": "disk"}})
    posted(server, "/start_weight_update")
    source = {"engine": "disk", "model": str(model.path)}
    posted(server, "/update_weights", {"update_info": {"source": source}})
    posted(server, "/finish_weight_update", {"weight_version": model.path.name})
    assert server.client.get("/weight_info").json() == {"weight_version": model.path.name}


@pytest.mark.parametrize("paused", ["clear_cache=true", "clear_cache=false", ""])
def test_requests_go_on_with_new_weights(server, models, paused):
    """Paused with their KV, paused without, and held by the update itself. Requests that come
    later share no prefix with earlier ones: they have the tokens of the new weights alone."""
    go_on(server, models, paused, keeps_kv=paused != "clear_cache=true")


@pytest.mark.parametrize("paused", ["clear_cache=false", ""])
def test_requests_go_on_with_kv_of_new_weights(recomputing_server, models, paused):
    go_on(recomputing_server, models, paused, keeps_kv=False)


def go_on(server, models, paused, *, keeps_kv):
    """Update the weights while requests run, and check all tokens. paused: the query of a pause;
    empty: there is none."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    old, new = rng.sample(models, 2)
    posted(server, "/pause?mode=wait")
    update(server, old)
    posted(server, "/resume")
    prompts = [[rng.randrange(4, VOCAB_SIZE) for _ in range(n)] for n in (5, 30, 40, 50)]
    gained = [[] for _ in prompts]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        running = [
            pool.submit(generate, server, *each) for each in zip(prompts, gained, strict=True)
        ]
        while min(map(len, gained)) < 5:
            time.sleep(0.005)
        if paused:
            posted(server, f"/pause?mode=keep&{paused}")
            assert server.client.get("/is_paused").json() == {"is_paused": True}
            time.sleep(0.5)  # for what is on its way
            before = [len(own) for own in gained]
            assert max(before) < MAX_TOKENS
            late = [[] for _ in prompts]
            running += [
                pool.submit(generate, server, *each) for each in zip(prompts, late, strict=True)
            ]
            time.sleep(0.2)
            assert [len(own) for own in gained] == before and not any(late)
            update(server, new)
            posted(server, "/resume")
        else:
            posted(server, "/init_weight_transfer_engine", {"init_info": {"engine": "disk"}})
            posted(server, "/start_weight_update")
            time.sleep(0.5)
            before = [len(own) for own in gained]
            late = [[] for _ in prompts]
            running += [
                pool.submit(generate, server, *each) for each in zip(prompts, late, strict=True)
            ]
            source = {"engine": "disk", "model": str(new.path)}
            posted(server, "/update_weights", {"update_info": {"source": source}})
            assert [len(own) for own in gained] == before and not any(late)
            posted(server, "/finish_weight_update")
        for each in running:
            each.result()
    for prompt, own, count, other in zip(prompts, gained, before, late, strict=True):
        runs = [(old, count), (new, MAX_TOKENS - count)]
        check(runs, prompt, own, keeps_kv=keeps_kv)
        check([(new, MAX_TOKENS)], prompt, other, keeps_kv=True)
        again, longer = [], prompt + own[:40]  # blocks of several versions, if they were shared
        generate(server, longer, again)
        check([(new, MAX_TOKENS)], longer, again, keeps_kv=True)
    assert "a step was lost" not in server.log()


def test_what_the_daemons_do_not_have_is_refused_by_name(server):
    for path, body, word in (
        ("/init_weight_transfer_engine", {"init_info": {"engine": "rdt"}}, "init_info.engine"),
        ("/start_draft_weight_update", None, "draft"),
        ("/weight_checker", {"action": "reset"}, "reset_weights"),
    ):
        answer = server.post(path, body)
        assert answer.status_code >= 400 and word in answer.text, answer.text
    assert len(server.complete([5, 6], max_tokens=3, ignore_eos=True)["choices"]) == 1
