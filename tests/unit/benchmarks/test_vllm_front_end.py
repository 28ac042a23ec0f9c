"""The benchmark of vLLM's server: its tokenizer, what it takes from vLLM's reports, and the closed
loop of our driver on fake daemons. A run of all of it needs vLLM."""

import random
from dataclasses import replace

import pytest
from tokenizers import Tokenizer

from benchmarks import vllm_front_end as front_end
from tests.unit.client.conftest import connect, directory, fakes, worker_config
from worker_client.scheduler import scheduler_limits

__all__ = ["connect", "directory", "fakes"]

NUM_BYTES = 256


def test_the_tokenizer_has_a_token_for_each_word(tmp_path):
    size = random.randint(NUM_BYTES + 1000, NUM_BYTES + 30_000)
    front_end.write_word_tokenizer(tmp_path, size)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == size
    tokens = [random.randrange(NUM_BYTES, size) for _ in range(500)]
    words = tokenizer.decode(tokens)
    assert len(words.split()) == 500
    assert tokenizer.encode(words).ids == tokens
    text = "".join(chr(random.randint(1, 0x2FFF)) for _ in range(200))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize("size", [NUM_BYTES - 1, 1_000_000])
def test_a_vocabulary_without_enough_words_is_refused(tmp_path, size):
    with pytest.raises(ValueError, match=f"vocab_size is {size}; fix: {NUM_BYTES} to"):
        front_end.write_word_tokenizer(tmp_path, size)


def test_requests_arrive_as_those_of_the_report():
    report = {"start_times": [7.5, 7.0, 9.0], "input_lens": [3, 4, 5], "output_lens": [6, 7, 8]}
    requests = front_end.requests_of(report, 50, seed=1)
    assert [request.arrival_s for request in requests] == [0.0, 0.5, 2.0]
    assert [len(request.prompt) for request in requests] == [4, 3, 5]
    assert [request.num_out for request in requests] == [7, 6, 8]
    assert all(0 <= token < 50 for request in requests for token in request.prompt)


def test_latencies_are_all_of_the_report():
    report = {
        "duration": 2.0,
        "total_output_tokens": 5,
        "ttfts": [0.1, 0.2],
        "itls": [[0.01, 0.02], [0.03]],
    }
    latencies = front_end.latencies_of(report)
    assert (latencies.ttft_s, latencies.itl_s) == ([0.1, 0.2], [0.01, 0.02, 0.03])
    assert (latencies.seconds, latencies.num_tokens) == (2.0, 5)


def test_parts_of_a_start_add_up_to_the_whole():
    moments = {"imports": 3.0, "engine process": 5.0, "attach": 5.5, "first token": 9.0}
    parts = front_end.parts_of(moments, 1.0)
    assert parts == {"imports": 2.0, "engine process": 2.0, "attach": 0.5, "first token": 3.5}
    late = front_end.parts_of({**moments, "prepare": 5.4}, 1.0)
    assert late["attach"] == pytest.approx(0.4) and late["prepare"] == 0.0
    assert sum(late.values()) == pytest.approx(8.0)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_the_closed_loop_keeps_its_number_of_requests(fakes, connect, concurrency, monkeypatch):
    config = worker_config(1, max_model_len=128)
    group = connect(fakes(1), 1)
    group.attach()
    loaded = group.prepare(config, num_gpu_blocks=64)
    limits = replace(scheduler_limits(loaded, config), max_num_seqs=8)
    lengths = [(random.randint(2, 9), random.randint(2, 9)) for _ in range(10)]
    report = {
        "start_times": [0.0] * 10,
        "input_lens": [num_in for num_in, _ in lengths],
        "output_lens": [num_out for _, num_out in lengths],
    }
    requests = front_end.requests_of(report, limits.vocab_size, seed=1)
    most = 0
    execute = group.execute_model

    def counted(output):
        nonlocal most
        num_requests = len(output.num_scheduled_tokens) + len(output.decode_req_ids)
        most = max(most, num_requests)
        return execute(output)

    monkeypatch.setattr(group, "execute_model", counted)
    latencies = front_end.serve_closed(group, limits, requests, concurrency)
    assert most == concurrency
    assert len(latencies.ttft_s) == 10
    assert latencies.num_tokens == sum(num_out for _, num_out in lengths)
    assert len(latencies.itl_s) == latencies.num_tokens - 10
