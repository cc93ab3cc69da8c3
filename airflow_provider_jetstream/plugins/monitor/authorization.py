"""Authorization of the page's requests: Airflow decides, for every route."""

from typing import Annotated
from urllib.parse import urlsplit

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.resource_details import AccessView, DagAccessEntity, DagDetails
from airflow.api_fastapi.core_api.security import GetUserDep, requires_access_view
from fastapi import Depends, HTTPException, Request, status

from airflow_provider_jetstream.airflow_compat import conf
from airflow_provider_jetstream.plugins.monitor.configuration import monitor_settings

page_access = Depends(requires_access_view(AccessView.PLUGINS))

_JSON = "application/json"
_PORTS = {"http": 80, "https": 443}


def may_act(user: GetUserDep) -> bool:
    """Return whether Airflow lets a user trigger the DAG that redrives."""
    return get_auth_manager().is_authorized_dag(
        method="POST",
        access_entity=DagAccessEntity.RUN,
        details=DagDetails(id=monitor_settings().redrive_dag),
        user=user,
    )


def payloads_hidden(user: GetUserDep) -> bool:
    """Return whether bodies, headers and texts that may quote them are hidden from a user."""
    shown_to = monitor_settings().payloads
    return shown_to == "none" or (shown_to == "acting" and not may_act(user))


def require_acting(allowed: Annotated[bool, Depends(may_act)]) -> None:
    """Refuse users who may not trigger the DAG that redrives.

    :raises HTTPException: the user may not
    """
    if not allowed:
        raise refusal(
            status.HTTP_403_FORBIDDEN,
            "forbidden",
            f"expected a role that may trigger the DAG {monitor_settings().redrive_dag}, found one that may not; ask"
            " an administrator of this Airflow for it",
        )


def require_run_access(dag_id: str, user: GetUserDep) -> None:
    """Refuse users who may not see the task instances of a DAG.

    :raises HTTPException: the user may not
    """
    allowed = get_auth_manager().is_authorized_dag(
        method="GET", access_entity=DagAccessEntity.TASK_INSTANCE, details=DagDetails(id=dag_id), user=user
    )
    if not allowed:
        raise refusal(
            status.HTTP_403_FORBIDDEN,
            "forbidden",
            f"expected a role that may see the task instances of {dag_id}, found one that may not",
        )


def require_own_origin(request: Request) -> None:
    """Refuse requests that another site's page has sent, and those that an HTML form can send.

    :raises HTTPException: the request comes from another origin, or its body isn't JSON
    """
    origin = request.headers.get("origin")
    allowed = {_host_and_port(f"{request.url.scheme}://{request.headers.get('host', '')}")}
    allowed.add(_host_and_port(conf.get("api", "base_url", fallback="")))
    site = request.headers.get("sec-fetch-site", "none")
    foreign = _host_and_port(origin) not in allowed if origin is not None else site in ("cross-site", "same-site")
    if foreign:
        raise refusal(
            status.HTTP_403_FORBIDDEN,
            "origin",
            f"expected a request of this Airflow's own page, found one of {origin or site}; if this is Airflow's"
            " address behind a proxy, set it as [api] base_url",
        )
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _JSON:
        raise refusal(
            status.HTTP_415_UNSUPPORTED_MEDIA_TYPE,
            "media_type",
            f"expected a body of type {_JSON}, found another; name it in Content-Type",
        )


def refusal(status_code: int, code: str, message: str) -> HTTPException:
    """Make an error answer in the one form of all routes.

    :param code: stays the same between releases
    :param message: what was expected, what was found and what to do
    """
    return HTTPException(status_code, {"code": code, "message": message})


def _host_and_port(url: str) -> tuple[str, int | None]:
    """Return host and port; the scheme isn't known behind a proxy that ends TLS."""
    try:
        parts = urlsplit(url)
        return (parts.hostname or "", parts.port or _PORTS.get(parts.scheme))
    except ValueError:
        return ("", None)
