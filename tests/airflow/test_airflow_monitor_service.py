"""What all viewers of the monitor share: one look at a server, letters by the thousand, a server that is away."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from airflow_provider_jetstream.jetstream.client.connect import connect
from airflow_provider_jetstream.jetstream.client.settings import connection_settings
from airflow_provider_jetstream.jetstream.dead_letters.selection import Selection
from airflow_provider_jetstream.jetstream.errors import DeadLetterGoneError, UnreachableError
from airflow_provider_jetstream.plugins.monitor.configuration import MonitorSettings
from airflow_provider_jetstream.plugins.monitor.service import MonitorService
from testbed.dead_letters import make_terminated_letters
from testbed.nats_server import NatsServer
from testbed.ports import LOOPBACK
from testbed.queues import eventually, make_queue, publish_jobs, pull_jobs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from airflow_provider_jetstream.jetstream.dead_letters.group import GroupField
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

CONNECTION = "nats_lookout"
MANY = 10_000
GROUPED: tuple[GroupField, ...] = ("reason", "error_class", "fingerprint")


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with NatsServer() as running:
        yield running


@pytest.fixture
async def lookout(server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MonitorService]:
    connection = {"conn_type": "nats", "host": LOOPBACK, "port": server.port, "extra": {"timeout": 5}}
    monkeypatch.setenv(f"AIRFLOW_CONN_{CONNECTION.upper()}", json.dumps(connection))
    found = MonitorService(MonitorSettings((CONNECTION,), 0.5, "all", 1_000, "jetstream_redrive"))
    yield found
    found.stop()


async def filled(server: NatsServer, name: str, count: int) -> WorkQueue:
    """Make a queue with so many dead letters."""
    async with connect(connection_settings({"servers": (server.url,), "timeout": 30})) as connection:
        queue = await make_queue(connection, name, consumer={"ack_wait": "30s"})
        for _ in range(0, count, 1_000):
            await make_terminated_letters(connection, queue, map(str, range(min(count, 1_000))))
        return queue


async def snapshot(lookout: MonitorService) -> dict[str, Any]:
    """Give the state of the one connection."""
    (state,) = json.loads(await lookout.snapshot(None))["connections"]
    return dict(state)


async def groups(lookout: MonitorService, queue: str, selection: Selection | None = None) -> dict[str, Any]:
    """Wait for the groups of a scan that ended."""

    async def ready() -> dict[str, Any] | None:
        try:
            found = json.loads(await lookout.groups(CONNECTION, queue, selection or Selection(), GROUPED))
        except UnreachableError:
            return None
        return found if found["scan"]["state"] == "ready" else None

    return dict(await eventually(ready, 300))


async def in_messages(server: NatsServer, seconds: float) -> int:
    """Count what the server is asked meanwhile."""
    before = server.monitor("varz")["in_msgs"]
    await asyncio.sleep(seconds)
    return int(server.monitor("varz")["in_msgs"] - before)


async def test_twenty_viewers_cost_the_server_no_more_than_one(
    server: NatsServer, lookout: MonitorService, name: str
) -> None:
    await filled(server, name, 20)
    await groups(lookout, name)

    async def view() -> None:
        while True:
            await snapshot(lookout)
            await lookout.queue(CONNECTION, name)
            await lookout.groups(CONNECTION, name, Selection(), GROUPED)
            await asyncio.sleep(0.1)

    asked = {}
    for viewers in (1, 20):
        tasks = [asyncio.create_task(view()) for _ in range(viewers)]
        await asyncio.sleep(1)
        asked[viewers] = await in_messages(server, 4)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    # Eight looks of two requests fit into four seconds; a look more may fall into the time, and a ping.
    assert min(asked.values()) > 0, asked
    assert max(asked.values()) <= 9 * 2 + 4, asked
    assert server.monitor("connz")["num_connections"] == 1


async def test_ten_thousand_letters_are_paged_without_holding_the_loop_up(
    server: NatsServer, lookout: MonitorService, name: str
) -> None:
    await filled(server, name, MANY)
    process = psutil.Process()
    before = process.memory_info().rss
    here, everywhere = time.thread_time(), time.process_time()
    found = await groups(lookout, name)
    # What serves pages is left alone: the scan works in another thread.
    assert time.thread_time() - here < 0.3 * (time.process_time() - everywhere)
    assert (found["total"], found["groups"][0]["count"], found["groups_left_out"]) == (MANY, MANY, 0)
    # Some thirty bytes a letter, and as many for each entry of the dead letter queue.
    assert process.memory_info().rss - before < 60 * 2**20
    after: int | None = 0
    seen: list[int] = []
    while after is not None and len(seen) < 2_000:
        page = json.loads(await lookout.letters(CONNECTION, name, Selection(), after, 200, hidden=False))
        seen += [letter["sequence"] for letter in page["letters"]]
        after = page["next_after"]
    assert seen == list(range(1, 2_001))
    last = json.loads(await lookout.letters(CONNECTION, name, Selection(), MANY - 3, 200, hidden=False))
    assert (len(last["letters"]), last["next_after"], last["matching"]) == (3, None, MANY)


async def test_a_scan_after_the_first_looks_only_at_what_changed(
    server: NatsServer, lookout: MonitorService, name: str
) -> None:
    queue = await filled(server, name, 1_000)
    assert (await groups(lookout, name))["total"] == 1_000
    async with connect(connection_settings({"servers": (server.url,), "timeout": 5})) as connection:
        await make_terminated_letters(connection, queue, ["another"], reason="another reason")

    async def both() -> list[dict[str, Any]] | None:
        found = await groups(lookout, name)
        return found["groups"] if found["total"] == 1_001 else None

    first, second = await eventually(both, 30)
    assert (first["count"], second["count"]) == (1_000, 1)
    only = Selection.of(second["select"])
    page = json.loads(await lookout.letters(CONNECTION, name, only, 0, 50, hidden=False))
    assert [letter["sequence"] for letter in page["letters"]] == [1_001]


async def test_the_overview_counts_all_queues_without_waiting_for_the_next_look(
    server: NatsServer, lookout: MonitorService, name: str
) -> None:
    for number in range(5):
        await filled(server, f"{name}-{number}", number + 1)
    rarely = MonitorService(MonitorSettings((CONNECTION,), 600.0, "all", 1_000, "jetstream_redrive"))

    async def counted() -> list[int] | None:
        letters = [queue["letters"] for queue in (await snapshot(rarely))["queues"]]
        return [each["certain"] for each in letters] if all(letters) else None

    try:
        assert await eventually(counted, 30) == [1, 2, 3, 4, 5]
    finally:
        rarely.stop()


async def test_jobs_that_come_and_go_become_rates_and_a_history(
    server: NatsServer, lookout: MonitorService, name: str
) -> None:
    settings = connection_settings({"servers": (server.url,), "timeout": 5})
    async with connect(settings) as connection:
        queue = await make_queue(connection, name)
        await snapshot(lookout)
        await publish_jobs(connection, queue, map(str, range(20)))

        async def numbers() -> dict[str, Any]:
            return next(each for each in (await snapshot(lookout))["queues"] if each["queue"] == name)

        async def stuck() -> bool:
            found = await numbers()
            return found["pending"] == 20 and found["state"] == "stuck"

        await eventually(stuck)
        for message in await pull_jobs(connection, queue, 20):
            await message.ack_sync()

        async def working() -> bool:
            found = await numbers()
            return found["state"] == "working" and found["out_per_second"] > 0

        await eventually(working)
        detail = json.loads(await lookout.queue(CONNECTION, name))
    assert max(point["pending"] for point in detail["history"]) <= 20
    assert detail["numbers"]["pending_history"]
    assert detail["events"] == f"{name}-events"


async def test_a_server_that_was_away_is_seen_again_by_itself(
    server: NatsServer, lookout: MonitorService, name: str
) -> None:
    await filled(server, name, 5)
    assert (await groups(lookout, name))["total"] == 5
    server.kill()

    async def away() -> dict[str, Any] | None:
        found = await snapshot(lookout)
        return found if found["state"] == "away" else None

    found = await eventually(away)
    assert found["problem"]["message"]
    assert name in {queue["queue"] for queue in found["queues"]}
    # What was found is shown on, with its age.
    assert json.loads(await lookout.groups(CONNECTION, name, Selection(), GROUPED))["total"] == 5
    server.restart()

    async def up() -> bool:
        return bool((await snapshot(lookout))["state"] == "up")

    await eventually(up)

    async def shown() -> bool:
        try:
            page = json.loads(await lookout.letters(CONNECTION, name, Selection(), 0, 50, hidden=False))
        except UnreachableError:
            return False
        return len(page["letters"]) == 5

    await eventually(shown)


async def test_what_is_no_letter_is_said_to_be_none(server: NatsServer, lookout: MonitorService, name: str) -> None:
    await filled(server, name, 1)
    await groups(lookout, name)
    with pytest.raises(DeadLetterGoneError, match="expected job 7"):
        await lookout.letter(CONNECTION, name, 7, hidden=False)
