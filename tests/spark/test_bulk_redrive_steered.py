"""Bulk redrives as objects of the audit: listed, paused, resumed and aborted between batches, and in waves."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from bulk_letters import letter_records, make_letters, waiting_jobs
from failing_tasks import RescannedTask

from airflow_provider_jetstream.jetstream import (
    RedriveRequest,
    connect,
    connection_settings,
    find_dead_letters,
    list_redrives,
    pause_redrive,
    read_redrive,
    resume_redrive,
)
from airflow_provider_jetstream.spark import redrive_letters
from testbed import seams
from testbed.queues import eventually, make_queue
from testbed.shop import shop_with_letters

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from airflow_provider_jetstream.jetstream import Redrive, RedriveReport, WorkQueue
    from testbed.face import NatsPyConnection

COUNT = 400
WITHIN = 120.0


def rows(spark: SparkSession, count: int) -> DataFrame:
    return spark.range(1, count + 1).withColumnRenamed("id", "sequence")


async def reached(connection: NatsPyConnection, queue: WorkQueue, state: str) -> Redrive:
    """Wait until the only redrive of a queue is recorded in a state."""

    async def found() -> Redrive | None:
        redrives = await list_redrives(connection, queue)
        return next((redrive for redrive in redrives if redrive.state == state and not redrive.pending), None)

    return await eventually(found, WITHIN)


def steering(
    options: dict[str, str], redrive: Callable[[], RedriveReport], steps: Callable[[Any], Coroutine[Any, Any, Any]]
) -> tuple[RedriveReport, Any]:
    """Redrive with Spark in this thread while the steps run in another one."""

    async def steer() -> Any:
        async with connect(connection_settings({"servers": (options["servers"],)})) as connection:
            return await steps(connection)

    with ThreadPoolExecutor(1) as thread:
        steered = thread.submit(asyncio.run, steer())
        report = redrive()
        return report, steered.result()


@pytest.mark.parametrize("tasks", [1, 2])
def test_a_redrive_right_after_a_death_says_what_it_waits_for_and_can_be_stopped(
    spark: SparkSession, connection_options: dict[str, str], name: str, caplog: pytest.LogCaptureFixture, tasks: int
) -> None:
    caplog.set_level(logging.INFO)
    queue = make_letters(connection_options, name, 10, consumer={"ack_wait": "1h"})
    said: list[str] = []

    def report_progress(progress: Any) -> None:
        said.append(progress.waiting)

    # It would wait for an hour.
    report = redrive_letters(
        *(spark, rows(spark, 10), queue, None, connection_options),
        progress=report_progress,
        stopped=lambda: len(said) > 1,
        tasks=tasks,
    )
    assert report.cancelled
    assert not report.redriven
    assert all(
        text.startswith("until 20") and "a slow worker may still have one of their jobs" in text for text in said
    )
    assert caplog.text.count(f"The redrive of {name} waits {said[0]}") == 1
    # The letters are still there.
    assert len(letters_of(connection_options, queue)) == 10


def letters_of(options: dict[str, str], queue: WorkQueue) -> list[int]:
    async def find() -> list[int]:
        async with connect(connection_settings({"servers": (options["servers"],)})) as connection:
            return [letter.sequence for letter in (await find_dead_letters(connection, queue)).letters]

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, find()).result()


def test_a_bulk_redrive_is_listed_paused_and_resumed(
    spark: SparkSession, connection_options: dict[str, str], name: str
) -> None:
    queue = make_letters(connection_options, name, COUNT)
    request = RedriveRequest(rate=60, run="steered", why="ticket 4711", who={"user": "Ann Lee"})

    async def steer(connection: NatsPyConnection) -> tuple[Redrive, Redrive]:
        begun = await reached(connection, queue, "running")
        await eventually(lambda: some_are_done(connection), WITHIN)
        await pause_redrive(connection, queue, begun.id, who="Ann Lee", why="a deployment")
        paused = await reached(connection, queue, "paused")
        dead = len((await find_dead_letters(connection, queue)).letters)
        assert dead == COUNT - paused.redriven > 0
        await resume_redrive(connection, queue, begun.id, who="Ben Ray")
        return begun, paused

    async def some_are_done(connection: NatsPyConnection) -> bool:
        return (await connection.client.jetstream().stream_info(name)).state.last_seq > COUNT + 5

    report, (begun, paused) = steering(
        connection_options,
        lambda: redrive_letters(spark, rows(spark, COUNT), queue, request, connection_options),
        steer,
    )
    assert (begun.engine, begun.run, begun.who, begun.why) == ("spark", "steered", {"user": "Ann Lee"}, "ticket 4711")
    assert begun.plan["rate"] == 60
    assert (0 < paused.redriven < COUNT, paused.reason) == (True, "pause by Ann Lee: a deployment")
    assert (report.state, len(report.redriven), report.failures, report.cancelled) == ("finished", COUNT, 0, False)
    assert (report.resumed, list(report.gone), report.redrive) == (0, [], begun.id)
    assert waiting_jobs(connection_options, queue) == Counter(range(1, COUNT + 1))
    assert Counter(record.sequence for record in letter_records(connection_options, queue)) == Counter(
        range(1, COUNT + 1)
    )

    async def read(connection: NatsPyConnection) -> list[Redrive]:
        return await list_redrives(connection, queue)

    _, (finished,) = steering(connection_options, lambda: report, read)
    assert (finished.id, finished.state, finished.redriven, finished.report["redriven"]) == (
        *(begun.id, "finished", COUNT, COUNT),
    )


@pytest.mark.slow
def test_a_pause_leaves_out_no_letters_that_need_another_scan(
    spark: SparkSession,
    connection_options: dict[str, str],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue = make_letters(connection_options, name, COUNT)
    monkeypatch.setattr(seams.STEP_REDRIVE_TASK, RescannedTask)
    marker = tmp_path / "rescanned"
    # Two tasks: one leaves its letters to another scan, and the other one is cut short by the pause.
    request = RedriveRequest(rate=100, run="paused", why=str(marker))

    async def steer(connection: NatsPyConnection) -> Redrive:
        begun = await reached(connection, queue, "running")
        await eventually(lambda: some_are_done(connection), WITHIN)
        await pause_redrive(connection, queue, begun.id, who="Ann Lee")
        paused = await reached(connection, queue, "paused")
        await resume_redrive(connection, queue, begun.id, who="Ann Lee")
        return paused

    async def some_are_done(connection: NatsPyConnection) -> bool:
        stored = (await connection.client.jetstream().stream_info(name)).state.last_seq
        return marker.exists() and stored > COUNT

    redrive = partial(redrive_letters, spark, rows(spark, COUNT), queue, request, connection_options)
    report, paused = steering(connection_options, redrive, steer)
    assert 0 < paused.redriven < COUNT // 2
    assert (report.state, len(report.redriven), report.failures) == ("finished", COUNT, 0)
    assert waiting_jobs(connection_options, queue) == Counter(range(1, COUNT + 1))


@pytest.mark.slow
@pytest.mark.parametrize("waves", [None, [5, "rest"]])
def test_letters_that_every_scan_leaves_to_another_one_fail(
    spark: SparkSession, connection_options: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch, waves: Any
) -> None:
    queue = make_letters(connection_options, name, 10)
    monkeypatch.setattr(seams.STEP_REDRIVE_TASK, RescannedTask)
    report = redrive_letters(spark, rows(spark, 10), queue, RedriveRequest(waves=waves), connection_options)
    assert (report.state, dict(report.redriven), sorted(report.failed)) == ("failed", {}, list(range(1, 11)))
    assert set(report.failed.values()) == {"the queue, a consumer or the server changed at every scan; run it again"}
    assert letters_of(connection_options, queue) == list(range(1, 11))


def test_a_bulk_redrive_in_waves_stops_at_its_gate_and_goes_on(
    spark: SparkSession, connection_options: dict[str, str], name: str
) -> None:
    request = RedriveRequest(waves=[10, 20, "rest"], run="waves")
    count = 60

    async def prepare_and_steer() -> None:
        async with connect(connection_settings({"servers": (connection_options["servers"],)})) as connection:
            queue = await make_queue(connection, name, consumer={"ack_wait": "2s"})
            async with shop_with_letters(
                connection, connection_settings({"servers": (connection_options["servers"],)}), queue, count, WITHIN
            ) as shop:
                shop.fails = lambda number: "no currency" if number % 10 < 6 else ""
                loop = asyncio.get_running_loop()
                # A letter that the frame leaves out stays one.
                frame = rows(spark, count - 1)
                redriving = loop.run_in_executor(
                    None, lambda: redrive_letters(spark, frame, queue, request, connection_options)
                )
                stopped = await reached(connection, queue, "at_gate")
                assert (stopped.redriven, stopped.engine, stopped.outcomes.completed) == (10, "spark", 4)
                assert (stopped.outcomes.died_again, sum(shop.done.values())) == (6, 4)
                assert stopped.waves[0].died_of[0].error == "ValueError: no currency"
                shop.fails = lambda _: ""
                await resume_redrive(connection, queue, stopped.id, who="Ann Lee", why="mended")
                report = await asyncio.wait_for(redriving, WITHIN)
                finished = await read_redrive(connection, queue, stopped.id)
                assert (report.state, finished.state, report.redrive) == ("finished", "finished", stopped.id)
                assert finished.outcomes.model_dump() == {
                    "completed": count - 1,
                    "died_again": 0,
                    "still_running": 0,
                    "unknown": 0,
                }
                assert [(wave.redriven, wave.outcomes.completed) for wave in finished.waves] == [
                    (10, 4),
                    (20, 20),
                    (count - 25, count - 25),
                ]
                assert Counter(shop.done.values()) == {1: count - 1}
                left = await find_dead_letters(connection, queue)
                assert [letter.sequence for letter in left.letters] == [count]

    asyncio.run(prepare_and_steer())
