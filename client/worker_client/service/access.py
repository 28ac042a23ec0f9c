"""Who may ask: keys in `Authorization: Bearer KEY`."""

import hmac
from collections.abc import Sequence
from typing import Final

from starlette.requests import HTTPConnection

from worker_client.service.errors import HttpError

OPEN_PATHS: Final = frozenset(("/health", "/livez", "/readyz", "/startupz"))
"""Paths that need no key: they are for supervisors."""
EARLY_PATHS: Final = frozenset(("/metrics",))
"""Paths with keys that are served while the model is being loaded."""
_SCHEME: Final = "bearer "
_CHALLENGE: Final = {"WWW-Authenticate": "Bearer"}


class KeyCheck:
    """Checks the keys of requests, in time that does not depend on how much of a key is right."""

    def __init__(self, api_keys: Sequence[str], admin_keys: Sequence[str]) -> None:
        self._admins = [key.encode() for key in admin_keys]
        self._all = [*(key.encode() for key in api_keys), *self._admins]
        self._is_open = not api_keys

    def check(self, http: HTTPConnection) -> None:
        """Raise HttpError (401) unless the request may be served. app.py calls it for every path
        but OPEN_PATHS."""
        if not self._is_open and not _is_among(self._all, http):
            message = "no valid key; fix: send `Authorization: Bearer KEY`"
            raise HttpError(401, message, code="invalid_api_key", headers=_CHALLENGE)

    def check_admin(self, http: HTTPConnection) -> None:
        """Raise HttpError (401, or 403 if there are no such keys) unless an administrator asks.
        Endpoints for administrators begin with it."""
        if not self._admins:
            message = "this server has no administrators; fix: start it with --admin-key-file"
            raise HttpError(403, message, code="no_admin_key")
        if not _is_among(self._admins, http):
            message = "it takes an administrator's key; fix: send `Authorization: Bearer KEY`"
            raise HttpError(401, message, code="invalid_api_key", headers=_CHALLENGE)


def _is_among(keys: Sequence[bytes], http: HTTPConnection) -> bool:
    given = http.headers.get("authorization", "")
    if not given.lower().startswith(_SCHEME):
        return False
    key = given[len(_SCHEME) :].strip().encode("latin-1")
    return any([hmac.compare_digest(key, own) for own in keys])  # noqa: C419  # each is compared
