"""The checks of a soak's result: each accepted request ended once, with the same tokens as without
faults, and nothing is left of the processes."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from tests.support.checkpoints import Checkpoint
from tests.support.command_line import processes_of
from tests.support.sampling_checks import make_metadata
from tests.support.soak.ledger import Entry
from tests.support.soak.plan import PlannedRequest
from worker_client.scheduler import RequestOutput
from worker_daemon.sample.sampler import TorchSampling

SHARED_MEMORY = Path("/dev/shm")
OTHERS_TAKE_S = 5.0
NOISE = 3e-5
"""Rounding noise of float32 logits, whose largest here are near 30."""
NUM_NOISY = 400


class Expected(NamedTuple):
    """Results of an undisturbed run."""

    token_ids: list[int]
    reason: str


def expectations(outputs: Mapping[str, RequestOutput]) -> dict[str, Expected]:
    return {name: Expected(out.token_ids, out.finish_reason) for name, out in outputs.items()}


class Judgement(NamedTuple):
    """Findings from the ledger."""

    violations: list[str]
    ends: Counter[str]
    """Number of requests by finish reason."""
    num_tokens: int
    num_near_ties: int
    """Requests in which the rounding of float32 chose another token."""


def judge(
    entries: Sequence[Entry],
    requests: Sequence[PlannedRequest],
    expected: Mapping[str, Expected],
    model: Checkpoint,
) -> Judgement:
    """Check the ledger against the expected results."""
    violations = []
    by_request: dict[str, list[Entry]] = {request.req_id: [] for request in requests}
    for entry in entries:
        if entry.what != "driver":
            by_request[entry.req_id].append(entry)
    ends: Counter[str] = Counter()
    num_tokens = num_near_ties = 0
    for request in requests:
        first, *rest = [*by_request[request.req_id]] or [None]
        if first is None or first.what != "accepted":
            violations.append(f"{request.req_id} was never accepted")
            continue
        if len(rest) != 1 or rest[0].what == "accepted":
            violations.append(f"{request.req_id}: {[(e.what, e.epoch, e.at) for e in rest]}")
            continue
        (end,) = rest
        ends[end.reason or end.what] += 1
        num_tokens += len(end.token_ids)
        if end.what == "cancelled":
            if request.cancel_after_s is None:
                violations.append(f"{request.req_id} was cancelled by nobody")
            continue
        found = Expected(end.token_ids, end.reason)
        if found == expected[request.req_id]:
            continue
        if is_near_tie(model, request, expected[request.req_id].token_ids, end.token_ids):
            num_near_ties += 1
            continue
        violations.append(f"{request}: {found} is not {expected[request.req_id]}")
    return Judgement(violations, ends, num_tokens, num_near_ties)


def is_near_tie(
    model: Checkpoint, request: PlannedRequest, expected: Sequence[int], found: Sequence[int]
) -> bool:
    """Return True if float32 rounding explains the first token that differs: with noise of that
    size, transformers' logits give both. Later tokens are not compared."""
    place = next((i for i, pair in enumerate(zip(expected, found)) if pair[0] != pair[1]), None)  # noqa: B905  # they may differ in length
    if place is None:
        return False
    tokens = [*request.prompt, *expected[:place]]
    with torch.no_grad():
        logits = model.model(torch.tensor([tokens])).logits[0, -1].float()
    noise = torch.randn(NUM_NOISY, logits.numel(), generator=torch.Generator().manual_seed(1))
    settings = {k: v for k, v in request.sampling.items() if k not in ("logprobs", "seed")}
    metadata = make_metadata(
        NUM_NOISY,
        **{"temperature": 0.0, **settings},
        seeds=request.sampling.get("seed", 0),
        positions=torch.full((NUM_NOISY,), len(tokens)),
    )
    drawn = set(TorchSampling().tokens(logits + NOISE * noise, metadata).tolist())
    return {expected[place], found[place]} <= drawn


def leftovers(directory: Path) -> list[str]:
    """Return processes, sockets, locks and temporary files left by daemons that have ended."""
    left = [f"process {process}" for process in processes_of(directory)]
    for path in directory.rglob("*"):
        if path.is_socket() or path.name.endswith((".lock", ".tmp", ".draft")):
            left.append(str(path))
    return left


def lasting_shared_memory(before: set[str]) -> list[str]:
    """Return new names in shared memory that stay: other processes also use it."""
    until = time.monotonic() + OTHERS_TAKE_S
    while (left := shared_memory() - before) and time.monotonic() < until:
        time.sleep(0.2)
    return sorted(left)


def shared_memory() -> set[str]:
    """Return names in shared memory that no living process has mapped."""
    names = {path.name for path in SHARED_MEMORY.iterdir()}
    for process in psutil.process_iter():
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text()
        except OSError:
            continue
        names -= {name for name in names if f"{SHARED_MEMORY}/{name}" in maps}
    return names
