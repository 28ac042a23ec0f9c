"""vLLM's calls by name with the fields of JSON: engines and sources of weight updates."""

import base64
import secrets
from types import SimpleNamespace

import pytest

from rpc_schema import weight_transfer as wt
from rpc_schema.config import RendezvousAddress
from worker_client.errors import ClientConfigError
from worker_client.vllm.operations import Operations
from worker_client.vllm.settings import Settings
from worker_client.vllm.weight_changes import WeightChanges

SECRET = secrets.token_bytes(32)
PLACE = {"host": "127.0.0.1", "port": 4000, "secret": base64.b64encode(SECRET).decode()}


class Weights:
    """A group's weights that note what they were asked for."""

    def __init__(self):
        self.asked = []

    def init_transfer_engine(self, engine):
        self.asked.append(engine)

    def update(self, tensors, source):
        self.asked.append((tensors.names, source))

    def start_update(self, **options):
        self.asked.append(options)

    def finish_update(self):
        self.asked.append("finish")


@pytest.fixture
def weights():
    return Weights()


@pytest.fixture
def settings():
    return Settings()


@pytest.fixture
def operations(weights, settings):
    workers = SimpleNamespace(group=SimpleNamespace(weights=weights), settings=settings)
    changes = WeightChanges()
    made = Operations(workers, None, lambda: None, changes, lambda: None, pools=False)
    made.changes = changes
    return made


def test_engines_and_sources_are_given_as_json(operations, weights):
    operations.run("init_weight_transfer_engine", init_info={"engine": "disk"})
    fields = {"backend": "gloo", "world_size": 3, "place": PLACE}
    operations.run("init_weight_transfer_engine", init_info={"engine": "broadcast", **fields})
    place = RendezvousAddress(host="127.0.0.1", port=4000, secret=SECRET)
    expected = wt.BroadcastEngine(backend="gloo", world_size=3, place=place)
    assert weights.asked == [wt.DiskEngine(), expected]
    source = {"engine": "disk", "model": "/there"}
    operations.run("update_weights", update_info={"names": ["a"], "source": source})
    assert weights.asked[2:] == [(("a",), wt.DiskSource(model="/there"))]


@pytest.mark.parametrize(
    ("info", "word"),
    [
        ({"engine": "rdt"}, "init_info.engine"),
        ({"engine": "disk", "backend": "nccl"}, "backend"),
        ({"engine": "broadcast", "backend": "gloo", "place": PLACE}, "world_size"),
        (
            {"engine": "broadcast", "backend": "mpi", "place": PLACE, "world_size": 2},
            "Invalid enum value 'mpi'",
        ),
        (
            {"engine": "broadcast", "backend": "gloo", "place": {"a": 1}, "world_size": 2},
            "argument 'a'",
        ),
    ],
)
def test_wrong_fields_are_named_and_no_value_is_shown(operations, weights, info, word):
    with pytest.raises(ClientConfigError, match=word) as caught:
        operations.run("init_weight_transfer_engine", init_info=info)
    assert caught.value.field.startswith("init_info") and PLACE["secret"] not in str(caught.value)
    assert weights.asked == []


def test_requests_are_held_by_an_update_of_the_model_alone(operations, weights):
    changes = operations.changes
    operations.run("start_weight_update")
    assert changes.is_open
    operations.run("finish_weight_update")
    assert not changes.is_open
    operations.run("start_draft_weight_update")
    assert not changes.is_open
    operations.run("finish_weight_update")
    kept, draft = {"running": "keep"}, {"target": "draft_model"}
    assert weights.asked == [kept, "finish", draft, "finish"]


@pytest.mark.parametrize("settings", [Settings(running_requests="recompute")])
def test_requests_are_recomputed_if_the_settings_say_so(operations, weights):
    operations.run("start_weight_update")
    assert weights.asked == [{"running": "recompute"}]
