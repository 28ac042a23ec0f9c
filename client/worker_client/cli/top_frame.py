"""The lines of text that `worker-client top` shows at one moment. Pure."""

import textwrap
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Final, NamedTuple, TypeVar

from rpc_schema.host_tier import HostTierStatus
from rpc_schema.kv_cache import NUM_NULL_BLOCKS
from rpc_schema.lease import LeaseStatus
from rpc_schema.lifecycle import GpuLoad, Status
from rpc_schema.moved_blocks import BlockTraffic
from worker_client.cli.terminal_lines import Line
from worker_host.plain_text import printable

Value = TypeVar("Value", int, float)

GIB: Final = 1 << 30
MIB: Final = 1 << 20
NOTABLE_SILENCE_MS: Final = 2000
"""A holder's silence that is shown: drivers renew the lease more often."""
_COLUMNS: Final = "rank state req steps/s tokens/s ms/step gpu temp power kv"
_INDENT: Final = " " * 5
_MAX_WRAPPED: Final = 4
"""Maximum lines of one text; `status` shows all of it."""
_NOT_SHOWN: Final = ("free", "total")
"""Memory uses that are named after the others."""


class Sample(NamedTuple):
    """A status, and the time of its arrival."""

    status: Status
    at: float


class Seen(NamedTuple):
    """State of one daemon. Times are of one monotonic clock, in seconds."""

    endpoint: str
    last: Sample | None = None
    before: Sample | None = None
    """Previous sample, for rates."""
    event: str = ""
    event_at: float = 0.0
    error: str = ""
    """Error of the last request; empty: it was answered."""


class Rates(NamedTuple):
    """Rates between two samples; None if they cannot be compared."""

    steps_per_s: float | None
    tokens_per_s: float | None


def rates(seen: Seen) -> Rates:
    """Return the recent rates of a daemon. Another process, or another driver, resets them."""
    last, before = seen.last, seen.before
    if last is None or before is None or last.at <= before.at:
        return Rates(None, None)
    now, then = last.status, before.status
    if now.worker_uid != then.worker_uid:
        return Rates(None, None)
    duration_s = last.at - before.at
    tokens = (now.num_tokens - then.num_tokens) / duration_s if now.num_tokens else None
    if now.epoch != then.epoch:
        return Rates(None, tokens)
    return Rates((now.last_seq - then.last_seq) / duration_s, tokens)


class Totals(NamedTuple):
    """Figures of all daemons together; None if they are not known."""

    tokens_per_s: float | None
    requests: int | None
    kv_percent: int | None
    """Largest share of its KV cache that running requests hold on a daemon."""


def totals(daemons: Sequence[Seen]) -> Totals:
    """Return the figures of the daemons that answer, as their groups' lines count them."""
    tokens: list[float] = []
    requests: list[int] = []
    percents: list[int] = []
    for members in _by_group([seen for seen in daemons if not seen.error]):
        statuses = [seen.last.status for seen in members if seen.last is not None]
        ranks = [status.rank for status in statuses]
        config = statuses[0].config
        size = 1 if config is None else config.parallel.world_size
        tokens += _known([_added(ranks, [rates(seen).tokens_per_s for seen in members], size)])
        requests += _known([_added(ranks, [status.num_requests for status in statuses], size)])
        percents += _known(map(_kv_share, statuses))
    return Totals(
        sum(tokens) if tokens else None,
        sum(requests) if requests else None,
        max(percents, default=None),
    )


def title(daemons: Sequence[Seen]) -> str:
    """Return the frame's title."""
    return f"{len(daemons)} daemon{'s' if len(daemons) != 1 else ''}; q quits"


def frame(
    daemons: Sequence[Seen],
    now: float,
    width: int,
    height: int | None,
    top: Sequence[Line] = (),
) -> list[Line]:
    """Return the lines for a terminal of that size, none longer than width: longer texts are
    wrapped. height None: as many lines as there are. If the height is short, daemons are shown with
    less detail, then the title replaces the lines of `top`, then fewer daemons are shown."""
    lines = [Line(title(daemons)), Line(_row(*_COLUMNS.split()), "bold")]
    groups = [_group(members) for members in _groups(daemons)]
    if height is None or len(lines) + len(groups) < height:
        lines += groups
    if top and (height is None or len(top) + len(lines) - 1 + len(daemons) <= height):
        lines[:1] = top
    room = None if height is None else max(1, height - len(lines))
    each = None if room is None else max(1, room // max(1, len(daemons)))
    for index, seen in enumerate(daemons):
        if room is not None and index == room - 1 and len(daemons) > room:
            lines.append(Line(f"{_INDENT}and {len(daemons) - index} more"))
            break
        lines += _daemon(seen, now, width)[:each]
    return [Line(line.text[:width], line.style) for line in lines]


def _groups(daemons: Sequence[Seen]) -> list[list[Seen]]:
    """Return the daemons by group. A daemon alone, or without a model, is none."""
    with_model = [each for each in daemons if each.last and each.last.status.config is not None]
    return [group for group in _by_group(with_model) if len(group) > 1]


def _by_group(daemons: Sequence[Seen]) -> list[list[Seen]]:
    """Return the daemons that were seen by group: ranks of one sequence of steps of one driver."""
    members: dict[tuple[int, bytes, int], list[Seen]] = {}
    for seen in daemons:
        if seen.last is not None:
            status = seen.last.status
            size = 1 if status.config is None else status.config.parallel.group_size
            number = status.rank // size
            members.setdefault((status.epoch, status.lease.holder, number), []).append(seen)
    return list(members.values())


def _daemon(seen: Seen, now: float, width: int) -> list[Line]:
    """Return a daemon's lines, the most important first."""
    if seen.last is None:
        unknown = Line(f"   ? {seen.endpoint}: {seen.error or 'not asked yet'}", "red")
        return _wrapped(unknown, width)
    status = seen.last.status
    alarm = "red" if seen.error or status.degraded or status.failure else ""
    lines = [Line(_figures(seen), alarm)]
    if seen.error:
        lines.append(
            Line(f"{_INDENT}no answer for {now - seen.last.at:.0f} s: {seen.error}", "red")
        )
    for trouble in (status.failure, status.degraded and f"degraded: {status.degraded}"):
        if trouble:
            lines.append(Line(f"{_INDENT}{trouble}", "red"))
    lines.append(Line(f"{_INDENT}{_doing(status)}"))
    if seen.event:
        lines.append(Line(f"{_INDENT}{now - seen.event_at:.0f} s ago: {seen.event}"))
    lines.append(Line(f"{_INDENT}{_memory(status)}"))
    if status.host_tier is not None:
        lines.append(Line(f"{_INDENT}host tier: {host_tier_text(status.host_tier)}"))
    lines.append(Line(f"{_INDENT}{seen.endpoint}, pid {status.pid}, {status.device}"))
    return [lines[0], *chain.from_iterable(_wrapped(line, width) for line in lines[1:])]


def _wrapped(line: Line, width: int) -> list[Line]:
    texts = textwrap.wrap(
        printable(" ".join(line.text.strip().splitlines())),
        width=max(width, len(_INDENT) + 20),
        initial_indent=line.text[: len(line.text) - len(line.text.lstrip())],
        subsequent_indent=_INDENT,
        max_lines=_MAX_WRAPPED,
        placeholder=" ...",
        break_on_hyphens=False,
    )
    return [Line(text, line.style) for text in texts]


def _row(rank: str, state: str, requests: str, *figures: str) -> str:
    """Return a line of the table: 80 characters."""
    steps, tokens, step_ms, percent, celsius, watts, kv_share = figures
    return (
        f"{rank:>4} {state:<21} {requests:>5} {steps:>7} {tokens:>8} {step_ms:>7} {percent:>5} "
        f"{celsius:>5} {watts:>5} {kv_share:>4}"
    )


def _figures(seen: Seen) -> str:
    assert seen.last is not None
    status, speed = seen.last.status, rates(seen)
    load = status.gpu_load or GpuLoad()
    return _row(
        str(status.rank),
        f"{status.serving} {status.load}",
        _requests(status),
        _number(speed.steps_per_s),
        _number(speed.tokens_per_s),
        _step_ms(status, speed),
        _unit(load.utilization_percent, "%"),
        _unit(load.temperature_c, "C"),
        _unit(load.power_w, "W"),
        _unit(_kv_share(status), "%"),
    )


def _group(members: Sequence[Seen]) -> Line:
    """Return the line of a group. Its ranks run the same steps, those of a replica the same
    requests, and one of them answers: the largest count is the replica's. Counts of replicas in
    lockstep are added. Power is the sum; a GPU's use the mean; temperature and KV cache are the
    largest."""
    there = [seen for seen in members if not seen.error] or members
    samples = [seen.last for seen in there if seen.last is not None]
    config = samples[0].status.config
    assert config is not None
    speeds = [rates(seen) for seen in there]
    loads = [sample.status.gpu_load or GpuLoad() for sample in samples]
    percents = _known(load.utilization_percent for load in loads)
    watts = _known(load.power_w for load in loads)
    busiest = max(samples, key=lambda sample: sample.status.usual_step_us).status
    steps = max(_known(speed.steps_per_s for speed in speeds), default=None)
    ranks, of_replica = [sample.status.rank for sample in samples], config.parallel.world_size
    tokens = _added(ranks, [speed.tokens_per_s for speed in speeds], of_replica)
    requests = _added(ranks, [sample.status.num_requests for sample in samples], of_replica)
    is_ready = any(sample.status.load == "READY" for sample in samples)
    size, num_there = config.parallel.group_size, sum(not seen.error for seen in members)
    row = _row(
        "all",
        f"{num_there} of {size} ranks",
        str(requests) if is_ready else "-",
        _number(steps),
        _number(tokens),
        _step_ms(busiest, Rates(steps, tokens)),
        _unit(round(sum(percents) / len(percents)) if percents else None, "%"),
        _unit(max(_known(load.temperature_c for load in loads), default=None), "C"),
        _unit(sum(watts) if watts else None, "W"),
        _unit(max(_known(_kv_share(sample.status) for sample in samples), default=None), "%"),
    )
    return Line(row, "bold" if num_there == size else "bold red")


def _added(ranks: Sequence[int], values: Sequence[Value | None], size: int) -> Value | None:
    """Return the sum over replicas of the largest value that a rank of each has. size: ranks of a
    replica."""
    largest: dict[int, Value] = {}
    for rank, value in zip(ranks, values, strict=True):
        if value is not None:
            largest[rank // size] = max(value, largest.get(rank // size, value))
    return sum(largest.values()) if largest else None


def _known(values: Iterable[Value | None]) -> list[Value]:
    return [value for value in values if value is not None]


def _requests(status: Status) -> str:
    return str(status.num_requests) if status.load == "READY" else "-"


def _doing(status: Status) -> str:
    phase = status.phase if not status.phase_ms else f"{status.phase} for {_duration(status)}"
    kv_cache = f", KV {held_blocks(status)}" if status.kv_cache is not None else ""
    lease = f"epoch {status.epoch}, lease: {leased(status.lease)}"
    return f"{phase}, link {status.link_state}, {lease}{kv_cache}"


def held_blocks(status: Status) -> str:
    """Return the share of the KV cache that running requests hold. A block that several share
    counts for each, but the total never exceeds the cache."""
    total = _usable_blocks(status)
    return f"{min(status.num_kv_blocks_held, total)} of {total} blocks held"


def _usable_blocks(status: Status) -> int:
    return 0 if status.kv_cache is None else status.kv_cache.num_blocks - NUM_NULL_BLOCKS


def _kv_share(status: Status) -> int | None:
    """Return the percentage of the KV cache that running requests hold; None without one."""
    total = _usable_blocks(status)
    return min(100, -(-100 * status.num_kv_blocks_held // total)) if total else None


def leased(lease: LeaseStatus) -> str:
    """Return the holder of a daemon's lease and whether it is there, or the lease's state."""
    holder = lease.holder_name or lease.holder.hex()[:8]
    match lease.state:
        case "held" if lease.silent_ms < NOTABLE_SILENCE_MS:
            return holder
        case "held":
            silent_s, left_s = lease.silent_ms / 1000, lease.remaining_ms / 1000
            return f"{holder}, silent for {silent_s:.0f} s (its lease ends in {left_s:.0f} s)"
        case "claimable":
            return f"{holder}, not connected (another driver may attach)"
        case "orphan":
            return f"orphan of {holder}"
    return lease.state


def _duration(status: Status) -> str:
    ms = status.phase_ms
    return f"{ms} ms" if ms < 1000 else f"{ms / 1000:.0f} s"


def _memory(status: Status) -> str:
    memory = status.memory_bytes
    uses = [f"{use} {_bytes(size)}" for use, size in memory.items() if use not in _NOT_SHOWN]
    if "free" in memory and "total" in memory:
        uses.append(f"free {_bytes(memory['free'])} of {_bytes(memory['total'])}")
    return "memory: " + (", ".join(uses) or "not known")


def host_tier_text(tier: HostTierStatus) -> str:
    """Return slots, and what has become of blocks; no words for what the tier does not do."""
    parts = [
        f"{tier.num_held} of {tier.num_slots} slots held, {tier.size_bytes // MIB} MiB of "
        f"{tier.memory} memory",
        f"{tier.num_stored} blocks stored{rate_text(tier.stored)}, {tier.num_loaded} loaded"
        f"{rate_text(tier.loaded)}, {tier.num_invalid} of these invalid",
    ]
    if tier.num_sent or tier.num_received or tier.num_failed:
        parts.append(
            f"{tier.num_sent} sent to another group{rate_text(tier.sent)}, {tier.num_received} "
            f"received{rate_text(tier.received)}, {tier.num_mapped} of these over CUDA IPC, "
            f"{tier.num_failed} failed"
        )
    if tier.file_bytes:
        parts.append(
            f"in a file of {tier.file_bytes // MIB} MiB, {tier.num_restored} taken over from an "
            f"earlier daemon, {tier.num_rejected} given up"
        )
    return "; ".join(parts)


def rate_text(traffic: BlockTraffic) -> str:
    """Return how fast blocks have moved; empty if none has."""
    return f" at {traffic.num_bytes / traffic.num_us / 1000:.1f} GB/s" if traffic.num_us else ""


def _bytes(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size // MIB} MiB"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _unit(value: int | None, unit: str) -> str:
    return "-" if value is None else f"{value}{unit}"


def _step_ms(status: Status, speed: Rates) -> str:
    """Return the duration of a step on a daemon that has run steps lately; it may have been idle
    between some of them."""
    if not speed.steps_per_s:
        return "-"
    from_step_to_step = 1000 / speed.steps_per_s
    usual = status.usual_step_us / 1000 or from_step_to_step
    return f"{min(usual, from_step_to_step):.2f}"
