"""Models and adapters as users name them: which names are directories, and which repositories."""

import shutil

import pytest

from model_hub.faults import HubFault
from tests.support.hub_server import HubServer
from worker_client.errors import ClientConfigError, HubModelError
from worker_client.inputs.model_source import find_adapter, find_model


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub of this process's user, who is in an empty directory."""
    server = HubServer()
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield server
    server.close()


@pytest.fixture
def source(tmp_path):
    directory = tmp_path / "source"
    directory.mkdir()
    for name in ("config.json", "adapter_config.json"):
        (directory / name).write_text("{}")
    for name in ("model.safetensors", "adapter_model.safetensors"):
        (directory / name).write_bytes(b"weights")
    return directory


def test_a_directory_has_precedence(hub, source, tmp_path):
    commit = hub.repository("org/name").commit(source)
    found = find_model("org/name")
    assert found.sent_as == f"org/name@{commit}" and found.name == "org/name"
    assert found.model_root == tmp_path / "home/hub" and found.content is not None
    assert not (found.directory / "model.safetensors").exists()
    found.download_weights()
    assert (found.directory / "model.safetensors").read_bytes() == b"weights"
    here = tmp_path / "here/org/name"
    shutil.copytree(source, here)
    hub.requests.clear()
    found = find_model("org/name")
    found.download_weights()
    assert (found.directory, found.sent_as, found.name) == (here, str(here), "name")
    assert (found.model_root, found.content) == (here.parent, None) and not hub.requests


@pytest.mark.parametrize(
    ("text", "kind", "problem"),
    [
        ("absent", ClientConfigError, "no such directory"),
        ("./org/name", ClientConfigError, "no such directory"),
        ("org/na--me", HubModelError, "neither a directory nor the name of a repository"),
        ("org/name@..", HubModelError, "not the name of a revision"),
        ("org/absent", HubModelError, "no such directory, and 127.0.0.1 has no such repository"),
        ("org/name@gone", HubModelError, "no revision gone"),
    ],
)
def test_each_error_names_field_value_and_fix(hub, source, text, kind, problem):
    hub.repository("org/name").commit(source)
    with pytest.raises(ClientConfigError, match=problem) as raised:
        find_model(text, "speculative_model")
    assert type(raised.value) is kind
    assert raised.value.field == "speculative_model" and raised.value.value == text
    assert raised.value.fix and raised.value.fix in str(raised.value)


def test_adapters(hub, source, tmp_path):
    """Below the roots of daemons that run already, org/name may be a directory."""
    commit = hub.repository("org/name").commit(source)
    for text, are_local in (("org/name", True), ("org/name@main", False), ("org/name@main", True)):
        found = find_adapter(text, None, are_local=are_local)
        assert found.sent_as == f"org/name@{commit}" and found.name == text
        assert found.cache == tmp_path / "home/hub"
    hub.requests.clear()
    for text, root, are_local in (
        ("org/name", None, False),
        ("name", None, True),
        ("a/b/c", tmp_path, True),
        ("here", tmp_path, True),
    ):
        assert find_adapter(text, root, are_local=are_local).sent_as == text
    shutil.copytree(source, tmp_path / "here/org/name@main")
    assert find_adapter("org/name@main", tmp_path / "here", are_local=True).cache is None
    assert not hub.requests
    with pytest.raises(HubModelError) as raised:
        find_adapter("org/absent@main", None, are_local=False)
    assert raised.value.fault is HubFault.NO_REPOSITORY and raised.value.field == "lora"
