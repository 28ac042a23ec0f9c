"""Host memory and files in one step of a rank: whatever is stored is what the step has found, and
what does not match is named, wherever it came from."""

import random
import time
from types import SimpleNamespace

import pytest
import torch

from rpc_schema.errors import InvalidStepError
from tests.support.exhaustive import seeds
from tests.support.host_moves import FROM_FILES, HASH_BYTES, TAG
from tests.support.host_moves import moves_of as host_moves
from tests.unit.runner.test_file_connector import moves_of as file_moves
from worker_daemon.device.host_rows import HostRows
from worker_daemon.runner.connectors.block_files import BlockFiles
from worker_daemon.runner.connectors.block_identity import BlockIdentity
from worker_daemon.runner.connectors.checksums import BlockParts, PageSection
from worker_daemon.runner.connectors.file_traffic import FileTraffic
from worker_daemon.runner.connectors.filed_blocks import FiledBlocks
from worker_daemon.runner.connectors.files import FileConnector
from worker_daemon.runner.connectors.host_tier import HostTier
from worker_daemon.runner.connectors.kv_connectors import KVConnectors
from worker_daemon.runner.kv_cache import BlockPages, KVMemory
from worker_daemon.runner.parts.registry import make_parts
from worker_daemon.runner.request_state import RequestState
from worker_daemon.runner.scheduled_step import StepLimits
from worker_daemon.runner.torch_blocks import TorchBlockKernels
from worker_daemon.sample.sampler import TorchSampling

CPU = torch.device("cpu")
NUM_BLOCKS, NUM_SLOTS = 10, 6


class Rank:
    """Random pages, with both places."""

    def __init__(self, directory):
        self.pages = torch.randint(0, 250, (3, NUM_BLOCKS, 24), dtype=torch.uint8)
        blocks = BlockPages(KVMemory([], [], self.pages), TorchBlockKernels())
        parts = BlockParts((PageSection(3, 0, 2, 1, 3),))
        limits = StepLimits(
            4, 16, 64, 40, 4, NUM_BLOCKS, num_host_blocks=NUM_SLOTS, has_kv_files=True
        )
        self.state = RequestState(limits, make_parts(limits, CPU, TorchSampling()))
        row_bytes = blocks.block_bytes + 4 * parts.checksum_words
        self.rows = HostRows(NUM_SLOTS, row_bytes, CPU)
        weights = SimpleNamespace(version=1)
        weights.report = SimpleNamespace(version=1, identity=FROM_FILES)
        self.tier = HostTier(blocks, self.rows, self.state, weights, parts)
        self.traffic = FileTraffic(BlockFiles(directory, 1 << 20))
        identity = BlockIdentity([weights], b"layout")
        self.filed = FiledBlocks(self.traffic, identity, blocks.block_bytes, page_locks=False)
        files = FileConnector(blocks, self.filed, self.state)
        self.connectors = KVConnectors([self.tier, files])
        self.seq = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.traffic.close()

    def step(self, *moves):
        """Run a step; return the loads that were invalid."""
        self.seq += 1
        values = self.state.parts.check_step(moves, (), self.state.limits)
        step = self.state.dummy_step(self.seq)._replace(step_values=values)
        loaded = self.connectors.begin(step)
        assert loaded is None or loaded.is_known
        return [] if loaded is None else loaded.invalid_blocks.tolist()

    def fetch(self, *keys):
        until = time.monotonic() + 10
        while not self.filed.fetch(TAG, keys).is_done:
            assert time.monotonic() < until
            time.sleep(0.001)

    def settle(self):
        """Wait for writes and removals."""
        self.traffic._writer.submit(int).result()

    def block(self, block_id):
        return self.pages[:, block_id].numpy().tobytes()

    @property
    def is_nan(self):
        """The blocks that are filled with NaN."""
        pages = self.pages.view(torch.float32)
        return {b for b in range(1, NUM_BLOCKS) if pages[:, b].isnan().all()}


def key(number):
    return bytes([number]) * HASH_BYTES


@pytest.mark.parametrize("seed", seeds(4, of=60))
def test_steps_that_move_blocks_of_both_places(tmp_path, seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    with Rank(tmp_path / "kv") as rank:
        numbers = iter(range(1, 250))
        slots, files, num_both, num_bad = {}, {}, 0, 0
        for _ in range(25):
            blocks = [b for b in range(1, NUM_BLOCKS) if b not in rank.is_nan]
            for block in rank.is_nan:  # a request computes it
                rank.pages[:, block] = torch.randint(0, 250, (3, 24), dtype=torch.uint8)
            before = {block: rank.block(block) for block in blocks}
            from_slots = rng.sample(sorted(slots), min(len(slots), rng.randint(0, 2)))
            wanted = rng.sample(sorted(files), min(len(files), rng.randint(0, 2)))
            targets = rng.sample(range(1, NUM_BLOCKS), len(from_slots) + len(wanted))
            bad = set()
            if from_slots and rng.random() < 0.2:
                rank.rows.rows[from_slots[0]][3] ^= 4
                bad.add(targets[0])
            rank.fetch(*wanted)
            if wanted and rng.random() < 0.2:
                (name,) = rank.filed.names(TAG, wanted[-1:])
                rank.traffic._fetches[name].block.row[3] ^= 4
                bad.add(targets[-1])
            loads = [(b, s, slots[s][0]) for b, s in zip(targets, from_slots, strict=False)]
            reads = list(zip(targets[len(from_slots) :], wanted, strict=True))
            content = {b: slots[s][1] for b, s, _ in loads} | {b: files[k] for b, k in reads}
            free = [s for s in range(NUM_SLOTS) if s not in from_slots]
            chosen = rng.sample(blocks, min(3, len(blocks)))
            stores = [(b, s, key(next(numbers))) for b, s in zip(chosen, free, strict=False)]
            writes = [(b, key(next(numbers))) for b in rng.sample(chosen, min(2, len(chosen)))]
            num_both += bool({b for b, *_ in stores} & {b for b, _ in reads})
            num_both += bool({b for b, _ in writes} & {b for b, *_ in loads})
            invalid = rank.step(host_moves(stores, loads), file_moves(writes, reads))
            assert {*invalid} == bad <= rank.is_nan, seed
            num_bad += len(bad)
            rank.settle()
            for block, held in content.items():
                assert block in bad or rank.block(block) == held, seed
            for slot in [s for b, s, _ in loads if b in bad]:
                del slots[slot]
            for name in [k for b, k in reads if b in bad]:
                del files[name]
            slots |= {s: (k, before[b]) for b, s, k in stores}
            files |= {k: before[b] for b, k in writes}
        assert num_both and num_bad, seed
        (tier, filed) = rank.tier.counts.status(), rank.filed.status()
        assert tier.num_invalid + filed.num_invalid == num_bad and filed.num_bad_files == 0


def test_a_block_is_loaded_from_one_place(tmp_path):
    moves = host_moves((), [(3, 1, key(1))]), file_moves((), [(2, key(2)), (3, key(3))])
    with Rank(tmp_path / "kv") as rank, pytest.raises(InvalidStepError, match="load_blocks = 3"):
        rank.step(*moves)
