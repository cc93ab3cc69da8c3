"""Who may do what: Airflow decides, for every route."""

from typing import Annotated
from urllib.parse import urlsplit

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.base_user import BaseUser
from airflow.api_fastapi.auth.managers.models.resource_details import AccessView, DagAccessEntity, DagDetails
from airflow.api_fastapi.core_api.security import GetUserDep, requires_access_view
from airflow.providers.common.compat.sdk import conf
from fastapi import Depends, HTTPException, Request, status

from airflow_provider_jetstream.plugins.monitor.configuration import monitor_settings

see = Depends(requires_access_view(AccessView.PLUGINS))

_JSON = "application/json"
_PORTS = {"http": 80, "https": 443}


def may_act(user: GetUserDep) -> bool:
    """Tell whether Airflow would let somebody trigger the DAG that redrives.

    :param user: who asks
    :return: whether it would
    """
    return _may_trigger(user, monitor_settings().redrive_dag)


def payloads_hidden(user: GetUserDep) -> bool:
    """Tell whether bodies, headers and texts that may quote them are left out for somebody.

    :param user: who asks
    :return: whether they are
    """
    shown_to = monitor_settings().payloads
    return shown_to == "none" or (shown_to == "acting" and not may_act(user))


def require_acting(allowed: Annotated[bool, Depends(may_act)]) -> None:
    """Let nobody by who may not trigger the DAG that redrives.

    :param allowed: whether they may
    :raises HTTPException: they may not
    """
    if not allowed:
        raise refusal(
            status.HTTP_403_FORBIDDEN,
            "forbidden",
            f"expected a role that may trigger the DAG {monitor_settings().redrive_dag}, found one that may not; ask"
            " who manages roles in this Airflow",
        )


def require_run_access(dag_id: str, user: GetUserDep) -> None:
    """Let nobody by who may not see the task instances of a DAG.

    :param dag_id: the DAG
    :param user: who asks
    :raises HTTPException: they may not
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
    """Let no request by that another site's page has sent, nor one that a form could send.

    :param request: the request
    :raises HTTPException: it comes from elsewhere, or isn't JSON
    """
    origin = request.headers.get("origin")
    allowed = {_place(f"{request.url.scheme}://{request.headers.get('host', '')}")}
    allowed.add(_place(conf.get("api", "base_url", fallback="")))
    site = request.headers.get("sec-fetch-site", "none")
    foreign = _place(origin) not in allowed if origin is not None else site in ("cross-site", "same-site")
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


def refusal(code: int, name: str, message: str, headers: dict[str, str] | None = None) -> HTTPException:
    """Make an answer of the one form that all refusals of these routes have.

    :param code: its status
    :param name: stays the same between releases
    :param message: what was expected, what was found and what to do
    :param headers: further headers
    :return: to be raised
    """
    return HTTPException(code, {"code": name, "message": message}, headers)


def _may_trigger(user: BaseUser, dag_id: str) -> bool:
    return get_auth_manager().is_authorized_dag(
        method="POST", access_entity=DagAccessEntity.RUN, details=DagDetails(id=dag_id), user=user
    )


def _place(url: str) -> tuple[str, int | None]:
    """Give host and port; the scheme isn't known behind a proxy that ends TLS."""
    try:
        parts = urlsplit(url)
        return (parts.hostname or "", parts.port or _PORTS.get(parts.scheme))
    except ValueError:
        return ("", None)
