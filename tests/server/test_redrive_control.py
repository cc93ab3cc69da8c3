"""Redrives as objects of the audit: read, paused, resumed and aborted by several at once."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import (
    Redrive,
    RedriveState,
    abort_redrive,
    list_redrives,
    pause_redrive,
    read_redrive,
    resume_redrive,
)
from airflow_provider_jetstream.jetstream.errors import ArgumentError, NotFoundError, RedriveRequestError
from testbed.face import SequenceRanges, new_redrive_id, redrive_control_subject, redrive_subject, stream_info
from testbed.queues import make_queue

if TYPE_CHECKING:
    from typing import Any

    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection


async def record(connection: NatsPyConnection, queue: WorkQueue, state: RedriveState, **fields: Any) -> str:
    """Store a redrive as its holder does, and return its id."""
    created = (await stream_info(connection, queue.name))["created"]
    redrive = fields.pop("id", None) or new_redrive_id()
    values = {"id": redrive, "stream": queue.name, "created": created, "run": "r", "began_at": datetime.now(UTC)}
    body = Redrive(**{**values, "state": state, **fields}).model_dump_json().encode()
    await connection.client.jetstream().publish(redrive_subject(queue.name, redrive), body)
    return redrive


async def test_controls_are_kept_with_who_and_why(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    redrive = await record(connection, queue, RedriveState.RUNNING)
    paused = await pause_redrive(connection, queue, redrive, who="Ann Lee", why="a deployment")
    assert (paused.state, paused.reason) == ("paused", "pause by Ann Lee: a deployment")
    assert (await pause_redrive(connection, queue, redrive, who="Ben Ray")).controls == paused.controls
    assert (await resume_redrive(connection, queue, redrive, who="Ben Ray")).state == "running"
    assert (await abort_redrive(connection, queue, redrive, who="Ann Lee")).state == "aborted"
    found = await read_redrive(connection, queue, redrive)
    assert [(control.action, control.who) for control in found.controls] == [
        ("pause", "Ann Lee"),
        ("resume", "Ben Ray"),
        ("abort", "Ann Lee"),
    ]
    assert found.pending == found.controls


@pytest.mark.parametrize("state", [RedriveState.FINISHED, RedriveState.ABORTED, RedriveState.FAILED])
async def test_a_control_of_a_redrive_that_is_over_is_refused(
    connection: NatsPyConnection, name: str, state: RedriveState
) -> None:
    queue = await make_queue(connection, name)
    redrive = await record(connection, queue, state)
    for control in (pause_redrive, resume_redrive):
        with pytest.raises(RedriveRequestError, match=f"found {redrive} {state.value} since"):
            await control(connection, queue, redrive, who="Ann Lee")
    assert (await read_redrive(connection, queue, redrive)).controls == ()


async def test_a_resume_from_before_a_gate_does_not_pass_it(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    redrive = await record(connection, queue, RedriveState.RUNNING)
    await pause_redrive(connection, queue, redrive, who="Ann Lee")
    await resume_redrive(connection, queue, redrive, who="Ann Lee")
    # As a holder that has read neither when it comes to the gate.
    await record(connection, queue, RedriveState.AT_GATE, id=redrive)
    assert (await read_redrive(connection, queue, redrive)).state == "at_gate"
    assert (await pause_redrive(connection, queue, redrive, who="Ann Lee")).state == "at_gate"
    assert (await resume_redrive(connection, queue, redrive, who="Ben Ray")).state == "running"


async def test_of_controls_at_once_the_last_one_by_the_servers_order_counts(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    redrive = await record(connection, queue, RedriveState.RUNNING)
    steps = [pause_redrive, resume_redrive] * 10
    await asyncio.gather(*(step(connection, queue, redrive, who=f"p{i}") for i, step in enumerate(steps)))
    found = await read_redrive(connection, queue, redrive)
    assert found.state == {"pause": "paused", "resume": "running"}[found.controls[-1].action]
    assert [control.sequence for control in found.controls] == sorted(control.sequence for control in found.controls)


async def test_only_redrives_of_this_queue_are_listed(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    assert await list_redrives(connection, queue) == []
    first = await record(connection, queue, RedriveState.FINISHED, id="20260101T000000-a")
    second = await record(connection, queue, RedriveState.RUNNING, id="20260102T000000-a")
    await record(connection, queue, RedriveState.RUNNING, id="20260103T000000-a", created="another stream's")
    jetstream = connection.client.jetstream()
    # What a foreign program may store there.
    await jetstream.publish(redrive_subject(name, "x"), b"\xff{")
    await jetstream.publish(redrive_subject(name, "y"), json.dumps({"id": "z", "version": 1}).encode())
    for body in (b"[]", b'{"action": "destroy", "who": "x"}', b'{"action": "pause"}', b"\xff"):
        await jetstream.publish(redrive_control_subject(name, second), body)
    # 16 characters stand for more sequences than any memory holds.
    endless = {"number": 1, "from_sequence": 1, "began_at": str(datetime.now(UTC)), "returned": ""}
    endless["returned"] = SequenceRanges.between(1, 2**63 - 1).encode()
    forged = await read_redrive(connection, queue, first)
    values = forged.model_dump(mode="json") | {"id": "w", "waves": [endless]}
    await jetstream.publish(redrive_subject(name, "w"), json.dumps(values).encode())
    assert [found.id for found in await list_redrives(connection, queue)] == [second, first]
    endless["returned"] = SequenceRanges.between(1, 100).encode()
    await jetstream.publish(redrive_subject(name, "w"), json.dumps(values).encode())
    assert {found.id for found in await list_redrives(connection, queue)} == {second, first, "w"}
    assert (await read_redrive(connection, queue, second)).controls == ()


@pytest.mark.parametrize("redrive", ["unknown", "*", "a.b", ">", "", "a b"])
async def test_an_unknown_id_is_named(connection: NatsPyConnection, name: str, redrive: str) -> None:
    queue = await make_queue(connection, name)
    with pytest.raises(NotFoundError, match="expected a redrive of"):
        await pause_redrive(connection, queue, redrive, who="Ann Lee")


@pytest.mark.parametrize("who", ["", "  ", None, "x" * 201])
async def test_who_asks_has_to_have_a_name(connection: NatsPyConnection, name: str, who: Any) -> None:
    queue = await make_queue(connection, name)
    redrive = await record(connection, queue, RedriveState.RUNNING)
    with pytest.raises(ArgumentError, match="expected the name of the person"):
        await abort_redrive(connection, queue, redrive, who=who)


async def test_a_queue_without_an_audit_has_no_redrives(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, audit=None)
    with pytest.raises(NotFoundError, match=f"expected an audit of {name}"):
        await list_redrives(connection, queue)
