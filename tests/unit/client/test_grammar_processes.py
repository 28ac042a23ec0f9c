"""Grammars that take too long or too much memory, and mask processes that end or stop: each costs
at most its own request."""

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from rpc_schema.structured import StructuredOutput
from tests.support.structured import (
    EOS_TOKEN_ID,
    VOCAB_SIZE,
    allowed_tokens,
    begun,
    compiled,
    forced_schema,
    make_tokenizer,
    random_case,
    schema_case,
    settle,
    take,
)
from tests.support.waiting import wait_until
from worker_client.errors import RequestError
from worker_client.inputs.child_process import ChildProcess
from worker_client.inputs.grammar_options import read_structured_output
from worker_client.structured.grammars import GrammarLimits, Grammars

LIMITS = GrammarLimits(mask_s=0.4, compile_s=2.0, max_jump=0)
"""The kernel ends a process after so much CPU time."""
BOMB = "(a{1000}){1000}"
SLOW = {
    "at the start": {"regex": BOMB},
    "behind some tokens": {"regex": f"x{{{random.randint(3, 30)}}}{BOMB}"},
    "beside another": {"regex": f"(y|{BOMB})"},
    "to compile": {"json": {"type": "integer", "multipleOf": 62615533}},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_tokenizer(path)
    return path


@pytest.fixture
def grammars(directory):
    with closing(Grammars(directory, VOCAB_SIZE, [EOS_TOKEN_ID], LIMITS)) as made:
        yield made


class Following:
    """A request that waits for its grammar and follows it: each token is the last one of its mask,
    or a random one, unless another is given."""

    def __init__(self, grammars, grammar, rng=None, first=None):
        self.grammars, self.grammar = grammars, grammar
        self.compiled = grammars.compile(grammar)
        self.matcher = None
        self.rng, self.first = rng, first
        self.masks = []

    def step(self):
        """Take a token, if the mask is here."""
        if not self.compiled.done() or self.is_over:
            return
        if self.matcher is None:
            self.matcher = self.grammars.begin(self.grammar)
        if self.matcher.is_ready and not self.matcher.error:
            self.masks.append(allowed_tokens(self.matcher))
            self.grammars.take(self.matcher, [self._choose(self.masks[-1])])

    def _choose(self, tokens):
        if not self.masks[1:] and self.first in tokens:
            return self.first
        return self.rng.choice(tokens) if self.rng else tokens[-1]

    @property
    def error(self):
        if self.matcher is not None:
            return self.matcher.error
        return str(self.compiled.exception() or "") if self.compiled.done() else ""

    @property
    def is_over(self):
        return bool(self.error) or (self.masks and self.masks[-1] == [EOS_TOKEN_ID])


@pytest.mark.parametrize("name", SLOW)
def test_a_slow_grammar_costs_its_own_request_alone(grammars, directory, name):
    """Those beside it get their masks meanwhile, on the same and on other grammars; the driver's
    thread has nothing to do with it; and it is refused at once when it comes again."""
    slow = read_structured_output(SLOW[name])
    usual = StructuredOutput(kind="regex", text="[ab]+")
    compiled(grammars, usual)
    letter = Tokenizer.from_file(str(directory / "tokenizer.json")).token_to_id("a")
    healthy = [Following(grammars, usual) for _ in range(3)]
    culprits = [Following(grammars, slow, first=letter) for _ in range(2)]
    began_s, num_before = time.thread_time(), sum(len(each.masks) for each in healthy)

    def step():
        for each in (*healthy, *culprits):
            each.step()
        return all(each.error for each in culprits)

    settle(grammars, step)
    num_steps = sum(len(each.masks) for each in healthy) - num_before
    assert num_steps > 60, "its masks or its compilation takes as long as hundreds of theirs"
    assert (time.thread_time() - began_s) / num_steps < 0.01
    assert [each.error for each in culprits if "structured_outputs." not in each.error] == []
    again = grammars.compile(slow)
    assert again.done()
    with pytest.raises(RequestError) as refused:
        again.result(0)
    assert refused.value.field == f"structured_outputs.{slow.kind}"
    count = len(healthy[0].masks)
    settle(grammars, lambda: step() and len(healthy[0].masks) > count)
    assert not any(each.error for each in healthy)


def test_grammars_that_take_long_to_compile_leave_room_for_others(directory):
    """More of them than processes."""
    limits = replace(LIMITS, num_compilers=2, compile_s=20.0)
    with closing(Grammars(directory, VOCAB_SIZE, [EOS_TOKEN_ID], limits)) as grammars:
        long = [
            read_structured_output({"json": {"type": "integer", "multipleOf": 62615533 + index}})
            for index in range(0, 8, 2)
        ]
        futures = [grammars.compile(each) for each in long]
        compiled(grammars, StructuredOutput(kind="regex", text="[ab]+c"))
        assert not any(future.done() for future in futures)


def follow_all(grammars, cases, seed, trouble):
    """The masks of requests that run side by side, while trouble is made between steps."""
    rng = random.Random(seed)
    sources = [read_structured_output(case.options) for case in cases]
    for source in sources:
        compiled(grammars, source)
    requests = [Following(grammars, each, random.Random(rng.random())) for each in sources]
    number = itertools.count()

    def step():
        if next(number) % 10 == 9:
            trouble()
        for each in requests:
            if len(each.masks) < 40:
                each.step()
        return all(each.is_over or len(each.masks) == 40 for each in requests)

    settle(grammars, step, cpu_s=200.0)
    assert not any(each.error for each in requests), seed
    return [each.masks for each in requests]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_processes_that_are_killed_or_stopped_cost_no_request(grammars, number):
    """Also if it happens again and again, to any of them."""
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    cases = [random_case(rng) for _ in range(5)]
    cases += [schema_case(forced_schema(rng)) for _ in range(3)]
    left = [4]

    def trouble():
        if left[0]:
            left[0] -= 1
            os.kill(rng.choice(grammars.pids), number)

    expected = follow_all(grammars, cases, seed, lambda: None)
    assert follow_all(grammars, cases, seed, trouble) == expected
    assert left[0] < 4


def test_processes_that_end_before_their_first_message_cost_grammars_alone(grammars, monkeypatch):
    """As when memory is short for a while: what asks for a mask gets an error, nothing is raised
    where steps are made, and later requests with the same grammars are served."""
    start = ChildProcess.__init__

    def start_and_end(self, *args, **options):
        start(self, *args, **options)
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    running = Following(grammars, StructuredOutput(kind="regex", text="[ab]+"))
    settle(grammars, lambda: running.step() or running.masks, cpu_s=60.0)
    monkeypatch.setattr(ChildProcess, "__init__", start_and_end)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr("worker_client.structured.grammars.RETRY_S", 0.5)
    for pid in grammars.pids:
        os.kill(pid, signal.SIGKILL)
    later = Following(grammars, StructuredOutput(kind="regex", text="[bc]+"))
    settle(grammars, lambda: running.error and later.error, cpu_s=60.0)
    assert "end before they are ready" in running.error
    assert "end before they are ready" in later.error
    with pytest.raises(RequestError, match="fix: send it again after 5 s"):
        grammars.compile(StructuredOutput(kind="regex", text="[cd]+")).result(0)
    monkeypatch.undo()
    time.sleep(0.5)
    texts = ("[ab]+", "[bc]+", "[cd]+")
    served = [Following(grammars, StructuredOutput(kind="regex", text=text)) for text in texts]

    def have_masks():
        for each in served:
            each.step()
        return all(each.masks or each.error for each in served)

    settle(grammars, have_masks, cpu_s=60.0)
    assert not any(each.error for each in served)


def test_a_grammar_that_takes_too_much_memory_is_refused(directory):
    """It ends its process, twice, and no other request."""
    limits = replace(LIMITS, memory_bytes=160 << 20, compile_s=60.0)
    usual = StructuredOutput(kind="regex", text="[ab]+")
    with closing(Grammars(directory, VOCAB_SIZE, [EOS_TOKEN_ID], limits)) as grammars:
        matcher = begun(grammars, usual)
        huge = Following(grammars, read_structured_output(SLOW["to compile"]))
        settle(grammars, lambda: huge.error, cpu_s=150.0)
        assert "memory" in huge.error
        take(grammars, matcher, allowed_tokens(matcher)[-1])
        assert not matcher.error


SCRIPT = """
import sys
from pathlib import Path
from rpc_schema.structured import StructuredOutput
from worker_client.structured.grammars import GrammarLimits, Grammars
limits = GrammarLimits(compile_s={compile_s})
grammars = Grammars(Path({directory!r}), {size}, [{end}], limits)
text = '{{"type": "integer", "multipleOf": 62615533}}'
grammars.compile(StructuredOutput(kind="json", text=text))
for _ in range(20):
    grammars.proceed(0.01)
print(*grammars.pids, flush=True)
{last}
"""


@pytest.mark.parametrize("is_killed", [False, True])
def test_nothing_outlives_a_program_that_ends(directory, is_killed):
    """While a compilation runs: its process ends with the program, or, if that is killed, with the
    bound on the compilation."""
    text = SCRIPT.format(
        directory=str(directory),
        size=VOCAB_SIZE,
        end=EOS_TOKEN_ID,
        compile_s=2.0 if is_killed else 500.0,
        last="sys.stdin.read()" if is_killed else "",
    )
    program = subprocess.Popen(
        [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with program:
        pids = [int(pid) for pid in program.stdout.readline().split()]
        assert len(pids) >= 2
        if is_killed:
            program.kill()
        assert program.wait(60) == (-signal.SIGKILL if is_killed else 0)
        wait_until(lambda: not any(is_running(pid) for pid in pids), "they end", 60)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
