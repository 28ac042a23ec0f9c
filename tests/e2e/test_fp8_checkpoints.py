"""FP8 checkpoints on real daemons: tokens equal those of transformers with dequantized weights,
after a load, a saved set, an update and a sleep; refusals leave the daemons serving."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from rpc_schema.errors import (
    CheckpointError,
    ConfigError,
)
from rpc_schema.weight_transfer import DiskEngine, DiskSource
from tests.support.checkpoints import Checkpoint, decisive_prompts, edit_config, make_checkpoint
from tests.support.exhaustive import exhaustively
from tests.support.forked_daemons import ForkedDaemons
from tests.support.quantized import LAYER_MATRICES, quantize, quantized_values
from tests.support.serving import assert_greedy, connect, generate, greedy_request, worker_config
from worker_client.launcher import serve_command
from worker_client.trainer.sender import WeightSender
from worker_client.wire.worker_client import TensorList

ARCHITECTURE = "Qwen3ForCausalLM"
TOKENS = 8
TIMEOUT_S = 20.0
FORMATS = {
    "tensor-static": ("compressed", "tensor", "static"),
    "channel": ("compressed", "channel", "dynamic"),
    "fp8-tensor": ("fp8", "tensor", "static"),
    "fp8-block": ("fp8", "block", "dynamic"),
}
BLOCK_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "initializer_range": 0.08,
}


@pytest.fixture(scope="module")
def quantized(model_root):
    """(name of a format, seed) -> an FP8 checkpoint; equal calls give the same one."""
    made: dict[tuple[str, int], Checkpoint] = {}

    def get(form: str, seed: int) -> Checkpoint:
        if (form, seed) not in made:
            sizes = BLOCK_SIZES if form == "fp8-block" else {}
            checkpoint = make_checkpoint(
                model_root / form, ARCHITECTURE, seed=seed, num_hidden_layers=2, **sizes
            )
            torch.manual_seed(seed)
            quantize(checkpoint.path, checkpoint.model, *FORMATS[form])
            made[form, seed] = checkpoint
        return made[form, seed]

    return get


def requests_for(model, seed=5):
    prompts = decisive_prompts(model, seed, [9, 30], TOKENS)
    return [greedy_request(f"r{i}", prompt, TOKENS) for i, prompt in enumerate(prompts)]


def checksums(group):
    return [reply.checksums for reply in group.weights.compute_checksums()]


@pytest.mark.parametrize(
    ("form", "pp", "tp"),
    [
        ("tensor-static", 1, 1),
        exhaustively("tensor-static", 2, 2),
        exhaustively("channel", 2, 1),
        ("channel", 1, 2),
        ("fp8-tensor", 1, 2),
        ("fp8-block", 1, 2),
        exhaustively("fp8-block", 2, 1),
    ],
)
def test_greedy_tokens_equal_transformers(serve, quantized, form, pp, tp):
    model = quantized(form, 90)
    requests = requests_for(model)
    with serve(model.path, pp, tp) as (group, loaded):
        assert_greedy(generate(group, loaded, requests), model, requests)


@pytest.mark.parametrize(
    ("form", "pp", "tp"),
    [("tensor-static", 1, 2), exhaustively("channel", 2, 1), ("fp8-block", 1, 2)],
)
def test_updates_equal_a_fresh_load_and_sleep_keeps_scales(serve, quantized, form, pp, tp):
    old, new = quantized(form, 90), quantized(form, 91)
    requests, old_requests = requests_for(new), requests_for(old)
    with serve(new.path, pp, tp) as (group, _):
        expected = checksums(group)
    with serve(old.path, pp, tp, enable_sleep_mode=True) as (group, loaded):
        before = checksums(group)
        group.weights.init_transfer_engine(DiskEngine())
        group.weights.start_update()
        group.weights.update(TensorList(), DiskSource(model=str(new.path)))
        group.weights.finish_update()
        assert checksums(group) == expected
        assert_greedy(generate(group, loaded, requests), new, requests)
        with WeightSender(group, "gloo", timeout_s=TIMEOUT_S) as sender:
            tensors = load_file(old.path / "model.safetensors")
            names = {name: name.replace("weight_scale_inv", "weight_scale") for name in tensors}
            sender.send({names[name]: tensor for name, tensor in tensors.items()})
        assert checksums(group) == before
        assert_greedy(generate(group, loaded, old_requests), old, old_requests)
        group.memory.sleep(1)
        group.memory.wake_up()
        assert checksums(group) == before
        group.memory.sleep(2)
        group.memory.wake_up()
        group.weights.reload(str(new.path))
        assert checksums(group) == expected
        assert_greedy(generate(group, loaded, requests), new, requests)


def test_update_in_another_format_is_refused_before_its_first_byte(serve, quantized):
    model = quantized("channel", 90)
    requests = requests_for(model)
    with serve(model.path) as (group, loaded):
        before = checksums(group)
        name = "model.layers.1.mlp.down_proj.weight"
        tensors = load_file(model.path / "model.safetensors")
        with WeightSender(group, "gloo", timeout_s=TIMEOUT_S) as sender:
            for wrong, words in [
                ({name: tensors[name].float()}, "its scale is computed here"),
                ({"lm_head.weight": tensors["lm_head.weight"].to(torch.float8_e4m3fn)}, "format"),
                ({f"{name}_scale": tensors[f"{name}_scale"][:5]}, "another shape"),
            ]:
                with pytest.raises(ConfigError, match=words):
                    sender.send({**tensors, **wrong})
                assert checksums(group) == before
            sender.send(tensors)
        assert checksums(group) == before
        assert_greedy(generate(group, loaded, requests), model, requests)


@pytest.mark.each_value
@pytest.mark.parametrize("activations", ["dynamic", "static"])
@pytest.mark.parametrize(("pp", "tp"), [exhaustively(1, 1), (2, 1), (1, 2)])
def test_an_unquantized_update_is_quantized_in_place(serve, model_root, activations, pp, tp):
    """Scales of inputs, which no trainer has, survive the loss of the weights."""
    old, new = (
        make_checkpoint(model_root / f"of-{activations}", ARCHITECTURE, seed=s, num_hidden_layers=2)
        for s in (96, 97)
    )
    tensors = quantized_online(new)
    quantize(old.path, old.model, "compressed", "channel", activations)
    requests = requests_for(new)
    with serve(old.path, pp, tp, enable_sleep_mode=True) as (group, loaded):
        with WeightSender(group, "gloo", timeout_s=TIMEOUT_S) as sender:
            sender.send(tensors, packed_bytes=5000)
            updated = checksums(group)
            if tp == 1:  # otherwise o_proj and down_proj have scales for each rank's columns
                assert_greedy(generate(group, loaded, requests), new, requests)
            group.memory.sleep(2)
            group.memory.wake_up()
            with pytest.raises(ConfigError, match="tensors are missing"):
                sender.send({"lm_head.weight": tensors["lm_head.weight"]})
            sender.send(tensors)
        assert checksums(group) == updated
        if tp == 1:
            assert_greedy(generate(group, loaded, requests), new, requests)


@pytest.mark.parametrize(("pp", "tp"), [exhaustively(2, 1), (1, 2)])
def test_unquantized_matrices_take_scales_of_blocks(serve, quantized, model_root, pp, tp):
    """In transfers that end within a block; the same as those of a checkpoint in that format."""
    old = quantized("fp8-block", 90)
    new = make_checkpoint(
        model_root / "sent", ARCHITECTURE, seed=98, num_hidden_layers=2, **BLOCK_SIZES
    )
    sent = {name: tensor.clone() for name, tensor in new.model.state_dict().items()}
    quantize(new.path, new.model, *FORMATS["fp8-block"])
    requests = requests_for(new)
    with serve(new.path, pp, tp) as (group, _):
        expected = checksums(group)
    with serve(old.path, pp, tp) as (group, loaded):
        with WeightSender(group, "gloo", timeout_s=TIMEOUT_S) as sender:
            sender.send(sent, packed_bytes=70_000)
        assert checksums(group) == expected
        assert_greedy(generate(group, loaded, requests), new, requests)


@pytest.fixture(scope="module")
def save_daemons(model_root, tmp_path_factory):
    """Two daemons and their save root."""
    save_root = tmp_path_factory.mktemp("fp8") / "saves"

    command = serve_command("--model-root", str(model_root), "--save-root", str(save_root))
    with ForkedDaemons(["cpu"] * 2, model_root, command=command) as daemons:
        yield daemons, save_root


@pytest.mark.parametrize("form", [*map(exhaustively, ["tensor-static", "channel"]), "fp8-block"])
def test_round_trip_of_a_saved_set(quantized, save_daemons, form):
    daemons, save_root = save_daemons
    model = quantized(form, 90)
    requests = requests_for(model)
    with connect(daemons.endpoints, worker_config(model.path, 1, 2)) as (group, _):
        before = checksums(group)
        group.weights.save_sharded_state(form)
    saved = worker_config(save_root / form, 1, 2, load_format="sharded_state")
    with connect(daemons.endpoints, saved) as (group, loaded):
        assert checksums(group) == before
        assert_greedy(generate(group, loaded, requests), model, requests)
    config = next((save_root / form).glob("*/config.json"))
    config.write_text(config.read_text().replace('"lm_head"', '"other_head"'))
    with (
        pytest.raises(CheckpointError, match="quantization"),
        connect(daemons.endpoints, saved),
    ):
        pass


def test_dummy_weights_of_every_split_are_equal(serve, quantized):
    model = quantized("channel", 90)
    tokens = []
    for shape in [(1, 1), (2, 1), (1, 2)]:
        requests = [greedy_request("r", [5, 9, 17, 3], TOKENS)]
        with serve(model.path, *shape, load_format="dummy", model_seed=3) as (group, loaded):
            result = generate(group, loaded, requests)
            tokens.append({name: list(found) for name, found in result.tokens.items()})
    assert tokens[0] == tokens[1] == tokens[2]


def test_refused_checkpoints_leave_the_daemon_serving(serve, quantized, model_root):
    model = quantized("channel", 90)
    requests = requests_for(model)
    scale = "model.layers.1.mlp.down_proj.weight_scale"

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
            (drop_config, CheckpointError, "float8_e4m3fn"),
        ]
    ):
        path = model_root / f"spoiled-{number}"
        shutil.copytree(model.path, path)
        spoil(path)
        with pytest.raises(error, match=words), serve(path):
            pass
    with serve(model.path) as (group, loaded):
        assert_greedy(generate(group, loaded, requests), model, requests)


def quantized_online(model):
    """Return the tensors of a model, and the model with its matrices quantized by rows."""
    tensors = {name: tensor.clone() for name, tensor in model.model.state_dict().items()}
    weights = dict(model.model.named_parameters())
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name.endswith(tuple(f"{matrix}.weight" for matrix in LAYER_MATRICES)):
                weights[name].copy_(quantized_values(tensor, "channel")[2])
    return tensors


@pytest.mark.parametrize(("pp", "tp"), [exhaustively(2, 1), (1, 2)])
def test_online_quantization(model_root, save_daemons, pp, tp):
    daemons, save_root = save_daemons
    old, new = (
        make_checkpoint(model_root / f"online-{pp}", ARCHITECTURE, seed=seed, num_hidden_layers=2)
        for seed in (94, 95)
    )
    _, tensors = quantized_online(old), quantized_online(new)
    requests, old_requests = requests_for(new), requests_for(old)
    config = worker_config(old.path, pp, tp, quantization="fp8", enable_sleep_mode=True)
    with connect(daemons.endpoints, config) as (group, loaded):
        before = checksums(group)
        if tp == 1:  # otherwise o_proj and down_proj have scales for each rank's columns
            assert_greedy(generate(group, loaded, old_requests), old, old_requests)
        with WeightSender(group, "gloo", timeout_s=TIMEOUT_S) as sender:
            sender.send(tensors, packed_bytes=5000)
        updated = checksums(group)
        assert updated != before
        if tp == 1:
            assert_greedy(generate(group, loaded, requests), new, requests)
        group.memory.sleep(2)
        group.memory.wake_up()
        group.weights.reload()
        assert checksums(group) == before
        group.weights.reload(str(new.path))
        assert checksums(group) == updated
        name = f"online-{pp}-{tp}"
        group.weights.save_sharded_state(name)
    saved = worker_config(save_root / name, pp, tp, quantization="fp8", load_format="sharded_state")
    with connect(daemons.endpoints, saved) as (group, loaded):
        assert checksums(group) == updated
        if tp == 1:
            assert_greedy(generate(group, loaded, requests), new, requests)
    unquantized = worker_config(save_root / name, pp, tp, load_format="sharded_state")
    with (
        pytest.raises(CheckpointError, match="same quantization"),
        connect(daemons.endpoints, unquantized),
    ):
        pass
