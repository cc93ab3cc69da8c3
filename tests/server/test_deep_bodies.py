"""Bodies with more levels than a JSON parser follows end nothing, wherever a client stores them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import account_for_jobs, find_dead_letters, redrive_dead_letters
from testbed.queues import make_dead_letters, make_queue

if TYPE_CHECKING:
    from testbed.face import NatsPyConnection

_LEVELS = 100_000
_DEEP = {
    "lists": b"[" * _LEVELS,
    "objects": b'{"a":' * _LEVELS + b"1" + b"}" * _LEVELS,
    "an id": b'{"id":' + b"[" * _LEVELS + b"]" * _LEVELS + b', "advisory": "x"}',
    "an event": b'{"type":"io.nats.jetstream.advisory.v1.max_deliver","stream":'
    + b"[" * _LEVELS
    + b"]" * _LEVELS
    + b"}",
}
# Each is read by another reader.
_SUBJECTS = (
    "completed.{queue}.worker.1",
    "cancelled.{queue}.0",
    "$JS.EVENT.METRIC.CONSUMER.ACK.{queue}.worker",
    "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.{queue}.worker",
    "$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.{queue}.worker",
    "dead.{queue}.worker.1",
    "parked.{queue}.worker.1",
    "handled.{queue}.1",
    "audit.{queue}.letters.1",
    "audit.{queue}.ranges.0.x",
    "audit.{queue}.intents.x",
    "audit.{queue}.account",
)


@pytest.mark.slow
@pytest.mark.parametrize("what", _DEEP)
async def test_deep_bodies_hide_no_letter_and_come_back_unchanged(
    connection: NatsPyConnection, name: str, what: str
) -> None:
    queue = await make_queue(connection, name, archive=True)
    await make_dead_letters(connection, queue, [_DEEP[what]])
    jetstream = connection.client.jetstream()
    for subject in _SUBJECTS:
        await connection.client.publish(subject.format(queue=name), _DEEP[what])
    await connection.client.flush()
    (letter,) = (await find_dead_letters(connection, queue)).letters
    assert letter.body == _DEEP[what]
    assert (await account_for_jobs(connection, queue)).unaccounted == ()
    report = await redrive_dead_letters(connection, queue)
    assert (list(report.redriven), report.failed) == ([1], {})
    assert (await jetstream.get_msg(name, report.redriven[1])).data == _DEEP[what]
