"""Loading: whole and sharded files, every way a checkpoint can be broken, and dummy weights."""

import contextlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rpc_schema.errors import CheckpointError
from worker_daemon.distributed.tp import SingleRank
from worker_daemon.layers.attention import NullAttention
from worker_daemon.layers.torch_ops import TorchOps
from worker_daemon.models.config import read_model_config
from worker_daemon.models.decoder import build_stage, checkpoint_names
from worker_daemon.models.partition import partition_layers
from worker_daemon.models.weights import load_dummy_weights, load_weights


class Rank:
    """A rank that may build and load its shard but not communicate."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size


def build(path, pp_size=1, pp_rank=0, tp=None, dtype=torch.float32):
    config = read_model_config(path)
    layers = partition_layers(config.num_hidden_layers, pp_size)[pp_rank]
    first, last = pp_rank == 0, pp_rank == pp_size - 1
    tp = tp or SingleRank()
    device = torch.device("cpu")
    return build_stage(
        config, layers, first, last, tp, dtype, device, 16, NullAttention(), TorchOps()
    )


def load(path, stage, progress=lambda _: None):
    names = checkpoint_names(read_model_config(path))
    return load_weights(stage.parameters(), path, names, progress)


def rewrite(path, change):
    """Loads model.safetensors, lets change edit the dict, writes it back."""
    tensors = load_file(path / "model.safetensors")
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    change(tensors)
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shards_of_an_index_load_like_one_file(make_checkpoint, tmp_path, dtype):
    made = make_checkpoint("Qwen3ForCausalLM", max_shard_size="40KB", head_dim=16)
    assert len(list(made.path.glob("*.safetensors"))) > 2
    stage = build(made.path, dtype=dtype)
    load(made.path, stage)
    state = made.hf_model.state_dict()
    views = stage.checkpoint_views()
    assert views.keys() == state.keys()
    assert all(torch.equal(views[name], state[name].to(dtype)) for name in state)


def test_a_stage_reads_only_its_own_tensors(make_checkpoint):
    made = make_checkpoint("LlamaForCausalLM", max_shard_size="40KB")
    index = json.loads((made.path / "model.safetensors.index.json").read_text())
    stage = build(made.path, pp_size=2, pp_rank=0)
    mine = {index["weight_map"][name] for name in stage.checkpoint_views()}
    others = {p.name for p in made.path.glob("*.safetensors")} - mine
    assert others
    for name in others:
        (made.path / name).write_bytes(b"not read")
    load(made.path, stage)
    assert torch.equal(
        stage.checkpoint_views()["model.layers.1.mlp.down_proj.weight"],
        made.hf_model.model.layers[1].mlp.down_proj.weight,
    )


def test_progress_counts_up_to_the_total_and_extra_tensors_are_reported(make_checkpoint):
    made = make_checkpoint("LlamaForCausalLM")
    rewrite(made.path, lambda t: t.update({"model.rotary_emb.inv_freq": torch.ones(3)}))
    stage = build(made.path, pp_size=2, pp_rank=1)
    seen = []
    report = load(made.path, stage, seen.append)
    total = sum(view.numel() * 4 for view in stage.checkpoint_views().values())
    assert [p.bytes_done for p in seen] == sorted({p.bytes_done for p in seen})
    assert seen[-1].bytes_done == seen[-1].bytes_total == report.bytes_loaded == total
    assert report.ignored_tensors == ("model.rotary_emb.inv_freq",)


def truncate(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def only_pickles(path):
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def drop_norm(path):
    rewrite(path, lambda t: t.pop("model.norm.weight"))


def reshape_norm(path):
    rewrite(path, lambda t: t.update({"model.norm.weight": torch.ones(49)}))


def integer_norm(path):
    rewrite(path, lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (truncate, r"model\.safetensors is truncated"),
        (only_pickles, r"no safetensors.*\.bin"),
        (drop_norm, r"no tensor model\.norm\.weight"),
        (reshape_norm, r"model\.norm\.weight in shape \(49,\).*\(48,\)"),
        (integer_norm, r"model\.norm\.weight in dtype I8"),
        (lambda path: (path / "model.safetensors").write_bytes(b""), r"model\.safetensors"),
        (lambda path: (path / "model.safetensors").unlink(), "no safetensors"),
    ],
)
def test_a_damaged_file_is_named(make_checkpoint, damage, named):
    made = make_checkpoint("LlamaForCausalLM")
    stage = build(made.path)
    damage(made.path)
    with pytest.raises(CheckpointError, match=named):
        load(made.path, stage)


@pytest.mark.parametrize("size", [1, 2])
def test_a_file_that_shrinks_while_it_is_loaded_is_an_error_and_no_signal(make_checkpoint, size):
    """It is cut once the first tensor is there; a rank of two reads columns of some."""
    made = make_checkpoint("LlamaForCausalLM")
    stage = build(made.path, tp=Rank(1, 2) if size == 2 else SingleRank())
    file = made.path / "model.safetensors"
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated: it ends within"):
        load(made.path, stage, lambda progress: os.truncate(file, 4096))


@contextlib.contextmanager
def as_nobody():
    """Run as another user if the tests run as root, which may read every file."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_a_file_that_may_not_be_read_is_not_called_missing(make_checkpoint, monkeypatch):
    made = make_checkpoint("LlamaForCausalLM")
    stage = build(made.path)
    (made.path / "model.safetensors").chmod(0)
    made.path.chmod(0o755)
    monkeypatch.chdir(made.path)  # nobody may come here by the directories above
    with as_nobody(), pytest.raises(CheckpointError, match="may not be read") as error:
        load(Path(), stage)
    assert error.value.fix.startswith("let user ")


def edit_index(path, change):
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index)
    file.write_text(json.dumps(index))


def norm_shard(path):
    index = json.loads((path / "model.safetensors.index.json").read_text())
    return path / index["weight_map"]["model.norm.weight"]


def swap_shard(path):
    shards = sorted(path.glob("*.safetensors"))
    shutil.copy(next(s for s in shards if s != norm_shard(path)), norm_shard(path))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda path: norm_shard(path).unlink(), r"model-\d+-of-\d+\.safetensors is missing"),
        (
            lambda path: norm_shard(path).write_bytes(norm_shard(path).read_bytes()[:-1]),
            r"model-\d+-of-\d+\.safetensors is truncated",
        ),
        (swap_shard, r"model-\d+-of-\d+\.safetensors has no tensor"),
        (
            lambda path: edit_index(path, lambda i: i["weight_map"].pop("model.norm.weight")),
            r"no tensor model\.norm\.weight",
        ),
        (lambda path: edit_index(path, lambda i: i.pop("weight_map")), r"index\.json"),
        (lambda path: edit_index(path, lambda i: i.update(weight_map=[1])), r"index\.json"),
        (
            lambda path: edit_index(
                path, lambda i: i["weight_map"].update({"model.norm.weight": "../x.safetensors"})
            ),
            r"index\.json maps 'model\.norm\.weight'",
        ),
        (
            lambda path: (path / "model.safetensors.index.json").write_text("{"),
            r"index\.json",
        ),
    ],
)
def test_a_damaged_index_or_shard_is_named(make_checkpoint, damage, named):
    made = make_checkpoint("LlamaForCausalLM", max_shard_size="40KB")
    stage = build(made.path)
    damage(made.path)
    with pytest.raises(CheckpointError, match=named):
        load(made.path, stage)


def dummy_views(path, seed, **where):
    stage = build(path, **where)
    load_dummy_weights(stage.parameters(), seed, lambda progress: None)
    return stage.checkpoint_views()


@pytest.mark.parametrize(("pp_size", "tp_size"), [(2, 1), (1, 2), (2, 4)])
def test_dummy_weights_are_the_same_for_every_split(make_checkpoint, pp_size, tp_size):
    made = make_checkpoint("Qwen2ForCausalLM")
    whole = dummy_views(made.path, 5)
    seen = set()
    for pp_rank in range(pp_size):
        for tp_rank in range(tp_size):
            tp = Rank(tp_rank, tp_size)
            stage = build(made.path, pp_size=pp_size, pp_rank=pp_rank, tp=tp)
            load_dummy_weights(stage.parameters(), 5, lambda progress: None)
            for parameter in stage.parameters():
                for piece in parameter.pieces:
                    seen.add(piece.name)
                    shard = parameter.data[piece.target]
                    assert torch.equal(shard, whole[piece.name][piece.source])
    assert seen == whole.keys()


def test_dummy_weights_look_like_weights_and_depend_on_name_and_seed(make_checkpoint):
    made = make_checkpoint("Qwen2ForCausalLM", hidden_size=256, intermediate_size=1024)
    views = dummy_views(made.path, 5)
    matrices = {name: view for name, view in views.items() if view.dim() == 2}
    for view in matrices.values():
        values = view.double()
        assert abs(values.mean()) < 5 * 0.02 / values.numel() ** 0.5
        assert values.std().item() == pytest.approx(0.02, rel=0.03)
        assert values.abs().max() < 0.06
        assert view.unique().numel() > 0.2 * min(view.numel(), 1 << 16)
    for name, view in views.items():
        if "norm" in name:
            assert view.mean().item() == pytest.approx(1.0, abs=0.01)
    gate, up = (views[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up"))
    assert abs(torch.corrcoef(torch.stack((gate.flatten(), up.flatten())))[0, 1]) < 0.01
    rows = torch.corrcoef(gate[:64])
    assert (rows - torch.eye(64)).abs().max() < 0.4
    assert torch.equal(dummy_views(made.path, 5)["lm_head.weight"], views["lm_head.weight"])
    assert not torch.equal(dummy_views(made.path, 6)["lm_head.weight"], views["lm_head.weight"])


def test_vocabulary_padding_stays_zero(make_checkpoint):
    made = make_checkpoint("LlamaForCausalLM", vocab_size=70)
    for rank in range(4):
        stage = build(made.path, tp=Rank(rank, 4))
        load(made.path, stage)
        embedding = next(iter(stage.parameters()))
        assert embedding.data.shape == (64, 48)
        present = {0: 64, 1: 6, 2: 0, 3: 0}[rank]
        assert not embedding.data[present:].any()
        state = made.hf_model.state_dict()["model.embed_tokens.weight"]
        assert torch.equal(embedding.data[:present], state[rank * 64 : rank * 64 + present])
