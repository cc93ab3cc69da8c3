"""The routes of dead letters; ``docs/monitor-api.md`` describes them."""

from datetime import datetime
from typing import Annotated

from airflow.api_fastapi.core_api.security import GetUserDep
from fastapi import APIRouter, Depends, Path, Query, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse

from airflow_provider_jetstream.jetstream.dead_letters.group import GroupField, group_fields
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.dead_letters.table import LetterQuery, Sort
from airflow_provider_jetstream.jetstream.redrive.preview import BY_CAUSE
from airflow_provider_jetstream.plugins.monitor import running_service
from airflow_provider_jetstream.plugins.monitor.authorization import (
    Viewer,
    may_see_every_dag,
    payloads_hidden,
    permitted_dags,
    refusal,
    require_connection,
    require_run_access,
)
from airflow_provider_jetstream.plugins.monitor.letter_search import PLACES, Place
from airflow_provider_jetstream.plugins.monitor.letter_view import Hiding
from airflow_provider_jetstream.plugins.monitor.running_service import json_answer

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
    """Parse which letters are wanted, of those that the user may see."""
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

router = APIRouter(prefix="/queues/{connection}/{queue}", dependencies=[Depends(require_connection)])


@router.get("/groups")
async def groups(
    connection: str,
    queue: str,
    query: Wanted,
    hiding: Hidden,
    group_by: Annotated[tuple[GroupField, ...], Depends(parse_group_by)],
) -> Response:
    """Return the groups of a queue's dead letters."""
    return json_answer(await running_service.service().letters.groups(connection, queue, query, group_by, hiding))


@router.get("/letters")
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


@router.get("/letters/{sequence}")
async def letter(connection: str, queue: str, sequence: Sequence, hiding: Hidden, viewer: Viewing) -> Response:
    """Return the details of a dead letter, or of a job that was one."""
    answer = await running_service.service().letters.detail(connection, queue, sequence, hiding, viewer.sees)
    await run_in_threadpool(viewer.require, answer.dags)
    return json_answer(answer.content)


@router.get("/letters/{sequence}/body")
async def body(connection: str, queue: str, sequence: Sequence, hiding: Hidden, viewer: Viewing) -> Response:
    """Return the body of a dead letter as it is stored."""
    if hiding.all:
        raise refusal(_FORBIDDEN, "forbidden", "expected a role that may see bodies, found one that may not")
    answer = await running_service.service().letters.body(connection, queue, sequence, hiding)
    await run_in_threadpool(viewer.require, answer.dags)
    headers = {"Content-Disposition": f'attachment; filename="job-{sequence}"'}
    return Response(answer.content, media_type="application/octet-stream", headers=headers)


@router.get("/search")
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


@router.get("/diagnosis")
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
