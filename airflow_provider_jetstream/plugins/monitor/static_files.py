"""The page itself and its files, as they lie in the package."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, status
from fastapi.responses import FileResponse

from airflow_provider_jetstream.plugins.monitor.authorization import refusal

router = APIRouter()

_FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
# Asked again each time, so that a new release is seen at once; the answer is usually that nothing changed.
_REVALIDATE = {"Cache-Control": "no-cache"}


@router.get("/")
def page() -> FileResponse:
    """Give the page."""
    return _file("index.html")


@router.get("/static/{path:path}")
def static_file(path: str) -> FileResponse:
    """Give one of the page's files.

    :param path: where it lies
    """
    return _file(path)


def _file(path: str) -> FileResponse:
    file = (_FOLDER / path).resolve()
    kind = _TYPES.get(file.suffix)
    if kind is None or not file.is_relative_to(_FOLDER.resolve()) or not file.is_file():
        raise refusal(status.HTTP_404_NOT_FOUND, "file", "expected a file of the page, found none of that name")
    return FileResponse(file, media_type=kind, headers=_REVALIDATE)
