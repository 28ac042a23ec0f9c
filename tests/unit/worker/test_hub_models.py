"""Where a daemon finds a repository that a driver names, what it refuses, and its downloads."""

import os
import random
import shutil

import pytest

from model_hub.cache import hub_cache, repository_folder, stored_content
from model_hub.fetching import fetch
from model_hub.names import read_name
from model_hub.needed_files import NeededPart
from rpc_schema.errors import CapacityError, CheckpointError, ConfigError
from tests.support.hub_server import GOOD_TOKEN, HubServer
from worker_daemon.contracts.hub import HubSettings
from worker_daemon.worker.hub_models import HubModels
from worker_daemon.worker.resolve import confine_directory


@pytest.fixture(scope="module")
def hub():
    server = HubServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def commit(hub, tmp_path_factory):
    source = tmp_path_factory.mktemp("source")
    (source / "config.json").write_text("{}")
    (source / "model.safetensors").write_bytes(random.randbytes(1000))
    return hub.repository("org/name").commit(source)


@pytest.fixture(scope="module")
def filled(hub, commit, tmp_path_factory):
    """A user's cache that has the repository."""
    environment = environment_of(hub, tmp_path_factory.mktemp("home"))
    cache = hub_cache(environment)
    return fetch(read_name("org/name"), cache, NeededPart.MODEL, environment).cache


def environment_of(hub, home):
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return {**kept, "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_TOKEN": GOOD_TOKEN}


@pytest.fixture
def cache(filled, tmp_path):
    """A copy of it that a test may change."""
    return shutil.copytree(filled, tmp_path / "hub", symlinks=True)


@pytest.fixture
def name(commit):
    return f"org/name@{commit}"


def snapshot_in(cache, commit):
    return cache / repository_folder("org/name") / "snapshots" / commit


def test_found_in_a_root_or_in_the_users_cache_below_one(cache, commit, name, tmp_path):
    expected = str(snapshot_in(cache, commit))
    for settings, root in (
        (HubSettings(), cache),
        (HubSettings(cache), cache),
        (HubSettings(cache), tmp_path),
    ):
        models = HubModels(settings, [root])
        assert (
            models.locate(name, NeededPart.MODEL) == models.find(name, NeededPart.MODEL) == expected
        )
        confine_directory(expected, [root])
    (tmp_path / "else").mkdir()
    with pytest.raises(CheckpointError, match="the daemon lacks this model"):
        HubModels(HubSettings(cache), [tmp_path / "else"]).locate(name, NeededPart.MODEL)


def test_a_directory_of_that_name_has_precedence(cache, name, tmp_path):
    (tmp_path / name).mkdir(parents=True)
    assert HubModels(HubSettings(cache), [tmp_path]).locate(name, NeededPart.MODEL) == name


@pytest.mark.parametrize("text", ["org/name", "org/name@main", "../hub", "models--org--name", "/x"])
def test_all_else_is_a_path(cache, text):
    assert HubModels(HubSettings(cache), [cache]).locate(text, NeededPart.MODEL) == text


def test_the_refusal_has_the_command(cache, commit, name):
    (snapshot_in(cache, commit) / "model.safetensors").unlink()
    models = HubModels(HubSettings(cache), [cache])
    with pytest.raises(CheckpointError) as raised:
        models.locate(name, NeededPart.MODEL)
    assert raised.value.field == "model" and raised.value.value == name
    assert f"hf download org/name --revision {commit} --cache-dir {cache}" in raised.value.fix
    assert "--allow-download" in raised.value.fix
    assert models.locate(name, NeededPart.TEXTS) == str(snapshot_in(cache, commit)), "dummy weights"
    with pytest.raises(CheckpointError, match="the daemon lacks this adapter"):
        HubModels(HubSettings(), [cache], "adapter", "--lora-root").find(name, NeededPart.ADAPTER)


@pytest.mark.parametrize("place", ["models--org--name", "snapshots", "commit", "file", "blob"])
def test_links_that_lead_out_of_the_root(cache, commit, name, tmp_path, place):
    """Whatever another user has linked, nothing outside is read."""
    directory = snapshot_in(cache, commit)
    replaced = {
        "models--org--name": directory.parents[1],
        "snapshots": directory.parent,
        "commit": directory,
        "file": directory / "model.safetensors",
        "blob": (directory / "config.json").resolve(),
    }[place]
    outside = tmp_path / "outside"
    outside.mkdir()
    replaced.rename(outside / replaced.name)
    replaced.symlink_to(outside / replaced.name)
    models = HubModels(HubSettings(cache, allow_download=True), [cache])
    with pytest.raises(ConfigError, match=r"lies outside|a link to outside"):
        models.locate(name, NeededPart.MODEL)


def test_contents_are_compared(cache, commit, name):
    models, directory = HubModels(HubSettings(cache), [cache]), snapshot_in(cache, commit)
    content = stored_content(directory)
    assert models.locate(name, NeededPart.MODEL, content=content) == str(directory)
    with (directory / "model.safetensors").resolve().open("ab") as file:
        file.write(b"x")
    with pytest.raises(CheckpointError, match="not those that the driver's hub has") as raised:
        models.locate(name, NeededPart.MODEL, content=content)
    assert str(directory) in raised.value.fix
    copied = directory / "model.safetensors"
    data = copied.read_bytes()
    copied.unlink()
    copied.write_bytes(data)
    assert models.locate(name, NeededPart.MODEL, content=content) == str(directory), "hash unknown"


def test_downloads(hub, commit, name, tmp_path):
    environment = environment_of(hub, tmp_path)
    cache, phases = hub_cache(environment), []
    settings = HubSettings(cache, True, environment)
    with pytest.raises(ConfigError, match=r"is below no model root; .*--model-root") as raised:
        HubModels(settings, [tmp_path / "other"]).locate(name, NeededPart.MODEL)
    assert raised.value.field == "model"
    models = HubModels(settings, [tmp_path])
    with pytest.raises(CheckpointError):
        models.find(name, NeededPart.MODEL)
    found = models.locate(
        name, NeededPart.MODEL, lambda *phase, done: phases.append((*phase, done))
    )
    assert found == str(snapshot_in(cache, commit))
    assert phases[-1][0].startswith("DOWNLOADING 100%") and phases[-1][2] == 1.0
    assert all(silence_s > 120 for _, silence_s, _ in phases), "a stall ends it before the guard"
    assert GOOD_TOKEN not in repr(models)
    absent = name.replace("name", "absent")
    with pytest.raises(CheckpointError, match=r"no such repository, .*'org/absent@"):
        models.locate(absent, NeededPart.MODEL)


def test_no_room(hub, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    (source / "model.safetensors").write_bytes(b"large")
    repository = hub.repository("org/large")
    commit = repository.commit(source)
    repository.claimed_sizes["model.safetensors"] = 1 << 60
    environment = environment_of(hub, tmp_path)
    settings = HubSettings(hub_cache(environment), True, environment)
    with pytest.raises(CapacityError, match="has room for"):
        HubModels(settings, [tmp_path]).locate(f"org/large@{commit}", NeededPart.MODEL)
