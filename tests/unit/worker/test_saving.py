"""Saving and loading weights with one worker in this process: files, refusals, and failed saves,
which change nothing."""

import errno
import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from worker_driver import WorkerDriver

from rpc_schema import lifecycle
from rpc_schema.errors import CapacityError, CheckpointError, ConfigError, WorkerError
from tests.support.waiting import PATIENCE_S
from worker_daemon.worker.worker import Worker

pytestmark = pytest.mark.slow

PATTERN = "model-rank-{rank}-part-{part}.safetensors"
KILLED = Path(__file__).with_name("killed_save.py")


@pytest.fixture
def save_root(tmp_path):
    root = tmp_path / "saved"
    root.mkdir(mode=0o700)
    return root


@pytest.fixture
def start(model_root, save_root, llama, qwen):
    """start(model, **options) -> a driver of a worker that may save, with a model."""
    workers = []

    def make(model=None, root=save_root, **options):
        worker = Worker("cpu", [model_root], lambda phase, seconds, done=0.0: None, root)
        workers.append(worker)
        driver = WorkerDriver(worker)
        driver.init_device()
        if model is not None:
            driver.load_model(str(model), **options)
        return driver

    yield make
    for worker in workers:
        worker.close()


def checksums(driver):
    message = lifecycle.ComputeWeightChecksums(**driver.ids())
    return driver.worker.compute_weight_checksums(message).checksums


def write(driver, name="set", pattern=PATTERN, max_size_bytes=5 << 30, save=None):
    """The first half of a save; returns its id and the reply."""
    save = save or os.urandom(16)
    message = lifecycle.SaveShardedState(
        **driver.ids(), save=save, name=name, pattern=pattern, max_size_bytes=max_size_bytes
    )
    return save, driver.worker.save_sharded_state(message)


def finish(driver, save, keep=True):
    message = lifecycle.FinishShardedState(**driver.ids(), save=save, keep=keep)
    driver.worker.finish_sharded_state(message)


def save(driver, name="set", **options):
    """As the client does it: what fails is thrown away."""
    identity = os.urandom(16)
    try:
        write(driver, name, save=identity, **options)
        finish(driver, identity)
    except WorkerError:
        finish(driver, identity, keep=False)
        raise


def snapshot(directory):
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def files_of(home):
    """The directory of the save in use, and its tensor files by name."""
    current = home / json.loads((home / "index.json").read_text())["save"]
    return current, {path.name: path for path in current.glob("*.safetensors")}


def digest(tensor):
    return blake2b(tensor.contiguous().numpy().tobytes(), digest_size=16).digest()


def reference_digests(model):
    return {name: digest(tensor) for name, tensor in model.state_dict().items()}


# What is saved is what is loaded.


def test_checksums_are_those_of_the_checkpoint_s_tensors(start, llama, qwen):
    for name, model in (("llama", llama), ("qwen", qwen)):
        assert checksums(start(name)) == reference_digests(model)


def test_checksums_follow_the_dtype(start, llama):
    found = checksums(start("llama", dtype="float16"))
    halves = {name: digest(tensor.half()) for name, tensor in llama.state_dict().items()}
    assert found == halves


@pytest.mark.parametrize("max_size_bytes", [1, 20_000, 5 << 30])
def test_round_trip(start, save_root, qwen, prompts, reference, max_size_bytes):
    driver = start("qwen")
    _, reply = write(driver, max_size_bytes=max_size_bytes, save=bytes(16))
    assert not (save_root / "set" / "index.json").exists()
    finish(driver, bytes(16))
    _, files = files_of(save_root / "set")
    state = qwen.state_dict()
    assert reply.num_files == len(files)
    assert reply.size_bytes == sum(t.numel() * t.element_size() for t in state.values())
    loaded = {}
    for path in files.values():
        tensors = load_file(path)
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        assert size <= max_size_bytes or len(tensors) == 1
        loaded |= tensors
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], state[name]) for name in state)

    again = start()
    again.serve(str(save_root / "set"), load_format="sharded_state", verify_checksums=True)
    assert checksums(again) == reference_digests(qwen)
    (prompt,) = prompts([19], vocab_size=97)
    assert again.generate(0, prompt, 8) == reference(qwen, prompt, 8)


def test_dtype_is_the_saved_one_unless_another_is_asked_for(start):
    driver = start("llama", dtype="bfloat16")
    save(driver)
    again = start("set", load_format="sharded_state")
    assert checksums(again) == checksums(driver)
    with pytest.raises(ConfigError, match="bfloat16") as caught:
        start("set", load_format="sharded_state", dtype="float32")
    assert (caught.value.field, caught.value.value) == ("dtype", "float32")


def test_saving_goes_on_while_steps_are_served(start, prompts, reference, llama):
    driver = start()
    driver.serve("llama")
    (prompt,) = prompts([9])
    save(driver)
    assert driver.generate(0, prompt, 6) == reference(llama, prompt, 6)


def test_saved_set_can_be_saved_again_when_its_directory_is_gone(start, save_root):
    save(start("llama"), "first")
    again = start("first", load_format="sharded_state")
    shutil.rmtree(save_root / "first")
    save(again, "second")
    assert checksums(start("second", load_format="sharded_state")) == checksums(again)


def test_each_file_and_all_hashing_may_take_longer_than_any_step(model_root, save_root, llama):
    phases = []
    worker = Worker("cpu", [model_root], lambda *phase, **_: phases.append(phase), save_root)
    driver = WorkerDriver(worker)
    driver.init_device()
    driver.load_model("llama")
    del phases[:]
    _, reply = write(driver, max_size_bytes=20_000)
    checksums(driver)
    worker.close()
    assert [phase for phase, _ in phases] == ["SAVING"] * reply.num_files + ["HASHING"]
    assert min(seconds for _, seconds in phases) >= 600


# One set a name.


def test_next_save_replaces_the_set_and_leaves_nothing_of_it(start, save_root, qwen):
    save(start("llama"), max_size_bytes=1)
    save(start("qwen"))
    current, files = files_of(save_root / "set")
    assert {path.name for path in (save_root / "set").iterdir()} == {"index.json", current.name}
    assert list(files) == ["model-rank-0-part-0.safetensors"]
    loaded = start("set", load_format="sharded_state", verify_checksums=True)
    assert checksums(loaded) == reference_digests(qwen)


def test_save_that_is_thrown_away_leaves_nothing(start, save_root):
    driver = start("llama")
    identity, _ = write(driver)
    finish(driver, identity, keep=False)
    assert not list(save_root.iterdir())
    with pytest.raises(ConfigError, match="no such save"):
        finish(driver, identity)
    finish(driver, identity, keep=False)


def test_next_save_of_a_worker_ends_its_unfinished_one(start, save_root):
    driver = start("llama")
    write(driver, "first")
    save(driver, "second")
    assert [path.name for path in save_root.iterdir()] == ["second"]


def test_what_a_dead_save_left_makes_room_for_the_next_one(start, save_root):
    driver, home = start("llama"), save_root / "set"
    save(driver)
    before = snapshot(home)
    for name in ("0" * 32, "notes"):
        (home / name).mkdir()
    (home / ("0" * 32) / "part").write_text("of a dead process")
    identity, _ = write(driver)
    assert not (home / ("0" * 32)).exists()
    assert (home / "notes").is_dir()  # no save: not ours to remove
    finish(driver, identity, keep=False)
    assert snapshot(home) == before


def test_two_saves_at_once_do_not_touch_each_other(start, save_root, llama):
    first, second = start("llama"), start("qwen")
    identity, _ = write(first)
    save(second)
    assert (save_root / "set" / identity.hex()).is_dir()
    finish(first, identity)
    loaded = start("set", load_format="sharded_state", verify_checksums=True)
    assert checksums(loaded) == reference_digests(llama)
    assert len(list((save_root / "set").iterdir())) == 2


# What is refused.


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "a/b", "/tmp/x", "../x", "a\0b", "a b", "ä", "x" * 129, "a\n"],
    ids=repr,
)
def test_name_that_is_none_is_refused(start, save_root, name):
    with pytest.raises(ConfigError) as caught:
        write(start("llama"), name)
    assert caught.value.field == "name"
    assert not list(save_root.iterdir())


@pytest.mark.parametrize(
    "pattern",
    [
        "{rank}.safetensors",
        "{part}.safetensors",
        "{rank}-{part}.bin",
        "../{rank}-{part}.safetensors",
        "{rank.__class__}{rank}{part}.safetensors",
        "{}{rank}{part}.safetensors",
    ],
)
def test_pattern_that_gives_no_plain_names_is_refused(start, save_root, pattern):
    with pytest.raises(ConfigError) as caught:
        write(start("llama"), pattern=pattern)
    assert caught.value.field == "pattern"
    assert not list(save_root.iterdir())


def test_worker_without_a_root_names_the_option(start):
    with pytest.raises(ConfigError, match="--save-root") as caught:
        write(start("llama", root=None))
    assert caught.value.field == "save-root"


def test_link_in_the_set_s_place_is_not_followed(start, save_root, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (save_root / "set").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="link") as caught:
        write(start("llama"))
    assert caught.value.field == "name"
    assert not list((tmp_path / "elsewhere").iterdir())


def test_file_in_the_set_s_place_is_left_alone(start, save_root):
    (save_root / "set").write_text("mine")
    with pytest.raises(ConfigError, match="cannot be written"):
        write(start("llama"))
    assert (save_root / "set").read_text() == "mine"


# Saves that fail.


@pytest.fixture
def fail_at(monkeypatch):
    """fail_at(n) -> the n-th fsync from now (from 0) reports a full disk; returns the calls."""
    real = os.fsync

    def arm(number):
        calls = []

        def fsync(fd):
            calls.append(fd)
            if len(calls) == number + 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(fd)

        monkeypatch.setattr(os, "fsync", fsync)
        return calls

    return arm


def test_full_disk_at_any_point_leaves_a_whole_set_and_nothing_else(
    start, save_root, fail_at, llama, qwen
):
    save(start("llama"))
    before = snapshot(save_root)
    driver = start("qwen")
    outcomes = []
    for point in range(100):
        fail_at(point)
        with suppress(CapacityError):
            save(driver, max_size_bytes=20_000)
            break
        fail_at(1000)
        loaded = start("set", load_format="sharded_state", verify_checksums=True)
        is_old = snapshot(save_root) == before
        assert is_old or checksums(loaded) == reference_digests(qwen)
        outcomes.append(is_old)
    assert len(list((save_root / "set").iterdir())) == 2
    # Only what follows the renaming of the index may find the new set in place.
    assert outcomes == sorted(outcomes, reverse=True)
    assert outcomes.count(True) > 5


def test_write_to_a_full_disk_is_typed_and_removes_what_was_written(start, save_root, monkeypatch):
    driver = start("llama")
    real = os.fdopen

    def full(fd, mode):
        file = real(fd, mode)
        monkeypatch.setattr(os, "fdopen", lambda fd, mode: FullFile(real(fd, mode)))
        return file

    monkeypatch.setattr(os, "fdopen", full)
    with pytest.raises(CapacityError, match="No space left") as caught:
        write(driver, max_size_bytes=20_000)
    assert caught.value.field == "save-root"
    assert not list(save_root.iterdir())
    monkeypatch.undo()
    save(driver)
    assert checksums(start("set", load_format="sharded_state")) == checksums(driver)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB; skips where none may be mounted."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "tmpfs", str(place)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no file system may be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_disk_that_is_really_full_leaves_what_was_there(start, small_disk):
    (small_disk / "file").write_text("mine")
    before = snapshot(small_disk)
    driver = start("llama", root=small_disk)  # more than 64 KiB
    with pytest.raises(CapacityError, match="No space left"):
        save(driver, max_size_bytes=20_000)
    assert snapshot(small_disk) == before
    assert [path.name for path in small_disk.iterdir()] == ["file"]


class FullFile:
    """A file on a full disk."""

    def __init__(self, file):
        self._file = file

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()

    def write(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_process_killed_at_any_point_leaves_a_whole_set(model_root, save_root, llama, qwen):
    """A process is killed before each of its file operations in turn, and the next save cleans
    up."""
    done = subprocess.run(
        [sys.executable, str(KILLED), str(model_root), str(save_root), "sharded_state"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    tables = {name: reference_digests(model) for name, model in (("old", llama), ("new", qwen))}
    found = [
        next(
            which
            for which, table in tables.items()
            if sums == {n: d.hex() for n, d in table.items()}
        )
        for sums in outcomes["checksums"]
    ]
    assert found == sorted(found, reverse=True)  # old until the index is renamed, then new
    assert found.count("old") > 8
    assert max(outcomes["entries"]) > 2  # some deaths left files behind,
    assert outcomes["entries_after_the_next_save"] == [2] * len(found)  # which went with the next


# Sets that are not what was saved.


@pytest.fixture
def saved(start, save_root):
    driver = start("llama")
    save(driver, max_size_bytes=20_000)
    return driver, *files_of(save_root / "set")


def load(start, **options):
    return start("set", load_format="sharded_state", **options)


def edit(path, change):
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def refused(start, words, error_type=CheckpointError, **options):
    with pytest.raises(error_type, match=words) as caught:
        load(start, **options)
    assert caught.value.field and caught.value.fix
    return caught.value


def test_truncated_file_is_named_and_a_good_set_loads_after_it(saved, start):
    driver, _, files = saved
    path = files["model-rank-0-part-1.safetensors"]
    content = path.read_bytes()
    for size in (len(content) - 1, 100, 4, 0):
        path.write_bytes(content[:size])
        refused(start, path.name)
    path.write_bytes(content)
    assert checksums(load(start)) == checksums(driver)


def test_missing_files_are_named(saved, start, save_root):
    _, current, files = saved
    for path in (*files.values(), current / "rank-0.json", save_root / "set" / "index.json"):
        content = path.read_bytes()
        path.unlink()
        refused(start, path.name)
        path.write_bytes(content)
    (current / "config.json").unlink()
    refused(start, "config.json")


def test_other_values_are_found_where_checksums_are_asked_for(saved, start):
    _, _, files = saved
    path = files["model-rank-0-part-0.safetensors"]
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    load(start)
    refused(start, path.name, verify_checksums=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v: v.update(tensors=[]), "not an object"),
        (lambda v: v["tensors"].pop("model.norm.weight"), "no tensor model.norm.weight"),
        (lambda v: v["tensors"]["model.norm.weight"].update(shape=[31]), "in shape"),
        (lambda v: v["tensors"]["model.norm.weight"].update(shape="x"), "shape"),
        (lambda v: v["tensors"]["model.norm.weight"].update(file="../a.safetensors"), "plain name"),
        (lambda v: v["tensors"]["model.norm.weight"].update(file="none.safetensors"), "missing"),
        (lambda v: v["tensors"]["model.norm.weight"].update(checksum="xyz"), "rank-0.json"),
        (lambda v: v["tensors"].update({"model.norm.weight": 3}), "rank-0.json"),
    ],
)
def test_broken_rank_index_is_refused(saved, start, change, words):
    _, current, _ = saved
    edit(current / "rank-0.json", change)
    refused(start, words)


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v.update(format=2),
        lambda v: v.update(save="../../llama"),
        lambda v: v.update(save=None),
        lambda v: v.pop("shape"),
        lambda v: v["shape"].update(layer_partition=[1.5]),
        lambda v: v["shape"].update(tensor_parallel_size=True),
        lambda v: v.update(model=7),
    ],
)
def test_broken_index_is_refused(saved, start, save_root, change):
    edit(save_root / "set" / "index.json", change)
    refused(start, "index.json")


def test_set_of_an_earlier_release_lacks_fields_and_loads(saved, start, save_root):
    driver, _, _ = saved

    def forget(values):
        assert values.pop("files") == "safetensors"
        assert values.pop("weights_version") == 0

    edit(save_root / "set" / "index.json", forget)
    assert checksums(load(start)) == checksums(driver)


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b"[" * 100_000])
def test_index_that_is_no_object_is_refused(saved, start, save_root, content):
    (save_root / "set" / "index.json").write_bytes(content)
    refused(start, "index.json")


@pytest.mark.parametrize(
    ("field", "value"),
    [("pipeline_parallel_size", 2), ("tensor_parallel_size", 2), ("layer_partition", [2, 1])],
)
def test_set_of_another_shape_names_both(saved, start, save_root, field, value):
    edit(save_root / "set" / "index.json", lambda values: values["shape"].update({field: value}))
    error = refused(start, "saved with another value", ConfigError)
    assert error.field == field
    assert str(error.value) in ("1", "(3,)")
    assert "load it with" in error.fix


def test_config_of_another_model_is_refused(saved, start):
    _, current, _ = saved
    edit(current / "config.json", lambda values: values.update(intermediate_size=64))
    assert refused(start, "saved model").field == "intermediate_size"


def test_set_that_leads_out_of_the_roots_is_refused(saved, start, save_root, tmp_path):
    _, current, _ = saved
    current.rename(tmp_path / "outside")
    current.symlink_to(tmp_path / "outside")
    refused(start, "outside", ConfigError)
