"""The lease that a redrive holds while it changes a queue's dead letters."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.audit.lease import LeaseRecord, lease_seconds, renewed, take_lease
from airflow_provider_jetstream.jetstream.contract import lease_subject
from airflow_provider_jetstream.jetstream.errors import ApiError, NotFoundError, RedriveError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from airflow_provider_jetstream.jetstream.audit.lease import Lease
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest


@asynccontextmanager
async def redrive_lease(
    connection: Connection, queue: WorkQueue, request: RedriveRequest, stopped: Callable[[], bool] = lambda: False
) -> AsyncIterator[Lease | None]:
    """Hold a queue's lease until the block ends; ``None`` where the queue has no audit that could store it.

    :param stopped: called a few times a second; once it returns true, the lease isn't waited for any longer
    :raises LeaseHeldError: another operation holds it still after the request's time limit
    :raises RedriveError: the audit refuses records, doesn't capture the lease's subject, or is away
    :raises TransientError: no answer in time
    """
    lease = await take_redrive_lease(connection, queue, request, request.operation, stopped)
    if lease is None:
        yield None
        return
    async with renewed(lease):
        yield lease


async def take_redrive_lease(
    connection: Connection,
    queue: WorkQueue,
    request: RedriveRequest,
    operation: str,
    stopped: Callable[[], bool] = lambda: False,
) -> Lease | None:
    """Take a queue's lease, which is to be renewed and released; raises as :func:`redrive_lease` does.

    :param operation: what the holder does, in words
    """
    if queue.audit is None:
        return None
    record = LeaseRecord(
        operation=operation, run=request.run, who=request.who, why=request.why, seconds=lease_seconds(connection)
    )
    try:
        return await take_lease(connection, queue.audit.name, queue.name, record, request.lease_seconds, stopped)
    except NotFoundError:
        return None
    except (ApiError, UnreachableError) as error:
        raise RedriveError(
            f"expected {queue.audit.name} to record who redrives {queue.name} on {lease_subject(queue.name)}, found:"
            f" {error}; nothing was redriven: see to it that the audit takes records, then run it again"
        ) from None
