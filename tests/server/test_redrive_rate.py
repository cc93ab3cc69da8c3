"""The rate of a redrive, its progress and its cancellation."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from datetime import UTC, datetime, timedelta, tzinfo
from itertools import count
from typing import TYPE_CHECKING, Self

import pytest

from airflow_provider_jetstream.jetstream import RedriveRequest, find_dead_letters, redrive_dead_letters
from testbed import seams
from testbed.dead_letters import stream_messages
from testbed.queues import make_dead_letters, make_queue, process_all
from testbed.rates import most_within

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import RedriveReport
    from testbed.face import NatsPyConnection

_CORE = "airflow_provider_jetstream.jetstream."


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "letters", "most"), [(0.2, 3, 2), (1, 12, 10), (20, 230, 200)])
async def test_ten_seconds_have_no_more_letters_than_the_rate_allows(
    connection: NatsPyConnection, name: str, rate: float, letters: int, most: int
) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, map(str, range(letters)))
    report = await redrive_dead_letters(connection, queue, RedriveRequest(rate=rate))
    report.raise_for_failures()
    # The server's own timestamps.
    moments = [copy.stored_at.timestamp() for copy in await stream_messages(connection, name)]
    assert len(moments) == letters
    assert most_within(moments, 10.0) <= most
    average = (letters - 1) / (moments[-1] - moments[0])
    print(f"{rate}/s: on average {average:.2f}/s, at most {most_within(moments, 10.0)} in ten seconds")
    # A busy machine may not reach the rate.
    assert average >= rate * 0.85


@pytest.mark.slow
async def test_a_high_rate_has_no_bursts(connection: NatsPyConnection, name: str) -> None:
    rate, letters = 400, 1_200
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, map(str, range(letters)))
    report = await redrive_dead_letters(connection, queue, RedriveRequest(rate=rate))
    report.raise_for_failures()
    moments = [copy.stored_at.timestamp() for copy in await stream_messages(connection, name)]
    for period in (1.0, 2.0):
        # 0.18 s for what comes early or is stored late, as the limiter documents.
        assert most_within(moments, period) <= rate * (period + 0.18) + 1
    assert (letters - 1) / (moments[-1] - moments[0]) >= rate * 0.5


@pytest.mark.parametrize("minutes", [-5, 5])
async def test_a_clock_that_is_off_neither_delays_a_redrive_nor_makes_it_early(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch, minutes: int
) -> None:
    class WrongClock(datetime):
        """A machine's clock that is off."""

        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return super().now(tz) + timedelta(minutes=minutes)

    queue = await make_queue(connection, name, consumer={"ack_wait": "1s"})
    await make_dead_letters(connection, queue, "ab")
    letters = (await find_dead_letters(connection, queue)).letters
    # Wherever the package reads this machine's clock.
    for module in [module for name, module in sys.modules.items() if name.startswith(_CORE)]:
        if getattr(module, "datetime", None) is datetime:
            monkeypatch.setattr(module, "datetime", WrongClock)
    async with asyncio.timeout(20):
        report = await redrive_dead_letters(connection, queue)
    began = datetime.strptime(f"{report.redrive[:15]}Z", "%Y%m%dT%H%M%S%z")
    assert abs((began - datetime.now(UTC)).total_seconds() - 60 * minutes) < 30, "expected the clock to be off"
    assert report.redriven == {1: 3, 2: 4}
    copies = {copy.sequence: copy for copy in await stream_messages(connection, name)}
    for letter in letters:
        assert copies[report.redriven[letter.sequence]].stored_at >= letter.ready_at


async def test_progress_is_reported_and_logged(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, "abcd")
    # Until then it waits for slow workers, which is a progress and a chance to stop of its own.
    await asyncio.sleep(0.5)
    monkeypatch.setattr(seams.REDRIVE_STEP_PAGE, 2)
    monkeypatch.setattr(seams.RUN_PROGRESS_PROGRESS_SECONDS, 0)
    reports: list[tuple[int, bool]] = []

    def progress(report: RedriveReport) -> None:
        reports.append((len(report.redriven), report.cancelled))

    with caplog.at_level(logging.INFO, logger="airflow_provider_jetstream"):
        await redrive_dead_letters(connection, queue, progress=progress)
    assert reports == [(2, False), (4, False), (4, False)]
    first, *others = [record.getMessage() for record in caplog.records if ".redrive." in record.name]
    assert re.match(rf"Redriving {name} by copy \(.* atomic batches.*\): nothing is lost", first)
    assert others == [
        f"Redriving {name}: {number} letters redriven, 0 parked, 0 failed, 0 were no dead letters"
        for number in (2, 4, 4)
    ]


async def test_a_stopped_redrive_ends_between_batches(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, "abcde")
    # Until then it waits for slow workers, which is a progress and a chance to stop of its own.
    await asyncio.sleep(0.5)
    monkeypatch.setattr(seams.REDRIVE_STEP_PAGE, 2)
    calls = count(1)
    report = await redrive_dead_letters(connection, queue, stopped=lambda: next(calls) == 3)
    assert (dict(report.redriven), report.cancelled) == ({1: 6, 2: 7, 3: 8, 4: 9}, True)
    assert await process_all(connection, queue) == dict.fromkeys("abcd", 1)
    report = await redrive_dead_letters(connection, queue, stopped=lambda: True)
    assert (dict(report.redriven), report.cancelled) == ({}, True)
    assert (await redrive_dead_letters(connection, queue)).redriven == {5: 10}
