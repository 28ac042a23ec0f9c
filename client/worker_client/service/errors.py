"""Errors of HTTP requests, as answers with OpenAI's error object:
{"error": {"message", "type", "param", "code"}}."""

from collections.abc import Mapping
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from rpc_schema.errors import WorkerDaemonError
from worker_client.errors import ClientConfigError
from worker_client.service.json_text import to_json
from worker_host.plain_text import printable

RETRY_AFTER: Final = ("Retry-After", "1")
_CLOSE: Final = ("Connection", "close")
_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
}


class HttpError(Exception):
    """An answer with a status and an error object. Endpoints raise it; a wrong field raises
    RequestError (or another ClientConfigError), which becomes a 400 with the field as `param`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The error object, in its envelope."""
        return error_body(self.status, str(self), self.param, self.code)


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return OpenAI's error object, in its envelope."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    named = None if param is None else printable(param)
    return {"error": {"message": printable(message), "type": kind, "param": named, "code": code}}


def unavailable(message: str) -> HttpError:
    """Return the error of a server that cannot take a request now."""
    return HttpError(503, message, code="unavailable", headers=dict([RETRY_AFTER]))


def unknown_model(name: str, known: tuple[str, ...]) -> HttpError:
    """Return the error of a request for a model that is not served."""
    message = f"the model {name[:80]!r} is not served; fix: use one of {', '.join(known)}"
    return HttpError(404, message, param="model", code="model_not_found")


def too_large(max_bytes: int) -> HttpError:
    """Return the error of a body that is too long; its connection is closed."""
    message = f"the body is too long; fix: send at most {max_bytes} bytes"
    return HttpError(413, message, param="body", code="too_large", headers=dict([_CLOSE]))


def too_slow(seconds: float) -> HttpError:
    """Return the error of a body that has not come in time; its connection is closed."""
    message = f"the body was not here within {seconds:g} s"
    return HttpError(408, message, param="body", code="timeout", headers=dict([_CLOSE]))


def as_http_error(error: Exception) -> HttpError:
    """Return the answer to a request that has failed with an error."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, ClientConfigError):
        return HttpError(400, str(error), param=error.field)
    if isinstance(error, WorkerDaemonError):  # the driver has ended
        return unavailable(str(error))
    # uvicorn logs it: Starlette raises it again.
    return HttpError(500, f"the server has failed: {type(error).__name__}", code="internal_error")


def answer(error: HttpError) -> Response:
    """Return the response that an error is."""
    return Response(to_json(error.body), error.status, error.headers, "application/json")


def answer_errors(app: FastAPI) -> None:
    """Let every error of an endpoint become an answer."""

    async def failed(_: Request, error: Exception) -> Response:
        return answer(as_http_error(error))

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "registered for it"
        found = HttpError(error.status_code, str(error.detail), headers=error.headers)
        return answer(found)

    async def invalid(_: Request, error: Exception) -> Response:
        return answer(HttpError(400, str(error)))

    async def left(*_: object) -> Response:
        return Response(status_code=499)  # nobody reads it

    for kind in (HttpError, WorkerDaemonError, Exception):
        app.add_exception_handler(kind, failed)
    app.add_exception_handler(HTTPException, refused)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(ClientDisconnect, left)
