"""The origin of a dead letter whose job's headers hold only the key of the task that published it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    Job,
    Origin,
    RedriveRequest,
    Selection,
    find_dead_letters,
    publish,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.contract import AIRFLOW_TASK
from testbed.dead_letters import publish_raw, store_task, stream_messages, task_key
from testbed.face import record_headers, summarise_dead_letters
from testbed.queues import eventually, exhaust_deliveries, make_dead_letters, make_queue, publish_jobs, pull_jobs

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import DeadLetter, WorkQueue
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

# Sixty characters each, and beyond ASCII.
DAG = "größe_" + "d" * 54
SHOP = Origin(DAG, "manual__2026-11-21T00:00:00+00:00", "publish", 3)
PRINTS = Origin("prints", "r", "t")
LONG_HEADERS = {"Airflow-Dag-Id": "victim", "Airflow-Run-Id": "r", "Airflow-Task-Id": "t", "Airflow-Map-Index": "-1"}


async def make_letters_of(
    connection: NatsPyConnection, queue: WorkQueue, *origins: Origin, headers: dict[str, str] | None = None
) -> None:
    """Make a dead letter of each task."""
    for origin in origins:
        job_headers = {AIRFLOW_TASK: task_key(origin)} | (headers or {})
        await publish_jobs(connection, queue, [origin.task_id], headers=job_headers)
    await exhaust_deliveries(connection, queue, len(origins))


async def letters(
    connection: NatsPyConnection, queue: WorkQueue, selection: Selection | None = None
) -> tuple[DeadLetter, ...]:
    return (await find_dead_letters(connection, queue, selection)).letters


async def forget_tasks(connection: NatsPyConnection, queue: WorkQueue) -> None:
    await connection.api(f"STREAM.PURGE.{queue.name}-events", {"filter": f"published.{queue.name}.*"})


@pytest.mark.slow
async def test_a_key_stands_for_the_task_in_letters_selections_and_groups(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    for origin in (SHOP, PRINTS):
        await store_task(connection, queue, origin)
        assert origin.key == task_key(origin)
    await make_letters_of(connection, queue, SHOP, PRINTS, SHOP)
    await make_dead_letters(connection, queue, ["old"], headers=LONG_HEADERS)
    await make_dead_letters(connection, queue, ["foreign"])
    found = await letters(connection, queue)
    old = Origin("victim", "r", "t")
    assert [letter.origin for letter in found] == [SHOP, PRINTS, SHOP, old, None]
    for selection, expected in (
        (Selection(dag_id=DAG), [1, 3]),
        (Selection(run_id=SHOP.run_id), [1, 3]),
        (Selection(task_id="t"), [2, 4]),
        (Selection(dag_id="prints", task_id="publish"), []),
    ):
        assert [letter.sequence for letter in await letters(connection, queue, selection)] == expected
    summary = await summarise_dead_letters(connection, queue, group_by=["dag_id", "task_id"])
    assert {key: group.count for key, group in summary.groups.items()} == {
        (DAG, "publish"): 2,
        ("prints", "t"): 1,
        ("victim", "t"): 1,
        (None, None): 1,
    }


@pytest.mark.slow
async def test_a_job_that_a_task_published_has_its_origin_also_after_a_redrive(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "50ms"})
    await publish(connection, queue, [Job(b"x", f"{name}.jobs.plain")], origin=SHOP)
    await exhaust_deliveries(connection, queue, 1)
    (first,) = await letters(connection, queue)
    assert (first.origin, dict(first.headers)[AIRFLOW_TASK]) == (SHOP, task_key(SHOP))
    assert (await redrive_dead_letters(connection, queue)).redriven == {1: 2}
    await exhaust_deliveries(connection, queue, 1)
    (again,) = await letters(connection, queue, Selection(dag_id=DAG))
    assert (again.sequence, again.origin, again.redrives) == (2, SHOP, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "forged",
    [
        {"dag_id": "victim"},
        {"run_id": "victim"},
        {"map_index": 4},
        {"map_index": 10**30},
        {"dag_id": None},
        {"type": "other"},
        {"dag_id": ["victim"]},
    ],
)
async def test_a_record_that_somebody_stored_under_another_tasks_key_names_nobody(
    connection: NatsPyConnection, name: str, forged: dict[str, Any]
) -> None:
    queue = await make_queue(connection, name)
    await store_task(connection, queue, SHOP, **forged)
    await make_letters_of(connection, queue, SHOP)
    (letter,) = await letters(connection, queue)
    assert letter.origin is None
    for selection in ({"dag_id": "victim"}, {"dag_id": DAG}, {"run_id": "victim"}, {"task_id": "publish"}):
        assert await letters(connection, queue, Selection.of(selection)) == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    "key", [b"*", b">", b"", b" ", b"\xff\xfe", b"a.b", b"F" * 32, b"0" * 65, b"0" * 31, b"0" * 32]
)
async def test_a_key_that_no_task_has_names_nobody(
    nats: NatsServer, connection: NatsPyConnection, name: str, key: bytes
) -> None:
    queue = await make_queue(connection, name)
    await store_task(connection, queue, SHOP)
    long_headers = b"".join(f"{header}: {value}\r\n".encode() for header, value in LONG_HEADERS.items())
    await publish_raw(nats, f"{name}.jobs.a", long_headers + b"Airflow-Task: " + key, b"a")
    await exhaust_deliveries(connection, queue, 1)
    (letter,) = await letters(connection, queue)
    # The key says who published the job, and nothing else in its headers does.
    assert letter.origin is None
    assert await letters(connection, queue, Selection(dag_id="victim")) == ()
    summary = await summarise_dead_letters(connection, queue, group_by=["dag_id"])
    assert set(summary.groups) == {(None,)}


async def test_without_a_stream_of_events_a_key_names_nobody(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    await store_task(connection, queue, SHOP)
    await make_letters_of(connection, queue, SHOP)
    await connection.api(f"STREAM.DELETE.{name}-events")
    (letter,) = await letters(connection, queue)
    assert (letter.origin, dict(letter.headers)[AIRFLOW_TASK]) == (None, task_key(SHOP))


@pytest.mark.slow
async def test_the_origin_outlives_the_tasks_record_in_a_scans_copy(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    await store_task(connection, queue, SHOP)
    await make_letters_of(connection, queue, SHOP)
    await make_dead_letters(connection, queue, ["old"], headers=LONG_HEADERS)
    await summarise_dead_letters(connection, queue)
    await forget_tasks(connection, queue)
    assert [letter.origin for letter in await letters(connection, queue)] == [SHOP, Origin("victim", "r", "t")]
    copies = await stream_messages(connection, f"{name}-dead", f"dead.{name}.>")
    assert [copy.header("Dead-Letter-Origin") is None for copy in copies] == [False, True]
    assert json.loads(copies[0].header("Dead-Letter-Origin") or "") == {
        "dag_id": DAG,
        "run_id": SHOP.run_id,
        "task_id": "publish",
        "map_index": 3,
    }
    # Also once the job itself is gone.
    await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": 1})
    (letter,) = await letters(connection, queue, Selection(unaccounted=True, dag_id=DAG))
    assert (letter.origin, letter.body) == (SHOP, b"publish")


@pytest.mark.slow
async def test_the_origin_outlives_the_tasks_record_in_a_parked_letter(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    await store_task(connection, queue, SHOP)
    await make_letters_of(connection, queue, SHOP)
    await redrive_dead_letters(connection, queue, RedriveRequest(max_redrives=0))
    await forget_tasks(connection, queue)
    (letter,) = await letters(connection, queue, Selection(parked=True, dag_id=DAG))
    assert (letter.origin, letter.parked) == (SHOP, "parked")


async def test_a_record_in_the_dead_letter_queue_names_no_other_task(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    await make_letters_of(connection, queue, SHOP)
    (letter,) = await letters(connection, queue)
    assert letter.origin is None
    victim = Origin("victim", "r", "t")
    forged = record_headers(
        letter.death, subject=letter.subject, time=letter.time, headers=letter.headers, writer="worker", origin=victim
    )
    await connection.client.jetstream().publish(f"dead.{name}.worker.1", letter.body, headers=forged)
    assert [each.origin for each in await letters(connection, queue)] == [None]
    # The task's own record counts all the same.
    await store_task(connection, queue, SHOP)
    assert [each.origin for each in await letters(connection, queue)] == [SHOP]


async def test_a_workers_record_keeps_the_key(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, archive=False)
    await store_task(connection, queue, SHOP)
    await publish_jobs(connection, queue, ["a"], headers={AIRFLOW_TASK: task_key(SHOP)})
    (message,) = await pull_jobs(connection, queue, 1)
    copy = {AIRFLOW_TASK: task_key(SHOP), "Dead-Letter-Sequence": "1", "Dead-Letter-Subject": f"{name}.jobs.plain"}
    await connection.client.jetstream().publish(f"dead.{name}.worker.1", b"a", headers=copy)
    await message.respond(b"+TERM no paper")

    async def dead() -> tuple[DeadLetter, ...]:
        return await letters(connection, queue, Selection(dag_id=DAG))

    found = await eventually(dead)
    assert [letter.origin for letter in found] == [SHOP]


async def test_a_body_is_kept_without_its_origin_where_both_do_not_fit(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    origin = Origin(DAG, "r" * 900, "publish")
    await store_task(connection, queue, origin)
    await make_letters_of(connection, queue, origin)
    (letter,) = await letters(connection, queue)
    assert letter.origin == origin
    fields: dict[str, Any] = {"subject": letter.subject, "time": letter.time, "headers": letter.headers}
    records = [record_headers(letter.death, **fields, writer="scan", origin=each) for each in (origin, None)]
    sizes = [12 + sum(len(f"{key}: {value}\r\n".encode()) for key, value in record.items()) for record in records]
    config = (await connection.api(f"STREAM.INFO.{name}-dead"))["config"]
    limit = sum(sizes) // 2
    await connection.api(f"STREAM.UPDATE.{name}-dead", config | {"max_msg_size": limit})
    summary = await summarise_dead_letters(connection, queue)
    assert summary.preserved == 1
    (copy,) = await stream_messages(connection, f"{name}-dead", f"dead.{name}.>")
    assert (copy.data, copy.header("Dead-Letter-Origin")) == (b"publish", None)
