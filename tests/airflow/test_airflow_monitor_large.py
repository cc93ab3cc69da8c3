"""A hundred thousand dead letters in a hundred queues: each view's answer is compared with what was made."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import Selection, connect, connection_settings
from airflow_provider_jetstream.jetstream.errors import TransientError
from testbed import seams
from testbed.many_letters import NAK, ManyJob, let_die, make_dead_queue
from testbed.nats_server import NatsServer
from testbed.page import PLACES, Hiding, LetterQuery, MonitorService, MonitorSettings
from testbed.ports import LOOPBACK
from testbed.queues import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from testbed.page import GroupField

CONNECTION = "nats_large"
QUEUES, LETTERS, LARGE = 100, 100_000, 60_000
# Digits don't tell causes apart.
REASONS = ("no stock", "card expired", "no address", "blocked", "too heavy", "wrong currency", "shop closed")
LARGE_NAME = "queue-00"
EVERY = LetterQuery(Selection())
CAUSE: tuple[GroupField, ...] = ("reason", "error_class", "fingerprint")


def small_count(number: int) -> int:
    """Return how many letters a small queue holds; the last one holds what remains."""
    share = (LETTERS - LARGE) // (QUEUES - 1)
    return share if number < QUEUES - 1 else LETTERS - LARGE - share * (QUEUES - 2)


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with NatsServer() as running:
        yield running


@pytest.fixture
async def service(server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MonitorService]:
    values = {"conn_type": "nats", "host": LOOPBACK, "port": server.port, "extra": {"timeout": 30}}
    monkeypatch.setenv(f"AIRFLOW_CONN_{CONNECTION.upper()}", json.dumps(values))
    # Else what it leaves to the API server between two queues is most of the time.
    monkeypatch.setattr(seams.SCANNER_LONGEST_PAUSE, 0.0)
    running = MonitorService(MonitorSettings((CONNECTION,), 2.0, "all", 10_000, "jetstream_redrive"))
    yield running
    running.stop()


async def make_letters(server: NatsServer) -> datetime:
    """Make all letters; return a time at which half of the large queue's letters had died."""
    async with connect(connection_settings({"servers": (server.url,), "timeout": 60})) as connection:

        async def make_small(number: int) -> None:
            name = f"queue-{number:02}"
            queue = await make_dead_queue(connection, name)
            jobs = (
                ManyJob(f"{name}.jobs.plain", b"{}", f"job-{n}", f"+TERM {REASONS[n % len(REASONS)]}".encode())
                for n in range(small_count(number))
            )
            await let_die(connection, queue, jobs)

        large = await make_dead_queue(connection, LARGE_NAME)
        await let_die(connection, large, map(distinct_job, range(1, LARGE // 2 + 1)))
        half = datetime.now(UTC)
        await asyncio.sleep(0.01)
        await let_die(connection, large, map(distinct_job, range(LARGE // 2 + 1, LARGE + 1)))
        for start in range(1, QUEUES, 8):
            await asyncio.gather(*map(make_small, range(start, min(QUEUES, start + 8))))
        return half


def distinct_job(number: int) -> ManyJob:
    """Return a job on a subject of its own, whose number is its stream sequence."""
    subject = f"{LARGE_NAME}.jobs.{'even' if number % 2 == 0 else 'odd'}.s{number}"
    return ManyJob(subject, f'{{"number":{number}}}'.encode(), f"order-{number}", NAK)


class Views:
    """What the page shows."""

    def __init__(self, service: MonitorService) -> None:
        self._service = service

    async def counts(self) -> dict[str, int]:
        """Return the number of letters by queue, of the queues that were counted."""
        (state,) = json.loads(await self._service.snapshot((CONNECTION,)))["connections"]
        return {queue["queue"]: queue["letters"]["certain"] for queue in state["queues"] if queue["letters"]}

    async def groups(
        self, by: Sequence[GroupField] = CAUSE, query: LetterQuery = EVERY, queue: str = LARGE_NAME
    ) -> dict[str, Any]:
        """Return groups of letters."""
        return dict(json.loads(await self._service.letters.groups(CONNECTION, queue, query, by, Hiding())))

    async def page(self, query: LetterQuery = EVERY, **fields: Any) -> dict[str, Any]:
        """Return a page of the large queue's letters."""
        return dict(json.loads(await self._service.letters.page(CONNECTION, LARGE_NAME, query, Hiding(), **fields)))

    async def sequences(self, query: LetterQuery = EVERY, **fields: Any) -> list[int]:
        """Return the sequences of a page of the large queue's letters."""
        return [letter["sequence"] for letter in (await self.page(query, **fields))["letters"]]


@pytest.mark.slow
async def test_each_view_of_a_hundred_thousand_letters_is_right(server: NatsServer, service: MonitorService) -> None:
    half, views = await make_letters(server), Views(service)
    expected = {LARGE_NAME: LARGE} | {f"queue-{number:02}": small_count(number) for number in range(1, QUEUES)}
    assert sum(expected.values()) == LETTERS

    async def all_counted() -> bool:
        # Each look at a hundred queues takes time from the scans.
        await asyncio.sleep(0.3)
        return await views.counts() == expected

    await eventually(all_counted, 900)
    await check_pages(views)
    await check_found(views, half)
    await check_groups(views)
    found = await service.letters.search(
        CONNECTION, LARGE_NAME, EVERY, Hiding(), '"number":59321', where=PLACES, after=59_000, limit=5
    )
    lines = [json.loads(line) async for line in found]
    assert [line["letter"]["sequence"] for line in lines if line["type"] == "found"] == [59_321]
    assert (lines[-1]["reason"], lines[-1]["read"]) == ("all", 1_000)
    await check_a_new_letter(server, views)


async def check_pages(views: Views) -> None:
    """Check the first page, the one after it, and the last ones, in all orders."""
    first = await views.page()
    assert [letter["sequence"] for letter in first["letters"]] == list(range(1, 51))
    assert (first["matching"], first["next_after"], first["gone"], first["scan"]["complete"]) == (LARGE, 50, 0, True)
    assert await views.sequences(after=50) == list(range(51, 101))
    assert await views.sequences(after=33_333, limit=3) == [33_334, 33_335, 33_336]
    last = await views.page(offset=LARGE - 10)
    assert [letter["sequence"] for letter in last["letters"]] == list(range(LARGE - 9, LARGE + 1))
    assert (last["next_after"], last["next_offset"]) == (None, None)
    assert await views.sequences(sort="-sequence", limit=3) == [LARGE, LARGE - 1, LARGE - 2]
    assert await views.sequences(sort="-sequence", offset=LARGE - 2) == [2, 1]
    newest = await views.page(sort="-died_at", limit=200)
    times = [letter["died_at"] for letter in newest["letters"]]
    assert times == sorted(times, reverse=True)
    oldest = await views.page(sort="died_at", limit=200)
    assert [letter["died_at"] for letter in oldest["letters"]] == sorted(
        letter["died_at"] for letter in oldest["letters"]
    )
    assert await views.sequences(sort="died_at", offset=LARGE - 200, limit=200) == [
        letter["sequence"] for letter in reversed(newest["letters"])
    ]
    # Nobody dies before all letters of the first half have.
    assert min(letter["sequence"] for letter in newest["letters"]) > LARGE // 2
    assert max(letter["sequence"] for letter in oldest["letters"]) <= LARGE // 2


async def check_found(views: Views, half: datetime) -> None:
    """Check what is found by job, time of death and subject."""
    for number in (1, 31_415, LARGE):
        page = await views.page(LetterQuery(Selection(), job_id=f"order-{number}"))
        assert [(letter["sequence"], letter["job_id"]) for letter in page["letters"]] == [(number, f"order-{number}")]
        assert page["matching"] == 1
    before, since = LetterQuery(Selection(), died_to=half), LetterQuery(Selection(), died_from=half)
    for query, sequences in ((before, range(1, LARGE // 2 + 1)), (since, range(LARGE // 2 + 1, LARGE + 1))):
        assert (await views.page(query))["matching"] == LARGE // 2
        assert await views.sequences(query, limit=5) == list(sequences[:5])
        assert await views.sequences(query, offset=LARGE // 2 - 2) == list(sequences[-2:])
        assert len(await views.sequences(query, sort="-died_at")) == 50
        assert (await views.groups(query=query))["total"] == LARGE // 2
    exact = LetterQuery(Selection(subject=f"{LARGE_NAME}.jobs.odd.s58999"))
    assert (await views.sequences(exact), (await views.page(exact))["matching"]) == ([58_999], 1)
    even = LetterQuery(Selection(subject=f"{LARGE_NAME}.jobs.even.*"))
    assert (await views.page(even))["matching"] == LARGE // 2
    assert await views.sequences(even, sort="-sequence", limit=2) == [LARGE, LARGE - 2]
    assert await views.sequences(LetterQuery(Selection(subject="elsewhere.>"))) == []


async def check_groups(views: Views) -> None:
    """Check the groups of letters that are alike, and of letters that aren't."""
    (one,) = (await views.groups())["groups"]
    assert (one["count"], one["share"], one["example"]) == (LARGE, 1.0, 1)
    by_subject = await views.groups(("subject",))
    assert (by_subject["total"], len(by_subject["groups"]) + by_subject["groups_left_out"]) == (LARGE, LARGE)
    assert {group["count"] for group in by_subject["groups"]} == {1}
    assert [group["example"] for group in by_subject["groups"][:3]] == [1, 2, 3]
    small = await views.groups(queue="queue-99")
    count = small_count(99)
    assert [group["count"] for group in small["groups"]] == sorted(
        (len(range(rest, count, len(REASONS))) for rest in range(len(REASONS))), reverse=True
    )
    assert sorted(group["error_message"] for group in small["groups"]) == sorted(REASONS)


async def check_a_new_letter(server: NatsServer, views: Views) -> None:
    """Check that a letter that dies now is the newest one on the page."""
    async with connect(connection_settings({"servers": (server.url,), "timeout": 60})) as connection:
        await let_die(connection, await make_dead_queue(connection, LARGE_NAME), [distinct_job(LARGE + 1)])

    async def newest() -> dict[str, Any] | None:
        try:
            page = await views.page(sort="-died_at", limit=1)
        except TransientError:
            return None
        return page if page["matching"] == LARGE + 1 else None

    page = await eventually(newest, 300)
    assert [(letter["sequence"], letter["job_id"]) for letter in page["letters"]] == [(LARGE + 1, f"order-{LARGE + 1}")]
