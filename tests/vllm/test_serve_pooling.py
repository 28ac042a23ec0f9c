"""`vllm serve --runner pooling` on two daemons, by HTTP."""

import base64
import itertools

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from tests.support.checkpoints import Checkpoint
from tests.support.pooling_reference import embedding, last_states
from tests.vllm.serving import MODEL_NAME, SMALL, serving, start_daemons

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

TEXTS = ["The driver", "A daemon owns one device and keeps its weights.", "x", "requests " * 60]
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(scope="module")
def server(root):
    flags = ("--runner", "pooling", "--pipeline-parallel-size", "2", "--enable-sleep-mode")
    with (
        start_daemons(2, root) as daemons,
        serving(daemons.endpoints, root / "demo", root, *flags, options=SMALL) as server,
    ):
        yield server


@pytest.fixture(scope="module")
def vectors(root):
    """Return the embedding of a text, by transformers."""
    tokenizer = Tokenizer.from_file(str(root / "demo" / "tokenizer.json"))
    model = transformers.LlamaForCausalLM.from_pretrained(root / "demo", dtype=torch.float32)
    reference = Checkpoint(root / "demo", model.eval())

    def vector(text):
        return embedding(last_states(reference, tokenizer.encode(text).ids)[-1])

    return vector


def ask(server, path, **body):
    answer = server.post(path, {"model": MODEL_NAME, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("form", ["float", "base64"])
def test_embeddings(server, vectors, form):
    answer = ask(server, "/v1/embeddings", input=TEXTS, encoding_format=form)
    for text, entry in zip(TEXTS, answer["data"], strict=True):
        own = entry["embedding"]
        if form == "base64":
            own = np.frombuffer(base64.b64decode(own), np.float32)
        np.testing.assert_allclose(own, vectors(text), **CLOSE)


def test_scores_and_ranks(server, vectors):
    """Cosines of embeddings."""
    wanted = [float(vectors(TEXTS[0]) @ vectors(text)) for text in TEXTS[1:]]
    answer = ask(server, "/score", queries=TEXTS[0], documents=TEXTS[1:])
    assert [each["score"] for each in answer["data"]] == pytest.approx(wanted, abs=1e-4)
    ranked = ask(server, "/rerank", query=TEXTS[0], documents=TEXTS[1:])["results"]
    scores = [each["relevance_score"] for each in ranked]
    assert scores == pytest.approx(sorted(wanted, reverse=True), abs=1e-4)
    assert all(a >= b for a, b in itertools.pairwise(scores))


def test_raw_states(server, root, vectors):
    (entry,) = ask(server, "/pooling", input=TEXTS[1], task="embed", use_activation=False)["data"]
    own = np.array(entry["data"], np.float32)
    np.testing.assert_allclose(own / np.linalg.norm(own), vectors(TEXTS[1]), **CLOSE)
    assert not np.isclose(np.linalg.norm(own), 1.0)


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/embeddings", {"dimensions": 4}, "dimensions"),
        ("/v1/embeddings", {"input": "x " * 3000}, "token"),
        ("/pooling", {"task": "classify"}, "classify"),
    ],
)
def test_bad_request_is_refused_and_others_go_on(server, vectors, path, body, named):
    answer = server.post(path, {"model": MODEL_NAME, "input": TEXTS[0], **body})
    assert answer.status_code == 400, answer.text
    assert named in answer.text
    (entry,) = ask(server, "/v1/embeddings", input=TEXTS[0])["data"]
    np.testing.assert_allclose(entry["embedding"], vectors(TEXTS[0]), **CLOSE)


def test_nothing_is_generated(server):
    assert server.try_to_complete("x", max_tokens=2).status_code in (400, 404)


def test_request_that_the_scheduler_refuses(server, vectors):
    """Its weights are gone."""
    assert server.post("/sleep?level=2").status_code == 200
    assert server.post("/wake_up").status_code == 200
    answer = server.post("/v1/embeddings", {"model": MODEL_NAME, "input": TEXTS[0]})
    assert answer.status_code == 400, answer.text
    assert "reload_weights" in answer.text
    assert server.post("/collective_rpc", {"method": "reload_weights"}).status_code == 200
    (entry,) = ask(server, "/v1/embeddings", input=TEXTS[0])["data"]
    np.testing.assert_allclose(entry["embedding"], vectors(TEXTS[0]), **CLOSE)
