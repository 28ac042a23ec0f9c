"""`python -m tests.support.soak --minutes 30 --seed 7`: see the package's description. Prints one
line per fault, and the results."""

import argparse
import json
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable

import msgspec

from rpc_schema.config import WorkerConfig
from tests.support.checkpoints import VOCAB_SIZE, Checkpoint, NearTie, make_checkpoint
from tests.support.command_line import short_directory
from tests.support.serving import generate, worker_config
from tests.support.soak import ledger
from tests.support.soak.driver import BROKEN, Life
from tests.support.soak.faults import Injector
from tests.support.soak.memory import memory_soak
from tests.support.soak.plan import (
    POISON,
    Fault,
    PlannedRequest,
    is_lasting,
    plan_faults,
    plan_requests,
)
from tests.support.soak.scene import Scene, Weight
from tests.support.soak.verdict import (
    Expected,
    expectations,
    judge,
    lasting_shared_memory,
    leftovers,
    shared_memory,
)
from worker_client.worker_group import WorkerGroup

NUM_GPU_BLOCKS = 700
STEP_DEADLINE_MS = 2000
TICK_S = 0.02
STUCK_AFTER_S = 90.0
"""Seconds without a token that count as stuck, once no more requests or faults are planned."""
MAX_GROWTH_MIB = 64.0
NUM_REFERENCES = 12
"""Greedy requests whose tokens are compared with transformers'."""


def soak(
    checkpoint: Checkpoint,
    *,
    seconds: float,
    seed: int,
    every_s: float = 10.0,
    per_s: float = 2.5,
    tp: bool = False,
    say: Callable[[str], None] = print,
) -> dict[str, object]:
    """Run a soak; return its results.

    checkpoint: poisoned() has been called with it, and its directory's parent is the model root.

    Raises AssertionError if a request never ended, ended twice or with wrong tokens, if a driver
    failed unexpectedly, if a daemon grew too much, or if anything is left.
    """
    say(f"seed {seed}: {seconds:g} s, a fault every {every_s:g} s")
    shared_before = shared_memory()
    directory = short_directory()
    config = worker_config(
        checkpoint.path,
        *((1, 2) if tp else (2, 1)),
        max_num_seqs=40,
        max_num_batched_tokens=64,
        step_deadline_ms=STEP_DEADLINE_MS,
        enable_sleep_mode=True,
    )
    scene = Scene(directory, checkpoint.path.parent, config.parallel.world_size)
    try:
        requests = plan_requests(seed, seconds, per_s, VOCAB_SIZE)
        scene.wait_for_daemons()
        expected = undisturbed(scene, config, requests)
        check_reference(checkpoint, requests, expected)
        (directory / "expected.json").write_bytes(msgspec.json.encode(expected))
        say(f"{len(requests)} requests, {sum(len(e.token_ids) for e in expected.values())} tokens")
        found = disturb(scene, config, requests, seed, seconds, every_s, say)
        entries = ledger.read(directory / "ledger.jsonl")
        judgement = judge(entries, requests, expected, checkpoint)
        problems = [*judgement.violations]
        if not scene.is_done:
            problems.append("not all requests have ended")
            problems.append(scene.log("driver")[-6000:])
        if any(code != 0 for code in scene.stop_daemons()):
            problems.append("SIGTERM ended a daemon with another code than 0")
        num_lasting = sum(is_lasting(fault) for fault in planned(config, seed, seconds, every_s))
        if scene.driver_exits["gave up"] > num_lasting or scene.driver_exits[f"exit code {BROKEN}"]:
            problems.append(f"drivers gave up, or broke:\n{scene.log('driver')[-6000:]}")
        problems += [
            f"a daemon grew by {growth}"
            for growth in scene.growths
            if growth.rss_mib > MAX_GROWTH_MIB
        ]
        found["largest_growth"] = {
            name: round(max((getattr(growth, name) for growth in scene.growths), default=0), 1)
            for name in Weight._fields
        }
    finally:
        scene.close()
    problems += leftovers(directory)
    problems += lasting_shared_memory(shared_before)
    found |= {
        "requests": len(requests),
        "ends": dict(judgement.ends),
        "tokens": judgement.num_tokens,
        "near_ties": judgement.num_near_ties,
        "problems": len(problems),
    }
    say(json.dumps(found))
    if problems:
        say(f"kept: {directory}")
    assert not problems, "\n".join(problems[:20])
    shutil.rmtree(directory)
    return found


def undisturbed(
    scene: Scene, config: WorkerConfig, requests: list[PlannedRequest]
) -> dict[str, Expected]:
    """Return the results of the same daemons before the first fault."""
    endpoints = [daemon.endpoint for daemon in scene.daemons]
    with WorkerGroup(endpoints, config.parallel) as group:
        group.attach()
        loaded = group.prepare(config, num_gpu_blocks=NUM_GPU_BLOCKS)
        run = generate(group, loaded, [request.to_request() for request in requests])
    return expectations(run.outputs)


def check_reference(
    checkpoint: Checkpoint, requests: list[PlannedRequest], expected: dict[str, Expected]
) -> None:
    """Check some of these tokens against transformers."""
    num_compared = 0
    for request in requests:
        if request.sampling or expected[request.req_id].reason == "error":
            continue
        try:
            reference = checkpoint.greedy(request.prompt, request.max_tokens)
        except NearTie:
            continue
        assert expected[request.req_id].token_ids == reference, request
        num_compared += 1
        if num_compared == NUM_REFERENCES:
            return


def disturb(
    scene: Scene,
    config: WorkerConfig,
    requests: list[PlannedRequest],
    seed: int,
    seconds: float,
    every_s: float,
    say: Callable[[str], None],
) -> dict[str, object]:
    """Serve the requests under faults."""
    directory = scene.directory
    (directory / "requests.json").write_bytes(msgspec.json.encode(requests))
    began = time.monotonic()
    life = Life(
        endpoints=[daemon.endpoint for daemon in scene.daemons],
        config=config,
        num_gpu_blocks=NUM_GPU_BLOCKS,
        requests=str(directory / "requests.json"),
        ledger=str(directory / "ledger.jsonl"),
        progress=str(directory / "progress"),
        began=began,
    )
    scene.start_drivers(life)
    injector = Injector(scene, config.parallel)
    faults = planned(config, seed, seconds, every_s)
    kinds: Counter[str] = Counter()
    upcoming = list(reversed(faults))
    done = ""
    while not scene.is_done:
        if time.monotonic() > began + seconds and scene.is_stuck(STUCK_AFTER_S):
            break
        if upcoming and time.monotonic() >= began + upcoming[-1].at_s:
            _say_fault(scene, done, began, say)
            fault = upcoming.pop()
            kinds[fault.kind] += 1
            done = injector.strike(fault)
        scene.tick()
        time.sleep(TICK_S)
    _say_fault(scene, done, began, say)
    return {
        "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
        "faults": dict(kinds),
        "driver_exits": dict(scene.driver_exits),
        "daemon_exits": [dict(daemon.exits) for daemon in scene.daemons],
        "steps": scene.num_steps,
        "tokens_sampled": scene.num_tokens,
        "longest_gap_s": round(scene.longest_gap_s, 1),
    }


def planned(config: WorkerConfig, seed: int, seconds: float, every_s: float) -> list[Fault]:
    """Return the faults of a run."""
    return plan_faults(seed, seconds, every_s, config.parallel.world_size)


def _say_fault(scene: Scene, done: str, began: float, say: Callable[[str], None]) -> None:
    """Report the last fault's effect when the next one begins."""
    if done:
        now = time.monotonic() - began
        say(f"{now:7.1f} s  {done}: {scene.num_tokens} tokens, longest gap {scene.gap_s:.1f} s")
    scene.gap_s = 0.0


def poisoned(checkpoint: Checkpoint) -> Checkpoint:
    """Set one token's embedding to NaN in the files; transformers' model does not change."""
    import torch
    from safetensors.torch import load_file, save_file

    for path in checkpoint.path.glob("*.safetensors"):
        tensors = load_file(path)
        if "model.embed_tokens.weight" in tensors:
            tensors["model.embed_tokens.weight"][POISON] = torch.nan
            save_file(tensors, path, {"format": "pt"})
    return checkpoint


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, help="30, or 20 with --memory")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between faults")
    parser.add_argument("--rate", type=float, default=2.5, help="requests a second")
    parser.add_argument("--tp", action="store_true", help="two ranks of a stage, not two stages")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--memory", action="store_true", help="no faults: memory must not grow")
    parser.add_argument("--trace", action="store_true", help="with --memory: show what grows")
    given = parser.parse_args()
    if given.memory:
        seconds = 60.0 * (given.minutes or 20.0)
        memory_soak(seconds=seconds, seed=given.seed, traces=given.trace)
        return
    root = short_directory()
    try:
        soak(
            poisoned(make_checkpoint(root, "LlamaForCausalLM", seed=99)),
            seconds=60.0 * (given.minutes or 30.0),
            seed=given.seed,
            every_s=given.every,
            per_s=given.rate,
            tp=given.tp,
        )
    finally:
        shutil.rmtree(root)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
