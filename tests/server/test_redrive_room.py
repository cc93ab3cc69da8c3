"""A redrive never drops live jobs, or other letters, for what it stores: it stores as many letters as have room."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    Protocol,
    RedriveRequest,
    Selection,
    find_dead_letters,
    preview,
    redrive_dead_letters,
)
from testbed.dead_letters import change_stream, make_terminated_letters, stream_messages
from testbed.face import summarise_dead_letters
from testbed.queues import (
    eventually,
    make_dead_letters,
    make_queue,
    process_all,
    publish_jobs,
    pull_jobs,
    stored_count,
)

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection

LETTERS, LIVE = 15, 18
DEAD = [f"dead-{number:02}" for number in range(LETTERS)]
JOBS = [f"live-{number:02}" for number in range(LIVE)]


async def make_terminated(connection: NatsPyConnection, name: str, **fields: Any) -> WorkQueue:
    """Make a queue of terminated letters, whose bodies are in the archive, beside live jobs."""
    queue = await make_queue(connection, name, consumer={"filter_subject": f"{name}.jobs.>"}, **fields)
    await publish_jobs(connection, queue, DEAD)
    for message in await pull_jobs(connection, queue, LETTERS):
        await message.term()

    async def are_known() -> bool:
        return (await summarise_dead_letters(connection, queue)).dead == LETTERS

    await eventually(are_known)
    await publish_jobs(connection, queue, JOBS)
    return queue


@pytest.mark.slow
@pytest.mark.parametrize(("fields", "stored"), [({}, 2), ({"atomic_redrive": True}, 1)])
async def test_only_as_many_terminated_letters_come_back_as_max_msgs_allows(
    connection: NatsPyConnection, name: str, fields: dict[str, Any], stored: int
) -> None:
    queue = await make_terminated(connection, name, discard="old", max_msgs=20, **fields)
    shown = await preview(connection, queue, RedriveRequest())
    assert (shown.redriven, shown.failures) == (stored, LETTERS - stored)
    report = await redrive_dead_letters(connection, queue)
    assert (len(report.redriven), report.failures) == (stored, LETTERS - stored)
    assert report.failed[LETTERS].startswith(f"{name} has no room for the copy of {LETTERS} (max_msgs 20, 20 used, ")
    assert await process_all(connection, queue) == dict.fromkeys([*JOBS, *DEAD[:stored]], 1)
    # The markers of an atomic redrive stay for a day, and take room.
    for _ in range(LETTERS):
        report = await redrive_dead_letters(connection, queue)
        done = await process_all(connection, queue)
        assert done.total() == len(report.redriven)
        if not report.redriven:
            break
        stored += len(report.redriven)
    assert stored == LETTERS


@pytest.mark.slow
async def test_only_as_many_terminated_letters_come_back_as_max_bytes_allows(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_terminated(connection, name, discard="old")
    used = (await connection.api(f"STREAM.INFO.{name}"))["state"]["bytes"]
    await change_stream(connection, name, max_bytes=used + 1_000)
    report = await redrive_dead_letters(connection, queue)
    assert 0 < len(report.redriven) < LETTERS
    assert f"{name} has no room for the copy of {LETTERS} (max_bytes {used + 1_000}, " in report.failed[LETTERS]
    assert await process_all(connection, queue) == dict.fromkeys([*JOBS, *DEAD[: len(report.redriven)]], 1)


@pytest.mark.slow
async def test_stored_letters_come_back_one_after_the_other_where_there_is_room_for_one(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, discard="old", max_msgs=9)
    await make_dead_letters(connection, queue, "abcde")
    await publish_jobs(connection, queue, "xyz")
    report = await redrive_dead_letters(connection, queue, RedriveRequest(protocol=Protocol.COPY))
    assert report.redriven == {1: 9, 2: 10, 3: 11, 4: 12, 5: 13}
    assert await process_all(connection, queue) == dict.fromkeys("abcdexyz", 1)


@pytest.mark.slow
async def test_a_copy_drops_only_its_own_original_of_its_subject(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, discard="old")
    await make_dead_letters(connection, queue, "ab", kind="one")
    await make_dead_letters(connection, queue, "c", kind="two")
    await publish_jobs(connection, queue, ["live"], kind="two")
    await change_stream(connection, name, max_msgs_per_subject=2)
    report = await redrive_dead_letters(connection, queue, RedriveRequest(protocol=Protocol.COPY))
    assert (len(report.redriven), report.failures) == (3, 0)
    assert await process_all(connection, queue) == dict.fromkeys(["a", "b", "c", "live"], 1)


@pytest.mark.slow
@pytest.mark.parametrize("discard", ["old", "new"])
async def test_a_copy_that_would_drop_a_live_job_of_its_subject_is_refused(
    connection: NatsPyConnection, name: str, discard: str
) -> None:
    queue = await make_queue(connection, name, discard=discard, max_msgs=100)
    await make_terminated_letters(connection, queue, "ab")
    await publish_jobs(connection, queue, ["live"])
    await change_stream(connection, name, max_msgs_per_subject=1)
    report = await redrive_dead_letters(connection, queue)
    assert (len(report.redriven), report.failures) == (0, 2)
    assert f"(max_msgs_per_subject 1, 1 on {name}.jobs.plain, 1 needed)" in report.failed[1]
    assert await process_all(connection, queue) == {"live": 1}


async def test_parking_drops_no_other_letter(connection: NatsPyConnection, name: str) -> None:
    queue = await make_terminated(connection, name)
    entries = await stream_messages(connection, f"{name}-dead")
    # As many entries as there are, and one more.
    await change_stream(connection, f"{name}-dead", discard="old", max_msgs=len(entries) + 1)
    report = await redrive_dead_letters(connection, queue, RedriveRequest(max_redrives=0))
    assert len(report.parked) + report.failures == LETTERS
    assert (
        f"{name}-dead has no room for the parked letter {LETTERS} (max_msgs {len(entries) + 1}, "
        in report.failed[LETTERS]
    )
    found = await find_dead_letters(connection, queue)
    assert len(found.letters) == report.failures
    for _ in range(LETTERS):
        report = await redrive_dead_letters(connection, queue, RedriveRequest(max_redrives=0))
        if not report.failures:
            break
    assert await stored_count(connection, name) == LIVE
    parked = [
        message.data.decode() for message in await stream_messages(connection, f"{name}-dead", f"parked.{name}.>")
    ]
    assert sorted(parked) == DEAD


async def test_preserving_bodies_drops_no_other_letter(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, "ab")
    await redrive_dead_letters(connection, queue, RedriveRequest(max_redrives=0))
    await make_dead_letters(connection, queue, "cdef")
    entries = await stored_count(connection, f"{name}-dead")
    await change_stream(connection, f"{name}-dead", discard="old", max_msgs=entries + 1)
    summary = await summarise_dead_letters(connection, queue)
    assert (summary.dead, summary.preserved) == (4, 1)
    parked = await find_dead_letters(connection, queue, Selection(parked=True))
    assert [letter.body for letter in parked.letters] == [b"a", b"b"]
