"""4-bit checkpoints on real daemons: tokens equal those of transformers with dequantized weights,
after a load, a saved set, a sleep and a reload; refusals leave the daemons serving."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from rpc_schema.errors import (
    CheckpointError,
    ConfigError,
)
from tests.support.checkpoints import Checkpoint, decisive_prompts, edit_config, make_checkpoint
from tests.support.exhaustive import exhaustively
from tests.support.forked_daemons import ForkedDaemons
from tests.support.quantized_int4 import Scheme, quantize
from tests.support.serving import assert_greedy, connect, generate, greedy_request, worker_config
from worker_client.launcher import serve_command
from worker_client.trainer.deltas import find_change
from worker_client.trainer.sender import WeightSender

TOKENS = 8
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "initializer_range": 0.08,
}
AWQ = Scheme("awq", 32)
ORDERED = Scheme("gptq", 64, act_order=True)
PACKED = Scheme("compressed", 64, symmetric=True)


@pytest.fixture(scope="module")
def quantized(model_root):
    """(scheme, seed) -> a 4-bit checkpoint; equal calls give the same one."""
    made: dict[tuple[Scheme, int], Checkpoint] = {}

    def get(scheme: Scheme, seed: int) -> Checkpoint:
        if (scheme, seed) not in made:
            root = model_root / f"{scheme}-{seed}"
            checkpoint = make_checkpoint(root, "Qwen3ForCausalLM", seed=seed, **SIZES)
            torch.manual_seed(seed)
            quantize(checkpoint.path, checkpoint.model, scheme)
            made[scheme, seed] = checkpoint
        return made[scheme, seed]

    return get


def requests_for(model, seed=5):
    prompts = decisive_prompts(model, seed, [9, 30], TOKENS)
    return [greedy_request(f"r{i}", prompt, TOKENS) for i, prompt in enumerate(prompts)]


def checksums(group):
    return [reply.checksums for reply in group.weights.compute_checksums()]


@pytest.mark.parametrize(
    ("scheme", "pp", "tp"),
    [(AWQ, 1, 1), exhaustively(AWQ, 2, 2), (ORDERED, 2, 1), (PACKED, 1, 2)],
    ids=str,
)
def test_greedy_tokens_equal_transformers(serve, quantized, scheme, pp, tp):
    model = quantized(scheme, 90)
    requests = requests_for(model)
    with serve(model.path, pp, tp) as (group, loaded):
        assert_greedy(generate(group, loaded, requests), model, requests)


@pytest.mark.parametrize(("scheme", "tp"), [(AWQ, 2), (ORDERED, 1)], ids=str)
def test_sleep_and_reload(serve, quantized, scheme, tp):
    old, new = quantized(scheme, 90), quantized(scheme, 91)
    requests = requests_for(new)
    with serve(new.path, 1, tp) as (group, _):
        expected = checksums(group)
    with serve(old.path, 1, tp, enable_sleep_mode=True) as (group, loaded):
        before = checksums(group)
        group.memory.sleep(1)
        group.memory.wake_up()
        assert checksums(group) == before
        group.memory.sleep(2)
        group.memory.wake_up()
        group.weights.reload(str(new.path))
        assert checksums(group) == expected
        assert_greedy(generate(group, loaded, requests), new, requests)


@pytest.mark.parametrize(("scheme", "pp", "tp"), [(AWQ, 1, 2), (ORDERED, 2, 1)], ids=str)
def test_an_update_of_a_trainer_is_quantized_here(serve, quantized, model_root, scheme, pp, tp):
    """After a sleep that keeps no weights too. Tokens equal those of transformers with the values
    that the tests' quantizer gives."""
    old = quantized(scheme, 90)
    new = make_checkpoint(model_root / f"sent-{scheme}", "Qwen3ForCausalLM", seed=92, **SIZES)
    sent = {name: tensor.clone() for name, tensor in new.model.state_dict().items()}
    torch.manual_seed(90)  # the columns' order is that of the old weights
    quantize(new.path, new.model, scheme, (), torch.float32)
    requests = requests_for(new)
    with serve(old.path, pp, tp, enable_sleep_mode=True) as (group, loaded):
        with WeightSender(group, "gloo", timeout_s=20.0) as sender:
            wrong = {"model.layers.0.mlp.up_proj.weight": find_change(torch.zeros(9), one_of(9))}
            with pytest.raises(ConfigError, match=r"share their scales.*up_proj\.weight"):
                sender.send(wrong, partial=True)
            group.memory.sleep(2)
            group.memory.wake_up()
            sender.send(sent)
        assert_greedy(generate(group, loaded, requests), new, requests)
        status = group.get_status()
        assert len({each.weights.identity.content for each in status}) == 1


def one_of(size):
    """A vector that is 1 in one place."""
    return torch.nn.functional.one_hot(torch.tensor(4), size).float()


@pytest.fixture(scope="module")
def save_daemons(model_root, tmp_path_factory):
    """Two daemons and their save root."""
    save_root = tmp_path_factory.mktemp("int4") / "saves"

    command = serve_command("--model-root", str(model_root), "--save-root", str(save_root))
    with ForkedDaemons(["cpu"] * 2, model_root, command=command) as daemons:
        yield daemons, save_root


@pytest.mark.parametrize(
    ("scheme", "tp"), [exhaustively(AWQ, 2), exhaustively(ORDERED, 1), (PACKED, 2)], ids=str
)
def test_round_trip_of_a_saved_set(quantized, save_daemons, scheme, tp):
    daemons, save_root = save_daemons
    model = quantized(scheme, 90)
    requests = requests_for(model)
    endpoints, pp = daemons.endpoints, 2 // tp
    with connect(endpoints, worker_config(model.path, pp, tp)) as (group, _):
        before = checksums(group)
        group.weights.save_sharded_state(str(scheme))
    saved = worker_config(save_root / str(scheme), pp, tp, load_format="sharded_state")
    with connect(endpoints, saved) as (group, loaded):
        assert checksums(group) == before
        assert_greedy(generate(group, loaded, requests), model, requests)


@pytest.mark.parametrize("scheme", [AWQ, ORDERED], ids=str)
def test_dummy_weights_serve(serve, quantized, scheme):
    model = quantized(scheme, 90)
    tokens = []
    for shape in [(1, 1), (2, 1)]:
        requests = [greedy_request("r", [5, 9, 17, 3], TOKENS)]
        with serve(model.path, *shape, load_format="dummy", model_seed=3) as (group, loaded):
            result = generate(group, loaded, requests)
            tokens.append({name: list(found) for name, found in result.tokens.items()})
    assert tokens[0] == tokens[1]


def test_refused_checkpoints_leave_the_daemon_serving(serve, quantized, model_root):
    model = quantized(AWQ, 90)
    requests = requests_for(model)
    scale = "model.layers.1.mlp.down_proj.scales"

    def drop_scale(path):
        tensors = load_file(path / "model.safetensors")
        del tensors[scale]
        save_file(tensors, path / "model.safetensors")

    def change_method(path):
        edit_config(Checkpoint(path, model.model), quantization_config={"quant_method": "aqlm"})

    def drop_config(path):
        edit_config(Checkpoint(path, model.model), quantization_config=None)

    for number, (spoil, error, words) in enumerate(
        [
            (drop_scale, CheckpointError, scale),
            (change_method, ConfigError, "quantization_config.quant_method = 'aqlm'"),
            (drop_config, CheckpointError, "has no tensor"),
        ]
    ):
        path = model_root / f"spoiled-int4-{number}"
        shutil.copytree(model.path, path)
        spoil(path)
        with pytest.raises(error, match=words), serve(path):
            pass
    with serve(model.path) as (group, loaded):
        assert_greedy(generate(group, loaded, requests), model, requests)
