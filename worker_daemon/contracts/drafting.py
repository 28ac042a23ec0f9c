"""The interface of looking drafts up in tokens on the device, which kernels and plain torch
implement.

Shapes: S request rows, W tokens of a row's text, Q sequences that sampled, K drafts of each.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TextTable:
    """The tokens of the request rows and of the spare row."""

    tokens: Tensor
    """int32 [S + 1, W]"""
    lengths: Tensor
    """int32 [S + 1]: tokens of each row that count."""
    scratch: Tensor
    """int64 [2, S + 1]: zeros between the calls that use it."""


class Matching(NamedTuple):
    """Bounds of a search for a text's last tokens in its earlier ones."""

    longest: int
    """Tokens that are compared, 1 to 32."""
    shortest: int
    """Fewest tokens that must be equal, 1 to longest."""
    num_drafts: int
    """K"""


class TextKernels(Protocol):
    """Operations on the rows' texts. They never wait for the device; all implementations give the
    same result. rows are int32 and name each row at most once."""

    def place(self, table: TextTable, rows: Tensor, bounds: Tensor, tokens: Tensor) -> None:
        """Replace the texts of rows [B]: row b gets tokens[bounds[b] : bounds[b + 1]]. bounds int32
        [B + 1], tokens int32; at most W for each row."""

    def append(self, table: TextTable, rows: Tensor, token_ids: Tensor, counts: Tensor) -> None:
        """Append the first counts (int32 [Q]) of token_ids (int64 [Q, 1 + K]) to the texts of rows
        [Q]; nothing if the first one is negative. Tokens that find no room are dropped."""

    def continue_texts(self, table: TextTable, rows: Tensor, matching: Matching) -> Tensor:
        """Return int64 [Q, K]: the tokens that followed the last ones of each row's text where
        these stood before; 0 if they did not.

        The place with the longest match counts, up to `longest` tokens, and among equals the last
        one. After the text's end, the tokens that followed are repeated.
        """
