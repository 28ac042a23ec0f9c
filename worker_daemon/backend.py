"""The kernels of a device: chosen once, when a rank opens it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from worker_daemon.contracts.block_kernels import BlockKernels
from worker_daemon.contracts.drafting import TextKernels
from worker_daemon.contracts.layer_ops import LayerOps
from worker_daemon.contracts.sampling import Sampling
from worker_daemon.contracts.window import Window
from worker_daemon.distributed.ep import MakeRowExchange, RowExchange
from worker_daemon.distributed.tp import MakeReducer, Reducer
from worker_daemon.drafting.torch_text import TorchTextKernels
from worker_daemon.layers.attention_choice import ChosenAttention
from worker_daemon.layers.torch_attention import TorchPagedAttention
from worker_daemon.layers.torch_ops import TorchOps
from worker_daemon.runner.row_tables import RowKernels, TorchRowKernels
from worker_daemon.runner.staging import CudaStaging, HostStaging, OpenStaging
from worker_daemon.runner.torch_blocks import TorchBlockKernels
from worker_daemon.sample.sampler import TorchSampling


@dataclass(frozen=True, slots=True)
class Backend:
    """The kernels and staging of one device. Used on the step thread. Owns no device memory."""

    attention: ChosenAttention
    """Attention over paged sequences; a model may extend it (layers/attention_choice.py)."""
    sampling: Sampling
    rows: RowKernels
    texts: TextKernels
    blocks: BlockKernels
    make_ops: Callable[[], LayerOps]
    """Called once for each stage."""
    make_reducer: MakeReducer | None
    """For short messages, over the windows of a tensor-parallel group; None if there is none."""
    make_row_exchange: MakeRowExchange | None
    """For rows of replicas that share experts, over their windows; None if there is none."""
    open_staging: OpenStaging


def choose_backend(device: torch.device) -> Backend:
    """Return our Triton kernels on a CUDA device, plain torch elsewhere."""
    if device.type == "cuda":
        return triton_backend(device)
    return Backend(
        attention=ChosenAttention("torch", TorchPagedAttention()),
        sampling=TorchSampling(),
        rows=TorchRowKernels(),
        texts=TorchTextKernels(),
        blocks=TorchBlockKernels(),
        make_ops=TorchOps,
        make_reducer=None,
        make_row_exchange=None,
        open_staging=_host_staging,
    )


def triton_backend(device: torch.device) -> Backend:
    """Return our Triton kernels; tests also use them on the CPU, with Triton's interpreter."""
    # Importing Triton takes longer than all our other imports of a CPU daemon.
    from worker_daemon.kernels.gathered_prefill import TritonFP8Gathered, TritonGathered
    from worker_daemon.kernels.launch import has_dependent_launch
    from worker_daemon.kernels.moved_blocks import TritonBlockKernels
    from worker_daemon.kernels.ops import TritonOps
    from worker_daemon.kernels.paged_attention import TritonAttention
    from worker_daemon.kernels.peer_exchange import PeerExchange
    from worker_daemon.kernels.peer_reduce import PeerReduce
    from worker_daemon.kernels.row_ops import TritonRowKernels
    from worker_daemon.kernels.sampling import TritonSampling
    from worker_daemon.kernels.text_lookup import TritonTextKernels

    def make_reducer(window: Window) -> Reducer:
        return PeerReduce(window, window.device, pdl=has_dependent_launch(window.device))

    def make_row_exchange(window: Window) -> RowExchange:
        return PeerExchange(window, window.device, pdl=has_dependent_launch(window.device))

    return Backend(
        attention=ChosenAttention(
            "triton", TritonAttention(device), TritonGathered(device), TritonFP8Gathered(device)
        ),
        sampling=TritonSampling(device),
        rows=TritonRowKernels(),
        texts=TritonTextKernels(),
        blocks=TritonBlockKernels(),
        make_ops=partial(TritonOps, device),
        make_reducer=make_reducer,
        make_row_exchange=make_row_exchange,
        open_staging=partial(CudaStaging, device),
    )


def _host_staging(capacity: int, width: int, depth: int, *, delivers: bool) -> HostStaging:
    return HostStaging()
