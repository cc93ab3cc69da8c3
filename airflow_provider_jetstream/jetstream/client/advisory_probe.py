"""Makes the server publish the max-deliver advisories that are due.

The server notices that a job has used up its deliveries only when the consumer receives a pull request. Where no worker
is alive none comes, so the advisories of the last dead letters are never published. The probe is a pull request that
fits no message: ``max_bytes: 1`` so that every real job is put back with its delivery count unchanged, and ``no_wait``
with a short ``expires`` so that it ends soon.

``no_wait`` alone isn't enough: at ``max_ack_pending`` with jobs waiting no server answers such a request, and 2.10.27,
2.11.0 and 2.12.0 don't answer it either after some deaths. With ``expires`` 2.11.0, 2.12.0 and 2.15.0 answered in every
case that was measured, after that time.

Measured with nats-server 2.10.27 and 2.15: after fifty probes a job's next real delivery had the number that it would
have had without them. Server 2.9 miscounts here, and is refused at connecting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently, sleep
from airflow_provider_jetstream.jetstream.client.headers import STATUS
from airflow_provider_jetstream.jetstream.client.stream_api import (
    ListedConsumers,
    consumer_info,
    list_consumers,
    priority_fields,
    pull_request,
    pull_subject,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection

# "Message Size Exceeds MaxBytes": the server has put a message back.
_PUT_BACK = b"409"
_EXPIRES = 0.05

# A probe ends at the first job that can be delivered, and the server moves that job to the end of its redelivery queue.
# Dead letters behind more such jobs than this get their advisories at a later probe.
MAX_PROBES = 200
ADVISORY_DELAY = 0.1


async def probe_consumer(connection: Connection, stream: str, consumer: str) -> dict[str, Any]:
    """Have the server publish every advisory that is due for a consumer, and return the consumer's state afterwards.

    :raises NotFoundError: the stream or the consumer doesn't exist
    :raises DeadlineError: no answer within the time limit
    :raises UnreachableError: the connection is gone
    """
    before = await consumer_info(connection, stream, consumer)
    if not _may_owe_advisories(before):
        return before
    await _send_probes(connection, stream, before)
    after = await consumer_info(connection, stream, consumer)
    await _await_advisories([before], [after])
    return after


async def probe_consumers(connection: Connection, stream: str) -> ListedConsumers:
    """Have the server publish every advisory that is due for any consumer, and return their states by name afterwards.

    :raises NotFoundError: the stream doesn't exist
    :raises DeadlineError: no answer within the time limit
    :raises UnreachableError: the connection is gone, or the server of a consumer is away
    """
    before = await list_consumers(connection, stream)
    probed = [info for info in before.values() if _may_owe_advisories(info)]
    if not probed:
        return before
    await map_concurrently(lambda info: _send_probes(connection, stream, info), probed)
    after = await list_consumers(connection, stream)
    # A consumer that was deleted meanwhile has no advisories that are due.
    compared = [info for info in probed if info["name"] in after]
    await _await_advisories(compared, [after[info["name"]] for info in compared])
    return after


def _may_owe_advisories(info: Mapping[str, Any]) -> bool:
    # A push consumer takes no pull requests.
    return bool(info["num_ack_pending"]) and "deliver_subject" not in info["config"]


async def _send_probes(connection: Connection, stream: str, info: Mapping[str, Any]) -> None:
    probes = min(info["num_ack_pending"] + 1, MAX_PROBES)
    while probes > 0 and await can_deliver(connection, stream, info["config"], info["name"], _EXPIRES, no_wait=True):
        probes -= 1


async def can_deliver(
    connection: Connection, stream: str, config: Mapping[str, Any], consumer: str, seconds: float, *, no_wait: bool
) -> bool:
    """Return whether the server can deliver a message: it has put one back which a probe has no room for.

    :param config: the consumer's
    :param seconds: after so many the server ends the request
    :param no_wait: whether it does so at once where it has no message
    """
    probe = pull_request(1, expires=seconds, no_wait=no_wait, max_bytes=1, priority=priority_fields(config))
    ((headers, _),) = await connection.ask(pull_subject(stream, consumer, connection.api_prefix), probe)
    return headers[STATUS] == _PUT_BACK


async def _await_advisories(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> None:
    counts = zip(before, after, strict=True)
    if any(later["num_ack_pending"] < earlier["num_ack_pending"] for earlier, later in counts):
        # The advisories are on their way to the dead letter queue.
        await sleep(ADVISORY_DELAY)
