"""Sparse deltas from disk, in this process: what a request with wrong indices leaves, and the state
of tensors that a delta alone cannot complete. Broadcasts are in tests/e2e."""

import random

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_weight_updates import addresses, checksums, update
from worker_driver import WorkerDriver

from rpc_schema import weight_transfer as wt
from rpc_schema.errors import ConfigError, StateError
from worker_client.trainer.deltas import SparseDelta, as_tensors, find_change

UP = "model.layers.1.mlp.up_proj.weight"
NORM = "model.norm.weight"


@pytest.fixture
def driver(make_worker, llama):
    driver = WorkerDriver(make_worker())
    driver.init_device()
    driver.serve("llama")
    return driver


@pytest.fixture
def write(model_root):
    """(name, changes) -> a directory of the disk engine with these tensors."""

    def write(name, changes):
        (model_root / name).mkdir(exist_ok=True)
        save_file(as_tensors(changes), model_root / name / "model.safetensors")
        return name

    return write


def changed(model_root, count):
    """llama's tensors with a few elements changed, and what tells them from the old ones."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    old = load_file(model_root / "llama" / "model.safetensors")
    new = {name: tensor.clone() for name, tensor in old.items()}
    for tensor in new.values():
        places = torch.randperm(tensor.numel(), generator=generator)[:count]
        tensor.view(-1)[places] = torch.randn(len(places), generator=generator)
    return new, {name: find_change(old[name], new[name]) for name in old}


@pytest.mark.parametrize("num_rounds", [1, 2])
def test_deltas_of_files_make_the_changed_model(driver, model_root, write, num_rounds):
    new, changes = changed(model_root, 11)
    kinds = {type(change) for change in changes.values()}
    assert kinds == {SparseDelta}
    del changes[UP]
    changes[UP] = new[UP]
    name = write("delta", changes)
    before = addresses(driver.worker)
    rounds = [()]
    if num_rounds == 2:
        names = list(as_tensors(changes))
        halves = [[n for n in names if (".layers.1." in n) == own] for own in (True, False)]
        rounds = [tuple(reversed(half)) for half in halves]
    assert update(driver, *rounds, partial=True, model=name).version == 1
    assert addresses(driver.worker) == before
    for tensor, view in driver.worker._model.stage.checkpoint_views().items():
        assert torch.equal(view, new[tensor]), tensor
    # Absolute values: the same delta again changes nothing.
    sums = checksums(driver)
    update(driver, (), partial=True, model=name)
    assert checksums(driver) == sums


@pytest.mark.parametrize(
    ("indices", "index", "words"),
    [([3, 1536], 1536, "outside"), ([3, 3], 3, "twice"), ([5, 3], 3, "comes after 5")],
)
def test_wrong_indices_leave_everything_as_it_was(driver, model_root, write, indices, index, words):
    new, changes = changed(model_root, 5)
    wrong = SparseDelta(torch.tensor(indices), torch.zeros(2))
    before, ids = checksums(driver), driver.ids
    name = write("wrong", changes | {UP: wrong})
    with pytest.raises(ConfigError, match=words) as caught:
        update(driver, (), partial=True, model=name)
    assert (caught.value.field, caught.value.value) == (f"{UP}.indices", index)
    assert checksums(driver) == before
    weights = driver.worker.describe().weights()
    assert (weights.state, weights.num_dirty, weights.num_missing) == ("updating", 0, 0)
    # The update is open, and takes the right ones.
    source = wt.DiskSource(model=write("right", changes))
    driver.worker.update_weights(wt.UpdateWeights(**ids(), source=source))
    driver.worker.finish_weight_update(wt.FinishWeightUpdate(**ids()))
    for tensor, view in driver.worker._model.stage.checkpoint_views().items():
        assert torch.equal(view, new[tensor]), tensor


def test_a_delta_completes_no_tensor_that_was_not_complete(driver, model_root, write):
    new, changes = changed(model_root, 5)
    driver.worker.start_weight_update(
        wt.StartWeightUpdate(**driver.ids(), format="checkpoint", partial=False)
    )
    driver.worker.on_attach()  # every tensor is missing from here on
    name = write("delta", {NORM: changes[NORM]})
    with pytest.raises(StateError, match="have not been written"):
        update(driver, (), partial=True, model=name)
    whole = write("whole", {name: tensor for name, tensor in new.items() if name != NORM})
    with pytest.raises(StateError, match=rf"1 tensors.*{NORM}"):
        update(driver, (), partial=True, model=whole)
    source = wt.DiskSource(model=write("rest", {NORM: new[NORM]}))
    driver.worker.update_weights(wt.UpdateWeights(**driver.ids(), source=source))
    driver.worker.finish_weight_update(wt.FinishWeightUpdate(**driver.ids()))
    assert driver.worker.describe().weights().state == "whole"
