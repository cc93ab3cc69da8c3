"""The routes of the page's data; ``docs/monitor-api.md`` describes them."""

from typing import Annotated

from airflow.api_fastapi.core_api.security import GetUserDep
from airflow.models.taskinstance import TaskInstance
from airflow.utils.session import create_session
from fastapi import APIRouter, Depends, Query, Response
from fastapi.concurrency import run_in_threadpool
from sqlalchemy import select as sql_select

from airflow_provider_jetstream import __version__
from airflow_provider_jetstream.airflow_compat import conf
from airflow_provider_jetstream.plugins.monitor import action_routes, letter_routes, running_service
from airflow_provider_jetstream.plugins.monitor.authorization import (
    may_act,
    payloads_hidden,
    permitted_connections,
    require_connection,
    require_run_access,
)
from airflow_provider_jetstream.plugins.monitor.configuration import monitor_settings
from airflow_provider_jetstream.plugins.monitor.letter_routes import After, Limit, Sequence, Viewing
from airflow_provider_jetstream.plugins.monitor.letter_routes import Hidden as HiddenTexts
from airflow_provider_jetstream.plugins.monitor.models.actions import Me
from airflow_provider_jetstream.plugins.monitor.models.stored_jobs import JobState
from airflow_provider_jetstream.plugins.monitor.running_service import json_answer
from airflow_provider_jetstream.plugins.monitor.task_jobs import TaskQuery

router = APIRouter(prefix="/api")

_MAX_INSTANCES = 1_000


Hidden = Annotated[bool, Depends(payloads_hidden)]
# Databases refuse longer ones, and this character.
AirflowId = Annotated[str, Query(max_length=250, pattern=r"^[^\x00]*$")]
ShownConnections = Annotated[tuple[str, ...], Depends(permitted_connections)]
_of_queue = APIRouter(prefix="/queues/{connection}/{queue}", dependencies=[Depends(require_connection)])


@router.get("/me")
def me(
    acting: Annotated[bool, Depends(may_act)], hidden: Hidden, connections: ShownConnections, user: GetUserDep
) -> Me:
    """Return the user's permissions."""
    settings = monitor_settings()
    return Me(
        may_act=acting,
        payloads=not hidden,
        dag_id=settings.redrive_dag,
        refresh_seconds=settings.refresh,
        connections=list(connections),
        version=__version__,
        user=user.get_name(),
        default_timezone=conf.get("core", "default_timezone", fallback="utc"),
    )


@router.get("/snapshot")
async def snapshot(connections: ShownConnections, user: GetUserDep, connection: str | None = None) -> Response:
    """Return the numbers of all queues."""
    if connection:
        await run_in_threadpool(require_connection, connection, user)
        connections = (connection,)
    return json_answer(await running_service.service().snapshot(connections))


@_of_queue.get("")
async def queue_detail(connection: str, queue: str) -> Response:
    """Return the details of a queue."""
    return json_answer(await running_service.service().queue(connection, queue))


@_of_queue.get("/history")
async def history(connection: str, queue: str, hours: Annotated[int, Query(ge=1, le=168)] = 1) -> Response:
    """Return the history of a queue."""
    return json_answer(await running_service.service().history(connection, queue, hours))


@_of_queue.get("/jobs")
async def stored_jobs(
    connection: str,
    queue: str,
    viewer: Viewing,
    state: JobState = "pending",
    consumer: Annotated[str | None, Query(max_length=250)] = None,
    after: After = 0,
    limit: Limit = 50,
) -> Response:
    """Return a page of a queue's jobs that are no dead letters."""
    page = running_service.service().job_page(connection, queue, state, consumer, after, limit, viewer.sees)
    return json_answer(await page)


@_of_queue.get("/jobs/{sequence}")
async def stored_job(connection: str, queue: str, sequence: Sequence, hiding: HiddenTexts, viewer: Viewing) -> Response:
    """Return the details of a stored job."""
    answer = await running_service.service().job(connection, queue, sequence, hiding)
    await run_in_threadpool(viewer.require, answer.dags)
    return json_answer(answer.content)


router.include_router(_of_queue)
router.include_router(letter_routes.router)
router.include_router(action_routes.router)


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
    return json_answer(await running_service.service().jobs(query, connections))
