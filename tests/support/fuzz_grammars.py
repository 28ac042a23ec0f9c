"""Nasty random grammars beside healthy requests: nested repeats, big alternatives, deep schemas,
cycles of references, multipleOf, huge bounds. `fuzz` follows them all through one Grammars, kills a
process now and then, and checks that no healthy request stalls or fails, and that each nasty one
ends or goes on."""

import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final

from rpc_schema.structured import StructuredOutput
from tests.support.structured import (
    EOS_TOKEN_ID,
    VOCAB_SIZE,
    allowed_tokens,
    compiled,
    make_tokenizer,
)
from worker_client.errors import RequestError
from worker_client.inputs.grammar_options import read_structured_output
from worker_client.structured.grammars import GrammarLimits, Grammars

MAX_STALL_S: Final = 1.0
"""On a host with as many processors as runnable threads; longer in proportion to its load."""
MAX_KILLED_S: Final = 5.0
"""The same for those near a kill: another process reads the tokenizer first, or two."""
NEAR_S: Final = 2.0
"""Time after a kill in which it may be the cause of a stall."""
NUM_NASTY: Final = 6
MAX_TOKENS: Final = 80
LIMITS: Final = GrammarLimits(mask_s=0.5, compile_s=3.0, memory_bytes=1 << 30)
KILL_SHARE: Final = 0.0005


def nasty_options(rng: random.Random) -> dict[str, Any]:
    """Return a grammar that may take long, much memory, or be refused."""
    return rng.choice((_repeats, _alternatives, _deep, _cycle, _multiple, _bounds, _ebnf))(rng)


def _repeats(rng: random.Random) -> dict[str, Any]:
    text = rng.choice(("a", "[ab]", "(a|ab)", "x?y"))
    for _ in range(rng.randint(1, 3)):
        text = f"({text}){{{rng.choice((1, 10, 300, 1000))}}}"
    before = f"x{{{rng.randint(0, 60)}}}" if rng.random() < 0.5 else ""
    return {"regex": f"{before}({text}|y)" if rng.random() < 0.5 else before + text}


def _alternatives(rng: random.Random) -> dict[str, Any]:
    words = ["".join(rng.choices("abcé", k=rng.randint(1, 9))) for _ in range(rng.randint(1, 4000))]
    return {"choice": words}


def _deep(rng: random.Random) -> dict[str, Any]:
    depth = rng.choice((3, 50, 900))
    return {"json": '{"type":"array","items":' * depth + "{}" + "}" * depth}


def _cycle(rng: random.Random) -> dict[str, Any]:
    names = [f"d{number}" for number in range(rng.randint(1, 30))]
    definitions = {
        name: {"anyOf": [{"$ref": f"#/$defs/{rng.choice(names)}"}, {"type": "integer"}]}
        for name in names
    }
    return {"json": {"$ref": "#/$defs/d0", "$defs": definitions}}


def _multiple(rng: random.Random) -> dict[str, Any]:
    return {"json": {"type": "integer", "multipleOf": rng.randint(2, 10 ** rng.randint(1, 9))}}


def _bounds(rng: random.Random) -> dict[str, Any]:
    most = 10 ** rng.randint(1, 9)
    return {
        "json": rng.choice(
            (
                {"type": "string", "minLength": most // 2, "maxLength": most},
                {"type": "array", "items": {"type": "boolean"}, "minItems": most},
                {"type": "number", "minimum": -most, "maximum": most / 7},
                {"type": "string", "pattern": f"^(a|b){{{most}}}$"},
            )
        )
    }


def _ebnf(rng: random.Random) -> dict[str, Any]:
    parts = [f'("{number}" | [a-z] | "b" root?)' for number in range(rng.randint(1, 800))]
    return {"grammar": "root ::= " + rng.choice((" ", " | ")).join(parts)}


class _Request:
    """Follows a grammar with random tokens, from its compilation on."""

    def __init__(self, grammars: Grammars, grammar: StructuredOutput, rng: random.Random) -> None:
        self._grammars, self._grammar, self._rng = grammars, grammar, rng
        self._compiled = grammars.compile(grammar)
        self._matcher: Any = None
        self.num_tokens = 0
        self.since_s = time.monotonic()
        """When it got its last token."""

    @property
    def waited_s(self) -> float:
        """Time that it has been waiting for a token."""
        return time.monotonic() - self.since_s

    def step(self) -> None:
        """Take a token if there is a mask."""
        if self.outcome or not self._compiled.done():
            return
        if self._matcher is None:
            self._matcher = self._grammars.begin(self._grammar)
        if self._matcher.is_ready and not self._matcher.error:
            token = self._rng.choice(allowed_tokens(self._matcher))
            self._grammars.take(self._matcher, [token])
            self.num_tokens += 1
            self.since_s = time.monotonic()
            if token == EOS_TOKEN_ID:
                self.num_tokens = MAX_TOKENS

    @property
    def outcome(self) -> str:
        """How it has ended; empty while it goes on."""
        if self._compiled.done() and self._compiled.exception() is not None:
            assert isinstance(self._compiled.exception(), RequestError)
            return "refused"
        if self._matcher is not None and self._matcher.error:
            return "failed"
        return "whole" if self.num_tokens >= MAX_TOKENS else ""

    @property
    def error(self) -> str:
        """Why it has failed."""
        return str(self._matcher.error if self._matcher else self._compiled.exception())

    def end(self) -> None:
        """Give its matcher up."""
        if self._matcher is not None:
            self._grammars.end(self._matcher)


def fuzz(seconds: float, seed: int) -> dict[str, object]:
    """Run for so long; return counts.

    Raises AssertionError if a healthy request fails or stalls for more than MAX_STALL_S, or
    MAX_KILLED_S near a kill."""
    rng, outcomes = random.Random(seed), Counter[str]()
    longest_s, num_healthy, num_kills, killed_s = {False: 0.0, True: 0.0}, 0, 0, 0.0
    with tempfile.TemporaryDirectory(prefix="fz-") as directory:
        make_tokenizer(Path(directory))
        with closing(Grammars(Path(directory), VOCAB_SIZE, [EOS_TOKEN_ID], LIMITS)) as grammars:
            usual = StructuredOutput(kind="regex", text="([ab]{3}-)+")
            compiled(grammars, usual)
            healthy = [_Request(grammars, usual, rng) for _ in range(3)]
            nasty: list[_Request] = []
            ends = time.monotonic() + seconds
            while time.monotonic() < ends:
                while len(nasty) < NUM_NASTY:
                    with suppress(RequestError):  # too long
                        grammar = read_structured_output(nasty_options(rng))
                        nasty.append(_Request(grammars, grammar, rng))
                if rng.random() < KILL_SHARE:
                    os.kill(rng.choice(grammars.pids), signal.SIGKILL)
                    num_kills += 1
                    killed_s = time.monotonic()
                load = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
                for request in healthy:
                    is_near = request.since_s < killed_s + NEAR_S
                    stall_s = longest_s[is_near] = max(longest_s[is_near], request.waited_s)
                    most_s = load * (MAX_KILLED_S if is_near else MAX_STALL_S)
                    assert stall_s < most_s, f"a healthy request stalled for {stall_s:.2f} s"
                for request in (*healthy, *nasty):
                    request.step()
                grammars.proceed(0.002)
                for place, request in enumerate(healthy):
                    assert request.outcome in ("", "whole"), (
                        f"a healthy request failed: {request.error}"
                    )
                    if request.outcome:
                        request.end()
                        num_healthy += 1
                        healthy[place] = _Request(grammars, usual, rng)
                for request in [each for each in nasty if each.outcome]:
                    outcomes[request.outcome] += 1
                    request.end()
                    nasty.remove(request)
    return {
        "healthy": num_healthy,
        "nasty": dict(outcomes),
        "kills": num_kills,
        "longest_stall_s": round(longest_s[False], 3),
        "longest_stall_near_a_kill_s": round(longest_s[True], 3),
    }


def main() -> None:
    """Run it for a minute."""
    print(json.dumps(fuzz(60.0, random.SystemRandom().randrange(2**31))))


if __name__ == "__main__":
    main()
