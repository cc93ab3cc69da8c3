"""The monitor's service: shared polls and scans, ten thousand letters, a server that is away."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from airflow_provider_jetstream.jetstream import Origin, connect, connection_settings
from testbed.dead_letters import make_terminated_letters, store_task, task_key
from testbed.face import stream_info
from testbed.nats_server import NatsServer
from testbed.page import running_page
from testbed.queues import eventually, exhaust_deliveries, make_queue, publish_jobs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    import httpx

    from airflow_provider_jetstream.jetstream import WorkQueue

CONNECTION = "nats_monitored"
MANY = 10_000
GROUPED = ("reason", "error_class", "fingerprint")


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with NatsServer() as running:
        yield running


@pytest.fixture
async def page(server: NatsServer) -> AsyncIterator[httpx.AsyncClient]:
    async with running_page([CONNECTION], server) as client:
        yield client


async def make_letters(server: NatsServer, name: str, count: int) -> WorkQueue:
    """Make a queue with so many dead letters."""
    async with connect(connection_settings({"servers": (server.url,), "timeout": 30})) as connection:
        queue = await make_queue(connection, name, consumer={"ack_wait": "30s"})
        for _ in range(0, count, 1_000):
            await make_terminated_letters(connection, queue, map(str, range(min(count, 1_000))))
        return queue


async def snapshot(page: httpx.AsyncClient) -> dict[str, Any]:
    """Return the state of the one connection."""
    (state,) = (await page.get("snapshot")).json()["connections"]
    return dict(state)


async def letters(page: httpx.AsyncClient, queue: str, **query: Any) -> dict[str, Any]:
    """Return a page of letters."""
    return dict((await page.get(f"queues/{CONNECTION}/{queue}/letters", params=query)).json())


async def groups(page: httpx.AsyncClient, queue: str, every: float = 0.0, **selection: str) -> dict[str, Any]:
    """Wait for a scan to end, and return its groups."""

    async def ready() -> dict[str, Any] | None:
        await asyncio.sleep(every)
        answer = await page.get(f"queues/{CONNECTION}/{queue}/groups", params={"group_by": GROUPED, **selection})
        assert answer.status_code in (200, 503), answer.text
        return answer.json() if answer.status_code == 200 and answer.json()["scan"]["state"] == "ready" else None

    return dict(await eventually(ready, 300))


async def request_count(server: NatsServer, seconds: float) -> int:
    """Count the messages that the server receives in so many seconds."""
    before = server.monitor("varz")["in_msgs"]
    await asyncio.sleep(seconds)
    return int(server.monitor("varz")["in_msgs"] - before)


@pytest.mark.slow
async def test_twenty_viewers_cause_no_more_requests_than_one(
    server: NatsServer, page: httpx.AsyncClient, name: str
) -> None:
    await make_letters(server, name, 20)
    await groups(page, name)

    async def view() -> None:
        while True:
            await snapshot(page)
            await page.get(f"queues/{CONNECTION}/{name}")
            await page.get(f"queues/{CONNECTION}/{name}/groups")
            await asyncio.sleep(0.1)

    requests = {}
    for viewers in (1, 20):
        tasks = [asyncio.create_task(view()) for _ in range(viewers)]
        # Views that started together have their answers by then.
        await asyncio.sleep(0.5)
        requests[viewers] = await request_count(server, 2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    # Four polls of two requests fit into two seconds; another poll may fall into the time, and a ping.
    assert min(requests.values()) > 0, requests
    assert max(requests.values()) <= 5 * 2 + 4, requests
    assert server.monitor("connz")["num_connections"] == 1


@pytest.mark.slow
async def test_ten_thousand_letters_are_paged_without_blocking_the_event_loop(
    server: NatsServer, page: httpx.AsyncClient, name: str
) -> None:
    await make_letters(server, name, MANY)
    process = psutil.Process()
    before = process.memory_info().rss
    thread_started, process_started = time.thread_time(), time.process_time()
    result = await groups(page, name, every=0.4)
    # The scan runs in another thread than the one that serves pages.
    assert time.thread_time() - thread_started < 0.3 * (time.process_time() - process_started)
    (group,) = result["groups"]
    assert (result["total"]["value"], group["count"]["value"], result["groups_left_out"]) == (MANY, MANY, 0)
    # Some thirty bytes a letter, and as many for each entry of the dead letter queue.
    assert process.memory_info().rss - before < 60 * 2**20
    after: int | None = 0
    seen: list[int] = []
    while after is not None and len(seen) < 2_000:
        some = await letters(page, name, after=after, limit=200)
        seen += [letter["sequence"] for letter in some["letters"]]
        after = some["next_after"]
    assert seen == list(range(1, 2_001))
    last = await letters(page, name, after=MANY - 3, limit=200)
    assert (len(last["letters"]), last["next_after"], last["matching"]["value"]) == (3, None, MANY)


@pytest.mark.slow
async def test_a_scan_after_the_first_reads_only_new_entries(
    server: NatsServer, page: httpx.AsyncClient, name: str
) -> None:
    queue = await make_letters(server, name, 1_000)
    assert (await groups(page, name))["total"]["value"] == 1_000
    async with connect(connection_settings({"servers": (server.url,), "timeout": 5})) as connection:
        await make_terminated_letters(connection, queue, ["another"], reason="another reason")

    async def both() -> list[dict[str, Any]] | None:
        result = await groups(page, name)
        return result["groups"] if result["total"]["value"] == 1_001 else None

    first, second = await eventually(both, 30)
    assert (first["count"]["value"], second["count"]["value"]) == (1_000, 1)
    only = await letters(page, name, **second["select"])
    assert [letter["sequence"] for letter in only["letters"]] == [1_001]


async def test_a_server_that_was_away_is_polled_again(server: NatsServer, page: httpx.AsyncClient, name: str) -> None:
    await make_letters(server, name, 5)
    assert (await groups(page, name))["total"]["value"] == 5
    server.kill()

    async def away() -> dict[str, Any] | None:
        state = await snapshot(page)
        return state if state["state"] == "away" else None

    state = await eventually(away)
    assert state["problem"]["message"]
    assert name in {queue["queue"] for queue in state["queues"]}
    # The last results are still shown, with their age.
    assert (await page.get(f"queues/{CONNECTION}/{name}/groups")).json()["total"]["value"] == 5
    server.restart()

    async def is_up() -> bool:
        return bool((await snapshot(page))["state"] == "up")

    await eventually(is_up)

    async def are_shown() -> bool:
        return len((await letters(page, name)).get("letters", ())) == 5

    await eventually(are_shown)


async def test_a_sequence_without_a_letter_is_refused(server: NatsServer, page: httpx.AsyncClient, name: str) -> None:
    await make_letters(server, name, 1)
    await groups(page, name)
    answer = await page.get(f"queues/{CONNECTION}/{name}/letters/7")
    assert (answer.status_code, "expected job 7" in answer.text) == (404, True)


async def test_only_jobs_and_letters_whose_task_is_known_belong_to_a_run(
    server: NatsServer, page: httpx.AsyncClient, name: str
) -> None:
    prints, victim = Origin("prints", "r", "t"), Origin("victim", "r", "t")
    async with connect(connection_settings({"servers": (server.url,), "timeout": 30})) as connection:
        queue = await make_queue(connection, name, consumer={"ack_wait": "30s"})
        created = (await stream_info(connection, name))["created"]
        await store_task(connection, queue, prints, created=created, published=1)
        # Under the key of a task, a record that names another one.
        await store_task(connection, queue, victim, created=created, published=1, dag_id="prints")
        claims = {"Airflow-Dag-Id": "victim", "Airflow-Run-Id": "r", "Airflow-Task-Id": "t"}
        for headers in ({"Airflow-Task": task_key(prints)}, {"Airflow-Task": task_key(victim)} | claims):
            await publish_jobs(connection, queue, ["x"], headers=headers)
        await exhaust_deliveries(connection, queue, 2)
    assert (await groups(page, name))["total"]["value"] == 2

    async def lines_of(dag_id: str) -> list[tuple[int | None, int]]:
        answer = (await page.get("jobs", params={"dag_id": dag_id, "run_id": "r"})).json()
        assert answer["scanning"] == []
        return [(line["published"]["value"], line["letters"]["value"]) for line in answer["queues"]]

    assert await lines_of("prints") == [(1, 1)]
    assert await lines_of("victim") == []
    listed = (await letters(page, name))["letters"]
    assert [letter["origin"] and letter["origin"]["dag_id"] for letter in listed] == ["prints", None]
    for dag_id, count in (("prints", 1), ("victim", 0)):
        assert (await groups(page, name, dag_id=dag_id))["total"]["value"] == count
