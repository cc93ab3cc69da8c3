"""What the page says to whoever opens it after hours: nothing old is shown as a fact, and what nobody saw is known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import connect, connection_settings
from testbed import seams
from testbed.dead_letters import make_terminated_letters, sampled_dead
from testbed.nats_server import NatsServer
from testbed.page import running_page
from testbed.queues import eventually, make_queue, publish_jobs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    import httpx

    from testbed.face import NatsPyConnection

CONNECTION = "nats_ages"
HOUR = 3600.0


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with NatsServer() as running:
        yield running


@pytest.fixture
async def connection(server: NatsServer) -> AsyncIterator[NatsPyConnection]:
    async with connect(connection_settings({"servers": (server.url,), "timeout": 30})) as opened:
        yield opened


async def numbers(page: httpx.AsyncClient) -> dict[str, Any]:
    (state,) = (await page.get("snapshot")).json()["connections"]
    return dict(state["queues"][0]) if state["queues"] else {}


async def dead(page: httpx.AsyncClient, count: int) -> dict[str, Any]:
    """Wait for a number of dead letters that is of now."""

    async def read() -> dict[str, Any] | None:
        found = (await numbers(page)).get("dead")
        return found if found and found["value"] == count and found["certainty"] == "exact" else None

    return await eventually(read, 60)


async def test_the_first_view_after_hours_names_the_age_of_what_is_old(
    server: NatsServer, connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name)
    async with running_page([CONNECTION], server) as page:
        await make_terminated_letters(connection, queue, ["a", "b"])
        assert (await dead(page, 2))["age"] < HOUR
        groups = (await page.get(f"queues/{CONNECTION}/{name}/groups")).json()
        (group,) = groups["groups"]
        for total in (groups["total"], group["count"]):
            assert (total["value"], total["certainty"]) == (2, "exact")
        assert sum((await numbers(page))["deaths_of_hour"]) == 2
        # Nobody looks for half an hour, in which another job dies.
        await make_terminated_letters(connection, queue, ["c"])
        monkeypatch.setattr(seams.CLOCK_MOVED, HOUR / 2)
        first = await numbers(page)
        if first["dead"]["value"] == 2:
            assert first["dead"]["certainty"] == "old"
            assert first["dead"]["age"] >= HOUR / 2
            # How many died in the last half hour isn't known.
            assert first["deaths_of_hour"] == []
        assert first["pending"]["certainty"] == "exact"
        assert first["pending"]["age"] < HOUR / 2
        assert (await dead(page, 3))["age"] < HOUR / 2


async def test_what_changed_since_is_old_in_the_groups_and_letters_too(
    server: NatsServer, connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name)
    async with running_page([CONNECTION], server) as page:
        await make_terminated_letters(connection, queue, ["a"])
        await dead(page, 1)
        path = f"queues/{CONNECTION}/{name}"
        await page.get(f"{path}/groups")
        monkeypatch.setattr(seams.CLOCK_MOVED, 3 * HOUR)
        await make_terminated_letters(connection, queue, ["b"])
        # Whatever comes first, the count of three hours ago is never one of now.
        for _ in range(3):
            groups = (await page.get(f"{path}/groups")).json()
            letters = (await page.get(f"{path}/letters")).json()
            for found in (groups["total"], groups["groups"][0]["count"], letters["matching"]):
                assert found["value"] == 2 or (found["certainty"], found["age"] >= 3 * HOUR) == ("old", True), found
        await dead(page, 2)


async def test_a_rate_that_nobody_measured_is_unknown(
    server: NatsServer, connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    await publish_jobs(connection, queue, ["a"])
    async with running_page([CONNECTION], server, refresh_seconds=30) as page:
        first = await numbers(page)
    assert first["pending"]["value"] == 1
    unknown = {"value": None, "age": None, "certainty": "unknown"}
    assert (first["out_per_second"], first["in_per_second"]) == (unknown, unknown)


async def test_the_numbers_of_a_server_that_is_away_are_old(
    server: NatsServer, connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name)
    await publish_jobs(connection, queue, ["a"])
    async with running_page([CONNECTION], server) as page:
        await make_terminated_letters(connection, queue, ["b"])
        await dead(page, 1)
        server.kill()
        monkeypatch.setattr(seams.CLOCK_MOVED, HOUR)

        async def are_old() -> bool:
            found = await numbers(page)
            return {found[name]["certainty"] for name in ("pending", "dead", "stored", "open_pulls")} == {"old"}

        await eventually(are_old, 30)
        assert (await numbers(page))["pending"]["age"] >= HOUR
        server.restart()


async def test_letters_that_die_while_nobody_looks_are_in_the_samples(
    server: NatsServer, connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    async with running_page([CONNECTION], server, sample_seconds=0.2) as page:
        # Nobody looks from here on.
        for count, body in enumerate("abc", 1):
            await make_terminated_letters(connection, queue, [body])

            async def is_sampled(count: int = count) -> bool:
                return await sampled_dead(connection, name) == count

            await eventually(is_sampled, 30)
        # The first view has the numbers that were read before it, as of then.
        first = await numbers(page)
        assert (first["dead"]["value"], first["dead"]["certainty"]) == (3, "exact")
        assert first["out_per_second"]["certainty"] == "exact"

        async def charted() -> bool:
            detail = (await page.get(f"queues/{CONNECTION}/{name}")).json()
            return {1, 2, 3} <= {point["dead"] for point in detail["history"]}

        await eventually(charted, 30)
