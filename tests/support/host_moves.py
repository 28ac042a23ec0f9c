"""A host tier over random pages, on any device, beside a model of it in NumPy: what each block and
each slot hold after every step."""

import random
from types import SimpleNamespace

import numpy as np
import torch

from rpc_schema.host_tier import HostTierMoves
from worker_daemon.device.host_rows import HostRows
from worker_daemon.runner.connectors.checksums import BlockParts
from worker_daemon.runner.connectors.host_tier import HostTier
from worker_daemon.runner.kv_cache import BlockPages, KVMemory
from worker_daemon.runner.parts.registry import make_parts
from worker_daemon.runner.request_state import RequestState
from worker_daemon.runner.scheduled_step import StepLimits
from worker_daemon.sample.sampler import TorchSampling

TAG = b"tag"
HASH_BYTES = 17
NUM_BLOCKS, NUM_SLOTS = 12, 9


def moves_of(stores=(), loads=(), **fields):
    """A step's moves from (block, slot, hash) each."""

    def columns(moved):
        blocks, slots, hashes = zip(*moved, strict=True) if moved else ((), (), ())
        packed = [np.array(own, "<i4").tobytes() for own in (blocks, slots)]
        return [*packed, b"".join(hashes)]

    names = ("blocks", "slots", "hashes")
    kinds = (("store", columns(stores)), ("load", columns(loads)))
    found = {f"{k}_{n}": own for k, each in kinds for n, own in zip(names, each, strict=True)}
    return HostTierMoves(**({"block_tag": TAG, "hash_bytes": HASH_BYTES} | found | fields))


class ModelledTier:
    """The tier, its pages, and what they must hold."""

    def __init__(self, rng: random.Random, device: str, words_per_page: int = 6) -> None:
        self.rng = rng
        self.device = torch.device(device)
        self.pages = torch.zeros((3, NUM_BLOCKS, words_per_page * 4), dtype=torch.uint8)
        self.pages = self.pages.to(self.device)
        further = torch.zeros((NUM_BLOCKS, 2, 4), dtype=torch.int16, device=self.device)
        self.further = further
        blocks = BlockPages(KVMemory([], [further], self.pages))
        names = tuple(f"layer {i}" for i in range(3))
        parts = BlockParts(names, 0, 2, 1, words_per_page // 2, (4,))
        limits = StepLimits(4, 16, 64, 40, 4, NUM_BLOCKS, num_host_blocks=NUM_SLOTS)
        self.state = RequestState(limits, make_parts(limits, self.device, TorchSampling()))
        sums = 4 * parts.checksum_words
        self.rows = HostRows(NUM_SLOTS, blocks.block_bytes + sums, self.device)
        self.rows.pin_ahead()
        self.weights = SimpleNamespace(version=1)
        self.tier = HostTier(blocks, self.rows, self.state, self.weights, parts)
        self.seq = 0
        self.blocks = {b: self._content() for b in range(1, NUM_BLOCKS)}
        """Contents of each block: bytes of its pages and of its further page; None: NaN."""
        self.slots: dict[int, tuple[bytes, object]] = {}
        """Hash and contents of each slot; contents are None once they were changed."""
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
        """Write to a few blocks, as a forward pass does."""
        for block in self.rng.sample(sorted(self.blocks), 3):
            self.blocks[block] = self._content()
            self._write(block, self.blocks[block])

    def flip(self):
        """Change a bit of a slot."""
        self.tier.settle()
        slot = self.rng.choice(sorted(self.slots))
        row = self.rows.rows[slot]
        row[self.rng.randrange(len(row))] ^= 1 << self.rng.randrange(8)
        self.slots[slot] = (self.slots[slot][0], None)

    def step(self, stores, loads):
        """Move blocks with a step, and return the blocks that were invalid."""
        self.seq += 1
        values = self.state.parts.check_step((moves_of(stores, loads),), (), self.state.limits)
        step = self.state.dummy_step(self.seq)._replace(step_values=values)
        return self.tier.begin(step)

    def random_step(self):
        """Move random blocks, and return the loads with the blocks that must be invalid."""
        rng, known = self.rng, sorted(self.slots)
        sources = rng.sample(known, rng.randint(0, min(3, len(known))))
        targets = rng.sample([s for s in range(NUM_SLOTS) if s not in sources], rng.randint(0, 3))
        stores = [
            (block, slot, rng.randbytes(HASH_BYTES))
            for block, slot in zip(rng.sample(sorted(self.blocks), 3), targets, strict=False)
            if self.blocks[block] is not None
        ]
        loads = []
        for block, slot in zip(rng.sample(sorted(self.blocks), 3), sources, strict=False):
            is_known = rng.random() < 0.8
            loads.append((block, slot, self.slots[slot][0] if is_known else bytes(HASH_BYTES)))
        loaded = self.step(stores, loads)
        for block, slot, name in stores:
            self.slots[slot] = (name, self.blocks[block])
        invalid = set()
        for block, slot, name in loads:
            content = self.slots[slot][1] if self.slots[slot][0] == name else None
            self.blocks[block] = content
            if content is None:
                invalid.add(block)
        return loaded, invalid

    def check(self):
        """Compare every block."""
        for block, content in self.blocks.items():
            pages, further = self.pages[:, block].cpu(), self.further[block].cpu()
            if content is None:
                assert pages.contiguous().view(torch.float32).isnan().all()
                assert not further.any()
            else:
                assert pages.numpy().tobytes() == content[0], block
                assert further.numpy().tobytes() == content[1], block
