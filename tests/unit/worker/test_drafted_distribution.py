"""Chi-square tests of what requests gain in steps with drafts, against the distribution that
transformers' model and processors give: all first three tokens of a prompt, over many seeds, with
drafts that are right for some of them."""

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from worker_driver import SCHEDULER, WorkerDriver, int32s

from rpc_schema.config import SpeculativeConfig
from tests.support.sampling_checks import chi_square_limit
from worker_client.requests import SamplingParams
from worker_daemon.worker.worker import Worker

NUM_SEEDS = 1024
AT_ONCE = 64
LENGTH = 3
"""Tokens of each request."""
FEW = (3, 17, 88)
SETTINGS = {
    "temperature": {"temperature": 1.5, "allowed_token_ids": FEW},
    "top-k": {"temperature": 1.8, "top_k": 4},
    "top-p": {"temperature": 2.0, "allowed_token_ids": FEW, "top_p": 0.85},
    "penalties": {
        "temperature": 1.2,
        "allowed_token_ids": FEW,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.9,
        "repetition_penalty": 1.5,
    },
}


@pytest.fixture(scope="module")
def serving(model_root, llama):
    worker = Worker("cpu", [model_root], lambda phase, seconds, done=0.0: None)
    scheduler = replace(SCHEDULER, max_num_seqs=AT_ONCE, max_num_batched_tokens=512)
    drafted = SpeculativeConfig(method="driver", num_speculative_tokens=LENGTH - 1)
    driver = WorkerDriver(worker, 4 * AT_ONCE, scheduler=scheduler, speculative=drafted)
    driver.init_device()
    driver.serve("llama")
    yield driver
    worker.close()


def probabilities(model, prompt, settings):
    """Return {tokens: probability} of all that the settings allow after a prompt, by logits of
    transformers."""
    few = settings.get("allowed_token_ids")
    found = {(): 1.0}
    for _ in range(LENGTH):
        texts = torch.tensor([[*prompt, *path] for path in found])
        with torch.no_grad():
            logits = model(texts).logits[:, -1].double()
        if few is not None:
            banned = torch.ones(logits.shape[1], dtype=torch.bool)
            banned[list(few)] = False
            logits[:, banned] = -torch.inf
        outputs = texts[:, len(prompt) :]
        counts = torch.zeros_like(logits)
        counts.scatter_add_(1, outputs, torch.ones_like(outputs, dtype=logits.dtype))
        processors = LogitsProcessorList()
        if "repetition_penalty" in settings:
            processors.append(RepetitionPenaltyLogitsProcessor(settings["repetition_penalty"]))
        logits = processors(texts, logits)
        logits -= settings.get("frequency_penalty", 0.0) * counts
        logits -= settings.get("presence_penalty", 0.0) * (counts > 0)
        warpers = LogitsProcessorList([TemperatureLogitsWarper(settings["temperature"])])
        if "top_k" in settings:
            warpers.append(TopKLogitsWarper(settings["top_k"]))
        if "top_p" in settings:
            warpers.append(TopPLogitsWarper(settings["top_p"]))
        shares = torch.softmax(warpers(texts, logits), 1).tolist()
        found = {
            (*path, token): known * share
            for (path, known), own in zip(found.items(), shares, strict=True)
            for token, share in enumerate(own)
            if share
        }
    return found


def draft(expected, rng):
    """Draft all tokens but the last: likely ones, or any that the settings allow."""
    paths = [*expected]
    weights = np.array([*expected.values()]) if rng.random() < 0.5 else np.ones(len(paths))
    return paths[rng.choice(len(paths), p=weights / weights.sum())][:-1]


def gain(driver, prompt, params, drafts):
    """Return the tokens that requests gain, if their prompts bring drafts, and how many of these
    are accepted."""
    slots = range(len(params))
    new = [(slot, prompt, own) for slot, own in zip(slots, params, strict=True)]
    scheduled = dict.fromkeys(slots, len(prompt) + LENGTH - 1)
    found = driver.execute(scheduled, new, drafts=dict(zip(slots, drafts, strict=True)))
    gained = [[each.token for each in (*found[slot].earlier, found[slot])] for slot in slots]
    refused = {slot: LENGTH - len(own) for slot, own in enumerate(gained) if len(own) < LENGTH}
    num_accepted = (LENGTH - 1) * len(gained) - sum(refused.values())
    for slot, count in refused.items():
        driver.computed[slot] -= count
    corrections = int32s(v for pair in sorted(refused.items()) for v in pair)
    while short := [slot for slot in slots if len(gained[slot]) < LENGTH]:
        found = driver.execute(dict.fromkeys(short, 1), corrections=corrections)
        corrections = b""
        for slot in short:
            gained[slot].append(found[slot].token)
    driver.execute({}, finished=[*slots])
    return [tuple(own) for own in gained], num_accepted


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_have_the_distribution_that_they_have_without_drafts(serving, llama, prompts, name):
    prompt, rng = prompts([5], seed=71)[0], np.random.default_rng(73)
    expected = probabilities(llama, prompt, SETTINGS[name])
    assert sum(expected.values()) == pytest.approx(1)
    counts, num_accepted = dict.fromkeys(expected, 0), 0
    for first in range(0, NUM_SEEDS, AT_ONCE):
        seeds = range(first, first + AT_ONCE)
        params = [SamplingParams(seed=seed, **SETTINGS[name]) for seed in seeds]
        drafts = [draft(expected, rng) for _ in seeds]
        gained, accepted = gain(serving, prompt, params, drafts)
        num_accepted += accepted
        for tokens in gained:
            counts[tokens] += 1
    assert 0.1 < num_accepted / (NUM_SEEDS * (LENGTH - 1)) < 0.5
    check_counts([*counts.values()], np.array([*expected.values()]) * NUM_SEEDS)


def check_counts(counts, expected):
    """Check that counts pass a chi-square test; rare outcomes count as one."""
    counts, is_rare = np.array(counts), expected < 5
    counts = np.append(counts[~is_rare], counts[is_rare].sum())
    expected = np.append(expected[~is_rare], expected[is_rare].sum())
    if expected[-1] < 5:
        counts, expected = counts[:-1], expected[:-1]
    degrees = counts.size - 1
    assert degrees > 10
    limit = chi_square_limit(degrees)
    assert ((counts - expected) ** 2 / expected).sum() < limit
