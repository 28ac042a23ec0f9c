"""The record of tokens per second through two kills: what counts as lost, and a short run of it all
on the CPU."""

import json
import subprocess
import sys

import pytest

from benchmarks.kill_timeline import Received, buckets, num_equal
from benchmarks.observed_driver import Load, Told

LOAD = Load(seed=5, vocab_size=300, prompt_len=4, least_tokens=3, most_tokens=3)
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 300,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}
SHORT = "--device cpu --pp 2 --requests 4 --prompt-len 20 --least-tokens 30 --most-tokens 60"
TIMES = "--seconds 1 --driver-kill 0.2 --daemon-kill 0.5 --undisturbed 1"


def received(*told):
    got = Received(LOAD, {7: []})
    for second, each in enumerate(told):
        got.take(float(second), each)
    return got


def test_tokens_that_the_next_driver_tells_again_count_once():
    got = received(Told([7, 7], [0, 1], [40, 41]), Told([7, 7, 7], [0, 1, 2], [40, 41, 42]))
    assert got.tokens == {7: [40, 41, 42]}
    assert got.arrivals == [(0.0, 2), (1.0, 1)]
    assert got.num_lost == 0
    assert got.has_ended(7)


@pytest.mark.parametrize(
    "wrong",
    [Told([7], [0], [39]), Told([7], [2], [42])],
    ids=["another token in its place", "a gap before it"],
)
def test_changed_and_missing_tokens_are_lost_tokens(wrong):
    assert received(Told([7], [0], [40]), wrong).num_lost == 1


def test_buckets_hold_the_tokens_of_the_record_alone():
    arrivals = [(9.9, 1), (10.0, 2), (10.49, 4), (10.5, 8), (11.9, 16), (12.0, 32)]
    assert buckets(arrivals, origin=10.0, seconds=2.0, bucket_s=0.5) == [6, 8, 0, 16]


def test_requests_are_equal_in_all_tokens_or_not():
    assert num_equal({1: [5, 6], 2: [5, 6]}, {1: [5, 6], 2: [5, 7]}) == 1


@pytest.mark.exhaustive  # the demo of the wheel kills both as well
@pytest.mark.slow
def test_two_kills_lose_no_token_on_the_cpu(tmp_path):
    """The same tokens as in an undisturbed run."""
    model, out = tmp_path / "tiny", tmp_path / "out.json"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY))
    words = ["--model", str(model), *SHORT.split(), *TIMES.split(), "--out", str(out)]
    subprocess.run([sys.executable, "-m", "benchmarks.kill_timeline", *words], check=True)
    record = json.loads(out.read_text())
    assert record["tokens_lost"] == 0
    assert record["num_equal"] == record["num_requests"] >= 4
    assert sum(record["tokens"]) > 0
    assert [kill["what"] for kill in record["kills"]] == ["driver", "daemon"]
    assert record["kills"][0]["num_adopted"] == 4
    assert all(kill["outage_s"] > 0 for kill in record["kills"])
    phases = record["kills"][1]["replaced_s"]
    assert phases["wait"] > 0 and sum(phases.values()) < record["kills"][1]["outage_s"]
