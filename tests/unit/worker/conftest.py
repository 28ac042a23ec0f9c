"""Two tiny random checkpoints under one root, and workers over them."""

import json

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from worker_driver import WorkerDriver

from worker_daemon.worker.worker import Worker

SIZES = {
    "vocab_size": 151,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def randomise(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
    return model.eval()


@pytest.fixture(scope="session")
def model_root(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def llama(model_root):
    model = randomise(LlamaForCausalLM(LlamaConfig(**SIZES)), 1)
    model.save_pretrained(model_root / "llama")
    return model


@pytest.fixture(scope="session")
def qwen(model_root):
    sizes = SIZES | {"hidden_size": 48, "head_dim": 16, "vocab_size": 97}
    model = randomise(Qwen3ForCausalLM(Qwen3Config(**sizes)), 2)
    model.save_pretrained(model_root / "qwen", max_shard_size="20KB")
    return model


@pytest.fixture
def copy_config(model_root, llama):
    """(name, changed fields) -> a directory with llama's config.json, changed, and no weights."""

    def copy(name, **changes):
        directory = model_root / name
        directory.mkdir(exist_ok=True)
        config = json.loads((model_root / "llama" / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | changes))
        return directory

    return copy


@pytest.fixture
def make_worker(model_root):
    """() -> a fresh worker over the root; closed at the end."""
    workers = []

    def make(device="cpu"):
        worker = Worker(device, [model_root], lambda phase, seconds, done=0.0: None)
        workers.append(worker)
        return worker

    yield make
    for worker in workers:
        worker.close()


@pytest.fixture(scope="session")
def ready_worker(model_root, llama):
    worker = Worker("cpu", [model_root], lambda phase, seconds, done=0.0: None)
    driver = WorkerDriver(worker)
    driver.init_device()
    driver.serve("llama")
    yield worker
    worker.close()


@pytest.fixture
def serving(ready_worker):
    """A new driver of a worker that is READY with llama; nobody's requests are left."""
    ready_worker.on_attach()
    return WorkerDriver(ready_worker)


@pytest.fixture
def prompts():
    """(lengths, seed) -> random prompts."""

    def make(lengths, seed=0, vocab_size=SIZES["vocab_size"]):
        rng = np.random.default_rng(seed)
        return [rng.integers(0, vocab_size, length).tolist() for length in lengths]

    return make


@pytest.fixture
def reference():
    """(model, prompt, count) -> transformers' greedy tokens."""

    def generate(model, prompt, count):
        with torch.no_grad():
            out = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        return out[0, len(prompt) :].tolist()

    return generate
