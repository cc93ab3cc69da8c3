"""Redrives that are cut off between storing a new job and removing the original, and finished at any later time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import Protocol, Reason, RedriveRequest, Selection, redrive_dead_letters
from airflow_provider_jetstream.jetstream.errors import RedriveError, UnreachableError
from testbed import seams
from testbed.dead_letters import letter_records, make_terminated_letters, run_records
from testbed.face import AuditLog
from testbed.queues import CONSUMER, eventually, make_dead_letters, make_queue, process_all, publish_jobs, stored_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import LetterRecord, NatsPyConnection

RUN = RedriveRequest(run="orders-1")


async def keep_original(*_: object) -> None:
    raise RedriveError("the original could not be removed")


async def duplicates_forgotten(connection: NatsPyConnection, queue: WorkQueue) -> None:
    """Wait until the queue's duplicate window has passed."""
    body, jetstream = "probe", connection.client.jetstream()
    await jetstream.publish(f"{queue.name}.jobs.probe", body.encode(), headers={"Nats-Msg-Id": "probe"})

    async def forgotten() -> bool:
        ack = await jetstream.publish(f"{queue.name}.jobs.probe", body.encode(), headers={"Nats-Msg-Id": "probe"})
        return not ack.duplicate

    await eventually(forgotten)


@pytest.mark.slow
@pytest.mark.parametrize("death", ["with an entry", "without an entry"])
async def test_a_letter_recorded_but_not_removed_is_finished_without_a_second_copy_at_any_time(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch, death: str
) -> None:
    queue = await make_queue(connection, name, duplicate_window="100ms")
    await make_dead_letters(connection, queue, "ab")
    if death == "without an entry":
        await connection.api(f"STREAM.PURGE.{name}-dead")
    with monkeypatch.context() as patch:
        patch.setattr(seams.STORED_LETTERS_REMOVE_ORIGINALS, keep_original)
        report = await redrive_dead_letters(connection, queue, RUN)
    assert report.failed == dict.fromkeys((1, 2), "it is redriven, but the original could not be removed")
    assert await stored_count(connection, name) == 4
    await duplicates_forgotten(connection, queue)
    assert (await process_all(connection, queue)).keys() == {"a", "b", "probe"}

    def refuse(_: object) -> None:
        raise ValueError("it isn't to be called again")

    again = await redrive_dead_letters(connection, queue, RedriveRequest(run="orders-1", transform=refuse))
    again.raise_for_failures()
    assert (dict(again.redriven), list(again.gone)) == ({1: 3, 2: 4}, [])
    assert await process_all(connection, queue) == {}
    assert await stored_count(connection, name) == 0
    assert len(await letter_records(connection, queue)) == 2
    assert (await run_records(connection, queue, "orders-1"))[-1].finished


@pytest.mark.parametrize(
    "then", [{}, {"protocol": Protocol.IN_PLACE}, {"max_redrives": 0}], ids=["", "in place", "park"]
)
@pytest.mark.parametrize("death", ["dead", "terminated"])
async def test_an_atomic_copy_without_a_record_is_found_by_its_marker(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch, death: str, then: dict[str, Any]
) -> None:
    queue = await make_queue(
        connection, name, atomic_redrive=True, duplicate_window="100ms", consumer={"filter_subject": f"{name}.jobs.>"}
    )
    await (make_dead_letters if death == "dead" else make_terminated_letters)(connection, queue, "ab")

    async def cut_off(_: AuditLog, records: Sequence[LetterRecord]) -> list[UnreachableError]:
        return [UnreachableError("cut off")] * len(records)

    with monkeypatch.context() as patch:
        patch.setattr(AuditLog, "write", cut_off)
        assert (await redrive_dead_letters(connection, queue)).failures == 2
    await duplicates_forgotten(connection, queue)
    done = await process_all(connection, queue)
    report = await redrive_dead_letters(connection, queue, RedriveRequest(**then))
    report.raise_for_failures()
    assert ({*report.redriven}, list(report.parked)) == ({1, 2}, [])
    assert [record.action for record in await letter_records(connection, queue)] == ["redriven"] * 2
    done += await process_all(connection, queue)
    assert (done["a"], done["b"]) == (1, 1)


async def test_an_undeliverable_job_recorded_but_not_removed_is_finished_without_a_second_copy(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumers = [{"name": CONSUMER, "max_deliver": 1, "ack_wait": "500ms", "filter_subject": f"{name}.jobs.probe"}]
    queue = await make_queue(connection, name, consumers=consumers, duplicate_window="100ms")
    await publish_jobs(connection, queue, "a", kind="typo")
    undeliverable = Selection(reasons=frozenset({Reason.UNDELIVERABLE}))
    request = RedriveRequest(undeliverable, subject=f"{name}.jobs.probe")
    with monkeypatch.context() as patch:
        patch.setattr(seams.STORED_LETTERS_REMOVE_ORIGINALS, keep_original)
        assert (await redrive_dead_letters(connection, queue, request)).failures == 1
    await duplicates_forgotten(connection, queue)
    report = await redrive_dead_letters(connection, queue, request)
    assert report.redriven == {1: 2}
    assert (await process_all(connection, queue))["a"] == 1
    assert len(await letter_records(connection, queue)) == 1
