"""The lease that the driver of a bulk redrive holds while its tasks change a queue's dead letters.

A thread of the driver renews it. The tasks share its token: they read whether it lasts, and the server refuses what
they record once somebody else has it.
"""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.errors import ApiError, LeaseLostError, TransientError
from airflow_provider_jetstream.jetstream.redrive.redrive_lease import take_redrive_lease
from airflow_provider_jetstream.spark.connections import run_on_own_connection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from airflow_provider_jetstream.jetstream.audit.lease import Lease
    from airflow_provider_jetstream.jetstream.client.blocking.connection import BlockingConnection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
    from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest

log = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0


@contextmanager
def driver_lease(
    options: Mapping[str, str], queue: WorkQueue, request: RedriveRequest, stopped: Callable[[], bool]
) -> Iterator[Lease | None]:
    """Hold a queue's lease until the block ends; ``None`` where the queue has no audit that could store it.

    :param options: connection options of the data source
    :param stopped: called a few times a second; once it returns true, the lease isn't waited for any longer
    :raises LeaseHeldError: another operation holds it still after the request's time limit
    :raises RedriveError: the audit refuses records
    """

    async def take(connection: BlockingConnection) -> Lease | None:
        return await take_redrive_lease(connection, queue, request, "bulk redrive", stopped)

    lease = run_on_own_connection(options, take)
    if lease is None:
        yield None
        return
    ended = threading.Event()
    renewal = threading.Thread(target=_renew, args=(options, lease, ended), name="lease renewal", daemon=True)
    renewal.start()
    try:
        yield lease
    except BaseException:
        lease.leave_open()
        raise
    finally:
        ended.set()
        renewal.join()
        _release(options, lease)


def _renew(options: Mapping[str, str], lease: Lease, ended: threading.Event) -> None:
    pause = lease.renewal_seconds
    while not ended.wait(pause):
        pause = lease.renewal_seconds
        try:
            run_on_own_connection(options, partial(_renew_once, lease))
        except LeaseLostError as error:
            log.warning("%s", error)
            return
        except (ApiError, TransientError) as error:
            log.warning("The lease couldn't be renewed, trying again: %s", error)
            pause = min(_RETRY_SECONDS, pause)


def _release(options: Mapping[str, str], lease: Lease) -> None:
    try:
        run_on_own_connection(options, partial(_release_once, lease))
    except (ApiError, TransientError) as error:
        log.warning("The lease wasn't released, it runs out by itself: %s", error)


async def _renew_once(lease: Lease, connection: BlockingConnection) -> None:
    await _use(lease, connection)
    await lease.renew()


async def _release_once(lease: Lease, connection: BlockingConnection) -> None:
    await _use(lease, connection)
    await lease.release()


async def _use(lease: Lease, connection: BlockingConnection) -> None:
    # Whether the server knows the condition on which a renewal is stored.
    await connection.discover_capabilities(())
    lease.use(connection)
