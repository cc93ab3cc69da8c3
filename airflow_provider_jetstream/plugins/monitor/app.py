"""The page's application: every route wants an Airflow session, and every answer says what a browser may do with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI

from airflow_provider_jetstream.plugins.monitor import routes
from airflow_provider_jetstream.plugins.monitor import static_files as pages
from airflow_provider_jetstream.plugins.monitor.authorization import see
from airflow_provider_jetstream.plugins.monitor.error_handlers import answer_failures

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self';"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
_HEADERS = (
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
_NO_STORE = (b"cache-control", b"no-store")


def make_app() -> FastAPI:
    """Make the application that is mounted under ``/jetstream``.

    :return: the application
    """
    # Airflow authenticates nothing of a mounted application by itself; documentation routes would be open to all.
    app = FastAPI(title="JetStream", docs_url=None, redoc_url=None, openapi_url=None, dependencies=[see])
    app.include_router(pages.router)
    app.include_router(routes.router)
    answer_failures(app)
    app.add_middleware(_Headers)
    return app


class _Headers:
    """Adds to every answer what keeps a browser from taking data for anything else."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = list(message.get("headers") or [])
                names = {name.lower() for name, _ in given}
                extra = [*_HEADERS, *([] if b"cache-control" in names else [_NO_STORE])]
                message = {**message, "headers": [*given, *extra]}
            await send(message)

        await self._app(scope, receive, send_with_headers)
