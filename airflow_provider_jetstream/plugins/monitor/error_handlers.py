"""What a route answers when the server is away, or what is asked for doesn't exist or can't be used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow.providers.common.compat.sdk import AirflowException
from fastapi import status
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    DeadLetterGoneError,
    JetStreamProviderError,
    NotFoundError,
    QueueDeclarationError,
    RedriveRequestError,
    SelectionError,
)

if TYPE_CHECKING:
    from fastapi import FastAPI, Request

_UNPROCESSABLE = 422
_STATUS = {
    NotFoundError: status.HTTP_404_NOT_FOUND,
    DeadLetterGoneError: status.HTTP_404_NOT_FOUND,
    QueueDeclarationError: status.HTTP_409_CONFLICT,
    SelectionError: _UNPROCESSABLE,
    RedriveRequestError: _UNPROCESSABLE,
    ApiError: status.HTTP_502_BAD_GATEWAY,
}
_AWAY = status.HTTP_503_SERVICE_UNAVAILABLE
_RETRY_AFTER = "3"


def answer_failures(app: FastAPI) -> None:
    """Have an application answer errors of this package in the one form of its refusals.

    :param app: the application
    """
    app.add_exception_handler(JetStreamProviderError, _failed)
    app.add_exception_handler(AirflowException, _failed)
    app.add_exception_handler(RequestValidationError, _not_understood)


async def _failed(_: Request, error: Exception) -> JSONResponse:
    code = next(
        (code for kind, code in _STATUS.items() if isinstance(error, kind)), status.HTTP_503_SERVICE_UNAVAILABLE
    )
    name = error.code if isinstance(error, JetStreamProviderError) else "airflow"
    headers = {"Retry-After": _RETRY_AFTER} if code == status.HTTP_503_SERVICE_UNAVAILABLE else None
    return JSONResponse({"detail": {"code": name, "message": str(error)}}, code, headers)


async def _not_understood(_: Request, error: Exception) -> JSONResponse:
    problems = error.errors() if isinstance(error, RequestValidationError) else []
    told = "; ".join(f"{'.'.join(map(str, problem['loc'][1:]))}: {problem['msg']}" for problem in problems)
    return JSONResponse(
        {"detail": {"code": "request", "message": told or "the request isn't understood"}}, _UNPROCESSABLE
    )
