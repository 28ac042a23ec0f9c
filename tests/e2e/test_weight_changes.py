"""Updates that bring a part of the weights: single elements that a trainer's step has changed.
After them a group has the same tokens as transformers with the changed weights, and the same
checksums as a fresh load."""

import copy

import pytest
import torch

from rpc_schema.config import SpeculativeConfig
from rpc_schema.errors import ConfigError
from tests.support.checkpoints import Checkpoint, decisive_prompts
from tests.support.serving import assert_greedy, generate, greedy_request, scheduler_limits
from worker_client.driver import Driver
from worker_client.scheduler import Scheduler
from worker_client.trainer.deltas import SparseDelta, TensorPiece
from worker_client.trainer.sender import WeightSender

ARCHITECTURE = "Qwen3ForCausalLM"
TOKENS = 6
TIMEOUT_S = 20.0
UP = "model.layers.1.mlp.up_proj.weight"


def requests_for(model, seed):
    prompts = decisive_prompts(model, seed, [9, 17], TOKENS)
    return [greedy_request(f"r{i}", prompt, TOKENS) for i, prompt in enumerate(prompts)]


def tensors_of(model):
    return dict(model.model.state_dict())


def checksums(group):
    return [reply.checksums for reply in group.weights.compute_checksums()]


def contents(group):
    """What names the weights' contents on each rank."""
    return {status.weights.identity.content for status in group.get_status()}


def step_of_training(model, path, seed):
    """A checkpoint that differs from a model's in a few elements of every tensor."""
    generator = torch.Generator().manual_seed(seed)
    trained = copy.deepcopy(model.model)
    with torch.no_grad():
        for parameter in trained.parameters():
            places = torch.randperm(parameter.numel(), generator=generator)
            places = places[: 1 + parameter.numel() // 40]
            scale = parameter.abs().mean()
            parameter.view(-1)[places] += scale * torch.randn(len(places), generator=generator)
    trained.save_pretrained(path)
    return Checkpoint(path, trained)


@pytest.mark.parametrize(
    ("pp", "tp", "packed_bytes", "tied"), [(2, 1, 0, True), (1, 2, 5_000, False)]
)
def test_what_a_step_of_training_changed(
    serve, checkpoint, model_root, seed, pp, tp, packed_bytes, tied
):
    options = {"tie_word_embeddings": tied, "num_hidden_layers": 2}
    old = checkpoint(ARCHITECTURE, seed=91, **options)
    new = step_of_training(old, model_root / f"trained-{pp}-{tp}", seed)
    with serve(new.path, pp, tp) as (group, _):
        expected = checksums(group)
    with serve(old.path, pp, tp) as (group, loaded):
        before = checksums(group)
        with WeightSender(group, "gloo", timeout_s=TIMEOUT_S) as sender:
            # Nothing is known of what the workers have: everything is sent.
            whole = sender.send_changes(tensors_of(old), packed_bytes=packed_bytes)
            assert checksums(group) == before
            channel = sender._connection.channel
            # A wrong index is known once it has come: nothing is written, and nobody leaves.
            wrong = {UP: SparseDelta(torch.tensor([1, 64 * 96]), torch.zeros(2))}
            words = rf"outside {UP}; field {UP}.indices = {64 * 96};"
            with pytest.raises(ConfigError, match=words):
                sender.send(tensors_of(new) | wrong, partial=True, packed_bytes=packed_bytes)
            assert checksums(group) == before
            assert {status.weights.num_dirty for status in group.get_status()} == {0}
            # The update is still open, so the workers' weights are not those sent last.
            again = sender.send_changes(tensors_of(old), packed_bytes=packed_bytes)
            assert again.size_bytes == whole.size_bytes
            assert sender._connection.channel is channel
            report = sender.send_changes(tensors_of(new), packed_bytes=packed_bytes)
            assert report.version == again.version + 1
            assert report.num_tensors == whole.num_tensors
            assert 0 < report.size_bytes < whole.size_bytes / 8
            assert checksums(group) == expected
            assert len(contents(group)) == 1
            requests = requests_for(new, seed)
            assert_greedy(generate(group, loaded, requests), new, requests)
            # Nothing has changed: a version of equal weights.
            idle = sender.send_changes(tensors_of(new), packed_bytes=packed_bytes)
            assert (idle.size_bytes, idle.version) == (0, report.version + 1)
            # Somebody else changed the weights, so a delta from those sent last would be wrong.
            group.weights.reload(str(old.path))
            again = sender.send_changes(tensors_of(new), packed_bytes=packed_bytes)
            assert again.size_bytes == whole.size_bytes
            assert checksums(group) == expected


def pieces_of(tensor):
    """What two ranks of a trainer hold: rows of matrices and vectors, the second one in columns
    too."""
    first, second = tensor.chunk(2)
    pieces = [TensorPiece((0,) * tensor.dim(), first)]
    if tensor.dim() == 1:
        return [*pieces, TensorPiece((len(first),), second)]
    left, right = second.chunk(2, dim=1)
    return [
        TensorPiece((len(first), left.shape[1]), right.contiguous()),
        *pieces,
        TensorPiece((len(first), 0), left.contiguous()),
    ]


@pytest.mark.parametrize(("pp", "tp", "packed_bytes"), [(2, 1, 5_000), (1, 2, 0)])
def test_pieces_that_a_trainers_ranks_hold(serve, checkpoint, pp, tp, packed_bytes):
    options = {"tie_word_embeddings": False, "num_hidden_layers": 2}
    old, new = (checkpoint(ARCHITECTURE, seed=seed, **options) for seed in (91, 92))
    with serve(new.path, pp, tp) as (group, _):
        expected = checksums(group)
    with serve(old.path, pp, tp) as (group, loaded):
        before = checksums(group)
        sent = {name: pieces_of(tensor) for name, tensor in tensors_of(new).items()}
        with WeightSender(group, "gloo", timeout_s=TIMEOUT_S) as sender:
            twice = sent | {UP: [*sent[UP], sent[UP][0]]}
            with pytest.raises(ConfigError, match=f"a piece of {UP} overlaps"):
                sender.send(twice, packed_bytes=packed_bytes)
            assert checksums(group) == before
            lacking = sent | {UP: sent[UP][:2]}
            words = rf"pieces of 1 tensors are missing.*{UP} \(1536 elements\)"
            with pytest.raises(ConfigError, match=words):
                sender.send(lacking, packed_bytes=packed_bytes)
            states = [status.weights for status in group.get_status()]
            holders = states[1:] if pp == 2 else states
            assert {each.missing for each in holders} == {(UP,)}
            report = sender.send(sent, packed_bytes=packed_bytes)
            assert report.num_tensors == len(sent)
        assert checksums(group) == expected
        assert len(contents(group)) == 1
        requests = requests_for(new, 7)
        assert_greedy(generate(group, loaded, requests), new, requests)


@pytest.mark.parametrize(("pp", "tp"), [(2, 1), (1, 2)])
def test_the_draft_model_follows_its_trainer(serve, checkpoint, pp, tp):
    """Requests go on; nearly every draft of the next ones is right. Versions are apart."""
    options = {"tie_word_embeddings": False, "num_hidden_layers": 2}
    model, other = (checkpoint(ARCHITECTURE, seed=seed, **options) for seed in (91, 93))
    drafts = SpeculativeConfig(
        method="draft_model", num_speculative_tokens=3, model=str(other.path)
    )
    prompts = decisive_prompts(model, 3, [9, 17], 40)
    requests = [greedy_request(f"r{i}", prompt, 40) for i, prompt in enumerate(prompts)]
    with serve(model.path, pp, tp, reload=True, speculative=drafts) as (group, loaded):
        before, version = checksums(group), group.weights.version
        files = {status.draft_weights.identity.content for status in group.get_status()}
        assert len(files) == 1
        driver = Driver(group, Scheduler(scheduler_limits(group, loaded)))
        for request in requests:
            driver.add_request(request)
        outputs = [output for _ in range(6) for output in driver.step()]
        assert not outputs
        with WeightSender(group, "gloo", timeout_s=TIMEOUT_S) as sender:
            report = sender.send(tensors_of(model), target="draft_model", packed_bytes=5_000)
        assert report.version == 1
        outputs = {output.req_id: output for output in driver.run()}
        for request in requests:
            assert outputs[request.id].token_ids == model.greedy(request.prompt, 40)
        after = [status.draft_weights for status in group.get_status()]
        assert {(each.version, each.state) for each in after} == {(1, "whole")}
        sent = {each.identity.content for each in after}
        assert len(sent) == 1
        assert sent != files
        assert checksums(group) == before
        assert group.weights.version == version
        # Cached blocks have the keys and values of the old draft model.
        run = generate(group, loaded, requests, enable_prefix_caching=False)
        assert_greedy(run, model, requests)
        drafted = sum(output.num_drafted for output in run.outputs.values())
        assert sum(output.num_accepted for output in run.outputs.values()) > 0.9 * drafted > 0
