"""Rows that sample several tokens in a step: how many they may ask for, what they gain, and what is
reported when a feature refuses that."""

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from row_steps import bitmap, int32s, request_state, uint16s

from rpc_schema.errors import InvalidStepError
from rpc_schema.pooling import PooledTask, PoolingParams, PoolingSupport
from rpc_schema.sampling import LogprobsWanted
from rpc_schema.step import ExecuteModel, NewRequestData
from worker_daemon.distributed.link import Link
from worker_daemon.distributed.pp import STATUS_OK
from worker_daemon.runner.input_batch import InputBuilder
from worker_daemon.runner.output import ReplyIdentity, StepReplies
from worker_daemon.runner.parts.interface import PartContext, StepPart
from worker_daemon.runner.parts.random_sampling import RandomSamplingPart
from worker_daemon.runner.parts.step_parts import StepParts
from worker_daemon.runner.row_tables import RowTables, TorchRowKernels
from worker_daemon.runner.sample_rows import SampleRows, SamplingInputs, Unsampled, group_samples
from worker_daemon.runner.scheduled_step import NO_STEP_VALUES, StepLimits
from worker_daemon.runner.staging import HostStaging
from worker_daemon.runner.step_layout import ExactShapes
from worker_daemon.runner.step_sampler import StepSampler
from worker_daemon.runner.token_history import SampledTokens
from worker_daemon.sample.sampler import TorchSampling
from worker_host.draft_counts import DraftCounts

CPU = torch.device("cpu")
LIMITS = StepLimits(5, 40, 30, 50, 4, 30, max_samples_per_seq=3)
POOLING = PoolingSupport(tasks=(PooledTask(task="embed", width=4, states="last"),))


def admit(lengths, counts, extensions=(), **fields):
    """A step that admits a request of each length in a slot, and computes so many of its tokens.
    extensions: of slot 1."""
    slots = range(len(lengths))
    blocks = [slot for slot in slots for _ in range(-(-lengths[slot] // 4))]
    new = tuple(
        NewRequestData(
            slot=slot,
            req_id=f"r{slot}",
            num_tokens=length,
            num_prompt_tokens=length,
            num_computed_tokens=0,
            extensions=extensions if slot == 1 else (),
        )
        for slot, length in enumerate(lengths)
    )
    message = ExecuteModel(
        epoch=1,
        link=1,
        seq=1,
        total_num_scheduled_tokens=sum(counts),
        scheduled=bitmap(slots),
        num_scheduled_tokens=int32s(*(v for pair in zip(slots, counts, strict=True) for v in pair)),
        scheduled_new_reqs=new,
        new_block_slots=uint16s(*blocks),
        new_block_ids=int32s(*range(1, len(blocks) + 1)),
        **fields,
    )
    return message, [int32s(*[7] * sum(lengths))]


@pytest.mark.parametrize(
    ("pairs", "value", "fix"),
    [
        ([0, 4], "slot 0: 4", "use 1 to 3: the step has 6 tokens of it, and max_samples_per_seq"),
        ([0, 2, 2, 3], "slot 2: 3", "use 1 to 2: the step has 2 tokens of it"),
        ([0, 0], "slot 0: 0", "use 1 to 3"),
        ([0, -1], "slot 0: -1", "use 1 to 3"),
        ([1, 2], 1, r"name slots that sample in this step: \[0, 2\]"),
        ([3, 2], 3, r"name slots that sample in this step: \[0, 2\]"),
        ([4, 2], [4], "name scheduled slots only"),
        ([0, 2, 0, 2], 0, "once"),
        ([0], "1 values", "pairs"),
    ],
)
def test_samples_that_a_row_cannot_take_are_refused(pairs, value, fix):
    """Slot 1 has a part of its prompt, slot 2 two tokens of it; slot 3 pools."""
    limits = StepLimits(5, 40, 30, 50, 4, 30, pooling=POOLING, max_samples_per_seq=3)
    state = request_state(limits)
    message, arrays = admit([6, 9, 2, 5], [6, 5, 2, 5], num_samples=int32s(*pairs))
    *new, pools = message.scheduled_new_reqs
    pools = msgspec.structs.replace(pools, extensions=(PoolingParams(task="embed"),))
    message = msgspec.structs.replace(message, scheduled_new_reqs=(*new, pools))
    with pytest.raises(InvalidStepError, match=fix) as refused:
        state.apply(message, arrays)
    assert (refused.value.field, refused.value.value) == ("num_samples", value)
    assert not state.counts.live.any()


def test_a_row_gains_one_token_and_its_steps_go_on():
    state = request_state(LIMITS)
    first = state.apply(*admit([6, 9], [6, 9], num_samples=int32s(0, 3, 1, 1)))
    assert first.num_samples.tolist() == [3, 1] and first.has_several
    assert state.counts.num_tokens[:2].tolist() == [7, 10]
    decode = ExecuteModel(
        epoch=1, link=1, seq=2, total_num_scheduled_tokens=2, scheduled=bitmap([0, 1])
    )
    second = state.apply(decode, [])
    assert second.steady is not None and not second.has_several
    again = msgspec.structs.replace(decode, seq=3, num_samples=int32s(1, 2))
    with pytest.raises(InvalidStepError, match="use 1 to 1"):
        state.apply(again, [])
    one = msgspec.structs.replace(decode, seq=4, num_samples=int32s(1, 1))
    assert state.apply(one, []).num_samples.tolist() == [1, 1]


class RefusingPart(StepPart):
    """Refuses what a row of slot 1 gains. It is told of nothing else."""

    request_extension = LogprobsWanted
    may_refuse = True

    def refuse(self, token_ids, rows):
        assert rows.slots_np.tolist() == [0, 1, 3] and token_ids.shape == (3,)
        return torch.from_numpy((rows.slots_np == 1).astype(np.int32))


def test_a_refused_token_is_the_newest_of_its_row():
    """Rows 0, 1 and 3 have two, three and one samples."""
    context = PartContext(LIMITS, CPU, True, True, TorchSampling())
    chooser = RandomSamplingPart(context)
    parts = StepParts([RefusingPart(context), chooser], chooser, context)
    slots, positions = np.array([0, 0, 1, 1, 1, 3]), np.array([5, 6, 7, 8, 9, 4], np.int32)
    columns = [torch.from_numpy(column.astype(np.int32)) for column in (slots, slots, positions)]
    given = (np.zeros(9, np.int32),) * slots.size
    rows = SampleRows(
        slots, np.ones_like(slots), positions, parts.refusing, *columns, None, True, b"", given,
        groups=group_samples(slots, CPU),
    )  # fmt: skip
    logits = torch.eye(6, LIMITS.vocab_size).roll(10, 1)  # tokens 10 to 15
    chosen = SamplingInputs(logits, logits.argmax(1), torch.arange(20, 26))
    step = Unsampled(rows, chosen, torch.tensor(STATUS_OK), NO_STEP_VALUES)
    tables = RowTables(LIMITS, CPU, TorchRowKernels())
    stage = SimpleNamespace(gather_logits=lambda own: own)
    sampler = StepSampler(stage, parts, tables, None)
    sampled = sampler.sample(step)
    assert sampled.token_ids.tolist() == [10, 11, 12, 13, 14, 15]
    assert sampled.refused.tolist() == [0, 1, 0]
    assert sampler.following(rows, sampled).tolist() == [[11, 24, 15], [0, 1, 0]]
    assert tables.last_sampled[[0, 1, 3]].tolist() == [11, 24, 15]
    history = SampledTokens(6, 30)
    replies = StepReplies(Link(1, CPU), history, DraftCounts(), is_output_rank=True)
    output = replies.of_tokens(
        ReplyIdentity(1, 2, 0, weights_version=0), rows, sampled, step.status
    )
    reply, _ = output.result()
    assert reply.slots == bitmap([0, 1, 3])
    assert np.frombuffer(reply.sampled_token_ids, "<i4").tolist() == [10, 11, 12, 13, 15]
    assert [*reply.num_sampled] == [2, 2, 1]
    assert [history.known_to(slot, 1, 0) for slot in (0, 3)] == [7, 5]
    assert history.between(0, 6, 7).tolist() == [11] and history.between(3, 4, 5).tolist() == [15]


def test_lost_rows_have_drafts_where_other_ranks_have_them():
    """Slot 0 has none. What a rank returns in place of a failed step's tokens has the shape of what
    the others return, row by row."""
    limits = StepLimits(5, 40, 30, 50, 4, 30, max_drafts=3)
    state = request_state(limits)
    tables = RowTables(limits, CPU, TorchRowKernels())
    builder = InputBuilder(state, tables, HostStaging(), ExactShapes())
    message, arrays = admit(
        [6, 6, 3],
        [6, 8, 4],
        num_drafts=int32s(1, 2, 2, 1),
        draft_token_ids=int32s(7, 8, 9),
        deferred=bitmap([0, 1, 2]),
    )
    step = state.apply(message, arrays)
    inputs = builder.build(step)
    lost = builder.lost(step, step.deferred)
    assert lost.rows.slots_np.tolist() == inputs.sample_rows.slots_np.tolist() == [0, 1, 1, 1, 2, 2]
    for slots in ([0], [1], [0, 2], [0, 1, 2]):
        taken = np.flatnonzero(np.isin(lost.rows.slots_np, slots))
        own = [rows.keep(taken, 0).has_drafts for rows in (lost.rows, inputs.sample_rows)]
        assert own == [slots != [0]] * 2
