"""What holds in a cluster whose servers' clocks differ, which no real server on one machine has."""

from __future__ import annotations

import asyncio

from airflow_provider_jetstream.jetstream import (
    Job,
    Protocol,
    RedriveRequest,
    WorkQueue,
    find_dead_letters,
    provision,
    publish,
    redrive_dead_letters,
)
from testbed.simulated.connection import SimulatedConnection
from testbed.simulated.loop import run_simulated, simulated_loop
from testbed.simulated.server import SimulatedServer

SECOND = 10**9
SIMULATED = 3.0


def test_a_job_that_is_terminated_right_after_it_was_requeued_in_place_is_a_letter() -> None:
    assert run_simulated(_requeued_and_terminated, 1) == [1]


async def _requeued_and_terminated() -> list[int]:
    server = SimulatedServer((2, 15, 0), {"n1": 0})
    connection = SimulatedConnection(server)
    queue = WorkQueue(
        name="q",
        subjects=["q.jobs.>"],
        consumers=[{"name": "w", "max_deliver": 1, "ack_wait": "1s"}],
        dead_letters="q-dead",
        events="q-events",
    )
    await provision(connection, queue)
    await publish(connection, queue, [Job(b"x")], subject="q.jobs.a")
    await _answer(connection, b"-NAK")
    await asyncio.sleep(SIMULATED)
    # The queue's server is behind the one of its audit.
    server.streams["q"].ahead = -SECOND
    report = await redrive_dead_letters(connection, queue, RedriveRequest(protocol=Protocol.IN_PLACE))
    assert dict(report.redriven) == {1: 1}
    await _answer(connection, b"+TERM broken")
    await asyncio.sleep(SIMULATED)
    return [letter.sequence for letter in (await find_dead_letters(connection, queue)).letters]


async def _answer(connection: SimulatedConnection, answer: bytes) -> None:
    """Answer the next job."""
    arrived = simulated_loop().create_future()

    def receive(_subject: bytes, reply: bytes, _headers: bytes | None, _body: bytes) -> None:
        arrived.set_result(reply.decode())

    inbox = connection.new_inbox()
    subscription = await connection.subscribe_raw(inbox, receive)
    await connection.publish("$JS.API.CONSUMER.MSG.NEXT.q.w", b'{"batch":1}', reply=inbox)
    await connection.request(await arrived, answer)
    await subscription.unsubscribe()
