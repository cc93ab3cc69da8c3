"""The routes of the page's data; ``docs/monitor-api.md`` describes them."""

from functools import cache
from typing import Annotated

from airflow.api_fastapi.core_api.security import GetUserDep
from airflow.models.taskinstance import TaskInstance
from airflow.utils.session import create_session
from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import ValidationError
from sqlalchemy import select as sql_select

from airflow_provider_jetstream import __version__
from airflow_provider_jetstream.jetstream.dead_letters.group import GroupField, group_fields
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.redrive.preview import BY_CAUSE
from airflow_provider_jetstream.plugins.monitor.authorization import (
    may_act,
    may_see_every_dag,
    payloads_hidden,
    permitted_connections,
    permitted_dags,
    refusal,
    require_acting,
    require_connection,
    require_run_access,
)
from airflow_provider_jetstream.plugins.monitor.configuration import monitor_settings
from airflow_provider_jetstream.plugins.monitor.models.actions import DryRunRequest, Me
from airflow_provider_jetstream.plugins.monitor.request_origin import require_own_origin
from airflow_provider_jetstream.plugins.monitor.service import MonitorService
from airflow_provider_jetstream.plugins.monitor.task_jobs import TaskQuery

router = APIRouter(prefix="/api")

_MAX_INSTANCES = 1_000
_MAX_BODY_BYTES = 1024 * 1024
_UNPROCESSABLE = 422


@cache
def service() -> MonitorService:
    """Return the one monitor service of this process."""
    return MonitorService(monitor_settings())


def parse_selection(
    reasons: Annotated[list[str] | None, Query()] = None,
    error_class: str | None = None,
    fingerprint: str | None = None,
    traceback_digest: str | None = None,
    subject: str | None = None,
    consumer: str | None = None,
    dag_id: str | None = None,
    run_id: str | None = None,
    task_id: str | None = None,
    *,
    parked: bool = False,
) -> Selection:
    """Parse the selection in a query."""
    fields = {
        "reasons": reasons,
        "error_class": error_class,
        "fingerprint": fingerprint,
        "traceback_digest": traceback_digest,
        "subject": subject,
        "consumer": consumer,
        "dag_id": dag_id,
        "run_id": run_id,
        "task_id": task_id,
    }
    return Selection.of({name: value for name, value in fields.items() if value} | {"parked": parked})


def parse_group_by(group_by: Annotated[list[str] | None, Query()] = None) -> tuple[GroupField, ...]:
    """Parse the fields in a query by which letters are grouped."""
    return group_fields(group_by or BY_CAUSE)


def permitted_selection(selection: Annotated[Selection, Depends(parse_selection)], user: GetUserDep) -> Selection:
    """Parse the selection in a query, and refuse one by a DAG that the user may not see."""
    if selection.dag_id is not None:
        require_run_access(selection.dag_id, user)
    return selection


async def shown_dags(connection: str, queue: str, user: GetUserDep) -> frozenset[str]:
    """Return the DAGs whose letters a user may see, of those with letters in a queue."""
    return await run_in_threadpool(permitted_dags, await service().dags(connection, queue), user)


Selected = Annotated[Selection, Depends(permitted_selection)]
Hidden = Annotated[bool, Depends(payloads_hidden)]
EveryDag = Annotated[bool, Depends(may_see_every_dag)]
# Databases refuse longer ones, and this character.
AirflowId = Annotated[str, Query(max_length=250, pattern=r"^[^\x00]*$")]
ShownConnections = Annotated[tuple[str, ...], Depends(permitted_connections)]
ShownDags = Annotated[frozenset[str], Depends(shown_dags)]
_of_queue = APIRouter(prefix="/queues/{connection}/{queue}", dependencies=[Depends(require_connection)])


@router.get("/me")
def me(acting: Annotated[bool, Depends(may_act)], hidden: Hidden, connections: ShownConnections) -> Me:
    """Return the user's permissions."""
    settings = monitor_settings()
    return Me(
        may_act=acting,
        payloads=not hidden,
        dag_id=settings.redrive_dag,
        refresh_seconds=settings.refresh,
        connections=list(connections),
        version=__version__,
    )


@router.get("/snapshot")
async def snapshot(connections: ShownConnections, user: GetUserDep, connection: str | None = None) -> Response:
    """Return the numbers of all queues."""
    if connection:
        await run_in_threadpool(require_connection, connection, user)
        connections = (connection,)
    return _json(await service().snapshot(connections))


@_of_queue.get("")
async def queue_detail(connection: str, queue: str) -> Response:
    """Return the details of a queue."""
    return _json(await service().queue(connection, queue))


@_of_queue.get("/groups")
async def groups(
    connection: str,
    queue: str,
    selection: Selected,
    dags: ShownDags,
    group_by: Annotated[tuple[GroupField, ...], Depends(parse_group_by)],
) -> Response:
    """Return the groups of a queue's dead letters."""
    return _json(await service().groups(connection, queue, selection, group_by, dags=dags))


@_of_queue.get("/letters")
async def letters(
    connection: str,
    queue: str,
    selection: Selected,
    hidden: Hidden,
    every_dag: EveryDag,
    dags: ShownDags,
    after: Annotated[int, Query(ge=0, lt=2**63)] = 0,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> Response:
    """Return a page of a queue's dead letters."""
    shown = service().letters(
        connection, queue, selection, after, limit, hidden=hidden, hidden_of_unknown=not every_dag, dags=dags
    )
    return _json(await shown)


@_of_queue.get("/letters/{sequence}")
async def letter(
    connection: str,
    queue: str,
    sequence: Annotated[int, Path(ge=1, lt=2**63)],
    hidden: Hidden,
    every_dag: EveryDag,
    user: GetUserDep,
) -> Response:
    """Return the details of a dead letter."""
    answer = await service().letter(connection, queue, sequence, hidden=hidden, hidden_of_unknown=not every_dag)
    if answer.dag_id is not None:
        await run_in_threadpool(require_run_access, answer.dag_id, user)
    return _json(answer.detail)


@_of_queue.post("/dry-run", dependencies=[Depends(require_own_origin), Depends(require_acting)])
async def dry_run(connection: str, queue: str, request: Request, user: GetUserDep) -> Response:
    """Count what an action would do."""
    # Parsed here rather than by FastAPI, which would answer a body that isn't JSON before it checks the origin.
    parsed = await _body(request)
    selection = Selection.of(parsed.select)
    if selection.dag_id is not None:
        await run_in_threadpool(require_run_access, selection.dag_id, user)
    return _json(await service().dry_run(connection, queue, selection, parsed.action))


router.include_router(_of_queue)


def parse_task_query(
    dag_id: AirflowId,
    run_id: AirflowId,
    task_id: AirflowId | None = None,
    map_index: Annotated[int | None, Query(ge=-1, lt=2**31)] = None,
) -> TaskQuery:
    """Parse the origin in a query, and read the matching task instances from Airflow's database."""
    statement = sql_select(TaskInstance.task_id, TaskInstance.map_index).where(
        TaskInstance.dag_id == dag_id, TaskInstance.run_id == run_id
    )
    if task_id is not None:
        statement = statement.where(TaskInstance.task_id == task_id)
    if map_index is not None:
        statement = statement.where(TaskInstance.map_index == map_index)
    with create_session() as session:
        rows = session.execute(statement.limit(_MAX_INSTANCES)).all()
    return TaskQuery(dag_id, run_id, task_id, map_index, tuple((row[0], row[1]) for row in rows))


@router.get("/jobs", dependencies=[Depends(require_run_access)])
async def jobs(query: Annotated[TaskQuery, Depends(parse_task_query)], connections: ShownConnections) -> Response:
    """Return the jobs of a DAG run, or of one of its tasks."""
    return _json(await service().jobs(query, connections))


async def _body(request: Request) -> DryRunRequest:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BODY_BYTES:
            raise refusal(413, "request", f"expected a body of at most {_MAX_BODY_BYTES} bytes, found a larger one")
    try:
        return DryRunRequest.model_validate_json(body)
    except ValidationError as error:
        message = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise refusal(_UNPROCESSABLE, "request", message) from None


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
