"""Endpoints for administrators: LoRA adapters, sleep mode, pauses, new weights. Each takes an
administrator's key. What would lose requests is refused while some run, and none is taken before it
is over and the group can serve again."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, Final, get_args

from fastapi import APIRouter
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from rpc_schema.errors import (
    CapacityError,
    ConfigError,
    StateError,
    WorkerDaemonError,
    WorkerError,
)
from rpc_schema.lifecycle import MemoryTag, SleepLevel, Status
from worker_client.driver import Driver
from worker_client.errors import ReplicasDiffer, RequestError, request_error
from worker_client.group.running import RunningRequests
from worker_client.group.weights_state import differing_ranks
from worker_client.replicas.operations import PAUSE, RESUME
from worker_client.service.context import ServiceContext
from worker_client.service.engine import Engine
from worker_client.service.errors import RETRY_AFTER, HttpError, unavailable
from worker_client.service.fields import BodyFields, read_body
from worker_client.service.json_text import to_json
from worker_client.service.operations import falling_asleep, reloading, waking
from worker_client.service.streaming import JsonObject

SLEEPS: Final = "the group sleeps; fix: POST /wake_up"
NOT_WHOLE: Final = "the group's weights are not whole; fix: POST /update_weights"
_TAGS: Final[tuple[MemoryTag, ...]] = get_args(MemoryTag)
_RUNNING: Final[tuple[RunningRequests, ...]] = ("keep", "recompute", "abort", "drop")
_UNMAPPED: Final = ("asleep", "discarded")
Version = Annotated[int, Meta(ge=0)]


def admin_router(context: ServiceContext) -> APIRouter:
    """Return the endpoints."""
    router = APIRouter()
    engine, settings = context.engine, context.settings
    admin = _Admin(context)
    _add_pauses(router, context)
    _add_weights(router, context, admin)

    @router.post("/v1/load_lora_adapter")
    async def load_lora_adapter(http: Request) -> Response:
        context.access.check_admin(http)
        fields = await read_body(http, settings)
        name = _take_name(fields)
        own = _take_path(fields, name, engine.plan.lora_root)
        load_inplace: bool = fields.take("load_inplace", bool, False)
        fields.check_empty(("lora_name", "lora_path", "load_inplace"))
        loaded = engine.adapters.get(name)
        if name in engine.names or (loaded is not None and loaded.name != own):
            fix = "choose another name, or unload the adapter that has it"
            raise request_error("lora_name", name, "the name is in use", fix)
        with _refusals("lora_path"):
            adapter = await engine.add_adapter(own, served_as=name, load_inplace=load_inplace)
        return _done(engine, {"lora_name": name, "lora_int_id": adapter.lora_id})

    @router.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(http: Request) -> Response:
        context.access.check_admin(http)
        fields = await read_body(http, settings)
        name = _take_name(fields)
        fields.take("lora_int_id", int, None)
        fields.check_empty(("lora_name",))
        adapter = engine.adapters.get(name)
        if adapter is None:
            message = f"no adapter is called {name[:80]!r}"
            raise HttpError(404, message, param="lora_name", code="model_not_found")
        with _refusals("lora_name"):
            await engine.remove_adapter(adapter)
        return _done(engine, {"lora_name": name})

    @router.post("/sleep")
    async def sleep(http: Request) -> Response:
        context.access.check_admin(http)
        level = _level(http.query_params.get("level", "1"))
        async with admin.alone("the group is put to sleep"):
            await engine.operations.do(falling_asleep(level))
        return _done(engine, {"is_sleeping": True})

    @router.post("/wake_up")
    async def wake_up(http: Request) -> Response:
        context.access.check_admin(http)
        tags = _tags(http.query_params.getlist("tags"))
        async with admin.alone("the group wakes up"):
            await engine.operations.do(waking(tags))
        return _done(engine, {"is_sleeping": any(await engine.ask(_sleeps))})

    @router.get("/is_sleeping")
    async def is_sleeping(http: Request) -> Response:
        context.access.check_admin(http)
        return _done(engine, {"is_sleeping": any(await engine.ask(_sleeps))})

    return router


def _add_pauses(router: APIRouter, context: ServiceContext) -> None:
    """Add the endpoints that hold all requests, and let them go on."""
    engine = context.engine

    @router.post("/pause")
    async def pause(http: Request) -> Response:
        context.access.check_admin(http)
        with _refusals(None):
            await engine.operations.do(PAUSE)
        return _done(engine, {"is_paused": True})

    @router.post("/resume")
    async def resume(http: Request) -> Response:
        context.access.check_admin(http)
        with _refusals(None):
            await engine.operations.do(RESUME)
        return _done(engine, {"is_paused": False})

    @router.get("/is_paused")
    async def is_paused(http: Request) -> Response:
        context.access.check_admin(http)
        is_paused = any(await engine.ask(lambda driver: driver.is_paused))
        return _done(engine, {"is_paused": is_paused})


def _add_weights(router: APIRouter, context: ServiceContext, admin: "_Admin") -> None:
    """Add the endpoint for new weights."""
    engine, settings = context.engine, context.settings

    @router.post("/update_weights")
    async def update_weights(http: Request) -> Response:
        context.access.check_admin(http)
        fields = await read_body(http, settings)
        path: str = fields.take("path", str, "")
        version: int | None = fields.take("version", Version, None)
        running: str | None = fields.take("running", str, None)
        budget: int | None = fields.take("recompute_budget", int, None)
        fields.check_empty(("path", "version", "running", "recompute_budget"))
        kept = None if running is None else _running(running)

        async with admin.alone("the weights are updated", "path", beside=kept is not None):
            if version is None and engine.num_replicas > 1:
                version = 1 + max(await engine.ask(_newest_version))
            report = await engine.operations.do(reloading(path, version, kept, budget))
        (found, *_) = report.results.values()
        return _done(engine, {"version": None if found is None else found.version.number})


class _Admin:
    """Does one thing at a time, with no request beside it."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._lock = asyncio.Lock()
        self._reason = ""
        """Why this object has closed the admission; empty: it has not."""

    @contextlib.asynccontextmanager
    async def alone(
        self, what: str, param: str | None = None, *, beside: bool = False
    ) -> AsyncIterator[None]:
        """Do something with the drivers in the block. what: the reason that requests get meanwhile.
        param: field that daemons may refuse. beside: requests that run do not matter.

        Raises:
            HttpError: requests run (409), the server is shutting down (503), or the daemons refuse
                it or fail.
            ClientConfigError: the driver refuses it.
        """
        async with self._lock, self._without_requests(what, beside=beside):
            with _refusals(param):
                yield

    @contextlib.asynccontextmanager
    async def _without_requests(self, what: str, *, beside: bool) -> AsyncIterator[None]:
        admission = self._context.admission
        if admission.closed != self._reason:
            raise unavailable(admission.closed)
        if admission.num_taken and not beside:
            message = f"{admission.num_taken} requests run; fix: send it again when none runs"
            raise HttpError(409, message, code="busy", headers=dict([RETRY_AFTER]))
        self._close(what)
        try:
            yield
        finally:
            reason = ""
            with contextlib.suppress(WorkerDaemonError):  # requests learn why there is no rank
                reason = await _hindrance(self._context.engine)
            if admission.closed == self._reason:  # else the server is shutting down
                self._close(reason)

    def _close(self, reason: str) -> None:
        """Take no requests for a reason; none: take them."""
        admission = self._context.admission
        self._reason = reason
        if reason:
            admission.close(reason)
        else:
            admission.open(admission.most)


async def _hindrance(engine: Engine) -> str:
    """Return why the group can serve no request; empty if it can. Ranks that were lost meanwhile
    are replaced first, which may wake the others."""
    by_replica = await engine.ask(_look)
    statuses = [status for own in by_replica for status in own]
    if _are_asleep(statuses):
        return SLEEPS
    is_whole = all(each.weights is not None and each.weights.state == "whole" for each in statuses)
    is_same = differing_ranks(statuses) is None or engine.num_replicas == 1
    return "" if is_whole and is_same else NOT_WHOLE


def _look(driver: Driver) -> list[Status]:
    driver.look()
    return driver.group.get_status()


def _newest_version(driver: Driver) -> int:
    weights = [status.weights for status in driver.group.get_status()]
    return max((each.version for each in weights if each is not None), default=0)


def _sleeps(driver: Driver) -> bool:
    return _are_asleep(driver.group.get_status())


def _are_asleep(statuses: list[Status]) -> bool:
    return any(state in _UNMAPPED for each in statuses for state in each.memory_tags.values())


@contextlib.contextmanager
def _refusals(param: str | None) -> Iterator[None]:
    """Turn what daemons refuse into answers. param: field that it is about."""
    try:
        yield
    except ConfigError as error:
        raise HttpError(400, str(error), param=param) from None
    except (CapacityError, StateError) as error:
        raise HttpError(409, str(error), code=error.code.lower()) from None
    except ReplicasDiffer as error:
        raise HttpError(500, str(error), code="replicas_differ") from None
    except WorkerError as error:
        raise HttpError(500, str(error), code=error.code.lower()) from None


def _take_name(fields: BodyFields) -> str:
    name: str | None = fields.take("lora_name", str, None)
    if not name:
        raise request_error("lora_name", name, "there is no name", "give one")
    return name


def _take_path(fields: BodyFields, name: str, root: Path | None) -> str:
    """Return an adapter's path below the daemons' --lora-root, by default its name. root: that of
    daemons which the server has started."""
    given: str = fields.take("lora_path", str, name)
    path = Path(given)
    if not path.is_absolute():
        return given
    if root is not None and path.is_relative_to(root.absolute()):
        return str(path.relative_to(root.absolute()))
    fix = "give its path from the daemons' --lora-root on"
    raise request_error("lora_path", given, "the path is not below --lora-root", fix)


def _running(given: str) -> RunningRequests:
    chosen = next((each for each in _RUNNING if each == given), None)
    if chosen is None:
        fix = f"use {' or '.join(_RUNNING)}, or leave it out to wait until no request runs"
        raise request_error("running", given, "the value is not allowed", fix)
    return chosen


def _level(given: str) -> SleepLevel:
    if given == "1":
        return 1
    if given == "2":
        return 2
    raise _wrong_query("level", given, "use 1 or 2")


def _tags(given: list[str]) -> tuple[MemoryTag, ...] | None:
    """Return the tags of a query; None: all."""
    wrong = next((tag for tag in given if tag not in _TAGS), None)
    if wrong is not None:
        raise _wrong_query("tags", wrong, f"use {' and '.join(_TAGS)}")
    return tuple(tag for tag in _TAGS if tag in given) or None


def _wrong_query(field: str, value: str, fix: str) -> RequestError:
    return request_error(field, value, "the query is wrong", fix)


def _done(engine: Engine, value: JsonObject) -> Response:
    """Return the answer to an operation, with the replicas that do it once they are back."""
    missing = {str(place): str(error) for place, error in engine.operations.missing.items()}
    more: JsonObject = {"missing_replicas": missing} if missing else {}
    return Response(to_json({**value, **more}), media_type="application/json")
