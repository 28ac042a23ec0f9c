"""The part that pools: what it refuses, what it keeps between chunks, and its outputs against a
plain computation of the same rows."""

import numpy as np
import pytest
import torch

from rpc_schema.errors import InvalidStepError
from rpc_schema.pooling import (
    MAX_POOLED_BYTES,
    PooledTask,
    PoolingParams,
    PoolingSupport,
)
from rpc_schema.sampling import RandomSampling
from rpc_schema.step import ExecuteModel, NewRequestData
from worker_daemon.distributed.tp import SingleRank
from worker_daemon.layers.setup import LayerSetup
from worker_daemon.layers.torch_ops import TorchOps
from worker_daemon.models.description import PoolerSpec
from worker_daemon.models.pooler import Pooler
from worker_daemon.runner.parts.registry import make_parts
from worker_daemon.runner.request_state import RequestState
from worker_daemon.runner.scheduled_step import StepLimits
from worker_daemon.sample.sampler import TorchSampling

CPU = torch.device("cpu")
WIDTH = 8
BLOCK = 4


def support(states="mean", **fields):
    tasks = (
        PooledTask(task="embed", width=WIDTH, states=states),
        PooledTask(task="token_embed", width=WIDTH, states="each"),
    )
    return PoolingSupport(tasks=tasks, **fields)


def limits(pooling, **fields):
    sizes = {"max_num_seqs": 6, "max_num_batched_tokens": 64, "max_model_len": 64}
    return StepLimits(
        **{**sizes, **fields}, vocab_size=50, block_size=BLOCK, num_blocks=99, pooling=pooling
    )


def make_rows(pooling, **fields):
    """Rows of a last stage without a final norm."""
    sizes = limits(pooling, **fields)
    setup = LayerSetup(WIDTH, SingleRank(), torch.float32, CPU, TorchOps())
    pooler = Pooler(None, PoolerSpec(normalize=False), setup)
    return RequestState(sizes, make_parts(sizes, CPU, TorchSampling(), pooler=pooler))


def admission(slot, num_tokens, *extensions, num_computed=0):
    return NewRequestData(
        slot=slot,
        req_id=f"r{slot}",
        num_tokens=num_tokens,
        num_prompt_tokens=num_tokens,
        num_computed_tokens=num_computed,
        extensions=extensions,
    )


class Steps:
    """Sends steps to rows, and has the part take in random hidden states."""

    def __init__(self, state, seed=0):
        self.state = state
        self.seq = 0
        self.random = torch.Generator().manual_seed(seed)
        self.states = {}
        """By slot, all hidden states so far."""

    def apply(self, counts, new=(), finished=(), **fields):
        self.seq += 1
        slots = np.array(sorted(counts), np.int64)
        blocks = [(r.slot, -(-r.num_tokens // BLOCK)) for r in new]
        owners = np.repeat([s for s, _ in blocks], [n for _, n in blocks]).astype("<u2")
        bits = np.zeros(8, bool)
        bits[slots] = True
        message = ExecuteModel(
            epoch=1,
            link=0,
            seq=self.seq,
            total_num_scheduled_tokens=sum(counts.values()),
            scheduled=np.packbits(bits, bitorder="little").tobytes(),
            num_scheduled_tokens=np.array([(s, counts[s]) for s in slots], "<i4").tobytes(),
            new_block_slots=owners.tobytes(),
            new_block_ids=(1 + np.arange(owners.size)).astype("<i4").tobytes(),
            finished=np.array(finished, "<u2").tobytes(),
            scheduled_new_reqs=tuple(new),
            **fields,
        )
        tokens = [np.zeros(sum(r.num_tokens for r in new), "<i4").tobytes()] if new else []
        return self.state.apply(message, tokens)

    def run(self, counts, new=(), finished=()):
        """Return the outputs by slot."""
        step = self.apply(counts, new, finished)
        self.state.parts.admit(step.new_requests)
        for request in new:
            self.states[request.slot] = torch.zeros(0, WIDTH)
        padding = 3
        hidden = torch.randn(sum(counts.values()) + padding, WIDTH, generator=self.random)
        first = 0
        for slot in sorted(counts):
            own = hidden[first : first + counts[slot]]
            self.states[slot] = torch.cat((self.states[slot], own))
            first += counts[slot]
        reports = () if step.pooling is None else self.state.parts.pool(hidden, step)
        assert all(not report.per_row for report in reports)
        return {slot: own for report in reports for slot, own in outputs(report).items()}, step


def outputs(report):
    slots = np.frombuffer(report.extension.slots, "<u2").tolist()
    sizes = np.frombuffer(report.extension.sizes, "<i4").reshape(-1, 2).tolist()
    assert report.is_one_frame
    column = torch.cat([piece.flatten() for piece in report.columns])
    values = torch.split(column, [rows * width for rows, width in sizes])
    return {s: v.view(*size) for s, v, size in zip(slots, values, sizes, strict=True)}


@pytest.mark.parametrize("states", ["last", "mean"])
def test_outputs_of_random_chunks_beside_rows_that_sample(states):
    rng = np.random.default_rng(4)
    steps = Steps(make_rows(support(states)))
    for _ in range(5):  # the same slots, again and again
        lengths = rng.integers(1, 20, 5).tolist()
        asked = [
            (PoolingParams(task="embed"),),
            (),
            (PoolingParams(task="token_embed", dimensions=3),),
            (PoolingParams(task="embed", dimensions=5),),
            (PoolingParams(task="token_embed"),),
        ]
        rng.shuffle(asked)
        new = [admission(slot, lengths[slot], *asked[slot]) for slot in range(5)]
        left, found, first = dict(enumerate(lengths)), {}, True
        while left:
            chosen = {s: int(rng.integers(1, n + 1)) for s, n in left.items() if rng.random() < 0.7}
            if first or not chosen:
                chosen = {s: int(rng.integers(1, n + 1)) for s, n in left.items()}
            ended, step = steps.run(chosen, new if first else ())
            first = False
            left = {s: n - chosen.get(s, 0) for s, n in left.items() if n > chosen.get(s, 0)}
            assert {s for s in chosen if s not in left and asked[s]} == ended.keys()
            sampling = step.slots[step.num_samples > 0].tolist()
            assert sampling == [s for s in sorted(chosen) if s not in left and not asked[s]]
            found |= ended
        for slot, params in enumerate(asked):
            if not params:
                continue
            width, own = params[0].dimensions or WIDTH, steps.states[slot]
            if params[0].task == "embed":
                own = own[-1:] if states == "last" else own.mean(0, keepdim=True)
            torch.testing.assert_close(found[slot], own[:, :width])
        steps.run({}, finished=range(5))


def test_rows_of_a_request_that_was_ended_early_are_dropped():
    steps = Steps(make_rows(support()))
    each = PoolingParams(task="token_embed")
    steps.run({0: 4, 1: 2}, [admission(0, 9, each), admission(1, 6, each)])
    part = next(m.part for m in steps.state.parts._members if m.part.pools)
    assert set(part._kept) == {0, 1}
    steps.run({1: 2}, finished=[0])
    assert set(part._kept) == {1}


def test_steps_without_a_row_that_pools_do_not_name_one():
    steps = Steps(make_rows(support()))
    _, step = steps.run({0: 5}, [admission(0, 5)])
    assert step.pooling is None and step.num_samples.all()
    _, step = steps.run({1: 3}, [admission(1, 5, PoolingParams(task="embed"))])
    assert step.pooling.tolist() == [1]
    _, step = steps.run({0: 1})
    assert step.pooling is None and step.num_samples.all()


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (admission(0, 5, PoolingParams(task="classify")), "task"),
        (admission(0, 5, PoolingParams(task="embed", dimensions=9)), "dimensions"),
        (admission(0, 5, PoolingParams(task="embed"), RandomSampling(temperature=1.0)), "Random"),
        (admission(0, 5, PoolingParams(task="embed"), num_computed=4), "num_computed_tokens"),
    ],
)
def test_a_new_request_that_cannot_pool_is_refused_and_nothing_applied(request_, named):
    steps = Steps(make_rows(support()))
    with pytest.raises(InvalidStepError, match=named):
        steps.apply({0: 1}, [request_])
    assert not steps.state.counts.live.any()
    assert not steps.state.counts.num_pooling


def test_rows_with_drafts_sample_beside_rows_that_pool():
    steps = Steps(make_rows(support(), max_drafts=2))
    steps.run({0: 5}, [admission(0, 5)])
    pools = admission(1, 5, PoolingParams(task="embed"))
    step = steps.apply({0: 3, 1: 5}, [pools], num_drafts=np.array([0, 2], "<i4").tobytes())
    assert step.num_samples.tolist() == [3, 0] and step.pooling.tolist() == [1]


def test_whole_prompts_are_not_cut():
    steps = Steps(make_rows(support(whole_prompts=True)))
    params = PoolingParams(task="embed")
    with pytest.raises(InvalidStepError, match="whole prompts"):
        steps.apply({0: 3}, [admission(0, 5, params)])
    with pytest.raises(InvalidStepError, match="in one step"):
        steps = Steps(make_rows(support(whole_prompts=True), max_num_batched_tokens=8))
        steps.apply({0: 8}, [admission(0, 9, params)])


def test_model_without_an_output_layer_takes_no_request_that_samples():
    sizes = {"generates": False}
    steps = Steps(make_rows(support(), **sizes))
    with pytest.raises(InvalidStepError, match="no output layer"):
        steps.apply({0: 5}, [admission(0, 5)])


def test_outputs_of_a_step_must_fit_into_its_reply():
    """Each alone would fit."""
    width = MAX_POOLED_BYTES // 4 // 40
    tasks = (PooledTask(task="token_embed", width=width, states="each"),)
    steps = Steps(make_rows(PoolingSupport(tasks=tasks)))
    params = PoolingParams(task="token_embed")
    new = [admission(slot, 21, params) for slot in range(2)]
    with pytest.raises(InvalidStepError, match="bytes of outputs"):
        steps.apply({0: 21, 1: 21}, new)
    with pytest.raises(InvalidStepError, match="at most 40 tokens"):
        steps.apply({0: 41}, [admission(0, 41, params)])
    # Chunks of five prompts are kept, those of six are too much.
    new = [admission(slot, 40, params) for slot in range(6)]
    with pytest.raises(InvalidStepError, match="are kept"):
        Steps(make_rows(PoolingSupport(tasks=tasks), max_num_batched_tokens=400)).apply(
            dict.fromkeys(range(6), 39), new
        )
