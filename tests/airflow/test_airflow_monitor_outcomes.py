"""What became of redriven letters: read when somebody looks, from what is stored, and no false fact of what isn't."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    Protocol,
    RedriveRequest,
    connect,
    connection_settings,
    redrive_dead_letters,
)
from testbed.dead_letters import make_terminated_letters
from testbed.nats_server import NatsServer
from testbed.page import running_page
from testbed.queues import eventually, make_queue, pull_jobs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    import httpx

    from testbed.face import NatsPyConnection

CONNECTION = "nats_outcomes"


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with NatsServer() as running:
        yield running


@pytest.fixture
async def page(server: NatsServer) -> AsyncIterator[httpx.AsyncClient]:
    async with running_page([CONNECTION], server) as client:
        yield client


@pytest.fixture
async def connection(server: NatsServer) -> AsyncIterator[NatsPyConnection]:
    async with connect(connection_settings({"servers": (server.url,), "timeout": 30})) as opened:
        yield opened


async def shown(page: httpx.AsyncClient, path: str) -> dict[str, Any]:
    async def read() -> dict[str, Any] | None:
        answer = await page.get(f"queues/{CONNECTION}/{path}")
        assert answer.status_code in (200, 503), answer.text
        return dict(answer.json()) if answer.status_code == 200 else None

    return await eventually(read, 60)


async def outcomes(page: httpx.AsyncClient, name: str) -> dict[str, int]:
    (redrive,) = (await shown(page, f"{name}/redrives"))["redrives"]
    single = await shown(page, f"{name}/redrives/{redrive['id']}")
    assert single["redriven"] == redrive["redriven"]
    return dict(single["outcomes"])


@pytest.mark.parametrize("sampled", [True, False])
async def test_the_outcomes_of_a_redrive_that_nobody_awaited_are_read(
    page: httpx.AsyncClient, connection: NatsPyConnection, name: str, *, sampled: bool
) -> None:
    consumer = {"ack_wait": "60s", **({"sample_freq": "100%"} if sampled else {})}
    queue = await make_queue(connection, name, consumer=consumer)
    await make_terminated_letters(connection, queue, list("abcd"))
    await redrive_dead_letters(connection, queue)
    assert await outcomes(page, name) == {"completed": 0, "died_again": 0, "still_running": 4, "unknown": 0}
    first, second, third = await pull_jobs(connection, queue, 3)
    await first.ack_sync()
    await second.ack_sync()
    await third.respond(b"+TERM no such account")
    # A worker that reports nothing leaves no evidence where the server samples no acknowledgements.
    ended = {"completed": 2, "unknown": 0} if sampled else {"completed": 0, "unknown": 2}

    async def all_known() -> bool:
        return await outcomes(page, name) == {**ended, "died_again": 1, "still_running": 1}

    await eventually(all_known, 60)

    async def listed() -> bool:
        (redrive,) = (await shown(page, f"{name}/redrives"))["redrives"]
        return redrive["outcomes"]["died_again"] == 1 and ("unknown" in redrive["summary"]) is not sampled

    await eventually(listed, 60)


async def test_a_letter_that_was_redriven_keeps_its_body_and_headers_and_tells_its_end(
    page: httpx.AsyncClient, connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "60s", "sample_freq": "100%"})
    (sequence,) = await make_terminated_letters(connection, queue, ['{"a":1}'], reason="no such account")
    await redrive_dead_letters(connection, queue, RedriveRequest(why="mended"))
    letter = await shown(page, f"{name}/letters/{sequence}")
    assert letter["letter"]["error_message"] == "no such account"
    assert (letter["state"], letter["next"], letter["source"]) == ("redriven", sequence + 1, "archive")
    assert letter["payload"]["raw"] == '{"a":1}'
    assert (letter["letter"]["origin"], letter["letter"]["origin_known"]) == (None, True)
    assert letter["now"] == f"job {sequence + 1} is pending or in flight"
    assert [attempt["what"] for attempt in letter["attempts"]] == ["stored", "death", "redriven"]
    (job,) = await pull_jobs(connection, queue, 1)
    await job.ack_sync()

    async def completed() -> bool:
        now = (await shown(page, f"{name}/letters/{sequence}"))["now"]
        return bool(re.fullmatch(rf"job {sequence + 1} completed 20\S+Z, \d+\.\d s after the redrive", now))

    await eventually(completed, 60)


async def test_what_is_stored_nowhere_is_said_to_be_unknown(
    page: httpx.AsyncClient, connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, archive=None, dead=["x"])
    sequence = 1
    await redrive_dead_letters(connection, queue)
    (job,) = await pull_jobs(connection, queue, 1)
    await job.ack_sync()

    async def gone() -> dict[str, Any] | None:
        letter = await shown(page, f"{name}/letters/{sequence}")
        return letter if "isn't stored any more" in (letter["now"] or "") else None

    letter = await eventually(gone, 60)
    assert (letter["source"], letter["payload"], letter["letter"]["origin_known"]) == (None, None, False)
    assert "earlier stream" not in str(letter)


async def test_the_outcomes_of_letters_that_were_requeued_in_place_are_read(
    page: httpx.AsyncClient, connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"sample_freq": "100%"}, dead=["a", "b"])
    await redrive_dead_letters(connection, queue, RedriveRequest(protocol=Protocol.IN_PLACE))
    assert (await outcomes(page, name))["still_running"] == 2
    (job,) = await pull_jobs(connection, queue, 1)
    await job.ack_sync()

    async def one_completed() -> bool:
        found = await outcomes(page, name)
        return (found["completed"], found["still_running"]) == (1, 1)

    await eventually(one_completed, 60)
