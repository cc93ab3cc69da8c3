"""Whoever has used the message id of a letter's new job delays no redrive, and is taken for no new job."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    Protocol,
    RedriveRequest,
    Repair,
    find_dead_letters,
    redrive_dead_letters,
)
from testbed import seams
from testbed.dead_letters import acknowledge_jobs, request_for, stream_messages
from testbed.face import redrive_message_id
from testbed.queues import make_dead_letters, make_queue, publish_jobs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection

_COPY = RedriveRequest(protocol=Protocol.COPY)
_REQUESTS = {
    "copy": _COPY,
    "atomic": RedriveRequest(protocol=Protocol.ATOMIC),
    "auto": RedriveRequest(),
}
# By what differs from the new job: kind of subject, body, and headers besides those that name the letter.
_FOREIGN: dict[str, tuple[str, bytes, dict[str, str]]] = {
    "the body": ("plain", b"forged", {}),
    "the subject": ("other", b"true", {}),
    "a header more": ("plain", b"true", {"Job-Expires": "2020-01-01T00:00:00Z"}),
    "a header's value": ("plain", b"true", {"Kind": "two"}),
    "a task": ("plain", b"true", {"Kind": "one", "Airflow-Task": "0" * 22}),
    "an empty body": ("plain", b"", {"Kind": "one"}),
}
_QUICK = {"ack_wait": "200ms", "max_deliver": 1}


class _Killed(BaseException):
    """Stands for the end of the process."""


@contextmanager
def _killed(monkeypatch: pytest.MonkeyPatch, *, after: bool, at_call: int = 1) -> Iterator[None]:
    """End a redrive just after it has stored new jobs for the given time, or in place of that."""
    store, calls = seams.current(seams.STEPS_STORE_JOBS), [0]

    async def store_and_end(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] < at_call:
            return await store(*args)
        if after:
            await store(*args)
        raise _Killed

    with monkeypatch.context() as patch:
        patch.setattr(seams.STEPS_STORE_JOBS, store_and_end)
        with pytest.raises(_Killed):
            yield


async def _with_letter(connection: NatsPyConnection, name: str, **fields: Any) -> WorkQueue:
    batches = {"atomic_redrive": True} if connection.server_version >= (2, 12, 1) else {}
    queue = await make_queue(connection, name, consumer=_QUICK, **batches | {"archive": True} | fields)
    await make_dead_letters(connection, queue, ["true"], headers={"Kind": "one"})
    return queue


async def _take_id(connection: NatsPyConnection, queue: WorkQueue, what: str) -> int:
    """Publish as any publisher can: with the id of the letter's new job, and what names the letter."""
    (letter,) = (await find_dead_letters(connection, queue)).letters
    kind, body, headers = _FOREIGN[what]
    named = {
        "Nats-Msg-Id": redrive_message_id(queue.name, letter.sequence, letter.time, 1),
        "Redrive-Count": "1",
        "Redrive-Stream": queue.name,
        "Redrive-Sequence": str(letter.sequence),
        "Redrive-Consumer": "worker",
    }
    jetstream = connection.client.jetstream()
    return (await jetstream.publish(f"{queue.name}.jobs.{kind}", body, headers=named | headers)).seq


async def _copies(connection: NatsPyConnection, queue: WorkQueue, foreign: int) -> list[tuple[bytes, str | None]]:
    """Return the stored jobs besides the foreign one: body and a header."""
    jobs = await stream_messages(connection, queue.name, f"{queue.name}.jobs.>")
    return [(job.data, job.header("Kind")) for job in jobs if job.sequence != foreign]


@pytest.mark.slow
@pytest.mark.parametrize("what", _FOREIGN)
async def test_a_letter_whose_new_id_is_taken_is_redriven_at_once(
    connection: NatsPyConnection, name: str, what: str
) -> None:
    queue = await _with_letter(connection, name)
    foreign = await _take_id(connection, queue, what)
    report = await redrive_dead_letters(connection, queue, _COPY)
    assert (list(report.redriven), report.failed) == ([1], {})
    assert await _copies(connection, queue, foreign) == [(b"true", "one")]
    assert (await redrive_dead_letters(connection, queue, _COPY)).redriven == {}


@pytest.mark.since_server("2.12", "atomic batches")
@pytest.mark.parametrize("protocol", ["atomic", "auto"])
async def test_so_is_one_whose_new_job_is_stored_in_a_batch(
    connection: NatsPyConnection, name: str, protocol: str
) -> None:
    queue = await _with_letter(connection, name)
    foreign = await _take_id(connection, queue, "the body")
    report = await redrive_dead_letters(connection, queue, _REQUESTS[protocol])
    assert (list(report.redriven), report.failed) == ([1], {})
    assert await _copies(connection, queue, foreign) == [(b"true", "one")]


@pytest.mark.slow
@pytest.mark.parametrize("archive", [True, False])
async def test_a_foreign_job_that_is_done_is_not_taken_for_the_new_one(
    connection: NatsPyConnection, name: str, *, archive: bool
) -> None:
    queue = await _with_letter(connection, name, archive=archive)
    foreign = await _take_id(connection, queue, "the body")
    assert await acknowledge_jobs(connection, queue, 1) == [foreign]
    report = await redrive_dead_letters(connection, queue, _COPY)
    assert (list(report.redriven), report.failed) == ([1], {})
    assert await _copies(connection, queue, foreign) == [(b"true", "one")]


@pytest.mark.slow
@pytest.mark.parametrize("archive", [True, False])
@pytest.mark.parametrize("what", ["the body", "the subject", "an empty body"])
async def test_nor_is_one_that_came_and_was_done_after_the_redrive_began(
    connection: NatsPyConnection, name: str, what: str, monkeypatch: pytest.MonkeyPatch, *, archive: bool
) -> None:
    queue = await _with_letter(connection, name, archive=archive)
    store, foreign = seams.current(seams.STEPS_STORE_JOBS), list[int]()

    async def store_later(*args: Any) -> Any:
        if not foreign:
            foreign.append(await _take_id(connection, queue, what))
            assert await acknowledge_jobs(connection, queue, 1) == foreign
        return await store(*args)

    with monkeypatch.context() as patch:
        patch.setattr(seams.STEPS_STORE_JOBS, store_later)
        report = await redrive_dead_letters(connection, queue, _COPY)
    assert (list(report.redriven), report.failed) == ([1], {})
    assert await _copies(connection, queue, foreign[0]) == [(b"true", "one")]


@pytest.mark.slow
@pytest.mark.parametrize("archive", [True, False])
async def test_nor_is_one_that_came_and_was_done_after_the_redrive_was_killed(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch, *, archive: bool
) -> None:
    queue = await _with_letter(connection, name, archive=archive)
    with _killed(monkeypatch, after=False):
        await redrive_dead_letters(connection, queue, _COPY)
    foreign = await _take_id(connection, queue, "the body")
    assert await acknowledge_jobs(connection, queue, 1) == [foreign]
    report = await redrive_dead_letters(connection, queue, _COPY)
    assert (list(report.redriven), report.failed) == ([1], {})
    assert await _copies(connection, queue, foreign) == [(b"true", "one")]


async def test_of_many_letters_the_one_whose_id_is_taken_comes_back_too(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await _with_letter(connection, name)
    foreign = await _take_id(connection, queue, "the subject")
    await acknowledge_jobs(connection, queue, 1)
    await make_dead_letters(connection, queue, ["b", "c"])
    report = await redrive_dead_letters(connection, queue, _COPY)
    assert (len(report.redriven), report.failed) == (3, {})
    assert sorted(body for body, _ in await _copies(connection, queue, foreign)) == [b"b", b"c", b"true"]


@pytest.mark.slow
@pytest.mark.parametrize("what", _FOREIGN)
async def test_a_recovery_takes_no_foreign_job_for_the_new_one(
    connection: NatsPyConnection, name: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await _with_letter(connection, name)
    with _killed(monkeypatch, after=False):
        await redrive_dead_letters(connection, queue, _COPY)
    foreign = await _take_id(connection, queue, what)
    report = await redrive_dead_letters(connection, queue, _COPY)
    assert (list(report.redriven), report.resumed, report.failed) == ([1], 0, {})
    assert await _copies(connection, queue, foreign) == [(b"true", "one")]


@pytest.mark.slow
async def test_a_recovery_finds_the_new_job_under_its_other_id(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await _with_letter(connection, name)
    foreign = await _take_id(connection, queue, "the body")
    with _killed(monkeypatch, after=True, at_call=2):
        await redrive_dead_letters(connection, queue, _COPY)
    report = await redrive_dead_letters(connection, queue, _COPY)
    assert (report.resumed, report.failed) == (1, {})
    assert await _copies(connection, queue, foreign) == [(b"true", "one")]
    intents = await stream_messages(connection, f"{name}-audit", f"audit.{name}.intents.*")
    ids = {letter[1] for intent in intents for letter in json.loads(intent.data)["letters"]}
    assert len(ids) == 2
    assert {len(message_id) for message_id in ids} == {len(ids.pop())}


@pytest.mark.slow
async def test_a_recovery_repeats_nothing_where_the_new_job_under_its_other_id_is_done(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await _with_letter(connection, name, archive=False)
    foreign = await _take_id(connection, queue, "the subject")
    with _killed(monkeypatch, after=True):
        await redrive_dead_letters(connection, queue, _COPY)
    assert await acknowledge_jobs(connection, queue, 2) == [foreign, foreign + 1]
    await redrive_dead_letters(connection, queue, _COPY)
    assert b"true" not in [job.data for job in await stream_messages(connection, name) if job.sequence > foreign]


@pytest.mark.slow
async def test_a_recovery_finds_a_repaired_job_whatever_the_request_says_now(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await _with_letter(connection, name)
    repair = Repair(body=b"repaired", subject=f"{name}.jobs.other", headers={"Kind": " a  b "})
    with _killed(monkeypatch, after=True):
        await redrive_dead_letters(
            connection, queue, request_for([1], transform=lambda _: repair, protocol=Protocol.COPY)
        )
    report = await redrive_dead_letters(connection, queue, _COPY)
    assert (report.resumed, report.failed) == (1, {})
    assert [body for body, _ in await _copies(connection, queue, 0)] == [b"repaired"]
    await publish_jobs(connection, queue, ["later"])
    assert (await redrive_dead_letters(connection, queue, _COPY)).redriven == {}
