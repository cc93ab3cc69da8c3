"""What the page says of servers, letters and time: the same in every API worker, and nothing untrue."""

from __future__ import annotations

import asyncio
import json
import pkgutil
import threading
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import connect, connection_settings, redrive_dead_letters
from testbed import seams
from testbed.dead_letters import make_terminated_letters
from testbed.nats_server import NatsServer
from testbed.page import running_page
from testbed.queues import eventually, make_queue, publish_jobs, pull_jobs, wait_for_entries

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    import httpx

    from testbed.face import NatsPyConnection

CONNECTION = "nats_truth"
ROWS = 800
BODY = '{"a":1,"a":2,"f":1.10}'


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with NatsServer(user="airflow", password="right") as running:
        yield running


@pytest.fixture
async def page(server: NatsServer) -> AsyncIterator[httpx.AsyncClient]:
    async with running_page([CONNECTION], server) as client:
        yield client


@pytest.fixture
async def connection(server: NatsServer) -> AsyncIterator[NatsPyConnection]:
    values = {"servers": (server.url,), "user": "airflow", "password": "right", "timeout": 30}
    async with connect(connection_settings(values)) as opened:
        yield opened


async def snapshot(page: httpx.AsyncClient) -> dict[str, Any]:
    (state,) = (await page.get("snapshot")).json()["connections"]
    return dict(state)


async def shown(page: httpx.AsyncClient, path: str) -> dict[str, Any]:
    """Wait for an answer about a queue."""

    async def read() -> dict[str, Any] | None:
        answer = await page.get(f"queues/{CONNECTION}/{path}")
        assert answer.status_code in (200, 503), answer.text
        return dict(answer.json()) if answer.status_code == 200 else None

    return await eventually(read, 60)


@pytest.mark.slow
async def test_after_a_time_without_viewers_a_healthy_server_is_up_and_its_letters_are_shown(
    server: NatsServer,
    page: httpx.AsyncClient,
    connection: NatsPyConnection,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue = await make_queue(connection, name)
    await make_terminated_letters(connection, queue, [BODY])
    await shown(page, f"{name}/letters/1")
    monkeypatch.setattr(seams.SERVER_POLLER_IDLE_SECONDS, 0.2)
    # The scan of another viewer would take too long.
    monkeypatch.setattr(seams.POLLERS_FIRST_SCAN_SECONDS, 0.0)
    await asyncio.sleep(0.5)
    letter = (await page.get(f"queues/{CONNECTION}/{name}/letters/1")).json()
    assert letter["payload"]["raw"] == BODY
    # It was away when nobody looked any more.
    server.kill()

    async def is_away() -> bool:
        return bool((await snapshot(page))["state"] == "away")

    await eventually(is_away, 30)
    await asyncio.sleep(0.5)
    server.restart()
    monkeypatch.setattr(seams.SERVER_POLLER_FIRST_POLL_SECONDS, 30.0)
    await asyncio.sleep(0.5)
    state = await snapshot(page)
    assert (state["state"], state["problem"]) == ("up", None)


async def test_two_api_workers_show_the_same_history_with_gaps_and_all_deaths(
    server: NatsServer, connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    workers = [running_page([CONNECTION], server, sample_seconds=0.2) for _ in range(2)]
    async with workers[0], workers[1]:
        await publish_jobs(connection, queue, ["a", "b"])

        async def is_sampled() -> bool:
            streams = (await connection.api("STREAM.NAMES"))["streams"] or ()
            if "airflow_monitor" not in streams:
                return False
            info = await connection.api("STREAM.INFO.airflow_monitor")
            return bool(info["state"]["messages"] >= 5)

        await eventually(is_sampled, 30)
    for message in await pull_jobs(connection, queue, 2):
        await message.term()
    # Nobody watches, nobody samples.
    await redrive_dead_letters(connection, queue)
    histories = []
    for _ in range(2):
        async with running_page([CONNECTION], server) as page:

            async def all_deaths(page: httpx.AsyncClient = page) -> dict[str, Any] | None:
                found = await shown(page, f"{name}/history?hours=1")
                return found if sum(deaths["count"] for deaths in found["deaths"]) == 2 else None

            histories.append(await eventually(all_deaths, 90))
    first, second = histories
    assert first["points"] == second["points"] != []
    assert (first["stored"], first["sampler"]) == ("stream", second["sampler"])
    assert all(point["pending"] in (0, 2) for point in first["points"])


async def searched(
    page: httpx.AsyncClient, name: str, text: str, *, after: int = 0, limit: int = 10
) -> list[dict[str, Any]] | None:
    """Search a queue's letters, and return the lines of the answer; ``None`` where no letter is read yet."""
    query: dict[str, str | int] = {"text": text, "after": after, "limit": limit}
    answer = await page.get(f"queues/{CONNECTION}/{name}/search", params=query)
    if answer.status_code == 503:
        assert answer.json()["detail"]["code"] == "scanning"
        return None
    return [json.loads(line) for line in answer.text.splitlines()]


async def test_letters_are_found_by_text_and_jobs_can_be_looked_at(
    page: httpx.AsyncClient, connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "60s"})
    await publish_jobs(connection, queue, ["first", BODY, "third"], headers={"Job-Id": "3f0c-order"})
    for message in await pull_jobs(connection, queue, 3):
        await message.term()
    await wait_for_entries(connection, queue, 3)
    await shown(page, f"{name}/letters/1")

    lines = await searched(page, name, '"a":2') or []
    assert [line["type"] for line in lines] == ["progress", "found", "end"]
    assert (lines[1]["letter"]["sequence"], lines[1]["where"], lines[-1]["reason"]) == (2, ["body"], "all")
    lines = await searched(page, name, "3F0C", limit=2) or []
    assert (lines[-1]["reason"], lines[-1]["found"], lines[-1]["next_after"]) == ("limit", 2, 2)
    letters = await shown(page, f"{name}/letters?sort=-died_at&limit=1")
    assert ([letter["sequence"] for letter in letters["letters"]], letters["next_offset"]) == ([3], 1)
    await publish_jobs(connection, queue, ["x", "y"])
    await pull_jobs(connection, queue, 1)
    for state, sequences in (("pending", [5]), ("delivered", [4])):
        jobs = await shown(page, f"{name}/jobs?state={state}&limit=10")
        assert ([job["sequence"] for job in jobs["jobs"]], jobs["total"]) == (sequences, 1)
    assert (await shown(page, f"{name}/jobs/5"))["payload"]["raw"] == "y"


async def make_rows(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    await make_terminated_letters(connection, queue, [f"row {number}" for number in range(ROWS)])


@pytest.mark.slow
async def test_a_search_waits_for_the_first_scan(
    page: httpx.AsyncClient, connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other requests don't wait.
    monkeypatch.setattr(seams.POLLERS_FIRST_SCAN_SECONDS, 0.0)
    monkeypatch.setattr(seams.POLLERS_SCAN_SECONDS, 120.0)
    monkeypatch.setattr(seams.LETTER_SEARCH_SECONDS, 120.0)
    await make_rows(connection, name)
    found = await searched(page, name, "row 721") or []
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
    monkeypatch.setattr(seams.SCAN_PAGE, 8)
    yield go_on
    go_on.set()


async def test_a_search_during_the_first_scan_says_that_not_all_were_read_and_goes_on_behind_them(
    page: httpx.AsyncClient,
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
        lines = await searched(page, name, "row 721", after=ends[-1]["next_after"] if ends else 0)
        if lines is None:
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
    page: httpx.AsyncClient, connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    await make_terminated_letters(connection, queue, [BODY])
    payload = (await shown(page, f"{name}/letters/1"))["payload"]
    edit, path = {"sha256": payload["sha256"], "body": '{"a":3}', "why": "wrong amount"}, f"{name}/letters/1/edit"
    difference = (await page.post(f"queues/{CONNECTION}/{path}", json=edit)).json()
    assert difference["diff"].splitlines()[-2:] == [f"-{BODY}", '+{"a":3}']
    assert difference["redriven"] is None
    done = (await page.post(f"queues/{CONNECTION}/{path}", json=edit | {"dry_run": False})).json()
    assert done["redriven"] == 2
    (message,) = await pull_jobs(connection, queue, 1)
    assert message.data == b'{"a":3}'
    audit = (await shown(page, f"{name}/letters/1"))["audit"]
    assert [(line["user"], line["why"]) for line in audit] == [("Ann", "wrong amount")]


async def test_a_patch_is_shown_by_samples_and_causes_before_it_runs(
    page: httpx.AsyncClient, connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    await make_terminated_letters(connection, queue, ['{"f":1.10,"a":1}', '{"b":1}', "text", '{"b":2}'])
    await shown(page, f"{name}/letters/1")
    patch, path = '[{"op":"replace","path":"/a","value":2.50}]', f"queues/{CONNECTION}/{name}/dry-run"
    patched = (await page.post(path, json={"patch": patch})).json()
    assert (patched["redriven"], patched["changed"], patched["failed"]) == (1, 1, 3)
    assert list(patched["causes"].values()) == [2, 1]
    (sample,) = patched["samples"]
    assert sample["sequence"] == 1
    assert sample["difference"].splitlines()[4:] == ['   "f": 1.10,', '-  "a": 1', '+  "a": 2.50', " }"]
    assert patched["conf"]["patch"] == patch
    plain = (await page.post(path, json={})).json()
    assert (plain["redriven"], "patch" in plain["conf"]) == (4, False)
    assert [(sample["sequence"], sample["reason"], sample["difference"]) for sample in plain["samples"]] == [
        (sequence, "terminated", "") for sequence in range(1, 5)
    ]


async def test_a_consumer_is_paused_and_resumed(
    page: httpx.AsyncClient, connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    await publish_jobs(connection, queue, ["a"])
    path = f"queues/{CONNECTION}/{name}/consumers/worker"
    paused = (await page.post(f"{path}/pause", json={"seconds": 3600, "why": "broken shop"})).json()
    until = datetime.fromisoformat(paused["paused_until"])
    assert timedelta(minutes=59) < until - datetime.now(UTC) <= timedelta(minutes=61)
    assert paused["recorded"]

    async def is_paused() -> bool:
        (queue_numbers,) = (await snapshot(page))["queues"]
        return bool(queue_numbers["state"] == "paused")

    await eventually(is_paused, 30)
    assert (await page.post(f"{path}/resume", json={})).json()["paused_until"] is None
