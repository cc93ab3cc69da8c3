"""A watcher of dead letters fires for each letter once, whatever it is recreated for."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import pytest
from airflow.sdk import Asset, AssetWatcher

from airflow_provider_jetstream.jetstream import (
    Protocol,
    RedriveRequest,
    connect,
    connection_settings,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.errors import SelectionError
from airflow_provider_jetstream.triggers.dead_letter import DeadLetterTrigger
from testbed import seams
from testbed.nats_server import NatsServer
from testbed.queues import eventually, make_queue, probe, publish_jobs, pull_jobs

if TYPE_CHECKING:
    from datetime import tzinfo

    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection

# Longer than any test: what ends a wait is an entry, not the time.
_LONG = 3_600.0


@pytest.fixture(autouse=True)
def airflow_connection(nats: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection of the triggers, a short pause after each event, and a process that has reported nothing."""
    monkeypatch.setenv("AIRFLOW_CONN_NATS_ARRIVALS", json.dumps({"conn_type": "nats", "host": nats.url}))
    monkeypatch.setattr(seams.LETTER_ARRIVALS_PAUSE_SECONDS, 0.2)
    monkeypatch.setattr(seams.REPORTED_LETTERS_STORED_AFTER, 0.2)
    monkeypatch.setattr(seams.REPORTED_LETTERS_REPORTED, {})


class AssetStore:
    """The store of one asset, as Airflow gives it to a watcher."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    async def aget(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    async def aset(self, key: str, value: Any) -> None:
        self.values[key] = json.loads(json.dumps(value))


def watcher(queue: WorkQueue, **arguments: Any) -> DeadLetterTrigger:
    """Return a trigger as Airflow makes it of what a DAG file declares."""
    trigger = DeadLetterTrigger(work_queue=queue, nats_conn_id="nats_arrivals", poll_interval=_LONG, **arguments)
    declared = AssetWatcher(name="watcher", trigger=trigger).trigger
    _, kwargs = declared.serialize()
    return DeadLetterTrigger(**json.loads(json.dumps(kwargs)))


class Events:
    """What a watcher fires, as Airflow's triggerer takes it."""

    def __init__(self, trigger: DeadLetterTrigger) -> None:
        self._trigger = trigger
        self._payloads: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def next(self) -> dict[str, Any]:
        async with asyncio.timeout(30):
            return await self._payloads.get()

    async def none_within(self, seconds: float = 0.5) -> bool:
        await asyncio.sleep(seconds)
        return self._payloads.empty() and not self._task.done()

    async def _run(self) -> None:
        async for event in self._trigger.run():
            self._payloads.put_nowait(json.loads(json.dumps(event.payload, allow_nan=False)))


async def die(connection: NatsPyConnection, queue: WorkQueue, *reasons: str) -> None:
    """Let a new job die of each reason; the follower may copy its body at any time."""
    await publish_jobs(connection, queue, ["x" for _ in reasons])
    for reason, job in zip(reasons, await pull_jobs(connection, queue, len(reasons)), strict=True):
        await job.respond(f"+TERM {reason}".encode())


@pytest.mark.slow
async def test_a_watcher_goes_on_and_reports_each_letter_once(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    await die(connection, queue, "gone", "gone")
    async with Events(watcher(queue)) as events:
        event = await events.next()
        assert (event["queue"], event["arrived"], event["dead"], event["sequences"]) == (name, 2, 2, [[1, 2]])
        await die(connection, queue, "gone")
        event = await events.next()
        assert (event["arrived"], event["dead"], event["sequences"]) == (1, 3, [[3, 3]])
        assert await events.none_within()


async def test_a_watcher_that_airflow_recreates_does_not_report_the_same_letters(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    await die(connection, queue, "gone")
    async with Events(watcher(queue)) as events:
        assert (await events.next())["arrived"] == 1
        # What was reported is kept when Airflow asks for the next event.
        assert await events.none_within(0.1)
    async with Events(watcher(queue)) as events:
        await die(connection, queue, "gone")
        assert (await events.next())["sequences"] == [[2, 2]]


async def test_a_new_triggerer_knows_from_the_assets_store_what_was_told(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, store = await make_queue(connection, name), AssetStore()
    await die(connection, queue, "gone")
    trigger = watcher(queue)
    trigger.asset_state_store = store  # type: ignore[assignment]
    async with Events(trigger) as events:
        assert (await events.next())["arrived"] == 1
        # An event that Airflow may not have stored yet would be reported again.
        assert store.values == {}
        await eventually(lambda: store.values)
    monkeypatch.setattr(seams.REPORTED_LETTERS_REPORTED, {})
    trigger = watcher(queue)
    trigger.asset_state_store = store  # type: ignore[assignment]
    async with Events(trigger) as events:
        await die(connection, queue, "gone")
        assert (await events.next())["sequences"] == [[2, 2]]


@pytest.mark.slow
async def test_groups_count_by_themselves(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    async with Events(watcher(queue, group_by=["fingerprint"], min_count=2)) as events:
        await die(connection, queue, "no such customer")
        await die(connection, queue, "card expired", "card expired")
        event = await events.next()
        assert (event["sequences"], event["groups"][0]["arrived"]) == ([[2, 3]], 2)
        # The letter of the small group wasn't reported, and still counts.
        await die(connection, queue, "no such customer")
        assert (await events.next())["sequences"] == [[1, 1], [4, 4]]


async def test_only_a_new_fingerprint_fires(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    options: dict[str, Any] = {"group_by": ["fingerprint"], "only_new_groups": True}
    async with Events(watcher(queue, **options)) as events:
        await die(connection, queue, "no such customer")
        assert (await events.next())["sequences"] == [[1, 1]]
        await die(connection, queue, "no such customer")
        await die(connection, queue, "card expired")
        assert (await events.next())["sequences"] == [[3, 3]]


@pytest.mark.since_server("2.14", "the reset of consumers")
async def test_a_job_that_dies_again_under_its_sequence_is_a_new_letter(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, dead=["a", "b"])
    async with Events(watcher(queue)) as events:
        assert (await events.next())["sequences"] == [[1, 2]]
        await redrive_dead_letters(connection, queue, RedriveRequest(protocol=Protocol.IN_PLACE))
        for message in await pull_jobs(connection, queue, 2):
            await message.nak()
        await probe(connection, queue)
        reported = set[int]()
        while reported != {1, 2}:
            reported |= {number for low, high in (await events.next())["sequences"] for number in range(low, high + 1)}


@pytest.mark.slow
async def test_a_queue_that_is_made_anew_has_other_letters(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    await die(connection, queue, "gone")
    async with Events(watcher(queue)) as events:
        assert (await events.next())["sequences"] == [[1, 1]]
        for stream in (name, f"{name}-events", f"{name}-dead"):
            await connection.client.jetstream().delete_stream(stream)
        queue = await make_queue(connection, name)
        await die(connection, queue, "gone")
        assert (await events.next())["sequences"] == [[1, 1]]


async def test_a_watcher_of_a_queue_that_is_not_there_waits_for_it(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams.DEAD_LETTER_FIRST_PAUSE, 0.2)
    queue = await make_queue(connection, name)
    await connection.client.jetstream().delete_stream(name)
    trigger, warnings = watcher(queue), list[str]()
    log = SimpleNamespace(info=print, warning=lambda text, *values: warnings.append(text % values))
    monkeypatch.setattr(DeadLetterTrigger, "log", log)
    async with Events(trigger) as events:
        await eventually(lambda: len(warnings) >= 2)
        assert all("can't be watched, trying again in" in text for text in warnings)
        assert len(warnings) <= 10
        queue = await make_queue(connection, name)
        await die(connection, queue, "gone")
        assert (await events.next())["sequences"] == [[1, 1]]


@pytest.mark.parametrize(("form", "problem"), [(None, "nats_nowhere"), ({"host": "127.0.0.1", "port": 1}, "no NATS")])
async def test_a_watcher_without_a_server_goes_on(
    connection: NatsPyConnection,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    form: dict[str, Any] | None,
    problem: str,
) -> None:
    monkeypatch.setattr(seams.DEAD_LETTER_FIRST_PAUSE, 0.05)
    if form:
        monkeypatch.setenv("AIRFLOW_CONN_NATS_NOWHERE", json.dumps({"conn_type": "nats", **form}))
    trigger = DeadLetterTrigger(work_queue=await make_queue(connection, name), nats_conn_id="nats_nowhere")
    warnings = list[str]()
    log = SimpleNamespace(info=print, warning=lambda text, *values: warnings.append(text % values))
    monkeypatch.setattr(DeadLetterTrigger, "log", log)
    async with Events(trigger) as events:
        await eventually(lambda: len(warnings) >= 2)
        assert await events.none_within(0)
    assert all(problem in text for text in warnings), warnings


@pytest.mark.slow
async def test_a_watcher_whose_permissions_are_withdrawn_says_so_and_goes_on_when_they_are_back(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams.DEAD_LETTER_FIRST_PAUSE, 0.2)
    warnings = list[str]()
    log = SimpleNamespace(info=print, warning=lambda text, *values: warnings.append(text % values))
    monkeypatch.setattr(DeadLetterTrigger, "log", log)
    users = "authorization {{ users: [{{user: admin, password: p}}, {{user: watcher, password: p, permissions: {}}}] }}"
    with NatsServer(config=users.format("{}")) as server:
        form = {"conn_type": "nats", "host": server.url, "login": "watcher", "password": "p", "extra": {"timeout": 2}}
        monkeypatch.setenv("AIRFLOW_CONN_NATS_ARRIVALS", json.dumps(form))
        admin = connection_settings({"servers": (server.url,), "user": "admin", "password": "p", "timeout": 5})
        async with connect(admin) as connection:
            queue = await make_queue(connection, name)
            async with Events(watcher(queue)) as events:
                await die(connection, queue, "before")
                assert (await events.next())["sequences"] == [[1, 1]]
                server.config = users.format('{publish: {deny: ["$JS.API.>"]}}')
                server.reload()
                await eventually(lambda: any("JS106" in text or "$JS.API" in text for text in warnings))
                await die(connection, queue, "meanwhile")
                seen = len(warnings)
                assert await events.none_within(2.0)
                # Ever more rarely: after 0.2 s, 0.4 s, 0.8 s, …
                assert len(warnings) - seen <= 6, warnings
                server.config = users.format("{}")
                server.reload()
                assert (await events.next())["sequences"] == [[2, 2]]


async def test_a_clock_that_is_behind_the_servers_delays_nothing(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name)
    await die(connection, queue, "gone")

    class Behind(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return cls.fromtimestamp(time.time() - 3_600, tz)

    monkeypatch.setattr(seams.LETTER_ARRIVALS_DATETIME, Behind)
    async with Events(watcher(queue)) as events:
        assert (await events.next())["arrived"] == 1


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"count_under_pause": True}, "use JetStreamDeadLetterSensor for these"),
        ({"select": {"sequences": [1]}}, "use JetStreamDeadLetterSensor for these"),
        ({"select": {"reasons": ["undeliverable"]}}, "use JetStreamDeadLetterSensor for these"),
        ({"only_new_groups": True}, "expected only_new_groups together with group_by"),
        ({"only_new_groups": True, "group_by": ["reason"], "deferred_at": 1.0}, "for the watcher of an asset only"),
    ],
)
async def test_what_no_watcher_can_find_is_refused(
    connection: NatsPyConnection, name: str, arguments: dict[str, Any], problem: str
) -> None:
    queue = await make_queue(connection, name)
    with pytest.raises(SelectionError, match=problem):
        DeadLetterTrigger(work_queue=queue, **arguments)


async def test_the_trigger_is_one_of_a_watcher(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    trigger = DeadLetterTrigger(work_queue=queue)
    asset = Asset(name=name, uri=f"jetstream://nats_default/{name}", watchers=[AssetWatcher("w", trigger)])
    assert trigger.serialize()[1]["deferred_at"] is None
    assert asset.watchers[0].trigger is trigger
