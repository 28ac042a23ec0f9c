"""Decodes that the device cuts by their keys, in a CUDA graph that serves any lengths, against a
dense fp64 softmax."""

import random
import secrets
from dataclasses import replace

import pytest
import torch

from benchmarks.paged_reference import Shape, dense_attention, make_batch, relative_error
from tests.support.attention_steps import layer_of
from worker_daemon.kernels.paged_attention import TritonAttention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LONGEST, NUM_DECODES, NUM_LAYERS = 6000, 20, 3
SEED = secrets.randbits(31)


@pytest.mark.parametrize("window", [None, 2000])
@pytest.mark.parametrize(
    "chunk",
    [[], [(200, 300)], [(40, 5900)], [(600, 600), (40, 40_000)]],
    ids=["decodes", "beside a chunk", "beside a late chunk", "beside chunks of other lengths"],
)
def test_a_graph_serves_all_lengths(window: int | None, chunk: list[tuple[int, int]]) -> None:
    """The graph makes one schedule for its layers, anew in each replay."""
    print(f"seed {SEED}")
    rng, shape = random.Random(SEED), Shape(32, 8, 128)
    lengths = [(1, LONGEST)] * NUM_DECODES + chunk
    batch = make_batch(shape, lengths, dtype=torch.bfloat16, device="cuda", seed=SEED)
    batch.store()
    backend, layer = TritonAttention(torch.device("cuda")), layer_of(shape, window)

    def attend() -> list[torch.Tensor]:
        metadata = replace(batch).metadata  # as in a runner, each step has its own
        return [backend.attend(batch.q, batch.kv_cache, layer, metadata) for _ in range(NUM_LAYERS)]

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = attend()
    for _ in range(4):
        keys = [rng.choice([1, 70, rng.randint(1, LONGEST)]) for _ in range(NUM_DECODES)]
        keys[rng.randrange(NUM_DECODES)] = rng.randint(5000, LONGEST)
        keys += [length for _, length in chunk]
        batch.seq_lens.copy_(torch.tensor(keys))
        batch.seq_order.copy_(batch.seq_lens.argsort(descending=True))
        graph.replay()
        history = [both[:, :count] for both, count in zip(batch.history, keys, strict=True)]
        expected = dense_attention(replace(batch, history=history), window)
        assert relative_error(outs[0], expected) < 6e-3
        assert all(torch.equal(outs[0], out) for out in outs[1:])
