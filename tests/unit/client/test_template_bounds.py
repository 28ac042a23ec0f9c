"""Chat templates and messages that take any time, memory or output: each is refused within its
bounds, while other renders go on. Processes end with their parent."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.support.exhaustive import exhaustively
from tests.support.fuzz_templates import fuzz
from tests.support.waiting import wait_until
from worker_client.errors import ClientConfigError, RequestError
from worker_client.inputs.chat_template import ChatTemplate, TemplateBounds

SEED = random.randrange(10**6)
HELLO = [{"role": "user", "content": "hello"}]
GUARD = "{% if messages[0].content == 'hello' %}hello{% else %}BAD{% endif %}"
"""A template that does BAD for another content: it compiles, and serves other messages."""

BAD = {
    "power": "{{ n ** (n ** 8) }}",
    "filler": "{{ lipsum(n=200000) }}",
    "loops": "{% for a in range(n**4) %}{% for b in range(n**4) %}{% endfor %}{% endfor %}",
    "output": "{% for a in range(n**4) %}{% for b in range(n**4) %}xxx{% endfor %}{% endfor %}",
    "format": "{{ '%1000000000d' | format(n) }}",
    "own format": "{{ '{:1000000000}'.format(n) }}",
    "repeat": "{{ 'a' * n ** 10 }}",
    "list": "{{ [n] * n ** 10 }}",
    "center": "{{ 'a' | center(n ** 9) }}",
    "indent": "{{ 'a\n' * 1000 | indent(n ** 7) }}",
    "json": "{{ {'a': [messages] * 1000} | tojson(indent=n ** 7) }}",
    "time": "{{ strftime_now('%Y' * n ** 7) }}",
    "range": "{{ range(n ** 9) | list }}",
    "recursion": "{% macro f(x) %}{{ f(x + 1) }}{% endmacro %}{{ f(n) }}",
    "doubling": "{% set s = namespace(t='ab') %}{% for i in range(n * 9) %}"
    "{% set s.t = s.t ~ s.t %}{% endfor %}{{ s.t }}",
    "replace": "{{ ('a' * n ** 6) | replace('a', 'a' * n ** 4) }}",
    "batches": "{{ range(n ** 4) | batch(n ** 10, fill_with='x') | list }}",
    "slices": "{{ range(n ** 4) | slice(n ** 10) | list }}",
    "wrap": "{{ ('a b' * n ** 7) | wordwrap(1) }}",
    "links": "{{ ('www.a(' * n ** 6) | urlize }}",
    "refusal": "{{ raise_exception('a' * n ** 8) }}",
}


@contextlib.contextmanager
def opened(source, bounds=TemplateBounds()):  # noqa: B008
    with contextlib.closing(ChatTemplate(source, bounds=bounds)) as template:
        yield template


def guarded(bad):
    return GUARD.replace("BAD", bad)


def refused(call):
    with pytest.raises(RequestError) as error:
        call()
    assert error.value.field == "messages"
    assert "fix:" in str(error.value)
    assert len(str(error.value)) < 2000
    return str(error.value)


def messages(content="x"):
    return [{"role": "user", "content": content}]


ALIKE = ("own format", "list", "center", "json", "time", "replace", "slices", "batches", "wrap")
"""Each is refused as another one of BAD is: for its time, its memory or the length of its text."""


@pytest.mark.parametrize("name", [exhaustively(name) if name in ALIKE else name for name in BAD])
def test_what_takes_too_much_is_refused_and_others_are_rendered(name):
    with opened(guarded(BAD[name]), TemplateBounds(render_s=0.3)) as template:
        began = time.process_time()
        refused(lambda: template.render(messages(), variables={"n": 10}))
        assert time.process_time() - began < 0.5, "it was rendered here"
        assert template.render(HELLO) == "hello"


@pytest.mark.parametrize("name", ["power", *map(exhaustively, ["repeat", "format"]), "doubling"])
def test_a_checkpoint_whose_template_folds_to_too_much_is_refused(name):
    """jinja2 computes constant expressions when it compiles them."""
    source = BAD[name].replace("n ", "10 ").replace("(n)", "(10)")
    began = time.process_time()
    try:
        with opened(source) as template:
            refused(lambda: template.render(messages()))
    except ClientConfigError as error:
        assert error.field in ("chat_template", "messages")
    assert time.process_time() - began < 0.5


def test_a_template_that_nests_too_deeply_or_is_too_long_is_refused():
    for source in ("{{ " + "(" * 10**5 + "1" + ")" * 10**5 + " }}", "x" * (17 << 20), "\ud800"):
        with pytest.raises(ClientConfigError) as error:
            ChatTemplate(source)
        assert error.value.field == "chat_template"
        assert len(str(error.value)) < 2000


def test_large_messages_are_refused_before_they_cost():
    with opened("{{ messages | length }}") as template:
        assert template.render(messages("x" * (8 << 20))) == "1"
        assert "bytes" in refused(lambda: template.render(messages("x" * (17 << 20))))
    with opened("{{ messages[0].content }}") as template:
        text = "é" * (1 << 20)
        assert template.render(messages(text)) == text
        assert "output" in refused(lambda: template.render(messages("é" * (3 << 20))))


def test_bounds_are_settings():
    loops = "{% for a in range(1000) %}{% for b in range(3000) %}{% endfor %}{% endfor %}done"
    with opened(loops, TemplateBounds(render_s=60.0)) as template:
        assert template.render(HELLO) == "done"
    with opened(loops, TemplateBounds(render_s=0.01)) as template:
        assert "takes too long" in refused(lambda: template.render(HELLO))
    with opened("{{ 'a' * 1000 }}", TemplateBounds(max_output_bytes=999)) as template:
        assert "output" in refused(lambda: template.render(HELLO))
    with opened("{{ ('a' * n) | length }}", TemplateBounds(memory_bytes=64 << 20)) as template:
        n = 100 << 20
        assert "memory" in refused(lambda: template.render(HELLO, variables={"n": n}))
        assert template.render(HELLO, variables={"n": 1 << 20}) == str(1 << 20)


def test_stuck_renders_delay_no_other():
    """Each of the others ends while the bad ones go on."""
    bounds = TemplateBounds(render_s=2.0)
    with opened(guarded(BAD["loops"]), bounds) as template:
        errors = []

        def bad():
            errors.append(refused(lambda: template.render(messages(), variables={"n": 10})))

        threads = [threading.Thread(target=bad) for _ in range(3)]
        for thread in threads:
            thread.start()
        num_done = 0
        while not errors:
            assert template.render(HELLO) == "hello"
            num_done += 1
        for thread in threads:
            thread.join()
        assert len(errors) == 3
        assert all("takes too long" in error for error in errors)
        assert num_done > 20


def test_more_stuck_renders_than_processes_all_end():
    with opened(guarded(BAD["power"]), TemplateBounds(render_s=0.1)) as template:
        errors = []
        n = {"n": 10}
        bad = lambda: errors.append(refused(lambda: template.render(messages(), variables=n)))  # noqa: E731
        threads = [threading.Thread(target=bad) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(errors) == 20
        assert template.render(HELLO) == "hello"


@pytest.mark.parametrize("which", ["idle", "all", "busy"])
def test_a_killed_process_costs_no_render(which):
    source = "{% for a in range(n) %}{% for b in range(1000) %}{% endfor %}{% endfor %}done"
    with opened(source, TemplateBounds(render_s=60.0)) as template:
        assert template.render(HELLO, variables={"n": 1}) == "done"
        if which == "busy":
            found = []
            work = lambda: found.append(template.render(HELLO, variables={"n": 3000}))  # noqa: E731
            thread = threading.Thread(target=work)
            thread.start()
            wait_until(lambda: template._pool._busy, "it renders", 60)
            (child,) = template._pool._busy
            os.kill(child.pid, signal.SIGKILL)
            thread.join()
            assert found == ["done"]
        for pid in template._pool.pids[: None if which == "all" else 1]:
            os.kill(pid, signal.SIGKILL)
        assert template.render(HELLO, variables={"n": 1}) == "done"


def test_a_render_that_always_ends_its_process_is_refused(monkeypatch):
    """Whatever is the cause: here, each process is killed while it renders."""
    with opened(guarded(BAD["loops"]), TemplateBounds(render_s=60.0)) as template:
        outcome = []
        bad = lambda: template.render(messages(), variables={"n": 10})  # noqa: E731
        thread = threading.Thread(target=lambda: outcome.append(refused(bad)))
        thread.start()
        killed = set()
        while thread.is_alive():
            for child in list(template._pool._busy):
                if child.pid not in killed:
                    killed.add(child.pid)
                    child.kill()
            time.sleep(0.01)
        assert "ended its process twice" in outcome[0]
        assert template.render(HELLO) == "hello"


@pytest.mark.parametrize("number", [signal.SIGPROF, signal.SIGALRM])
def test_a_timer_of_the_kernel_ends_a_render_for_good(number):
    """Whichever comes first, the process's timers or the parent's clock."""
    with opened(guarded(BAD["loops"]), TemplateBounds(render_s=600.0)) as template:
        outcome = []
        bad = lambda: template.render(messages(), variables={"n": 10})  # noqa: E731
        thread = threading.Thread(target=lambda: outcome.append(refused(bad)))
        thread.start()
        wait_until(lambda: template._pool._busy, "it is rendered")
        (child,) = template._pool._busy
        os.kill(child.pid, number)
        thread.join()
        assert "takes too long" in outcome[0]


def test_a_stopped_process_is_given_up():
    with opened(guarded(BAD["loops"]), TemplateBounds(render_s=0.1)) as template:
        assert template.render(HELLO) == "hello"
        for pid in template._pool.pids:
            os.kill(pid, signal.SIGSTOP)
        assert "takes too long" in refused(lambda: template.render(HELLO))


def test_close_ends_what_is_rendered():
    with opened(guarded(BAD["loops"]), TemplateBounds(render_s=600.0)) as template:
        outcome = []
        bad = lambda: template.render(messages(), variables={"n": 10})  # noqa: E731
        thread = threading.Thread(target=lambda: outcome.append(refused(bad)))
        thread.start()
        wait_until(lambda: template._pool._busy, "it renders", 60)
        pids = template._pool.pids
        template.close()
        thread.join()
        assert "closed" in outcome[0]
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        refused(lambda: template.render(HELLO))


def test_seconds_of_the_fuzzer():
    found = fuzz(4.0, SEED)
    assert found["plain"] > 0, (SEED, found)


@pytest.mark.parametrize("value", [0, -1, 11 << 20])
def test_wrong_bounds_are_refused(value):
    with pytest.raises(ClientConfigError) as error:
        ChatTemplate("x", bounds=TemplateBounds(max_output_bytes=value))
    assert error.value.field == "max_output_bytes"


PARENT = """
import sys, threading
from worker_client.inputs.chat_template import ChatTemplate, TemplateBounds
template = ChatTemplate(sys.argv[1], bounds=TemplateBounds(render_s=1.0))
bad = lambda: template.render([{"role": "user", "content": "x"}], variables={"n": 10})
thread = threading.Thread(target=bad, daemon=sys.argv[2] == "exit")
thread.start()
while not template._pool._busy:
    pass
print(*template._pool.pids, flush=True)
if sys.argv[2] == "kill":
    sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["kill", "exit"])
def test_nothing_is_left_behind_by_a_parent(how):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, guarded(BAD["power"]), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
    )
    with parent:
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert pids
        if how == "kill":
            parent.kill()
        parent.wait(60)
        if how == "exit":
            assert parent.returncode == 0
    wait_until(lambda: not any(is_running(pid) for pid in pids), "the processes have ended", 60)


def is_running(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False
