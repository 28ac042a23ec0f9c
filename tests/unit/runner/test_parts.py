"""The parts of a runner together: which rows use which, bans, logprobs, and the order in which they
act."""

import math
from typing import Any, get_args

import numpy as np
import pytest
import torch

from rpc_schema import extensions
from rpc_schema.errors import InvalidStepError
from rpc_schema.sampling import GrammarMasks, LogprobsWanted, RandomSampling, StopTokens
from rpc_schema.step import NO_TOKEN, NewRequestData
from tests.support.sample_rows import sample_rows
from worker_client.parts.registry import PARTS as DRIVER_PARTS
from worker_client.requests import SamplingParams
from worker_daemon.runner.parts.registry import PARTS, make_parts
from worker_daemon.runner.scheduled_step import NO_STEP_VALUES, StepLimits
from worker_daemon.sample.sampler import TorchSampling

CPU = torch.device("cpu")
VOCAB = 40
LIMITS = StepLimits(16, 64, 64, VOCAB, 4, 64)
PROMPT = 3
"""Tokens of every request's prompt."""


def admission(slot: int, params: SamplingParams = SamplingParams()) -> NewRequestData:  # noqa: B008
    return NewRequestData(
        slot=slot,
        req_id=f"r{slot}",
        num_tokens=PROMPT,
        num_prompt_tokens=PROMPT,
        num_computed_tokens=0,
        extensions=params.extensions(),
    )


def admitted(*params: SamplingParams) -> Any:
    """Parts with a request a slot, from slot 0 on."""
    parts = make_parts(LIMITS, CPU, TorchSampling())
    requests = [admission(slot, each) for slot, each in enumerate(params)]
    for request in requests:
        parts.check(request, LIMITS)
    parts.admit(requests)
    return parts


def sample(parts, logits, positions=None, step_values=NO_STEP_VALUES):
    slots = np.arange(logits.shape[0])
    positions = [PROMPT] * slots.size if positions is None else positions
    rows = sample_rows(slots, positions, parts.used_by(slots))
    return parts.sample(logits, rows, step_values)


def test_rows_without_an_extension_use_nothing():
    stops = SamplingParams(stop_token_ids=(3,))
    seeded = SamplingParams(seed=4, top_p=0.5)  # without a temperature they draw nothing
    parts = admitted(SamplingParams(), stops, seeded)
    assert parts.used_by(np.arange(3)) == 0


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.3, seed=0),
        SamplingParams(logprobs=0),
        SamplingParams(min_tokens=2, stop_token_ids=(1,)),
    ],
)
def test_a_row_uses_its_parts_until_another_request_has_its_slot(params):
    parts = admitted(SamplingParams(), params)
    assert parts.used_by(np.array([0])) == 0
    assert parts.used_by(np.array([0, 1])) == parts.used_by(np.array([1])) > 0
    logits = torch.randn(2, VOCAB)
    parts.admit([admission(1)])
    assert parts.used_by(np.arange(2)) == 0
    parts.admit([admission(0, SamplingParams(temperature=1.0, seed=0))])
    # The former request's temperature, ban and logprobs have gone with it.
    after = sample(parts, logits)
    assert after.token_ids[1] == logits[1].argmax()
    assert not after.reports


def test_stop_tokens_are_banned_until_min_tokens_are_there():
    stops = [(5, (2, 3)), (5, (2,)), (5, (2, 3)), (0, (2,))]
    generated = [0, 4, 5, 9]
    logits = torch.zeros(4, 6)
    logits[:, 2], logits[:, 3] = 50.0, 40.0
    logits = torch.cat((logits, torch.full((4, VOCAB - 6), -1e4)), 1)
    before = logits.clone()
    for temperature, allowed in ((0.0, {0}), (1.0, {0, 1, 4, 5})):
        parts = admitted(
            *(
                SamplingParams(
                    temperature=temperature, seed=0, min_tokens=least, stop_token_ids=ids
                )
                for least, ids in stops
            )
        )
        positions = [PROMPT + count for count in generated]
        tokens = sample(parts, logits, positions).token_ids.tolist()
        assert tokens[0] in allowed
        assert tokens[1:] == [3, 2, 2]
    assert torch.equal(logits, before)


def test_min_tokens_beyond_any_position_bans_for_ever():
    most = 2**31 - 1
    parts = admitted(SamplingParams(min_tokens=most, stop_token_ids=(2,)))
    logits = torch.zeros(1, VOCAB)
    logits[0, 2] = 9.0
    assert sample(parts, logits, [2**31 - 2]).token_ids.tolist() == [0]


def test_logprobs_are_those_of_the_logits_before_bans_and_temperature():
    rng = np.random.default_rng()
    # No two are so close that they have one logprob in float32.
    order = np.stack([rng.permutation(VOCAB) for _ in range(9)])
    logits = torch.from_numpy(order + rng.uniform(0, 0.9, order.shape)).float() * 0.3
    best = logits.argmax(-1).tolist()
    wanted = [None, 0, 5, 2, None, 5, 1, 0, 3]
    parts = admitted(
        *(
            SamplingParams(
                temperature=0.7 if row % 2 else 0.0,
                seed=row,
                min_tokens=1,
                stop_token_ids=(best[row],),
                logprobs=wanted[row],
            )
            for row in range(9)
        )
    )
    output = sample(parts, logits)
    (report,) = output.reports
    token_ids, logprobs, ranks = report.columns
    exact = logits.double().log_softmax(-1)
    assert report.extension.width == 5
    assert token_ids.shape == logprobs.shape == (9, 6)
    assert torch.equal(token_ids[:, 0].long(), output.token_ids)
    assert torch.equal(token_ids[:, 1:].long(), exact.topk(5).indices)
    expected = exact.gather(1, token_ids.long())
    assert torch.allclose(logprobs.double(), expected, atol=1e-5)
    for row, token in enumerate(output.token_ids.tolist()):
        assert token != best[row]
        assert ranks[row] == 1 + int((logits[row] > logits[row, token]).sum())


def test_masks_come_before_logprobs():
    parts, logits = admitted(SamplingParams(logprobs=3)), torch.randn(1, VOCAB)
    allowed = [4, 9, 30]
    words = np.zeros(2, np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1 << token % 32)
    masks = GrammarMasks(slots=b"\0\0", indices=b"\0\0")
    step_values = parts.check_step((masks,), [words.astype("<u4").tobytes()], LIMITS)
    output = sample(parts, logits, step_values=step_values)
    (report,) = output.reports
    token_ids, logprobs, _ = report.columns
    assert set(token_ids[0, 1:].tolist()) == set(allowed)
    assert math.isclose(float(logprobs[0, 1:].exp().sum()), 1.0, rel_tol=1e-5)


def test_rows_without_numbers_leave_the_logprobs_of_others_alone():
    parts = admitted(*(SamplingParams(logprobs=2) for _ in range(4)))
    logits = torch.randn(4, VOCAB)
    before = sample(parts, logits).reports[0].columns[1]
    logits[1, 17] = torch.nan
    after = sample(parts, logits)
    assert after.token_ids[1] == NO_TOKEN
    others = [0, 2, 3]
    assert torch.equal(after.reports[0].columns[1][others], before[others])


def test_random_rows_get_what_their_parameters_say():
    rng = np.random.default_rng()
    params = [
        SamplingParams(
            temperature=float(rng.choice([0.0, 0.5, 1.9])),
            top_k=int(rng.choice([0, 3])),
            top_p=float(rng.choice([1.0, 0.7])),
            min_p=float(rng.choice([0.0, 0.05])),
            seed=int(rng.integers(0, 2**63 - 1)),
        )
        for _ in range(16)
    ]
    params[0] = SamplingParams(temperature=1.0, seed=0)
    parts, logits = admitted(*params), torch.randn(16, VOCAB) * 4
    together = sample(parts, logits).token_ids.tolist()
    for slot, each in enumerate(params):
        alone = admitted(*params[:slot], each)
        rows = sample_rows([slot], [PROMPT], 1)
        own = alone.sample(logits[slot : slot + 1], rows, NO_STEP_VALUES).token_ids
        assert own.tolist() == [together[slot]]


def test_an_admission_that_fails_half_way_leaves_nothing_to_the_next_request(monkeypatch):
    """Its step fails, and another request gets the slot."""
    parts = admitted(SamplingParams(min_tokens=9, stop_token_ids=(7,)))
    doomed = SamplingParams(min_tokens=9, stop_token_ids=(2,), temperature=1.0, seed=0, logprobs=1)
    with monkeypatch.context() as patched:

        def full(*_):
            raise torch.OutOfMemoryError("no room")

        patched.setattr("worker_daemon.runner.parts.random_sampling.upload", full)
        with pytest.raises(torch.OutOfMemoryError):
            parts.admit([admission(1, doomed)])
    parts.admit([admission(1)])
    assert parts.used_by(np.array([1])) == 0
    logits = torch.zeros(2, VOCAB)
    logits[:, 2] = 9.0
    output = sample(parts, logits)
    assert output.token_ids.tolist() == [2, 2]
    assert not output.reports


def test_a_later_extension_replaces_an_earlier_one_of_its_kind():
    parts, logits = admitted(SamplingParams(), SamplingParams()), torch.zeros(2, VOCAB)

    def masks(slots, token):
        words = np.zeros((1, 2), np.uint32)
        words[:, token // 32] = np.uint32(1 << token % 32)
        shared = GrammarMasks(slots=slots, indices=bytes(len(slots)))
        return parts.check_step((shared,), [words.tobytes()], LIMITS)

    of_step, of_sampling = masks(b"\0\0\1\0", 5), masks(b"\1\0", 33)
    both = of_step.with_those_of(of_sampling)
    assert sample(parts, logits, step_values=of_step).token_ids.tolist() == [5, 5]
    assert sample(parts, logits, step_values=both).token_ids.tolist() == [0, 33]


def test_every_struct_of_a_union_has_one_part_on_each_side():
    for union, kinds in (
        (extensions.RequestExtension, [part.request_extension for part in PARTS]),
        (extensions.StepExtension, [part.step_extension for part in PARTS]),
        (extensions.RequestExtension, [part.extension for part in DRIVER_PARTS]),
        (extensions.ReplyExtension, [part.reply_extension for part in DRIVER_PARTS]),
    ):
        members = get_args(union) or (union,)
        assert sorted(members, key=str) == sorted(filter(None, kinds), key=str)


@pytest.mark.parametrize(
    ("carried", "field"),
    [
        ((StopTokens(token_ids=(VOCAB,)),), "stop_token_ids"),
        ((StopTokens(token_ids=(1,) * 1025),), "stop_token_ids"),
        ((RandomSampling(temperature=1e-6),), "temperature"),
        ((LogprobsWanted(count=1), LogprobsWanted(count=2)), "extensions"),
    ],
)
def test_what_no_row_may_have_is_refused_by_name(carried, field):
    request = NewRequestData(
        slot=1,
        req_id="odd",
        num_tokens=3,
        num_prompt_tokens=3,
        num_computed_tokens=0,
        extensions=carried,
    )
    with pytest.raises(InvalidStepError) as refused:
        make_parts(LIMITS, CPU, TorchSampling()).check(request, LIMITS)
    assert refused.value.field == f"scheduled_new_reqs[odd].{field}"
    assert refused.value.fix
