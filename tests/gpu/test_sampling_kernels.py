"""The sampling kernels on a GPU: against plain torch there and on the CPU, without waiting for the
device."""

import numpy as np
import pytest
import torch

from tests.support.sampling_checks import (
    CHI_SQUARE_SETTINGS,
    KINDS,
    check_against_torch,
    check_boundary,
    check_distribution,
    check_rows_are_independent,
    make_metadata,
    on,
    random_logits,
    random_metadata,
)
from worker_daemon.backend import choose_backend
from worker_daemon.kernels.argmax import greedy_tokens
from worker_daemon.kernels.sampling import TritonSampling
from worker_daemon.sample.sampler import TorchSampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.kernels,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


@pytest.fixture(scope="module")
def sampling():
    found = choose_backend(torch.device("cuda")).sampling
    assert found.name == "triton"
    return found


def random_batch(kind, num_rows, vocab_size, dtype=torch.float32):
    rng = np.random.default_rng()
    logits = random_logits(kind, num_rows, vocab_size, rng).to(dtype)
    return logits.cuda(), on("cuda", random_metadata(num_rows, rng))


@DTYPES
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 128_256), (70, 50_257), (300, 997)])
def test_tokens_are_those_of_torch_on_the_gpu(sampling, kind, num_rows, vocab_size, dtype):
    check_against_torch(sampling, *random_batch(kind, num_rows, vocab_size, dtype))


def test_a_large_batch_is_torchs(sampling):
    check_against_torch(sampling, *random_batch("flat", 600, 151_936, torch.bfloat16))


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_torch_on_the_cpu(sampling, kind):
    """exp and log differ by the last bit between devices: that turns a draw once in a million."""
    logits, metadata = random_batch(kind, 40, 32_000)
    tokens = sampling.tokens(logits, metadata).cpu()
    expected = TorchSampling().tokens(logits.cpu(), on("cpu", metadata))
    assert (tokens != expected).sum() <= 1


@DTYPES
@pytest.mark.parametrize("spread", [0.5, 3.0])
@pytest.mark.parametrize(
    "settings",
    [
        {"top_p": 0.9},
        {"top_p": 0.3},
        {"top_k": 50},
        {"top_k": 20_000, "top_p": 0.9},
        {"min_p": 0.3},
        {"temperature": 1.5, "min_p": 0.001, "top_k": 1000, "top_p": 0.8},
    ],
    ids=str,
)
def test_thresholds_are_torchs(sampling, settings, spread, dtype):
    row = (torch.randn(50_257) * spread).to(dtype)
    check_boundary(sampling, row.cuda(), num_tried=200, **settings)


@pytest.mark.parametrize("vary", ["positions", "seeds"])
@pytest.mark.parametrize("settings", CHI_SQUARE_SETTINGS)
def test_distribution_passes_a_chi_square_test(sampling, settings, vary):
    check_distribution(sampling, "cuda", settings, vary)


@DTYPES
def test_rows_are_independent(sampling, dtype):
    check_rows_are_independent(sampling, *random_batch("flat", 90, 128_256, dtype))


def test_it_never_waits_for_the_device(sampling):
    logits, metadata = random_batch("flat", 64, 128_256)
    expected = sampling.tokens(logits, metadata)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tokens = sampling.tokens(logits, metadata)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(tokens, expected)


def test_a_graph_holds_it(sampling):
    logits, metadata = random_batch("flat", 64, 128_256)
    sampling.tokens(logits, metadata)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sampling.tokens(logits, metadata)
    for _ in range(3):
        logits.copy_(torch.randn_like(logits))
        metadata.positions.add_(1)
        graph.replay()
        assert torch.equal(tokens, sampling.tokens(logits, metadata))


def test_one_program_compiles_for_all_parameters(sampling, monkeypatch):
    """Whatever a batch asks for, warm-up with every feature has compiled it."""
    import triton

    logits, metadata = random_batch("flat", 8, 32_000)
    sampling.tokens(logits, metadata)
    compiled = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **kwargs: compiled.append(kwargs)
    )
    for num_rows in (1, 3, 200):
        for settings in ({}, {"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.1}, {"temperature": 0.0}):
            rows = logits[:1].expand(num_rows, -1).contiguous()
            sampling.tokens(rows, on("cuda", make_metadata(num_rows, **settings)))
    assert not compiled


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [8, 700])
def test_kernels_choose_no_token_where_logits_are_no_numbers(dtype, num_rows):
    """Few rows, split over programs, and many rows, not split."""
    rng = np.random.default_rng()
    vocab_size = 20_011
    logits = random_logits("flat", num_rows, vocab_size, rng).to("cuda", dtype)
    metadata = on("cuda", random_metadata(num_rows, rng))
    sampling = TritonSampling(torch.device("cuda"))
    greedy, sampled = greedy_tokens(logits, vocab_size), sampling.tokens(logits, metadata)
    assert (greedy >= 0).all() and (sampled >= 0).all()
    logits[1, 17_000], logits[2], logits[4, 0] = torch.nan, torch.nan, torch.inf
    logits[5], logits[7, -1] = -torch.inf, torch.nan
    bad = [1, 2, 4, 5, 7]
    greedy[bad], sampled[bad] = -1, -1
    assert torch.equal(greedy_tokens(logits, vocab_size), greedy)
    assert torch.equal(sampling.tokens(logits, metadata), sampled)
