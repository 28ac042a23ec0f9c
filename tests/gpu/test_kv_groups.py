"""Several KV groups on a GPU, each with its window and its part of the block table, in CUDA
graphs: tokens are those of transformers, and graphs give those of the same kernels launched one by
one."""

import json
import random
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from benchmarks.stage_driver import BLOCK_SIZE, StageDriver, bitmap
from rpc_schema.kv_cache import BlockGroup, blocks_for, groups_of, most_blocks
from rpc_schema.step import ExecuteModel, NewRequestData
from tests.support import window_models
from tests.support.forked_drivers import ForkedDrivers
from tests.support.gpu_generation import SHARED_CACHE
from tests.support.refusing_feature import copy_with_the_feature
from tests.support.refusing_feature.checks import Load, check_serving
from tests.support.serving import connect
from tests.support.toy_feature.checks import start_daemons
from worker_client.requests import SamplingParams
from worker_daemon.runner.cuda_graph import GraphedProgram
from worker_daemon.runner.output import PendingOutput

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda:0"
MODELS = pytest.mark.parametrize("name", window_models.MODELS)
REAL = Path(__file__).parents[2] / "benchmarks" / "models" / "qwen3-0.6b" / "config.json"
WINDOW = 97
"""Of the model of real sizes: more than a tile of keys; six blocks and a token."""
CHUNK = 64
"""Tokens of a prompt in a step."""


@pytest.fixture
def seed():
    chosen = random.randrange(1 << 20)
    print(f"seed {chosen}")
    return chosen


def test_windows_keep_what_a_refused_token_sees(tmp_path, model_root, seed):
    """Nearly no block is free: a block freed by a window is reused immediately.
    Comes before `endpoints`, since a second daemon would not get the GPU."""
    reference = window_models.make_model(model_root, "mixed", seed, window=5)
    load = Load(
        num_requests=12,
        prompt_lens=(3, 20),
        max_tokens=(26, 38),
        max_model_len=64,
        max_num_batched_tokens=16,
        num_blocks=56,
        dies_after=25,
    )
    tree = copy_with_the_feature(tmp_path)
    with start_daemons(tree, [DEVICE], model_root) as daemons, ForkedDrivers(tree) as drivers:
        whole = check_serving(drivers, daemons.endpoints, reference, load)
    assert whole.num_groups > 1


@MODELS
def test_blocks_behind_windows_serve_others(endpoints, model_root, name, seed):
    reference = window_models.make_model(model_root, name, seed)
    providers = window_models.check_few_blocks(endpoints[0], reference, name, seed)
    assert int(providers["graphs"]) > 0


@MODELS
def test_prefix_hits(endpoints, model_root, name, seed):
    reference = window_models.make_model(model_root, name, seed)
    with connect(endpoints, window_models.config_of(reference)) as served:
        window_models.check_prefix_hits(served, reference, seed)


@MODELS
def test_another_driver_goes_on(endpoints, model_root, name, seed):
    reference = window_models.make_model(model_root, name, seed)
    with connect(endpoints, window_models.config_of(reference)) as served:
        window_models.check_adoption(served, reference, seed)


class Result(NamedTuple):
    """What a step gave."""

    slots: bytes
    token_ids: bytes
    arrays: list[bytes]


@dataclass
class Row:
    """A request that is served by hand."""

    slot: int
    prompt: np.ndarray
    computed: int = 0
    num_blocks: list[int] = field(default_factory=list)
    """Places of each group that have a block."""


class GroupServing:
    """Greedy requests on one worker in this process. With rings, a request reuses a block that its
    window has passed: its row names the block at both positions."""

    def __init__(self, driver: StageDriver, groups: tuple[BlockGroup, ...], *, rings: bool) -> None:
        self._driver = driver
        self._groups = groups
        self._rings = rings
        self._rows: list[Row] = []
        self._first_block = 1
        self._blocks: dict[tuple[int, int], list[int]] = {}
        self._in_flight: deque[PendingOutput] = deque()
        self._results: list[Result] = []
        driver.worker.on_attach()

    def admit(self, prompts: list[np.ndarray], max_len: int, sampling: SamplingParams) -> None:
        """Begin requests in a step, beside decodes of those that run."""
        new = [Row(len(self._rows) + i, prompt) for i, prompt in enumerate(prompts)]
        for row in new:
            row.num_blocks = [0] * len(self._groups)
            for index, group in enumerate(self._groups):
                count = blocks_for(max_len, group.block_size)
                if self._rings:
                    count = most_blocks(max_len, group, CHUNK)
                own = range(self._first_block, self._first_block + count)
                self._blocks[row.slot, index] = list(own)
                self._first_block += count
        assert self._first_block <= self._driver.num_blocks
        self._rows += new
        self.step(new, sampling)

    def step(self, new: list[Row] = (), sampling: SamplingParams | None = None) -> None:
        """Schedule every request: a chunk of its prompt, or its next token."""
        counts, given = [], []
        for row in self._rows:
            count = min(CHUNK, max(1, len(row.prompt) - row.computed))
            row.computed += count
            counts.append([row.slot, count])
            given += [self._extend(row, index) for index in range(len(self._groups))]
        blocks = [block for own in given for block in own]
        message = ExecuteModel(
            **self._driver.ids(),
            total_num_scheduled_tokens=sum(count for _, count in counts),
            scheduled=bitmap(np.arange(len(self._rows))),
            num_scheduled_tokens=np.array([c for c in counts if c[1] != 1], "<i4").tobytes(),
            new_block_slots=np.array([slot for slot, _, _ in blocks], "<u2").tobytes(),
            new_block_groups=np.array([group for _, group, _ in blocks], "u1").tobytes(),
            new_block_ids=np.array([block_id for _, _, block_id in blocks], "<i4").tobytes(),
            scheduled_new_reqs=tuple(
                NewRequestData(
                    slot=row.slot,
                    req_id=f"request-{row.slot}",
                    num_tokens=len(row.prompt),
                    num_prompt_tokens=len(row.prompt),
                    num_computed_tokens=0,
                    extensions=sampling.extensions(),
                )
                for row in new
            ),
        )
        arrays = [np.concatenate([r.prompt for r in new]).astype("<i4").tobytes()] if new else []
        self._in_flight.append(self._driver.worker.execute_model(message, arrays))
        if len(self._in_flight) == 2:
            self._take_oldest()

    def _extend(self, row: Row, index: int) -> list[tuple[int, int, int]]:
        own, had = self._blocks[row.slot, index], row.num_blocks[index]
        row.num_blocks[index] = blocks_for(row.computed, self._groups[index].block_size)
        places = range(had, row.num_blocks[index])
        return [(row.slot, index, own[place % len(own)]) for place in places]

    def finish(self) -> list[Result]:
        """Return what each step gave."""
        while self._in_flight:
            self._take_oldest()
        return self._results

    def _take_oldest(self) -> None:
        reply, frames = self._in_flight.popleft().result()
        arrays = [bytes(frame) for frame in frames]
        self._results.append(Result(reply.slots, reply.sampled_token_ids, arrays))


def real_config() -> dict[str, object]:
    """Eight layers of the real size, of which two see everything."""
    return json.loads(REAL.read_text()) | {
        "num_hidden_layers": len(window_models.MIXED),
        "layer_types": list(window_models.MIXED),
        "max_window_layers": 0,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
    }


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "windowed"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(real_config()))
    # Much longer than a step: only then windows take less memory than full attention would.
    driver = StageDriver(
        directory, DEVICE, max_model_len=16_384, num_blocks=8192, cache=SHARED_CACHE
    )
    driver.start()
    yield driver
    driver.leave()


@pytest.fixture
def groups(driver) -> tuple[BlockGroup, ...]:
    groups = groups_of(driver.worker._serving.plan)
    assert len(groups) > 2
    assert {group.window for group in groups} == {None, WINDOW}
    assert all(group.block_size == BLOCK_SIZE for group in groups)
    return groups


def serve(driver, groups, count, sampling, *, rings, num_steps=150) -> list[Result]:
    """Half of the requests begin while the others decode, and all cross blocks together."""
    rng = np.random.default_rng(count)
    prompts = list(rng.integers(3, 1000, (count, 150)))
    serving = GroupServing(driver, groups, rings=rings)
    serving.admit(prompts[: -(-count // 2)], 400, sampling)
    for _ in range(9):
        serving.step()
    if count > 1:
        serving.admit(prompts[-(-count // 2) :], 400, sampling)
    for _ in range(num_steps):
        serving.step()
    return serving.finish()


GREEDY, TELLING = SamplingParams(), SamplingParams(logprobs=3)


@pytest.mark.parametrize("sampling", [GREEDY, TELLING], ids=["greedy", "logprobs"])
@pytest.mark.parametrize("count", [1, 4, 5, 33])
def test_graphs_give_the_bits_of_the_same_kernels_launched_one_by_one(
    driver, groups, monkeypatch, count, sampling
):
    graphed, replay = [], torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(
        torch.cuda.CUDAGraph, "replay", lambda self: (graphed.append(1), replay(self))
    )
    replayed = serve(driver, groups, count, sampling, rings=True)
    assert len(graphed) >= 150
    program = driver.worker._serving.runner._program
    assert isinstance(program, GraphedProgram)
    monkeypatch.setattr(program, "_graphs", {})  # plans stay padded, nothing is replayed
    graphed.clear()
    assert serve(driver, groups, count, sampling, rings=True) == replayed
    assert not graphed


@pytest.mark.parametrize("count", [1, 5, 33])
def test_blocks_that_are_written_again_change_nothing(driver, groups, count):
    """Compared with requests that share no blocks."""
    in_rings = serve(driver, groups, count, TELLING, rings=True)
    assert in_rings == serve(driver, groups, count, TELLING, rings=False)


def test_steps_neither_compile_nor_capture(driver, groups, monkeypatch):
    import triton

    compiled, captured = [], []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **kwargs: compiled.append(kwargs)
    )
    monkeypatch.setattr(GraphedProgram, "_record", lambda *args: captured.append(args))
    serve(driver, groups, 7, GREEDY, rings=True)
    assert not compiled
    assert not captured
