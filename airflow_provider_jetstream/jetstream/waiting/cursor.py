"""Where the ends of jobs will be stored."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from datetime import datetime
from sys import intern
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, Field

from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.client.subjects import subject_problem
from airflow_provider_jetstream.jetstream.errors import NotFoundError, PermissionDeniedError, QueueDeclarationError
from airflow_provider_jetstream.jetstream.queue.declaration import name_problems
from airflow_provider_jetstream.jetstream.queue.preconditions import require_no_refusal
from airflow_provider_jetstream.jetstream.queue.server_fields import field_findings
from airflow_provider_jetstream.jetstream.queue.undeclared_changes import log_changes, undeclared_changes
from airflow_provider_jetstream.jetstream.task_values import TaskValue

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

log = logging.getLogger(__name__)

UNKNOWN_REDRIVES = "Whether jobs of %s were redriven isn't known, so that a redriven one counts as gone: %s"

_COMPANIONS = ("events", "dead_letters", "audit")
_NAMES = ("queue", "created", "attempts", *_COMPANIONS, *(f"{name}_created" for name in _COMPANIONS))


def _stream_name(name: str) -> str:
    if any(name_problems("stream", name)):
        raise ValueError("expected the name of a stream")
    return name


def _filter(subject: str) -> str:
    if subject_problem(subject, wildcards=True):
        raise ValueError("expected a subject")
    return subject


def _time(text: str) -> str:
    if text and not datetime.fromisoformat(text).tzinfo:
        raise ValueError("expected a time with a time zone")
    return text


# Where a model has a cursor from an XCom, anybody may have written it, and names become parts of requests' subjects.
StreamName = Annotated[str, AfterValidator(_stream_name)]
_Position = Annotated[int, Field(strict=True, ge=1, lt=2**64)]
_Time = Annotated[str, AfterValidator(_time)]


@dataclass(frozen=True, slots=True)
class Cursor(TaskValue):
    """The stream positions from which the ends of jobs that aren't published yet can be read.

    :param queue: the work queue's stream
    :param created: when the queue's stream was created; earlier ends are about another stream of the same name
    :param events: the events stream
    :param events_from: the first sequence to read there
    :param dead_letters: the dead letter queue, if there is one
    :param dead_letters_from: the first sequence to read there
    :param advisory_subjects: where workers of any make report jobs, as the queue declares it
    :param events_created: when the events stream was created: positions in another one of its name mean nothing; empty
        where that wasn't read
    :param dead_letters_created: when the dead letter queue was created, likewise
    :param audit: the audit, if there is one
    :param audit_from: the first sequence to read there
    :param audit_created: when the audit was created, likewise
    :param attempts: the stream of what workers say of attempts, if there is one
    """

    queue: StreamName
    created: Annotated[_Time, Field(min_length=1)]
    events: StreamName
    events_from: _Position
    dead_letters: StreamName | None
    dead_letters_from: _Position
    advisory_subjects: tuple[Annotated[str, AfterValidator(_filter)], ...] = ()
    events_created: _Time = ""
    dead_letters_created: _Time = ""
    audit: StreamName | None = None
    audit_from: _Position = 1
    audit_created: _Time = ""
    attempts: StreamName | None = None

    def __post_init__(self) -> None:
        # It comes back from JSON as a list.
        object.__setattr__(self, "advisory_subjects", tuple(self.advisory_subjects))
        # Ten thousand triggers of a process have theirs from JSON, with the same few names in them.
        for name in _NAMES:
            if type(text := getattr(self, name)) is str:
                object.__setattr__(self, name, intern(text))

    def start(self, companion: str, created: str | None) -> int:
        """Return the first sequence to read in a stream: 1 where the stream is another one than when this was taken.

        :param companion: ``events``, ``dead_letters`` or ``audit``
        :param created: when the stream was created that has the name now, where that is known
        """
        known, position = getattr(self, f"{companion}_created"), getattr(self, f"{companion}_from")
        return 1 if known and created not in (None, known) else int(position)

    def from_start(self) -> Cursor:
        """Return a cursor that reads everything stored, for jobs that may have ended before this one was taken."""
        return replace(self, events_from=1, dead_letters_from=1, audit_from=1)

    def resumed(self, events_from: int, dead_letters_from: int) -> Cursor:
        """Return a cursor that reads from the positions that an earlier try of the task recorded.

        A position beyond the last message is one of a stream that was recreated since: all of it counts then.
        """
        return replace(
            self,
            events_from=events_from if events_from <= self.events_from else 1,
            dead_letters_from=dead_letters_from if dead_letters_from <= self.dead_letters_from else 1,
            audit_from=1,
        )


def events_of(queue: WorkQueue) -> str:
    """Return the name of the stream that stores how the queue's jobs end.

    :raises QueueDeclarationError: the queue declares no events, so no completion is stored
    """
    if queue.events is None:
        raise QueueDeclarationError(
            queue.name, ["expected events, so that completions are stored and can be waited for: declare them"]
        )
    return queue.events.name


async def take_cursor(connection: Connection, queue: WorkQueue, info: Mapping[str, Any] | None = None) -> Cursor:
    """Record the current stream positions; do this before publishing.

    :param info: the queue's STREAM.INFO, where it has been read already
    :raises QueueDeclarationError: the queue declares no events, so no completion is stored
    :raises UnsuitableQueueError: jobs of the queue stay stored when they have ended, or their ends don't
    :raises NotFoundError: one of its streams doesn't exist
    """
    events_name = events_of(queue)
    info = info or await stream_info(connection, queue.name)
    events = await stream_info(connection, events_name)
    require_no_refusal(queue.name, [*field_findings("queue", info, "scan"), *field_findings("events", events, "scan")])
    companions = {"events": events}
    if queue.dead_letters:
        companions["dead_letters"] = await stream_info(connection, queue.dead_letters.name)
    if queue.audit:
        try:
            companions["audit"] = await stream_info(connection, queue.audit.name)
        except NotFoundError:
            pass
        except PermissionDeniedError as denial:
            log.warning(UNKNOWN_REDRIVES, queue.name, denial)
    read = {found["config"]["name"]: found for found in (info, *companions.values())}
    log_changes(queue.name, undeclared_changes(queue, read))
    fields: dict[str, Any] = {"dead_letters": None, "dead_letters_from": 1}
    for name, found in companions.items():
        fields[name], fields[f"{name}_created"] = found["config"]["name"], found["created"]
        fields[f"{name}_from"] = int(found["state"]["last_seq"]) + 1
    fields["attempts"] = queue.attempts.name if queue.attempts else None
    return Cursor(queue=queue.name, created=info["created"], advisory_subjects=queue.advisory_subjects, **fields)
