"""A handle on published jobs: all that another task, or another DAG, needs to wait for them.

It is JSON, and small however many jobs it names: where their sequences are scattered, they are a document in the events
stream, and the handle has the references to its parts.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.documents import DocumentName, DocumentParts, DocumentWriter, read_parts
from airflow_provider_jetstream.jetstream.errors import ArgumentError, NotFoundError, QueueGoneError
from airflow_provider_jetstream.jetstream.publishing.report import PublishReport
from airflow_provider_jetstream.jetstream.queue.preconditions import require_no_refusal
from airflow_provider_jetstream.jetstream.queue.server_fields import field_findings
from airflow_provider_jetstream.jetstream.units import short_text
from airflow_provider_jetstream.jetstream.waiting.cursor import Cursor
from airflow_provider_jetstream.jetstream.waiting.report import WaitReport, report_on

if TYPE_CHECKING:
    from collections.abc import Iterable

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.documents import DocumentPart

# What a handle holds itself.
_MAX_RANGES = 200
_MAX_ADVISED = 50
# Who may write to an XCom must not make a task hold more than this.
_MAX_JOBS = 20_000_000

_Sequence = Annotated[int, Field(strict=True, ge=1, lt=2**64)]


def _in_order(ends: tuple[int, int]) -> tuple[int, int]:
    if ends[1] < ends[0]:
        raise ValueError(f"expected the first sequence of a range before its last one, found {ends}")
    return ends


_Range = Annotated[tuple[_Sequence, _Sequence], AfterValidator(_in_order)]


# Of a stored handle: a range, or an advised job.
_Row: TypeAlias = _Range | tuple[str, _Sequence]
_ROWS: TypeAdapter[list[_Row]] = TypeAdapter(list[_Row])


class JobsHandle(BaseModel):
    """A handle on published jobs.

    :param type: tells a handle from other JSON
    :param cursor: taken before they were published
    :param sequences: their stream sequences as ranges
    :param advised: the jobs that workers report on advisory subjects: stream sequences by digests
    :param key: distinguishes the document that has both, where they are too many, from those of other tasks
    :param parts: references to its parts
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    type: Literal["io.airflow.jetstream.v1.jobs"] = "io.airflow.jetstream.v1.jobs"
    cursor: Cursor
    sequences: list[_Range] = []
    advised: dict[str, _Sequence] = {}
    key: str = ""
    parts: DocumentParts = []

    @classmethod
    async def take(cls, connection: Connection, cursor: Cursor, report: PublishReport, key: str) -> JobsHandle:
        """Return the handle on the jobs of a call, and store them where they are too many for it.

        :param cursor: taken before the jobs were published
        :param key: a token that distinguishes the handle from other tasks' handles
        :raises ApiError: the events stream refuses a part
        :raises TransientError: it isn't known whether a part is stored
        """
        if report.duplicates or report.extra:
            # Those were stored before, and may have ended before the cursor was taken.
            cursor = cursor.from_start()
        handle = cls(cursor=cursor, sequences=report.awaited_ranges(), advised=report.advised)
        return await handle.stored(connection, key)

    async def stored(self, connection: Connection, key: str) -> JobsHandle:
        """Return the handle, with its jobs in the events stream where they are too many for it; see :meth:`take`."""
        if len(self.sequences) <= _MAX_RANGES and len(self.advised) <= _MAX_ADVISED:
            return self
        writer = DocumentWriter(connection, _name(self.cursor, key))
        await writer.add(self.sequences)
        await writer.add(self.advised.items())
        return JobsHandle(cursor=self.cursor, key=key, parts=await writer.finish())

    @classmethod
    def of(cls, value: object) -> JobsHandle:
        """Return the handle that a value is or holds.

        :param value: a handle, its JSON as a dict or as text, what a task returned that has it as ``handle``, or the
            report of a publish
        :raises ArgumentError: there is none
        """
        found = value.handle if isinstance(value, PublishReport) else value
        if isinstance(found, cls):
            return found
        if isinstance(found, str):
            found = _literal(found)
        if isinstance(found, Mapping) and isinstance(found.get("handle"), Mapping):
            found = found["handle"]
        try:
            return cls.model_validate(found)
        except (ValidationError, TypeError, AttributeError) as error:
            raise ArgumentError(
                "expected the handle of published jobs, as a publishing task returns it under the key handle, found"
                f" {short_text(repr(value), 200)}: pull it from that task, whose queue has to declare events"
            ) from error

    def as_json(self) -> dict[str, Any]:
        """Return the handle for an XCom."""
        return self.model_dump(mode="json", exclude_defaults=True) | {"type": self.type}

    def compact(self) -> JobsHandle:
        """Return an equal handle that shares with others what is empty: a triggerer holds ten thousand of them."""
        fields = {"advised": self.advised or _NO_JOBS, "parts": self.parts or _NO_PARTS}
        own = {name: getattr(self, name) for name in ("type", "cursor", "sequences", "key")}
        return JobsHandle.model_construct(_FIELDS, **own, **fields)

    async def cursor_now(self, connection: Connection) -> Cursor:
        """Return the cursor from which the ends of the jobs are read in the streams as they are now.

        :raises UnsuitableQueueError: jobs of the queue stay stored when they have ended, or their ends don't
        :raises NotFoundError: the events stream or the dead letter queue doesn't exist
        """
        cursor = self.cursor
        events = await stream_info(connection, cursor.events)
        refusals = [*field_findings("events", events, "scan")]
        # Without the queue, or with another one of its name, the ends that are stored still count.
        with suppress(NotFoundError):
            info = await stream_info(connection, cursor.queue)
            refusals += field_findings("queue", info, "scan") if info["created"] == cursor.created else ()
        require_no_refusal(cursor.queue, refusals)
        # A position beyond the end is one of a stream that was created anew since.
        is_beyond = cursor.events_from > events["state"]["last_seq"] + 1
        return replace(cursor, events_from=1) if is_beyond else cursor

    async def report(self, connection: Connection | None = None) -> tuple[WaitReport, dict[str, int]]:
        """Return a report in which no job has ended, and by digest the sequences of jobs with an advisory subject.

        :param connection: needed where the handle has parts
        :raises QueueGoneError: the events stream doesn't store a part any more
        :raises ArgumentError: they are too many
        """
        ranges, advised = list(self.sequences), self.advised
        count, cursor = _counted(0, ranges), self.cursor
        if connection and self.parts:
            parts = iter(self.parts)
            async for rows in read_parts(connection, _name(cursor, self.key), self.parts, _ROWS):
                part = next(parts)
                if rows is None:
                    raise QueueGoneError(
                        f"expected message {part.sequence} of {cursor.events} to name jobs of {cursor.queue} for a"
                        " handle, found that it isn't stored any more: wait before the events' max_age is over"
                    )
                some = [(row[0], row[1]) for row in rows if isinstance(row[0], int)]
                # Before the next part is read: anybody may have written the handle.
                count = _counted(count, some)
                ranges += some
                advised = advised | {row[0]: row[1] for row in rows if isinstance(row[0], str)}
        return await report_on(ranges), advised


_FIELDS = set(JobsHandle.model_fields)
_NO_JOBS: dict[str, int] = {}
_NO_PARTS: list[DocumentPart] = []


def _name(cursor: Cursor, key: str) -> DocumentName:
    return DocumentName(cursor.events, cursor.queue, "handle", key, cursor.created)


def _counted(jobs: int, ranges: Iterable[tuple[int, int]]) -> int:
    jobs += sum(last - first + 1 for first, last in ranges)
    if jobs > _MAX_JOBS:
        raise ArgumentError(f"expected a handle on at most {_MAX_JOBS:,} jobs, found {jobs:,}: wait for parts of them")
    return jobs


def _literal(text: str) -> object:
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        # What Jinja makes of a dict.
        return ast.literal_eval(text)
    return text
