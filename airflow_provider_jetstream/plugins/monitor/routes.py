"""The routes of the page's data and actions; ``docs/monitor-api.md`` describes them."""

from datetime import datetime
from typing import Annotated, TypeVar
from urllib.parse import urlsplit

from airflow.api_fastapi.core_api.security import GetUserDep
from airflow.models.taskinstance import TaskInstance
from airflow.utils.session import create_session
from fastapi import APIRouter, Depends, Path, Query, Request, Response, status
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ValidationError
from sqlalchemy import select as sql_select

from airflow_provider_jetstream import __version__
from airflow_provider_jetstream.airflow_compat import conf
from airflow_provider_jetstream.jetstream.dead_letters.group import BY_CAUSE, GroupField, group_fields
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.dead_letters.table import LetterQuery, Sort
from airflow_provider_jetstream.jetstream.redrive.json_patch import JsonPatch
from airflow_provider_jetstream.plugins.monitor import running_service
from airflow_provider_jetstream.plugins.monitor.authorization import (
    Viewer,
    may_act,
    may_see_every_dag,
    payloads_hidden,
    permitted_connections,
    permitted_dags,
    permitted_owners,
    refusal,
    require_acting,
    require_connection,
    require_run_access,
)
from airflow_provider_jetstream.plugins.monitor.configuration import monitor_settings
from airflow_provider_jetstream.plugins.monitor.jobs import TaskQuery
from airflow_provider_jetstream.plugins.monitor.letter_service import PLACES, Place
from airflow_provider_jetstream.plugins.monitor.letter_view import Hiding
from airflow_provider_jetstream.plugins.monitor.models.actions import (
    DryRunRequest,
    EditRequest,
    Me,
    PauseRequest,
    SteerRequest,
)
from airflow_provider_jetstream.plugins.monitor.models.letters import JobState
from airflow_provider_jetstream.plugins.monitor.queue_actions import Ask, Steer, dags_of, redrive_list, redrive_view
from airflow_provider_jetstream.plugins.monitor.running_service import json_answer

_JSON = "application/json"
_PORTS = {"http": 80, "https": 443}


def require_own_origin(request: Request) -> None:
    """Refuse requests that another site's page has sent, and requests that an HTML form can send.

    :raises HTTPException: the request comes from another origin, or its body isn't JSON
    """
    origins = request.headers.getlist("origin")
    site = request.headers.get("sec-fetch-site")
    if not _is_own(origins, site, request.headers.get("host", "")):
        raise refusal(
            status.HTTP_403_FORBIDDEN,
            "origin",
            f"expected a request of this Airflow's own page, found one of {', '.join(origins) or site or 'nowhere'!r};"
            " if this is Airflow's address behind a proxy, set it as [api] base_url",
        )
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _JSON:
        raise refusal(
            status.HTTP_415_UNSUPPORTED_MEDIA_TYPE,
            "media_type",
            f"expected a body of type {_JSON}, found another; name it in Content-Type",
        )


def _is_own(origins: list[str], site: str | None, host: str) -> bool:
    # Only browsers send these headers, and no page can change them. Without both, no browser sent the request.
    if site in ("cross-site", "same-site") or len(origins) > 1:
        return False
    if not origins:
        return True
    own = _address(origins[0])
    if own is None:
        return False
    # The browser compares with the address that it knows, which a proxy may have changed in Host.
    return site == "same-origin" or own == _address(conf.get("api", "base_url", fallback="")) or _is_at(own, host)


def _is_at(origin: tuple[str, str, int], host: str) -> bool:
    """Return whether the header Host names an origin; its scheme isn't known behind a proxy that ends TLS."""
    scheme, name, port = origin
    address = _address(f"{scheme}://{host}")
    return address is not None and address[1:] == (name, port)


def _address(url: str) -> tuple[str, str, int] | None:
    """Return scheme, host and port of an address of the web; ``None`` for any other, such as ``null``."""
    try:
        parts = urlsplit(url.strip())
        port = parts.port
    except ValueError:
        return None
    if parts.scheme not in _PORTS or not parts.hostname or "@" in parts.netloc:
        return None
    return parts.scheme, parts.hostname, port or _PORTS[parts.scheme]


_MAX_SEQUENCES = 1_000
_UNPROCESSABLE = 422
_FORBIDDEN = 403


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
    sequences: str | None = None,
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
        "sequences": _sequences(sequences),
    }
    return Selection.of({name: value for name, value in fields.items() if value} | {"parked": parked})


def _sequences(text: str | None) -> list[int] | None:
    if not text:
        return None
    numbers = text.split(",", _MAX_SEQUENCES)
    # Longer ones aren't stream sequences, and take long to parse.
    if len(numbers) > _MAX_SEQUENCES or not all(number.isascii() and number.isdigit() for number in numbers):
        raise refusal(
            _UNPROCESSABLE,
            "request",
            f"sequences: expected at most {_MAX_SEQUENCES} stream sequences with commas between them, found otherwise",
        )
    if any(len(number) > 19 for number in numbers):  # noqa: PLR2004
        raise refusal(_UNPROCESSABLE, "request", "sequences: expected stream sequences below 2**63, found a higher one")
    return [int(number) for number in numbers]


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
    return await run_in_threadpool(
        permitted_dags, await running_service.service().letters.dags(connection, queue), user
    )


def parse_query(
    selection: Annotated[Selection, Depends(permitted_selection)],
    dags: Annotated[frozenset[str], Depends(shown_dags)],
    job_id: Annotated[str | None, Query(max_length=1_000)] = None,
    died_from: datetime | None = None,
    died_to: datetime | None = None,
) -> LetterQuery:
    """Parse which letters are wanted, among the letters that the user may see."""
    for name, moment in (("died_from", died_from), ("died_to", died_to)):
        if moment is not None and moment.tzinfo is None:
            raise refusal(_UNPROCESSABLE, "request", f"{name}: expected a time with its offset, or Z, found none")
    return LetterQuery(selection, dags, job_id or None, died_from, died_to)


def parse_hiding(
    hidden: Annotated[bool, Depends(payloads_hidden)], every_dag: Annotated[bool, Depends(may_see_every_dag)]
) -> Hiding:
    """Return which texts the user may not see."""
    return Hiding(all=hidden, of_unknown=not every_dag)


Sequence = Annotated[int, Path(ge=1, lt=2**63)]
Wanted = Annotated[LetterQuery, Depends(parse_query)]
Hidden = Annotated[Hiding, Depends(parse_hiding)]
Viewing = Annotated[Viewer, Depends(Viewer)]
Limit = Annotated[int, Query(ge=1, le=200)]
After = Annotated[int, Query(ge=0, lt=2**63)]

_of_queue = APIRouter(prefix="/queues/{connection}/{queue}", dependencies=[Depends(require_connection)])


@_of_queue.get("/groups")
async def groups(
    connection: str,
    queue: str,
    query: Wanted,
    hiding: Hidden,
    group_by: Annotated[tuple[GroupField, ...], Depends(parse_group_by)],
) -> Response:
    """Return the groups of a queue's dead letters."""
    return json_answer(await running_service.service().letters.groups(connection, queue, query, group_by, hiding))


@_of_queue.get("/letters")
async def letters(
    connection: str,
    queue: str,
    query: Wanted,
    hiding: Hidden,
    sort: Sort = "sequence",
    offset: After = 0,
    after: After = 0,
    limit: Limit = 50,
) -> Response:
    """Return a page of a queue's dead letters."""
    if after and (sort != "sequence" or offset):
        raise refusal(_UNPROCESSABLE, "request", "after: expected it only with sort=sequence and without offset")
    page = running_service.service().letters.page(
        connection, queue, query, hiding, sort=sort, offset=offset, after=after, limit=limit
    )
    return json_answer(await page)


@_of_queue.get("/letters/{sequence}")
async def letter(connection: str, queue: str, sequence: Sequence, hiding: Hidden, viewer: Viewing) -> Response:
    """Return the details of a dead letter, or of a job that was one."""
    answer = await running_service.service().letters.detail(connection, queue, sequence, hiding, viewer.sees)
    await run_in_threadpool(viewer.require, answer.dags)
    return json_answer(answer.content)


@_of_queue.get("/letters/{sequence}/body")
async def body(connection: str, queue: str, sequence: Sequence, hiding: Hidden, viewer: Viewing) -> Response:
    """Return the body of a dead letter as it is stored."""
    if hiding.all:
        raise refusal(_FORBIDDEN, "forbidden", "expected a role that may see bodies, found one that may not")
    answer = await running_service.service().letters.body(connection, queue, sequence, hiding)
    await run_in_threadpool(viewer.require, answer.dags)
    headers = {"Content-Disposition": f'attachment; filename="job-{sequence}"'}
    return Response(answer.content, media_type="application/octet-stream", headers=headers)


@_of_queue.get("/search")
async def search(
    connection: str,
    queue: str,
    query: Wanted,
    hiding: Hidden,
    text: Annotated[str, Query(min_length=1, max_length=500)],
    where: Annotated[list[Place] | None, Query()] = None,
    after: After = 0,
    limit: Limit = 50,
) -> Response:
    """Search a text in a queue's letters; the answer is lines of JSON as they come."""
    lines = await running_service.service().letters.search(
        connection, queue, query, hiding, text, where=where or PLACES, after=after, limit=limit
    )
    return StreamingResponse(lines, media_type="application/x-ndjson", headers={"X-Accel-Buffering": "no"})


@_of_queue.get("/diagnosis")
async def diagnosis(
    connection: str, queue: str, selection: Annotated[Selection, Depends(permitted_selection)], hiding: Hidden
) -> Response:
    """Return the diagnosis of the selected letters."""
    if hiding.of_unknown and selection.dag_id is None:
        raise refusal(
            _FORBIDDEN, "forbidden", "expected a role that may see the letters of all DAGs, or dag_id, found neither"
        )
    answer = running_service.service().letters.diagnosis(connection, queue, selection, hidden=hiding.all)
    return json_answer(await answer)


_MAX_BODY_BYTES = 2 * 1024 * 1024
_Model = TypeVar("_Model", bound=BaseModel)
_Name = Annotated[str | None, Query(max_length=250)]

_acting = APIRouter(dependencies=[Depends(require_own_origin), Depends(require_acting)])


@_of_queue.get("/redrives")
async def redrives(
    connection: str, queue: str, viewer: Viewing, hiding: Hidden, dag_id: _Name = None, run_id: _Name = None
) -> Response:
    """Return those redrives of a queue that the user may see."""
    found = await running_service.service().actions.redrives(connection, queue)
    shown = await run_in_threadpool(redrive_list, found, viewer.sees_all, hiding, dag_id=dag_id, run_id=run_id)
    return json_answer(shown.model_dump_json().encode())


@_of_queue.get("/redrives/{redrive}")
async def redrive(connection: str, queue: str, redrive: str, viewer: Viewing, hiding: Hidden) -> Response:
    """Return a redrive."""
    found = await running_service.service().actions.redrive(connection, queue, redrive)
    await run_in_threadpool(viewer.require, dags_of(found))
    return json_answer(redrive_view(found, hiding).model_dump_json().encode())


@_of_queue.get("/account")
async def last_account(connection: str, queue: str) -> Response:
    """Return the last account of a queue's jobs."""
    return json_answer(await running_service.service().actions.account(connection, queue, anew=False))


@_acting.post("/account")
async def account(connection: str, queue: str) -> Response:
    """Make an account of a queue's jobs."""
    return json_answer(await running_service.service().actions.account(connection, queue, anew=True))


# Bodies are parsed here rather than by FastAPI, which would answer one that isn't JSON before it checks the origin.
@_acting.post("/redrives/{redrive}/{action}")
async def steer(
    connection: str,
    queue: str,
    redrive: str,
    action: Steer,
    request: Request,
    user: GetUserDep,
    viewer: Viewing,
    hiding: Hidden,
) -> Response:
    """Pause, resume or abort a redrive."""
    parsed = await _body(request, SteerRequest)
    actions = running_service.service().actions
    # A user who may not see a redrive may not steer it either.
    await run_in_threadpool(viewer.require, dags_of(await actions.redrive(connection, queue, redrive)))
    found = await actions.steer(connection, queue, redrive, action, parsed, user.get_name())
    return json_answer(redrive_view(found, hiding).model_dump_json().encode())


@_acting.post("/consumers/{name}/pause")
async def pause_consumer(connection: str, queue: str, name: str, request: Request, user: GetUserDep) -> Response:
    """Pause a consumer."""
    parsed = await _body(request, PauseRequest)
    actions = running_service.service().actions
    return json_answer(await actions.control_consumer(connection, queue, name, parsed, user.get_name()))


@_acting.post("/consumers/{name}/resume")
async def resume_consumer(connection: str, queue: str, name: str, request: Request, user: GetUserDep) -> Response:
    """Resume a consumer."""
    parsed = await _body(request, SteerRequest)
    actions = running_service.service().actions
    return json_answer(await actions.control_consumer(connection, queue, name, parsed, user.get_name()))


@_acting.post("/jobs/{sequence}/{action}")
async def ask(
    connection: str,
    queue: str,
    sequence: Sequence,
    action: Ask,
    request: Request,
    user: GetUserDep,
    viewer: Viewing,
    hiding: Hidden,
) -> Response:
    """Retry a job that waits for its next delivery, or give it up."""
    parsed = await _body(request, SteerRequest)
    # Who may not see a job may not act on it either.
    shown = await running_service.service().job(connection, queue, sequence, hiding)
    await run_in_threadpool(viewer.require, shown.dags)
    actions = running_service.service().actions
    return json_answer(await actions.ask(connection, queue, sequence, action, parsed.why, user.get_name()))


@_acting.post("/letters/{sequence}/edit")
async def edit(
    connection: str,
    queue: str,
    sequence: Sequence,
    request: Request,
    user: GetUserDep,
    viewer: Viewing,
    hiding: Hidden,
) -> Response:
    """Show what an edit of a letter changes, and redrive the letter with it."""
    if hiding.all:
        raise refusal(403, "forbidden", "expected a role that may see bodies, found one that may not")
    parsed = await _body(request, EditRequest)
    # Before anything is said of the letter, such as which digest its body has.
    shown = await running_service.service().letters.body(connection, queue, sequence, hiding)
    await run_in_threadpool(viewer.require, shown.dags)
    actions = running_service.service().actions
    answer = await actions.edit(connection, queue, sequence, parsed, user.get_name(), hiding)
    await run_in_threadpool(viewer.require, answer.dags)
    return json_answer(answer.content)


@_acting.post("/dry-run")
async def dry_run(connection: str, queue: str, request: Request, user: GetUserDep, hiding: Hidden) -> Response:
    """Count what an action would do, and show what a patch would change."""
    parsed = await _body(request, DryRunRequest)
    selection = Selection.of(parsed.select)
    patch = None if parsed.patch is None else JsonPatch.of(parsed.patch)
    of_unknown = hiding.of_unknown and selection.dag_id is None
    if patch and (hiding.all or of_unknown):
        # Its samples are of any of the letters.
        raise refusal(
            403, "forbidden", "expected a role that may see the bodies of all these letters, found one that may not"
        )
    if selection.dag_id is not None:
        await run_in_threadpool(require_run_access, selection.dag_id, user)
    actions = running_service.service().actions
    counted = actions.dry_run(connection, queue, selection, parsed.action, patch, parsed.undo, hidden=of_unknown)
    return json_answer(await counted)


async def _body(request: Request, model: type[_Model]) -> _Model:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BODY_BYTES:
            raise refusal(413, "request", f"expected a body of at most {_MAX_BODY_BYTES} bytes, found a larger one")
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        message = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise refusal(_UNPROCESSABLE, "request", message) from None


router = APIRouter(prefix="/api")

_MAX_INSTANCES = 1_000


HidesTexts = Annotated[bool, Depends(payloads_hidden)]
# Databases refuse longer ones, and this character.
AirflowId = Annotated[str, Query(max_length=250, pattern=r"^[^\x00]*$")]
ShownConnections = Annotated[tuple[str, ...], Depends(permitted_connections)]


@router.get("/me")
def me(
    acting: Annotated[bool, Depends(may_act)], hidden: HidesTexts, connections: ShownConnections, user: GetUserDep
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
    service = running_service.service()
    owners = await run_in_threadpool(permitted_owners, await service.newest_dags(connections), user)
    return json_answer(await service.snapshot(connections, owners))


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
    hiding: Hidden,
    state: JobState = "pending",
    consumer: Annotated[str | None, Query(max_length=250)] = None,
    after: After = 0,
    limit: Limit = 50,
) -> Response:
    """Return a page of a queue's jobs that are no dead letters."""
    page = running_service.service().job_page(connection, queue, state, consumer, after, limit, viewer.sees, hiding)
    return json_answer(await page)


@_of_queue.get("/jobs/{sequence}")
async def stored_job(connection: str, queue: str, sequence: Sequence, hiding: Hidden, viewer: Viewing) -> Response:
    """Return the details of a stored job."""
    answer = await running_service.service().job(connection, queue, sequence, hiding)
    await run_in_threadpool(viewer.require, answer.dags)
    return json_answer(answer.content)


_of_queue.include_router(_acting)
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
    return json_answer(await running_service.service().jobs(query, connections))
