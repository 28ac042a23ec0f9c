"""Updates whose tensors come in pieces, as a trainer's ranks have them: on ranks that hold a part
of each, against a load of the new checkpoint; and pieces that are refused."""

import random
from dataclasses import replace

import pytest
import torch
from test_sparse_deltas import (
    CASES,
    DOWN,
    MODELS,
    assert_same,
    filled,
    stage_of,
)

from rpc_schema.errors import ConfigError
from tests.support.quantized_stages import Elsewhere
from worker_daemon.layers.quantization import ONLINE
from worker_daemon.models.config import read_model_config
from worker_daemon.models.update_coverage import Box, Coverage
from worker_daemon.models.weight_places import Manifest, checkpoint_places

UP = "model.layers.0.mlp.up_proj.weight"


def boxes_of(shape, rng, count, dimensions=None):
    """Cut a shape into boxes at random."""
    boxes = [tuple((0, size) for size in shape)]
    for _ in range(count):
        box = boxes.pop(rng.randrange(len(boxes)))
        dim = rng.choice(dimensions or range(len(shape)))
        start, stop = box[dim]
        middle = rng.randint(start, stop)
        boxes += [(*box[:dim], part, *box[dim + 1 :]) for part in ((start, middle), (middle, stop))]
    rng.shuffle(boxes)
    return boxes


def manifest_of(pieces, dtype=torch.float32):
    """pieces: (name, origin, shape)."""
    names, origins, shapes = zip(*pieces, strict=True)
    return Manifest(names, (dtype,) * len(names), shapes, origins)


def deliver(places, tensors, rng, dimensions=None):
    """Send tensors in pieces, each in chunks of rows that end anywhere."""
    listed = []
    for name, tensor in tensors.items():
        for box in boxes_of(tensor.shape, rng, 4, dimensions):
            values = tensor[tuple(slice(*bounds) for bounds in box)]
            listed.append((name, tuple(start for start, _ in box), values))
    rng.shuffle(listed)
    manifest = manifest_of([(name, origin, tuple(v.shape)) for name, origin, v in listed])
    places.check(manifest)
    coverage = Coverage()
    coverage.check(manifest.pieces)
    for name, origin, values in listed:
        step = rng.randint(1, max(1, len(values)))
        for first in range(0, len(values), step):
            places.fill(name, first, values[first : first + step], origin)
        size = tensors[name].numel()
        coverage.add(name, Box.at(origin, values.shape), size)
    coverage.check_complete()


@pytest.mark.parametrize(
    ("architecture", "size", "way"), [case for case in CASES if case[2] != "separate"]
)
def test_pieces_of_any_cut_make_the_new_checkpoint(make_checkpoint, architecture, size, way):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    old, new = (make_checkpoint(architecture, seed=s, **MODELS[architecture]) for s in (1, 2))
    config = replace(read_model_config(old.path), expert_parallel=way == "expert parallel")
    state = dict(new.hf_model.state_dict())
    if architecture == "Qwen2ForCausalLM":
        del state["lm_head.weight"]
    for rank in range(size):
        stage = filled(old.path, config, Elsewhere(rank, size))
        deliver(checkpoint_places(stage, config), state, rng)
        assert_same(stage, filled(new.path, config, Elsewhere(rank, size)))


@pytest.mark.parametrize("architecture", ["Phi3ForCausalLM", "GptOssForCausalLM"])
def test_rows_that_are_quantized_here_come_in_pieces_too(make_checkpoint, architecture):
    rng = random.Random(5)
    old, new = (make_checkpoint(architecture, seed=s, **MODELS[architecture]) for s in (3, 4))
    config = replace(read_model_config(old.path), quantization=ONLINE)
    stage = filled(old.path, config, Elsewhere(1, 2))
    places = checkpoint_places(stage, config)
    deliver(places, new.hf_model.state_dict(), rng, [0])
    fresh = filled(new.path, config, Elsewhere(1, 2))
    for one, other in zip(stage.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(one.data.view(torch.uint8), other.data.view(torch.uint8)), one.name


@pytest.fixture
def places(make_checkpoint):
    config = read_model_config(make_checkpoint("Qwen3ForCausalLM", seed=5).path)
    return checkpoint_places(stage_of(config), config)


@pytest.mark.parametrize(
    ("pieces", "field", "words"),
    [
        ([(DOWN, (0,), (48,))], "origins", r"dimensions.*2 of \[48, 80\]"),
        ([(DOWN, (0, 0), (48,))], "origins", "dimensions"),
        ([(DOWN, (40, 8), (9, 8))], "origins", r"outside.*\[40:49, 8:16\]"),
        ([(DOWN, (), (48, 80)), (DOWN, (0, 0), (1, 1))], "names", "named twice"),
        ([(f"{DOWN}.values", (0,), (3,))], "origins", "half of a sparse delta"),
        ([("model.layers.7.mlp.up_proj.weight", (0, 0), (1, 1))], "names", "no such tensor"),
        ([(DOWN, (0, 0), (9, 80)), (DOWN, (8, 79), (1, 1))], "origins", "overlaps"),
    ],
)
def test_pieces_that_cannot_be_are_refused_before_they_come(places, pieces, field, words):
    manifest = manifest_of(pieces)
    with pytest.raises(ConfigError, match=words) as caught:
        places.check(manifest)
        Coverage().check(manifest.pieces)
    assert caught.value.field == field


def test_pieces_of_rows_that_are_quantized_here_are_refused(make_checkpoint):
    made = make_checkpoint("Qwen3ForCausalLM", seed=5)
    config = replace(read_model_config(made.path), quantization=ONLINE)
    places = checkpoint_places(stage_of(config), config)
    places.check(manifest_of([(UP, (8, 0), (4, 48))]))
    with pytest.raises(ConfigError, match=r"first dimension alone: \[n, 48\]"):
        places.check(manifest_of([(UP, (8, 0), (4, 24))]))


def test_coverage_finds_overlaps_and_gaps():
    """Against a mask of the tensor."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(60):
        shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(1, 3)))
        mask, coverage = torch.zeros(shape, dtype=torch.int), Coverage()
        num_elements = mask.numel()
        for bounds in boxes_of(shape, rng, rng.randint(0, 9)):
            if rng.random() < 0.2:  # another box than the one that would be right
                bounds = [sorted(rng.choices(range(size + 1), k=2)) for size in shape]
            box = Box(*map(tuple, zip(*bounds, strict=True)))
            mine = mask[tuple(slice(*each) for each in bounds)]
            if mine.any():
                with pytest.raises(ConfigError, match="overlaps"):
                    coverage.check({"a": [box]})
                continue
            coverage.check({"a": [box]})
            mine.fill_(1)
            assert coverage.add("a", box, num_elements) == bool(mask.all())
        if mask.all():
            coverage.check_complete()
        else:
            left = num_elements - int(mask.sum())
            with pytest.raises(ConfigError, match=rf"a \({left} elements\)"):
                coverage.check_complete()
            coverage.replace("a")  # it came whole
            coverage.check_complete()
