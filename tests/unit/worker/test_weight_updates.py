"""Replacing a worker's weights: addresses, the state after a partial failure, and a step's error.
In this process, from disk; broadcasts are in tests/e2e."""

import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from worker_driver import WorkerDriver

from rpc_schema import lifecycle
from rpc_schema import weight_transfer as wt
from rpc_schema.errors import CheckpointError, ConfigError, StateError
from tests.unit.worker.conftest import SIZES, randomise
from worker_daemon.models.safetensors_file import SafetensorsFile


@pytest.fixture(scope="module")
def other(model_root, llama):
    """Another set of weights of the same model, in several files."""
    model = randomise(LlamaForCausalLM(LlamaConfig(**SIZES)), 77)
    model.save_pretrained(model_root / "other", max_shard_size="20KB")
    return model


@pytest.fixture
def driver(make_worker, llama):
    worker = make_worker()
    driver = WorkerDriver(worker)
    driver.init_device()
    driver.serve("llama")
    return driver


def addresses(worker):
    views = worker._model.stage.checkpoint_views()
    return {name: view.data_ptr() for name, view in views.items()}


def checksums(driver):
    message = lifecycle.ComputeWeightChecksums(**driver.ids())
    return driver.worker.compute_weight_checksums(message).checksums


def reload(driver, model):
    return driver.worker.reload_weights(wt.ReloadWeights(**driver.ids(), model=model))


def update(driver, *rounds, partial=False, model="other"):
    worker = driver.worker
    worker.init_weight_transfer_engine(
        wt.InitWeightTransferEngine(**driver.ids(), engine=wt.DiskEngine())
    )
    worker.start_weight_update(
        wt.StartWeightUpdate(**driver.ids(), format="checkpoint", partial=partial)
    )
    for names in rounds:
        source = wt.DiskSource(model=model)
        worker.update_weights(wt.UpdateWeights(**driver.ids(), names=names, source=source))
    return worker.finish_weight_update(wt.FinishWeightUpdate(**driver.ids()))


@pytest.mark.parametrize(
    ("changes", "field", "value", "loaded"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers", 2, 3),
        ({"intermediate_size": 64}, "intermediate_size", 64, 48),
        ({"num_key_value_heads": 1}, "num_key_value_heads", 1, 2),
        ({"mlp_bias": True}, "mlp_bias", True, False),
        ({"rms_norm_eps": 0.5}, "rms_norm_eps", 0.5, 1e-6),
        ({"tie_word_embeddings": True}, "tie_word_embeddings", True, False),
    ],
)
def test_weights_of_another_model_are_refused_by_what_tells_them_apart(
    driver, copy_config, changes, field, value, loaded
):
    copy_config("strange", **changes)
    before = checksums(driver)
    with pytest.raises(ConfigError, match=f"the loaded model has {loaded}") as caught:
        reload(driver, "strange")
    assert (caught.value.field, caught.value.value) == (field, value)
    assert checksums(driver) == before


def test_a_head_beside_a_tied_config_is_served_reloaded_and_updated(
    make_worker, model_root, llama, copy_config, prompts, reference
):
    for name in ("own-head", "tied", "same-head"):
        path = copy_config(name, tie_word_embeddings=True)
        tensors = load_file(model_root / "llama" / "model.safetensors")
        if name == "tied":
            del tensors["lm_head.weight"]
        if name == "same-head":
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
    driver = WorkerDriver(make_worker())
    driver.init_device()
    driver.serve("own-head")
    (prompt,) = prompts([11], seed=8)
    expected = reference(LlamaForCausalLM.from_pretrained(model_root / "own-head"), prompt, 6)
    assert expected != reference(LlamaForCausalLM.from_pretrained(model_root / "tied"), prompt, 6)
    assert driver.generate(0, prompt, 6) == expected
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= checksums(driver).keys()
    with pytest.raises(ConfigError, match="the loaded model has False") as caught:
        reload(driver, "tied")
    assert caught.value.field == "tie_word_embeddings"
    assert reload(driver, "own-head").version == 1
    assert update(driver, (), model="own-head").version == 2
    driver.reset("DEVICE_READY")
    driver.serve("tied")
    assert reload(driver, "same-head").version == 1
    for names in ((), ("lm_head.weight",)):
        with pytest.raises(ConfigError, match=r"another lm_head\.weight"):
            update(driver, names, model="own-head")
    with pytest.raises(ConfigError, match=r"one tensor for lm_head\.weight"):
        update(driver, ("model.embed_tokens.weight",), ("lm_head.weight",), model="same-head")


@pytest.mark.parametrize("way", ["reload", "update"])
def test_new_weights_lie_where_the_old_ones_did(driver, other, prompts, reference, way):
    before = addresses(driver.worker)
    if way == "reload":
        assert reload(driver, "other").version == 1
    else:
        names = sorted(other.state_dict())
        assert update(driver, tuple(names[:5]), tuple(names[5:])).version == 1
    assert addresses(driver.worker) == before
    state = other.state_dict()
    for name, view in driver.worker._model.stage.checkpoint_views().items():
        assert torch.equal(view, state[name])
    (prompt,) = prompts([11], seed=8)
    assert driver.generate(0, prompt, 6) == reference(other, prompt, 6)
    assert driver.worker.describe().weights().state == "whole"


def test_reload_whose_file_is_cut_half_way_names_what_it_has_written(
    driver, other, model_root, monkeypatch
):
    """The file is whole as its header is checked, and is cut before the third tensor is read."""
    path = model_root / "cut"
    shutil.copytree(model_root / "other", path)
    read, count = SafetensorsFile.check_whole, iter(range(100))

    def cut(file, name):
        if next(count) == 2:
            os.truncate(file.path, 4096)
        read(file, name)

    before = checksums(driver)
    monkeypatch.setattr(SafetensorsFile, "check_whole", cut)
    with pytest.raises(CheckpointError, match="is truncated: it ends within"):
        reload(driver, "cut")
    report = driver.worker.describe().weights()
    assert report.state == "dirty"
    assert "CheckpointError in reload_weights" in report.cause
    changed = {name for name, value in checksums(driver).items() if value != before[name]}
    assert set(report.dirty) == changed
    assert report.num_dirty == 2
    with pytest.raises(StateError, match="finish a complete weight update, or reload_weights"):
        driver.worker.execute_model(None, [])
    monkeypatch.undo()
    reload(driver, "llama")
    assert checksums(driver) == before
    assert driver.worker.describe().weights().state == "whole"


def test_missing_shard_is_found_before_the_first_byte(driver, other, model_root):
    directory = model_root / "other-without-a-shard"
    shutil.copytree(model_root / "other", directory)
    sorted(directory.glob("*.safetensors"))[-1].unlink()
    before = checksums(driver)
    with pytest.raises(CheckpointError, match="is missing"):
        reload(driver, directory.name)
    assert checksums(driver) == before
    assert driver.worker.describe().weights().state == "whole"


def test_new_driver_finds_an_open_update_dirty_and_a_reset_ends_it(driver, other):
    worker = driver.worker
    worker.start_weight_update(wt.StartWeightUpdate(**driver.ids(), format="kernel"))
    worker.on_attach()
    report = worker.describe().weights()
    assert (report.state, report.cause) == ("dirty", "its driver was replaced")
    worker.reset(lifecycle.Reset(**driver.ids(), to="DEVICE_READY"))
    assert worker.describe().weights() is None
    driver.serve("llama")
    assert worker.describe().weights().state == "whole"
