"""The part for prompt embeddings alone: what it refuses, which steps use it, and the rows that
it writes."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rpc_schema.errors import InvalidStepError, StateError
from rpc_schema.prompt_embeds import EmbeddedRange, PromptEmbeds
from rpc_schema.step import NewRequestData
from worker_daemon.runner.parts.registry import make_parts
from worker_daemon.runner.scheduled_step import (
    NO_STEP_VALUES,
    NO_UPDATES,
    ScheduledStep,
    StepLimits,
)
from worker_daemon.runner.step_layout import StepPlan, StepShape
from worker_daemon.sample.sampler import TorchSampling

HIDDEN = 8
LIMITS = StepLimits(6, 64, 64, 50, 4, 64, hidden_size=HIDDEN)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def admission(slot, embeds, num_prompt=20, num_tokens=20, computed=0):
    return NewRequestData(
        slot=slot,
        req_id=f"r{slot}",
        num_tokens=num_tokens,
        num_prompt_tokens=num_prompt,
        num_computed_tokens=computed,
        extensions=() if embeds is None else (embeds,),
    )


def embeds_of(*ranges, dtype="float32", name=b"a" * 32, width=HIDDEN):
    return PromptEmbeds(
        content_hash=name,
        dtype=dtype,
        width=width,
        ranges=tuple(EmbeddedRange(start=start, length=length) for start, length in ranges),
    )


def uploaded(rows):
    """As the daemon's store has it."""
    name = next(name for name, dtype in DTYPES.items() if dtype is rows.dtype)
    raw = rows.view(torch.uint16) if rows.dtype is torch.bfloat16 else rows
    array = raw.numpy()
    array.setflags(write=False)
    return SimpleNamespace(dtype=name, array=array)


def a_step(scheduled):
    """scheduled: (start, count) by slot."""
    slots = np.array(sorted(scheduled), np.int64)
    starts, counts = np.array([scheduled[slot] for slot in slots.tolist()], np.int32).T
    return ScheduledStep(
        1, slots, counts.copy(), starts.copy(), starts + counts, int(counts.sum()),
        int((starts + counts).max()), np.zeros(slots.size, np.int32), (), NO_UPDATES, False,
        NO_STEP_VALUES,
    )  # fmt: skip


def parts_with(uploads, dtype=torch.float32, *, is_first_stage=True):
    return make_parts(
        LIMITS,
        torch.device("cpu"),
        TorchSampling(),
        is_first_stage=is_first_stage,
        dtype=dtype,
        find_upload=uploads.get,
    )


def run(parts, step, hidden):
    """Hidden states [N, H] of a step, in front of the first layer."""
    plan = StepPlan(StepShape(hidden.shape[0], 0, 0, 0), 1, 64)
    used = parts.used_by(step.slots) | parts.used_in(step)
    plan = parts.extended(plan, used)
    if not plan.parts:
        return hidden
    columns = SimpleNamespace(corrections=np.zeros(0, np.int32), extra=())
    parts.fill(plan.parts, columns, step)
    return parts.before_forward(plan.parts, hidden, columns)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_upload", list(DTYPES))
def test_rows_replace_the_hidden_states_of_their_positions(dtype, of_upload):
    rng = np.random.default_rng()
    uploads, parts_of = {}, {}
    parts = parts_with(uploads, dtype)
    for slot in range(5):
        num_prompt = int(rng.integers(4, 30))
        cuts = np.sort(rng.choice(num_prompt + 1, 4, replace=False)).tolist()
        ranges = [(cuts[0], cuts[1] - cuts[0]), (cuts[2], cuts[3] - cuts[2])]
        rows = torch.randn(sum(length for _, length in ranges), HIDDEN).to(DTYPES[of_upload])
        name = bytes([slot]) * 32
        uploads[name] = uploaded(rows)
        places = [p for start, length in ranges for p in range(start, start + length)]
        parts_of[slot] = num_prompt, dict(zip(places, rows.to(dtype), strict=True))
        embeds = embeds_of(*ranges, dtype=of_upload, name=name)
        parts.check(admission(slot, embeds, num_prompt, num_prompt), LIMITS)
        parts.admit([admission(slot, embeds, num_prompt, num_prompt)])
    parts_of[5] = 9, {}
    parts.admit([admission(5, None, 9, 9)])
    computed = dict.fromkeys(parts_of, 0)
    while not all(computed[slot] > parts_of[slot][0] for slot in parts_of):
        scheduled = {
            slot: (computed[slot], int(rng.integers(1, 7)) if computed[slot] < length else 1)
            for slot, (length, _) in parts_of.items()
            if rng.random() < 0.8
        }
        if not scheduled:
            continue
        step = a_step(scheduled)
        hidden = torch.randn(step.total_num_tokens + 3, HIDDEN).to(dtype)  # padding behind it
        expected, index = hidden.clone(), 0
        for slot, (start, count) in sorted(scheduled.items()):
            for position in range(start, start + count):
                expected[index] = parts_of[slot][1].get(position, hidden[index])
                index += 1
            computed[slot] += count
        is_used = not torch.equal(expected, hidden)
        assert bool(parts.used_in(step)) == is_used
        assert torch.equal(run(parts, step, hidden), expected)


def test_decodes_and_plain_steps_use_nothing_and_graphs_are_as_before():
    parts = parts_with({})
    assert parts.active_in_forward == 0
    parts.admit([admission(0, None)])
    assert parts.active_in_forward == 0
    assert parts.graph_keys() == [0]
    parts.admit([admission(1, embeds_of((3, 4)))])
    assert parts.active_in_forward
    assert parts.used_by(np.arange(2)) == 0
    for scheduled, uses in (
        ({0: (0, 20)}, False),
        ({1: (0, 3)}, False),
        ({1: (0, 4)}, True),
        ({0: (19, 1), 1: (6, 1)}, True),
        ({1: (7, 13)}, False),
        ({1: (20, 1)}, False),
    ):
        assert bool(parts.used_in(a_step(scheduled))) == uses
    parts.admit([admission(1, None)])
    assert parts.active_in_forward == 0
    assert not parts.used_in(a_step({1: (3, 4)}))


def test_other_stages_need_no_upload():
    parts = parts_with({}, is_first_stage=False)
    parts.admit([admission(1, embeds_of((3, 4)))])
    hidden = torch.randn(20, HIDDEN)
    assert run(parts, a_step({1: (0, 20)}), hidden) is hidden


@pytest.mark.parametrize(
    "there", [None, torch.zeros(3, HIDDEN), torch.zeros(4, HIDDEN, dtype=torch.float16)]
)
def test_missing_or_other_tensor_fails_the_step_by_name(there):
    embeds = embeds_of((3, 4))
    uploads = {} if there is None else {embeds.content_hash: uploaded(there)}
    parts = parts_with(uploads)
    parts.admit([admission(1, embeds)])
    with pytest.raises(
        StateError, match="request r1 needs an upload of float32 \\[4, 8\\]"
    ) as told:
        run(parts, a_step({1: (2, 3)}), torch.zeros(3, HIDDEN))
    assert told.value.value == embeds.content_hash.hex()
    # The next step does without.
    hidden = torch.randn(2, HIDDEN)
    assert run(parts, a_step({1: (7, 2)}), hidden) is hidden


@pytest.mark.parametrize(
    ("embeds", "field"),
    [
        (embeds_of((0, 4), width=HIDDEN + 1), "width"),
        (embeds_of((17, 4)), "ranges"),
        (embeds_of((0, 4), (3, 2)), "ranges"),
        (embeds_of((8, 1), (2, 2)), "ranges"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(embeds, field):
    with pytest.raises(InvalidStepError) as refused:
        parts_with({}).check(admission(2, embeds), LIMITS)
    assert refused.value.field == f"scheduled_new_reqs[r2].prompt_embeds.{field}"
    assert refused.value.fix
    with pytest.raises(InvalidStepError):
        parts_with({}).check(admission(2, embeds_of((0, 4))), replace(LIMITS, hidden_size=9))
