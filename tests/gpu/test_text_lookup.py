"""The kernels of drafts from text on a GPU against plain torch on the CPU, and what they never
do."""

import numpy as np
import pytest
import torch

from rpc_schema.config import SpeculativeConfig
from tests.support.text_checks import RandomRequests, as_gained, check_ngram, check_suffix
from worker_daemon.backend import choose_backend
from worker_daemon.drafting.registry import make_drafter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.kernels,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def drafter_on(device, config, num_rows, max_model_len):
    return make_drafter(config, num_rows, max_model_len, device, choose_backend(device).texts)


@pytest.mark.parametrize(("method", "check"), [("ngram", check_ngram), ("suffix", check_suffix)])
@pytest.mark.parametrize(
    ("num_drafts", "longest", "shortest", "vocab_size"),
    [(1, 1, 1, 2), (4, 4, 2, 3), (7, 32, 1, 1), (31, 4, 3, 2)],
)
def test_drafts_equal_a_loops(method, check, num_drafts, longest, shortest, vocab_size):
    config = SpeculativeConfig(
        method=method,
        num_speculative_tokens=num_drafts,
        prompt_lookup_max=longest,
        prompt_lookup_min=shortest,
        max_kept_tokens=1024,
    )
    rng = np.random.default_rng(num_drafts)
    drafter = drafter_on(CUDA, config, 9, 300)
    requests = RandomRequests(rng, 9, 300, num_drafts, vocab_size)
    check(drafter, requests, config, CUDA, num_steps=12, longest=60)


def test_the_oldest_output_goes():
    """Steps begin more pages than are kept."""
    config = SpeculativeConfig(method="suffix", num_speculative_tokens=31, max_kept_tokens=1024)
    requests = RandomRequests(np.random.default_rng(2), 80, 400, 31, 5)
    check_suffix(drafter_on(CUDA, config, 80, 400), requests, config, CUDA, 14, longest=9)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
@pytest.mark.parametrize("longest", [4, 32])
@pytest.mark.parametrize(
    ("num_rows", "max_len", "vocab_size"), [(1, 131_072, 50), (70, 9_000, 9), (300, 1_000, 2)]
)
def test_long_texts_equal_torchs(method, longest, num_rows, max_len, vocab_size):
    config = SpeculativeConfig(method=method, num_speculative_tokens=4, prompt_lookup_max=longest)
    ours, theirs = (drafter_on(device, config, num_rows, max_len) for device in (CUDA, CPU))
    requests = RandomRequests(np.random.default_rng(3), num_rows, max_len, 4, vocab_size)
    for _ in range(6):
        slots = requests.begin(ours, 0.8)
        theirs.begin(slots, [np.array(requests.texts[row], np.int32) for row in slots])
        for _ in range(6):
            gains = requests.gain()
            found = ours.propose(as_gained(gains, 4, CUDA, requests.texts))
            known = theirs.propose(as_gained(gains, 4, CPU, requests.texts))
            assert found.tolist() == known.tolist()


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_nothing_waits_for_the_device(method):
    config = SpeculativeConfig(method=method, num_speculative_tokens=4)
    drafter = drafter_on(CUDA, config, 8, 5_000)
    texts = [np.arange(3_000, dtype=np.int32) % 7] * 2
    gained = as_gained([(2, [1, 2]), (5, [3])], 4, CUDA, dict.fromkeys((2, 5), range(3_002)))
    drafter.begin([2, 5], texts)
    drafter.propose(gained)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        drafter.begin([2, 5], texts)
        drafter.propose(gained)
        drafter.forget()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_a_graph_proposes_what_each_step_does(method):
    config = SpeculativeConfig(method=method, num_speculative_tokens=3)
    captured, eager = (drafter_on(CUDA, config, 6, 8_000) for _ in range(2))
    rng = np.random.default_rng(5)
    text = rng.integers(0, 3, 5_000).astype(np.int32)
    gained = as_gained(
        [(row, [0] * 4) for row in range(6)], 3, CUDA, dict.fromkeys(range(6), range(4))
    )
    lengths = torch.tensor([800 * (1 + row) for row in range(6)])
    for drafter in (captured, eager):
        drafter.begin([0], [text])
        drafter.propose(gained)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drafts = captured.propose(gained)
    for drafter in (captured, eager):
        drafter.begin(range(6), [text[: 800 * (1 + row)] for row in range(6)])
    for _ in range(5):
        gained.token_ids.copy_(torch.from_numpy(rng.integers(0, 3, (6, 4))))
        counts = torch.from_numpy(rng.integers(0, 5, 6))
        lengths += counts
        gained.counts.copy_(counts)
        gained.lengths.copy_(lengths)
        graph.replay()
        assert torch.equal(drafts, eager.propose(gained))
