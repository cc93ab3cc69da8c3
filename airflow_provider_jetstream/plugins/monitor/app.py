"""The page's application: static files, error answers, and headers that restrict what a browser does with them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import APIRouter, FastAPI, status
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse

from airflow_provider_jetstream.airflow_compat import AirflowException
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    ArgumentError,
    DeadLetterGoneError,
    JetStreamProviderError,
    JobNotWaitingError,
    LeaseHeldError,
    NotFoundError,
    QueueDeclarationError,
    RedriveError,
    RedriveRequestError,
    SelectionError,
    ServerTooOldError,
)
from airflow_provider_jetstream.plugins.monitor import routes
from airflow_provider_jetstream.plugins.monitor.authorization import page_access, refusal
from airflow_provider_jetstream.plugins.monitor.running_service import start_sampling
from airflow_provider_jetstream.plugins.monitor.server_poller import LettersUnreadError

if TYPE_CHECKING:
    from fastapi import Request
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

_FOLDER = Path(__file__).parent / "static"
# Looked up by name, so that no path of a request reaches the file system.
_FILES = {file.relative_to(_FOLDER).as_posix(): file for file in _FOLDER.rglob("*") if file.is_file()}
_MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
# The browser revalidates the page each time, so a new release is seen at once. The names of scripts and styles carry a
# hash of their content.
_REVALIDATE = {"Cache-Control": "no-cache"}
_KEEP = {"Cache-Control": "private, max-age=31536000, immutable"}
_HASHED = re.compile(r"-[0-9a-f]{12}\.(js|css)$")

_UNPROCESSABLE = 422
_STATUS_CODES = {
    NotFoundError: status.HTTP_404_NOT_FOUND,
    DeadLetterGoneError: status.HTTP_404_NOT_FOUND,
    QueueDeclarationError: status.HTTP_409_CONFLICT,
    JobNotWaitingError: status.HTTP_409_CONFLICT,
    SelectionError: _UNPROCESSABLE,
    RedriveRequestError: _UNPROCESSABLE,
    ArgumentError: _UNPROCESSABLE,
    ServerTooOldError: status.HTTP_409_CONFLICT,
    LeaseHeldError: status.HTTP_409_CONFLICT,
    RedriveError: status.HTTP_409_CONFLICT,
    ApiError: status.HTTP_502_BAD_GATEWAY,
}
_UNAVAILABLE = status.HTTP_503_SERVICE_UNAVAILABLE
_RETRY_AFTER = "3"


def make_app() -> FastAPI:
    """Make the application that is mounted under ``/jetstream``."""
    # Airflow doesn't authenticate requests to a mounted application, so its documentation routes would be public.
    app = FastAPI(title="JetStream", docs_url=None, redoc_url=None, openapi_url=None, dependencies=[page_access])
    app.include_router(_files)
    app.include_router(routes.router)
    app.add_exception_handler(JetStreamProviderError, _answer_error)
    app.add_exception_handler(AirflowException, _answer_error)
    app.add_exception_handler(RequestValidationError, _answer_invalid_request)
    app.add_middleware(_Headers)
    start_sampling()
    return app


class _Headers:
    """Adds headers to every answer that keep a browser from treating data as anything else."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers") or [])
                names = {name.lower() for name, _ in headers}
                added = [*_HEADERS, *([] if b"cache-control" in names else [_NO_STORE])]
                message = {**message, "headers": [*headers, *added]}
            await send(message)

        await self._app(scope, receive, send_with_headers)


async def _answer_error(_: Request, error: Exception) -> JSONResponse:
    status_code = next((code for kind, code in _STATUS_CODES.items() if isinstance(error, kind)), _UNAVAILABLE)
    code = error.code if isinstance(error, JetStreamProviderError) else "airflow"
    if isinstance(error, LettersUnreadError):
        code = "scanning"
    headers = {"Retry-After": _RETRY_AFTER} if status_code == _UNAVAILABLE else None
    return JSONResponse({"detail": {"code": code, "message": str(error)}}, status_code, headers)


async def _answer_invalid_request(_: Request, error: Exception) -> JSONResponse:
    problems = error.errors() if isinstance(error, RequestValidationError) else []
    message = "; ".join(f"{'.'.join(map(str, problem['loc'][1:]))}: {problem['msg']}" for problem in problems)
    return JSONResponse(
        {"detail": {"code": "request", "message": message or "the request isn't understood"}}, _UNPROCESSABLE
    )


_files = APIRouter()


@_files.get("/")
def page() -> FileResponse:
    """Return the page."""
    return _file("index.html")


@_files.get("/static/{path:path}")
def static_file(path: str) -> FileResponse:
    """Return one of the page's files."""
    return _file(path)


def _file(path: str) -> FileResponse:
    file = _FILES.get(path)
    media_type = _MEDIA_TYPES.get(file.suffix) if file else None
    if file is None or media_type is None:
        raise refusal(status.HTTP_404_NOT_FOUND, "file", "expected a file of the page, found none of that name")
    return FileResponse(file, media_type=media_type, headers=_KEEP if _HASHED.search(file.name) else _REVALIDATE)
