"""The KV cache's memory: one allocation for all layers of this rank, split into the states of
requests, tensors of pages, and further pages. Each of the tensors serves one layer of every
group."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

import torch
from msgspec import structs
from torch import Tensor

from rpc_schema.errors import CapacityError
from rpc_schema.kv_cache import (
    STATE_ALIGNMENT,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    KVPages,
    LatentPages,
    RowState,
    border_tokens,
    groups_of,
    num_checkpoints,
    state_tensor_bytes,
)
from rpc_schema.routed_experts import RoutedExpertsShape
from worker_daemon.contracts.block_kernels import BlockKernels
from worker_daemon.device.failures import FailureKind, failure_kind
from worker_daemon.errors import config_error
from worker_daemon.layers.cache_spec import CacheSpec, LatentLayerSpec, PageSpec, StateLayerSpec


class LayerKV(NamedTuple):
    """The memory of a layer."""

    cache: Tensor
    """[num_blocks, *page shape]: PageSpec.page_shape. A layer of another group may use other
    blocks of the same memory. Of a layer with states: [S + 1 + checkpoints, *state shape]."""
    group: int
    """The layer's KV group; its block table lists the layer's blocks. 0 for a layer with
    states."""


class KVMemory(NamedTuple):
    """The memory of a rank's layers."""

    layers: list[LayerKV]
    """One for each local layer."""
    further: list[Tensor]
    """[num_blocks, *page shape] of each FurtherPages, by the first group's blocks."""
    pages: Tensor | None = None
    """uint8 [tensors, num_blocks, bytes of a page]: the pages of the layers, without a view for
    each. None: there are none."""


class BlockPages:
    """The KV cache by blocks: all that a rank keeps of a block, as rows of W int32 words. Owned by
    a KV connector; the memory is the KV cache's."""

    def __init__(self, memory: KVMemory, kernels: BlockKernels) -> None:
        """memory: with pages, of a multiple of 4 bytes each."""
        assert memory.pages is not None, "a rank without pages has no blocks"
        self.device = memory.pages.device
        self.kernels = kernels
        self._layers = memory.pages.view(torch.int32).transpose(0, 1)
        """[num_blocks, tensors, words of a page]"""
        self._further = [
            own.flatten(1).view(torch.uint8).view(torch.int32)[:, None] for own in memory.further
        ]
        """[num_blocks, 1, words of a page] each"""
        words = [own[0].numel() for own in (self._layers, *self._further)]
        ends = [*accumulate(words)]
        columns = [slice(end - own, end) for own, end in zip(words, ends, strict=True)]
        self.sections = list(zip((self._layers, *self._further), columns, strict=True))
        """Pages [num_blocks, pages, words of a page] of each kind, and their columns of a row."""
        self.block_bytes = ends[-1] * torch.int32.itemsize

    @property
    def further_words(self) -> tuple[int, ...]:
        """Words of each further page of a block."""
        return tuple(own.shape[2] for own in self._further)

    def gather(self, block_ids: Tensor, rows: Tensor) -> None:
        """Copy blocks int32 [n] to rows, int32 [n, W]."""
        for pages, columns in self.sections:
            self.kernels.gather(pages, block_ids, rows[:, columns])

    def scatter(self, rows: Tensor, block_ids: Tensor) -> None:
        """Copy rows, int32 [n, W], to blocks int32 [n], no two of them the same."""
        for pages, columns in self.sections:
            self.kernels.scatter(rows[:, columns], block_ids, pages)

    def poison(self, block_ids: Tensor, are_bad: Tensor) -> None:
        """Replace blocks int32 [n] where are_bad, bool [n]: keys and values by NaN, and further
        pages, whose values nobody may take for a result, by zeros."""
        self.kernels.fill(self._layers, block_ids, are_bad, ALL_BITS)
        for pages in self._further:
            self.kernels.fill(pages, block_ids, are_bad, 0)


class FurtherPages(NamedTuple):
    """Pages beside those of the model's layers: of a draft model's layer, or of the experts of
    tokens."""

    spec: PageSpec
    dtype: torch.dtype


_ROUTED_EXPERTS: Final = "routed_experts"
ALL_BITS: Final = -1
"""An int32 that is NaN in every dtype of a KV cache: float32, bfloat16, float16, float8_e4m3fn."""


def routed_pages(shape: RoutedExpertsShape | None) -> tuple[FurtherPages, ...]:
    """Return the pages of the experts of tokens on a rank of the last stage; None: none are
    kept."""
    if shape is None:
        return ()
    spec = LatentLayerSpec(_ROUTED_EXPERTS, shape.num_layers * shape.top_k)
    return (FurtherPages(spec, routed_dtype(shape)),)


def routed_dtype(shape: RoutedExpertsShape) -> torch.dtype:
    """Return the dtype in which a rank keeps the numbers of experts: int16 in place of uint16, in
    which torch can compute little."""
    return torch.uint8 if shape.num_experts <= 256 else torch.int16


def describe_layers(layers: Sequence[CacheSpec], dtype: torch.dtype) -> tuple[KVCacheSpec, ...]:
    """Return one KVCacheSpec per local layer. dtype: of pages."""
    return tuple(_describe(layer, dtype) for layer in layers)


def describe_further(pages: Sequence[FurtherPages]) -> tuple[KVCacheSpec, ...]:
    """Return one KVCacheSpec for each of these."""
    described = (_describe(spec, dtype) for spec, dtype in pages)
    return tuple(structs.replace(spec, is_draft=True) for spec in described)


def _describe(layer: CacheSpec, dtype: torch.dtype) -> KVCacheSpec:
    if isinstance(layer, StateLayerSpec):
        return RowState(
            layer_name=layer.name,
            shape=layer.shape,
            dtype=_name(layer.dtype),
            bytes_per_row=layer.row_bytes,
            checkpoint_blocks=layer.checkpoint_blocks,
        )
    bytes_per_token = layer.token_values * dtype.itemsize
    if isinstance(layer, LatentLayerSpec):
        return LatentPages(
            layer_name=layer.name,
            width=layer.width,
            dtype=_name(dtype),
            bytes_per_token=bytes_per_token,
            sliding_window=layer.window,
        )
    return KVPages(
        layer_name=layer.name,
        num_kv_heads=layer.num_kv_heads,
        head_size=layer.head_dim,
        dtype=_name(dtype),
        bytes_per_token=bytes_per_token,
        sliding_window=layer.window,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def allocate_kv_caches(
    config: KVCacheConfig,
    layers: Sequence[CacheSpec],
    dtype: torch.dtype,
    max_num_seqs: int,
    make_zeros: Callable[[int, torch.dtype], Tensor],
    further: Sequence[FurtherPages] = (),
) -> KVMemory:
    """Return zeroed caches, one per layer, in memory from make_zeros(number of elements, dtype).
    dtype: of the layers' pages. max_num_seqs: request rows, for which layers with states have
    memory.

    Zeroed: a kernel may read past the end of a sequence, and NaN times a zero weight is NaN.

    Raises:
        ConfigError: the plan does not match these layers.
        CapacityError: the device has too little memory.
    """
    _check_plan(config, layers, dtype, max_num_seqs)
    _check_further(config, further)
    if not layers:
        return KVMemory([], [])
    own_bytes = config.state_bytes + config.size_bytes
    further_start = -(-own_bytes // STATE_ALIGNMENT) * STATE_ALIGNMENT
    size_bytes = further_start + config.draft_bytes if further else own_bytes
    try:
        arena = make_zeros(size_bytes, torch.uint8)
    except (RuntimeError, MemoryError, CapacityError) as error:
        if (
            not isinstance(error, CapacityError)
            and failure_kind(error) is not FailureKind.OUT_OF_MEMORY
        ):
            raise
        raise CapacityError(
            f"the KV cache does not fit: {error}",
            field="kv_cache_config.size_bytes",
            value=size_bytes,
            fix="plan fewer blocks",
        ) from None
    caches = _states(arena[: config.state_bytes], layers, _num_states(config, max_num_seqs))
    caches |= _pages(arena[config.state_bytes : own_bytes].view(dtype), config, layers)
    memory = [caches[layer.name] for layer in layers]
    pages = None
    if config.size_bytes:
        pages = arena[config.state_bytes : own_bytes].view(
            _num_tensors(config), config.num_blocks, -1
        )
    return KVMemory(memory, _further_pages(arena[further_start:], config, further), pages)


def _further_pages(
    memory: Tensor, config: KVCacheConfig, further: Sequence[FurtherPages]
) -> list[Tensor]:
    """Return further pages, one after the other. memory: uint8."""
    block_size = groups_of(config)[0].block_size
    found, start = [], 0
    for spec, dtype in further:
        shape = (config.num_blocks, *spec.page_shape(block_size))
        end = start + math.prod(shape) * dtype.itemsize
        found.append(memory[start:end].view(dtype).view(shape))
        start = end
    return found


def _num_states(config: KVCacheConfig, max_num_seqs: int) -> int:
    """Return the number of rows of each tensor of states: one per request row, the spare one, and
    the checkpoints."""
    return max_num_seqs + 1 + num_checkpoints(config.num_blocks, config.checkpoint_blocks)


def _states(memory: Tensor, layers: Sequence[CacheSpec], num_rows: int) -> dict[str, LayerKV]:
    """Return the states [num_rows, *shape] of the layers that keep some, by name. memory:
    uint8."""
    found, start = {}, 0
    for layer in layers:
        if not isinstance(layer, StateLayerSpec):
            continue
        own = memory[start : start + layer.row_bytes * num_rows]
        found[layer.name] = LayerKV(own.view(layer.dtype).view(-1, *layer.shape), 0)
        start += state_tensor_bytes(layer.row_bytes, num_rows)
    return found


def _pages(
    memory: Tensor, config: KVCacheConfig, layers: Sequence[CacheSpec]
) -> dict[str, LayerKV]:
    """Return the pages of the layers that keep some, by name. memory: [values of all tensors]."""
    num_tensors = _num_tensors(config)
    if not num_tensors:
        return {}
    pieces = torch.split(memory, memory.shape[0] // num_tensors)
    places = {
        name: (tensor, number)
        for number, group in enumerate(config.groups)
        for tensor, name in enumerate(group.layer_names)
    }
    found = {}
    for layer in layers:
        if isinstance(layer, StateLayerSpec):
            continue
        tensor, number = places[layer.name]
        shape = (config.num_blocks, *layer.page_shape(config.groups[number].block_size))
        found[layer.name] = LayerKV(pieces[tensor].view(shape), number)
    return found


def _num_tensors(config: KVCacheConfig) -> int:
    return max((len(group.layer_names) for group in config.groups), default=0)


def _check_plan(
    config: KVCacheConfig, layers: Sequence[CacheSpec], dtype: torch.dtype, max_num_seqs: int
) -> None:
    states = [layer for layer in layers if isinstance(layer, StateLayerSpec)]
    pages = [layer for layer in layers if not isinstance(layer, StateLayerSpec)]
    planned = sorted(name for group in config.groups for name in group.layer_names)
    local = sorted(layer.name for layer in pages)
    if planned != local:
        problem = "the plan names other layers than this rank has"
        raise config_error("kv_cache_config.groups", planned, problem, f"exactly {local}")
    names = tuple(layer.name for layer in states)
    if config.state_layers != names:
        problem = "the plan names other layers with states than this rank has"
        raise config_error("kv_cache_config.state_layers", config.state_layers, problem, f"{names}")
    num_rows = _num_states(config, max_num_seqs)
    expected = sum(state_tensor_bytes(layer.row_bytes, num_rows) for layer in states)
    if config.state_bytes != expected:
        problem = (
            f"the states of {max_num_seqs} requests, a spare row and "
            f"{num_rows - max_num_seqs - 1} checkpoints have another size"
        )
        raise config_error(
            "kv_cache_config.state_bytes", config.state_bytes, problem, f"{expected}"
        )
    _check_borders(config)
    by_name = {layer.name: layer for layer in pages}
    page_bytes = 0
    for group in config.groups:
        for name in group.layer_names:
            page_bytes = page_bytes or _page_bytes(group, by_name[name], dtype)
            _check_layer(group, by_name[name], dtype, page_bytes)
    expected = config.num_blocks * _num_tensors(config) * page_bytes
    if config.size_bytes != expected:
        problem = "the plan's size does not follow from its blocks"
        fix = f"{config.num_blocks} blocks of {config.block_size} tokens take {expected} bytes"
        raise config_error("kv_cache_config.size_bytes", config.size_bytes, problem, fix)


def _check_further(config: KVCacheConfig, further: Sequence[FurtherPages]) -> None:
    names = tuple(spec.name for spec, _ in further)
    if config.draft_layers != names:
        problem = "the plan names other further pages than this rank has"
        raise config_error("kv_cache_config.draft_layers", config.draft_layers, problem, f"{names}")
    if not names:
        if config.draft_bytes:
            problem = "there are no further pages on this rank"
            raise config_error("kv_cache_config.draft_bytes", config.draft_bytes, problem, "0")
        return
    first = groups_of(config)[0]
    if first.window is not None:
        problem = "further pages hold all tokens by the block table of the first group"
        raise config_error("kv_cache_config.groups", first.window, problem, "one without a window")
    per_token = sum(spec.token_values * dtype.itemsize for spec, dtype in further)
    expected = config.num_blocks * first.block_size * per_token
    if config.draft_bytes != expected:
        problem = "the further pages have another size"
        raise config_error(
            "kv_cache_config.draft_bytes", config.draft_bytes, problem, f"{expected}"
        )


def _check_borders(config: KVCacheConfig) -> None:
    """Check that each border is the end of a block in every group."""
    if config.checkpoint_blocks:
        groups = groups_of(config)
        interval, sizes = (
            border_tokens(groups, config.checkpoint_blocks),
            [g.block_size for g in groups],
        )
        if any(interval % size for size in sizes):
            field, value = "kv_cache_config.checkpoint_blocks", config.checkpoint_blocks
            problem = f"{interval} tokens are no whole number of blocks in each group"
            raise config_error(field, value, problem, f"a multiple of {max(sizes) // sizes[0]}")


def _check_layer(group: KVCacheGroup, layer: PageSpec, dtype: torch.dtype, page_bytes: int) -> None:
    own, seen = _name(dtype), group.sliding_window
    if group.dtype != own:
        problem = "the model was loaded for a KV cache of another dtype"
        raise config_error("kv_cache_config.groups.dtype", group.dtype, problem, own)
    if group.layout != layer.layout:
        problem = f"{layer.name} has pages of another layout"
        raise config_error("kv_cache_config.groups.layout", group.layout, problem, layer.layout)
    if seen is not None and (layer.window is None or layer.window > seen):
        problem = f"{layer.name} sees more than its group keeps"
        fix = "none" if layer.window is None else f"{layer.window} or more"
        raise config_error("kv_cache_config.groups.sliding_window", seen, problem, fix)
    if _page_bytes(group, layer, dtype) != page_bytes:
        problem = "pages of all groups have the same size"
        fix = f"as many tokens as take {page_bytes} bytes of {layer.name}"
        raise config_error("kv_cache_config.groups.block_size", group.block_size, problem, fix)


def _page_bytes(group: KVCacheGroup, layer: PageSpec, dtype: torch.dtype) -> int:
    """Return the bytes that a layer keeps of a block's tokens."""
    return group.block_size * layer.token_values * dtype.itemsize
