"""The application: its endpoints, and what every request passes before them."""

from collections.abc import Callable
from typing import Final

from fastapi import APIRouter, FastAPI
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from worker_client.service.access import EARLY_PATHS, OPEN_PATHS
from worker_client.service.admin import admin_router
from worker_client.service.chat import chat_router
from worker_client.service.completions import completions_router
from worker_client.service.context import ServiceContext
from worker_client.service.embeddings import embeddings_router
from worker_client.service.errors import HttpError, answer, answer_errors, unavailable
from worker_client.service.health import CountedAnswers, health_router
from worker_client.service.models import models_router
from worker_client.service.scores import scores_router
from worker_client.service.tokens import tokens_router

ROUTERS: Final[tuple[Callable[[ServiceContext], APIRouter], ...]] = (
    completions_router,
    models_router,
    health_router,
    chat_router,
    embeddings_router,
    scores_router,
    tokens_router,
    admin_router,
)
"""The endpoints. A new file of them is added here."""


def make_app(context: ServiceContext) -> ASGIApp:
    """Return the application; server.py opens the engine."""
    app = FastAPI(title="worker-daemon", openapi_url=None)
    for make_router in ROUTERS:
        app.include_router(make_router(context))
    answer_errors(app)
    return CountedAnswers(Door(app, context), context.engine.counts)


class Door:
    """Checks the key of each request, and gives it a ticket (`http.state.ticket`), which it
    releases when the answer is over."""

    def __init__(self, app: ASGIApp, context: ServiceContext) -> None:
        self._app = app
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            if scope["path"] not in OPEN_PATHS:
                self._context.access.check(HTTPConnection(scope))
                if not self._context.engine.is_ready and scope["path"] not in EARLY_PATHS:
                    raise unavailable(f"the model is being loaded: {self._context.engine.phase}")
        except HttpError as error:
            await answer(error)(scope, receive, send)
            return
        ticket = self._context.admission.ticket()
        scope.setdefault("state", {})["ticket"] = ticket
        try:
            await self._app(scope, receive, send)
        finally:
            ticket.release()
