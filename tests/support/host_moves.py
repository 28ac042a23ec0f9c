"""A host tier over random pages, on any device, beside a model of it in NumPy: what each block and
each slot hold after every step."""

import random
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from rpc_schema.host_tier import HostTierMoves
from worker_daemon.backend import choose_backend
from worker_daemon.contracts.source_identity import SourceIdentity
from worker_daemon.device.device_rows import DeviceRows
from worker_daemon.device.host_rows import HostRows
from worker_daemon.device.kept_memory import KeptMemory
from worker_daemon.runner.connectors.block_identity import BlockIdentity
from worker_daemon.runner.connectors.checksums import BlockParts, PageSection
from worker_daemon.runner.connectors.host_tier import HostTier, KeptSlots
from worker_daemon.runner.connectors.kv_connectors import KVConnectors
from worker_daemon.runner.connectors.tier_index import SlotLayout, TierIndex
from worker_daemon.runner.kv_cache import BlockPages, KVMemory
from worker_daemon.runner.parts.registry import make_parts
from worker_daemon.runner.request_state import RequestState
from worker_daemon.runner.scheduled_step import BlockUpdates, StepLimits
from worker_daemon.sample.sampler import TorchSampling

TAG = b"tag"
HASH_BYTES = 17
NUM_BLOCKS, NUM_SLOTS = 12, 9
FROM_FILES = SourceIdentity(b"content", b"place", b"stamps")


def moves_of(stores=(), loads=(), filled=(), **fields):
    """A step's moves from (block, slot, hash) each. num_beside: of the loads, the last ones.
    filled: stores of blocks that the step fills."""

    def columns(moved):
        blocks, slots, hashes = zip(*moved, strict=True) if moved else ((), (), ())
        packed = [np.array(own, "<i4").tobytes() for own in (blocks, slots)]
        return [*packed, b"".join(hashes)]

    names = ("blocks", "slots", "hashes")
    kinds = (("store", columns([*stores, *filled])), ("load", columns(loads)))
    fields = {"num_filled": len(filled)} | fields
    found = {f"{k}_{n}": own for k, each in kinds for n, own in zip(names, each, strict=True)}
    return HostTierMoves(**({"block_tag": TAG, "hash_bytes": HASH_BYTES} | found | fields))


class KeptTier:
    """The memory of a tier that outlives its daemon. Steps up to last_good are known to have
    succeeded."""

    def __init__(
        self, directory: Path, source: SourceIdentity = FROM_FILES, layout: bytes = b""
    ) -> None:
        self.source, self.layout = source, layout
        self.memory = KeptMemory(directory)
        self.last_good = 1 << 60

    def open(self, layout: SlotLayout, weights: SimpleNamespace) -> KeptSlots:
        report = {"version": weights.version, "identity": self.source}
        weights.report = SimpleNamespace(state="whole", **report)
        self.mapping = self.memory.open(layout.index_bytes, layout.total_bytes)
        self.mapping.wait_until_there()
        self.index = TierIndex(self.mapping, layout, BlockIdentity([weights], self.layout))
        return KeptSlots(self.index, lambda epoch, seq: seq <= self.last_good)

    def settle(self) -> None:
        """Wait until no entry can be written any more."""
        while self.index.num_waiting:
            time.sleep(0.001)

    def die(self) -> None:
        """End without a word, as by SIGKILL. What was to be written is not."""
        self.last_good = -1
        self.index.close()
        self.mapping.close()
        self.memory.close()


class ModelledTier:
    """The tier, its pages, and what they must hold."""

    def __init__(
        self,
        rng: random.Random,
        device: str,
        words_per_page: int = 6,
        leaves: "KeptTier | None" = None,
        memory: str = "host",
    ) -> None:
        """leaves: the tier takes over what is there, and leaves its own. memory: its place."""
        self.rng = rng
        self.device = torch.device(device)
        self.pages = torch.zeros((3, NUM_BLOCKS, words_per_page * 4), dtype=torch.uint8)
        self.pages = self.pages.to(self.device)
        further = torch.zeros((NUM_BLOCKS, 2, 4), dtype=torch.int16, device=self.device)
        self.further = further
        blocks = BlockPages(KVMemory([], [further], self.pages), choose_backend(self.device).blocks)
        further_section = PageSection(1, 0, 1, 1, 4)
        parts = BlockParts((PageSection(3, 0, 2, 1, words_per_page // 2), further_section))
        limits = StepLimits(4, 16, 64, 40, 4, NUM_BLOCKS, num_host_blocks=NUM_SLOTS)
        self.state = RequestState(limits, make_parts(limits, self.device, TorchSampling()))
        sums = 4 * parts.checksum_words
        layout = SlotLayout(NUM_SLOTS, blocks.block_bytes + sums, sums)
        self.weights = SimpleNamespace(version=1)
        kept = None if leaves is None else leaves.open(layout, self.weights)
        mapping = None if leaves is None else leaves.mapping
        size = NUM_SLOTS, layout.slot_bytes, self.device
        in_place = memory == "device" and device != "cpu"
        self.rows = DeviceRows(*size) if in_place else HostRows(*size, mapping)
        self.rows.pin_ahead()
        # Two KV groups, whose layers are computed in any order. The blocks are those of the first.
        layers = rng.sample(range(6), 6)
        layers = layers[:3], layers[3:]
        kept_in = kept, memory, layers
        self.layers = [layers[0].index(each) if each in layers[0] else None for each in range(6)]
        """The page that each layer writes; None: one of other blocks."""
        self.tier = HostTier(blocks, self.rows, self.state, self.weights, parts, *kept_in)
        self.parts = parts
        self.on_layer = lambda: None
        """Called after each layer of a step that tells of them."""
        self.connectors = KVConnectors([self.tier])
        self.seq = 0
        gaps = self.state.draft_gaps.of_blocks
        gaps[:] = [rng.random() < 0.5 for _ in gaps]
        self.gaps, self.slot_gaps = gaps.tolist(), [True] * NUM_SLOTS
        """Which blocks and slots may lack tokens of a draft model."""
        self.blocks = {b: self._content() for b in range(1, NUM_BLOCKS)}
        """Contents of each block: bytes of its pages and of its further page; None: NaN."""
        self.slots: dict[int, tuple[bytes, object]] = {}
        """Hash and contents of each slot; contents are None once they were changed."""
        self.beside: deque[tuple[list[int], list[int], list[int]]] = deque()
        """Loads beside steps that have not been taken: blocks, those that must be invalid, and
        slots."""
        self.num_invalid_beside = 0
        for block, content in self.blocks.items():
            self._write(block, content)

    def _content(self):
        num_bytes = self.pages.shape[0] * self.pages.shape[2]
        return self.rng.randbytes(num_bytes), self.rng.randbytes(16)

    def _write(self, block, content):
        pages = np.frombuffer(content[0], np.uint8).reshape(self.pages.shape[0], -1).copy()
        self.pages[:, block] = torch.from_numpy(pages).to(self.device)
        own = np.frombuffer(content[1], np.int16).reshape(2, 4).copy()
        self.further[block] = torch.from_numpy(own).to(self.device)

    def compute(self):
        """Write to a few blocks, as the forward pass of a step does to which they are given."""
        given = self.rng.sample(sorted(self.blocks), 3)
        self._give(given)
        for block in given:
            self.blocks[block] = self._content()
            self._write(block, self.blocks[block])

    def _give(self, blocks):
        """Give blocks to requests with a step."""
        nothing = np.zeros(len(blocks), np.int64)
        updates = BlockUpdates(nothing, nothing.astype(np.int32), np.array(blocks, np.int32))
        self.seq += 1
        step = self.state.dummy_step(self.seq)._replace(block_updates=updates)
        assert self.connectors.begin(step) is None

    def flip(self):
        """Change a bit of a slot."""
        self.tier.settle()
        slot = self.rng.choice(sorted(self.slots))
        row = self.rows.rows[slot]
        row[self.rng.randrange(len(row))] ^= 1 << self.rng.randrange(8)
        self.slots[slot] = (self.slots[slot][0], None)

    def step(self, stores, loads, num_beside=0, filled=(), *, fails=False, **fields):
        """Move blocks with a step, and return the loads that it waits for. fails: on its way
        through the layers."""
        self.seq += 1
        moves = moves_of(stores, loads, filled, num_beside=num_beside, **fields)
        values = self.state.parts.check_step((moves,), (), self.state.limits)
        step = self.state.dummy_step(self.seq)._replace(step_values=values)
        loaded = self.connectors.begin(step)
        for block, slot, _ in stores:
            self.slot_gaps[slot] = self.gaps[block]
        for block, slot, _ in loads:
            self.gaps[block] = self.slot_gaps[slot]
        storing = self.connectors.store_in_step(step)
        assert (storing is None) == (not filled)
        if storing is not None:
            self._fill(storing, [block for block, *_ in filled], fails=fails)
        if fails:
            self.state.mark_failed(self.seq)
            return loaded
        for block, slot, _ in filled:
            self.slot_gaps[slot] = self.gaps[block]
        return loaded

    def _fill(self, storing, blocks, *, fails):
        """Compute blocks, layer by layer, or in one piece as a graph does."""
        for block in blocks:
            self.blocks[block] = self._content()
        tells = storing.watches_layers and self.rng.random() < 0.7
        for layer, page in enumerate(self.layers):
            for block in blocks if page is not None else ():
                own = np.frombuffer(self.blocks[block][0], np.uint8)
                own = own.reshape(self.pages.shape[0], -1)[page].copy()
                self.pages[page, block] = torch.from_numpy(own).to(self.device)
            if tells:
                storing.layer_written(layer)
                self.on_layer()
            if fails and self.rng.random() < 0.3:
                break
        for block in blocks:
            self._write(block, self.blocks[block])
        if not fails:
            storing.end()

    def random_step(self):
        """Move random blocks, and return the loads that the step waits for, with the blocks of
        these that must be invalid."""
        self.arrive()
        rng, known = self.rng, sorted(self.slots)
        read = {slot for _, _, slots in self.beside for slot in slots}
        sources = rng.sample(known, rng.randint(0, min(3, len(known))))
        targets = rng.sample(
            [s for s in range(NUM_SLOTS) if s not in {*sources, *read}], rng.randint(0, 5)
        )
        stores = [
            (block, slot, rng.randbytes(HASH_BYTES))
            for block, slot in zip(rng.sample(sorted(self.blocks), 3), targets, strict=False)
            if self.blocks[block] is not None
        ]
        loads = []
        for block, slot in zip(rng.sample(sorted(self.blocks), 3), sources, strict=False):
            is_known = rng.random() < 0.8
            loads.append((block, slot, self.slots[slot][0] if is_known else bytes(HASH_BYTES)))
        num_beside = rng.randint(0, len(loads)) if rng.random() < 0.5 else 0
        split = len(loads) - num_beside
        coming = {block for block, *_ in loads}.union(*(blocks for blocks, *_ in self.beside))
        filled = [
            (block, slot, rng.randbytes(HASH_BYTES))
            for block, slot in zip(
                rng.sample([b for b in self.blocks if b not in coming], 3),
                targets[3:],
                strict=False,
            )
        ]
        busy = {block for block, *_ in (*stores, *filled)}
        busy = busy.union(*(blocks for blocks, *_ in self.beside))
        are_idle = busy.isdisjoint(block for block, *_ in loads) and rng.random() < 0.5
        if are_idle and self.device.type == "cuda":
            torch.cuda.synchronize()  # else steps in flight might touch the blocks
        stored = [(slot, name, self.blocks[block]) for block, slot, name in stores]
        loaded = self.step(stores, loads, num_beside, filled, are_idle=are_idle)
        stored += [(slot, name, self.blocks[block]) for block, slot, name in filled]
        for slot, name, content in stored:
            self.slots[slot] = (name, content)
        invalid = set()
        for block, slot, name in loads:
            content = self.slots[slot][1] if self.slots[slot][0] == name else None
            self.blocks[block] = content
            if content is None:
                invalid.add(block)
        before, beside = ([block for block, _, _ in own] for own in (loads[:split], loads[split:]))
        if beside:
            slots = [slot for _, slot, _ in loads[split:]]
            self.beside.append((beside, sorted(invalid & {*beside}), slots))
        return loaded, invalid & {*before}

    def arrive(self):
        """Check the loads beside steps that have ended. No other may store to their slots
        before."""
        for loaded in self.connectors.beside.take_known():
            blocks, invalid, _ = self.beside.popleft()
            assert sorted(loaded.block_ids.tolist()) == sorted(blocks)
            assert sorted(loaded.invalid_blocks.tolist()) == invalid
            self.num_invalid_beside += len(invalid)

    def check(self):
        """Compare every block."""
        assert self.state.draft_gaps.of_blocks.tolist() == self.gaps
        self._give(sorted(self.blocks))
        for block, content in self.blocks.items():
            pages, further = self.pages[:, block].cpu(), self.further[block].cpu()
            if content is None:
                assert pages.contiguous().view(torch.float32).isnan().all()
                assert not further.any()
            else:
                assert pages.numpy().tobytes() == content[0], block
                assert further.numpy().tobytes() == content[1], block
