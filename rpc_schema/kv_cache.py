"""Structs for the KV cache in the ranks' reports and in the driver's plan, and block arithmetic for
drivers and `worker-daemon plan`.

A rank's memory for the KV cache is divided into equal pages, num_blocks in each of a few tensors. A
block consists of the pages with the same number, one from each tensor; that number is its id. A
group consists of layers that share one block table: its first layer uses the first tensor, its
second layer the second, and so on. Any block can serve any group, so all groups share the free
blocks.

Layers that keep a state per request have no pages: each has a tensor with a row for every request
row and the spare one, before the pages in the same memory. See RankStates for checkpoints.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, ClassVar, Final, Literal, NamedTuple, TypeAlias

from msgspec import Meta

from rpc_schema.base import Count, Name, Positive, Unsigned, Value

NUM_NULL_BLOCKS = 1
"""Block 0 is never given to a request."""

NULL_BLOCK = 0
"""Id of the null block, which replaces a block that a sliding window has passed."""

MAX_GROUPS = 16
"""Limit on groups: each adds one launch to a step, and one block-table row to a request."""

MAX_BLOCKS_WITHOUT_MEMORY = 1 << 16
"""Number of slots of a group, and the null block."""

STATE_ALIGNMENT = 256
"""Each layer's states begin at a multiple of this many bytes."""

MAX_CHECKPOINT_SHARE = 10
"""Unless a layer says otherwise, checkpoints take at most one part in this many of the memory that
they and the pages take."""

MIN_BORDER_TOKENS = 512
"""Unless a layer says otherwise, least number of tokens from a border to the next: a step computes
a prompt up to a border at most, and short parts of prompts are inefficient."""

DType = Annotated[str, Meta(max_length=32)]


Layout = Literal["NHD", "latent"]
"""Layout of a layer's tensor of pages. NHD: [num_blocks, 2, block_size, kv_heads, head_dim]; dim 1:
K, V. latent: [num_blocks, block_size, width]."""


MAX_HOST_BLOCKS: Final = 2**31 - 1
"""Bound on the slots of a host tier."""


class KVPages(Value, frozen=True, kw_only=True, tag=1):
    """Keys and values of one layer of one rank, in pages. Sizes are the local shard's."""

    layout: ClassVar[Layout] = "NHD"

    layer_name: Name
    num_kv_heads: Positive
    head_size: Positive
    dtype: DType
    bytes_per_token: Positive
    sliding_window: Positive | None = None
    is_draft: bool = False
    """True for a layer of the draft model, or the experts of tokens: see LayerGroup.drafts."""

    @property
    def token_shape(self) -> tuple[int, ...]:
        """Shape of a token's values."""
        return 2, self.num_kv_heads, self.head_size


class LatentPages(Value, frozen=True, kw_only=True, tag=2):
    """One vector per token of one layer of one rank, in pages: what the layer computes its keys and
    values from."""

    layout: ClassVar[Layout] = "latent"

    layer_name: Name
    width: Positive
    dtype: DType
    bytes_per_token: Positive
    sliding_window: Positive | None = None
    is_draft: bool = False
    """See KVPages."""

    @property
    def token_shape(self) -> tuple[int, ...]:
        """Shape of a token's values."""
        return (self.width,)


class RowState(Value, frozen=True, kw_only=True, tag=3):
    """State of each request in one layer of one rank, whatever the request's length. It cannot be
    taken back: a request begins with zeros at position 0, or with a checkpoint at a border."""

    layer_name: Name
    shape: Annotated[tuple[Positive, ...], Meta(min_length=1, max_length=8)]
    """Shape of a request's state."""
    dtype: DType
    bytes_per_row: Positive
    checkpoint_blocks: Count | None = None
    """Blocks from a border to the next; 0: no checkpoints. None leaves it to
    choose_checkpoint_blocks."""


KVCacheSpec: TypeAlias = KVPages | LatentPages | RowState
"""Spec of one layer of one rank. Pages of all kinds have block tables, and can be shared."""


class KVCacheGroup(Value, frozen=True, kw_only=True):
    """Layers that share one block table. All ranks have the same groups in the same order; a rank
    may have no layer of one."""

    layer_names: tuple[Name, ...]
    """Layers of this rank. The first layer's pages are in the first tensor, and so on."""
    block_size: Positive
    """Tokens of a block."""
    sliding_window: Positive | None
    """Number of tokens that a token sees, itself included; None: itself and all before it."""
    dtype: DType
    layout: Layout = "NHD"


class KVCacheConfig(Value, frozen=True, kw_only=True):
    """One rank's KV cache. Block 0 is the null block: padding points at it and no request may own
    it."""

    num_blocks: Annotated[int, Meta(ge=2, le=2**31 - 1)]
    block_size: Positive
    """Configured block size, used by the groups with the most bytes per token."""
    groups: Annotated[tuple[KVCacheGroup, ...], Meta(max_length=MAX_GROUPS)]
    size_bytes: Unsigned
    """Size of all pages: num_blocks * the bytes of a page * the layers of the largest group."""
    state_layers: tuple[Name, ...] = ()
    """Layers of this rank that keep a state per request, in the order of their memory."""
    state_bytes: Unsigned = 0
    """Size of all states and checkpoints: see RankStates."""
    checkpoint_blocks: Count = 0
    """Blocks of the first group from a border to the next; 0: there are no checkpoints. The same on
    all ranks."""
    draft_layers: tuple[Name, ...] = ()
    """Layers of the draft model on this rank, and last the experts of tokens if they are kept, in
    the order of their memory: see LayerGroup.drafts."""
    draft_bytes: Unsigned = 0
    """Size of all their pages, num_blocks of each."""
    num_host_blocks: Count = 0
    """Slots of the host tier, each for one block of any group; the same on all ranks. 0: there is
    no tier."""


class BlockGroup(NamedTuple):
    """Properties of a group that determine a request's blocks."""

    block_size: int
    window: int | None = None
    """Sliding window in tokens; None: none."""


class LayerKind(NamedTuple):
    """Properties that must be equal for layers to share a block table."""

    window: int | None
    dtype: str
    bytes_per_token: int
    layout: Layout
    token_shape: tuple[int, ...]


class DraftPages(NamedTuple):
    """The pages of a rank's draft model, and those of the experts of tokens."""

    layer_names: tuple[str, ...] = ()
    bytes_per_token: int = 0
    """Bytes of a token in all layers together."""


class LayerGroup(NamedTuple):
    """A group of a plan for all ranks."""

    blocks: BlockGroup
    kind: LayerKind
    layer_names: tuple[tuple[str, ...], ...]
    """Layers of each rank."""
    drafts: tuple[DraftPages, ...] = ()
    """The first group: what each rank's draft model keeps, and what the last stage keeps of the
    experts of tokens; empty without both. They use the group's block table, and need no blocks of
    their own: each has further pages, of its own size, with the numbers of all blocks."""


class UnequalPages(ValueError):
    """No block sizes make the pages equal, because the bytes per token of the layers differ too
    much."""

    def __init__(self, sizes: Sequence[int], block_size: int) -> None:
        super().__init__(f"pages of {block_size} tokens cannot be equal for layers of {sizes}")
        self.sizes = sizes
        """Bytes per token."""


class RankStates(NamedTuple):
    """A rank's layers with a state per request.

    Checkpoints are further rows of their tensors: copies of states at borders, which are n =
    checkpoint_blocks blocks of the first group apart. A request can begin at a border if the block
    that ends there has a checkpoint: block i has number i / n if n divides i. So a checkpoint is
    shared, kept and overwritten with its block. Number 0, of the null block, takes copies that
    nobody reads.
    """

    layer_names: tuple[str, ...] = ()
    row_bytes: tuple[int, ...] = ()
    """Bytes of a state, by layer."""
    num_rows: int = 0
    """Request rows and the spare one."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all rows, without checkpoints."""
        return self.bytes_with(0)

    def bytes_with(self, num_checkpoints: int) -> int:
        """Return the bytes of all rows and checkpoints, each layer's rounded up to
        STATE_ALIGNMENT."""
        num_rows = self.num_rows + num_checkpoints
        return sum(state_tensor_bytes(each, num_rows) for each in self.row_bytes)


NO_STATES = RankStates()


def rank_states(layers: Iterable[KVCacheSpec], max_num_seqs: int) -> RankStates:
    """Return what a rank's layers keep per request: max_num_seqs rows, and a spare one."""
    states = [layer for layer in layers if isinstance(layer, RowState)]
    return RankStates(
        tuple(layer.layer_name for layer in states),
        tuple(layer.bytes_per_row for layer in states),
        max_num_seqs + 1,
    )


def state_tensor_bytes(bytes_per_row: int, num_rows: int) -> int:
    """Return the bytes of a layer's states, rounded up to STATE_ALIGNMENT."""
    return -(-bytes_per_row * num_rows // STATE_ALIGNMENT) * STATE_ALIGNMENT


def num_checkpoints(num_blocks: int, checkpoint_blocks: int) -> int:
    """Return the number of checkpoints of num_blocks blocks, the null block's included."""
    return -(-num_blocks // checkpoint_blocks) if checkpoint_blocks else 0


def border_tokens(groups: Sequence[BlockGroup], checkpoint_blocks: int) -> int:
    """Return the number of tokens from a border to the next; 0 if there are no checkpoints."""
    return checkpoint_blocks * groups[0].block_size


def has_checkpoint(block_id: int, checkpoint_blocks: int) -> bool:
    """Return True if a block of the first group that ends at a border has a checkpoint."""
    return block_id != NULL_BLOCK and block_id % checkpoint_blocks == 0


def block_groups(groups: Sequence[BlockGroup], block_size: int) -> tuple[BlockGroup, ...]:
    """Return the groups; without any, one of block_size without a window."""
    return tuple(groups) or (BlockGroup(block_size),)


def groups_of(config: KVCacheConfig) -> tuple[BlockGroup, ...]:
    """Return block size and window of each group of this cache."""
    named = [BlockGroup(group.block_size, group.sliding_window) for group in config.groups]
    return block_groups(named, config.block_size)


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks for num_tokens tokens."""
    return -(-num_tokens // block_size)


def blocks_behind(num_computed: int, group: BlockGroup) -> int:
    """Return the number of leading blocks of a request that no token at position num_computed or
    later sees."""
    if group.window is None:
        return 0
    return max(0, num_computed - group.window + 1) // group.block_size


def most_blocks(num_tokens: int, group: BlockGroup, max_num_batched_tokens: int) -> int:
    """Return the largest number of blocks of one group that a request of num_tokens tokens has at
    once: all, or those of a window plus a step's tokens, with the partial blocks at both ends."""
    needed = blocks_for(num_tokens, group.block_size)
    if group.window is None:
        return needed
    reach = group.window - 1 + max_num_batched_tokens
    return min(needed, blocks_for(reach, group.block_size) + 1)


def request_blocks(
    num_tokens: int, groups: Iterable[BlockGroup], max_num_batched_tokens: int
) -> int:
    """Return the largest number of blocks of all groups that a request of num_tokens has at
    once."""
    return sum(most_blocks(num_tokens, group, max_num_batched_tokens) for group in groups)


def plan_groups(
    ranks: Sequence[Sequence[KVCacheSpec]],
    block_size: int,
    max_model_len: int,
    max_num_batched_tokens: int,
) -> tuple[LayerGroup, ...]:
    """Divide the layers of all ranks into groups, full attention first. The plan minimizes the
    memory of a request of max_model_len tokens on the rank where it takes the most, then the number
    of groups. If all layers are of one kind, they form one group.

    On each rank, a block takes as much memory as the rank's largest group needs, even if it serves
    a smaller group. So if stages have layers of different kinds, it may be best to ignore windows
    and keep all blocks. A window that no request outgrows is ignored. block_size: for the kind with
    the most bytes per token.

    Layers that keep states are left out. If no others remain, there is one group, whose blocks
    take no memory. They hold block_size tokens each if a layer asks for checkpoints, otherwise
    max_model_len.

    Layers of a draft model, and the experts of tokens, are left out too. If there are some, the
    first group has no window, and has them besides.

    Raises:
        UnequalPages: pages of different kinds cannot be made equal.
    """
    drafts = tuple(map(_draft_pages, ranks))
    paged = [
        [layer for layer in rank if not (isinstance(layer, RowState) or layer.is_draft)]
        for rank in ranks
    ]
    if not any(paged):
        nothing = LayerKind(None, "none", 0, "NHD", ())
        size = block_size if _asked_checkpoints(ranks) else max_model_len
        return (LayerGroup(BlockGroup(size), nothing, ((),) * len(ranks)),)
    cuts = [
        _cut(
            [_names_by_kind(layers, longest) for layers in paged],
            block_size,
            max_model_len,
            max_num_batched_tokens,
        )
        for longest in (max_model_len, 0)
    ]
    if not any(each.layer_names for each in drafts):
        return min(cuts, key=_cut_order).groups
    first, *others = min((cut for cut in cuts if cut.keeps_all), key=_cut_order).groups
    return (first._replace(drafts=drafts), *others)


def _draft_pages(layers: Sequence[KVCacheSpec]) -> DraftPages:
    own = [layer for layer in layers if not isinstance(layer, RowState) and layer.is_draft]
    return DraftPages(
        tuple(layer.layer_name for layer in own), sum(layer.bytes_per_token for layer in own)
    )


class _Cut(NamedTuple):
    groups: tuple[LayerGroup, ...]
    cost: int
    """Return the bytes of the longest request, on the rank where it takes the most."""

    @property
    def keeps_all(self) -> bool:
        """True if the first group has no window. Without any windows that is so."""
        return self.groups[0].blocks.window is None


def _cut_order(cut: _Cut) -> tuple[int, int]:
    return cut.cost, len(cut.groups)


def _cut(
    ranks: Sequence[Mapping[LayerKind, Sequence[str]]],
    block_size: int,
    max_model_len: int,
    max_num_batched_tokens: int,
) -> _Cut:
    """Divide each kind into the best number of groups. ranks: names of each rank's layers."""
    every_kind = {kind for by_kind in ranks for kind in by_kind}
    kinds = sorted(every_kind, key=lambda kind: (kind.window is not None, kind))
    counts = [[len(by_kind.get(kind, ())) for by_kind in ranks] for kind in kinds]
    sizes = _block_sizes([kind.bytes_per_token for kind in kinds], block_size)
    page_bytes = sizes[0] * kinds[0].bytes_per_token
    blocks = [BlockGroup(size, kind.window) for size, kind in zip(sizes, kinds, strict=True)]
    costs = [most_blocks(max_model_len, group, max_num_batched_tokens) for group in blocks]
    best: tuple[int, int, list[int]] | None = None
    for num_tensors in range(1, max(map(max, counts)) + 1):
        numbers = [max(-(-count // num_tensors) for count in of_kind) for of_kind in counts]
        num_pages = num_tensors * sum(n * cost for n, cost in zip(numbers, costs, strict=True))
        candidate = num_pages, sum(numbers), numbers
        if sum(numbers) <= MAX_GROUPS and (best is None or candidate < best):
            best = candidate
    assert best is not None, "more kinds of layers than groups may be"
    groups = tuple(
        LayerGroup(group, kind, tuple(_part(rank.get(kind, ()), index, number) for rank in ranks))
        for group, kind, number in zip(blocks, kinds, best[2], strict=True)
        for index in range(number)
    )
    return _Cut(groups, best[0] * page_bytes)


def _names_by_kind(
    layers: Sequence[KVPages | LatentPages], longest: int
) -> dict[LayerKind, tuple[str, ...]]:
    """Return the layers of each kind; windows of `longest` tokens or more are ignored."""
    names: dict[LayerKind, tuple[str, ...]] = {}
    for layer in layers:
        window = layer.sliding_window
        kind = LayerKind(
            None if window is None or window >= longest else window,
            layer.dtype,
            layer.bytes_per_token,
            layer.layout,
            layer.token_shape,
        )
        names[kind] = (*names.get(kind, ()), layer.layer_name)
    return names


def _block_sizes(bytes_per_token: Sequence[int], block_size: int) -> list[int]:
    """Return block sizes for which the pages of all kinds have the same bytes."""
    page = block_size * max(bytes_per_token)
    if any(page % size for size in bytes_per_token):
        raise UnequalPages(bytes_per_token, block_size)
    sizes = [page // size for size in bytes_per_token]
    if any(max(sizes) % size for size in sizes):  # a prefix ends at a block boundary of all groups
        raise UnequalPages(bytes_per_token, block_size)
    return sizes


def _part(names: Sequence[str], index: int, number: int) -> tuple[str, ...]:
    """Return the index-th of `number` even parts. Neighboring layers stay together, since they
    share the values that attention prepares for a step."""
    return tuple(names[len(names) * index // number : len(names) * (index + 1) // number])


def bytes_per_block(groups: Sequence[LayerGroup], rank: int) -> int:
    """Return the bytes of a block on a rank: a page in each of its tensors, and those of its draft
    model."""
    return _page_bytes(groups, rank) + _draft_bytes(groups, rank)


def fitting_host_blocks(memory_bytes: int, groups: Sequence[LayerGroup], num_ranks: int) -> int:
    """Return the number of slots of a host tier with memory_bytes on each rank; 0 for models
    without pages."""
    largest = max((bytes_per_block(groups, rank) for rank in range(num_ranks)), default=0)
    return min(memory_bytes // largest, MAX_HOST_BLOCKS) if largest else 0


def _page_bytes(groups: Sequence[LayerGroup], rank: int) -> int:
    page = max(group.blocks.block_size * group.kind.bytes_per_token for group in groups)
    return page * max(len(group.layer_names[rank]) for group in groups)


def _draft_bytes(groups: Sequence[LayerGroup], rank: int) -> int:
    first = groups[0]
    return first.blocks.block_size * first.drafts[rank].bytes_per_token if first.drafts else 0


def _asked_checkpoints(ranks: Sequence[Sequence[KVCacheSpec]]) -> int | None:
    """Return the most blocks between borders that a layer asks for; 0 if one cannot have
    checkpoints, None if none asks."""
    states = [layer for rank in ranks for layer in rank if isinstance(layer, RowState)]
    asked = [each.checkpoint_blocks for each in states if each.checkpoint_blocks is not None]
    return 0 if 0 in asked else max(asked, default=None)


def choose_checkpoint_blocks(
    ranks: Sequence[Sequence[KVCacheSpec]], groups: Sequence[LayerGroup], max_model_len: int
) -> int:
    """Return the blocks of the first group from a border to the next: those that layers ask for.
    If none asks, at least MIN_BORDER_TOKENS, and so many that checkpoints take at most 1 /
    MAX_CHECKPOINT_SHARE of the memory of checkpoints and pages, on all ranks together and on each
    that has pages; without any pages, there are no checkpoints.

    A border is the end of a block in every group. 0, for no checkpoints, if no request would reach
    a border before its end.
    """
    own = [
        sum(layer.bytes_per_row for layer in rank if isinstance(layer, RowState)) for rank in ranks
    ]
    blocks = [bytes_per_block(groups, rank) for rank in range(len(ranks))]
    first, longest = groups[0].blocks.block_size, max(each.blocks.block_size for each in groups)
    every = _asked_checkpoints(ranks)
    if every is None:
        sizes = [(sum(own), sum(blocks)), *zip(own, blocks, strict=True)]
        least = [-(-state * (MAX_CHECKPOINT_SHARE - 1) // size) for state, size in sizes if size]
        every = max(blocks_for(MIN_BORDER_TOKENS, first), *least) if least else 0
    every = -(-every * first // longest) * longest // first
    if groups[0].blocks.window == 1:  # a request has lost the block at whose end it continues
        return 0
    return every if any(own) and every * first < max_model_len else 0


def fitting_blocks(
    available_bytes: int,
    block_bytes: int,
    states: RankStates = NO_STATES,
    checkpoint_blocks: int = 0,
) -> int:
    """Return the number of blocks that fit a rank's memory, the null block included; 0 if it lacks
    memory. If blocks have no memory: one per request that a group can have. available_bytes: for
    pages, and for the checkpoints of `states`, if there are some."""
    if not block_bytes:
        most = MAX_BLOCKS_WITHOUT_MEMORY if available_bytes >= 0 else 0
    else:
        most = max(0, available_bytes // block_bytes)
    if not (checkpoint_blocks and states.row_bytes):
        return most
    return bisect_right(
        range(1, most + 1),
        available_bytes + states.size_bytes,
        key=lambda count: (
            count * block_bytes + states.bytes_with(num_checkpoints(count, checkpoint_blocks))
        ),
    )


def smallest_fitting_blocks(
    groups: Sequence[LayerGroup],
    available_bytes: Sequence[int],
    states: Sequence[RankStates] = (),
    checkpoint_blocks: int = 0,
) -> int:
    """Return the block count that fits into every rank's memory: the smallest over the ranks.
    available_bytes, states: each rank's, as fitting_blocks takes them."""
    own = states or [NO_STATES] * len(available_bytes)
    return min(
        fitting_blocks(available, bytes_per_block(groups, rank), own[rank], checkpoint_blocks)
        for rank, available in enumerate(available_bytes)
    )


def usable_tokens(
    num_blocks: int, groups: Sequence[BlockGroup], max_model_len: int, max_num_batched_tokens: int
) -> int:
    """Return the number of tokens that num_blocks hold, without the null block. If windows make
    that depend on the requests' lengths, assume max_model_len tokens each."""
    usable = max(0, num_blocks - NUM_NULL_BLOCKS)
    if len(groups) == 1 and groups[0].window is None:
        return usable * groups[0].block_size
    return usable * max_model_len // request_blocks(max_model_len, groups, max_num_batched_tokens)


def longest_requests(
    num_blocks: int, groups: Sequence[BlockGroup], max_model_len: int, max_num_batched_tokens: int
) -> int:
    """Return the number of requests of max_model_len tokens that can have all their blocks at
    once."""
    usable = max(0, num_blocks - NUM_NULL_BLOCKS)
    return usable // request_blocks(max_model_len, groups, max_num_batched_tokens)


def longest_request(
    num_blocks: int, groups: Sequence[BlockGroup], most: int, max_num_batched_tokens: int
) -> int:
    """Return the length of the longest request that can have all its blocks, at most `most`."""
    return bisect_right(
        range(1, most + 1),
        num_blocks - NUM_NULL_BLOCKS,
        key=lambda length: request_blocks(length, groups, max_num_batched_tokens),
    )


def build_kv_cache_config(
    groups: Sequence[LayerGroup],
    rank: int,
    num_blocks: int,
    states: RankStates = NO_STATES,
    checkpoint_blocks: int = 0,
    num_host_blocks: int = 0,
) -> KVCacheConfig:
    """Return one rank's configuration. states: of this rank's layers."""
    return KVCacheConfig(
        num_blocks=num_blocks,
        block_size=min(group.blocks.block_size for group in groups),
        groups=tuple(
            KVCacheGroup(
                layer_names=group.layer_names[rank],
                block_size=group.blocks.block_size,
                sliding_window=group.blocks.window,
                dtype=group.kind.dtype,
                layout=group.kind.layout,
            )
            for group in groups
        ),
        size_bytes=num_blocks * _page_bytes(groups, rank),
        state_layers=states.layer_names,
        state_bytes=states.bytes_with(num_checkpoints(num_blocks, checkpoint_blocks)),
        checkpoint_blocks=checkpoint_blocks,
        draft_layers=groups[0].drafts[rank].layer_names if groups[0].drafts else (),
        draft_bytes=num_blocks * _draft_bytes(groups, rank),
        num_host_blocks=num_host_blocks,
    )
