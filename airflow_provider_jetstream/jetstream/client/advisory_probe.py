"""Making the server tell of deaths that it has kept to itself.

The server notices that a job has used up its deliveries only when a consumer is asked for the next job. With no worker
alive nobody asks, so the advisory of the last deaths never comes. A pull that accepts no message at all asks on their
behalf: ``no_wait`` so that it doesn't linger, and ``max_bytes: 1`` so that every real job is put back untouched, with
its count of deliveries as before.

Measured with nats-server 2.10.27 and 2.15: fifty such pulls left a job's next real delivery at the number it would have
had. Server 2.9 miscounts here, and is refused at connecting.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.concurrency import sleep
from airflow_provider_jetstream.jetstream.client.pull_request import priority_fields
from airflow_provider_jetstream.jetstream.client.stream_api import consumer_info, consumer_names
from airflow_provider_jetstream.jetstream.errors import NotFoundError

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.client.connection import Connection

_PROBE = {"batch": 1, "no_wait": True, "max_bytes": 1}
_PUT_BACK = "409"

# A probe ends at the first job that could be delivered, and that job moves to the end of the line: deaths behind more
# jobs than this are told at one of the next looks.
MAX_PROBES = 200
ADVISORY_DELAY = 0.1


async def probe_consumer(connection: Connection, stream: str, consumer: str) -> dict[str, Any]:
    """Have the server publish every advisory that is due for a consumer.

    :param connection: the server
    :param stream: its stream
    :param consumer: its name
    :return: the consumer's state afterwards, as the server gives it
    :raises NotFoundError: the stream or the consumer doesn't exist
    :raises DeadlineError: no answer within the time limit
    :raises UnreachableError: the connection is gone
    """
    before = await consumer_info(connection, stream, consumer)
    if before["num_ack_pending"] == 0 or "deliver_subject" in before["config"]:
        # Nothing can have died untold, or the server pushes jobs and refuses to be asked.
        return before
    probes = min(before["num_ack_pending"] + 1, MAX_PROBES)
    probe = json.dumps(_PROBE | priority_fields(before["config"])).encode()
    while probes > 0 and await connection.status(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}", probe) == _PUT_BACK:
        probes -= 1
    after = await consumer_info(connection, stream, consumer)
    if after["num_ack_pending"] < before["num_ack_pending"]:
        # The advisories are on their way to the dead letter queue.
        await sleep(ADVISORY_DELAY)
    return after


async def probe_consumers(connection: Connection, stream: str) -> None:
    """Pump every consumer of a stream.

    :param connection: the server
    :param stream: the work queue
    :raises ApiError: the server refused to name the consumers
    :raises DeadlineError: no answer within the time limit
    :raises UnreachableError: the connection is gone
    """
    for consumer in await consumer_names(connection, stream):
        # One that is deleted meanwhile has no more deaths to tell.
        with suppress(NotFoundError):
            await probe_consumer(connection, stream, consumer)
