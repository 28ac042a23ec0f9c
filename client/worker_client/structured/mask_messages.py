"""Messages between a driver and its mask processes, and the memory that they share.

A driver sends a batch of operations, and no other until the process has answered them all. The
process answers in one or several messages, of which the last one says so. Masks go through shared
memory: a header, then a row for each matcher.
"""

from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

HEADER_BYTES: Final = 64
MAX_ROWS: Final = 8192
"""Matchers of a process. Memory is taken by the rows that are used."""
NO_TEXT: Final = "no text goes on from there: the grammar allows none, or requires itself"
"""Error of a matcher that allows nothing."""
IDLE: Final = 0
"""Subject of a process that works on nothing."""


class Setup(msgspec.Struct, array_like=True, frozen=True):
    """The first message: what the masks are of, and the bounds on them (GrammarLimits)."""

    model: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    memory_fd: int
    """Shared memory, which the process gives its size."""
    max_grammar_size: int
    max_lexer_states: int
    initial_lexer_fuel: int
    step_lexer_fuel: int
    step_max_items: int
    max_jump: int
    compile_s: float
    mask_s: float


class Ready(msgspec.Struct, array_like=True, frozen=True):
    """The answer to Setup."""

    num_words: int
    """int32 words of a row: the tokenizer's, which may have more tokens than the model."""
    error: str
    """Why there can be no grammars; empty if there can."""


class Load(msgspec.Struct, array_like=True, frozen=True, tag=0):
    """Compile a grammar. No answer: `Begin` has the error."""

    key: int
    """Positive, of this grammar alone."""
    kind: str
    text: str


class Forget(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """Drop a compiled grammar; its matchers go on. No answer."""

    key: int


class Begin(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """Make a matcher, and let it take tokens."""

    row: int
    key: int
    tokens: list[int]
    is_asked: bool
    """Answer with the mask after them; otherwise nothing is answered."""


class Take(msgspec.Struct, array_like=True, frozen=True, tag=3):
    """Let a matcher take tokens, and answer with the mask after them."""

    row: int
    tokens: list[int]


class Fork(msgspec.Struct, array_like=True, frozen=True, tag=5):
    """Make a matcher that goes on from where another one's mask is, let it take tokens, and answer
    with the mask after them."""

    row: int
    source: int
    """Row of the other one."""
    tokens: list[int]


class End(msgspec.Struct, array_like=True, frozen=True, tag=4):
    """Drop a matcher. No answer."""

    row: int


Operation = Load | Forget | Begin | Take | Fork | End


class Masked(msgspec.Struct, array_like=True, frozen=True):
    """A mask is in its row."""

    row: int
    forced: list[int]
    """Tokens that the matcher has taken beyond those it was given, since each was the only one that
    its mask allowed. The mask is the one after them."""
    error: str
    """Why there is no mask; empty if there is one. The matcher has failed then."""


class Answers(msgspec.Struct, array_like=True, frozen=True):
    """Masks that are done."""

    masked: list[Masked]
    is_last: bool
    """The batch is done."""
    compile_s: float = 0.0
    """CPU time that compiling took in this batch, and the first masks of its grammars."""


class Header:
    """Names what a process works on, at the start of the shared memory. The process writes it
    before each piece of work; the driver reads it when it waits too long, or when the process has
    ended."""

    def __init__(self, memory: memoryview) -> None:
        self._words: NDArray[np.int64] = np.frombuffer(memory, np.int64, HEADER_BYTES // 8)

    def write(self, subject: int, cpu_ns: int) -> None:
        """Note the start of a piece of work. subject: a matcher's row + 1, or a grammar's key,
        negated."""
        self._words[1] = cpu_ns
        self._words[0] = subject

    @property
    def subject(self) -> int:
        """Subject of its work: IDLE, a matcher's row + 1, or a grammar's key, negated."""
        return int(self._words[0])

    @property
    def cpu_ns(self) -> int:
        """The process's CPU time when that began."""
        return int(self._words[1])


def rows_of(memory: memoryview, num_words: int) -> NDArray[np.int32]:
    """Return the masks, int32 [MAX_ROWS, num_words]."""
    words = np.frombuffer(memory, np.int32, MAX_ROWS * num_words, HEADER_BYTES)
    return words.reshape(MAX_ROWS, num_words)


def memory_bytes(num_words: int) -> int:
    """Return the size of the shared memory."""
    return HEADER_BYTES + MAX_ROWS * num_words * 4
