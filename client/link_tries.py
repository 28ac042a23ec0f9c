"""How often in a row a group's link has failed, and when that is enough: making it anew again and
again, between ranks whose network is cut, helps nobody. Knows no socket and no step."""

from client.errors import ClientError, LinkGivenUp, RemoteError

MAX_LINK_FAILURES = 3
"""In a row: steps that break the link, and attempts to make it anew."""


class LinkTries:
    """Of one group. Belongs to its thread."""

    def __init__(self) -> None:
        self._errors: list[ClientError] = []

    def worked(self) -> None:
        """A step has ended well, or everything begins anew."""
        if self._errors:
            self._errors.clear()

    def failed(self, error: ClientError) -> LinkGivenUp | None:
        """The link has failed with this; return the error to stop with, once that was too often."""
        self._errors.append(error)
        if len(self._errors) < MAX_LINK_FAILURES:
            return None
        ranks = {entry.rank for entry in self._errors if isinstance(entry, RemoteError)}
        given_up = LinkGivenUp(tuple(sorted(ranks)), len(self._errors), str(error))
        given_up.__cause__ = error
        return given_up
