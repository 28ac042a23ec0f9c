"""Records which versions of the weights have sampled the tokens of rows that were kept while the
weights changed. A driver that adopts them receives the record."""

from collections.abc import Iterable
from typing import NamedTuple

from rpc_schema.adoption import MAX_EARLIER_VERSIONS, VersionSpan


class RowEnd(NamedTuple):
    """A place in a live row: where it was when the weights changed, or to which its KV was computed
    again."""

    slot: int
    generation: int
    end: int
    """Position behind its last token."""


class TokenVersions:
    """Owned by the model runner, used on the step thread. A row that is admitted again begins
    anew."""

    def __init__(self, most: int = MAX_EARLIER_VERSIONS) -> None:
        """most: versions of a row that are told apart; of more, the oldest become one."""
        self._most = most
        self._rows: dict[int, tuple[int, tuple[VersionSpan, ...]]] = {}
        """Generation and spans of each row that was kept, by slot."""

    def end(self, version: int, rows: Iterable[RowEnd]) -> None:
        """Record that weights of this version have sampled the tokens of all live rows up to here,
        but for those of earlier versions."""
        kept = {}
        for slot, generation, end in rows:
            spans = (*self.of(slot, generation), VersionSpan(version=version, end=end))
            if len(spans) > self._most:
                spans = (VersionSpan(version=None, end=spans[1].end), *spans[2:])
            kept[slot] = generation, spans
        self._rows = kept

    def of(self, slot: int, generation: int) -> tuple[VersionSpan, ...]:
        """Return the versions before the present one that have sampled a row's tokens; none if the
        row was admitted since they were replaced."""
        found = self._rows.get(slot)
        return found[1] if found is not None and found[0] == generation else ()

    def forget(self) -> None:
        """Forget all rows."""
        self._rows = {}
