"""Machines whose clocks are off by days: ages and times of jobs are those of the server."""

from __future__ import annotations

import asyncio
import sys
from datetime import UTC, datetime, timedelta, tzinfo
from typing import TYPE_CHECKING, Self

import pytest

from airflow_provider_jetstream.jetstream import (
    RedriveRequest,
    Selection,
    find_dead_letters,
    preview,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.dead_letters.letter_watch import (
    LetterCriteria,
    ReportedLetters,
    wait_for_dead_letters,
    watch_arrivals,
)
from airflow_provider_jetstream.worker import Worker
from testbed.face import summarise_dead_letters
from testbed.queues import (
    eventually,
    make_queue,
    publish_jobs,
    running_worker,
    stored_count,
    until_stored,
)

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from airflow_provider_jetstream.worker import Delivery
    from testbed.face import NatsPyConnection

_PACKAGE = "airflow_provider_jetstream."
OLD, YOUNG, DEAD_A_MOMENT = (
    Selection(older_than="1h"),
    Selection(younger_than="1h"),
    Selection(older_than="10ms"),
)


@pytest.fixture(params=[-3, 3], ids=["three days slow", "three days fast"])
def days(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Put the clock off, wherever the package reads it."""
    off: int = request.param

    class WrongClock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return super().now(tz) + timedelta(days=off)

    for module in [module for name, module in sys.modules.items() if name.startswith(_PACKAGE)]:
        if getattr(module, "datetime", None) is datetime:
            monkeypatch.setattr(module, "datetime", WrongClock)
    return off


@pytest.mark.slow
@pytest.mark.usefixtures("days")
async def test_scans_redrives_and_previews_select_by_the_ages_that_letters_have_on_the_server(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, dead="ab")
    for selection, count in ((OLD, 0), (YOUNG, 2), (DEAD_A_MOMENT, 2)):
        assert len((await find_dead_letters(connection, queue, selection)).letters) == count
        summary = await summarise_dead_letters(connection, queue, selection)
        assert summary.dead == count
        assert (await preview(connection, queue, RedriveRequest(selection=selection))).redriven == count
        assert summary.reached(1, timedelta(hours=1)) is False
    assert not (await redrive_dead_letters(connection, queue, RedriveRequest(selection=OLD))).redriven
    assert list((await redrive_dead_letters(connection, queue, RedriveRequest(selection=YOUNG))).redriven) == [1, 2]


@pytest.mark.slow
@pytest.mark.usefixtures("days")
async def test_waits_for_letters_select_by_the_ages_that_letters_have_on_the_server(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, dead="ab")
    too_young = [
        asyncio.create_task(wait_for_dead_letters(connection, queue, criteria, 0.2))
        for criteria in (LetterCriteria(OLD), LetterCriteria(Selection(), age=timedelta(hours=1)))
    ]
    moment = timedelta(milliseconds=10)
    for criteria in (LetterCriteria(YOUNG), LetterCriteria(DEAD_A_MOMENT), LetterCriteria(Selection(), age=moment)):
        summary = await asyncio.wait_for(wait_for_dead_letters(connection, queue, criteria, 0.2), 20)
        assert summary.dead == 2
        async with watch_arrivals(connection, queue, criteria, 0.2, ReportedLetters("")) as watch:
            assert (await asyncio.wait_for(watch.next(), 20)).dead == 2
    await asyncio.sleep(0.3)
    for task in too_young:
        assert not task.done()
        task.cancel()


@pytest.mark.slow
async def test_a_worker_starts_and_expires_jobs_by_the_time_of_the_server(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, days: int
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s", "max_deliver": 5}, execute_at_header=True)
    now, handled = datetime.now(UTC), list[bytes]()

    async def handle(job: Delivery) -> None:
        handled.append(job.body)

    later, earlier = (now + timedelta(days=1)).isoformat(), (now - timedelta(days=1)).isoformat()
    async with running_worker(Worker(queue, "worker", handle, settings)):
        await publish_jobs(connection, queue, ["not expired"], headers={"Job-Expires": later})
        await publish_jobs(connection, queue, ["due"], headers={"X-Execute-At": earlier})
        await eventually(lambda: len(handled) == 2)
        await publish_jobs(connection, queue, ["expired"], headers={"Job-Expires": earlier})
        await publish_jobs(connection, queue, ["not due"], headers={"X-Execute-At": later})
        await until_stored(connection, name, 1)
        await asyncio.sleep(0.3)
    assert sorted(handled) == [b"due", b"not expired"]
    assert await stored_count(connection, name) == 1
