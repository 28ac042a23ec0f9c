"""Rules on tokens against transformers' processors, over whole generations of rows that come and
go."""

import msgspec
import numpy as np
import pytest
import torch

from rpc_schema.errors import InvalidStepError
from rpc_schema.sampling import LogitsProcessors, LogprobTokens
from rpc_schema.step import NO_TOKEN, NewRequestData
from rpc_schema.token_rules import (
    MAX_BIASED_TOKENS,
    AllowedTokens,
    BadWords,
    LogitBias,
    Penalties,
    pack_token_ids,
)
from tests.support.sample_rows import sample_rows
from tests.support.token_rules import RuleProcessor, random_params
from worker_client.requests import SamplingParams
from worker_daemon.runner.parts.registry import make_parts
from worker_daemon.runner.scheduled_step import NO_STEP_VALUES, StepLimits
from worker_daemon.sample.sampler import TorchSampling

CPU = torch.device("cpu")
VOCAB = 50
LIMITS = StepLimits(6, 64, 96, VOCAB, 4, 64)


def admission(slot, tokens, num_prompt, params):
    return NewRequestData(
        slot=slot,
        req_id=f"r{slot}",
        num_tokens=len(tokens),
        num_prompt_tokens=num_prompt,
        num_computed_tokens=0,
        extensions=params.extensions(),
    )


class Rows:
    """Parts of a runner, and the requests in their slots."""

    def __init__(self):
        self.parts = make_parts(LIMITS, CPU, TorchSampling())
        self.rows = {}

    def admit(self, slot, tokens, num_prompt, params):
        request = admission(slot, tokens, num_prompt, params)
        self.parts.check(request, LIMITS)
        self.parts.admit([request], [np.array(tokens, np.int32)])
        self.rows[slot] = (list(tokens), num_prompt, params)

    def step(self, logits):
        """Sample every row; logits of NaN give no token."""
        slots = sorted(self.rows)
        positions = [len(self.rows[slot][0]) for slot in slots]
        rows = sample_rows(slots, positions, self.parts.used_by(np.array(slots)))
        given = logits[slots]
        tokens = self.parts.sample(given, rows, NO_STEP_VALUES).token_ids.tolist()
        # Rows that are sampled later still need them.
        assert torch.equal(given.nan_to_num(), logits[slots].nan_to_num())
        for slot, token in zip(slots, tokens, strict=True):
            if token != NO_TOKEN:
                self.rows[slot][0].append(token)
        return dict(zip(slots, tokens, strict=True))


def test_generations_are_those_of_the_processors():
    """Slots get new requests over time, some with generated tokens; sometimes a row has NaN logits
    and gains nothing."""
    seed = int(np.random.default_rng().integers(1 << 30))
    rng = np.random.default_rng(seed)
    rows, checked = Rows(), 0
    for _ in range(60):
        for slot in range(LIMITS.max_num_seqs):
            if slot not in rows.rows or rng.random() < 0.07:
                tokens = rng.integers(0, 12, rng.integers(1, 20)).tolist()
                rows.admit(
                    slot, tokens, int(rng.integers(1, len(tokens) + 1)), random_params(rng, VOCAB)
                )
        logits = torch.from_numpy(rng.standard_normal((6, VOCAB)).astype(np.float32)) * 2
        logits[:, :12] += 1.5
        broken = rng.random() < 0.1
        if broken:
            logits[2] = torch.nan
        before = {slot: list(row[0]) for slot, row in rows.rows.items()}
        for slot, token in rows.step(logits).items():
            if broken and slot == 2:
                assert token == NO_TOKEN, seed
                continue
            _, num_prompt, params = rows.rows[slot]
            processor = RuleProcessor(params, num_prompt)
            scores = processor(torch.tensor([before[slot]]), logits[slot : slot + 1])[0]
            best = scores.topk(2).values
            if best[0] - best[1] > 1e-4:
                checked += 1
                assert token == scores.argmax(), (seed, slot, params)
    assert checked > 200


def test_a_small_penalty_is_not_lost_in_half_precision():
    """Logits of 24 and 24.125 in bf16 are neighbours: less than a step between them counts."""
    rows = Rows()
    rows.admit(0, [3, 7], 1, SamplingParams(presence_penalty=0.13))
    rows.admit(1, [3, 7], 1, SamplingParams(logit_bias={5: 0.13}))
    logits = torch.zeros(6, VOCAB, dtype=torch.bfloat16)
    logits[:, 7], logits[:, 5] = 24.125, 24.0
    assert rows.step(logits) == {0: 5, 1: 5}


def test_rules_of_rows_that_have_ended_are_no_others():
    """Deferred sampling: what a step uses is more than what its remaining rows do."""
    rows = Rows()
    every = SamplingParams(
        presence_penalty=1.0,
        logit_bias={1: 9.0},
        allowed_token_ids=(1,),
        bad_words=((1,),),
        logprob_token_ids=(3,),
    )
    rows.admit(0, [4], 1, every)
    rows.admit(1, [4], 1, SamplingParams())
    used, logits = rows.parts.used_by(np.array([0])), torch.randn(1, VOCAB)
    output = rows.parts.sample(logits, sample_rows([1], [1], used), NO_STEP_VALUES)
    assert output.token_ids.tolist() == logits.argmax(1).tolist()


def test_logprobs_are_those_before_all_rules():
    rows = Rows()
    params = SamplingParams(
        logprobs=2, presence_penalty=2.0, logit_bias={1: 9.0}, allowed_token_ids=(1, 2)
    )
    rows.admit(0, [4, 1], 1, params)
    logits = torch.randn(6, VOCAB)
    used = rows.parts.used_by(np.array([0]))
    output = rows.parts.sample(logits[:1], sample_rows([0], [2], used), NO_STEP_VALUES)
    token_ids, logprobs, _ = output.reports[0].columns
    exact = logits[0].log_softmax(-1)
    assert token_ids[0, 1:].tolist() == exact.topk(2).indices.tolist()
    torch.testing.assert_close(logprobs[0], exact[token_ids[0].long()])


@pytest.mark.parametrize(
    ("extension", "field"),
    [
        (LogitBias.of({VOCAB: 1.0}), "logit_bias"),
        (LogitBias.of({-1: 1.0}), "logit_bias"),
        (LogitBias.of({1: float("nan")}), "logit_bias"),
        (LogitBias.of({1: 101.0}), "logit_bias"),
        (LogitBias(token_ids=pack_token_ids([1, 1]), biases=bytes(8)), "logit_bias"),
        (LogitBias(token_ids=pack_token_ids([1]), biases=bytes(8)), "logit_bias"),
        (LogitBias(token_ids=b"", biases=b""), "logit_bias"),
        (AllowedTokens(token_ids=b""), "allowed_token_ids"),
        (AllowedTokens(token_ids=b"\1\0\0"), "allowed_token_ids"),
        (AllowedTokens(token_ids=pack_token_ids([3, VOCAB])), "allowed_token_ids"),
        (LogprobTokens(token_ids=pack_token_ids([VOCAB])), "logprob_token_ids"),
        (LogitsProcessors(names=("odd",)), "logits_processors"),
        (BadWords.of([[1], []]), "bad_words"),
        (BadWords.of([[1] * 17]), "bad_words"),
        (BadWords.of([[1, VOCAB]]), "bad_words"),
        (BadWords(lengths=b"\2", token_ids=pack_token_ids([1])), "bad_words"),
    ],
)
def test_what_no_row_may_have_is_refused_by_name(extension, field):
    request = NewRequestData(
        slot=0,
        req_id="odd",
        num_tokens=3,
        num_prompt_tokens=3,
        num_computed_tokens=0,
        extensions=(extension,),
    )
    with pytest.raises(InvalidStepError) as refused:
        make_parts(LIMITS, CPU, TorchSampling()).check(request, LIMITS)
    assert refused.value.field == f"scheduled_new_reqs[odd].{field}"
    assert refused.value.fix


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", float("nan")),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0.0),
    ],
)
def test_no_message_brings_penalties_out_of_bounds(field, value):
    sent = msgspec.msgpack.encode(Penalties(**{field: value}))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(sent, type=Penalties)


def test_params_come_back_from_their_extensions():
    rng = np.random.default_rng()
    for _ in range(50):
        params = random_params(rng, VOCAB)
        assert SamplingParams.of(params.extensions()) == params
    most = dict.fromkeys(range(MAX_BIASED_TOKENS), 0.5)
    assert SamplingParams.of(SamplingParams(logit_bias=most).extensions()).logit_bias == most
