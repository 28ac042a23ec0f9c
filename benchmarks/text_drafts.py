"""Measures drafts on texts that have something to find: `python -m benchmarks.text_drafts
[--device cuda] [--pp N] [--config DIR] [--workloads A,B] [--rounds N] [--out FILE.json]`.

Trains a target and two draft models on the spot, on texts in which each token has one likely
successor (else another token of its passage follows, with SHARE_OF_JUMPS), and serves them with
each method. Requests are greedy, but those that are to draft nothing. PASSAGES says what the texts
are. Prints tokens per second beside those without drafts.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch.nn.functional import cross_entropy

from benchmarks.local_group import devices_of, local_group
from rpc_schema.config import (
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    WorkerConfig,
)
from worker_client.driver import Driver
from worker_client.group.loading import LoadedGroup
from worker_client.requests import GenerationRequest, SamplingParams
from worker_client.scheduler import Scheduler, scheduler_limits
from worker_client.scheduler.drafting.payoffs import DraftingChange
from worker_client.scheduler_output import StepResult
from worker_client.worker_group import WorkerGroup
from worker_daemon.contracts.arrays import Int64s

SHARE_OF_JUMPS = 0.05
MAX_MODEL_LEN = 2048
NUM_DRAFTS = 4
TRAINED_LAYERS = 2
Fields = dict[str, Any]
"""Those of a config.json."""
PASSAGES = {"refrain": 200, "report": 2000, "known": 400, "unknown": 2000}
"""Tokens of each passage. The first and second go round. A prompt has the refrain twice and its
output goes on with it; outputs of the report repeat those of other requests. The third leads into
the fourth, which one draft model has never seen, and which goes round."""


class Text:
    """The texts: a successor for each token, and the passage that it belongs to."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        ends = np.cumsum([1, *PASSAGES.values()])
        self.first = dict(zip(PASSAGES, ends[:-1].tolist(), strict=True))
        self.num_tokens = int(ends[-1])
        self._next = np.arange(self.num_tokens) + 1
        for name in ("refrain", "report", "unknown"):
            self._next[self.first[name] + PASSAGES[name] - 1] = self.first[name]
        self._next[self.first["known"] + PASSAGES["known"] - 1] = self.first["unknown"]

    def make(self, begins: Int64s, length: int, jumps: float) -> Int64s:
        """Return int64 [begins, length], each row beginning with its token."""
        rows = [begins]
        for _ in range(length - 1):
            follows = self._next[rows[-1]]
            others = np.empty_like(follows)
            for name, size in PASSAGES.items():
                inside = (follows >= self.first[name]) & (follows < self.first[name] + size)
                others[inside] = self.first[name] + self._rng.integers(size, size=inside.sum())
            rows.append(np.where(self._rng.random(follows.size) < jumps, others, follows))
        return np.stack(rows, axis=1)

    def samples(self, names: Sequence[str], count: int, length: int) -> Int64s:
        """Return texts of these passages, as many tokens of each on average."""
        tokens = np.concatenate([self.first[n] + np.arange(PASSAGES[n]) for n in names])
        return self.make(self._rng.choice(tokens, count), length, SHARE_OF_JUMPS)

    def prompts(self, name: str, count: int, length: int) -> list[list[int]]:
        """Return prompts that begin anywhere in a passage."""
        size = PASSAGES[name] if name != "known" else PASSAGES[name] // 4
        begins = self.first[name] + self._rng.integers(size, size=count)
        return self.make(begins, length, 0.0).tolist()


def train(
    fields: Fields, text: Text, names: Sequence[str], steps: int, device: str, to: Path
) -> None:
    """Train a model on passages, print how often it knows the next token, and save it in bfloat16.
    Only TRAINED_LAYERS learn: the others, which add nothing, take the time of a larger model."""
    began = time.perf_counter()
    torch.manual_seed(steps)
    num_trained = min(TRAINED_LAYERS, fields["num_hidden_layers"])
    model = make_model({**fields, "num_hidden_layers": num_trained}, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    for step in range(steps):
        tokens = torch.from_numpy(text.samples(names, 64, 64)).to(device)
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1.0, (steps - step) / (0.4 * steps))
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            logits = model(tokens[:, :-1]).logits
        loss = cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    with torch.inference_mode():
        tokens = torch.from_numpy(text.samples(names, 64, 64)).to(device)
        chances = model(tokens[:, :-1]).logits.float().softmax(-1)
    sure = chances.max(-1)
    right = (sure.indices == tokens[:, 1:]).float().mean().item()
    whole = make_model(fields, device)
    whole.load_state_dict(model.state_dict(), strict=False)
    whole.bfloat16().save_pretrained(to)
    print(
        f"{to.name}: loss {loss.item():.3f}, next token right {right:.3f}, its chance "
        f"{sure.values.mean().item():.3f}, {time.perf_counter() - began:.0f} s",
        flush=True,
    )


def make_model(fields: Fields, device: str) -> transformers.PreTrainedModel:
    """Return a model of this config.json whose layers add nothing to what they get."""
    with torch.device(device):
        config = transformers.AutoConfig.for_model(**fields)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.zeros_(weight)
    return model


class Batch(NamedTuple):
    """Requests that are added at once."""

    prompts: list[list[int]]
    num_out: int
    temperature: float = 0.0

    def requests(self, number: int) -> list[GenerationRequest]:
        """Return them, with ids of their own, and with seeds that no batch of another size has:
        noise that is the same would be text that repeats."""
        first = 10**6 * len(self.prompts) + 1000 * number
        return [
            GenerationRequest(
                id=f"{number}-{index}",
                prompt=prompt,
                max_tokens=self.num_out,
                sampling=SamplingParams(
                    temperature=self.temperature, seed=first + index, ignore_eos=True
                ),
            )
            for index, prompt in enumerate(self.prompts)
        ]


class Workload(NamedTuple):
    """Batches, one after the other; the first `num_warm` are not counted."""

    name: str
    batches: list[Batch]
    methods: Sequence[str]
    num_warm: int = 1


def workloads(text: Text, vocab_size: int) -> list[Workload]:
    """Return all, from the same texts for each method."""
    rng = np.random.default_rng(5)
    found = []
    for size in (1, 16, 64):
        refrain = [Batch(text.prompts("refrain", size, 400), 512) for _ in range(4)]
        found.append(Workload(f"refrain x {size}", refrain, ("ngram", "suffix", "draft_model")))
    report = [Batch(text.prompts("report", 1, 16), 256) for _ in range(24)]
    found.append(Workload("report x 1", report, ("suffix", "ngram"), num_warm=12))
    for size in (1, 64, 256):
        prompts = rng.integers(vocab_size, size=(size, 64)).tolist()
        noise = [Batch(prompts, 512, temperature=100.0) for _ in range(3)]
        found.append(Workload(f"noise x {size}", noise, ("ngram", "suffix", "draft_model")))
    known = [Batch(text.prompts("known", 16, 32), 1600) for _ in range(2)]
    found.append(Workload("known, then unknown x 16", known, ("half_draft_model",), num_warm=0))
    return found


class Run(NamedTuple):
    """A workload with one method."""

    workload: str
    method: str
    tok_s: float
    last_tok_s: float
    """Over the last quarter of a batch's tokens while all of its requests run, averaged."""
    accepted: float
    """Share of the drafts."""
    tokens_a_row: float
    """Tokens that a row with drafts gains."""
    events: list[str]
    """Drafting stopped (-) or was resumed (+) for good: after this share of the tokens."""

    def beside(self, other: "Run") -> str:
        """Return this as a line, with the ratios to another one."""
        return (
            f"{self.workload:25} {self.method:17} {self.tok_s:9.1f} tok/s "
            f"({self.tok_s / other.tok_s:5.3f}x; last quarter "
            f"{self.last_tok_s / other.last_tok_s:5.3f}x), {self.accepted:6.1%} accepted, "
            f"{self.tokens_a_row:4.2f} tokens a row  {' '.join(self.events)}"
        )


def serve(group: WorkerGroup, loaded: LoadedGroup, config: WorkerConfig, load: Workload) -> Run:
    """Serve a workload."""
    changes: list[tuple[int, DraftingChange]] = []
    gained: list[tuple[float, int]] = []

    def note(result: StepResult) -> None:
        gained.append((time.perf_counter(), len(result.token_ids)))

    limits = scheduler_limits(loaded, config)
    scheduler = Scheduler(
        limits, on_drafting_change=lambda change: changes.append((len(gained), change))
    )
    driver = Driver(group, scheduler, on_result=note)
    seconds = last_s = 0.0
    num_tokens = num_last = 0
    for number, batch in enumerate(load.batches):
        begins, began = len(gained), time.perf_counter()
        for request in batch.requests(number):
            driver.add_request(request)
        for _ in driver.run():
            pass
        if number < load.num_warm:
            continue
        times, counts = zip(*gained[begins:], strict=True)
        seconds += times[-1] - began
        num_tokens += sum(counts)
        end = max(at for at, count in enumerate(counts) if count >= len(batch.prompts))
        last = int(np.searchsorted(np.cumsum(counts[: end + 1]), 0.75 * sum(counts[: end + 1])))
        last_s += times[end] - times[last]
        num_last += sum(counts[last + 1 : end + 1])
    drafts = driver.drafts
    places = np.cumsum([count for _, count in gained]) / sum(count for _, count in gained)
    return Run(
        workload=load.name,
        method=config.speculative.method,
        tok_s=num_tokens / seconds,
        last_tok_s=num_last / last_s,
        accepted=drafts.num_accepted / max(1, drafts.num_drafted),
        tokens_a_row=1 + drafts.num_accepted / max(1, drafts.num_verified),
        events=[
            f"{'+' if change.pays else '-'}{places[min(at, len(places) - 1)]:.2f}"
            for at, change in changes
            if change.req_id is None
        ],
    )


def measure(
    models: Path, devices: Sequence[str], loads: Sequence[Workload], num_rounds: int
) -> list[Run]:
    """Serve workloads with all their methods, a pipeline stage on each device, so many times in
    turns; print a line for each, with its ratios to its own round."""
    runs, plain = list[Run](), dict[str, Run]()
    choices = {
        "none": SpeculativeConfig(),
        "ngram": SpeculativeConfig(method="ngram", num_speculative_tokens=NUM_DRAFTS),
        "suffix": SpeculativeConfig(method="suffix", num_speculative_tokens=NUM_DRAFTS),
    }
    for method, name in (("draft_model", "draft"), ("half_draft_model", "half_draft")):
        choices[method] = SpeculativeConfig(
            method="draft_model", num_speculative_tokens=NUM_DRAFTS, model=str(models / name)
        )
    parallel = ParallelConfig(pipeline_parallel_size=len(devices))
    with local_group(devices, models, parallel) as (group, _):
        for method, speculative in [*choices.items()] * num_rounds:
            chosen = [load for load in loads if method in ("none", *load.methods)]
            if not chosen:
                continue
            config = WorkerConfig(
                parallel=parallel,
                model=ModelConfig(model=str(models / "target"), max_model_len=MAX_MODEL_LEN),
                scheduler=SchedulerConfig(max_num_seqs=256),
                cache=CacheConfig(gpu_memory_utilization=0.6),
                speculative=speculative,
            )
            loaded = group.prepare(config, reload=True)
            for load in chosen:
                run = serve(group, loaded, config, load)._replace(method=method)
                if method == "none":
                    plain[load.name] = run
                print(run.beside(plain[load.name]), flush=True)
                runs.append(run)
    return runs


def main() -> None:
    """Train, measure, and print a line for each workload and method."""
    parser = argparse.ArgumentParser(description=__doc__)
    here = Path(__file__).parent
    parser.add_argument("--config", type=Path, default=here / "models" / "qwen3-0.6b")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--steps", type=int, default=400, help="of training")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument("--workloads", default="", help="how their names begin: refrain,noise")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    text, everything = Text(seed=3), list(PASSAGES)
    fields = json.loads((args.config / "config.json").read_text())
    halves = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    smaller = {name: fields[name] // 2 for name in halves}
    draft = {**fields, **smaller, "num_hidden_layers": TRAINED_LAYERS}
    with tempfile.TemporaryDirectory() as scratch:
        models = Path(scratch)
        steps, device = args.steps, args.device
        train(fields, text, everything, steps, device, models / "target")
        train(draft, text, everything, steps, device, models / "draft")
        half = [name for name in PASSAGES if name != "unknown"]
        train(draft, text, half, steps, device, models / "half_draft")
        if device == "cuda":
            torch.cuda.empty_cache()
        loads = [
            load
            for load in workloads(text, fields["vocab_size"])
            if load.name.startswith(tuple(args.workloads.split(",")))
        ]
        runs = measure(models, devices_of(device, args.pp), loads, args.rounds)
    if args.out is not None:
        args.out.write_text(json.dumps([run._asdict() for run in runs], indent=1) + "\n")


if __name__ == "__main__":
    main()
