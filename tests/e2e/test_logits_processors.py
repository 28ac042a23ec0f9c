"""Custom logits processors of an installed package: found by their entry points, named by the
configuration, and enabled by single requests."""

import numpy as np
import pytest
import torch
import transformers

from rpc_schema.errors import ConfigError
from rpc_schema.sampling import LogitsProcessors
from tests.support.installed_processors import apply_processors
from tests.support.serving import connect, generate, greedy_request, worker_config
from worker_client.errors import InvalidSchedulerOutput, RequestError
from worker_client.requests import GenerationRequest, SamplingParams
from worker_client.scheduler import Scheduler, SchedulerLimits, scheduler_limits
from worker_client.scheduler_output import NewRequest, SchedulerOutput

SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 24}


class Reference(transformers.LogitsProcessor):
    def __init__(self, names):
        self.names = names

    def __call__(self, input_ids, scores):
        changed = scores[0].numpy().copy()
        apply_processors(self.names, changed, input_ids.shape[1])
        return torch.from_numpy(changed)[None]


def configured(path, *names):
    return worker_config(path, 2, **SIZES, logits_processors=names)


def test_processors_act_on_the_rows_that_ask_for_them(daemons, checkpoint):
    reference = checkpoint(seed=63)
    config = configured(reference.path, "late", "even")
    asked = [(), ("even",), ("late",), ("even", "late"), ()]
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, 331, 5 + index).tolist() for index in range(len(asked))]
    requests = [
        greedy_request(f"r{index}", prompt, 8, logits_processors=names)
        for index, (prompt, names) in enumerate(zip(prompts, asked, strict=True))
    ]
    with connect(daemons.endpoints(2), config) as (group, loaded):
        limits = scheduler_limits(loaded, config)
        tokens = generate(group, loaded, requests, Scheduler(limits)).tokens
        with pytest.raises(RequestError, match="late, even"):
            Scheduler(limits).add_request(greedy_request("x", [1], 2, logits_processors=("odd",)))
        new = NewRequest(
            "x", np.array([1], np.int32), 1, 0, [1], (LogitsProcessors(names=("odd",)),)
        )
        with pytest.raises(InvalidSchedulerOutput, match="odd"):
            group.execute_model(SchedulerOutput({"x": 1}, scheduled_new_reqs=[new]))
    for request, names in zip(requests, asked, strict=True):
        prompt = request.prompt.tolist()
        assert tokens[request.id] == reference.processed(prompt, 8, Reference(names)), names


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("odd",), "broken, even, late"),
        (("even", "even"), "occurs twice"),
        (("broken",), "cannot be imported"),
    ],
)
def test_a_configuration_with_other_processors_is_refused(daemons, checkpoint, names, message):
    config = configured(checkpoint(seed=63).path, *names)
    with pytest.raises(ConfigError, match=message), connect(daemons.endpoints(2), config):
        pass


def test_without_any_configured_none_may_be_asked_for():
    limits = SchedulerLimits(4, 32, 64, 64, 4, vocab_size=12, logits_processors=())
    request = GenerationRequest(
        "a", np.array([5], np.int32), sampling=SamplingParams(logits_processors=("even",))
    )
    with pytest.raises(RequestError, match="none: load with"):
        Scheduler(limits).add_request(request)
