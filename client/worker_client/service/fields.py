"""Bodies of requests: read within bounds, and taken field by field, so that what an endpoint does
not know is refused by name."""

import asyncio
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import Request

from worker_client.errors import RequestError, request_error
from worker_client.inputs.request_fields import Json, described
from worker_client.inputs.request_parser import read_object
from worker_client.service.errors import too_large, too_slow
from worker_client.service.settings import ServiceSettings

HARMLESS: Final = frozenset(
    ("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key")
)
"""BodyFields that change nothing of an answer here; they are ignored."""
_MAX_NAME: Final = 80
_PLACE: Final = re.compile(r"`(\$[^`]*)`$")

T = TypeVar("T")


class BodyFields:
    """The fields of a JSON object. Each `take` removes one, and null counts as absent. Errors are
    RequestErrors, which name the field by its path."""

    def __init__(self, given: Mapping[str, Json], path: str = "") -> None:
        """path: put before the names in errors, as "stream_options."."""
        self._left = {name: value for name, value in given.items() if value is not None}
        self._path = path

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, kind: Any, default: T) -> Any | T:
        """Return a field as a type that msgspec knows (bool, Annotated[int, Meta(ge=1)],
        list[str], a Struct, a union, ...); `default` if it is absent. Raises RequestError."""
        if name not in self._left:
            return default
        return typed(self._left.pop(name), kind, self._path + name)

    def take_raw(self, name: str) -> Json:
        """Return a field as it is; None if it is absent."""
        return self._left.pop(name, None)

    def take_object(self, name: str) -> "BodyFields | None":
        """Return a field that is an object, to be taken field by field; None if it is absent."""
        given = self.take(name, dict[str, Any], None)
        return None if given is None else BodyFields(given, f"{self._path}{name}.")

    def take_all(self, names: Collection[str]) -> dict[str, Json]:
        """Return the fields of these names that are present, as they are."""
        return {name: self._left.pop(name) for name in sorted(self._left.keys() & set(names))}

    def refuse(self, name: str, problem: str, fix: str) -> None:
        """Raise RequestError if there is a field of this name."""
        if name in self._left:
            raise request_error(self._path + name, self._left[name], problem, fix)

    def check_empty(self, known: Iterable[str] = ()) -> None:
        """Raise RequestError for a field that is left, harmless ones apart. known: names for the
        fix."""
        left = sorted(self._left.keys() - HARMLESS)
        if left:
            names = ", ".join(sorted(known))
            fix = f"leave it out; this endpoint has {names}" if names else "leave it out"
            name = self._path + left[0][:_MAX_NAME]
            raise request_error(name, self._left[left[0]], "it is not served here", fix)


def typed(value: Json, kind: Any, path: str) -> Any:
    """Return a JSON value as a type. Raises RequestError, which names the path of what is wrong."""
    try:
        return msgspec.convert(value, kind)
    except Exception as error:  # a number may be too large for any type
        found = _PLACE.search(str(error)) if isinstance(error, msgspec.ValidationError) else None
        place = path if found is None else path + found[1].removeprefix("$")
        reason = str(error).partition(" - at ")[0]
        raise RequestError(
            f"{place} has the wrong type or is out of bounds: {reason}",
            field=place,
            value=value,
            fix=f"give {described(msgspec.inspect.type_info(kind))}",
        ) from None


async def read_fields(http: Request, settings: ServiceSettings) -> BodyFields:
    """Return the fields of a request's body, and take a place for it.

    Raises:
        HttpError: the server is full or drains (503), or the body is too long or too slow.
        RequestError: it is no JSON object, or has a name twice.
        ClientDisconnect: the client has left.
    """
    http.state.ticket.take(1)
    return await read_body(http, settings)


async def read_body(http: Request, settings: ServiceSettings) -> BodyFields:
    """Return the fields of a request's body, also while the server takes no requests. Raises as
    read_fields does."""
    try:
        async with asyncio.timeout(settings.read_s):
            body = await _read(http, settings.max_body_bytes)
    except TimeoutError:
        raise too_slow(settings.read_s) from None
    return BodyFields(read_object(body, "body"))


async def _read(http: Request, max_bytes: int) -> bytes:
    body = bytearray()
    async for chunk in http.stream():
        body += chunk
        if len(body) > max_bytes:
            raise too_large(max_bytes)
    return bytes(body)
