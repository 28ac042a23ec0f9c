"""Downloads by the real client of the hub from a stand-in, and each way in which they fail."""

import json
import os
import random
import signal
import subprocess
import sys
import threading

import psutil
import pytest

from model_hub import fetching
from model_hub.cache import find_missing, hub_cache, stored_content
from model_hub.faults import HubError, HubFault
from model_hub.fetching import fetch
from model_hub.names import read_name
from model_hub.needed_files import INDEX, NeededPart
from tests.support.hub_server import GOOD_TOKEN, HubServer
from tests.support.waiting import PATIENCE_S, wait_until

NAME = "org/name"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
CHUNK = 10 << 20
"""The client writes, and so resumes by, as much at a time."""


@pytest.fixture
def hub():
    server = HubServer()
    yield server
    server.close()


@pytest.fixture
def source(tmp_path):
    """A directory with what repositories have, by a seed that is printed."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    drawn = random.Random(seed)
    directory = tmp_path / "source"
    (directory / "original").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        (directory / name).write_text(json.dumps({"value": drawn.random()}))
    for name in SHARDS:
        (directory / name).write_bytes(drawn.randbytes(100_000))
    weight_map = {f"t{i}": name for i, name in enumerate(SHARDS)}
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    for name in ("pytorch_model.bin", "model.gguf", "original/x.pth", "other.safetensors"):
        (directory / name).write_bytes(b"not needed")
    return directory


class User:
    """A user with a cache of their own."""

    def __init__(self, hub, home, **variables):
        kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
        own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home)}
        self.environment = {**kept, **own, **variables}
        self.cache = hub_cache(self.environment)

    def fetch(self, text=NAME, part=NeededPart.MODEL, **options):
        return fetch(read_name(text), self.cache, part, self.environment, **options)


@pytest.fixture
def user(hub, tmp_path):
    return User(hub, tmp_path / "home")


def fault_of(user, text=NAME, part=NeededPart.MODEL, **options):
    """The error of a download, which says what to do."""
    with pytest.raises(HubError) as caught:
        user.fetch(text, part, **options)
    error = caught.value
    assert error.name.startswith(text.partition("@")[0]) and error.problem and error.fix
    assert GOOD_TOKEN not in str(error) and "Traceback" not in str(error)
    return error.fault


def test_needed_files_and_no_others(hub, source, user):
    commit = hub.repository(NAME).commit(source)
    texts = user.fetch(part=NeededPart.TEXTS)
    assert texts.name == read_name(f"{NAME}@{commit}")
    assert find_missing(texts.directory, NeededPart.TEXTS) is None
    assert "names" in find_missing(texts.directory, NeededPart.MODEL)
    shown = []
    whole = user.fetch(str(texts.name), on_progress=shown.append)
    names = {"config.json", "tokenizer.json", "generation_config.json", INDEX, *SHARDS}
    assert {each.name for each in whole.directory.iterdir()} == names
    assert all((source / n).read_bytes() == (whole.directory / n).read_bytes() for n in names)
    assert hub.downloaded() == dict.fromkeys(names - set(SHARDS), 1)  # shards come from elsewhere
    assert shown[-1].done_bytes == shown[-1].total_bytes == 200_000 and shown[-1].num_files == 2
    assert whole.content == texts.content == stored_content(whole.directory)
    num_requests = len(hub.requests)
    assert user.fetch() == whole
    assert len(hub.requests) == num_requests + 1, "only the revision is looked up again"


def test_a_connection_that_is_cut_is_resumed(hub, source, user):
    big = random.Random(1).randbytes(3 * CHUNK)
    (source / SHARDS[1]).write_bytes(big)
    hub.repository(NAME).commit(source)
    hub.cuts[SHARDS[1]] = 1
    found = user.fetch()
    assert (found.directory / SHARDS[1]).read_bytes() == big
    ranges = [each.range for each in hub.requests if each.path.endswith(SHARDS[1])]
    assert f"bytes={CHUNK}-" in ranges, ranges


def test_a_download_that_was_killed_goes_on_with_the_next_file(hub, source, user):
    hub.repository(NAME).commit(source)
    hub.stalls.add(SHARDS[1])
    assert fault_of(user, stall_s=2.0) is HubFault.STALLED
    hub.stalls.clear()
    hub.requests.clear()
    found = user.fetch()
    assert (found.directory / SHARDS[1]).read_bytes() == (source / SHARDS[1]).read_bytes()
    asked = {each.path.rpartition("/")[2] for each in hub.requests if each.method == "GET"}
    assert asked == {NAME.rpartition("/")[2], SHARDS[1]}, "what was complete was kept"


def test_revisions(hub, source, user):
    repository = hub.repository(NAME)
    first = repository.commit(source)
    assert user.fetch().name.revision == first
    (source / "config.json").write_text('{"value": 2}')
    second = repository.commit(source)
    repository.refs["v1/old"] = first
    found = user.fetch()
    assert found.name.revision == second != first
    assert found.content != user.fetch(f"{NAME}@v1/old").content
    assert (found.directory / "config.json").read_text() == '{"value": 2}'
    assert fault_of(user, f"{NAME}@v3") is HubFault.NO_REVISION


def test_offline_and_unreachable(hub, source, user, tmp_path):
    hub.repository(NAME).commit(source)
    offline = User(hub, tmp_path / "home", HF_HUB_OFFLINE="1")
    assert fault_of(offline) is HubFault.OFFLINE
    texts = user.fetch(part=NeededPart.TEXTS)
    assert offline.fetch(part=NeededPart.TEXTS).directory == texts.directory
    assert fault_of(offline) is HubFault.OFFLINE, "the weights are not there"
    whole = user.fetch()
    num_requests = len(hub.requests)
    assert offline.fetch() == whole == offline.fetch(f"{NAME}@{whole.name.revision}")
    assert len(hub.requests) == num_requests
    assert fault_of(offline, f"{NAME}@other") is HubFault.OFFLINE
    hub.status = 503
    assert user.fetch() == whole, "the hub is down, and the cache has all of it"
    nobody = User(hub, tmp_path / "other")
    assert fault_of(nobody) is HubFault.UNREACHABLE
    hub.status = 0
    nobody.environment["HF_ENDPOINT"] = "http://user:secret@127.0.0.1:9"
    with pytest.raises(HubError) as caught:
        nobody.fetch()
    assert caught.value.fault is HubFault.UNREACHABLE
    assert "127.0.0.1" in caught.value.problem and "secret" not in str(caught.value)


def test_tokens(hub, source, user, tmp_path):
    repository = hub.repository(NAME)
    repository.commit(source)
    wrong = User(hub, tmp_path / "a", HF_TOKEN="hf_wrong")
    assert fault_of(wrong) is HubFault.TOKEN
    repository.needs_token = True
    assert fault_of(user) is HubFault.NO_REPOSITORY, "the hub does not tell a stranger more"
    right = User(hub, tmp_path / "b", HF_TOKEN=GOOD_TOKEN)
    assert find_missing(right.fetch().directory, NeededPart.MODEL) is None
    repository.is_gated = True
    gated = User(hub, tmp_path / "c", HF_TOKEN=GOOD_TOKEN)
    assert fault_of(gated) is HubFault.GATED
    assert fault_of(user, "org/absent") is HubFault.NO_REPOSITORY
    assert fault_of(right, "org/absent") is HubFault.NO_REPOSITORY


def test_a_mirror_without_hashes(hub, source, user):
    hub.lists_hashes = False
    hub.repository(NAME).commit(source)
    found = user.fetch()
    assert find_missing(found.directory, NeededPart.MODEL) is None and found.content is None


def test_repositories_that_are_no_models(hub, source, user):
    for name in SHARDS:
        (source / name).unlink()
    hub.repository("org/lacks").commit(source)
    (source / INDEX).unlink()
    hub.repository("org/bin").commit(source)
    (source / "config.json").unlink()
    hub.repository("org/data").commit(source)
    hub.repository("org/hostile").commit(
        source, **{"config.json": b"{}", INDEX: b'{"weight_map": {"t": "../../x.safetensors"}}'}
    )
    for text in ("org/lacks", "org/bin", "org/data", "org/hostile"):
        assert fault_of(user, text) is HubFault.UNUSABLE
    assert fault_of(user, "org/bin", NeededPart.ADAPTER) is HubFault.UNUSABLE


LIMITED = (
    "import resource, runpy, sys\n"
    "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
    "sys.argv = ['download']\n"
    "runpy.run_module('model_hub.download', run_name='__main__')\n"
)


def test_no_room(hub, source, user, tmp_path, monkeypatch):
    """The disk's size cannot be set here: a limit on files' sizes fails in the same write."""
    repository = hub.repository(NAME)
    repository.commit(source)
    (tmp_path / "limited_download.py").write_text(LIMITED)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        patch.setattr(fetching, "_PROGRAM", "limited_download")
        assert fault_of(user) is HubFault.NO_ROOM
    assert not list(user.cache.rglob("*.incomplete")), "nothing is left of the file"
    assert find_missing(user.fetch().directory, NeededPart.MODEL) is None
    (source / SHARDS[0]).write_bytes(b"more")
    repository.commit(source)
    repository.claimed_sizes[SHARDS[0]] = 1 << 60
    hub.requests.clear()
    assert fault_of(user) is HubFault.NO_ROOM
    assert not any(SHARDS[0] in each.path for each in hub.requests), "it was not begun"


def test_a_cache_that_cannot_be_written(hub, source, user, tmp_path):
    hub.repository(NAME).commit(source)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "hub").write_text("a file")
    assert fault_of(user) is HubFault.CACHE


def test_without_the_package(user, monkeypatch):
    monkeypatch.setattr(fetching, "_PACKAGE", "no_such_package")
    with pytest.raises(HubError, match=r'pip install "worker-daemon\[hub\]"') as caught:
        user.fetch()
    assert caught.value.fault is HubFault.EXTRA


def test_the_process_ends_with_its_parent(hub, source, user):
    hub.repository(NAME).commit(source)
    hub.stalls.add(SHARDS[0])
    code = (
        "import json, sys; from pathlib import Path; from model_hub.fetching import fetch\n"
        "from model_hub.names import read_name; from model_hub.needed_files import NeededPart\n"
        "environment = json.loads(sys.argv[1])\n"
        f"fetch(read_name({NAME!r}), Path(sys.argv[2]), NeededPart.MODEL, environment)\n"
    )
    words = [sys.executable, "-c", code, json.dumps(user.environment), str(user.cache)]
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as parent:
        mine = psutil.Process(parent.pid)
        wait_until(lambda: any(SHARDS[0] in each.path for each in hub.requests), "a download")
        children = mine.children()
        assert len(children) == 1
        parent.send_signal(signal.SIGKILL)
    children[0].wait(PATIENCE_S)


def test_two_at_a_time(hub, source, user):
    """Ranks of a host download into one cache."""
    hub.repository(NAME).commit(source)
    found = []
    threads = [threading.Thread(target=lambda: found.append(user.fetch())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(found) == 3 and len({each.directory for each in found}) == 1
    assert stored_content(found[0].directory) == found[0].content
