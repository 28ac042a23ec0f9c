"""How often in a row a group's link has failed, and when that is enough: making it anew again and
again, between ranks whose network is cut, helps nobody. A part of `failure_state.py`."""

from worker_client.errors import ClientError, LinkGivenUp, RemoteError

MAX_LINK_FAILURES = 3
"""In a row: steps that break the link, and attempts to make it anew."""


class LinkTries:
    """Of one group. Owned by its FailureState."""

    def __init__(self) -> None:
        self._failures: list[tuple[int, ClientError]] = []

    def clear(self) -> None:
        """Everything begins anew."""
        self._failures.clear()

    def worked(self, seq: int) -> None:
        """Step `seq` has ended well, whatever has failed since: the link did work after all that
        failed before it."""
        if self._failures:
            self._failures = [entry for entry in self._failures if entry[0] > seq]

    def failed(self, seq: int, error: ClientError) -> LinkGivenUp | None:
        """The link has failed with this, in step `seq`, or as it was made anew (0); return the
        error to stop with, once that was too often."""
        latest = max([seq, *(failed for failed, _ in self._failures)])
        self._failures.append((latest, error))
        if len(self._failures) < MAX_LINK_FAILURES:
            return None
        ranks = {entry.rank for _, entry in self._failures if isinstance(entry, RemoteError)}
        given_up = LinkGivenUp(tuple(sorted(ranks)), len(self._failures), str(error))
        given_up.__cause__ = error
        return given_up
