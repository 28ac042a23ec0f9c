"""Copies the parts of blocks between slots and messages to other groups. A checksum in a slot names
the rank's own hash and page (host_tier.py); one in a message the contents and the layer, which both
groups call alike.

Shapes: m contents, G KV groups of one window, L pages of a route.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rpc_schema.kv_transfer import KVDraftPages, KVShard
from worker_daemon.contracts.arrays import Int32s, Int64s
from worker_daemon.runner.block_contents import Hashes
from worker_daemon.runner.connectors.checksums import (
    CHECKSUM_WORDS,
    BlockParts,
    PageSection,
    named_keys,
    numbers_of,
)
from worker_daemon.runner.connectors.peer_moves import MovedContents
from worker_daemon.runner.connectors.peer_routes import PartSpan, kv_groups_of


class SlotPages:
    """The slots of a rank, by parts. Any thread may use it, for slots that no other writes to."""

    def __init__(self, rows: Tensor, parts: BlockParts, num_pages: Sequence[Sequence[int]]) -> None:
        """rows: uint8 [slots, bytes of a slot]. num_pages: by KV group, the pages that its blocks
        have in each section."""
        words, start = rows.view(torch.int32), parts.num_words
        self._device = rows.device
        self._parts = parts
        self._data = parts.by_head(words)
        """[slots, pages, rows, heads, words] each"""
        self._all_sums = words[:, start : start + parts.checksum_words]
        """[slots, words of all checksums]"""
        self._sums = parts.by_part(self._all_sums)
        """[slots, pages, heads, words of a checksum] each"""
        self._page_numbers = parts.page_numbers()
        self._num_pages = num_pages

    def num_words(self, span: PartSpan) -> int:
        """Return the words of contents in a message."""
        section = self._parts.sections[span.section]
        return len(span.pages) * span.num_heads * (section.rows * section.words + CHECKSUM_WORDS)

    def pack(self, span: PartSpan, layers: Sequence[str], contents: MovedContents) -> Tensor:
        """Copy parts of contents, and their checksums, to int32 [m, words]. layers: of the span's
        pages."""
        slots, pages, heads = self._index(span, contents)
        data = self._data[span.section][slots, pages, :, heads]
        sums = self._sums[span.section][slots, pages, heads].contiguous().view(torch.int64)
        sums += self._change(span, layers, contents)
        return torch.cat([data.flatten(1), sums.view(torch.int32).flatten(1)], dim=1)

    def unpack(
        self, span: PartSpan, layers: Sequence[str], contents: MovedContents, words: Tensor
    ) -> None:
        """Copy what pack() has made to these slots. words: int32 [m, words]."""
        slots, pages, heads = self._index(span, contents)
        data, sums = self._data[span.section], self._sums[span.section]
        shape = (len(contents.names), len(span.pages))
        num = words.shape[1] - CHECKSUM_WORDS * len(span.pages) * span.num_heads
        own = words[:, num:].clone().view(torch.int64).view(*shape, span.num_heads, 1)
        own = own - self._change(span, layers, contents)
        section = self._parts.sections[span.section]
        part_shape = (section.rows, span.num_heads, section.words)
        data[slots, pages, :, heads] = words[:, :num].view(*shape, *part_shape)
        sums[slots, pages, heads] = own.view(torch.int32)

    def clear_unused(self, contents: MovedContents) -> None:
        """Fill the pages that blocks of their KV groups do not use with zeros, and checksums of
        these."""
        for column, group in enumerate(contents.kv_groups):
            unused = [
                (section, num_used)
                for section, num_used in enumerate(self._num_pages[group])
                if num_used < self._data[section].shape[1]
            ]
            if not unused:
                continue
            slots = self._numbers(contents.slots[:, column])
            hashes = numbers_of(contents.hashes[:, column])
            for section, num_used in unused:
                data, sums = self._data[section], self._sums[section]
                data[slots, num_used:] = 0
                numbers = hashes[:, None] + self._page_numbers[section][num_used:]
                own = self._numbers(numbers)[:, :, None, None].view(torch.int32)
                sums[slots, num_used:] = own.expand(-1, -1, sums.shape[2], -1)

    def _change(self, span: PartSpan, layers: Sequence[str], contents: MovedContents) -> Tensor:
        """Return what a checksum in a message has more than one in a slot, int64 [m, L, 1, 1]."""
        columns = _columns(span, contents)
        count, num_groups, width = contents.hashes.shape
        hashes = numbers_of(contents.hashes.reshape(-1, width)).reshape(count, num_groups)
        pages = self._page_numbers[span.section][[place.page for place in span.pages]]
        own: Int64s = hashes[:, columns] + pages
        named = np.concatenate([named_keys(f"layer {layer}", 1) for layer in layers])
        change: Int64s = numbers_of(contents.names)[:, None] + named - own
        return self._numbers(change)[:, :, None, None]

    def rename(self, slots: Int32s, former: Hashes, hashes: Hashes) -> None:
        """Let the checksums in slots [n] name blocks of hashes, [n, bytes of a hash], which were
        those of `former`."""
        change = numbers_of(hashes) - numbers_of(former)
        if change.any():
            places = self._numbers(slots)
            own = self._all_sums[places].view(torch.int64) + self._numbers(change)[:, None]
            self._all_sums[places] = own.view(torch.int32)

    def _index(self, span: PartSpan, contents: MovedContents) -> tuple[Tensor, Tensor, slice]:
        """Return the slots [m, L] and the pages [L] of parts, and their heads."""
        slots = self._numbers(contents.slots[:, _columns(span, contents)])
        pages = self._numbers(np.array([place.page for place in span.pages]))
        return slots, pages, slice(span.first_head, span.first_head + span.num_heads)

    def _numbers(self, values: npt.NDArray[Any]) -> Tensor:
        """Return them where the slots are, int64."""
        return torch.from_numpy(values.astype(np.int64)).to(self._device)


def pages_of(shard: KVShard, parts: BlockParts, rows: Tensor) -> SlotPages:
    """Return a rank's slots by parts. rows: uint8 [slots, bytes of a slot]."""
    further = [] if shard.drafts is None else [len(shard.drafts.layer_names)]
    num_pages = [
        [group.num_layers, *(further if number == 0 else [0] * len(further))]
        for number, group in enumerate(kv_groups_of(shard))
    ]
    return SlotPages(rows, parts, num_pages)


def parts_of(shard: KVShard) -> BlockParts:
    """Return the parts of a rank's blocks."""
    most = max(group.num_layers for group in kv_groups_of(shard))
    kinds: list[tuple[int, KVShard | KVDraftPages]] = [(most, shard)]
    if shard.drafts is not None:
        kinds.append((len(shard.drafts.layer_names), shard.drafts))
    return BlockParts(
        tuple(
            PageSection(count, each.first_head, each.num_heads, each.rows, each.words)
            for count, each in kinds
        )
    )


def _columns(span: PartSpan, contents: MovedContents) -> list[int]:
    """Return the place of each page's KV group among those of the contents."""
    return [contents.kv_groups.index(place.kv_group) for place in span.pages]
