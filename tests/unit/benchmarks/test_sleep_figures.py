"""The sleep benchmark runs with a worker and prints its figures."""

import json
import sys

from benchmarks import sleep

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 1200, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 10000.0,
    "tie_word_embeddings": False, "torch_dtype": "float32", "eos_token_id": 0,
}  # fmt: skip


def test_figures_of_each_level(tmp_path, monkeypatch, capsys):
    model = tmp_path / "tiny"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    out = tmp_path / "out.json"
    options = ["--model", str(model), "--device", "cpu", "--num-blocks", "256", "--cycles", "2"]
    monkeypatch.setattr(sys, "argv", ["sleep", *options, "--out", str(out)])
    sleep.main()
    names = [figure["name"] for figure in json.loads(out.read_text())]
    for level in (1, 2):
        assert {f"sleep {level}", f"wake {level}", f"device memory asleep {level}"} <= set(names)
    shown = capsys.readouterr().out
    assert "greedy tokens equal those before level 1" in shown
    assert "asleep 2   GiB: weights 0.000, buffers 0.000, kv_cache 0.000" in shown
