"""Checks with drivers of the copy: its daemons serve requests with and without a bias, run out of
blocks and lose their driver, and every token must equal transformers'."""

import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch
import transformers

from tests.support.checkpoints import Checkpoint, NearTie, prompts
from tests.support.forked_drivers import ForkedDrivers, path_of
from tests.support.serving import SHARED_GPU, worker_config
from tests.support.toy_feature.plans import Checked, Outcome, Plan, Wanted
from worker_client.launcher import LocalDaemons

NUM_BLOCKS = 26
"""Blocks of four tokens: too few for all requests at once."""
NUM_CHECKED = 2
"""Tokens that are checked of requests without a bias: three samples of a step."""


def start_daemons(tree: Path, devices: Sequence[str], model_root: Path) -> LocalDaemons:
    """Start daemons of the copy, for the copy's drivers."""

    def command(endpoint: str, device: str, pipe: int) -> list[str]:
        there = ["env", "-C", str(tree), f"PYTHONPATH={path_of(tree)}"]
        options = ["--endpoint", endpoint, "--device", device, "--model-root", str(model_root)]
        ends = ["--exit-with-parent-fd", str(pipe)]
        return [*there, sys.executable, "-m", "worker_daemon", "serve", *options, *ends]

    return LocalDaemons(devices, model_root, command=command)


def check_serving(
    drivers: ForkedDrivers, endpoints: Sequence[str], checkpoint: Checkpoint, tp: int = 1
) -> None:
    """Run on a group of all the daemons, once to the end and once with a dying driver."""
    seed = random.randrange(1 << 30)
    wanted, expected = biased_requests(checkpoint, random.Random(seed))
    config = worker_config(
        checkpoint.path,
        len(endpoints) // tp,
        tp,
        max_num_batched_tokens=32,
        max_model_len=64,
        gpu_memory_utilization=SHARED_GPU,
    )
    scheduler = msgspec.structs.replace(config.scheduler, max_samples_per_seq=NUM_CHECKED + 1)
    config = msgspec.structs.replace(config, scheduler=scheduler)
    plan = Plan(list(endpoints), config, wanted, NUM_BLOCKS, adopt=False, dies_after=None)
    whole = live(drivers, plan)
    assert whole is not None and whole.tokens == expected, seed
    assert whole.num_preemptions > 0
    texts = {each.id: [*each.prompt, *expected[each.id]] for each in wanted}
    assert "200: use at most 2, or raise max_samples_per_seq" in whole.refusal
    # The first request is whole in the first step; others may end with a chunk of one token.
    first = whole.checked[0]
    assert (first.req_id, len(first.token_ids)) == (wanted[0].id, NUM_CHECKED + 1), seed
    check_samples(checkpoint, texts, whole.checked)
    live(drivers, msgspec.structs.replace(plan, dies_after=6), code=9)
    rest = live(drivers, msgspec.structs.replace(plan, adopt=True))
    assert rest is not None and rest.num_adopted > 0
    assert rest.tokens == expected, seed
    check_samples(checkpoint, texts, rest.checked)


def check_samples(
    checkpoint: Checkpoint, texts: Mapping[str, Sequence[int]], checked: Sequence[Checked]
) -> None:
    """Compare each sample with transformers' most likely token at its position."""
    for each in checked:
        logprobs = checkpoint.logprobs(texts[each.req_id])[each.num_tokens - len(each.token_ids) :]
        for token, own in zip(each.token_ids, logprobs, strict=False):
            assert own.max() - own[token] < checkpoint.least_margin, each


def live(drivers: ForkedDrivers, plan: Plan, code: int = 0) -> Outcome | None:
    """Run a driver of the copy; return its output if it exits with the expected code."""
    outcome, exited = drivers.live(msgspec.json.encode(plan))
    assert exited == code, "its error is on stderr"
    return msgspec.json.decode(outcome, type=Outcome) if code == 0 else None


class _EvenTokens(transformers.LogitsProcessor):  # type: ignore[misc]
    """Applies a processor to every second token of an output, from the first on."""

    def __init__(self, inner: transformers.LogitsProcessor, num_prompt_tokens: int) -> None:
        self._inner = inner
        self._num_prompt_tokens = num_prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        is_odd = (input_ids.shape[1] - self._num_prompt_tokens) % 2
        return scores if is_odd else self._inner(input_ids, scores)


def biased(
    checkpoint: Checkpoint, prompt: Sequence[int], max_tokens: int, token_id: int, bias: float
) -> list[int]:
    """Return the tokens that transformers generates. Raises NearTie as Checkpoint.greedy does."""
    inner = transformers.SequenceBiasLogitsProcessor([[[token_id], bias]]) if bias else None
    if inner is None:
        return checkpoint.greedy(prompt, max_tokens)
    return checkpoint.processed(prompt, max_tokens, _EvenTokens(inner, len(prompt)))


def biased_requests(
    checkpoint: Checkpoint, rng: random.Random, count: int = 6
) -> tuple[list[Wanted], dict[str, list[int]]]:
    """Return requests with their expected tokens; a third of them has no bias."""
    wanted: list[Wanted] = []
    expected: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts(rng.randrange(1 << 20), [5 + i % 9 for i in range(60)])):
        name, length = f"r{index}", 14 + index % 5
        token_id, bias = rng.randrange(150), rng.choice([1.5, -3.0])
        if len(wanted) % 3 == 0:
            bias = None
        try:
            unbiased = checkpoint.greedy(prompt.tolist(), length)
            tokens = biased(checkpoint, prompt.tolist(), length, token_id, bias or 0.0)
            if bias is not None and tokens == unbiased:
                token_id, bias = tokens[2], -6.0  # a token that it would sample without a bias
                tokens = biased(checkpoint, prompt.tolist(), length, token_id, bias)
        except NearTie:
            continue
        expected[name] = tokens
        num_checked = NUM_CHECKED if bias is None else 0
        wanted.append(Wanted(name, prompt.tolist(), length, token_id, bias, num_checked))
        if len(wanted) == count:
            return wanted, expected
    raise AssertionError("too few prompts have a clear continuation")
