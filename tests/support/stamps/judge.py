"""The checks of a run's record. Which weights have sampled a token is seen from the token; what
they should have sampled, where no other weights have a part in it, is transformers' affair."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from tests.support.checkpoints import Checkpoint
from tests.support.stamps.models import NUM_MODELS
from tests.support.stamps.plan import Case, plan_request
from tests.support.stamps.record import Entry
from worker_client.requests import GenerationRequest

CLOSE = 1e-3
"""In nats; float32."""


class Findings(NamedTuple):
    """What a run has shown."""

    faults: list[str]
    num_requests: int
    num_tokens: int
    num_unknown: int
    """Tokens whose versions a scheduler's note had no more room for."""
    num_compared: int
    """Tokens compared with transformers'."""
    num_runs: int
    """Runs of tokens of one version."""


def judge(
    entries: Sequence[Entry],
    case: Case,
    seed: int,
    models: Sequence[Checkpoint],
    adapted: Sequence[Checkpoint],
) -> Findings:
    """Check a record. models, adapted: by number, without and with the adapter."""
    model_of = {entry.number: entry.model for entry in entries if entry.what == "version"}
    ends: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.what == "ended":
            ends.setdefault(entry.req_id, []).append(entry)
    began_with = _versions_at_acceptance(entries)
    accepted = Counter(entry.req_id for entry in entries if entry.what == "accepted")
    faults = [
        f"{req_id} was accepted {count} times" for req_id, count in accepted.items() if count > 1
    ]
    faults += [f"{req_id} was never accepted" for req_id in ends.keys() - accepted.keys()]
    counts = Counter[str]()
    for req_id in accepted:
        request = plan_request(seed, int(req_id[1:]), case)
        if len(ends.get(req_id, ())) != 1:
            faults.append(f"{req_id} has ended {len(ends.get(req_id, ()))} times")
            continue
        (end,) = ends[req_id]
        known = adapted if request.lora else models
        is_pure = case.running == "drop" or {run.version for run in end.runs} == {
            began_with[req_id]
        }
        compared = known if is_pure and case.is_exact else None
        faults += _faults_of(request, end, model_of, case, compared, counts)
    return Findings(
        faults,
        len(accepted),
        counts["tokens"],
        counts["unknown"],
        counts["compared"],
        counts["runs"],
    )


def _faults_of(
    request: GenerationRequest,
    end: Entry,
    model_of: Mapping[int, int],
    case: Case,
    models: Sequence[Checkpoint] | None,
    counts: Counter[str],
) -> list[str]:
    """models: None if other weights than those of its tokens may have computed KV of it."""
    if end.reason != "length" or len(end.token_ids) != request.max_tokens:
        ended = f"{end.reason} {end.error}"
        return [f"{end.req_id} of {request.max_tokens} tokens: {ended}, {end.token_ids}"]
    versions = [run.version for run in end.runs for _ in range(run.num_tokens)]
    if len(versions) != len(end.token_ids):
        return [f"{end.req_id}: {len(versions)} stamps of {len(end.token_ids)} tokens"]
    counts["tokens"] += len(versions)
    counts["runs"] += len(end.runs)
    counts["unknown"] += versions.count(None)
    faults = [
        f"{end.req_id}: version {after.version} after {before.version}"
        for before, after in pairwise(end.runs)
        if None not in (before.version, after.version) and after.version <= before.version
    ]
    for place, (token, version) in enumerate(zip(end.token_ids, versions, strict=True)):
        if version is not None and model_of.get(version) != token % NUM_MODELS:
            found, stamped = token % NUM_MODELS, model_of.get(version)
            faults.append(
                f"{end.req_id}, token {place}: of model {found}, stamped as version {version} "
                f"of model {stamped}: {end.runs}"
            )
    sampling = request.sampling
    is_plain = sampling.temperature == 0 and sampling.structured_outputs is None
    if faults or models is None or not is_plain:
        return faults
    for version in {version for version in versions if version is not None}:
        tokens = [*map(int, request.prompt), *end.token_ids]
        logprobs = models[model_of[version]].logprobs(tokens)
        first = len(request.prompt)
        for place, own in enumerate(versions):
            if own == version:
                counts["compared"] += 1
                row, token = logprobs[first + place - 1], end.token_ids[place]
                if row[token] < row.max() - CLOSE:
                    faults.append(f"{end.req_id}, token {place}: {token}, not {int(row.argmax())}")
    return faults


def _versions_at_acceptance(entries: Sequence[Entry]) -> dict[str, int]:
    """Return the version of the weights when each request was accepted."""
    versions, newest = {}, -1
    for entry in entries:
        if entry.what == "version":
            newest = entry.number
        elif entry.what == "accepted":
            versions[entry.req_id] = newest
    return versions
