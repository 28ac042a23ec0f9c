"""Greedy tokens equal transformers' while blocks are shared, preempted and scarce."""

import numpy as np
import pytest

from examples.static_batches import StaticBatches
from tests.support.checkpoints import decisive_prompts
from tests.support.exhaustive import exhaustively
from tests.support.flat_requests import changed
from tests.support.mock_schedulers import TRACES, RandomScheduler, TraceScheduler, trace_requests
from tests.support.serving import (
    LONG_LEASE,
    assert_greedy,
    generate,
    greedy_request,
    scheduler_limits,
)
from worker_client.driver import Driver
from worker_client.scheduler import Scheduler
from worker_client.worker_group import WorkerGroup

BLOCK_SIZE = 4
TRACE = TRACES / "chunks_and_preemption.json"


@pytest.fixture(scope="module")
def reference(checkpoint):
    """Five layers, so that no pipeline but of one stage is even; a window that ends in the middle
    of blocks."""
    return checkpoint("MistralForCausalLM", num_hidden_layers=5, sliding_window=27, seed=11)


def make_requests(reference, seed, lengths, max_tokens, prefix=()):
    """max_tokens: for all, or one for each."""
    each = np.broadcast_to(max_tokens, len(lengths)).tolist()
    return [
        greedy_request(
            f"s{seed}-{index}",
            decisive_prompts(reference, 100 * seed + index, [length], count, prefix=prefix)[0],
            count,
        )
        for index, (length, count) in enumerate(zip(lengths, each, strict=True))
    ]


@pytest.mark.parametrize("shape", [exhaustively((2, 1)), exhaustively((1, 2)), (2, 2)])
def test_prefix_cache_hits(serve, reference, shape):
    shared = np.random.default_rng(5).integers(0, 331, 34).tolist()
    lengths = [38, 39, 45, 60]
    first = make_requests(reference, 1, [41], 10, prefix=shared)
    others = make_requests(reference, 2, lengths, 12, prefix=shared)
    with serve(reference.path, *shape, block_size=BLOCK_SIZE) as (group, loaded):
        scheduler = Scheduler(scheduler_limits(group, loaded))
        assert_greedy(generate(group, loaded, first, scheduler), reference, first)
        run = generate(group, loaded, others, scheduler)
    assert_greedy(run, reference, others)
    shared_full = len(shared) // BLOCK_SIZE * BLOCK_SIZE
    assert [run.outputs[r.id].num_cached_tokens for r in others] == [shared_full] * len(others)
    computed = sum(record.num_tokens for record in run.driver.records)
    assert computed == sum(length - shared_full + 12 - 1 for length in lengths)


@pytest.mark.parametrize("shape", [exhaustively((1, 1)), (3, 1), exhaustively((1, 2))])
def test_preemption_in_the_middle(serve, reference, shape):
    requests = make_requests(reference, 3, [9, 22, 5, 31, 14, 18, 27, 11], 24)
    config = {
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks": 27,
        "max_num_seqs": 6,
        "max_model_len": 100,
    }
    with serve(reference.path, *shape, **config) as (group, loaded):
        cached = generate(group, loaded, requests)
        uncached = generate(
            group, loaded, requests, enable_prefix_caching=False, max_num_batched_tokens=13
        )
    for run in (cached, uncached):
        assert_greedy(run, reference, requests)
        assert sum(output.num_preemptions for output in run.outputs.values()) >= 3


@pytest.mark.usefixtures("each_drafter")
@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", [(3, 1), (2, 2)])
def test_many_requests_of_different_lengths(serve, reference, shape):
    rng = np.random.default_rng(17)
    lengths = rng.integers(1, 60, 40).tolist()
    counts = rng.integers(1, 20, 40).tolist()
    requests = make_requests(reference, 4, lengths, counts)
    config = {"block_size": BLOCK_SIZE, "num_gpu_blocks": 150, "max_num_seqs": 16}
    with serve(reference.path, *shape, **config) as (group, loaded):
        run = generate(group, loaded, requests, max_num_batched_tokens=48)
    assert_greedy(run, reference, requests)
    assert max(record.num_requests for record in run.driver.records) > 4
    assert {record.kind for record in run.driver.records} >= {"prefill", "mixed", "decode"}


@pytest.mark.parametrize(
    ("shape", "seed"), [exhaustively((2, 1), 1), ((2, 2), 2), exhaustively((3, 1), 3)]
)
def test_random_scheduler(serve, reference, shape, seed):
    requests = make_requests(reference, 3, [9, 22, 5, 31, 14, 18, 27, 11], 24)
    config = {"block_size": BLOCK_SIZE, "num_gpu_blocks": 60, "max_num_seqs": 7}
    with serve(reference.path, *shape, **config) as (group, loaded):
        scheduler = RandomScheduler(scheduler_limits(group, loaded), seed, preemption=0.05)
        run = generate(group, loaded, requests, scheduler)
    assert_greedy(run, reference, requests)
    assert scheduler.num_preemptions > 0


@pytest.mark.parametrize("shape", [(2, 1), exhaustively((1, 2))])
def test_recorded_trace(serve, reference, shape):
    requests = trace_requests(TRACE, vocab_size=331)
    with serve(reference.path, *shape, block_size=BLOCK_SIZE) as (group, loaded):
        scheduler = TraceScheduler(scheduler_limits(group, loaded), TRACE)
        run = generate(group, loaded, requests, scheduler)
    assert_greedy(run, reference, requests)
    assert not scheduler.steps


def test_static_batches(serve, reference):
    """The example's scheduler, and a second one that continues its requests."""
    requests = make_requests(reference, 3, [9, 22, 5, 31, 14, 18, 27, 11], 24)
    requests += [changed(request, id=f"{request.id}+", logprobs=2) for request in requests[:2]]
    config = {"block_size": BLOCK_SIZE, "num_gpu_blocks": 60, "max_num_seqs": 5}
    with serve(reference.path, 2, **config, max_num_batched_tokens=32) as (group, loaded):
        limits = scheduler_limits(group, loaded)
        assert_greedy(generate(group, loaded, requests, StaticBatches(limits)), reference, requests)
        driver, outputs = Driver(group, StaticBatches(limits)), []
        for request in requests:
            driver.add_request(request)
        while len(outputs) < 6:  # the last one of the first batch ends, then one of the second
            outputs += driver.step()
        config = group.get_status()[0].config
    with WorkerGroup(serve.pool.endpoints(2), config.parallel, lease=LONG_LEASE) as group:
        group.attach(keep_requests=True)
        group.prepare(config)
        adopted, successor = group.adopt_requests(), StaticBatches(limits)
        assert adopted and any(request.num_computed_tokens for request in adopted)
        outputs += successor.adopt_requests(adopted)
        outputs += Driver(group, successor).run()
    left = {request.id for request in requests} - {output.req_id for output in outputs}
    assert left.isdisjoint(request.req_id for request in adopted)
    for output in outputs:
        (request,) = (request for request in requests if request.id == output.req_id)
        expected = reference.greedy(request.prompt.tolist(), request.max_tokens)
        assert output.token_ids == expected
        assert (output.logprobs is None) == (request.sampling.logprobs is None)


@pytest.mark.parametrize("dtype", ["bfloat16", exhaustively("float16")])
def test_half_precision(serve, checkpoint, dtype):
    """A pipeline computes the very same numbers; tensor parallelism adds them up in another
    order."""
    reference = checkpoint("Qwen3ForCausalLM", seed=21)
    requests = [
        greedy_request(f"r{index}", prompt, 12, logprobs=5)
        for index, prompt in enumerate(decisive_prompts(reference, 6, [5, 18, 33, 50], 12))
    ]
    runs = {}
    for shape in ((1, 1), (2, 1), (1, 2)):
        with serve(reference.path, *shape, dtype=dtype) as (group, loaded):
            assert loaded.metadata.dtype == dtype
            runs[shape] = generate(group, loaded, requests)
    single, pipeline, tensor = runs.values()
    assert pipeline.tokens == single.tokens
    for request in requests:
        ours = [run.outputs[request.id].logprobs for run in (single, pipeline, tensor)]
        for alone, staged in zip(ours[0], ours[1], strict=True):
            np.testing.assert_array_equal(staged.logprobs, alone.logprobs)
            np.testing.assert_array_equal(staged.token_ids, alone.token_ids)
        exact = reference.logprobs(request.prompt.tolist())[-1]
        for run in ours:
            first = run[0]
            np.testing.assert_allclose(
                first.logprobs, exact[first.token_ids.astype(np.int64)], atol=0.25
            )
