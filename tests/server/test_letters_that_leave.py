"""Dead letters that leave a queue while a scan reads it: none counts as uncertain, and none that stays is missed."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    DeadLetter,
    Protocol,
    RedriveRequest,
    Status,
    find_dead_letters,
    preview,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.contract import late_ack_subject
from airflow_provider_jetstream.jetstream.errors import ServerTooOldError
from testbed import seams
from testbed.face import Scan, consumer_info, summarise_dead_letters
from testbed.queues import (
    CONSUMER,
    eventually,
    exhaust_deliveries,
    make_dead_letters,
    make_queue,
    process_all,
    publish_jobs,
    pull_jobs,
    stored_count,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from airflow_provider_jetstream.jetstream import Findings, WorkQueue
    from testbed.face import NatsPyConnection

PATIENT = {"ack_wait": "30s"}
# A redrive waits for as long after a death, in case that a worker is slow.
QUICK = {"ack_wait": "1s"}
LETTERS = (1, 3)


async def _redrive(connection: NatsPyConnection, queue: WorkQueue) -> None:
    await redrive_dead_letters(connection, queue, RedriveRequest())


async def _park(connection: NatsPyConnection, queue: WorkQueue) -> None:
    await redrive_dead_letters(connection, queue, RedriveRequest(max_redrives=0))


async def _acknowledge_late(connection: NatsPyConnection, queue: WorkQueue) -> None:
    for sequence in LETTERS:
        await connection.request(late_ack_subject(queue.name, CONSUMER, sequence), b"+ACK")


async def _delete(connection: NatsPyConnection, queue: WorkQueue) -> None:
    for sequence in LETTERS:
        await connection.api(f"STREAM.MSG.DELETE.{queue.name}", {"seq": sequence})


async def _purge(connection: NatsPyConnection, queue: WorkQueue) -> None:
    await connection.api(f"STREAM.PURGE.{queue.name}", {"seq": 4})


def _once_counted(
    connection: NatsPyConnection, monkeypatch: pytest.MonkeyPatch, change: Callable[[], Awaitable[None]]
) -> None:
    """Change a queue once a scan has counted its consumers, before it reads entries."""
    api, changed = connection.api, asyncio.Event()

    async def changing(subject: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if subject == "STREAM.LIST" and not changed.is_set():
            changed.set()
            await change()
        return await api(subject, *args, **kwargs)

    monkeypatch.setattr(connection, "api", changing)


@pytest.mark.parametrize(
    ("leave", "consumer"),
    [(_redrive, QUICK), (_park, QUICK), (_acknowledge_late, PATIENT), (_delete, PATIENT), (_purge, PATIENT)],
)
async def test_letters_that_leave_while_others_die_are_not_uncertain(
    connection: NatsPyConnection,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    leave: Callable[[NatsPyConnection, WorkQueue], Awaitable[None]],
    consumer: dict[str, str],
) -> None:
    queue = await make_queue(connection, name, consumer=consumer, dead="a")
    await publish_jobs(connection, queue, ["done"])
    await process_all(connection, queue)
    await make_dead_letters(connection, queue, "b")

    async def change() -> None:
        await leave(connection, queue)
        await publish_jobs(connection, queue, "c")
        await exhaust_deliveries(connection, queue, await stored_count(connection, name))

    _once_counted(connection, monkeypatch, change)
    assert (await find_dead_letters(connection, queue)).uncertain == 0


async def test_what_is_dead_without_an_entry_stays_uncertain_while_others_leave(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name, consumer=PATIENT, jobs=["before", "running"])
    await pull_jobs(connection, queue, 2)
    await make_dead_letters(connection, queue, "abcd")
    await connection.api(f"STREAM.MSG.DELETE.{name}-dead", {"seq": 4})

    async def change() -> None:
        for sequence in (3, 4):
            await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": sequence})
        await publish_jobs(connection, queue, "ef")
        await exhaust_deliveries(connection, queue, 2)

    _once_counted(connection, monkeypatch, change)
    found = await find_dead_letters(connection, queue)
    assert found.uncertain == 1


# Dead letters of a queue that is never idle: counted as far as numbers go, and certain by a count under a pause.


QUEUES_LETTERS = 50


@asynccontextmanager
async def live_traffic(
    connection: NatsPyConnection, queue: WorkQueue, *, workers: int = 1, seconds: float = 0.0
) -> AsyncIterator[Counter[str]]:
    """Publish jobs and do them until the block ends; count how often each is done."""
    stopped, done = asyncio.Event(), Counter[str]()

    async def publish() -> None:
        number = 0
        while not stopped.is_set():
            number += 1
            await publish_jobs(connection, queue, [f"live {number}"])
            await asyncio.sleep(seconds)

    async def work() -> None:
        pull = await connection.client.jetstream().pull_subscribe_bind(CONSUMER, stream=queue.name)
        while not stopped.is_set():
            with suppress(TimeoutError):
                for message in await pull.fetch(1, timeout=0.2):
                    await asyncio.sleep(seconds)
                    done[message.data.decode()] += 1
                    await message.ack()
        await pull.unsubscribe()

    tasks = [asyncio.create_task(publish()), *(asyncio.create_task(work()) for _ in range(workers))]
    await eventually(lambda: len(done) > 20)
    try:
        yield done
    finally:
        stopped.set()
        await asyncio.gather(*tasks)


async def make_unreported(connection: NatsPyConnection, name: str, **consumer: object) -> WorkQueue:
    """Make a queue with one job that runs, and dead letters behind it of which no advisory is stored."""
    queue = await make_queue(connection, name, consumer={"ack_wait": "60s", **consumer})
    await publish_jobs(connection, queue, ["long"])
    await pull_jobs(connection, queue, 1)
    await make_dead_letters(connection, queue, map(str, range(QUEUES_LETTERS)))
    await connection.api(f"STREAM.PURGE.{name}-dead")
    return queue


def counts(found: Findings) -> tuple[int, int, int]:
    """Return how many letters were found, and the least and the most that there are besides."""
    for risk in found.risks:
        if risk.name == "busy-consumer":
            least, most = map(int, re.findall(r"between (\d+) and (\d+)", risk)[0])
            assert least == found.uncertain
            return len(found.letters), least, most
    return len(found.letters), found.uncertain, found.uncertain


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 4])
async def test_deaths_of_a_queue_that_is_never_idle_are_never_counted_as_none(
    connection: NatsPyConnection, name: str, workers: int
) -> None:
    queue = await make_unreported(connection, name)
    async with live_traffic(connection, queue, workers=workers):
        looks = [counts(await find_dead_letters(connection, queue)) for _ in range(3)]
    for found, least, most in looks:
        assert found == 0
        # A worker may have pulled its next job before its last acknowledgement is processed.
        assert QUEUES_LETTERS - 2 * workers <= least <= QUEUES_LETTERS <= most <= QUEUES_LETTERS + 1 + 2 * workers


@pytest.mark.slow
async def test_a_consumer_of_some_subjects_is_bounded_by_its_own_jobs(connection: NatsPyConnection, name: str) -> None:
    consumers = [
        {"name": consumer, "filter_subject": f"{name}.jobs.{kind}", "max_deliver": 1, "ack_wait": "60s"}
        | {"sample_freq": "0"}
        for consumer, kind in ((CONSUMER, "plain"), ("others", "other"))
    ]
    queue = await make_queue(connection, name, consumers=consumers)
    await publish_jobs(connection, queue, ["waiting"] * 7, kind="other")
    await publish_jobs(connection, queue, ["long"])
    await pull_jobs(connection, queue, 1)
    await make_dead_letters(connection, queue, map(str, range(QUEUES_LETTERS)))
    await connection.api(f"STREAM.PURGE.{name}-dead")
    async with live_traffic(connection, queue):
        looks = [counts(await find_dead_letters(connection, queue)) for _ in range(3)]
    for found, least, most in looks:
        assert found == 0
        assert QUEUES_LETTERS - 2 <= least <= QUEUES_LETTERS <= most <= QUEUES_LETTERS + 3


@pytest.mark.slow
async def test_letters_that_are_found_on_a_busy_queue_arent_uncertain_too(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "60s"}, jobs=["long"])
    await pull_jobs(connection, queue, 1)
    await make_dead_letters(connection, queue, map(str, range(QUEUES_LETTERS)))
    async with live_traffic(connection, queue):
        looks = [counts(await find_dead_letters(connection, queue)) for _ in range(3)]
    for found, least, most in looks:
        assert (found, least) == (QUEUES_LETTERS, 0)
        assert most <= 2


async def test_a_count_under_a_pause_beside_live_workers_finds_what_is_dead(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_unreported(connection, name)
    async with live_traffic(connection, queue, workers=3, seconds=0.02) as done:
        look = asyncio.create_task(summarise_dead_letters(connection, queue, count_under_pause=True))
        await eventually(lambda: is_paused(connection, queue))
        await connection.request(late_ack_subject(name, CONSUMER, 1), b"+ACK")
        summary = await look
        assert (summary.dead, summary.ranges, summary.uncertain) == (QUEUES_LETTERS, [(2, QUEUES_LETTERS + 1)], 0)
        assert not await is_paused(connection, queue)
        before = len(done)
        await eventually(lambda: len(done) > before + 10)
    done += await process_all(connection, queue)
    assert set(done.values()) == {1}
    assert await stored_count(connection, name) == QUEUES_LETTERS


@pytest.mark.slow
async def test_a_redrive_after_a_count_under_a_pause_brings_back_each_letter_once(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "2s"}, dead=map(str, range(QUEUES_LETTERS)))
    await connection.api(f"STREAM.PURGE.{name}-dead")
    async with live_traffic(connection, queue, workers=3, seconds=0.02) as done:
        # What a count under a pause proved stays proved while jobs run and the redrive waits for slow workers.
        report = await redrive_dead_letters(
            connection, queue, RedriveRequest(protocol=Protocol.COPY, count_under_pause=True)
        )
        assert (len(report.redriven), report.failures, report.uncertain) == (QUEUES_LETTERS, 0, 0)
        await eventually(lambda: all(done[str(number)] for number in range(QUEUES_LETTERS)))
    done += await process_all(connection, queue)
    assert set(done.values()) == {1}
    assert await stored_count(connection, name) == 0


async def is_paused(connection: NatsPyConnection, queue: WorkQueue) -> bool:
    return bool((await consumer_info(connection, queue.name, CONSUMER)).get("paused"))


@pytest.mark.slow
async def test_two_counts_under_a_pause_at_once_settle_all_partitions_and_resume_them(
    connection: NatsPyConnection, name: str
) -> None:
    consumers = [
        {"name": f"w{number}", "filter_subject": f"{name}.jobs.{number}", "max_deliver": 1, "ack_wait": "20s"}
        | {"sample_freq": "0"}
        for number in range(8)
    ]
    queue = await make_queue(connection, name, consumers=consumers)
    held = []
    for number in range(8):
        await publish_jobs(connection, queue, ["running", "dead", "waiting"], kind=str(number))
        running, dead = await pull_jobs(connection, queue, 2, consumer=f"w{number}")
        await dead.nak()
        held.append(running)
    await find_dead_letters(connection, queue)
    await connection.api(f"STREAM.PURGE.{name}-dead")
    looks = [asyncio.create_task(find_dead_letters(connection, queue, count_under_pause=True)) for _ in range(2)]
    for message in held:
        await asyncio.sleep(0.1)
        await message.ack()
    expected = [3 * number + 2 for number in range(8)]
    for look in looks:
        found = await look
        assert ([letter.sequence for letter in found.letters], found.uncertain) == (expected, 0)
    infos = [await consumer_info(connection, name, f"w{number}") for number in range(8)]
    assert not [info["name"] for info in infos if info.get("paused")]
    assert [info["num_pending"] for info in infos] == [1] * 8


@pytest.mark.since_server("2.14", "the reset of a consumer")
async def test_a_consumer_that_was_reset_since_isnt_settled_by_an_earlier_count(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "60s"}, jobs=["done"])
    await process_all(connection, queue)
    await make_dead_letters(connection, queue, "ab")
    scan = await Scan.begin(connection, queue, count_under_pause=True)
    letters = [letter async for letter in scan.letters()]
    assert [letter.sequence for letter in letters] == [2, 3]
    # By somebody who records nothing; it has delivered as far again when the scan looks once more.
    await connection.api(f"CONSUMER.RESET.{name}.{CONSUMER}", {"seq": 1})
    running = await pull_jobs(connection, queue, 2)
    jobs = await scan.classify_again(letters, refresh=True)
    assert [job.status for job in jobs if not isinstance(job, DeadLetter)] == [Status.UNCERTAIN] * 2
    for message in running:
        await message.ack_sync()


@pytest.mark.slow
async def test_a_count_under_a_pause_that_doesnt_end_leaves_the_consumer_running_and_the_count_uncertain(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams.COUNT_LONGEST_PAUSE, 0.5)
    queue = await make_unreported(connection, name)
    async with live_traffic(connection, queue) as done:
        found = await find_dead_letters(connection, queue, count_under_pause=True)
        assert not await is_paused(connection, queue)
        before = len(done)
        await eventually(lambda: len(done) > before + 10)
    assert (len(found.letters), found.uncertain > 0) == (0, True)
    (finding,) = [risk for risk in found.risks if risk.name == "count-incomplete"]
    assert finding.startswith(f"1 jobs of consumer worker of {name} stayed in flight")


async def test_a_count_under_a_pause_ends_no_pause_of_somebody_else(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams.COUNT_LONGEST_PAUSE, 0.2)
    queue = await make_unreported(connection, name)
    request = {"pause_until": "2100-01-01T00:00:00Z"}
    await connection.api(f"CONSUMER.PAUSE.{name}.{CONSUMER}", request)
    found = await find_dead_letters(connection, queue, count_under_pause=True)
    assert await is_paused(connection, queue)
    assert found.uncertain >= QUEUES_LETTERS


async def test_without_open_deliveries_a_count_under_a_pause_pauses_nothing(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name, dead="ab")
    subjects: list[str] = []
    api = connection.api

    async def record(subject: str, *args: object, **kwargs: object) -> dict[str, object]:
        subjects.append(subject)
        return await api(subject, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(connection, "api", record)
    found = await find_dead_letters(connection, queue, count_under_pause=True)
    assert len(found.letters) == 2
    assert not [subject for subject in subjects if "PAUSE" in subject]


async def test_a_count_under_a_pause_needs_a_server_that_can_pause_consumers(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name)
    monkeypatch.setattr(connection, "api_level", 0)
    for look in (find_dead_letters, summarise_dead_letters):
        with pytest.raises(
            ServerTooOldError, match=r"a count under a pause of .*: expected nats-server 2\.11 or later"
        ):
            await look(connection, queue, count_under_pause=True)
    with pytest.raises(ServerTooOldError, match="count under a pause"):
        await redrive_dead_letters(connection, queue, RedriveRequest(count_under_pause=True))
    with pytest.raises(ServerTooOldError, match="count under a pause"):
        await preview(connection, queue, RedriveRequest(count_under_pause=True))
