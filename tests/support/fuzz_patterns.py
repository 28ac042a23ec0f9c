"""Random regular expressions, many of them catastrophic, against the module names of a published
model, as a checkpoint's quantization_config brings them to a daemon."""

import random
import re
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rpc_schema.errors import ConfigError
from tests.support.published import PUBLISHED
from worker_daemon.models.config import parse_model_config
from worker_daemon.models.decoder import module_names
from worker_daemon.models.module_patterns import CPU_S, matching_names

FIELD = "quantization_config.ignore"
SLACK_S = 1.0
"""CPU time beyond the bound: the start of the process, and the caller's own work."""
CHEAP_S = 0.3
"""Matches that took the process less are done again here, to compare."""
REAL = (
    "re:.*lm_head",
    "re:.*mlp.gate$",
    r"re:.*(?:^|\.)(?:attn|self_attn)(?:\.|$).*",
    r"re:.*mlp\.experts\.\d+\.(?:gate_proj|up_proj|down_proj)$",
    r"re:^(?!mtp\.).*layers\.\d+\.mlp",
    "re:^(?!.*self_attn\\.(?:q_proj|k_proj|v_proj)$).*$",
    r"re:.*\.layers\.(?:0|3|7|11|15)\.self_attn(?:\..*)?$",
    "re:.*(?<!q)_proj$",
)
"""Kinds of patterns in published checkpoints and their recipes."""
CATASTROPHIC = (
    ".?" * 100 + "!",
    "(.+)+!",
    "(?:.*.*)*[!?]",
    "(?:.|.|[a-z])*!",
    "(?=(?:.*)*!)model",
    r"(.*)(.*)(.*)(.*)(.*)(.*)\1!",
    "(?:(?:(?:.{0,9}){0,99}){0,99}){0,99}[!?]",
    "(?:a{1000}){1000}",
    "(?:(?:.?){1000}){1000}[!?]",
    "(" * 150 + "a" + ")*" * 150,
)


def random_pattern(source: random.Random) -> str:
    """Return a pattern of at most a few hundred characters; it need not compile."""
    kind = source.randrange(4)
    if kind == 0:
        return source.choice(REAL).removeprefix("re:")
    if kind == 1:
        return source.choice(CATASTROPHIC)
    if kind == 2:
        return _grown(source, source.randrange(1, 6))
    pattern = list(source.choice((*REAL, *CATASTROPHIC)))
    for _ in range(source.randrange(1, 4)):
        pattern[source.randrange(len(pattern))] = source.choice("().*+?{}[]|^$\\!a1\ud800\0")
    return "".join(pattern)


def _grown(source: random.Random, depth: int) -> str:
    if depth == 0:
        return source.choice(("a", ".", r"\d", r"\.", "[a-z_]", "proj", "layers", "!", "$", "^"))
    inner = [_grown(source, depth - 1) for _ in range(source.randrange(1, 4))]
    joined = source.choice(("", "|", ".*")).join(inner)
    opening = source.choice(("(", "(?:", "(?=", "(?!", "(?>"))
    repeat = source.choice(("", "", "*", "+", "?", "*?", "{0,9}", "{3}", "{2,}"))
    return f"{opening}{joined}){repeat}"


def model_names() -> list[str]:
    """Return the names of a published model's modules."""
    return sorted(module_names(parse_model_config(PUBLISHED["Qwen/Qwen3-8B"])))


@contextmanager
def neighbor() -> Iterator[list[float]]:
    """Yield a list that a thread, as the daemon's event loop, extends every 10 ms that it can run
    Python."""
    ticks: list[float] = []
    over = threading.Event()

    def run() -> None:
        while not over.wait(0.01):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield ticks
    finally:
        over.set()
        thread.join()


def check(patterns: list[str], names: list[str]) -> str:
    """Match once; return the outcome. Raises AssertionError if it cost more than its bound, held
    the interpreter's lock, or matched other names than Python does."""
    before, own = _children_s(), time.process_time()
    with neighbor() as ticks:
        began = time.monotonic()
        try:
            found: frozenset[str] | None = matching_names(FIELD, patterns, names)
            outcome = "matched"
        except ConfigError as error:
            assert error.field == FIELD and error.fix, error
            found, outcome = None, "slow" if "time or memory" in str(error) else "refused"
        elapsed_s = time.monotonic() - began
    spent_s = _children_s() - before
    assert spent_s <= CPU_S + SLACK_S, f"{patterns} took {spent_s:.1f} CPU s"
    assert time.process_time() - own <= SLACK_S, f"{patterns} cost the daemon's own process"
    assert elapsed_s < 1.0 or ticks, f"no thread ran Python during {patterns}"
    if found is not None and spent_s < CHEAP_S:
        compiled = [re.compile(pattern) for pattern in patterns]
        assert found == {name for name in names if any(each.match(name) for each in compiled)}
    return outcome


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def fuzz(seconds: float, seed: int) -> dict[str, object]:
    """Match random patterns for a time; return the number of each outcome. Raises AssertionError as
    check does."""
    source, names = random.Random(seed), model_names()
    outcomes = {"matched": 0, "slow": 0, "refused": 0}
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        patterns = [random_pattern(source) for _ in range(source.choice((1, 1, 2, 5)))]
        outcomes[check(patterns, names)] += 1
    return {"names": len(names), **outcomes}
