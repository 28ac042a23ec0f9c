"""Shared inputs for building the layers of a stage. Chooses the storage format of matrices."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from worker_daemon.contracts.layer_ops import LayerOps
from worker_daemon.distributed.ep import ReplicaExperts
from worker_daemon.distributed.tp import TensorParallel
from worker_daemon.layers.adapters import AdapterLayout, MatrixAdapters
from worker_daemon.layers.expert_loads import ExpertLoads
from worker_daemon.layers.expert_slots import ExpertSlots
from worker_daemon.layers.fp8 import is_quantized, make_fp8_parameters
from worker_daemon.layers.int4 import make_int4_parameters
from worker_daemon.layers.linear_method import LinearMethod, PlainMatrix, StoredMatrix
from worker_daemon.layers.parameter import Parameter, Piece
from worker_daemon.layers.quantization import Int4Quantization, Quantization
from worker_daemon.layers.routed_experts import ChosenExperts


@dataclass(frozen=True, slots=True)
class LayerSetup:
    """Shared by all layers of one stage and rank; made by `build_stage`."""

    hidden_size: int
    """Width of the residual stream."""
    tp: TensorParallel
    dtype: torch.dtype
    device: torch.device
    """Device of the parameters; the meta device if they get memory later."""
    ops: LayerOps
    """The kernels of the device that the layers will run on."""
    adapters: AdapterLayout | None = None
    """Takes the matrices that LoRA adapters may change; None without adapters."""
    quantization: Quantization | None = None
    """None: all matrices are in `dtype`."""
    has_fp8_cache: bool = False
    """The KV cache is in FP8, so that layers need its scales."""
    expert_parallel: bool = False
    """A rank has some of the experts; otherwise it has a part of each."""
    expert_loads: ExpertLoads = field(default_factory=ExpertLoads)
    """The stage's expert load counters; each layer with experts adds its own."""
    chosen_experts: ChosenExperts | None = None
    """Takes the choices of the layers with experts; None: nobody asks for them."""
    replica_experts: ReplicaExperts | None = None
    """The ranks of all replicas that share the experts, with expert_parallel; None: only this
    replica's tensor-parallel ranks."""
    expert_slots: ExpertSlots | None = None
    """The slots of the stage's experts; None: they stay where a load puts them."""

    def parameter(self, name: str, shape: tuple[int, ...], pieces: Iterable[Piece]) -> Parameter:
        """Return a parameter of zeros. Owned by the caller."""
        return Parameter(shape, pieces, name=name, dtype=self.dtype, device=self.device)

    def linear_method(
        self,
        prefix: str,
        shape: tuple[int, int],
        weight: Iterable[Piece],
        bias: Iterable[Piece] | None,
    ) -> LinearMethod:
        """Return the method of a matrix [M, K]. prefix is its name without .weight or .bias; bias
        is None if it has none. Owned by the caller.

        Raises:
            ConfigError: the tensors of a merged matrix are in different formats, or quantized
                blocks do not fit this rank's part.
        """
        pieces = tuple(weight)
        vector = None if bias is None else self.parameter(f"{prefix}.bias", shape[:1], bias)
        stored, adapters = self._stored(prefix, shape, pieces), None
        if self.adapters is not None:
            adapters = MatrixAdapters(self.adapters, self.adapters.add(shape, pieces))
        return LinearMethod(stored, vector, self.ops, adapters)

    def _stored(
        self, prefix: str, shape: tuple[int, int], pieces: tuple[Piece, ...]
    ) -> StoredMatrix:
        quantization = self.quantization
        if quantization is None or not is_quantized(quantization, pieces):
            return PlainMatrix(self.parameter(f"{prefix}.weight", shape, pieces))
        if isinstance(quantization, Int4Quantization):
            return make_int4_parameters(
                prefix, shape, pieces, quantization, self.dtype, self.device
            )
        return make_fp8_parameters(prefix, shape, pieces, quantization, self.device)
