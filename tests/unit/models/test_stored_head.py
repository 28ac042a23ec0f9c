"""Checkpoints whose config.json says that the LM head is the embedding, and whose files say more.
They give transformers' results, when they are loaded, planned, saved and updated."""

import json
import os

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file, save_model

from rpc_schema.config import (
    CacheConfig,
    GraphConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    WorkerConfig,
)
from rpc_schema.errors import CheckpointError, ConfigError
from rpc_schema.weight_transfer import DiskSource, UpdateWeights
from tests.support.published import PUBLISHED, random_model, save_published, shrunk
from worker_daemon.models.config import read_model_config
from worker_daemon.models.decoder import checkpoint_names, checkpoint_pieces
from worker_daemon.models.saved_set import GroupShape, load_saved, read_saved_set
from worker_daemon.models.saving import RankWeights, Saver, SaveRequest
from worker_daemon.models.stored_head import with_saved_head, with_stored_head
from worker_daemon.models.weight_places import Manifest, checkpoint_places, kernel_places
from worker_daemon.models.weights import check_checkpoint, load_weights
from worker_daemon.plan.planning import plan_memory
from worker_daemon.worker.weight_transfer.engines import DiskReader, Expected, TensorFiles

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
FILE = "model.safetensors"
EXPERTS = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def rewrite(path, change):
    tensors = {name: tensor.clone() for name, tensor in load_file(path / FILE).items()}
    change(tensors)
    save_file(tensors, path / FILE, {"format": "pt"})


def another_head(made):
    rewrite(made.path, lambda t: t.update({HEAD: t[EMBEDDING].roll(1, 0)}))


def last_value_of_the_head(made):
    def change(tensors):
        tensors[HEAD] = tensors[EMBEDDING].clone()
        tensors[HEAD][-1, -1] += 1.0

    rewrite(made.path, change)


def another_head_in_a_shard(made):
    """The head comes before the embedding, in another file."""
    another_head(made)
    tensors = load_file(made.path / FILE)
    save_file({HEAD: tensors.pop(HEAD)}, made.path / "a.safetensors", {"format": "pt"})
    save_file(tensors, made.path / "b.safetensors", {"format": "pt"})
    (made.path / FILE).unlink()
    index = dict.fromkeys(tensors, "b.safetensors") | {HEAD: "a.safetensors"}
    text = json.dumps({"metadata": {}, "weight_map": index})
    (made.path / f"{FILE}.index.json").write_text(text)


def same_head(made):
    rewrite(made.path, lambda t: t.update({HEAD: t[EMBEDDING].clone()}))


def same_head_in_another_dtype(made):
    def change(tensors):
        tensors[EMBEDDING] = tensors[EMBEDDING].bfloat16().float()
        tensors[HEAD] = tensors[EMBEDDING].bfloat16()

    rewrite(made.path, change)


def head_alone(made):
    """safetensors' own function keeps one name of each tensor, and not the embedding's."""
    save_model(made.hf_model, made.path / FILE, {"format": "pt"})
    assert EMBEDDING not in load_file(made.path / FILE)


@pytest.fixture
def tied(make_checkpoint):
    """(edit of the files, options) -> a checkpoint whose config.json says that its head is tied."""

    def make(edit=None, seed=0, architecture="LlamaForCausalLM", **options):
        made = make_checkpoint(architecture, seed=seed, tie_word_embeddings=True, **options)
        if edit is not None:
            edit(made)
        return made

    return make


def assert_same_results(path, model_class, stages_of, paged_run, pp_size):
    reference = model_class.from_pretrained(path, dtype=torch.float32).eval()
    ids = torch.randint(5, 90, (1, 20), generator=torch.Generator().manual_seed(3))
    (ours,) = paged_run(stages_of(path, pp_size), [ids[0].numpy()]).prefill()
    with torch.no_grad():
        expected = reference(ids).logits[0].log_softmax(-1)
    assert (ours.log_softmax(-1) - expected).abs().max().item() <= 2e-4


@pytest.mark.parametrize("pp_size", [1, 2])
@pytest.mark.parametrize(
    ("edit", "has_own"),
    [
        (None, False),
        (another_head, True),
        (last_value_of_the_head, True),
        (another_head_in_a_shard, True),
        (same_head, False),
        (same_head_in_another_dtype, False),
        (head_alone, False),
    ],
)
def test_the_head_is_transformers(tied, stages_of, paged_run, edit, has_own, pp_size):
    made = tied(edit)
    assert_same_results(
        made.path, transformers.LlamaForCausalLM, stages_of, paged_run, pp_size=pp_size
    )
    stages = stages_of(made.path, pp_size)
    names = set().union(*(stage.checkpoint_views() for stage in stages))
    assert (HEAD in names, EMBEDDING in names) == (has_own, True)


@pytest.mark.parametrize("edit", [another_head, head_alone])
def test_the_head_of_a_family_that_ties_by_default(tied, stages_of, paged_run, edit):
    made = tied(edit, architecture="Gemma3ForCausalLM", head_dim=16, num_hidden_layers=6)
    path = made.path / "config.json"
    config = json.loads(path.read_text())
    del config["tie_word_embeddings"]
    path.write_text(json.dumps(config))
    assert_same_results(made.path, transformers.Gemma3ForCausalLM, stages_of, paged_run, 1)


@pytest.mark.parametrize("whole", [None, True])
@pytest.mark.parametrize("holds_head", [True, False])
def test_the_head_of_a_nested_config(tmp_path, stages_of, paged_run, whole, holds_head):
    config = shrunk(PUBLISHED["mistralai/Mistral-Small-3.2-24B-Instruct-2506"])
    save_published(random_model(config), tmp_path, config)
    outer = {} if whole is None else {"tie_word_embeddings": whole}
    (tmp_path / "config.json").write_text(json.dumps(config | outer))
    if not holds_head:
        rewrite(tmp_path, lambda t: t.pop("language_model.lm_head.weight"))
    model_class = transformers.Mistral3ForConditionalGeneration
    assert_same_results(tmp_path, model_class, stages_of, paged_run, 1)


def quantized_head(made):
    rewrite(made.path, lambda t: t.update({"lm_head.qweight": torch.zeros(6, 131).int()}))


def narrow_head(made):
    rewrite(made.path, lambda t: t.update({HEAD: torch.zeros(130, 48)}))


def head_in_fp8(made):
    values = torch.zeros(131, 48).to(torch.float8_e4m3fn)
    rewrite(made.path, lambda t: t.update({HEAD: values}))


def embedding_alone_untied(made):
    path = made.path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"tie_word_embeddings": False}))


def head_alone_untied(made):
    head_alone(made)
    embedding_alone_untied(made)


def head_alone_for_a_model_without_head(made):
    head_alone(made)
    path = made.path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"architectures": ["LlamaModel"]}))


def index_without_its_tensor(made):
    """The index has the embedding in a file that holds the head alone."""
    head_alone(made)
    (made.path / FILE).rename(made.path / "a.safetensors")
    names = [*load_file(made.path / "a.safetensors"), EMBEDDING]
    text = json.dumps({"weight_map": dict.fromkeys(names, "a.safetensors")})
    (made.path / f"{FILE}.index.json").write_text(text)


@pytest.mark.parametrize(
    ("edit", "kind", "named"),
    [
        (quantized_head, ConfigError, r"quantized LM head.*lm_head\.qweight"),
        (narrow_head, CheckpointError, r"lm_head\.weight in shape \(130, 48\)"),
        (head_in_fp8, CheckpointError, r"lm_head\.weight in torch\.float8_e4m3fn"),
        (embedding_alone_untied, CheckpointError, r"no tensor lm_head\.weight"),
        (head_alone_untied, CheckpointError, r"no tensor model\.embed_tokens\.weight"),
        (
            head_alone_for_a_model_without_head,
            CheckpointError,
            r"no tensor model\.embed_tokens\.weight",
        ),
        (index_without_its_tensor, CheckpointError, r"no tensor model\.embed_tokens\.weight"),
    ],
)
def test_a_head_that_cannot_be_served_is_refused_by_name(tied, stages_of, edit, kind, named):
    made = tied(edit)
    with pytest.raises(kind, match=named):
        stages_of(made.path)


@pytest.mark.parametrize("edit", [None, another_head, same_head, head_alone])
@pytest.mark.parametrize("pp_size", [1, 2])
def test_the_plan_counts_the_head_that_is_loaded(tied, stages_of, edit, pp_size):
    made = tied(edit)
    config = WorkerConfig(
        parallel=ParallelConfig(pipeline_parallel_size=pp_size),
        model=ModelConfig(model=str(made.path)),
        scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=32),
        cache=CacheConfig(),
        graph=GraphConfig(),
    )
    planned = plan_memory(config, 1 << 26, [made.path.parent])
    loaded = [stage.num_parameters_bytes for stage in stages_of(made.path, pp_size)]
    assert [rank.weights_bytes for rank in planned.ranks] == loaded
    before = planned.ranks
    file = made.path / FILE
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")  # not downloaded yet
    if edit in (None, same_head, head_alone):
        assert plan_memory(config, 1 << 26, [made.path.parent]).ranks == before


def test_headers_of_a_checkpoint_are_checked_under_both_names(tied):
    made = tied(head_alone)
    pieces = checkpoint_pieces(with_stored_head(read_model_config(made.path), made.path))
    check_checkpoint(made.path, pieces)
    rewrite(made.path, lambda t: t.update({HEAD: t[HEAD][:-1].clone()}))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight in shape"):
        check_checkpoint(made.path, pieces)


@pytest.mark.parametrize("edit", [another_head, head_alone, same_head])
def test_a_saved_set_has_the_head_that_was_loaded(tied, stages_of, tmp_path, edit):
    made = tied(edit)
    config = with_stored_head(read_model_config(made.path), made.path)
    (stage,) = stages_of(made.path)
    (tmp_path / "saved").mkdir(mode=0o700)
    saver, shape = Saver(tmp_path / "saved"), GroupShape(1, 1, (4,), "float32")
    request = SaveRequest(os.urandom(16).hex(), "set", "r{rank}-p{part}.safetensors", 1 << 20)
    files = {"config.json": (made.path / "config.json").read_bytes()}
    weights = RankWeights(0, shape, config, files, stage.checkpoint_views(), 0)
    saver.write(request, weights, lambda: None)
    saver.finish(request.save, keep=True)
    found = read_saved_set(tmp_path / "saved" / "set")
    again = with_saved_head(read_model_config(found.directory), found.model)
    assert again == config
    found.check(shape, again)
    views = {name: view.clone() for name, view in stage.checkpoint_views().items()}
    for parameter in stage.parameters():
        parameter.data.zero_()
    load_saved([*stage.parameters()], found, 0, lambda progress: None, verify=True)
    assert all(torch.equal(view, views[name]) for name, view in stage.checkpoint_views().items())


def update_from(path, places, names=()):
    """Update the places from the files of a checkpoint, as a group of one rank does."""
    reader = DiskReader(torch.device("cpu"))
    source = DiskSource(model=str(path))
    message = UpdateWeights(seq=1, epoch=1, link=1, names=tuple(names), source=source)
    manifest = reader.describe(message, None, Expected(places, TensorFiles([path.parent])))
    places.check(manifest)

    def place(rows):
        for each in rows:
            places.fill(manifest.names[each.tensor], each.first_row, each.values)

    reader.receive(manifest, source, place)
    places.check_complete(manifest.names)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
@pytest.mark.parametrize("edit", [None, same_head, head_alone])
def test_an_update_from_files_has_the_head_under_either_name(tied, stages_of, edit, architecture):
    options = {} if architecture == "LlamaForCausalLM" else EXPERTS
    old, new = (tied(edit if s else None, s, architecture, **options) for s in (0, 1))
    (stage,), (fresh,) = stages_of(old.path), stages_of(new.path)
    update_from(new.path, checkpoint_places(stage, read_model_config(old.path)))
    expected = fresh.checkpoint_views()
    for name, values in stage.checkpoint_views().items():
        assert torch.equal(values, expected[name]), name


@pytest.mark.parametrize("names", [(), (HEAD,), (EMBEDDING,), (EMBEDDING, HEAD)])
def test_an_update_with_another_head_is_refused_where_the_model_has_one(tied, stages_of, names):
    old, new = tied(), tied(another_head, 1)
    (stage,) = stages_of(old.path)
    before = stage.checkpoint_views()[EMBEDDING].clone()
    with pytest.raises(ConfigError, match=r"lm_head\.weight.*reset and load") as caught:
        update_from(new.path, checkpoint_places(stage, read_model_config(old.path)), names)
    assert (caught.value.field, caught.value.value) == ("names", HEAD)
    assert torch.equal(stage.checkpoint_views()[EMBEDDING], before)


def test_a_trainer_sends_a_tied_matrix_under_one_of_its_names(tied, stages_of):
    made = tied()
    (stage,) = stages_of(made.path)
    places = checkpoint_places(stage, read_model_config(made.path))

    def manifest(*names):
        return Manifest(names, (torch.float32,) * len(names), ((131, 48),) * len(names))

    places.check(manifest(HEAD))
    values = torch.arange(131 * 48.0).view(131, 48)
    places.fill(HEAD, 0, values)
    assert torch.equal(stage.checkpoint_views()[EMBEDDING], values)
    assert places.names_of(HEAD, torch.float32) == (EMBEDDING,)
    for names, received in (((HEAD, EMBEDDING), ()), ((EMBEDDING,), (HEAD,))):
        with pytest.raises(ConfigError, match="leave out") as caught:
            places.check(manifest(*names), received)
        assert (caught.value.field, caught.value.value) == ("names", HEAD)
    kernel = kernel_places(stage, read_model_config(made.path), 0, 1, torch.float32)
    with pytest.raises(ConfigError, match="no separate LM head"):
        kernel.check(manifest(HEAD))


def test_the_other_name_is_not_reported_as_unused(tied, stages_of):
    made = tied(head_alone)
    (stage,) = stages_of(made.path)
    names = checkpoint_names(read_model_config(made.path))
    report = load_weights(stage.parameters(), made.path, names, lambda progress: None)
    assert report.ignored_tensors == ()


def test_an_update_of_a_model_with_its_own_head_needs_both(tied, stages_of):
    old, new = tied(another_head), tied(None, 1)
    (stage,) = stages_of(old.path)
    config = with_stored_head(read_model_config(old.path), old.path)
    with pytest.raises(ConfigError, match=r"1 tensors are missing.*lm_head\.weight"):
        update_from(new.path, checkpoint_places(stage, config))
