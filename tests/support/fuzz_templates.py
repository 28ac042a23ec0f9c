"""Random chat templates, messages and texts, most of them nasty, against ChatTemplate and
Tokenizer. Each must end with an answer or a typed error; meanwhile this process runs Python, and
plain renders and texts, beside them, are answered."""

import contextlib
import json
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from worker_client.errors import ClientConfigError, RequestError
from worker_client.inputs import tokenizer as ours
from worker_client.inputs.chat_template import ChatTemplate

MAX_STALL_S = 1.0
"""Processor time that a stall of this process may take: Python runs whatever the others do."""
MAX_GROWTH_KIB = 256 << 10
HELLO = [{"role": "user", "content": "hello"}]
ATOMS = (
    "n", "1", "0", "-1", "2.5", "'a'", "''", "'%s'", "'{:>9}'", "messages", "messages[0]", "none",
    "messages[0].content", "tools", "range(n)", "range(n ** 4)", "namespace(a=n)", "dict(a=n)",
    "cycler(1, n)", "joiner()", "lipsum", "loop", "self", "x", "true", "[n]", "{'a': n}", "(n, n)",
)  # fmt: skip
OPERATORS = ("**", "*", "~", "+", "%", "//", "/", "-", "in", "is", "==", "<", "and", "or", "if")
FILTERS = (
    "center({})", "tojson(indent={})", "replace('a', {})", "batch({})", "slice({})", "wordwrap({})",
    "indent({})", "join({})", "format({})", "truncate({})", "round({})", "list", "string", "length",
    "urlize", "pprint", "sort", "unique", "map('string')", "select", "groupby('a')", "xmlattr",
    "int", "sum", "reverse", "first", "escape", "striptags", "title", "attr('__class__')",
    "map(attribute={})", "filesizeformat", "dictsort", "items", "random",
)  # fmt: skip
CALLS = (
    "raise_exception({})", "strftime_now({})", "lipsum(n={})", "'%{}d'.format({})", "f({})",
    "('a' * {}).split('a')", "'a'.join(range({}))", "'a'.ljust({})", "'a'.encode({})",
    "'a'.__class__.__mro__", "''.format_map({})", "messages.append({})", "range({})",
)  # fmt: skip
STATEMENTS = (
    "{{% for x in {0} %}}{1}{{% endfor %}}",
    "{{% for x in {0} recursive %}}{1}{{{{ loop({0}) }}}}{{% endfor %}}",
    "{{% if {0} %}}{1}{{% else %}}{1}{{% endif %}}",
    "{{% set x = {0} %}}{1}",
    "{{% set x %}}{1}{{% endset %}}{{{{ x * n ** 3 }}}}",
    "{{% macro f(x) %}}{1}{{{{ f({0}) }}}}{{% endmacro %}}{{{{ f(n) }}}}",
    "{{% set s = namespace(t='ab') %}}{{% for i in range(n * 9) %}}"
    "{{% set s.t = s.t ~ s.t %}}{{% endfor %}}{1}",
    "{{% filter {0} %}}{1}{{% endfilter %}}",
    "{{% call {0} %}}{1}{{% endcall %}}",
    "{{% generation %}}{1}{{% endgeneration %}}{{{{ {0} }}}}",
)
PIECES = (
    "a",
    " ",
    "\n",
    "é",
    "🙂",
    "\u0301",
    "\0",
    "\ud800",
    "<eos>",
    "1",
    "'",
    "ẞ",
    "\u202e",
    "aaac",
)
PATTERNS = (
    "(a+)+b",
    "(a|a)*b",
    r"\s+(?!\S)|\s+",
    "(?:a?){20}a{20}",
    "(.*)*x",
    r"\p{L}+",
    "a*a*a*b",
)


def expression(source: random.Random, depth: int) -> str:
    """Return a random expression of jinja2."""
    if depth <= 0 or source.random() < 0.2:
        return source.choice(ATOMS)
    inner = expression(source, depth - 1)
    kind = source.randrange(5)
    if kind == 0:
        return f"({inner} {source.choice(OPERATORS)} {expression(source, depth - 1)})"
    if kind == 1:
        return f"({inner} | {source.choice(FILTERS).replace('{}', expression(source, depth - 2))})"
    if kind == 2:
        return source.choice(CALLS).replace("{}", inner)
    if kind == 3:
        return f"({inner} {source.choice(('**', '*'))} n ** {source.randrange(12)})"
    return f"{inner}[{expression(source, depth - 1)}]"


def template(source: random.Random, depth: int) -> str:
    """Return a random template; some are cut, so that they are none."""
    if depth <= 0:
        return "{{ " + expression(source, 4) + " }}"
    body = "".join(template(source, depth - 1) for _ in range(source.randint(1, 2)))
    whole = source.choice(STATEMENTS).format(expression(source, 3), body)
    return whole[: source.randrange(len(whole))] if source.random() < 0.05 else whole


def text(source: random.Random) -> str:
    """Return a random text; some are long runs of one piece."""
    if source.random() < 0.3:
        return source.choice(PIECES) * int(10 ** source.uniform(0, 6.7))
    return "".join(source.choices(PIECES, k=int(10 ** source.uniform(0, 4))))


def messages(source: random.Random) -> list[dict[str, object]]:
    """Return random messages; some are malformed."""
    kinds: tuple[Callable[[], object], ...] = (
        lambda: text(source),
        lambda: None,
        lambda: source.randrange(10**20),
        lambda: [{"type": "text", "text": text(source)}],
        lambda: json.loads("[" * 500 + "]" * 500),
    )
    roles = ("user", "assistant", "system", "tool", "judge", 5)
    return [
        {"role": source.choice(roles), "content": source.choice(kinds)()}
        for _ in range(source.randrange(4))
    ]


def tokenizer_file(source: random.Random) -> str:
    """Return a random tokenizer.json of bytes; some have patterns and rules that take any time."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    made.decoder = decoders.ByteLevel()
    split = pre_tokenizers.Split(Regex(source.choice(PATTERNS)), "isolated")
    levels = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer = source.choice((split, levels, pre_tokenizers.Sequence([split, levels])))
    if source.random() < 0.3:
        grown = [normalizers.Replace("a", "a" * source.randint(1, 3))] * source.randint(1, 30)
        made.normalizer = normalizers.Sequence(grown)
    if source.random() < 0.3:
        regex = Regex(source.choice(PATTERNS))
        made.decoder = source.choice(
            (decoders.Replace(regex, "a"), decoders.Replace("a", "aa" * 9))
        )
    written: str = made.to_str()
    return written[: source.randrange(len(written))] if source.random() < 0.1 else written


class Pulse:
    """Watches this process: whether Python runs, and whether plain work beside is answered."""

    def __init__(self, plain: Callable[[], object]) -> None:
        """plain: raises if what it asks for is not answered."""
        self._plain = plain
        self.num_plain = 0
        self.worst_stall_s = 0.0
        self.error: BaseException | None = None
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._beat), threading.Thread(target=self._work)]

    def __enter__(self) -> "Pulse":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def _beat(self) -> None:
        """Measure stalls by this process's processor time: who holds the GIL uses it."""
        while not self._ends.is_set():
            before = time.process_time()
            self._ends.wait(0.005)
            self.worst_stall_s = max(self.worst_stall_s, time.process_time() - before)

    def _work(self) -> None:
        while not self._ends.wait(0.02) and self.error is None:
            try:
                self._plain()
                self.num_plain += 1
            except BaseException as error:  # kept for the summary's reader
                self.error = error


def fuzz(seconds: float, seed: int) -> dict[str, object]:
    """Fuzz templates, then texts. Return a summary; raises AssertionError if a rule is broken."""
    source, found = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        path = Path(directory, "plain.json")
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        made = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.save(str(path))
        plain = stack.enter_context(contextlib.closing(ours.Tokenizer(path)))
        chat = stack.enter_context(contextlib.closing(ChatTemplate("{{ messages[0].content }}")))

        def beside() -> None:
            assert len(plain.encode(chat.render(HELLO))) == 5

        began, before = time.monotonic(), _rss_kib()
        with Pulse(beside) as pulse:
            while time.monotonic() - began < seconds:
                for outcome in _round(source, Path(directory)):
                    found[outcome] += 1
        if pulse.error is not None:
            raise AssertionError("plain work failed") from pulse.error
    growth = _rss_kib() - before
    summary = {
        **dict(sorted(found.items())),
        "plain": pulse.num_plain,
        "worst_stall_s": round(pulse.worst_stall_s, 3),
        "growth_mib": growth >> 10,
        "seconds": round(time.monotonic() - began, 1),
    }
    assert pulse.num_plain > 0, summary
    assert pulse.worst_stall_s < MAX_STALL_S, summary
    assert growth < MAX_GROWTH_KIB, summary
    return summary


def _round(source: random.Random, directory: Path) -> Iterator[str]:
    """Yield the outcomes of some renders by a random template, and of some texts."""
    written = template(source, source.randrange(4))
    try:
        with contextlib.closing(ChatTemplate(written)) as chat:
            for _ in range(3):
                given, variables = messages(source), {"n": source.choice((1, 3, 10))}
                yield "render " + _outcome(lambda: chat.render(given, variables=variables))  # noqa: B023
    except ClientConfigError as error:
        assert error.field == "chat_template", (written, error)
        yield "template refused"
    path = directory / "tokenizer.json"
    path.write_text(tokenizer_file(source))
    try:
        with contextlib.closing(ours.Tokenizer(path)) as tokenizer:
            for _ in range(3):
                given_text = text(source)
                yield "text " + _outcome(lambda: tokenizer.encode(given_text))  # noqa: B023
            yield "decode " + _outcome(lambda: tokenizer.decode(source.choices(range(300), k=500)))
    except ClientConfigError as error:
        assert error.field == "model", error
        yield "tokenizer refused"


def _outcome(work: Callable[[], object]) -> str:
    try:
        work()
    except RequestError as error:
        assert error.field.startswith(("messages", "prompt", "variables")), error
        assert len(str(error)) < 3000, len(str(error))
        return "refused"
    return "done"


def _rss_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
