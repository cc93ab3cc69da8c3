"""Authorization of the page's requests: Airflow decides, for every route."""

from collections.abc import Collection, Iterable
from typing import Annotated

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.resource_details import (
    AccessView,
    DagAccessEntity,
    DagDetails,
)
from airflow.api_fastapi.core_api.security import GetUserDep, requires_access_view
from airflow.models.connection import Connection
from airflow.models.dag import DagModel
from fastapi import Depends, HTTPException, status

from airflow_provider_jetstream.airflow_compat import conf
from airflow_provider_jetstream.jetstream.client.wire_text import readable_text
from airflow_provider_jetstream.plugins.monitor.configuration import monitor_settings

page_access = Depends(requires_access_view(AccessView.PLUGINS))


def may_act(user: GetUserDep) -> bool:
    """Return whether Airflow lets a user trigger the DAG that redrives."""
    return get_auth_manager().is_authorized_dag(
        method="POST",
        access_entity=DagAccessEntity.RUN,
        details=_dag_details([monitor_settings().redrive_dag])[0],
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


class Viewer:
    """What one user may see of the jobs, letters and redrives of DAGs: the one rule of all routes.

    Whatever names a DAG (a job, a letter, a redrive, an audit record) is for users who may see the task instances of
    all the DAGs that it names. What belongs to a DAG that isn't known is for users who may see every DAG. Others get
    numbers that merely count it among others.
    """

    def __init__(self, user: GetUserDep) -> None:
        self._user = user
        self._known: dict[str | None, bool] = {}

    def sees(self, dag_id: str | None) -> bool:
        """Return whether the user may see what belongs to a DAG; to one that isn't known for ``None``.

        Airflow may ask its database, so this isn't for an event loop.
        """
        if dag_id not in self._known:
            self._known[dag_id] = (
                may_see_every_dag(self._user) if dag_id is None else bool(permitted_dags([dag_id], self._user))
            )
        return self._known[dag_id]

    def sees_all(self, dag_ids: Iterable[str | None]) -> bool:
        """Return whether the user may see something that names all of these DAGs."""
        return all(map(self.sees, dag_ids))

    def require(self, dag_ids: Iterable[str | None]) -> None:
        """Refuse a user who may not see something that names these DAGs; the refusal names none of them.

        :raises HTTPException: the user may not
        """
        if not self.sees_all(dag_ids):
            raise refusal(
                status.HTTP_403_FORBIDDEN,
                "forbidden",
                "expected a role that may see the task instances of the DAG that this belongs to, found one that may"
                " not; ask an administrator of this Airflow for it",
            )


def require_run_access(dag_id: str, user: GetUserDep) -> None:
    """Refuse users who may not see the task instances of a DAG.

    :raises HTTPException: the user may not
    """
    if not permitted_dags([dag_id], user):
        raise refusal(
            status.HTTP_403_FORBIDDEN,
            "forbidden",
            f"expected a role that may see the task instances of {readable_text(dag_id)}, found one that may not; ask"
            " an administrator of this Airflow for it",
        )


def permitted_dags(dag_ids: Collection[str], user: GetUserDep) -> frozenset[str]:
    """Return which of some DAGs a user may see, by their task instances."""
    manager = get_auth_manager()
    return frozenset(
        dag_id
        for dag_id, details in zip(dag_ids, _dag_details(dag_ids), strict=True)
        if manager.is_authorized_dag(
            method="GET", access_entity=DagAccessEntity.TASK_INSTANCE, details=details, user=user
        )
    )


def permitted_owners(dag_ids: Collection[str], user: GetUserDep) -> dict[str, str | None]:
    """Return which of some DAGs a user may see, by their task instances; each with its team where Airflow has teams."""
    return {details.id: details.team_name for details in _dag_details(permitted_dags(dag_ids, user)) if details.id}


def may_see_every_dag(user: GetUserDep) -> bool:
    """Return whether a user may see the task instances of all DAGs, and so also of a DAG that isn't known."""
    return get_auth_manager().is_authorized_dag(method="GET", access_entity=DagAccessEntity.TASK_INSTANCE, user=user)


def permitted_connections(user: GetUserDep) -> tuple[str, ...]:
    """Return the connections of the page that a user may see: connections of the user's teams, and of no team."""
    connections = monitor_settings().connections
    teams = teams_of(connections)
    if not any(teams.values()):
        return connections
    # Airflow 3.1 has no such class.
    from airflow.api_fastapi.auth.managers.models.resource_details import TeamDetails

    manager = get_auth_manager()
    return tuple(
        connection
        for connection in connections
        if (team := teams.get(connection)) is None
        or manager.is_authorized_team(method="GET", details=TeamDetails(name=team), user=user)
    )


def teams_of(connections: Collection[str]) -> dict[str, str | None]:
    """Return the teams of connections that Airflow's database has; none where Airflow has no teams."""
    return Connection.get_conn_id_to_team_name_mapping(list(connections)) if _has_teams() else {}


def require_connection(connection: str, user: GetUserDep) -> None:
    """Refuse users who may not see a connection that the page shows to others.

    :raises HTTPException: the user may not
    """
    if connection in monitor_settings().connections and connection not in permitted_connections(user):
        raise refusal(
            status.HTTP_403_FORBIDDEN,
            "forbidden",
            f"expected a member of the team that the connection {connection} belongs to, found somebody else",
        )


def _dag_details(dag_ids: Collection[str]) -> list[DagDetails]:
    # Ids come from jobs' headers too, whose bytes no database may accept.
    readable = [readable_text(dag_id) for dag_id in dag_ids]
    teams = DagModel.get_dag_id_to_team_name_mapping(readable) if _has_teams() else {}
    return [DagDetails(id=dag_id, team_name=teams.get(dag_id)) for dag_id in readable]


def _has_teams() -> bool:
    # Airflow 3.1 has no teams.
    return conf.getboolean("core", "multi_team", fallback=False) and hasattr(
        DagModel, "get_dag_id_to_team_name_mapping"
    )


def refusal(status_code: int, code: str, message: str) -> HTTPException:
    """Make an error answer in the one form of all routes.

    :param code: stays the same between releases
    :param message: what was expected, what was found and what to do
    """
    return HTTPException(status_code, {"code": code, "message": message})
