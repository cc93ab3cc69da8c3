"""Reads the redrives of a queue, and pauses, resumes and aborts them."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from airflow_provider_jetstream.jetstream.audit.log import AuditLog
from airflow_provider_jetstream.jetstream.audit.redrive_record import (
    Redrive,
    RedriveControl,
    RedriveState,
    next_state,
    redrive_control_subject,
    redrive_subject,
)
from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.message_reader import last_message, read_range
from airflow_provider_jetstream.jetstream.client.publish_ack import store
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info, subject_counts
from airflow_provider_jetstream.jetstream.client.subjects import subject_problem
from airflow_provider_jetstream.jetstream.errors import ArgumentError, NotFoundError, RedriveRequestError
from airflow_provider_jetstream.jetstream.evidence import proves_nothing

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.audit.redrive_record import ControlAction
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

_LONGEST_NAME = 200
_BEGINNING = attrgetter("from_sequence", "id")


async def list_redrives(connection: Connection, queue: WorkQueue, *, limit: int = 50) -> list[Redrive]:
    """Read the redrives of a queue, the latest first, each in the state that people asked for.

    :param limit: how many at most
    :raises NotFoundError: the queue, or its audit, doesn't exist
    """
    audit = await _open(connection, queue)
    ids = [
        subject.rpartition(".")[2]
        async for subject, _ in subject_counts(connection, audit.stream, redrive_subject(audit.queue, "*"))
    ]
    ids = sorted(ids, reverse=True)[:limit]
    found = await map_concurrently(lambda redrive: _read(audit, connection, redrive), ids)
    # Ids have the time by the clock of the program; where in the audit a redrive began is the server's.
    return sorted((redrive for redrive in found if redrive), key=_BEGINNING, reverse=True)


async def read_redrive(connection: Connection, queue: WorkQueue, redrive: str) -> Redrive:
    """Read one redrive, with what people asked of it.

    :param redrive: its id
    :raises NotFoundError: there is no redrive of this id; or the queue, or its audit, doesn't exist
    """
    return await require_redrive(connection, await _open(connection, queue), redrive)


async def pause_redrive(
    connection: Connection, queue: WorkQueue, redrive: str, *, who: str, why: str | None = None
) -> Redrive:
    """Have a redrive stop before its next letters, until it is resumed; nothing changes where it is paused.

    :param redrive: its id
    :param who: the person's name
    :param why: a reason
    :return: the redrive in its new state; its holder obeys within a second, or when it is run again
    :raises RedriveRequestError: it is over, or has failed
    :raises NotFoundError: there is no redrive of this id
    :raises ArgumentError: ``who`` is no name
    """
    return await _control(connection, queue, redrive, "pause", who, why)


async def resume_redrive(
    connection: Connection,
    queue: WorkQueue,
    redrive: str,
    *,
    who: str,
    why: str | None = None,
    park_returned: bool = False,
) -> Redrive:
    """Have a redrive go on that is paused, or that waits at the gate of a wave; nothing changes where it runs.

    :param redrive: its id
    :param who: the person's name
    :param why: a reason
    :param park_returned: at a gate: park the letters of the wave that died again; otherwise a later wave brings them
        back once more
    :return: the redrive in its new state; its holder obeys within a second, or when it is run again
    :raises RedriveRequestError: it is over, or has failed
    :raises NotFoundError: there is no redrive of this id
    :raises ArgumentError: ``who`` is no name
    """
    return await _control(connection, queue, redrive, "resume", who, why, park_returned=park_returned)


async def abort_redrive(
    connection: Connection, queue: WorkQueue, redrive: str, *, who: str, why: str | None = None
) -> Redrive:
    """End a redrive: letters that aren't begun stay where they are; nothing changes where it is aborted.

    :param redrive: its id
    :param who: the person's name
    :param why: a reason
    :return: the redrive in its new state; its holder obeys within a second, or when it is run again
    :raises RedriveRequestError: it is finished
    :raises NotFoundError: there is no redrive of this id
    :raises ArgumentError: ``who`` is no name
    """
    return await _control(connection, queue, redrive, "abort", who, why)


async def _control(
    connection: Connection,
    queue: WorkQueue,
    redrive: str,
    action: ControlAction,
    who: str,
    why: str | None,
    **fields: Any,
) -> Redrive:
    if not isinstance(who, str) or not who.strip() or len(who) > _LONGEST_NAME:
        raise ArgumentError(f"expected the name of the person who asks for it as who, found {who!r}: give a name")
    try:
        control = RedriveControl(action=action, who=who, why=why, **fields)
        body = control.model_dump_json(exclude={"at", "sequence"}, exclude_none=True).encode()
    except ValueError as error:
        raise ArgumentError(f"expected who and why as text, found otherwise: {error}") from None
    audit = await _open(connection, queue)
    found = await require_redrive(connection, audit, redrive)
    if next_state(found.state, action) == found.state:
        _require_effect(found, action)
        return found
    ack = await store(connection, redrive_control_subject(audit.queue, redrive), body)
    found = await require_redrive(connection, audit, redrive)
    # It may have ended before its holder read this.
    if found.controls_to < ack.sequence and not any(control.sequence >= ack.sequence for control in found.pending):
        _require_effect(found, action)
    return found


def _require_effect(redrive: Redrive, action: ControlAction) -> None:
    """Raise where a control could never be obeyed."""
    if redrive.state == RedriveState.ABORTED and action == "abort":
        return
    if redrive.state.is_over or redrive.state == RedriveState.FAILED:
        what = "start another one" if redrive.state.is_over else f"run it again with run={redrive.run!r}, which goes on"
        since = f"{redrive.at:%Y-%m-%dT%H:%M:%SZ}"
        raise RedriveRequestError(
            f"expected a redrive of {redrive.stream} that can {action}, found {redrive.id} {redrive.state.value} since"
            f" {since}{f' ({redrive.reason})' if redrive.reason else ''}: {what}"
        )


async def require_redrive(connection: Connection, audit: AuditLog, redrive: str) -> Redrive:
    """Read one redrive with its controls.

    :raises NotFoundError: there is none of this id
    """
    if (
        "." not in redrive
        and not subject_problem(redrive, wildcards=False)
        and (found := await _read(audit, connection, redrive))
    ):
        return found
    raise NotFoundError(
        f"expected a redrive of {audit.queue} with the id {redrive!r}, found none in {audit.stream}: list them, or see"
        " whether the audit's max_age is over"
    )


async def _read(audit: AuditLog, connection: Connection, redrive: str) -> Redrive | None:
    found = await read_record(connection, audit, redrive)
    return found and found.with_controls(await read_controls(connection, audit, redrive))


async def read_record(connection: Connection, audit: AuditLog, redrive: str) -> Redrive | None:
    """Read a redrive as its holder recorded it last; ``None`` where there is none."""
    message = await last_message(connection, audit.stream, redrive_subject(audit.queue, redrive))
    return parse_redrive(message, audit.created) if message else None


def parse_redrive(message: StoredMessage, created: str) -> Redrive | None:
    """Parse a record; ``None`` where it isn't one of this queue."""
    if proves_nothing(message):
        return None
    try:
        found = Redrive.model_validate_json(message.data)
    except ValidationError:
        return None
    if found.created != created or found.id != message.subject.rpartition(".")[2]:
        return None
    return found.model_copy(update={"at": message.stored_at, "revision": message.sequence})


async def read_controls(connection: Connection, audit: AuditLog, redrive: str, after: int = 0) -> list[RedriveControl]:
    """Read what people asked of a redrive, oldest first.

    :param after: only what the audit stored after this sequence
    """
    subject = redrive_control_subject(audit.queue, redrive)
    last = await last_message(connection, audit.stream, subject)
    if last is None or last.sequence <= after:
        return []
    found: list[RedriveControl] = []
    async for message in read_range(connection, audit.stream, subject, after + 1, last.sequence):
        try:
            control = RedriveControl.model_validate_json(message.data)
        except ValidationError:
            continue
        found.append(control.model_copy(update={"at": message.stored_at, "sequence": message.sequence}))
    return found


async def _open(connection: Connection, queue: WorkQueue) -> AuditLog:
    created = (await stream_info(connection, queue.name))["created"]
    audit = await AuditLog.open(connection, queue, created)
    if audit is None:
        raise NotFoundError(
            f"expected an audit of {queue.name}, which stores its redrives, found none: declare audit (the default) and"
            " provision the queue"
        )
    return audit
