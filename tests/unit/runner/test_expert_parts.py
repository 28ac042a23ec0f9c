"""What ranks refuse of the experts that requests replay or ask for, and what a step must bring."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rpc_schema.config import SchedulerConfig
from rpc_schema.errors import ConfigError, InvalidStepError, StateError
from rpc_schema.routed_experts import (
    MAX_REPORTED_BYTES,
    ReplayExperts,
    RoutedExpertsShape,
    RoutedExpertsWanted,
)
from rpc_schema.step import NewRequestData
from worker_daemon.runner.parts.registry import make_parts
from worker_daemon.runner.scheduled_step import NO_UPDATES, ScheduledStep, StepLimits
from worker_daemon.runner.step_layout import StepShape, split_columns
from worker_daemon.sample.sampler import TorchSampling
from worker_daemon.worker.resolve import check_routed_experts

SHAPE = RoutedExpertsShape(num_layers=3, top_k=2, num_experts=300)
PLAIN = StepLimits(4, 64, 64, 40, 4, 64)
LIMITS = StepLimits(4, 64, 64, 40, 4, 64, routed_experts=SHAPE)
NO_COLUMNS = split_columns(StepShape(0, 0, 0, 0), lambda start, stop: np.zeros(0, np.int32))


def parts_with(limits=LIMITS):
    return make_parts(limits, torch.device("cpu"), TorchSampling())


def admission(extension, num_computed=0, num_tokens=20, slot=0):
    return NewRequestData(
        slot=slot,
        req_id=f"r{slot}",
        num_tokens=num_tokens,
        num_prompt_tokens=num_tokens,
        num_computed_tokens=num_computed,
        extensions=(extension,),
    )


def replay(num_positions=5, num_layers=3, top_k=2, max_expert=299):
    return ReplayExperts(
        num_positions=num_positions,
        num_layers=num_layers,
        top_k=top_k,
        max_expert=max_expert,
        content_hash=bytes(32),
    )


@pytest.mark.parametrize(
    ("extension", "value"),
    [
        (replay(num_layers=2), [2, 2]),
        (replay(top_k=3), [3, 3]),
        (replay(max_expert=300), 300),
        (replay(num_positions=21), 21),
    ],
)
def test_replay_that_does_not_fit_is_refused(extension, value):
    with pytest.raises(InvalidStepError) as caught:
        parts_with().check(admission(extension), LIMITS)
    assert caught.value.field == "scheduled_new_reqs[r0].replay_experts"
    assert caught.value.value == value


@pytest.mark.parametrize("extension", [replay(), RoutedExpertsWanted()])
def test_model_without_the_option_refuses_both(extension):
    with pytest.raises(InvalidStepError, match="load the model with that feature"):
        parts_with(PLAIN).check(admission(extension), PLAIN)


def step_of(start, count, values):
    column = np.array([count], np.int32)
    return ScheduledStep(
        seq=1,
        slots=np.array([0]),
        num_tokens=column,
        starts=np.array([start], np.int32),
        ends=np.array([start + count], np.int32),
        total_num_tokens=count,
        longest=start + count,
        num_samples=np.zeros(1, np.int32),
        new_requests=(),
        block_updates=NO_UPDATES,
        deferred=None,
        step_values=values,
    )


def filled(found, start=0):
    """Fill a step of three tokens of a row that replays five, with the upload that is found."""
    parts = make_parts(
        LIMITS, torch.device("cpu"), TorchSampling(), find_upload={bytes(32): found}.get
    )
    parts.admit([admission(replay())])
    step = step_of(start, 3, parts.check_step((), (), LIMITS))
    used = parts.used_in(step)
    assert used
    parts.fill(used, NO_COLUMNS, step)


def tensor_of(dtype, *shape, expert=299):
    return SimpleNamespace(dtype=dtype, array=np.full(shape, expert, np.int32))


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (None, "there is none"),
        (tensor_of("uint8", 5, 3, 2), "it is uint8"),
        (tensor_of("uint16", 6, 3, 2), "[6, 3, 2]"),
        (tensor_of("uint16", 5, 3, 2, expert=300), "it names expert 300"),
    ],
)
def test_step_that_lacks_its_experts_fails(found, why):
    for start in (0, 3):
        with pytest.raises(StateError, match="replays an upload of uint16") as caught:
            filled(found, start)
        assert why in str(caught.value)
        assert caught.value.field == "replay_experts.content_hash"
    filled(tensor_of("uint16", 5, 3, 2))


def test_steps_behind_the_replayed_tokens_skip_the_part():
    parts = parts_with()
    parts.admit([admission(replay())])
    assert parts.used_in(step_of(5, 3, parts.check_step((), (), LIMITS))) == 0


def test_cached_tokens_of_a_step_are_bounded():
    shape = RoutedExpertsShape(num_layers=MAX_REPORTED_BYTES // 30, top_k=1, num_experts=4)
    assert shape.max_positions == 30
    limits = StepLimits(4, 64, 64, 40, 4, 64, routed_experts=shape)
    parts, wanted = parts_with(limits), RoutedExpertsWanted(first=4)
    parts.check_batch(np.array([0, 1]), [admission(wanted, 19, slot=slot) for slot in (0, 1)])
    three = [admission(wanted, 19, slot=slot) for slot in range(3)]
    with pytest.raises(InvalidStepError) as caught:
        parts.check_batch(np.arange(3), three)
    assert caught.value.field == "scheduled_new_reqs[r2].num_computed_tokens"


def test_steps_whose_experts_do_not_fit_into_a_reply_are_refused():
    model = SimpleNamespace(routed_experts=SHAPE)
    most = MAX_REPORTED_BYTES // 12
    check_routed_experts(model, SchedulerConfig(max_num_batched_tokens=most))
    with pytest.raises(ConfigError) as caught:
        check_routed_experts(model, SchedulerConfig(max_num_batched_tokens=most + 1))
    assert caught.value.field == "scheduler.max_num_batched_tokens"
