"""Random requests with random subsets of all features, and a judge of their outputs that is none of
ours: transformers' model in float64, with the rules written once more.

A feature that is new has a line in GENERATING (in COMMON, if requests that pool have it too, or a
task of its own in _pooling), and a line in Judge._scores.
"""

import copy
import dataclasses
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import transformers

from rpc_schema.config import LoraConfig
from rpc_schema.pooling import PoolingParams
from tests.support.checkpoints import Checkpoint
from tests.support.embedded_prompts import EmbeddedPrompt, random_rows, save
from tests.support.installed_processors import NAMES, apply_processors
from tests.support.lora_adapters import ALL, make_adapter
from tests.support.pooling_reference import embedding
from tests.support.structured import (
    EOS_TOKEN_ID,
    VOCAB_SIZE,
    allowed_tokens,
    begun,
    random_case,
    take,
)
from worker_client.inputs.host_tensor import HostTensor
from worker_client.inputs.request_parser import RequestParser
from worker_client.requests import GenerationRequest, forked
from worker_client.scheduler import RequestOutput
from worker_client.scheduler_output import Logprobs
from worker_client.structured.grammars import Grammars
from worker_daemon.sample.noise import gumbel_noise

TIE = 1e-5
"""Difference, in units of the largest logit, below which float32 sums in different orders cannot be
distinguished."""
CLOSE = {"rtol": 1e-3, "atol": 1e-4}
"""Tolerances for values that are reported in float32."""
NO_REPORTS = {
    "logprobs": None,
    "logprob_token_ids": None,
    "full_logprobs": False,
    "prompt_logprobs": None,
}
NUM_COMMON = 12
"""Tokens that prompts and bad words often use, so that rules take effect."""
FIRST_TOKEN = 4
MAX_TOKENS = 22
LONGEST_PROMPT = 38
NUM_LONG = 2
MOST_ARRIVALS = 20
"""Requests come after so many results at most."""
ADAPTERS = tuple(f"mixed{index}" for index in range(4))
ROOM = LoraConfig(max_loras=2, max_lora_rank=16, max_cpu_loras=len(ADAPTERS))
"""Fewer slots than adapters."""
EMBEDS = {"whole": 9, "soft": 4, "softer": 6}
"""Rows of embeddings that requests name, by the file's name."""
EMBEDDED_SHARE = 0.3

Fields = dict[str, Any]
Draw = Callable[[random.Random], Fields]


class Feature(NamedTuple):
    """A feature that a request may use."""

    name: str
    share: float
    """Of the requests."""
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


def _given_logprobs(rng: random.Random) -> Fields:
    return {"logprob_token_ids": rng.sample(range(VOCAB_SIZE), rng.randint(1, 5))}


COMMON = (Feature("adapter", 0.4, lambda rng: {"lora": rng.choice(ADAPTERS)}),)
"""Of requests that generate, and of those that pool."""

GENERATING = (
    *COMMON,
    Feature("random sampling", 0.6, _random_sampling),
    Feature("logprobs", 0.3, lambda rng: {"logprobs": rng.randint(0, 5)}),
    Feature("logprobs of tokens", 0.15, _given_logprobs),
    Feature("full logprobs", 0.3, lambda rng: {"full_logprobs": True}),
    Feature("prompt logprobs", 0.2, lambda rng: {"prompt_logprobs": rng.randint(0, 3)}),
    Feature("samples", 0.1, lambda rng: {"n": rng.randint(2, 3)}),
    Feature("processors", 0.2, lambda rng: {"logits_processors": [rng.choice(NAMES)]}),
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
    return {"pooling": pooling} | _drawn(rng, COMMON, "")


class Mix(NamedTuple):
    """Requests of one run."""

    lines: list[Fields]
    """Fields of the input lines."""
    arrivals: list[int]
    """After how many results each comes."""
    directory: Path
    """Of the files that lines name."""

    @property
    def texts(self) -> list[str]:
        """Return the lines."""
        return [json.dumps(line) for line in self.lines]

    @property
    def requests(self) -> dict[str, GenerationRequest]:
        """By id; each sample of several by itself."""
        parser = RequestParser(None, seed=1, directory=self.directory)
        made = [parser.from_fields(line, index) for index, line in enumerate(self.lines)]
        return {sample.id: sample for request in made for sample in forked(request)}


def make_adapters(
    checkpoint: Checkpoint, seed: int, *, targets: Sequence[str] = ALL
) -> dict[str, Checkpoint]:
    """Write ADAPTERS of random ranks, modules and scales, the same for each seed; return the merged
    models. targets: the modules to choose from."""
    rng, made = random.Random(seed), {}
    for name in ADAPTERS:
        options: Fields = {"seed": rng.randrange(1 << 30), "rank": rng.randint(1, 16)}
        options |= {"alpha": rng.uniform(2, 16), "use_rslora": rng.random() < 0.3}
        own = rng.sample(targets, rng.randint(1, len(targets)))
        pattern = {target: rng.randint(1, 16) for target in own if rng.random() < 0.3}
        made[name] = make_adapter(checkpoint, name, targets=own, rank_pattern=pattern, **options)
    return made


def random_mix(
    rng: random.Random, tasks: Sequence[str], count: int, directory: Path, hidden_size: int
) -> Mix:
    """Requests that have each feature and each task of pooling at least once. Half of them begin
    alike. directory: for the embeddings of some, which are written there."""
    files = _write_embeds(rng, directory, hidden_size)
    stems = [_tokens(rng, rng.randint(5, 14)) for _ in range(2)]
    forced = iter([*(feature.name for feature in GENERATING), *tasks])
    lines = []
    for index in range(count):
        name = next(forced, "")
        if name in tasks or (not name and rng.random() < 0.3):
            own = _pooling(rng, name or rng.choice(tasks))
        else:
            own = _generating(rng, name)
        lines.append({"id": f"r{index}", **_prompt(rng, stems, files), **own})
    rng.shuffle(lines)
    arrivals = [max(0, rng.randint(-MOST_ARRIVALS, MOST_ARRIVALS)) for _ in lines]
    return Mix([*_long(rng), *lines], [0] * NUM_LONG + arrivals, directory)


def _write_embeds(rng: random.Random, directory: Path, hidden_size: int) -> dict[str, str]:
    """Write EMBEDS; return their files' names."""
    values, files = np.random.default_rng(rng.randrange(1 << 60)), {}
    for name, count in EMBEDS.items():
        dtype = rng.choice([torch.float32, torch.float16, torch.bfloat16])
        rows = random_rows(values, count, hidden_size, dtype)
        files[name] = save(EmbeddedPrompt([], rows, ()), directory, name)["prompt_embeds"]
    return files


def _prompt(rng: random.Random, stems: list[list[int]], files: Mapping[str, str]) -> Fields:
    """A prompt of tokens, of embeddings, or of both."""
    stem = rng.choice(stems) if rng.random() < 0.5 else []
    if rng.random() >= EMBEDDED_SHARE:
        return {"prompt_token_ids": stem + _tokens(rng, rng.randint(1, LONGEST_PROMPT - len(stem)))}
    name = rng.choice(list(EMBEDS))
    fields: Fields = {"prompt_embeds": files[name]}
    if name == "whole":
        return fields
    rows = EMBEDS[name]
    tokens = stem + _tokens(rng, rng.randint(1, LONGEST_PROMPT - len(stem) - rows))
    fields["prompt_token_ids"] = tokens
    if rng.random() < 0.6:
        first, second = sorted(rng.choices(range(len(tokens) + 1), k=2))
        cut = rng.randint(1, rows - 1)
        fields["prompt_embeds_at"] = [[first, cut], [second + cut, rows - cut]]
    return fields


def _long(rng: random.Random) -> list[Fields]:
    """Return requests that come first and cannot all stay in the cache until their ends."""
    fields = {"max_tokens": MAX_TOKENS, "ignore_eos": True}
    return [
        {"id": f"long{index}", "prompt_token_ids": _tokens(rng, 24), **fields, **_penalties(rng)}
        for index in range(NUM_LONG)
    ]


def _generating(rng: random.Random, forced: str) -> Fields:
    fields: Fields = {"max_tokens": rng.randint(6, MAX_TOKENS), "seed": rng.randrange(1 << 60)}
    return fields | _drawn(rng, GENERATING, forced)


def _drawn(rng: random.Random, features: Sequence[Feature], forced: str) -> Fields:
    fields: Fields = {}
    for feature in features:
        if feature.name == forced or rng.random() < feature.share:
            fields |= feature.draw(rng)
    return fields


class Disagreement(AssertionError):
    """An output that the reference cannot produce."""


class Judge:
    """Checks outputs against their requests."""

    def __init__(
        self, checkpoint: Checkpoint, adapters: Mapping[str, Checkpoint], grammars: Grammars
    ) -> None:
        """adapters: the merged models, by adapter."""
        models = {None: checkpoint} | {name: adapters[name] for name in adapters}
        self._exact = {name: copy.deepcopy(own.model).double() for name, own in models.items()}
        for model in self._exact.values():
            model.config._experts_implementation = "eager"  # the other ones have no float64
        self._grammars = grammars

    def check(
        self, request: GenerationRequest, output: RequestOutput, before: "Past | None" = None
    ) -> None:
        """Check every token of an output, its pooled values and its log probabilities. before:
        where its first tokens came from, if not from these weights.

        A token is right if the reference could choose it with logits changed by up to TIE, which
        covers ties and the borders of top-k, top-p and min-p.

        Raises:
            Disagreement: one is not.
        """
        if request.pooling is not None:
            expected = self._pooled(request, request.pooling)
            np.testing.assert_allclose(output.pooled, expected, **CLOSE)
            return
        if output.finish_reason == "error" and output.logprobs is output.prompt_logprobs is None:
            # Its driver, not its scheduler, has found it: it has tokens alone.
            silent = msgspec.structs.replace(request.sampling, **NO_REPORTS)
            request = dataclasses.replace(request, sampling=silent)
        stops = set(request.sampling.stop_ids([EOS_TOKEN_ID]))
        tokens = output.token_ids
        ended = [index for index, token in enumerate(tokens) if token in stops]
        _expect(ended in ([], [len(tokens) - 1]), request, "goes on past a stop token")
        expected_end = "stop" if ended else "length"
        if output.finish_reason == "error":
            _expect(not ended and len(tokens) < request.max_tokens, request, output.error)
        else:
            _expect(output.finish_reason == expected_end, request, output.finish_reason)
            _expect(bool(ended) or len(tokens) == request.max_tokens, request, "length")
        logits = self._logits(request, tokens)
        _check_prompt_logprobs(request, logits, output)
        own = logits[len(request.prompt) - 1 :]
        if before is not None:
            count, num_prompt = before.num_tokens, len(request.prompt)
            earlier = before.judge._logits(request, tokens)[num_prompt - 1 :]
            own[:count] = earlier[:count]
        self._check_tokens(request, output, own)

    def _logits(self, request: GenerationRequest, tokens: list[int]) -> np.ndarray:
        """float64 [prompt and tokens, V]."""
        model = self._exact[request.lora]
        with torch.no_grad():
            return model(inputs_embeds=_inputs(model, request, tokens)).logits[0].numpy()

    def _check_tokens(
        self, request: GenerationRequest, output: RequestOutput, logits: np.ndarray
    ) -> None:
        """logits: float64 [tokens + 1, V]."""
        tokens, matcher = output.token_ids, None
        if request.sampling.structured_outputs is not None:
            matcher = begun(self._grammars, request.sampling.structured_outputs)
        num_rows = len(tokens) + (output.finish_reason == "error")
        for index in range(num_rows):
            row = logits[index].copy()
            if matcher is not None:
                if matcher.error:
                    _expect(index == len(tokens), request, f"{index}: {matcher.error}")
                    return
                allowed = allowed_tokens(matcher)
                row[np.setdiff1d(np.arange(row.size), allowed)] = -np.inf
            if index < len(tokens):
                _check_reported(request, row, index, output)
            slack = TIE * max(1.0, np.abs(logits[index]).max(), request.sampling.repetition_penalty)
            scores = _scores(request, row, tokens[:index])
            if index == len(tokens):
                _expect(
                    not np.isfinite(scores).any(),
                    request,
                    f"{index}: {output.error}, but something is left",
                )
                return
            if not np.isfinite(scores).any():
                _expect(False, request, f"token {index}: nothing may be sampled")
            _check_choice(request, scores, slack, index, tokens[index])
            if request.sampling.full_logprobs:
                _check_both(request, logits[index], scores, slack, index, output)
            if matcher is not None:
                _expect(matcher.allows(tokens[index]), request, f"{index}: grammar")
                if index + 1 < num_rows:
                    take(self._grammars, matcher, tokens[index])

    def _pooled(self, request: GenerationRequest, pooling: PoolingParams) -> np.ndarray:
        model = self._exact[request.lora]
        with torch.no_grad():
            inputs = _inputs(model, request, [])
            states = model.base_model(inputs_embeds=inputs).last_hidden_state[0]
        chosen = states if pooling.task == "token_embed" else states[-1]
        return embedding(chosen, pooling.dimensions, pooling.use_activation is not False)


class Past(NamedTuple):
    """Where an output's first tokens came from."""

    judge: Judge
    num_tokens: int


def _inputs(
    model: transformers.PreTrainedModel, request: GenerationRequest, tokens: list[int]
) -> torch.Tensor:
    """float64 [1, prompt and tokens, hidden size]: embeddings in the places of placeholders."""
    ids = torch.tensor([*request.prompt.tolist(), *tokens])
    whole = model.get_input_embeddings()(ids).detach().clone()
    tensor = request.prompt_embeds
    if tensor is not None:
        assert isinstance(tensor, HostTensor), "the parser has read it"
        rows = torch.frombuffer(bytearray(tensor.data), dtype=getattr(torch, tensor.dtype))
        at = request.prompt_embeds_at or [(0, tensor.shape[0])]
        places = [place for start, length in at for place in range(start, start + length)]
        whole[places] = rows.view(tensor.shape).to(whole.dtype)
    return whole[None]


def _scores(request: GenerationRequest, row: np.ndarray, output: list[int]) -> np.ndarray:
    """Return float64 [V] after the grammar mask, by the rules of docs/sampling.md, without
    temperature and filters."""
    scores, prompt = row.copy(), request.prompt.tolist()
    if request.sampling.allowed_token_ids is not None:
        banned = np.ones(scores.size, bool)
        banned[list(request.sampling.allowed_token_ids)] = False
        scores[banned] = -np.inf
    known = [*prompt, *output]
    for word in request.sampling.bad_words:
        *before, last = word
        if known[len(known) - len(before) :] == before:
            scores[last] = -np.inf
    for token, bias in request.sampling.logit_bias.items():
        scores[token] += bias
    apply_processors(request.sampling.logits_processors, scores, len(known))
    if len(output) < request.sampling.min_tokens:
        scores[list(request.sampling.stop_ids([EOS_TOKEN_ID]))] = -np.inf
    seen = list({*known})
    penalty = request.sampling.repetition_penalty
    scores[seen] = np.where(scores[seen] > 0, scores[seen] / penalty, scores[seen] * penalty)
    counts = np.bincount(output, minlength=scores.size)
    return (
        scores
        - request.sampling.frequency_penalty * counts
        - request.sampling.presence_penalty * (counts > 0)
    )


def _check_choice(
    request: GenerationRequest, scores: np.ndarray, slack: float, index: int, token: int
) -> None:
    if not request.sampling.temperature:
        short = scores.max() - scores[token]
        _expect(short <= 2 * slack, request, f"token {index} is {token}, short of {short:.3g}")
        return
    scaled, slack = scores / request.sampling.temperature, slack / request.sampling.temperature
    scaled -= scaled.max()
    position = len(request.prompt) + index
    noise = gumbel_noise(
        torch.tensor([request.sampling.seed]), torch.tensor([position]), scores.size
    )
    noisy = scaled + noise[0].double().numpy()
    may_be = _kept(request, scaled, slack)
    must_be = _kept(request, scaled, -slack)
    _expect(bool(may_be[token]), request, f"token {index} is {token}, which a filter drops")
    best = noisy[must_be].max(initial=-np.inf)
    short = best - noisy[token]
    _expect(short <= 2 * slack + 1e-5, request, f"token {index} is {token}, short of {short:.3g}")


def _check_both(
    request: GenerationRequest,
    row: np.ndarray,
    scores: np.ndarray,
    slack: float,
    index: int,
    output: RequestOutput,
) -> None:
    """row: float64 [V] logits of the model alone."""
    assert output.full_logprobs is not None, request
    full, sampled = output.full_logprobs[index]
    token, temperature = output.token_ids[index], request.sampling.temperature
    np.testing.assert_allclose(full, _log_softmax(row)[token], **CLOSE)
    if not temperature:
        _expect(sampled == 0, request, f"token {index}: {sampled} instead of certainty")
        return
    scaled, slack = (scores - scores.max()) / temperature, slack / temperature
    bounds = []
    for kept in (_kept(request, scaled, slack), _kept(request, scaled, -slack)):
        kept[token] = True
        bounds.append(scaled[token] - np.log(np.exp(scaled[kept]).sum()))
    near = 4 * slack + CLOSE["atol"] + CLOSE["rtol"] * abs(bounds[0])
    _expect(bounds[0] - near <= sampled <= bounds[1] + near, request, f"{sampled}, not {bounds}")


def _kept(request: GenerationRequest, scaled: np.ndarray, slack: float) -> np.ndarray:
    """Return bool [V]: tokens that min-p, top-k and top-p may keep, or certainly keep if slack is
    negative."""
    kept = np.isfinite(scaled)
    if request.sampling.min_p:
        kept &= scaled >= np.log(request.sampling.min_p) - 2 * slack
    if request.sampling.top_k:
        ordered = np.sort(np.where(kept, scaled, -np.inf))[::-1]
        if slack > 0:
            kept &= scaled >= ordered[request.sampling.top_k - 1] - 2 * slack
        else:
            kept &= scaled > ordered[request.sampling.top_k] - 2 * slack
    if request.sampling.top_p < 1:
        weights = np.where(kept, np.exp(scaled), 0.0)
        order = np.argsort(-scaled, kind="stable")
        before = np.empty_like(weights)
        before[order] = np.cumsum(weights[order]) - weights[order]
        # Equally likely tokens may come before or after this one.
        likely = np.maximum(scaled, -1e9)
        tied = np.abs(likely[:, None] - likely) <= 2 * abs(slack)
        own = (tied * weights).sum(1) - weights
        before += -own if slack > 0 else own
        kept &= before < weights.sum() * request.sampling.top_p * (1 + 8 * slack) + 1e-6 * np.sign(
            slack
        )
    return kept


def _check_prompt_logprobs(
    request: GenerationRequest, logits: np.ndarray, output: RequestOutput
) -> None:
    """logits: float64 [prompt and more, V]."""
    _expect(
        (output.prompt_logprobs is None) == (request.sampling.prompt_logprobs is None),
        request,
        "log probabilities of the prompt",
    )
    if output.prompt_logprobs is None:
        return
    first, *others = output.prompt_logprobs
    tokens = request.prompt.tolist()
    _expect(first is None and len(others) == len(tokens) - 1, request, "prompt logprobs")
    for place, given in enumerate(others):
        assert given is not None, request
        exact = _log_softmax(logits[place])
        _check_logprobs(request, exact, tokens[place + 1], given, request.sampling.prompt_logprobs)


def _check_reported(
    request: GenerationRequest, row: np.ndarray, index: int, output: RequestOutput
) -> None:
    """row: float64 [V] logits after the grammar."""
    exact, token = _log_softmax(row), output.token_ids[index]
    if request.sampling.logprobs is not None:
        assert output.logprobs is not None, request
        _check_logprobs(request, exact, token, output.logprobs[index], request.sampling.logprobs)
    if request.sampling.logprob_token_ids is not None:
        assert output.token_id_logprobs is not None, request
        wanted = exact[list(request.sampling.logprob_token_ids)]
        np.testing.assert_allclose(output.token_id_logprobs[index], wanted, **CLOSE)


def _log_softmax(row: np.ndarray) -> np.ndarray:
    top = row.max()
    return row - top - np.log(np.exp(row - top).sum())


def _check_logprobs(
    request: GenerationRequest, exact: np.ndarray, token: int, given: Logprobs, count: int | None
) -> None:
    """exact: float64 [V]; token: the first that is reported."""
    _expect(len(given.token_ids) == len(given.logprobs) == 1 + (count or 0), request, "logprobs")
    _expect(int(given.token_ids[0]) == token, request, "its own logprob")
    np.testing.assert_allclose(given.logprobs, exact[given.token_ids], **CLOSE)
    best = np.sort(exact)[::-1][: len(given.logprobs) - 1]
    np.testing.assert_allclose(given.logprobs[1:], best, **CLOSE)
    slack = 1e-3
    least, most = (exact > exact[token] + slack).sum() + 1, (exact >= exact[token] - slack).sum()
    _expect(least <= given.rank <= max(most, least), request, f"rank {given.rank}")


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
    for ours, theirs in zip(_all_logprobs(alone), _all_logprobs(other), strict=True):
        np.testing.assert_allclose(theirs.logprobs, ours.logprobs, **CLOSE)
        clear = _apart(ours.logprobs)
        np.testing.assert_array_equal(theirs.token_ids[clear], ours.token_ids[clear])
    assert (alone.token_id_logprobs is None) == (other.token_id_logprobs is None), request
    assert (alone.full_logprobs is None) == (other.full_logprobs is None), request
    if alone.full_logprobs:
        np.testing.assert_allclose(
            [both.full for both in other.full_logprobs],
            [both.full for both in alone.full_logprobs],
            **CLOSE,
        )
    if alone.token_id_logprobs:
        np.testing.assert_allclose(other.token_id_logprobs, alone.token_id_logprobs, **CLOSE)


def _all_logprobs(output: RequestOutput) -> Iterator[Logprobs]:
    """Of the prompt and of the tokens."""
    for entry in (*(output.prompt_logprobs or ()), *(output.logprobs or ())):
        if entry is not None:
            yield entry


def _apart(logprobs: np.ndarray) -> np.ndarray:
    """Return bool [n]: the first, and those whose neighbors are clearly less likely. The neighbor
    of the last one is not reported."""
    likely = np.maximum(logprobs[1:], -1e9)
    gaps = np.diff(likely, prepend=np.inf) < -1e-3
    return np.concatenate(([True], gaps & np.append(gaps[1:], False)))
