"""Random requests with random subsets of all features, and an independent judge of their tokens:
transformers' model in float64, with the rules implemented again.

A new feature needs a line in GENERATING (or its own task in _pooling), and a line in Judge._scores.
"""

import copy
import json
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from rpc_schema.pooling import PoolingParams
from tests.support.checkpoints import Checkpoint
from tests.support.pooling_reference import embedding, last_states
from tests.support.structured import EOS_TOKEN_ID, VOCAB_SIZE, random_case
from worker_client.requests import GenerationRequest, RequestParser
from worker_client.scheduler import RequestOutput
from worker_client.structured.grammars import Grammars
from worker_daemon.sample.noise import gumbel_noise

TIE = 1e-5
"""Difference, in units of the largest logit, below which float32 sums in different orders cannot be
distinguished."""
CLOSE = {"rtol": 1e-3, "atol": 1e-4}
"""Tolerances for values that are reported in float32."""
NUM_COMMON = 12
"""Tokens that prompts and bad words often use, so that rules take effect."""
FIRST_TOKEN = 4
MAX_TOKENS = 22
LONGEST_PROMPT = 38
NUM_LONG = 2
MOST_ARRIVALS = 20
"""Requests arrive after at most this many results."""

Fields = dict[str, Any]
Draw = Callable[[random.Random], Fields]


class Feature(NamedTuple):
    """A feature that a request may use."""

    name: str
    share: float
    """Share of the generating requests that use it."""
    draw: Draw


def _tokens(rng: random.Random, count: int) -> list[int]:
    last = FIRST_TOKEN + NUM_COMMON if rng.random() < 0.5 else VOCAB_SIZE
    return [rng.randrange(FIRST_TOKEN, last) for _ in range(count)]


def _random_sampling(rng: random.Random) -> Fields:
    fields: Fields = {"temperature": rng.choice([0.6, 1.0, 1.7])}
    for name, values in (("top_k", [1, 5, 40]), ("top_p", [0.5, 0.9]), ("min_p", [0.02, 0.2])):
        if rng.random() < 0.4:
            fields[name] = rng.choice(values)
    return fields


def _stops(rng: random.Random) -> Fields:
    fields: Fields = {"ignore_eos": rng.random() < 0.4, "min_tokens": rng.choice([0, 0, 2, 6])}
    return fields | {"stop_token_ids": rng.sample(range(FIRST_TOKEN, VOCAB_SIZE), 40)}


def _penalties(rng: random.Random) -> Fields:
    return {
        "presence_penalty": rng.uniform(-2, 2),
        "frequency_penalty": rng.uniform(-2, 2),
        "repetition_penalty": rng.uniform(0.5, 2),
    }


def _bias(rng: random.Random) -> Fields:
    biased = rng.sample(range(VOCAB_SIZE), rng.randint(1, 60))
    biased += range(FIRST_TOKEN, FIRST_TOKEN + NUM_COMMON) if rng.random() < 0.5 else ()
    return {"logit_bias": {str(token): float(np.float32(rng.gauss(3, 4))) for token in biased}}


def _allowed(rng: random.Random) -> Fields:
    return {"allowed_token_ids": rng.sample(range(VOCAB_SIZE), rng.randint(20, VOCAB_SIZE))}


def _bad_words(rng: random.Random) -> Fields:
    return {"bad_words": [_tokens(rng, rng.randint(1, 3)) for _ in range(rng.randint(1, 60))]}


GENERATING = (
    Feature("random sampling", 0.6, _random_sampling),
    Feature("logprobs", 0.3, lambda rng: {"logprobs": rng.randint(0, 5)}),
    Feature("stop tokens", 0.4, _stops),
    Feature("penalties", 0.35, _penalties),
    Feature("bias", 0.3, _bias),
    Feature("allowed tokens", 0.2, _allowed),
    Feature("bad words", 0.3, _bad_words),
    Feature("grammar", 0.4, lambda rng: {"structured_outputs": random_case(rng).options}),
)


def _pooling(rng: random.Random, task: str) -> Fields:
    pooling: Fields = {"task": task}
    if rng.random() < 0.4:
        pooling["use_activation"] = rng.random() < 0.5
    if rng.random() < 0.4:
        pooling["dimensions"] = rng.randint(1, 64)
    return {"pooling": pooling}


class Mix(NamedTuple):
    """Requests of one run."""

    lines: list[Fields]
    """Fields of the input lines."""
    arrivals: list[int]
    """Number of results before each arrives."""

    @property
    def texts(self) -> list[str]:
        """Return the lines."""
        return [json.dumps(line) for line in self.lines]

    @property
    def requests(self) -> dict[str, GenerationRequest]:
        """Return the requests by id."""
        parser = RequestParser(None, seed=1)
        made = [parser.from_fields(line, index) for index, line in enumerate(self.lines)]
        return {request.id: request for request in made}


def random_mix(rng: random.Random, tasks: Sequence[str], count: int) -> Mix:
    """Return requests that use each feature and each pooling task at least once. Half of them share
    a prefix."""
    stems = [_tokens(rng, rng.randint(5, 14)) for _ in range(2)]
    forced: list[str] = [*(feature.name for feature in GENERATING), *tasks]
    lines = []
    for index in range(count):
        stem = rng.choice(stems) if rng.random() < 0.5 else []
        tail = _tokens(rng, rng.randint(1, LONGEST_PROMPT - len(stem)))
        name = forced[index] if index < len(forced) else ""
        if name in tasks or (not name and rng.random() < 0.3):
            own = _pooling(rng, name or rng.choice(tasks))
        else:
            own = _generating(rng, name)
        lines.append({"id": f"r{index}", "prompt_token_ids": stem + tail, **own})
    rng.shuffle(lines)
    arrivals = [max(0, rng.randint(-MOST_ARRIVALS, MOST_ARRIVALS)) for _ in lines]
    return Mix([*_long(rng), *lines], [0] * NUM_LONG + arrivals)


def _long(rng: random.Random) -> list[Fields]:
    """Return requests that come first and cannot all stay in the cache until their ends."""
    fields = {"max_tokens": MAX_TOKENS, "ignore_eos": True}
    return [
        {"id": f"long{index}", "prompt_token_ids": _tokens(rng, 24), **fields, **_penalties(rng)}
        for index in range(NUM_LONG)
    ]


def _generating(rng: random.Random, forced: str) -> Fields:
    fields: Fields = {"max_tokens": rng.randint(6, MAX_TOKENS), "seed": rng.randrange(1 << 60)}
    for feature in GENERATING:
        if feature.name == forced or rng.random() < feature.share:
            fields |= feature.draw(rng)
    return fields


class Disagreement(AssertionError):
    """An output that the reference cannot produce."""


class Judge:
    """Checks outputs against their requests."""

    def __init__(self, checkpoint: Checkpoint, grammars: Grammars) -> None:
        self._checkpoint = checkpoint
        self._exact = copy.deepcopy(checkpoint.model).double()
        self._grammars = grammars

    def check(self, request: GenerationRequest, output: RequestOutput) -> None:
        """Check every token of an output, or its pooled values.

        A token is right if the reference could choose it with logits changed by up to TIE, which
        covers ties and the borders of top-k, top-p and min-p.

        Raises:
            Disagreement: one is not.
        """
        if request.pooling is not None:
            expected = self._pooled(request, request.pooling)
            np.testing.assert_allclose(output.pooled, expected, **CLOSE)
            return
        stops = set(request.stop_ids([EOS_TOKEN_ID]))
        tokens = output.token_ids
        ended = [index for index, token in enumerate(tokens) if token in stops]
        _expect(ended in ([], [len(tokens) - 1]), request, "goes on past a stop token")
        expected_end = "stop" if ended else "length"
        if output.finish_reason == "error":
            _expect(not ended and len(tokens) < request.max_tokens, request, output.error)
        else:
            _expect(output.finish_reason == expected_end, request, output.finish_reason)
            _expect(bool(ended) or len(tokens) == request.max_tokens, request, "length")
        self._check_tokens(request, output)

    def _check_tokens(self, request: GenerationRequest, output: RequestOutput) -> None:
        prompt, tokens = request.prompt_token_ids.tolist(), output.token_ids
        with torch.no_grad():
            ids = torch.tensor([[*prompt, *tokens]])
            logits = self._exact(ids).logits[0, len(prompt) - 1 :].numpy()
        matcher = None
        if request.structured_outputs is not None:
            matcher = self._grammars.compile(request.structured_outputs).result().deep_copy()
        for index in range(len(tokens) + (output.finish_reason == "error")):
            row = logits[index].copy()
            if matcher is not None:
                words = self._grammars.fill([matcher])[0]
                if matcher.is_error():
                    _expect(index == len(tokens), request, f"{index}: {matcher.get_error()}")
                    return
                bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: row.size]
                row[bits == 0] = -np.inf
            if output.logprobs is not None and index < len(tokens):
                _check_logprobs(request, row, index, output)
            slack = TIE * max(1.0, np.abs(logits[index]).max(), request.repetition_penalty)
            scores = _scores(request, row, tokens[:index])
            if index == len(tokens):
                _expect(not np.isfinite(scores).any(), request, f"{index}: something is left")
                return
            if not np.isfinite(scores).any():
                _expect(False, request, f"token {index}: nothing may be sampled")
            _check_choice(request, scores, slack, index, tokens[index])
            if matcher is not None:
                _expect(matcher.consume_token(tokens[index]), request, f"{index}: grammar")

    def _pooled(self, request: GenerationRequest, pooling: PoolingParams) -> np.ndarray:
        states = last_states(self._checkpoint, request.prompt_token_ids.tolist())
        chosen = states if pooling.task == "token_embed" else states[-1]
        return embedding(chosen, pooling.dimensions, pooling.use_activation is not False)


def _scores(request: GenerationRequest, row: np.ndarray, output: list[int]) -> np.ndarray:
    """Return float64 [V] after the grammar mask, by the rules of docs/sampling.md, without
    temperature and filters."""
    scores, prompt = row.copy(), request.prompt_token_ids.tolist()
    if request.allowed_token_ids is not None:
        banned = np.ones(scores.size, bool)
        banned[list(request.allowed_token_ids)] = False
        scores[banned] = -np.inf
    known = [*prompt, *output]
    for word in request.bad_words:
        *before, last = word
        if known[len(known) - len(before) :] == before:
            scores[last] = -np.inf
    for token, bias in request.logit_bias.items():
        scores[token] += bias
    if len(output) < request.min_tokens:
        scores[list(request.stop_ids([EOS_TOKEN_ID]))] = -np.inf
    seen = list({*known})
    penalty = request.repetition_penalty
    scores[seen] = np.where(scores[seen] > 0, scores[seen] / penalty, scores[seen] * penalty)
    counts = np.bincount(output, minlength=scores.size)
    return scores - request.frequency_penalty * counts - request.presence_penalty * (counts > 0)


def _check_choice(
    request: GenerationRequest, scores: np.ndarray, slack: float, index: int, token: int
) -> None:
    if not request.temperature:
        short = scores.max() - scores[token]
        _expect(short <= 2 * slack, request, f"token {index} is {token}, short of {short:.3g}")
        return
    scaled, slack = scores / request.temperature, slack / request.temperature
    scaled -= scaled.max()
    position = len(request.prompt_token_ids) + index
    noise = gumbel_noise(torch.tensor([request.seed]), torch.tensor([position]), scores.size)
    noisy = scaled + noise[0].double().numpy()
    may_be = _kept(request, scaled, slack)
    must_be = _kept(request, scaled, -slack)
    _expect(bool(may_be[token]), request, f"token {index} is {token}, which a filter drops")
    best = noisy[must_be].max(initial=-np.inf)
    short = best - noisy[token]
    _expect(short <= 2 * slack + 1e-5, request, f"token {index} is {token}, short of {short:.3g}")


def _kept(request: GenerationRequest, scaled: np.ndarray, slack: float) -> np.ndarray:
    """Return bool [V]: tokens that min-p, top-k and top-p may keep, or certainly keep if slack is
    negative."""
    kept = np.isfinite(scaled)
    if request.min_p:
        kept &= scaled >= np.log(request.min_p) - 2 * slack
    if request.top_k:
        ordered = np.sort(np.where(kept, scaled, -np.inf))[::-1]
        if slack > 0:
            kept &= scaled >= ordered[request.top_k - 1] - 2 * slack
        else:
            kept &= scaled > ordered[request.top_k] - 2 * slack
    if request.top_p < 1:
        weights = np.where(kept, np.exp(scaled), 0.0)
        order = np.argsort(-scaled, kind="stable")
        before = np.empty_like(weights)
        before[order] = np.cumsum(weights[order]) - weights[order]
        # Equally likely tokens may come before or after this one.
        likely = np.maximum(scaled, -1e9)
        tied = np.abs(likely[:, None] - likely) <= 2 * abs(slack)
        own = (tied * weights).sum(1) - weights
        before += -own if slack > 0 else own
        kept &= before < weights.sum() * request.top_p * (1 + 8 * slack) + 1e-6 * np.sign(slack)
    return kept


def _check_logprobs(
    request: GenerationRequest, row: np.ndarray, index: int, output: RequestOutput
) -> None:
    """row: float64 [V] logits after the grammar."""
    top = row.max()
    exact = row - top - np.log(np.exp(row - top).sum())
    given = output.logprobs[index]
    _expect(int(given.token_ids[0]) == output.token_ids[index], request, "its own logprob")
    np.testing.assert_allclose(given.logprobs, exact[given.token_ids], **CLOSE)
    best = np.sort(exact)[::-1][: len(given.logprobs) - 1]
    np.testing.assert_allclose(given.logprobs[1:], best, **CLOSE)
    slack = 1e-3
    own = exact[given.token_ids[0]]
    least, most = (exact > own + slack).sum() + 1, (exact >= own - slack).sum()
    _expect(least <= given.rank <= max(most, least), request, f"{index}: rank {given.rank}")


def _expect(holds: bool, request: GenerationRequest, what: str) -> None:
    if not holds:
        raise Disagreement(f"{request.id}: {what}: {request}")


def assert_same(judge: Judge, request: GenerationRequest, alone: RequestOutput, other) -> None:
    """Assert that two outputs of a request are equal, or diverge at a tie or a border, where the
    judge accepts both completely."""
    if alone.token_ids != other.token_ids or alone.finish_reason != other.finish_reason:
        judge.check(request, alone)
        judge.check(request, other)
        return
    assert alone.error == other.error, request
    assert (alone.pooled is None) == (other.pooled is None), request
    if alone.pooled is not None:
        np.testing.assert_allclose(other.pooled, alone.pooled, **CLOSE)
    assert (alone.logprobs is None) == (other.logprobs is None), request
    for ours, theirs in zip(alone.logprobs or (), other.logprobs or (), strict=True):
        np.testing.assert_allclose(theirs.logprobs, ours.logprobs, **CLOSE)
        clear = _apart(ours.logprobs)
        np.testing.assert_array_equal(theirs.token_ids[clear], ours.token_ids[clear])


def _apart(logprobs: np.ndarray) -> np.ndarray:
    """Return bool [n]: the first, and those whose neighbors are clearly less likely. The neighbor
    of the last one is not reported."""
    likely = np.maximum(logprobs[1:], -1e9)
    gaps = np.diff(likely, prepend=np.inf) < -1e-3
    return np.concatenate(([True], gaps & np.append(gaps[1:], False)))
