"""The routes of redrives, and of what people do; ``docs/monitor-api.md`` describes them."""

from typing import Annotated, TypeVar

from airflow.api_fastapi.core_api.security import GetUserDep
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ValidationError

from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.redrive.json_patch import JsonPatch
from airflow_provider_jetstream.plugins.monitor import running_service
from airflow_provider_jetstream.plugins.monitor.authorization import (
    refusal,
    require_acting,
    require_connection,
    require_run_access,
)
from airflow_provider_jetstream.plugins.monitor.letter_routes import Hidden, Sequence, Viewing
from airflow_provider_jetstream.plugins.monitor.models.actions import DryRunRequest
from airflow_provider_jetstream.plugins.monitor.models.redrives import EditRequest, PauseRequest, SteerRequest
from airflow_provider_jetstream.plugins.monitor.queue_actions import Steer
from airflow_provider_jetstream.plugins.monitor.redrive_view import dags_of, redrive_list, redrive_view
from airflow_provider_jetstream.plugins.monitor.request_origin import require_own_origin
from airflow_provider_jetstream.plugins.monitor.running_service import json_answer

_MAX_BODY_BYTES = 2 * 1024 * 1024
_UNPROCESSABLE = 422
_Model = TypeVar("_Model", bound=BaseModel)
_Name = Annotated[str | None, Query(max_length=250)]

router = APIRouter(prefix="/queues/{connection}/{queue}", dependencies=[Depends(require_connection)])
_acting = APIRouter(dependencies=[Depends(require_own_origin), Depends(require_acting)])


@router.get("/redrives")
async def redrives(
    connection: str, queue: str, viewer: Viewing, hiding: Hidden, dag_id: _Name = None, run_id: _Name = None
) -> Response:
    """Return those redrives of a queue that the user may see."""
    found = await running_service.service().actions.redrives(connection, queue)
    shown = await run_in_threadpool(redrive_list, found, viewer.sees_all, hiding, dag_id=dag_id, run_id=run_id)
    return json_answer(shown.model_dump_json().encode())


@router.get("/redrives/{redrive}")
async def redrive(connection: str, queue: str, redrive: str, viewer: Viewing, hiding: Hidden) -> Response:
    """Return a redrive."""
    found = await running_service.service().actions.redrive(connection, queue, redrive)
    await run_in_threadpool(viewer.require, dags_of(found))
    return json_answer(redrive_view(found, hiding).model_dump_json().encode())


@router.get("/account")
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
    # Who may not see a redrive may not steer it either.
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
    counted = actions.dry_run(connection, queue, selection, parsed.action, patch, hidden=of_unknown)
    return json_answer(await counted)


router.include_router(_acting)


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
