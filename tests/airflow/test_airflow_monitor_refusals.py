"""What the page refuses at once, by its cause: edits that no job can have, and queues that there aren't."""

from __future__ import annotations

import asyncio
from hashlib import sha256
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

from airflow_provider_jetstream.jetstream import connect, connection_settings, find_dead_letters
from testbed.dead_letters import make_terminated_letters
from testbed.nats_server import NatsServer
from testbed.page import running_page
from testbed.queues import eventually, make_queue, pull_jobs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    import httpx

    from testbed.face import NatsPyConnection

CONNECTION, QUEUE = "nats_refusals", "refused"
_BODY = "body"


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with NatsServer() as running:
        yield running


@pytest.fixture
async def connection(server: NatsServer) -> AsyncIterator[NatsPyConnection]:
    async with connect(connection_settings({"servers": (server.url,), "timeout": 30})) as opened:
        yield opened


@pytest.fixture
async def user(server: NatsServer) -> AsyncIterator[httpx.AsyncClient]:
    # So long that whoever waits for the next poll is told apart from who doesn't.
    async with running_page([CONNECTION], server, refresh_seconds=300) as client:
        yield client


# What of a letter is changed → what the refusal says.
ODD_EDITS: list[tuple[dict[str, Any], str]] = [
    ({"subject": f"{QUEUE}.jobs.>"}, f"found '{QUEUE}.jobs.>': a job's subject can't have wildcards"),
    ({"subject": f"{QUEUE}.jobs.*"}, "a job's subject can't have wildcards"),
    ({"subject": f"{QUEUE}.jobs.a\r\nPUB x 0"}, "it contains white space or control characters"),
    ({"subject": f"{QUEUE}.jobs.a b"}, "it contains white space or control characters"),
    ({"subject": f"{QUEUE}.jobs..a"}, "it has an empty token"),
    ({"subject": ""}, "it is empty"),
    ({"subject": f"{QUEUE}.jobs." + "a" * 5_000}, "more than 3500"),
    ({"subject": "elsewhere.jobs"}, f"expected a subject of {QUEUE} ({QUEUE}.jobs.>), found elsewhere.jobs"),
    ({"subject": f"$JS.API.STREAM.PURGE.{QUEUE}"}, f"found $JS.API.STREAM.PURGE.{QUEUE}"),
    ({"subject": f"{QUEUE}.jobs.nobody.takes"}, "expected a subject that a consumer of refused takes"),
    ({"headers": [["A", "x\r\nNats-Msg-Id: y"]]}, "expected text without line breaks"),
    ({"headers": [["A: b\r\nX", "x"]]}, "expected a name of letters, digits and dashes"),
]


async def test_an_edit_that_no_job_can_have_is_refused_when_it_is_shown(
    connection: NatsPyConnection, user: httpx.AsyncClient
) -> None:
    queue = await make_queue(connection, QUEUE, consumer={"filter_subject": f"{QUEUE}.jobs.*"})
    await make_terminated_letters(connection, queue, [_BODY])
    path, edit = f"queues/{CONNECTION}/{QUEUE}/letters/1", {"sha256": sha256(_BODY.encode()).hexdigest(), "why": "x"}

    async def is_read() -> bool:
        return (await user.get(path)).status_code == 200

    await eventually(is_read, 60)
    for change, expected in ODD_EDITS:
        for dry_run in (True, False):
            answer = await user.post(f"{path}/edit", json=edit | change | {"dry_run": dry_run})
            assert answer.status_code == 422, (change, answer.text)
            message = answer.json()["detail"]["message"]
            assert message.startswith("the edit can't be sent: ")
            assert expected in message
    assert [letter.sequence for letter in (await find_dead_letters(connection, queue)).letters] == [1]
    answer = await user.post(f"{path}/edit", json=edit | {"subject": f"{QUEUE}.jobs.b", "dry_run": False})
    assert answer.json()["redriven"] == 2
    (job,) = await pull_jobs(connection, queue, 1)
    assert (job.subject, job.data) == (f"{QUEUE}.jobs.b", _BODY.encode())


async def test_an_unknown_queue_is_not_found_without_waiting_for_a_poll(
    connection: NatsPyConnection, user: httpx.AsyncClient
) -> None:
    await make_queue(connection, "known")
    async with asyncio.timeout(60):
        await user.get("snapshot")
        assert (await user.get(f"queues/{CONNECTION}/known")).status_code == 200
        names = ("unknown", "known-dead", "known-events", "a.b", "*", ">", "a b", "a\r\nPUB x 0\r\n", "\0", "ü" * 300)
        for name in names:
            for route in ("", "/letters", "/groups", "/redrives", "/redrives/x", "/jobs", "/letters/1", "/history"):
                answer = await user.get(f"queues/{CONNECTION}/{quote(name, safe='')}{route}")
                assert answer.status_code == 404, (name, route, answer.text)
                assert len(answer.text) < 1_000
            answer = await user.post(f"queues/{CONNECTION}/{quote(name, safe='')}/dry-run", json={"select": {}})
            assert answer.status_code == 404, (name, answer.text)
