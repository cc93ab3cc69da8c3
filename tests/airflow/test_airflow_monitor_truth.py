"""What the monitor's service says of servers, letters and time: the same in every API worker, and nothing untrue."""

from __future__ import annotations

import asyncio
import json
import pkgutil
import threading
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    JsonPatch,
    Selection,
    connect,
    connection_settings,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.errors import TransientError
from testbed import seams
from testbed.dead_letters import make_terminated_letters
from testbed.nats_server import NatsServer
from testbed.page import (
    PLACES,
    EditRequest,
    Hiding,
    LetterQuery,
    LettersUnreadError,
    MonitorService,
    MonitorSettings,
    PauseRequest,
    Sampler,
    ServerPoller,
    SteerRequest,
)
from testbed.ports import LOOPBACK
from testbed.queues import eventually, make_queue, publish_jobs, pull_jobs, wait_for_entries

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from testbed.face import NatsPyConnection

CONNECTION = "nats_truth"
SETTINGS = MonitorSettings((CONNECTION,), 0.5, "all", 10_000, "jetstream_redrive")
EVERY = LetterQuery(Selection())
ROWS = 800
BODY = '{"a":1,"a":2,"f":1.10}'


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with NatsServer(user="airflow", password="right") as running:
        yield running


def set_connection(server: NatsServer, monkeypatch: pytest.MonkeyPatch, password: str) -> None:
    values = {"conn_type": "nats", "host": LOOPBACK, "port": server.port, "login": "airflow", "password": password}
    monkeypatch.setenv(f"AIRFLOW_CONN_{CONNECTION.upper()}", json.dumps(values | {"extra": {"timeout": 30}}))


@pytest.fixture
async def service(server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MonitorService]:
    set_connection(server, monkeypatch, "right")
    running = MonitorService(SETTINGS)
    yield running
    running.stop()


@pytest.fixture
async def connection(server: NatsServer) -> AsyncIterator[NatsPyConnection]:
    values = {"servers": (server.url,), "user": "airflow", "password": "right", "timeout": 30}
    async with connect(connection_settings(values)) as opened:
        yield opened


async def snapshot(service: MonitorService) -> dict[str, Any]:
    (state,) = json.loads(await service.snapshot((CONNECTION,)))["connections"]
    return dict(state)


async def detail(service: MonitorService, queue: str, sequence: int) -> dict[str, Any]:
    """Wait for the details of a letter."""

    async def read() -> dict[str, Any] | None:
        try:
            return dict(json.loads((await service.letters.detail(CONNECTION, queue, sequence, Hiding())).content))
        except TransientError:
            return None

    return dict(await eventually(read, 60))


@pytest.mark.slow
async def test_after_a_time_without_viewers_a_healthy_server_is_up_and_its_letters_are_shown(
    server: NatsServer,
    service: MonitorService,
    connection: NatsPyConnection,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue = await make_queue(connection, name)
    await make_terminated_letters(connection, queue, [BODY])
    await detail(service, name, 1)
    monkeypatch.setattr(seams.SERVER_POLLER_IDLE_SECONDS, 0.2)
    # The scan of another viewer would take too long.
    monkeypatch.setattr(seams.POLLERS_FIRST_SCAN_SECONDS, 0.0)
    await asyncio.sleep(0.5)
    shown = json.loads((await service.letters.detail(CONNECTION, name, 1, Hiding())).content)
    assert shown["payload"]["raw"] == BODY
    # It was away when nobody looked any more.
    server.kill()

    async def is_away() -> bool:
        return bool((await snapshot(service))["state"] == "away")

    await eventually(is_away, 30)
    await asyncio.sleep(0.5)
    server.restart()
    monkeypatch.setattr(seams.SERVER_POLLER_FIRST_POLL_SECONDS, 30.0)
    await asyncio.sleep(0.5)
    state = await snapshot(service)
    assert (state["state"], state["problem"]) == ("up", None)


async def test_two_api_workers_show_the_same_history_with_gaps_and_all_deaths(
    service: MonitorService, connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    other = MonitorService(SETTINGS)
    samplers = [Sampler(ServerPoller(CONNECTION, 0.5), 0.2) for _ in range(2)]
    tasks = [asyncio.create_task(sampler.run()) for sampler in samplers]
    try:
        await publish_jobs(connection, queue, ["a", "b"])

        async def is_sampled() -> bool:
            info = await connection.api("STREAM.INFO.airflow_monitor", {})
            return bool(info["state"]["messages"] >= 5)

        await eventually(is_sampled_or_absent(is_sampled), 30)
        for task in tasks:
            task.cancel()
        for message in await pull_jobs(connection, queue, 2):
            await message.term()
        # Nobody watches, nobody samples.
        await redrive_dead_letters(connection, queue)
        histories = []
        for worker in (service, other):

            async def all_deaths(worker: MonitorService = worker) -> dict[str, Any] | None:
                try:
                    found = json.loads(await worker.history(CONNECTION, name, 1))
                except TransientError:
                    return None
                return found if sum(deaths["count"] for deaths in found["deaths"]) == 2 else None

            histories.append(await eventually(all_deaths, 90))
        first, second = histories
        assert first["points"] == second["points"] != []
        assert (first["stored"], first["sampler"]) == ("stream", second["sampler"])
        assert all(point["pending"] in (0, 2) for point in first["points"])
    finally:
        other.stop()


def is_sampled_or_absent(condition: Any) -> Any:
    async def checked() -> bool:
        try:
            return bool(await condition())
        except Exception:  # noqa: BLE001
            return False

    return checked


async def searched(
    service: MonitorService, name: str, text: str, *, after: int = 0, limit: int = 10
) -> list[dict[str, Any]]:
    """Search a queue's letters, and return the lines of the answer."""
    lines = await service.letters.search(
        CONNECTION, name, EVERY, Hiding(), text, where=PLACES, after=after, limit=limit
    )
    return [json.loads(line) async for line in lines]


async def test_letters_are_found_by_text_and_jobs_can_be_looked_at(
    service: MonitorService, connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "60s"})
    await publish_jobs(connection, queue, ["first", BODY, "third"], headers={"Job-Id": "3f0c-order"})
    for message in await pull_jobs(connection, queue, 3):
        await message.term()
    await wait_for_entries(connection, queue, 3)
    await detail(service, name, 1)

    lines = await searched(service, name, '"a":2')
    assert [line["type"] for line in lines] == ["progress", "found", "end"]
    assert (lines[1]["letter"]["sequence"], lines[1]["where"], lines[-1]["reason"]) == (2, ["body"], "all")
    lines = await searched(service, name, "3F0C", limit=2)
    assert (lines[-1]["reason"], lines[-1]["found"], lines[-1]["next_after"]) == ("limit", 2, 2)
    page = json.loads(await service.letters.page(CONNECTION, name, EVERY, Hiding(), sort="-died_at", limit=1))
    assert ([letter["sequence"] for letter in page["letters"]], page["next_offset"]) == ([3], 1)
    await publish_jobs(connection, queue, ["x", "y"])
    await pull_jobs(connection, queue, 1)
    for state, sequences in (("pending", [5]), ("delivered", [4])):
        jobs = json.loads(await service.job_page(CONNECTION, name, state, None, 0, 10, lambda _: True))  # type: ignore[arg-type]
        assert ([job["sequence"] for job in jobs["jobs"]], jobs["total"]) == (sequences, 1)
    job = json.loads((await service.job(CONNECTION, name, 5, Hiding())).content)
    assert job["payload"]["raw"] == "y"


async def make_rows(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    await make_terminated_letters(connection, queue, [f"row {number}" for number in range(ROWS)])


@pytest.mark.slow
async def test_a_search_waits_for_the_first_scan(
    service: MonitorService, connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other requests don't wait.
    monkeypatch.setattr(seams.POLLERS_FIRST_SCAN_SECONDS, 0.0)
    monkeypatch.setattr(seams.POLLERS_SCAN_SECONDS, 120.0)
    monkeypatch.setattr(seams.LETTER_SEARCH_SECONDS, 120.0)
    await make_rows(connection, name)
    found = await searched(service, name, "row 721")
    assert [line["letter"]["sequence"] for line in found if line["type"] == "found"] == [722]
    assert (found[-1]["reason"], found[-1]["read"]) == ("all", ROWS)


@pytest.fixture
def half_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Hold each scan before its second page of letters, until the event is set."""
    go_on, pages = threading.Event(), pkgutil.resolve_name(seams.SCANNER_PAGES)

    async def held(*arguments: Any) -> AsyncIterator[Any]:
        async for page in pages(*arguments):
            yield page
            await asyncio.to_thread(go_on.wait)

    monkeypatch.setattr(seams.SCANNER_PAGES, held)
    monkeypatch.setattr(seams.SCANNER_PAGE_BYTES, 10_000)
    yield go_on
    go_on.set()


async def test_a_search_during_the_first_scan_says_that_not_all_were_read_and_goes_on_behind_them(
    service: MonitorService,
    connection: NatsPyConnection,
    name: str,
    half_read: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(seams.POLLERS_SCAN_SECONDS, 0.0)
    await make_rows(connection, name)
    sequences: list[int] = []
    ends: list[dict[str, Any]] = []
    while not ends or ends[-1]["reason"] != "all":
        await asyncio.sleep(0.05)
        try:
            lines = await searched(service, name, "row 721", after=ends[-1]["next_after"] if ends else 0)
        except LettersUnreadError:
            continue
        sequences += [line["letter"]["sequence"] for line in lines if line["type"] == "found"]
        ends.append(lines[-1])
        # Where a request got no answer in time, the line says so.
        assert lines[-1]["reason"] in ("time", "all"), lines[-1]
        if lines[-1]["read"]:
            half_read.set()
    assert {end["reason"] for end in ends[:-1]} == {"time"}
    assert next(end["read"] for end in ends if end["read"]) < ROWS
    assert (sequences, sum(end["read"] for end in ends)) == ([722], ROWS)


async def test_a_letter_is_edited_with_a_difference_and_its_person_is_in_the_audit(
    service: MonitorService, connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    await make_terminated_letters(connection, queue, [BODY])
    payload = (await detail(service, name, 1))["payload"]
    request = EditRequest(sha256=payload["sha256"], body='{"a":3}', why="wrong amount")
    shown = json.loads((await service.actions.edit(CONNECTION, name, 1, request, "Ann", Hiding())).content)
    assert shown["diff"].splitlines()[-2:] == [f"-{BODY}", '+{"a":3}']
    assert shown["redriven"] is None
    done = request.model_copy(update={"dry_run": False})
    result = json.loads((await service.actions.edit(CONNECTION, name, 1, done, "Ann", Hiding())).content)
    assert result["redriven"] == 2
    (message,) = await pull_jobs(connection, queue, 1)
    assert message.data == b'{"a":3}'
    audit = (await detail(service, name, 1))["audit"]
    assert [(line["user"], line["why"]) for line in audit] == [("Ann", "wrong amount")]


async def test_a_patch_is_shown_by_samples_and_causes_before_it_runs(
    service: MonitorService, connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    await make_terminated_letters(connection, queue, ['{"f":1.10,"a":1}', '{"b":1}', "text", '{"b":2}'])
    patch = JsonPatch.of('[{"op":"replace","path":"/a","value":2.50}]')
    shown = json.loads(await service.actions.dry_run(CONNECTION, name, Selection(), "redrive", patch))
    assert (shown["redriven"], shown["changed"], shown["failed"]) == (1, 1, 3)
    assert list(shown["causes"].values()) == [2, 1]
    (sample,) = shown["samples"]
    assert sample["sequence"] == 1
    assert sample["difference"].splitlines()[4:] == ['   "f": 1.10,', '-  "a": 1', '+  "a": 2.50', " }"]
    assert shown["conf"]["patch"] == patch.text
    plain = json.loads(await service.actions.dry_run(CONNECTION, name, Selection(), "redrive"))
    assert (plain["redriven"], plain["samples"], "patch" in plain["conf"]) == (4, [], False)


async def test_a_consumer_is_paused_and_resumed(
    service: MonitorService, connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    await publish_jobs(connection, queue, ["a"])
    request = PauseRequest(seconds=3600, why="broken shop")
    paused = json.loads(await service.actions.control_consumer(CONNECTION, name, "worker", request, "Ann"))
    until = datetime.fromisoformat(paused["paused_until"])
    assert timedelta(minutes=59) < until - datetime.now(UTC) <= timedelta(minutes=61)
    assert paused["recorded"]

    async def is_paused() -> bool:
        (queue_numbers,) = (await snapshot(service))["queues"]
        return bool(queue_numbers["state"] == "paused")

    await eventually(is_paused, 30)
    resumed = json.loads(await service.actions.control_consumer(CONNECTION, name, "worker", SteerRequest(), "Ann"))
    assert resumed["paused_until"] is None
