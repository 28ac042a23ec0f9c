"""Steps with drafts whose rows, texts and deliveries are kernels, under Triton's interpreter,
beside a worker that computes them in plain torch; conftest.py runs it. Both gain the same tokens.

The kernels' steps are padded as for graphs. Layers are plain torch on either side."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace as changed
from transformers import LlamaConfig, LlamaForCausalLM

from rpc_schema.config import SpeculativeConfig
from tests.unit.worker.worker_driver import SCHEDULER, WorkerDriver, int32s
from worker_client.requests import SamplingParams
from worker_daemon.backend import choose_backend
from worker_daemon.kernels.row_ops import TritonRowKernels
from worker_daemon.kernels.text_lookup import TritonTextKernels
from worker_daemon.runner.input_batch import StepInputs
from worker_daemon.runner.output import DeliveredOutput, StepOutput
from worker_daemon.runner.scheduled_step import ScheduledStep
from worker_daemon.runner.staging import CudaStaging
from worker_daemon.runner.step_layout import StepLadder, decode_sizes, mixed_plans
from worker_daemon.worker import rank_device
from worker_daemon.worker.worker import Worker

SEED = random.randrange(1 << 20)
VOCAB = 61
ROWS = 5
GREEDY, NOISY = SamplingParams(), SamplingParams(temperature=0.9, top_k=9, seed=3)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    print(f"seed {SEED}")
    root = tmp_path_factory.mktemp("models")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(SEED)
    config = LlamaConfig(**sizes, **heads, vocab_size=VOCAB, max_position_embeddings=128)
    LlamaForCausalLM(config).save_pretrained(root / "llama")
    return root


def make_ladder(speculative: SpeculativeConfig) -> StepLadder:
    """Return the ladder of a device, of which no size is one that the test's steps have."""
    most = speculative.num_speculative_tokens
    samples, sizes = ROWS * (1 + most), decode_sizes(ROWS)
    mixed = mixed_plans(ROWS, 64, 128, max_num_samples=samples)
    return StepLadder(
        [size for size in sizes if size > 3],
        lambda size: [128],
        mixed,
        drafts=[most],
        max_num_tokens=64,
    )


Make = Callable[[SpeculativeConfig], tuple[WorkerDriver, WorkerDriver]]


@pytest.fixture
def make_both(models: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes drivers of a worker with kernels and of one without."""
    workers = []

    def drive(speculative: SpeculativeConfig) -> WorkerDriver:
        worker = Worker("cpu", [models], lambda phase, seconds, done=0.0: None)
        workers.append(worker)
        scheduler = changed(SCHEDULER, max_num_seqs=ROWS)
        driver = WorkerDriver(worker, scheduler=scheduler, speculative=speculative)
        driver.init_device()
        driver.serve("llama")
        return driver

    def make(speculative: SpeculativeConfig) -> tuple[WorkerDriver, WorkerDriver]:
        plain = drive(speculative)
        monkeypatch.setattr(
            rank_device,
            "choose_backend",
            lambda device: replace(
                choose_backend(device),
                rows=TritonRowKernels(),
                texts=TritonTextKernels(),
                open_staging=partial(CudaStaging, device),
            ),
        )
        padded = drive(speculative)
        builder = padded.worker._serving.runner.inputs
        builder.pad_by(make_ladder(speculative), ())
        builder.build = partial(noting, builder.build)
        return padded, plain

    def noting(build: Callable[[ScheduledStep], StepInputs], step: ScheduledStep) -> StepInputs:
        inputs, (samples, seqs) = build(step), (step.num_samples.sum(), step.slots.size)
        shape = inputs.plan.shape
        if step.drafts is not None:
            assert shape.num_seqs > seqs or shape.num_samples > samples, "padding is tested"
        return inputs

    yield make
    for worker in workers:
        worker.close()


class Rows:
    """Random requests that several drivers run alike."""

    def __init__(self, drivers: tuple[WorkerDriver, ...], rng: np.random.Generator) -> None:
        self._drivers, self._rng = drivers, rng
        self._refused: dict[int, int] = {}
        self.outputs: list[type] = []
        self.num_accepted = 0
        for driver in drivers:
            execute = driver.worker.execute_model
            driver.worker.execute_model = partial(self._noting, execute)

    def _noting(self, execute: Callable[..., object], *step: object) -> object:
        pending = execute(*step)
        self.outputs.append(type(pending))
        return pending

    def begin(self, slots: range, params: list[SamplingParams]) -> None:
        """Admit requests that repeat themselves."""
        new = []
        for slot, own in zip(slots, params, strict=True):
            head = self._rng.integers(0, VOCAB, int(self._rng.integers(1, 7))).tolist()
            new.append((slot, head * 3, own))
        self.run({slot: len(tokens) for slot, tokens, _ in new}, new=new)

    def run(self, scheduled: dict[int, int], **options: object) -> None:
        pairs = []
        for slot, missing in sorted(self._refused.items()):
            pairs += [slot, missing]
            for driver in self._drivers:
                driver.computed[slot] -= missing
        found = []
        for driver in self._drivers:
            found.append(driver.execute(dict(scheduled), corrections=int32s(pairs), **options))
        assert all(each == found[0] for each in found)
        drafts = options.get("drafts", {})
        assert isinstance(drafts, dict)
        self._refused = {}
        for slot, newest in found[0].items():
            missing = len(drafts.get(slot, ())) - len(newest.earlier)
            self.num_accepted += len(newest.earlier)
            if missing:
                self._refused[slot] = missing

    def drafted(self, counts: dict[int, int], **options: object) -> None:
        drafts = {slot: [-1] * count for slot, count in counts.items() if count}
        self.run({slot: 1 + count for slot, count in counts.items()}, drafts=drafts, **options)


@pytest.mark.parametrize(("method", "most"), [("ngram", 1), ("ngram", 4), ("suffix", 4)])
def test_kernels_give_the_same_tokens(make_both: Make, method: str, most: int) -> None:
    """In steps of greedy rows, which their program verifies and delivers, and in others."""
    rng = np.random.default_rng([SEED, most])
    drivers = make_both(
        SpeculativeConfig(method=method, num_speculative_tokens=most, max_kept_tokens=1024)
    )
    rows = Rows(drivers, rng)
    rows.begin(range(3), [GREEDY] * 3)
    for _ in range(6):
        rows.outputs.clear()
        rows.drafted(dict.fromkeys(range(3), most))
        assert rows.outputs == [DeliveredOutput, StepOutput]
    rows.drafted({0: int(rng.integers(1, most + 1)), 1: most, 2: 0})
    rows.outputs.clear()
    rows.drafted(dict.fromkeys(range(3), most), skip_drafts=True)
    assert rows.outputs == [StepOutput] * 2
    rows.run(dict.fromkeys(range(3), 1))
    rows.drafted(dict.fromkeys(range(3), most))
    rows.begin(range(3, 5), [NOISY, GREEDY])
    rows.outputs.clear()
    rows.drafted(dict.fromkeys(range(5), most))
    assert rows.outputs == [StepOutput] * 2
    for _ in range(12):  # greedy tokens repeat themselves sooner or later
        rows.drafted(dict.fromkeys((0, 2, 4), most))
        if rows.num_accepted:
            break
    assert rows.num_accepted
    counts = [driver.worker.describe().draft_counts for driver in drivers]
    assert counts[0].num_drafted == counts[1].num_drafted > 0
    assert counts[0].accepted_by_place == counts[1].accepted_by_place
