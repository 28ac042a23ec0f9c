"""The checks of a run's record. Which model has sampled a token is seen from the token. Whether it
is the token that transformers gives is checked where it is known which weights have computed the
request's KV: KV that is kept over an update stays, and KV that is lost is of later weights."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import torch
from transformers import DynamicCache

from tests.support.checkpoints import Checkpoint
from tests.support.stamps.plan import NUM_MODELS, Case, content_of, plan_request
from tests.support.stamps.record import Entry
from worker_client.requests import GenerationRequest, VersionRun

CLOSE = 1e-3
"""In nats; float32."""
WITHOUT_ADAPTER = "lacks its adapter"
"""Part of the error of a request whose adapter was updated, and then lost with a rank."""

Reference: TypeAlias = Callable[[int, int | None], Checkpoint]
"""Returns a model by its number, with the adapter of these contents or without one."""


class Findings(NamedTuple):
    """What a run has shown."""

    faults: list[str]
    num_requests: int
    num_tokens: int
    num_unknown: int
    """Tokens whose versions a scheduler's note had no more room for."""
    num_compared: int
    """Tokens compared with transformers'."""
    num_swapped: int
    """Those of them with KV of earlier versions."""
    num_runs: int
    """Runs of tokens of one version."""
    num_adapter_runs: int
    """Those of an adapter that was updated."""
    num_without_adapter: int
    """Requests whose adapter was lost with a rank."""


class _Life(NamedTuple):
    """A request, and what has happened meanwhile."""

    request: GenerationRequest
    end: Entry
    meanwhile: Sequence[Entry]
    """Entries from its acceptance on."""
    begins_with: tuple[int, int]
    """Versions of the model and of the adapter at its acceptance."""

    @property
    def has_lost_kv(self) -> bool:
        """True if some of its KV may have been computed twice."""
        lost = any(entry.what == "lost" for entry in self.meanwhile)
        return lost or self.end.num_preemptions > 0


def judge(entries: Sequence[Entry], case: Case, seed: int, reference: Reference) -> Findings:
    """Check a record."""
    model_of = {entry.number: entry.model for entry in entries if entry.what == "version"}
    adapter_versions = {entry.number for entry in entries if entry.what == "adapter"}
    accepted = Counter(entry.req_id for entry in entries if entry.what == "accepted")
    ended = Counter(entry.req_id for entry in entries if entry.what == "ended")
    faults = [
        f"{req_id} was accepted {count} times" for req_id, count in accepted.items() if count > 1
    ]
    faults += [f"{req_id} was never accepted" for req_id in ended.keys() - accepted.keys()]
    faults += [
        f"{req_id} has ended {ended[req_id]} times" for req_id in accepted if ended[req_id] != 1
    ]
    counts = Counter[str]()
    for life in _lives(entries, case, seed):
        found = _faults_of(life, model_of, case, counts)
        found += [
            f"{life.end.req_id}: no such version of the adapter: {run}"
            for run in life.end.runs
            if run.adapter_version not in (None, *adapter_versions)
        ]
        if not found and life.end.reason != "error" and case.is_exact:
            found = list(_wrong_tokens(life, model_of, reference, counts))
        faults += found
    return Findings(
        faults,
        len(accepted),
        counts["tokens"],
        counts["unknown"],
        counts["compared"],
        counts["swapped"],
        counts["runs"],
        counts["adapter runs"],
        counts["without adapter"],
    )


def _lives(entries: Sequence[Entry], case: Case, seed: int) -> Iterator[_Life]:
    """Yield the requests that have ended once."""
    begun: dict[str, tuple[int, tuple[int, int]]] = {}
    version = adapter_version = -1
    for place, entry in enumerate(entries):
        if entry.what == "version":
            version = entry.number
        elif entry.what == "adapter":
            adapter_version = entry.number
        elif entry.what == "accepted":
            begun[entry.req_id] = place, (version, adapter_version)
        elif entry.what == "ended" and entry.req_id in begun:
            first, begins_with = begun.pop(entry.req_id)
            request = plan_request(seed, int(entry.req_id[1:]), case)
            yield _Life(request, entry, entries[first:place], begins_with)


def _faults_of(
    life: _Life, model_of: Mapping[int, int], case: Case, counts: Counter[str]
) -> list[str]:
    """Check a request's end, and the stamps of its tokens."""
    request, end = life.request, life.end
    is_orphan = request.lora is not None and "adapter" in case.targets and life.has_lost_kv
    if end.reason == "error" and is_orphan and WITHOUT_ADAPTER in end.error:
        counts["without adapter"] += 1
    elif end.reason != "length" or len(end.token_ids) != request.max_tokens:
        ended = f"{end.reason} {end.error}"
        return [f"{end.req_id} of {request.max_tokens} tokens: {ended}, {end.token_ids}"]
    versions = [run.version for run in end.runs for _ in range(run.num_tokens)]
    if len(versions) != len(end.token_ids):
        return [f"{end.req_id}: {len(versions)} stamps of {len(end.token_ids)} tokens"]
    counts["tokens"] += len(versions)
    counts["runs"] += len(end.runs)
    counts["adapter runs"] += sum(bool(run.adapter_version) for run in end.runs)
    counts["unknown"] += versions.count(None)
    faults = [
        f"{end.req_id}: {after} after {before}"
        for before, after in pairwise(end.runs)
        if not _may_follow(before, after)
    ]
    for place, (token, version) in enumerate(zip(end.token_ids, versions, strict=True)):
        if version is not None and model_of.get(version) != token % NUM_MODELS:
            found, stamped = token % NUM_MODELS, model_of.get(version)
            faults.append(
                f"{end.req_id}, token {place}: of model {found}, stamped as version {version} "
                f"of model {stamped}: {end.runs}"
            )
    return faults


def _may_follow(before: VersionRun, after: VersionRun) -> bool:
    """Return True if versions grow, those of the adapter or of the model alone, too."""
    pairs = [(before.version, after.version), (before.adapter_version, after.adapter_version)]
    known = [(one, other) for one, other in pairs if one is not None and other is not None]
    grows = all(one <= other for one, other in known)
    return grows and (len(known) < len(pairs) or any(one < other for one, other in known))


def _wrong_tokens(
    life: _Life, model_of: Mapping[int, int], reference: Reference, counts: Counter[str]
) -> Iterator[str]:
    """Yield the tokens that transformers does not give."""
    sampling, known = life.request.sampling, [*life.request.prompt.tolist(), *life.end.token_ids]
    if sampling.structured_outputs is not None:
        return
    num_likely = 1 if sampling.temperature == 0 else sampling.top_k
    cache, num_computed, end = DynamicCache(), 0, len(life.request.prompt)
    for run, kv in zip(life.end.runs, _kv_of_runs(life), strict=True):
        first, end = end, end + run.num_tokens
        if kv == "unknown":
            continue
        if kv == "own":
            cache, num_computed = DynamicCache(), 0
        content = None if life.request.lora is None else content_of(run.adapter_version)
        checkpoint = reference(model_of[run.version], content)
        with torch.no_grad():
            given = torch.tensor([known[num_computed : end - 1]])
            out = checkpoint.model(given, past_key_values=cache, use_cache=True)
        num_computed = end - 1
        logprobs = out.logits[0, -run.num_tokens :].float().log_softmax(-1)
        least = logprobs.topk(num_likely).values[:, -1]
        counts["compared"] += run.num_tokens
        counts["swapped"] += run.num_tokens * (kv == "kept")
        for place, token in enumerate(known[first:end]):
            if logprobs[place, token] < least[place] - CLOSE:
                likely = logprobs[place].topk(num_likely).indices.tolist()
                yield f"{life.end.req_id}, token {first + place}: {token}, not of {likely}, {run}"


def _kv_of_runs(life: _Life) -> Iterator[str]:
    """Yield what the KV was of with which each run of tokens was sampled: "own", of the run's
    weights alone; "kept", all before the run as it was there, and its own; or "unknown"."""
    updates = iter([each for each in life.meanwhile if each.what in ("version", "adapter")])
    has_adapter = life.request.lora is not None
    versions, kv = list(life.begins_with), "own"
    for number, run in enumerate(life.end.runs):
        since: list[str] = []
        wanted = [run.version, run.adapter_version if has_adapter else None]
        while wanted != [versions[0], versions[1] if has_adapter else None]:
            update = next(updates, None)
            if update is None:
                break
            is_model = update.what == "version"
            versions[0 if is_model else 1] = update.number
            if is_model or has_adapter:
                since.append(update.running)
        else:
            kv = _kv_after(kv, since, is_first=not number, has_lost_kv=life.has_lost_kv)
            yield kv
            continue
        kv = "unknown"  # a stamp is unknown, or a version was made by a driver that has died
        yield kv


def _kv_after(kv: str, updates: Sequence[str], *, is_first: bool, has_lost_kv: bool) -> str:
    """Return what the KV is of behind some updates."""
    if not updates:
        return kv
    if set(updates) <= {"keep"}:
        # A prompt may have been computed in part before, and KV that is lost is of later weights.
        return "unknown" if is_first or has_lost_kv or kv == "unknown" else "kept"
    return "own" if updates[-1] in ("drop", "recompute") else "unknown"
