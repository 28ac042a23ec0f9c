"""The GPU's choice of kernels under Triton's interpreter; conftest.py runs it. What each kernel
computes is tested beside this one."""

import torch

from tests.support.sampling_checks import make_metadata
from worker_daemon.backend import choose_backend, triton_backend
from worker_daemon.runner.staging import CudaStaging, HostStaging

CPU = torch.device("cpu")
TRITON, TORCH = triton_backend(CPU), choose_backend(CPU)


def test_all_of_it_is_triton() -> None:
    assert (TRITON.attention.name, TORCH.attention.name) == ("triton", "torch")
    made = (TRITON.attention.backend, TRITON.sampling, TRITON.rows, TRITON.make_ops())
    assert all(type(each).__module__.startswith("worker_daemon.kernels.") for each in made)
    assert TORCH.make_reducer is None and TRITON.make_reducer is not None
    for backend, kind in ((TRITON, CudaStaging), (TORCH, HostStaging)):
        assert isinstance(backend.open_staging(64, 4, 3, delivers=True), kind)


def test_both_choose_the_same_tokens_and_write_the_same_blocks() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0]])
    metadata = make_metadata(2, temperature=0.0)
    tokens, tables = [], []
    for backend in (TRITON, TORCH):
        tokens.append(backend.sampling.tokens(logits, metadata).tolist())
        table = torch.zeros((3, 4), dtype=torch.int32)
        columns = torch.tensor([[1, 2], [0, 3], [7, 9]], dtype=torch.int32)
        backend.rows.update_blocks(table, *columns)
        tables.append(table.tolist())
    assert tokens == [[1, 0], [1, 0]]
    assert tables[0] == tables[1] == [[0, 0, 0, 0], [7, 0, 0, 0], [0, 0, 0, 9]]
