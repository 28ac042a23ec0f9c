"""The requests of a step, with what follows from them alone: made once for as long as a batch goes
on, and looked up from then on."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final

from worker_client.vllm.requests import wire_id

MAX_KEPT: Final = 16
"""Batches that are kept: more than a pipeline has micro-batches."""


class RequestBatch:
    """The requests of a step, in vLLM's order: the rows of its result."""

    __slots__ = ("_in_rows", "_result_ids", "listed", "req_ids", "row_of", "wire_ids")

    def __init__(self, req_ids: Iterable[str]) -> None:
        """req_ids: vLLM's."""
        self.req_ids = tuple(req_ids)
        self.listed = list(self.req_ids)
        """The same, as vLLM takes them; nobody changes it."""
        self.wire_ids = tuple(map(wire_id, self.req_ids))
        self.row_of: Mapping[str, int] = {name: row for row, name in enumerate(self.req_ids)}
        self._result_ids: Sequence[str] | None = None
        self._in_rows: Callable[[Sequence[int]], Any] = tuple

    def tokens_in_rows(
        self, result_ids: Sequence[str], token_ids: Sequence[int]
    ) -> Sequence[int] | None:
        """Return a result's tokens by ascending row; None if it does not have one for each request,
        or if the batch has just begun or ended. result_ids: its requests, on the wire; batches
        that go on have a tuple, the same in each step."""
        if result_ids is not self._result_ids and not self._learn_order(result_ids):
            return None
        in_rows: Sequence[int] = self._in_rows(token_ids)
        return in_rows

    def _learn_order(self, result_ids: Sequence[str]) -> bool:
        if type(result_ids) is not tuple or len(result_ids) != len(self.wire_ids):
            return False
        place_of = {each: place for place, each in enumerate(result_ids)}
        places = [place_of[each] for each in self.wire_ids if each in place_of]
        if len(places) < len(result_ids):
            return False
        is_in_order = result_ids == self.wire_ids
        self._in_rows = tuple if is_in_order else itemgetter(*places)
        self._result_ids = result_ids
        return True


class RequestBatches:
    """The batches of the last steps."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, ...], RequestBatch] = {}
        self._last = RequestBatch(())

    def find(self, req_ids: Iterable[str]) -> RequestBatch:
        """Return the batch of these requests, vLLM's ids in this order: the same object as of an
        earlier step, if it is kept."""
        names = tuple(req_ids)
        if names != self._last.req_ids:
            self._last = self._kept.get(names) or self._begin(names)
        return self._last

    def _begin(self, names: tuple[str, ...]) -> RequestBatch:
        if len(self._kept) == MAX_KEPT:
            self._kept.clear()
        batch = self._kept[names] = RequestBatch(names)
        return batch
