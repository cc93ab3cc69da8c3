"""What tests of rooms need of a server and of the package, and what users don't.

Tests outside tests/unit import public names, the wire contract, and testbed; of testbed, this module and
:mod:`testbed.seams` alone know names of the package's inside. What it defines stands on JetStream's API and on public
names. What it hands on is what a rebuilt room still has, perhaps elsewhere: then this module changes, and no test.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.command.exit_codes import ExitCode
from airflow_provider_jetstream.jetstream import ApiError, NotFoundError, Policy, get_message
from airflow_provider_jetstream.jetstream.advisories import Cancelled, Completion, parse_advisory
from airflow_provider_jetstream.jetstream.archive import ArchiveReader
from airflow_provider_jetstream.jetstream.audit.intent import Target
from airflow_provider_jetstream.jetstream.audit.lease import read_lease
from airflow_provider_jetstream.jetstream.audit.log import AuditLog
from airflow_provider_jetstream.jetstream.audit.records import LetterRecord, RunRecord
from airflow_provider_jetstream.jetstream.audit.redrives import (
    new_redrive_id,
    redrive_control_subject,
    redrive_subject,
)
from airflow_provider_jetstream.jetstream.cancellation.cache import follow_cancellations
from airflow_provider_jetstream.jetstream.cancellation.cancel import (
    Cancellation,
    cancel_jobs,
    cancel_stored,
    cancelled_message,
    find_cancellation,
    is_cancelled,
)
from airflow_provider_jetstream.jetstream.client.advisory_probe import probe_consumer
from airflow_provider_jetstream.jetstream.client.concurrency import gather
from airflow_provider_jetstream.jetstream.client.headers import Headers
from airflow_provider_jetstream.jetstream.client.message import StoredMessage
from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection
from airflow_provider_jetstream.jetstream.client.sequence_ranges import SequenceRanges
from airflow_provider_jetstream.jetstream.client.stream_api import list_consumers
from airflow_provider_jetstream.jetstream.dead_letters.find import Summary, summarise_dead_letters
from airflow_provider_jetstream.jetstream.dead_letters.letter import BodySource
from airflow_provider_jetstream.jetstream.dead_letters.letter_origins import resolve_origins
from airflow_provider_jetstream.jetstream.dead_letters.preservation import BodyPreserver
from airflow_provider_jetstream.jetstream.dead_letters.record import read_record, record_headers
from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
from airflow_provider_jetstream.jetstream.dead_letters.status import NotDead
from airflow_provider_jetstream.jetstream.documents import (
    DocumentName,
    DocumentPart,
    DocumentParts,
    DocumentWriter,
    read_parts,
)
from airflow_provider_jetstream.jetstream.inspection.health import LeftOver, count_left_over
from airflow_provider_jetstream.jetstream.inspection.overview import inspect_all_queues
from airflow_provider_jetstream.jetstream.publication import Publication
from airflow_provider_jetstream.jetstream.publishing.batch import Batch
from airflow_provider_jetstream.jetstream.publishing.job import OutgoingJob
from airflow_provider_jetstream.jetstream.publishing.job_identity import job_id_of, redrive_message_id, stated_job_id
from airflow_provider_jetstream.jetstream.publishing.outbox import Outbox
from airflow_provider_jetstream.jetstream.publishing.preparation import PreparedJobs, prepare_jobs
from airflow_provider_jetstream.jetstream.publishing.report import Destination
from airflow_provider_jetstream.jetstream.queue.discovery import (
    DeadLetterQueueInfo,
    find_dead_letter_queues,
    known_queue,
)
from airflow_provider_jetstream.jetstream.queue.finding import Finding
from airflow_provider_jetstream.jetstream.queue.partitions import partition_of
from airflow_provider_jetstream.jetstream.queue.snapshot import take_snapshot
from airflow_provider_jetstream.jetstream.redrive.copy_content import content_of_copy
from airflow_provider_jetstream.jetstream.redrive.copy_search import find_copies
from airflow_provider_jetstream.jetstream.redrive.protocol import GUARANTEES
from airflow_provider_jetstream.jetstream.redrive.redrive import advance_redrive
from airflow_provider_jetstream.jetstream.redrive.redrive_lease import take_redrive_lease
from airflow_provider_jetstream.jetstream.redrive.removal import remove_entries
from airflow_provider_jetstream.jetstream.roles.permissions import ROLES
from airflow_provider_jetstream.jetstream.waiting.wait import while_ends_are_near
from airflow_provider_jetstream.worker.consumers import ConsumerRef, Fallback

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping

    from airflow_provider_jetstream.jetstream import Connection, Origin, PublishReport, WorkQueue

__all__ = [
    "GUARANTEES",
    "ROLES",
    "ArchiveReader",
    "AskedForEach",
    "AuditLog",
    "BodyPreserver",
    "BodySource",
    "Cancellation",
    "Cancelled",
    "Completion",
    "ConsumerRef",
    "DeadLetterQueueInfo",
    "Destination",
    "DocumentName",
    "DocumentPart",
    "DocumentParts",
    "DocumentWriter",
    "ExitCode",
    "Fallback",
    "Finding",
    "Headers",
    "LeftOver",
    "LetterRecord",
    "NatsPyConnection",
    "NotDead",
    "OutgoingJob",
    "RunRecord",
    "Scan",
    "SequenceRanges",
    "StoredMessage",
    "Summary",
    "Target",
    "advance_redrive",
    "authorization",
    "cancel_jobs",
    "cancel_stored",
    "cancelled_message",
    "consumer_info",
    "consumer_names",
    "content_of_copy",
    "count_left_over",
    "encode_message",
    "find_cancellation",
    "find_copies",
    "find_dead_letter_queues",
    "follow_cancellations",
    "inspect_all_queues",
    "is_cancelled",
    "job_id_of",
    "known_queue",
    "last_message",
    "list_consumers",
    "new_redrive_id",
    "next_message",
    "open_audit",
    "parse_advisory",
    "partition_of",
    "prepare_jobs",
    "prepared_jobs",
    "probe_consumer",
    "publish_prepared",
    "publish_until_killed",
    "read_lease",
    "read_parts",
    "read_range",
    "read_record",
    "record_headers",
    "redrive_control_subject",
    "redrive_message_id",
    "redrive_subject",
    "remove_entries",
    "resolve_origins",
    "stated_job_id",
    "store",
    "stream_info",
    "subject_counts",
    "summarise_dead_letters",
    "take_redrive_lease",
    "take_snapshot",
    "update_consumer",
    "while_ends_are_near",
    "wire_size",
]


async def publish_prepared(connection: Connection, jobs: Iterable[OutgoingJob], **arguments: Any) -> PublishReport:
    """Send jobs through an outbox of their own.

    :param arguments: those of the outbox, and ``known`` and ``progress``
    """
    sending = {name: arguments.pop(name) for name in ("known", "progress") if name in arguments}
    prepared = jobs if isinstance(jobs, PreparedJobs) else map(Batch.of, jobs)
    return await Outbox(connection, **arguments).send(prepared, **sending)


class _KilledError(BaseException):
    """The process of the publisher ends here."""


class _KilledPublication(Publication):
    async def _complete(self, *_: object) -> None:
        raise _KilledError


async def publish_until_killed(
    connection: Connection, queue: WorkQueue, jobs: Iterable[object], identity: Origin | str | None, **options: Any
) -> None:
    """Publish as a process does that is killed once its jobs are stored, before it records anything afterwards.

    :param options: further arguments of ``Publication.publish``
    """
    with suppress(_KilledError):
        async with _KilledPublication(connection, queue, identity, waits=options.pop("waits", False)) as publication:
            await publication.publish(jobs, **options)


def prepared_jobs(
    connection: Connection, queue: WorkQueue, jobs: Iterable[object], origin: Origin
) -> list[OutgoingJob]:
    """Return the jobs that a task is going to store on the queue's first subject, as anybody can compute them."""
    publication = Publication(connection, queue, origin)
    publication._by_key = queue.events is not None  # noqa: SLF001
    return list(publication._prepare(jobs, f"{queue.name}.jobs.x", None))  # noqa: SLF001


@dataclass(frozen=True, slots=True)
class AskedForEach:
    """Asks a function for each job whether it is stored.

    :param stored_sequence: gets the index and the job
    """

    stored_sequence: Callable[[int, OutgoingJob], int | None]
    batch_size: int = 64
    verifies: bool = False

    def are_new(self, _first: int, _batch: object) -> bool:
        """Return false."""
        return False

    def sequence_of(self, index: int, job: OutgoingJob) -> int | None:
        """Ask for a job."""
        return self.stored_sequence(index, job)


_NO_MESSAGE, _NO_STREAM, _NO_CONSUMER = 10037, 10059, 10014
_AT_ONCE = 64


async def stream_info(connection: Connection, stream: str, **options: Any) -> dict[str, Any]:
    """Request the configuration and state of a stream; NotFoundError where there is none."""
    return await _api(connection, f"STREAM.INFO.{stream}", options or None)


async def consumer_info(connection: Connection, stream: str, consumer: str) -> dict[str, Any]:
    """Request the configuration and state of a consumer; NotFoundError where there is none."""
    return await _api(connection, f"CONSUMER.INFO.{stream}.{consumer}")


async def consumer_names(connection: Connection, stream: str) -> list[str]:
    """Request the names of a stream's consumers, of 1,024 at most."""
    return (await _api(connection, f"CONSUMER.NAMES.{stream}", {"offset": 0})).get("consumers") or []


async def subject_counts(connection: Connection, stream: str, subject: str) -> dict[str, int]:
    """Request how many messages each subject has that matches a filter, of 100,000 subjects at most."""
    return (await stream_info(connection, stream, subjects_filter=subject))["state"].get("subjects") or {}


async def next_message(connection: Connection, stream: str, start: int, subject: str) -> StoredMessage | None:
    """Read the first message from a sequence on whose subject matches a filter."""
    return await _message(connection, stream, {"seq": start, "next_by_subj": subject})


async def last_message(connection: Connection, stream: str, subject: str) -> StoredMessage | None:
    """Read the last message whose subject matches a filter."""
    return await _message(connection, stream, {"last_by_subj": subject})


async def read_range(
    connection: Connection, stream: str, subject: str = ">", start: int = 1, stop: int | None = None
) -> AsyncIterator[StoredMessage]:
    """Read what a stream stores now, of a range of sequences whose last is ``stop``."""
    state = (await stream_info(connection, stream))["state"]
    last = state["last_seq"] if stop is None else stop
    start = max(start, state["first_seq"])
    while subject == ">" and start <= last:
        sequences = range(start, min(start + _AT_ONCE, last + 1))
        for found in await gather([get_message(connection, stream, sequence) for sequence in sequences]):
            if isinstance(found, BaseException):
                raise found
            if found:
                yield found
        start = sequences.stop
    while start <= last and (message := await next_message(connection, stream, start, subject)):
        if message.sequence <= last:
            yield message
        start = message.sequence + 1


async def store(connection: Connection, subject: str, body: bytes, headers: Mapping[str, str] | None = None) -> int:
    """Publish a message and return its stream sequence; ApiError where the stream refuses it."""
    answer = await connection.publish_acknowledged(subject, body, Headers(headers.items()) if headers else None)
    ack: dict[str, Any] = json.loads(answer)
    if error := ack.get("error"):
        raise ApiError(int(error["code"]), int(error["err_code"]), str(error["description"]), subject)
    return int(ack["seq"])


async def update_consumer(connection: Connection, stream: str, config: Mapping[str, Any]) -> None:
    """Change a consumer."""
    request = {"stream_name": stream, "config": config, "action": "update"}
    await _api(connection, f"CONSUMER.CREATE.{stream}.{config['name']}", request)


def encode_message(subject: bytes, body: bytes, headers: bytes = b"", reply: bytes = b"") -> bytes:
    """Encode a message for the wire: ``PUB``, or ``HPUB`` where it has headers."""
    if not headers:
        return b"PUB %b %b %d\r\n%b\r\n" % (subject, reply, len(body), body)
    return b"HPUB %b %b %d %d\r\n%b%b\r\n" % (subject, reply, len(headers), len(headers) + len(body), headers, body)


def wire_size(headers: Mapping[str, str]) -> int:
    """Return how many bytes headers take on the wire."""
    return len("NATS/1.0\r\n\r\n") + sum(len(f"{name}: {value}\r\n".encode()) for name, value in headers.items())


async def open_audit(connection: Connection, queue: WorkQueue) -> AuditLog:
    """Open the audit of a queue that has one."""
    audit = await AuditLog.open(connection, queue, (await stream_info(connection, queue.name))["created"])
    if audit is None:
        raise LookupError(f"{queue.name} has no audit")
    return audit


def authorization(*policies: Policy) -> str:
    """Return the part of a server's configuration that makes a user of each policy."""
    users = "\n".join(policy.server_config() for policy in policies)
    return f"authorization {{ users: [\n{users}\n] }}"


async def _message(connection: Connection, stream: str, request: Mapping[str, Any]) -> StoredMessage | None:
    try:
        answer = await _api(connection, f"STREAM.MSG.GET.{stream}", request)
    except ApiError as error:
        if error.err_code == _NO_MESSAGE:
            return None
        raise
    return await get_message(connection, stream, int(answer["message"]["seq"]))


async def _api(connection: Connection, subject: str, request: Mapping[str, Any] | None = None) -> dict[str, Any]:
    try:
        return await connection.api(subject, request)
    except ApiError as error:
        if error.err_code in (_NO_STREAM, _NO_CONSUMER):
            raise NotFoundError(f"expected {subject}, found none") from None
        raise
