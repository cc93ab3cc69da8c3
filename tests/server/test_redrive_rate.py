"""The rate of a redrive, its progress and its cancellation."""

from __future__ import annotations

import logging
from itertools import count
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream.publishing.rate_limiter import RateLimiter
from airflow_provider_jetstream.jetstream.redrive import redrive as redrive_module
from airflow_provider_jetstream.jetstream.redrive.redrive import redrive_dead_letters
from airflow_provider_jetstream.jetstream.redrive.request import RedriveRequest
from testbed.dead_letters import stream_messages
from testbed.queues import make_dead_letters, make_queue, process_all

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection
    from airflow_provider_jetstream.jetstream.redrive.report import RedriveReport


def most_within(moments: list[float], window: float) -> int:
    """Count the copies in the period that has the most."""
    first = most = 0
    for last, moment in enumerate(moments):
        while moment - moments[first] > window:
            first += 1
        most = max(most, last - first + 1)
    return most


@pytest.mark.parametrize(("rate", "letters"), [(30, 130), (400, 1_200)])
async def test_no_period_has_more_letters_than_the_rate_allows(
    connection: NatsPyConnection, name: str, rate: int, letters: int
) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, map(str, range(letters)))
    report = await redrive_dead_letters(connection, queue, RedriveRequest(rate=rate))
    report.raise_for_failures()
    # The server's own timestamps.
    moments = [copy.stored_at.timestamp() for copy in await stream_messages(connection, name)]
    assert len(moments) == letters
    burst = RateLimiter(rate).burst
    fullest = {window: most_within(moments, window) for window in (1.0, 2.0)}
    average = (letters - burst) / (moments[-1] - moments[0])
    print(f"{rate}/s: on average {average:.1f}/s, at most {fullest} in so many seconds")
    for window, most in fullest.items():
        assert most <= rate * window + burst
    assert average <= rate * 1.05
    # A busy machine may not reach the higher rate.
    assert average >= rate * (0.9 if rate < 100 else 0.5)


async def test_progress_is_reported_and_logged(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, "abcd")
    monkeypatch.setattr(redrive_module, "PAGE", 2)
    monkeypatch.setattr(redrive_module, "_PROGRESS_SECONDS", 0)
    reports: list[tuple[int, bool]] = []

    def progress(report: RedriveReport) -> None:
        reports.append((len(report.redriven), report.cancelled))

    with caplog.at_level(logging.INFO, logger=redrive_module.__name__):
        await redrive_dead_letters(connection, queue, progress=progress)
    assert reports == [(2, False), (4, False), (4, False)]
    first, *others = [record.getMessage() for record in caplog.records]
    assert first.startswith(f"Redriving {name} by copy ({name} doesn't allow atomic batches; provision it with atomic")
    assert others == [
        f"Redriving {name}: {number} letters redriven, 0 parked, 0 failed, 0 were no dead letters"
        for number in (2, 4, 4)
    ]


async def test_a_stopped_redrive_ends_between_batches(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, "abcde")
    monkeypatch.setattr(redrive_module, "PAGE", 2)
    calls = count(1)
    report = await redrive_dead_letters(connection, queue, stopped=lambda: next(calls) == 3)
    assert (dict(report.redriven), report.cancelled) == ({1: 6, 2: 7, 3: 8, 4: 9}, True)
    assert await process_all(connection, queue) == dict.fromkeys("abcd", 1)
    report = await redrive_dead_letters(connection, queue, stopped=lambda: True)
    assert (dict(report.redriven), report.cancelled) == ({}, True)
    assert (await redrive_dead_letters(connection, queue)).redriven == {5: 10}
