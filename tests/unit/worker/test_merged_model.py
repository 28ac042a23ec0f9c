"""A worker that serves a checkpoint with merged tensors (transformers' Phi-3): tokens, checksums, a
saved set, and weights replaced from disk."""

import os
from hashlib import blake2b

import pytest
from transformers import Phi3Config, Phi3ForCausalLM
from worker_driver import WorkerDriver

from rpc_schema import lifecycle
from rpc_schema import weight_transfer as wt
from tests.unit.worker.conftest import SIZES, randomise
from worker_daemon.worker.worker import Worker

PATTERN = "model-rank-{rank}-part-{part}.safetensors"


@pytest.fixture
def models(tmp_path):
    """Two sets of weights of one model, in directories `0` and `1`."""
    config = Phi3Config(**SIZES, pad_token_id=0, eos_token_id=None, bos_token_id=None)
    made = [randomise(Phi3ForCausalLM(config), seed) for seed in (5, 6)]
    for index, model in enumerate(made):
        model.save_pretrained(tmp_path / str(index), max_shard_size="20KB")
    return made


@pytest.fixture
def driver(models, tmp_path):
    root = tmp_path / "saved"
    root.mkdir(mode=0o700)
    worker = Worker("cpu", [tmp_path], lambda phase, seconds, done=0.0: None, root)
    driver = WorkerDriver(worker)
    driver.init_device()
    driver.serve("0")
    yield driver
    worker.close()


def checksums(driver):
    message = lifecycle.ComputeWeightChecksums(**driver.ids())
    return driver.worker.compute_weight_checksums(message).checksums


def digests(model):
    return {
        name: blake2b(tensor.numpy().tobytes(), digest_size=16).digest()
        for name, tensor in model.state_dict().items()
    }


def test_weights_come_and_go(driver, models, prompts, reference, tmp_path):
    worker = driver.worker
    (prompt,) = prompts([17], seed=3)
    assert checksums(driver) == digests(models[0])
    assert driver.generate(0, prompt, 6) == reference(models[0], prompt, 6)

    worker.reload_weights(wt.ReloadWeights(**driver.ids(), model="1"))
    assert checksums(driver) == digests(models[1])
    assert driver.generate(1, prompt, 6) == reference(models[1], prompt, 6)

    engine = wt.DiskEngine()
    worker.init_weight_transfer_engine(wt.InitWeightTransferEngine(**driver.ids(), engine=engine))
    worker.start_weight_update(
        wt.StartWeightUpdate(**driver.ids(), format="checkpoint", partial=False)
    )
    source = wt.DiskSource(model="0")
    names = tuple(sorted(models[0].state_dict()))
    for part in (names[:3], names[3:]):
        worker.update_weights(wt.UpdateWeights(**driver.ids(), names=part, source=source))
    worker.finish_weight_update(wt.FinishWeightUpdate(**driver.ids()))
    assert checksums(driver) == digests(models[0])

    save = os.urandom(16)
    worker.save_sharded_state(
        lifecycle.SaveShardedState(
            **driver.ids(), save=save, name="set", pattern=PATTERN, max_size_bytes=20_000
        )
    )
    worker.finish_sharded_state(lifecycle.FinishShardedState(**driver.ids(), save=save, keep=True))
    driver.reset("DEVICE_READY")
    saved = str(tmp_path / "saved" / "set")
    driver.serve(saved, load_format="sharded_state", verify_checksums=True)
    assert checksums(driver) == digests(models[0])
    assert driver.generate(2, prompt, 6) == reference(models[0], prompt, 6)
