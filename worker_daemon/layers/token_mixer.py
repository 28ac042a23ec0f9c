"""The interface of a decoder layer's first block, which reads other tokens of the request, and of
its spec: the spec tells all that the partition, the memory plan and the loader need to know.

AttentionSpec (attention.py) is the one that most models have.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

from worker_daemon.contracts.attention import AttentionBackend, AttentionStep
from worker_daemon.layers.cache_spec import CacheSpec
from worker_daemon.layers.kv_scales import HeadScales
from worker_daemon.layers.norm import Part
from worker_daemon.layers.parameter import Parameter
from worker_daemon.layers.rotary import Rope
from worker_daemon.layers.setup import LayerSetup


class MixerWidths(NamedTuple):
    """Values of a token on one rank, in elements of the model's dtype."""

    projected: int
    """The results of the block's input projections."""
    mixed: int
    """The input of its output projection."""
    gathered: int
    """Values that a long prompt gathers from the cache; 0 if it gathers none."""


class TokenMixer(Protocol):
    """A block that reads what it has kept of a request's earlier tokens."""

    @property
    def kv_spec(self) -> CacheSpec:
        """Spec of what it keeps."""

    @property
    def kv_scales(self) -> HeadScales | None:
        """The scales of its cache in FP8; None if it has none."""

    def forward(
        self,
        part: Part,
        residual: Tensor,
        kv_cache: Tensor,
        step: AttentionStep,
        backend: AttentionBackend,
    ) -> tuple[Part, Tensor]:
        """Take and return the residual stream as (part, residual), like DecoderLayer.forward.

        kv_cache [num_blocks, *page_shape(block_size)]: write what the step's tokens add at
        step.metadata.slot_mapping, and read through the block table. It is empty in the memory
        profile on the CPU: then write and read nothing. A block that stores keys and values leaves
        both to `backend`. On a GPU the forward pass is captured in CUDA graphs: launches must
        depend on nothing that a step changes, except as AttentionMetadata's host fields say, and
        never wait for the device.
        """

    def parameters(self) -> Iterator[Parameter]:
        """Yield every parameter once."""


class TokenMixerSpec(Protocol):
    """The spec of a TokenMixer, before tensor parallelism splits it: a frozen dataclass, as equal
    layers share one."""

    @property
    def rope(self) -> Rope | None:
        """The rotation whose table `forward` gets; None: it gets none."""

    @property
    def sliding_window(self) -> int | None:
        """Number of tokens that a token sees, itself included; None: all before it."""

    @property
    def split_sizes(self) -> Mapping[str, int]:
        """Sizes that the tensor-parallel size must divide, by their names in config.json."""

    @property
    def weight_sizes(self) -> Mapping[str, int]:
        """The sizes that determine the shapes of the block's weights, by name."""

    def num_weights(self, hidden_size: int) -> int:
        """Return the number of weights of the block's matrices by which it multiplies a token."""

    def widths(self, tp_size: int) -> MixerWidths:
        """Return a token's values on each of tp_size ranks."""

    def cache_spec(self, prefix: str, tp_size: int) -> CacheSpec:
        """Return what a layer keeps on each of tp_size ranks. prefix: the checkpoint's name of the
        layer."""

    def build(self, prefix: str, setup: LayerSetup) -> TokenMixer:
        """Return the block of a layer. prefix: the checkpoint's name of the layer."""
