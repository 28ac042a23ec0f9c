"""Steps that are padded as for graphs sample what exact steps do, however they are sampled; and a
reset leaves nothing alive."""

import gc
import weakref

import numpy as np
import pytest
from worker_driver import WorkerDriver

from rpc_schema import lifecycle as lc
from worker_client.requests import SamplingParams
from worker_daemon.runner.step_layout import (
    ExactShapes,
    StepLadder,
    decode_sizes,
    mixed_plans,
)
from worker_daemon.worker.worker import Worker

SAMPLING = {
    "greedy": SamplingParams(),
    "top_p": SamplingParams(temperature=1.0, top_p=0.9, seed=3),
    "top_k": SamplingParams(temperature=0.8, top_k=5, seed=4),
    "min_p": SamplingParams(temperature=1.0, min_p=0.1, seed=5),
    "logprobs": SamplingParams(logprobs=3),
    "min_tokens": SamplingParams(min_tokens=4, stop_token_ids=(1, 2, 3)),
    "all": SamplingParams(temperature=1.0, top_p=0.5, top_k=9, min_p=0.01, logprobs=2, seed=9),
}
NUM_REQUESTS = 5
"""No size of the ladder: three rows of a padded step are padding."""


def generate(worker, chosen, prompts):
    """A prefill, decodes, and a decode that is sampled later."""
    worker.on_attach()
    driver = WorkerDriver(worker)
    new = [(slot, prompts[slot], chosen[slot]) for slot in range(NUM_REQUESTS)]
    results = [driver.execute({slot: len(prompts[slot]) for slot in range(NUM_REQUESTS)}, new)]
    decode = dict.fromkeys(range(NUM_REQUESTS), 1)
    results += [driver.execute(decode) for _ in range(6)]
    message, arrays = driver.step(decode, defer=True)
    worker.execute_model(message, arrays).result()
    return [*results, driver.sample(message.seq)]


@pytest.mark.parametrize("names", [*([name] for name in SAMPLING), [*SAMPLING][:5]])
def test_padding_changes_no_token(ready_worker, names):
    rng = np.random.default_rng()
    prompts = [rng.integers(0, 151, 7).tolist() for _ in range(NUM_REQUESTS)]
    chosen = [SAMPLING[names[slot % len(names)]] for slot in range(NUM_REQUESTS)]
    inputs = ready_worker._serving.runner.inputs
    exact = generate(ready_worker, chosen, prompts)
    ladder = StepLadder(decode_sizes(8), lambda size: [64, 128], mixed_plans(8, 64, 128))
    inputs.pad_by(ladder, ladder.plans)
    try:
        assert generate(ready_worker, chosen, prompts) == exact
    finally:
        inputs.pad_by(ExactShapes(), ())


def test_reset_leaves_nothing_alive_though_a_description_is_kept(model_root, llama):
    worker = Worker("cpu", [model_root], lambda phase, seconds, done=0.0: None)
    driver = WorkerDriver(worker)
    driver.init_device()
    driver.serve("llama")
    kept = worker.describe()
    serving = worker._serving
    cache = serving.kv.layers[0].cache
    parts = list(map(weakref.ref, (serving.runner, cache, worker._model.stage)))
    del serving, cache
    worker.reset(lc.Reset(epoch=1, seq=10_000, link=1, to="DEVICE_READY"))
    gc.collect()
    assert [part() for part in parts] == [None] * 3
    assert kept.input_wait_share() == 0.0
    worker.close()
