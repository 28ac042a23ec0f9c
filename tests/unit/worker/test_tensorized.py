"""Saving and loading weights through the tensorizer library with one worker in this process: files,
refusals, and failed saves, which change nothing. Without the library, an optional extra, only its
error is tested."""

import errno
import json
import os
import random
import subprocess
import sys
from hashlib import blake2b
from pathlib import Path

import pytest
import torch
from worker_driver import WorkerDriver

from rpc_schema import lifecycle
from rpc_schema.errors import CapacityError, CheckpointError, ConfigError, WorkerError
from tests.support.waiting import PATIENCE_S
from worker_daemon.worker.worker import Worker

KILLED = Path(__file__).with_name("killed_save.py")


@pytest.fixture
def library():
    """The tests that write need it."""
    return pytest.importorskip("tensorizer")


@pytest.fixture
def save_root(tmp_path):
    root = tmp_path / "saved"
    root.mkdir(mode=0o700)
    return root


@pytest.fixture
def start(model_root, save_root, llama, qwen):
    """start(model, **options) -> a driver of a worker that may save, with a model."""
    workers = []

    def make(model=None, **options):
        worker = Worker("cpu", [model_root], lambda phase, seconds, done=0.0: None, save_root)
        workers.append(worker)
        driver = WorkerDriver(worker)
        driver.init_device()
        if model is not None:
            driver.load_model(str(model), **options)
        return driver

    yield make
    for worker in workers:
        worker.close()


def load(start, **options):
    return start("set", load_format="tensorizer", **options)


def save(driver, name="set"):
    """As the client does it: what fails is thrown away."""
    identity = os.urandom(16)
    try:
        reply = driver.worker.save_tensorized_model(
            lifecycle.SaveTensorizedModel(**driver.ids(), save=identity, name=name)
        )
        finish(driver, identity, keep=True)
    except WorkerError:
        finish(driver, identity, keep=False)
        raise
    return reply


def finish(driver, identity, *, keep):
    message = lifecycle.FinishShardedState(**driver.ids(), save=identity, keep=keep)
    driver.worker.finish_sharded_state(message)


def checksums(driver):
    message = lifecycle.ComputeWeightChecksums(**driver.ids())
    return driver.worker.compute_weight_checksums(message).checksums


def digests(model, dtype=torch.float32):
    return {
        name: blake2b(
            tensor.to(dtype).contiguous().view(torch.uint8).numpy().tobytes(), digest_size=16
        ).digest()
        for name, tensor in model.state_dict().items()
    }


def file_of(save_root):
    (path,) = (save_root / "set").glob("*/model-rank-0-part-0.tensors")
    return path


def snapshot(directory):
    return {p.relative_to(directory): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


# Without the library.


def test_without_the_library_the_extra_is_named(start, save_root, prompts, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorizer", None)
    driver = start()
    driver.serve("llama")
    with pytest.raises(ConfigError, match=r'pip install "worker-daemon\[tensorizer\]"') as caught:
        save(driver)
    assert (caught.value.field, caught.value.value) == ("name", "set")
    assert not list(save_root.iterdir())
    assert len(driver.generate(0, prompts([9])[0], 2)) == 2
    with pytest.raises(ConfigError, match=r"worker-daemon\[tensorizer\]") as caught:
        load(start)
    assert (caught.value.field, caught.value.value) == ("load_format", "tensorizer")


# What is saved is what is loaded.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_round_trip(library, start, save_root, qwen, dtype):
    driver = start("qwen", dtype=dtype)
    reply = save(driver)
    expected = digests(qwen, getattr(torch, dtype))
    assert reply.size_bytes == sum(t.numel() for t in qwen.state_dict().values()) * (
        4 if dtype == "float32" else 2
    )
    assert {path.name for path in file_of(save_root).parent.iterdir()} == {
        *("config.json", "generation_config.json", "rank-0.json", "model-rank-0-part-0.tensors")
    }
    with file_of(save_root).open("rb") as file:  # by the library alone
        tensors = library.TensorDeserializer(file, device="cpu", verify_hash=True)
        assert {name: t.dtype for name, t in tensors.items()} == dict.fromkeys(
            expected, getattr(torch, dtype)
        )
        tensors.close()
    again = load(start, verify_checksums=True)
    assert checksums(again) == checksums(driver) == expected


def test_loaded_model_generates_the_same(library, start, qwen, prompts, reference):
    save(start("qwen"))
    driver = start()
    driver.serve("set", load_format="tensorizer")
    (prompt,) = prompts([19], vocab_size=97)
    assert driver.generate(0, prompt, 8) == reference(qwen, prompt, 8)


def test_next_save_replaces_the_set_whatever_its_files_are(library, start, save_root, qwen):
    save(start("llama"))
    save(start("qwen"))
    assert len(list((save_root / "set").iterdir())) == 2
    assert checksums(load(start)) == digests(qwen)
    other = start("llama")
    identity = os.urandom(16)
    other.worker.save_sharded_state(
        lifecycle.SaveShardedState(
            **{**other.ids(), "save": identity, "name": "set", "max_size_bytes": 1 << 30},
            pattern="{rank}-{part}.safetensors",
        )
    )
    finish(other, identity, keep=True)
    with pytest.raises(ConfigError, match="fix: sharded_state") as caught:
        load(start)
    assert caught.value.field == "load_format"
    save(other)
    with pytest.raises(ConfigError, match="fix: tensorizer"):
        start("set", load_format="sharded_state")


@pytest.mark.parametrize("name", ["", "..", "a/b", "/tmp/x", "a\0b"], ids=repr)
def test_name_that_is_none_is_refused(library, start, save_root, name):
    with pytest.raises(ConfigError) as caught:
        save(start("llama"), name)
    assert caught.value.field == "name"
    assert not list(save_root.iterdir())


# Files that are damaged.


def test_damaged_file_is_told_or_costs_nothing(library, start, save_root, llama):
    """Truncated anywhere, or with bits turned: never other weights, never another error."""
    save(start("llama"))
    path, rng = file_of(save_root), random.Random(9)
    whole = path.read_bytes()
    told = 0
    for round_ in range(24):
        damaged = bytearray(whole)
        if round_ % 3 == 0:
            del damaged[rng.randrange(len(whole)) :]
        else:  # of the header and the description of tensors, or of the tensors
            end = 3000 if round_ % 3 == 1 else len(whole)
            for _ in range(8):
                damaged[rng.randrange(end)] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            loaded = load(start, verify_checksums=True)
        except CheckpointError as error:
            told += 1
            assert str(path) in str(error)
        else:
            assert checksums(loaded) == digests(llama)
    assert told > 12
    path.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        load(start)


# Saves that fail.


@pytest.mark.parametrize("call", ["_pwrite_compat", "fsync"])
def test_full_disk_at_any_point_leaves_the_old_set_and_nothing_else(
    library, start, save_root, llama, monkeypatch, call
):
    save(start("llama"))
    before = snapshot(save_root)
    # The library's own name of os.pwrite, which it calls on threads of its own; ours of the rest.
    where = os if call == "fsync" else library.TensorSerializer
    driver, real = start("qwen"), getattr(where, call)
    for point in (0, 1, 2, 3) if call == "fsync" else (0, 1, 9, 40):
        calls = []

        def fail(*arguments, calls=calls, point=point):
            calls.append(arguments)
            if len(calls) > point:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(where, call, fail if where is os else staticmethod(fail))
            with pytest.raises(CapacityError, match="free space"):
                save(driver)
        assert calls
        assert snapshot(save_root) == before
    assert checksums(load(start)) == digests(llama)
    save(driver)
    assert len(list((save_root / "set").iterdir())) == 2


def test_killed_at_any_point_leaves_a_whole_set(library, model_root, save_root, llama, qwen):
    done = subprocess.run(
        [sys.executable, str(KILLED), str(model_root), str(save_root), "tensorizer"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "PYTHONPATH": "."},
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    old, new = (
        {name: value.hex() for name, value in digests(model).items()} for model in (llama, qwen)
    )
    assert len(report["checksums"]) > 6
    assert all(found in (old, new) for found in report["checksums"])
    assert report["checksums"][0] == old
    assert set(report["entries_after_the_next_save"]) == {2}
    assert report["unpickled"] == []
