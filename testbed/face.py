"""What tests of rooms need of a server and of the package, and what users don't.

Tests outside tests/unit import public names, the wire contract, and testbed; of testbed, this module and
:mod:`testbed.seams` alone know names of the package's inside. What it defines stands on JetStream's API and on public
names. What it hands on is what a rebuilt room still has, perhaps elsewhere: then this module changes, and no test.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream import ApiError, NotFoundError, Policy, Publication
from airflow_provider_jetstream.jetstream.audit.log import AuditLog
from airflow_provider_jetstream.jetstream.audit.records import LetterRecord
from airflow_provider_jetstream.jetstream.cancellation.cancel import find_cancellation
from airflow_provider_jetstream.jetstream.client.headers import Headers
from airflow_provider_jetstream.jetstream.client.message import StoredMessage
from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection
from airflow_provider_jetstream.jetstream.client.streams import last_message
from airflow_provider_jetstream.jetstream.dead_letters.find import summarise_dead_letters
from airflow_provider_jetstream.jetstream.dead_letters.record import record_headers
from airflow_provider_jetstream.jetstream.dead_letters.scan import Scan
from airflow_provider_jetstream.jetstream.inspection.overview import inspect_all_queues
from airflow_provider_jetstream.jetstream.publishing.batch import Batch
from airflow_provider_jetstream.jetstream.publishing.job import redrive_message_id
from airflow_provider_jetstream.jetstream.publishing.outbox import KnownJobs, Outbox
from airflow_provider_jetstream.jetstream.publishing.preparation import PreparedJobs
from airflow_provider_jetstream.jetstream.publishing.report import Destination
from airflow_provider_jetstream.jetstream.queue.discovery import known_queue
from airflow_provider_jetstream.jetstream.redrive.operation import take_redrive_lease
from airflow_provider_jetstream.jetstream.redrive.protocol import KILL_POINTS
from airflow_provider_jetstream.jetstream.redrive.redrive import advance_redrive
from airflow_provider_jetstream.jetstream.redrive.removal import remove_entries
from airflow_provider_jetstream.jetstream.roles.permissions import ROLES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from airflow_provider_jetstream.jetstream import Connection, Origin, PublishReport, WorkQueue

__all__ = [
    "KILL_POINTS",
    "ROLES",
    "Headers",
    "LetterRecord",
    "NatsPyConnection",
    "PreparedJobs",
    "Scan",
    "StoredMessage",
    "advance_redrive",
    "authorization",
    "consumer_info",
    "find_cancellation",
    "inspect_all_queues",
    "known_queue",
    "last_message",
    "open_audit",
    "publish_prepared",
    "publish_until_killed",
    "record_headers",
    "redrive_message_id",
    "remove_entries",
    "stream_info",
    "summarise_dead_letters",
    "take_redrive_lease",
]


class _AskedForEach(KnownJobs):
    """Asks a function for each job whether it is stored, by its index and the job."""

    def __init__(self, stored_sequence: Callable[[int, Any], int | None]) -> None:
        self._stored_sequence = stored_sequence

    @property
    def batch_size(self) -> int:
        return 64

    def are_new(self, _first: int, _batch: object) -> bool:
        return False

    def sequence_of(self, index: int, job: object) -> int | None:
        return self._stored_sequence(index, job)


async def publish_prepared(
    connection: Connection,
    jobs: Iterable[Any],
    *,
    stream: str | None = None,
    known: Callable[[int, Any], int | None] | None = None,
    **arguments: Any,
) -> PublishReport:
    """Send jobs of :func:`PreparedJobs` through an outbox of their own.

    :param stream: the stream that has to store them
    :param known: returns the sequence of a job that is stored already, by its index and the job
    :param arguments: further ones of the outbox
    """
    if stream:
        arguments["destination"] = Destination(stream)
    prepared = jobs if isinstance(jobs, PreparedJobs) else map(Batch.of, jobs)
    outbox = Outbox(connection, **arguments)
    return await (outbox.send(prepared, _AskedForEach(known)) if known else outbox.send(prepared))


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


_NO_STREAM, _NO_CONSUMER = 10059, 10014


async def stream_info(connection: Connection, stream: str, **options: Any) -> dict[str, Any]:
    """Request the configuration and state of a stream; NotFoundError where there is none."""
    return await _api(connection, f"STREAM.INFO.{stream}", options or None)


async def consumer_info(connection: Connection, stream: str, consumer: str) -> dict[str, Any]:
    """Request the configuration and state of a consumer; NotFoundError where there is none."""
    return await _api(connection, f"CONSUMER.INFO.{stream}.{consumer}")


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


async def _api(connection: Connection, subject: str, request: dict[str, Any] | None = None) -> dict[str, Any]:
    try:
        return await connection.api(subject, request)
    except ApiError as error:
        if error.err_code in (_NO_STREAM, _NO_CONSUMER):
            raise NotFoundError(f"expected {subject}, found none") from None
        raise
