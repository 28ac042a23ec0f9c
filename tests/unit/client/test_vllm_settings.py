"""Settings of vLLM's side: additional_config, the environment, names below the daemons' roots."""

import pytest

from worker_client.errors import ClientConfigError
from worker_client.vllm.plugin import register
from worker_client.vllm.settings import (
    ENDPOINTS_VARIABLE,
    Settings,
    read_endpoints,
    read_settings,
    relative_name,
)
from worker_client.wire.lease import LeaseTerms

FIELD = "additional_config.worker_daemon"


def test_settings_are_read_from_their_section():
    section = {"model": "/m", "reload": True, "logits_processors": ["a", "b"], "wait_s": 3}
    settings = read_settings({"worker_daemon": section, "others": 1})
    assert settings == Settings(model="/m", reload=True, logits_processors=("a", "b"), wait_s=3.0)
    assert settings.lease == LeaseTerms()


@pytest.mark.parametrize("additional_config", [None, {}, {"others": 1}, object()])
def test_without_a_section_all_have_their_defaults(additional_config):
    assert read_settings(additional_config) == Settings()


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"mode1": "/m"}, "mode1"),
        ({"reload": "yes"}, "reload"),
        ({"wait_s": "1"}, "wait_s"),
        ({"logits_processors": "a"}, "logits_processors"),
        ({"running_requests": "drop"}, "running_requests"),
        ({"prompt_attention_dtype": "fp4"}, "prompt_attention_dtype"),
        ([], "array"),
        (None, "null"),
    ],
)
def test_wrong_sections_are_refused(section, said):
    with pytest.raises(ClientConfigError) as caught:
        read_settings({"worker_daemon": section})
    assert caught.value.field == FIELD
    assert said in str(caught.value)
    assert "lora_root" in caught.value.fix


def test_lease_has_bounds():
    with pytest.raises(ClientConfigError, match="ttl"):
        _ = Settings(lease_ttl_s=0.001).lease


@pytest.mark.parametrize(
    ("value", "endpoints"),
    [
        (None, ()),
        ("", ()),
        (" , ", ()),
        ("ipc:///a", ("ipc:///a",)),
        (" ipc:///a, tcp://[::1]:9 ,", ("ipc:///a", "tcp://[::1]:9")),
    ],
)
def test_endpoints_come_from_the_environment(monkeypatch, value, endpoints):
    environment = {} if value is None else {ENDPOINTS_VARIABLE: value}
    assert read_endpoints(environment) == endpoints
    monkeypatch.delenv(ENDPOINTS_VARIABLE, raising=False)
    for key, text in environment.items():
        monkeypatch.setenv(key, text)
    platform = register()
    assert (platform is not None) == bool(endpoints)
    if platform:
        assert platform.startswith("worker_client.vllm.hooks.")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/adapters/a", "a"),
        ("/adapters/a/b/", "a/b"),
        ("/adapters/./a/../b", "b"),
        ("/other/../adapters/a", "a"),
    ],
)
def test_path_below_a_root_becomes_a_name(path, name):
    assert relative_name(path, "/adapters/", "lora_root") == name


@pytest.mark.parametrize(
    ("path", "root", "said"),
    [
        ("/adapters/a", "", "not known"),
        ("/adapters", "/adapters", "elsewhere"),
        ("/adapters/..", "/adapters", "elsewhere"),
        ("/adapters2/a", "/adapters", "elsewhere"),
        ("/adapters/../etc", "/adapters", "elsewhere"),
        ("a", "/adapters", "elsewhere"),
    ],
)
def test_path_elsewhere_is_refused(path, root, said):
    with pytest.raises(ClientConfigError, match=said) as caught:
        relative_name(path, root, "lora_root")
    assert (caught.value.field, caught.value.value) == ("lora_root", path)
