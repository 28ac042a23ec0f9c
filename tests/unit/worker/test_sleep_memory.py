"""Sleep of a stage's memory by tag: kept, restored and lost content."""

import pytest
import torch

from rpc_schema.errors import CapacityError, ConfigError
from worker_daemon.device.backup import RESERVE_BYTES
from worker_daemon.distributed.tp import SingleRank
from worker_daemon.layers.attention import NullAttention
from worker_daemon.layers.rotary import rotary_table
from worker_daemon.layers.torch_ops import TorchOps
from worker_daemon.models.config import read_model_config
from worker_daemon.models.decoder import build_stage, checkpoint_names
from worker_daemon.models.weights import load_weights
from worker_daemon.worker.memory_tags import TAGS
from worker_daemon.worker.sleep_memory import ArenaMemory, HeldStage, TaggedMemory

CPU = torch.device("cpu")
CHUNK = 8192
KV_SHAPE = (5000,)
PLENTY = 1 << 60


class Rank:
    """A loaded stage and a KV cache full of sevens, in memory whose chunks are small."""

    def __init__(self, path, host_room=lambda: PLENTY):
        self.path = path
        self.config = read_model_config(path)
        self.memory = ArenaMemory(
            CPU, weight_chunk_bytes=CHUNK, kv_chunk_bytes=CHUNK, host_room=host_room
        )
        layers = range(self.config.num_hidden_layers)
        self.stage = build_stage(
            self.config,
            layers,
            True,
            True,
            SingleRank(),
            torch.float32,
            torch.device("meta"),
            128,
            NullAttention(),
            TorchOps(),
            has_fp8_cache=True,
        )
        self.memory.hold_stages(
            HeldStage(self.stage, [rotary_table(rope, 128, CPU) for rope in self.stage.ropes])
        )
        self.fill()
        self.kv_cache = self.memory.make_kv_cache(*KV_SHAPE, torch.bfloat16)
        self.kv_cache.fill_(7)
        self.parameters = list(self.stage.parameters())
        for number, scales in enumerate(self.stage.kv_scales):
            scales.parameter.data.fill_(number + 0.5)

    def fill(self):
        names = checkpoint_names(self.config)
        load_weights(self.stage.parameters(), self.path, names, lambda progress: None)

    def addresses(self):
        scales = [each.values for each in self.stage.kv_scales]
        tensors = [*(p.data for p in self.parameters), *scales, *self.stage.rotary, self.kv_cache]
        return [tensor.data_ptr() for tensor in tensors]

    def contents(self):
        return [parameter.data.clone() for parameter in self.parameters]

    def held(self):
        kinds = self.memory.bytes_by_kind()
        return kinds["weights"], kinds["buffers"], kinds["kv_cache"]


@pytest.fixture
def rank(model_root, llama):
    made = Rank(model_root / "llama")
    yield made
    made.memory.close()


def same(tensors, others):
    return all(map(torch.equal, tensors, others))


def has_its_scales(rank):
    """Return True if every layer's KV scales are still those that Rank has set."""
    values = [each.values for each in rank.stage.kv_scales]
    assert values
    return all(bool((value == number + 0.5).all()) for number, value in enumerate(values))


@pytest.mark.parametrize("order", [["weights", "kv_cache"], ["kv_cache", "weights"], [None]])
def test_level_1_gives_memory_back_and_brings_the_weights_back(rank, order):
    before, rotary, addresses = rank.contents(), rank.stage.rotary[0].clone(), rank.addresses()
    held = rank.held()
    assert all(held)
    assert held[0] > 3 * CHUNK
    rank.memory.sleep(1)
    assert rank.memory.states == {"weights": "asleep", "kv_cache": "asleep"}
    assert rank.held() == (0, 0, 0)
    assert rank.memory.bytes_by_kind()["host_backup"] == held[0] + held[1]
    for tag in order:
        rank.memory.wake_up(None if tag is None else [tag])
        woken = TAGS if tag is None else [tag]
        assert all(rank.memory.states[name] == "awake" for name in woken)
    assert rank.addresses() == addresses
    assert rank.held() == held
    assert same(rank.contents(), before)
    assert torch.equal(rank.stage.rotary[0], rotary)
    assert has_its_scales(rank)
    assert not rank.kv_cache.any()


def test_level_2_keeps_addresses_and_buffers_alone(rank):
    rotary, addresses, before = rank.stage.rotary[0].clone(), rank.addresses(), rank.contents()
    held = rank.held()
    rank.memory.sleep(2)
    assert rank.memory.states == {"weights": "discarded", "kv_cache": "asleep"}
    assert rank.held() == (0, 0, 0)
    assert rank.memory.bytes_by_kind()["host_backup"] == held[1]
    rank.memory.wake_up(["kv_cache"])
    assert rank.held() == (0, 0, held[2])
    rank.memory.wake_up(["weights"])
    assert rank.memory.states == {"weights": "lost", "kv_cache": "awake"}
    assert torch.equal(rank.stage.rotary[0], rotary)
    assert has_its_scales(rank)
    assert not any(content.any() for content in rank.contents())
    rank.fill()
    rank.memory.weights_filled()
    assert rank.memory.states["weights"] == "awake"
    assert rank.addresses() == addresses
    assert same(rank.contents(), before)


def test_everything_may_be_said_twice(rank):
    before = rank.contents()
    changes = {
        "sleep": lambda: rank.memory.sleep(1),
        "wake": lambda: rank.memory.wake_up(["weights"]),
        "wake all": lambda: rank.memory.wake_up(None),
    }
    for change in changes.values():
        change()
        once = rank.memory.states, rank.memory.bytes_by_kind()
        change()
        assert (rank.memory.states, rank.memory.bytes_by_kind()) == once
    assert same(rank.contents(), before)
    rank.memory.discard(["weights"])
    rank.memory.discard(["weights"])
    rank.memory.sleep(1)  # nothing is left to keep
    assert rank.memory.states == {"weights": "discarded", "kv_cache": "asleep"}


@pytest.mark.parametrize("asleep", [False, True])
@pytest.mark.parametrize("tag", TAGS)
def test_discard_takes_one_tag_awake_or_asleep(rank, tag, asleep):
    rotary = rank.stage.rotary[0].clone()
    other = next(name for name in TAGS if name != tag)
    if asleep:
        rank.memory.sleep(1)
    rank.memory.discard([tag])
    assert rank.memory.states == {tag: "discarded", other: "asleep" if asleep else "awake"}
    rank.memory.wake_up(None)
    assert rank.memory.states == {
        "weights": "lost" if tag == "weights" else "awake",
        "kv_cache": "awake",
    }
    assert torch.equal(rank.stage.rotary[0], rotary)
    assert has_its_scales(rank)
    assert any(content.any() for content in rank.contents()) == (tag != "weights")
    assert rank.kv_cache.any() == (tag == "weights" and not asleep)


def test_level_2_after_level_1_forgets_what_level_1_kept(rank):
    rank.memory.sleep(1)
    rank.memory.sleep(2)
    rank.memory.wake_up(None)
    assert rank.memory.states["weights"] == "lost"
    assert not any(content.any() for content in rank.contents())


def test_a_host_without_room_refuses_level_1_and_changes_nothing(model_root, llama):
    room = [0]
    rank = Rank(model_root / "llama", lambda: room[0])
    before, held = rank.contents(), rank.held()
    for level in (1, 2):  # 2 needs room for the model's buffers
        with pytest.raises(CapacityError):
            rank.memory.sleep(level)
        assert rank.memory.states == {"weights": "awake", "kv_cache": "awake"}
        assert rank.held() == held
    assert same(rank.contents(), before)
    assert rank.kv_cache.eq(7).all()
    room[0] = RESERVE_BYTES + held[0] + held[1]
    rank.memory.prepare()
    rank.memory.sleep(1)
    rank.memory.wake_up(None)
    assert same(rank.contents(), before)
    rank.memory.close()


def test_fifty_cycles_end_where_the_second_did(rank):
    before, figures = rank.contents(), []
    for _ in range(50):
        rank.memory.sleep(1)
        asleep = rank.memory.bytes_by_kind()
        rank.memory.wake_up(None)
        figures.append((asleep, rank.memory.bytes_by_kind()))
    assert figures[1] == figures[-1]
    assert same(rank.contents(), before)


def test_memory_that_is_not_tagged_refuses_to_sleep():
    memory = TaggedMemory(CPU)
    for change in (
        lambda: memory.sleep(1),
        lambda: memory.wake_up(None),
        lambda: memory.discard(["weights"]),
    ):
        with pytest.raises(ConfigError) as caught:
            change()
        assert (caught.value.field, caught.value.value) == ("enable_sleep_mode", False)
    assert memory.states == {}
