"""Weight updates that recompute running requests: each token has the log probability that its
version of transformers' model gives it after the same tokens, computed from the first one on."""

import random

import pytest

from rpc_schema.weight_transfer import DiskEngine, DiskSource
from tests.e2e.test_kept_requests import CLOSE, Watched
from tests.support.checkpoints import prompts
from tests.support.serving import greedy_request
from worker_client.trainer.sender import WeightSender
from worker_client.wire.worker_client import TensorList

OPTIONS = {"tie_word_embeddings": False, "num_hidden_layers": 2}
TIMEOUT_S = 20.0
CLOSER = 1e-5
"""In nats; float32."""


@pytest.fixture(scope="module")
def models(checkpoint):
    """Three checkpoints of one shape."""
    return [checkpoint("Qwen3ForCausalLM", seed=seed, **OPTIONS) for seed in (91, 92, 93)]


@pytest.fixture
def seed():
    value = random.randrange(1 << 30)
    print(f"seed {value}")
    return value


def assert_as_fresh(model_of, prompt, output, close=CLOSER):
    """Check that each token is what a request of its own gets after all tokens before it, from the
    weights of the token's version."""
    known = [*map(int, prompt), *output.token_ids]
    place = 0
    for run in output.weights_versions:
        expected = model_of[run.version].logprobs(known)
        for _ in range(run.num_tokens):
            row, token = expected[len(prompt) + place - 1], output.token_ids[place]
            assert row[token] > row.max() - CLOSE, (output.req_id, place, run)
            if output.logprobs is not None:
                found = output.logprobs[place].logprobs[0]
                assert abs(found - row[token]) < close, (output.req_id, place, run)
            place += 1
    assert place == len(output.token_ids)


def reloading(group, model, _sender):
    group.weights.reload(str(model.path), running="recompute")


def from_disk(group, model, _sender):
    group.weights.init_transfer_engine(DiskEngine())
    group.weights.start_update(running="recompute")
    group.weights.update(TensorList(), DiskSource(model=str(model.path)))
    group.weights.finish_update()


def from_trainer(group, model, sender):
    sender.connect()
    sender.send(dict(model.model.state_dict()), running="recompute")


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (2, 1), (1, 2)])
def test_requests_go_on_as_if_all_their_kv_were_new(serve, models, pp, tp, seed):
    rng = random.Random(seed)
    texts = prompts(seed, [40, 33, 9, 21])
    texts += [texts[0]]  # shares the blocks of the first
    with serve(models[0].path, pp, tp) as (group, loaded):
        watched = Watched(group, loaded)
        model_of = {group.weights.version.number: models[0]}
        lengths = [40, 25, 60, 33, 44]
        for number, (text, length) in enumerate(zip(texts, lengths, strict=True)):
            request = greedy_request(f"r{number}", text.tolist(), length, logprobs=1)
            watched.driver.add_request(request)
            watched.step()
        with WeightSender(group, "gloo", timeout_s=TIMEOUT_S) as sender:
            for number in range(4):
                watched.step(rng.randrange(1, 5))
                model = models[(number + 1) % 3]
                (reloading, from_disk, from_trainer)[number % 3](group, model, sender)
                model_of[group.weights.version.number] = model
                print(group.weights.recomputed)
        watched.finish()
        outputs = watched.outputs
    assert watched.driver.num_failures == 0
    assert dict.fromkeys(outputs, 1) == watched.admitted
    for number, text in enumerate(texts):
        output = outputs[f"r{number}"]
        assert_as_fresh(model_of, text, output)
        assert len(output.token_ids) == lengths[number]
