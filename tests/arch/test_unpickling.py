"""A serving worker never unpickles, unmarshals, compiles or executes anything: checked by an audit
hook in a separate process."""

import subprocess
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.waiting import PATIENCE_S

SCRIPT = Path(__file__).with_name("serve_audited.py")


def test_serving_raises_no_audit_event_of_code_or_pickles(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "tiny")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), "tiny"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "{}"
