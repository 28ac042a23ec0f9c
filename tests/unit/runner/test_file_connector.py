"""The file connector of a rank: blocks come back as they were, into any block and after a restart;
what does not match is NaN, is counted, and is written again."""

import random
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rpc_schema.errors import InvalidStepError
from rpc_schema.kv_files import FileMoves
from tests.support.exhaustive import seeds
from worker_daemon.contracts.source_identity import SourceIdentity
from worker_daemon.runner.connectors import staging
from worker_daemon.runner.connectors.block_files import BlockFiles
from worker_daemon.runner.connectors.block_identity import BlockIdentity
from worker_daemon.runner.connectors.file_traffic import FileTraffic
from worker_daemon.runner.connectors.filed_blocks import FiledBlocks
from worker_daemon.runner.connectors.files import FileConnector
from worker_daemon.runner.connectors.kv_connectors import KVConnectors
from worker_daemon.runner.kv_cache import BlockPages, KVMemory
from worker_daemon.runner.parts.registry import make_parts
from worker_daemon.runner.request_state import RequestState
from worker_daemon.runner.scheduled_step import StepLimits
from worker_daemon.runner.torch_blocks import TorchBlockKernels
from worker_daemon.sample.sampler import TorchSampling

CPU = torch.device("cpu")
NUM_BLOCKS = 12
TAG = b"tag"
FROM_FILES = SourceIdentity(content=b"c" * 32, place=b"p", stamps=b"s" * 32)


def moves_of(stores=(), loads=(), **fields):
    """A step's moves from (block, hash) each."""
    names = {}
    for kind, moved in (("store", stores), ("load", loads)):
        blocks, hashes = zip(*moved, strict=True) if moved else ((), ())
        names[f"{kind}_blocks"] = np.array(blocks, "<i4").tobytes()
        names[f"{kind}_hashes"] = b"".join(hashes)
    return FileMoves(**({"block_tag": TAG, "hash_bytes": 17} | names | fields))


def weights_of(identity=FROM_FILES, version=0):
    return SimpleNamespace(report=SimpleNamespace(identity=identity, version=version))


class Rank:
    """A daemon's connector over random pages."""

    def __init__(self, directory, weights=None, layout=b"layout"):
        self.pages = torch.randint(0, 250, (3, NUM_BLOCKS, 24), dtype=torch.uint8)
        blocks = BlockPages(KVMemory([], [], self.pages), TorchBlockKernels())
        limits = StepLimits(4, 16, 64, 40, 4, NUM_BLOCKS, has_kv_files=True)
        self.state = RequestState(limits, make_parts(limits, CPU, TorchSampling()))
        self.traffic = FileTraffic(BlockFiles(directory, 1 << 20))
        states = [weights or weights_of()]
        self.filed = FiledBlocks(self.traffic, BlockIdentity(states, layout), 72, page_locks=False)
        self.connectors = KVConnectors([FileConnector(blocks, self.filed, self.state)])
        self.seq = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.traffic.close()

    def step(self, stores=(), loads=()):
        """Move blocks with a step, and return the blocks that were invalid."""
        self.seq += 1
        values = self.state.parts.check_step((moves_of(stores, loads),), (), self.state.limits)
        step = self.state.dummy_step(self.seq)._replace(step_values=values)
        loaded = self.connectors.begin(step)
        return [] if loaded is None else loaded.invalid_blocks.tolist()

    def settle(self):
        """Wait for writes and removals."""
        self.traffic._writer.submit(int).result()

    def fetch(self, hashes):
        until = time.monotonic() + 10
        while not (progress := self.filed.fetch(TAG, hashes)).is_done:
            assert time.monotonic() < until
            time.sleep(0.001)
        return progress.num_ready

    def block(self, block_id):
        return self.pages[:, block_id].numpy().tobytes()


def name(number):
    return bytes([number]) * 17


@pytest.mark.parametrize("seed", seeds(3, of=30))
def test_blocks_are_what_was_stored_or_nan(tmp_path, seed, monkeypatch):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    monkeypatch.setattr(staging, "STAGING_BYTES", rng.choice([1, 144, 1 << 20]))
    contents, num_bad = {}, 0
    for _ in range(4):  # daemons, one after the other
        with Rank(tmp_path / "kv") as rank:
            for _ in range(12):
                blocks = rng.sample(range(1, NUM_BLOCKS), 8)
                keys = rng.sample(range(20), 4)
                stores = [(b, name(k)) for b, k in zip(blocks, keys, strict=False)]
                for block, key in stores:
                    contents.setdefault(key, rank.block(block))
                rank.step(stores)
                rank.settle()
                wanted = rng.sample(sorted(contents), min(4, len(contents)))
                assert rank.fetch(wanted) == len(wanted)
                flipped = set()
                for key in wanted:
                    if rng.random() < 0.15:  # a bit of the host's memory
                        (file,) = rank.filed.names(TAG, [key])
                        row = rank.traffic._fetches[file].block.row
                        row[rng.randrange(len(row))] ^= 1 << rng.randrange(31)
                        flipped.add(key)
                loads = [(b, key) for b, key in zip(blocks[4:], wanted, strict=False)]
                invalid = rank.step((), loads)
                assert invalid == [b for b, key in loads if key in flipped], seed
                for block, key in loads:
                    if key in flipped:
                        pages = rank.pages[:, block].contiguous().view(torch.float32)
                        assert pages.isnan().all()
                        del contents[key]  # its file is removed
                    else:
                        assert rank.block(block) == contents[key], seed
                num_bad += len(invalid)
                rank.settle()
            assert rank.filed.num_invalid <= num_bad
    assert num_bad > 0, seed


def test_what_was_not_fetched_is_invalid_and_stays_in_its_file(tmp_path):
    with Rank(tmp_path / "kv") as rank:
        rank.step([(1, name(1))])
        rank.settle()
        assert rank.step((), [(2, name(1)), (3, name(2))]) == [2, 3]
        rank.settle()
        assert rank.fetch([name(1)]) == 1
        assert rank.step((), [(4, name(1))]) == []
        status = rank.filed.status()
        assert (status.num_loaded, status.num_invalid) == (3, 2)


@pytest.mark.parametrize(
    ("weights", "layout"),
    [
        (weights_of(SourceIdentity(b"d" * 32, b"p", b"s" * 32)), b"layout"),
        (weights_of(SourceIdentity(b"c" * 32, b"p", b"t" * 32)), b"layout"),
        (weights_of(version=1), b"layout"),
        (weights_of(), b"another"),
    ],
    ids=["contents", "stamps", "version", "layout"],
)
def test_blocks_of_others_never_match(tmp_path, weights, layout):
    with Rank(tmp_path / "kv") as rank:
        rank.step([(1, name(1))])
        rank.settle()
    with Rank(tmp_path / "kv", weights, layout) as other:
        assert other.fetch([name(1)]) == 0
    with Rank(tmp_path / "kv") as again:
        assert again.fetch([name(1)]) == 1


def test_weights_that_were_sent_match_only_while_their_daemon_lives(tmp_path):
    """Their identity is that of the updates, which a later daemon may give to other weights."""
    sent = weights_of(SourceIdentity(content=b"u" * 32), version=3)
    with Rank(tmp_path / "kv", sent) as rank:
        rank.step([(1, name(1))])
        rank.settle()
        assert rank.fetch([name(1)]) == 1
    with Rank(tmp_path / "kv", sent) as later:
        assert later.fetch([name(1)]) == 0


@pytest.mark.parametrize(
    ("moves", "message"),
    [
        (moves_of([(0, name(1))]), "store_blocks = 0"),
        (moves_of((), [(NUM_BLOCKS, name(1))]), f"load_blocks = {NUM_BLOCKS}"),
        (moves_of([(1, name(1)), (1, name(2))]), "store_blocks = 1"),
        (moves_of((), [(3, name(1)), (3, name(2))]), "load_blocks = 3"),
        (moves_of((), [(3, name(1)), (4, name(1))]), "load_hashes = '0101"),
        (moves_of([(1, b"short")]), "store_hashes = '5 bytes'"),
        (moves_of(load_blocks=b"abc"), "load_blocks = '3 bytes'"),
    ],
)
def test_moves_that_cannot_be(tmp_path, moves, message):
    with Rank(tmp_path / "kv") as rank, pytest.raises(InvalidStepError, match=message):
        rank.state.parts.check_step((moves,), (), rank.state.limits)
