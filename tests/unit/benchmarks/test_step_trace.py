"""A worker driven in this process: its steps are those of a daemon, and their times add up."""

import json
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import step_trace
from benchmarks.stage_driver import StageDriver, bitmap, pipelined
from rpc_schema.codec import decode_step
from rpc_schema.errors import InvalidStepError

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 1200, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 10000.0,
    "tie_word_embeddings": False, "torch_dtype": "float32", "eos_token_id": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    model = tmp_path_factory.mktemp("models") / "tiny"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    driver = StageDriver(model, "cpu", 512, "float32", num_blocks=256)
    driver.start()
    yield driver
    driver.worker.close()


def tokens_of(reply):
    message, _ = reply.result()
    return np.frombuffer(message.sampled_token_ids, "<i4")


def test_admitted_requests_decode_until_their_room_is_used(driver):
    driver.admit(5, 40, 20)
    for _ in range(20):
        message = decode_step(driver.decode_frames(5))
        assert tokens_of(driver.worker.execute_model(message, [])).size == 5
    message = decode_step(driver.decode_frames(5))
    while (reply := try_step(driver, message)) is not None:  # the last block has room left
        assert tokens_of(reply).size == 5
        message = decode_step(driver.decode_frames(5))
    driver.admit(2, 100, 3)
    message = decode_step(driver.decode_frames(2))
    assert tokens_of(driver.worker.execute_model(message, [])).size == 2


def try_step(driver, message):
    try:
        return driver.worker.execute_model(message, [])
    except InvalidStepError:
        return None


def test_too_many_requests_for_the_cache_are_refused(driver):
    with pytest.raises(ValueError, match="blocks are needed"):
        driver.admit(100, 100, 100)


def test_bitmap_names_the_slots():
    assert bitmap(np.array([0, 3, 9])) == bytes([0b1001, 0b10])


def test_pipelined_keeps_two_in_flight():
    open_results = []

    class Reply:
        def result(self):
            open_results.remove(self)

    def launch():
        assert len(open_results) <= 1
        open_results.append(Reply())
        return open_results[-1]

    pipelined(7, launch)
    assert open_results == []


def test_phases_of_a_step_add_up(driver, monkeypatch):
    monkeypatch.setattr(step_trace, "PHASE_STEPS", 12)
    originals = [getattr(kind, name) for _, kind, name in step_trace.TIMED_METHODS]
    phases = {phase.name: phase for phase in step_trace.host_phases(driver, 4)}
    assert [getattr(kind, name) for _, kind, name in step_trace.TIMED_METHODS] == originals
    assert all(0 < phase.p50 <= phase.p99 for phase in phases.values())
    everything = phases.pop("all")
    assert sum(phase.p50 for phase in phases.values()) < 1.5 * everything.p99
    assert phases["launch"].p50 > phases["apply"].p50


def test_workloads_come_out_of_the_command_line():
    command = [sys.executable, "-m", "benchmarks.workloads", "decode_bs64", "--vocab-size", "50"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 64
    assert {len(line["prompt_token_ids"]) for line in lines} == {32}
    assert {line["max_tokens"] for line in lines} == {256}
    assert all(max(line["prompt_token_ids"]) < 50 for line in lines)
