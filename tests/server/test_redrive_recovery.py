"""A redrive that is cut off between its steps: the next one finds out how far each letter came, and finishes it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    Protocol,
    RedriveRequest,
    Selection,
    connect,
    connection_settings,
    find_dead_letters,
    preview,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.contract import intent_filter, letter_audit_subject
from airflow_provider_jetstream.jetstream.errors import RedriveRequestError, UnreachableError
from testbed import seams
from testbed.dead_letters import (
    change_stream,
    letter_records,
    make_terminated_letters,
    request_for,
    stream_messages,
)
from testbed.face import read_lease, stream_info
from testbed.queues import eventually, make_dead_letters, make_queue, process_all, publish_jobs, stored_count, unhurried

if TYPE_CHECKING:
    from collections.abc import Iterator

    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

COPY = RedriveRequest(protocol=Protocol.COPY)
PARK = RedriveRequest(max_redrives=0)
IN_PLACE = RedriveRequest(protocol=Protocol.IN_PLACE)
ATOMIC = RedriveRequest(protocol=Protocol.ATOMIC)
RESETS = pytest.mark.since_server("2.14", "the reset of a consumer")
NEXT = pytest.mark.parametrize(
    "again",
    [COPY, ATOMIC, pytest.param(IN_PLACE, marks=RESETS), PARK],
    ids=["copy", "atomic", "in place", "park"],
)


class Killed(BaseException):
    """Stands for the end of the process: nothing of the redrive runs any more."""


@contextmanager
def killed(monkeypatch: pytest.MonkeyPatch, function: str, *, after: bool = True) -> Iterator[None]:
    """End a redrive just after it has called a function at a place of its inside, or in place of that."""
    call = seams.current(function)

    async def call_and_end(*args: Any, **options: Any) -> None:
        if after:
            await call(*args, **options)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(function, call_and_end)
        try:
            yield
        except Killed:
            return
    raise AssertionError(f"expected the redrive to call {function}")


def has_batches(connection: NatsPyConnection) -> dict[str, Any]:
    return {"atomic_redrive": connection.server_version >= (2, 12, 1)}


async def begin(connection: NatsPyConnection, name: str, letters: str = "abc", **fields: Any) -> WorkQueue:
    """Make a queue with dead letters whose workers are certainly away."""
    declared: dict[str, Any] = {"consumer": {"ack_wait": "50ms"}, "duplicate_window": "100ms"} | has_batches(connection)
    queue = await make_queue(connection, name, **declared | fields)
    await make_dead_letters(connection, queue, letters)
    return queue


async def work(connection: NatsPyConnection, queue: WorkQueue) -> Counter[str]:
    """Do every job, however slow the machine is.

    Once the last ack wait is over, a late acknowledgement removes a job, but the server stores no ack metric: the entry
    of such a job stays, since nothing proves that it is done.
    """
    async with unhurried(connection, queue):
        return await process_all(connection, queue)


async def finish(
    connection: NatsPyConnection, queue: WorkQueue, again: RedriveRequest, done: Counter[str]
) -> Counter[str]:
    """Redrive again, bring back what was parked, and count how often each job was done."""
    report = await redrive_dead_letters(connection, queue, again)
    assert not report.failures, report.failed
    done += await work(connection, queue)
    await redrive_dead_letters(connection, queue, RedriveRequest(Selection(parked=True), protocol=Protocol.COPY))
    done += await work(connection, queue)
    assert (await find_dead_letters(connection, queue)).letters == ()

    async def no_entry_is_left() -> bool:
        # A server that was killed may publish an advisory once more.
        await redrive_dead_letters(connection, queue, COPY)
        return await stored_count(connection, f"{queue.name}-dead") == 0

    await eventually(no_entry_is_left)
    return done + await work(connection, queue)


@NEXT
@pytest.mark.parametrize("workers", ["work", "are away"])
async def test_a_copy_is_stored_once_past_the_window_whatever_protocol_comes_next(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch, again: RedriveRequest, workers: str
) -> None:
    queue = await begin(connection, name)
    with killed(monkeypatch, seams.STEPS_STORE_JOBS):
        await redrive_dead_letters(connection, queue, COPY)
    done = await work(connection, queue) if workers == "work" else Counter[str]()
    await asyncio.sleep(0.2)
    assert await finish(connection, queue, again, done) == dict.fromkeys("abc", 1)
    assert Counter(record.action for record in await letter_records(connection, queue))["redriven"] == 3


@pytest.mark.parametrize(
    ("again", "expected"),
    [(COPY, "redriven"), (ATOMIC, "redriven"), pytest.param(IN_PLACE, "requeued", marks=RESETS), (PARK, "parked")],
    ids=["copy", "atomic", "in place", "park"],
)
async def test_what_was_never_stored_is_redriven_as_the_next_request_says(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch, again: RedriveRequest, expected: str
) -> None:
    queue = await begin(connection, name)
    with killed(monkeypatch, seams.STEPS_STORE_JOBS, after=False):
        await redrive_dead_letters(connection, queue, COPY)
    await publish_jobs(connection, queue, "xyz")
    done = await work(connection, queue)
    assert await finish(connection, queue, again, done) == dict.fromkeys("abcxyz", 1)
    assert [record.action for record in await letter_records(connection, queue)][:3] == [expected] * 3


@NEXT
async def test_a_letter_that_is_parked_already_is_not_redriven_as_well(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch, again: RedriveRequest
) -> None:
    queue = await begin(connection, name, "a")
    with killed(monkeypatch, seams.STEPS_STORE_PARKED):
        await redrive_dead_letters(connection, queue, PARK)
    await asyncio.sleep(0.2)
    report = await redrive_dead_letters(connection, queue, again)
    assert (list(report.parked), len(report.redriven), report.failures) == ([1], 0, 0)
    assert await stored_count(connection, name) == 0
    assert await finish(connection, queue, COPY, Counter()) == {"a": 1}


@NEXT
async def test_terminated_letters_are_stored_once_past_the_window(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch, again: RedriveRequest
) -> None:
    queue = await make_queue(connection, name, duplicate_window="100ms", **has_batches(connection))
    await make_terminated_letters(connection, queue, "abc")
    with killed(monkeypatch, seams.STEPS_STORE_JOBS):
        await redrive_dead_letters(connection, queue, COPY)
    done = await work(connection, queue)
    await asyncio.sleep(0.2)
    assert await finish(connection, queue, again, done) == dict.fromkeys("abc", 1)


@pytest.mark.smoke
@pytest.mark.slow
@NEXT
async def test_copies_that_ran_before_the_server_was_killed_are_known(
    own_nats: NatsServer, monkeypatch: pytest.MonkeyPatch, again: RedriveRequest
) -> None:
    async with connect(connection_settings({"servers": (own_nats.url,), "timeout": 5})) as connection:
        queue = await begin(connection, "q", duplicate_window="2m")
        with killed(monkeypatch, seams.STEPS_STORE_JOBS):
            await redrive_dead_letters(connection, queue, COPY)
        done = await work(connection, queue)
        # The server loses no more than the last second.
        await asyncio.sleep(1.5)
        own_nats.kill()
        await asyncio.to_thread(own_nats.restart)
        await eventually(lambda: connection.client.is_connected)
        assert await finish(connection, queue, again, done) == dict.fromkeys("abc", 1)


@pytest.mark.since_server("2.14", "the reset of a consumer")
async def test_without_an_archive_a_copy_that_may_have_run_is_set_aside_until_it_is_named(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await begin(connection, name, "ab", archive=False)
    with killed(monkeypatch, seams.STEPS_STORE_JOBS):
        await redrive_dead_letters(connection, queue, COPY)
    assert await work(connection, queue) == {"a": 1, "b": 1}
    await asyncio.sleep(0.2)
    # It says so each time, and a letter by itself holds up no other.
    await make_dead_letters(connection, queue, "c")
    for redriven in (1, 0):
        report = await redrive_dead_letters(connection, queue, COPY)
        assert (len(report.redriven), sorted(report.failed)) == (redriven, [1, 2])
        assert report.failed[1].startswith("whether the redrive that began at 20")
        assert "no longer holds all that it stored since, and it has no archive" in report.failed[1]
    refused = await redrive_dead_letters(connection, queue, RedriveRequest(protocol=Protocol.IN_PLACE))
    assert sorted(refused.failed) == [1, 2]
    assert "a reset would run it once more" in refused.failed[1]
    assert await work(connection, queue) == {"c": 1}
    named = await redrive_dead_letters(connection, queue, request_for([1]))
    assert (list(named.redriven), named.failures) == ([1], 0)
    assert sorted((await redrive_dead_letters(connection, queue, COPY)).failed) == [2]
    assert await work(connection, queue) == {"a": 1}


@NEXT
async def test_without_an_archive_copies_that_still_wait_are_known(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch, again: RedriveRequest
) -> None:
    queue = await begin(connection, name, archive=False)
    with killed(monkeypatch, seams.STEPS_STORE_JOBS):
        await redrive_dead_letters(connection, queue, COPY)
    await asyncio.sleep(0.2)
    assert await finish(connection, queue, again, Counter()) == dict.fromkeys("abc", 1)


@NEXT
async def test_inside_the_window_a_copy_that_may_have_run_is_stored_once_more_and_dropped(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch, again: RedriveRequest
) -> None:
    queue = await begin(connection, name, archive=False, duplicate_window="2m")
    # The first look at the queue begins to watch whether its server restarts.
    await find_dead_letters(connection, queue)
    with killed(monkeypatch, seams.STEPS_STORE_JOBS):
        await redrive_dead_letters(connection, queue, COPY)
    done = await work(connection, queue)
    assert await finish(connection, queue, again, done) == dict.fromkeys("abc", 1)


@NEXT
async def test_a_batch_with_markers_is_stored_once_without_an_archive(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch, again: RedriveRequest
) -> None:
    queue = await begin(connection, name, archive=False)
    with killed(monkeypatch, seams.STEPS_STORE_JOBS):
        await redrive_dead_letters(connection, queue, ATOMIC)
    done = await work(connection, queue)
    await asyncio.sleep(0.2)
    assert await finish(connection, queue, again, done) == dict.fromkeys("abc", 1)


async def test_without_an_audit_nothing_is_changed(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, audit=False)
    await make_dead_letters(connection, queue, "ab")
    for request in (None, PARK, IN_PLACE):
        with pytest.raises(RedriveRequestError, match=f"^expected an audit of {name}, found none: .* provision the"):
            await redrive_dead_letters(connection, queue, request)
    with pytest.raises(RedriveRequestError, match=f"^expected an audit of {name}, found none"):
        await preview(connection, queue, RedriveRequest())
    assert [letter.sequence for letter in (await find_dead_letters(connection, queue)).letters] == [1, 2]
    assert await stored_count(connection, name) == 2
    assert await stored_count(connection, f"{name}-dead") == 2


@pytest.mark.parametrize("request_", [COPY, ATOMIC, PARK], ids=["copy", "atomic", "park"])
async def test_nothing_is_stored_while_the_audit_takes_no_intents(
    connection: NatsPyConnection, name: str, request_: RedriveRequest
) -> None:
    queue = await begin(connection, name)
    others = [f"audit.{name}.lease", f"audit.{name}.lease-renewal", f"audit.{name}.runs.*", f"audit.{name}.letters.*"]
    before = await change_stream(connection, f"{name}-audit", subjects=others)
    report = await redrive_dead_letters(connection, queue, request_)
    assert sorted(report.failed) == [1, 2, 3]
    expected = f"nothing was stored, since {name}-audit couldn't record what is about to be ("
    assert all(cause.startswith(expected) for cause in report.failed.values())
    assert (await stream_info(connection, name))["state"]["last_seq"] == 3
    assert await stored_count(connection, f"{name}-dead") == 3
    await change_stream(connection, f"{name}-audit", subjects=before["subjects"])
    assert await finish(connection, queue, request_, Counter()) == dict.fromkeys("abc", 1)


@pytest.mark.slow
@NEXT
@pytest.mark.parametrize("first", [COPY, PARK], ids=["copy first", "park first"])
async def test_what_was_stored_while_the_audit_took_no_records_is_recorded_later(
    connection: NatsPyConnection, name: str, first: RedriveRequest, again: RedriveRequest
) -> None:
    queue = await begin(connection, name)
    others = [f"audit.{name}.lease", f"audit.{name}.lease-renewal", f"audit.{name}.runs.*", f"audit.{name}.intents.*"]
    before = await change_stream(connection, f"{name}-audit", subjects=others)
    report = await redrive_dead_letters(connection, queue, first)
    assert sorted(report.failed) == [1, 2, 3]
    stored = await stream_info(connection, name)
    done = await work(connection, queue)
    await asyncio.sleep(0.2)
    # Each further try stores nothing more while it is so.
    report = await redrive_dead_letters(connection, queue, first)
    assert sorted(report.failed) == [1, 2, 3]
    assert (await stream_info(connection, name))["state"]["last_seq"] == stored["state"]["last_seq"]
    await change_stream(connection, f"{name}-audit", subjects=before["subjects"])
    assert await finish(connection, queue, again, done) == dict.fromkeys("abc", 1)


async def test_an_answer_that_never_came_is_found_out_by_the_next_redrive(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await begin(connection, name)

    store_jobs = seams.current(seams.STEPS_STORE_JOBS)

    async def store_unheard(*args: Any) -> list[Any]:
        await store_jobs(*args)
        return [UnreachableError("the connection is lost")] * 3

    with monkeypatch.context() as patch:
        patch.setattr(seams.STEPS_STORE_JOBS, store_unheard)
        report = await redrive_dead_letters(connection, queue, COPY)
    assert sorted(report.failed) == [1, 2, 3]
    done = await work(connection, queue)
    await asyncio.sleep(0.2)
    assert await finish(connection, queue, PARK, done) == dict.fromkeys("abc", 1)


async def test_a_redrive_leaves_one_intent_for_a_batch_and_nothing_open(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await begin(connection, name)
    await redrive_dead_letters(connection, queue, COPY)
    (message,) = await stream_messages(connection, f"{name}-audit", intent_filter(name))
    intent = json.loads(message.data)
    assert (intent["protocol"], intent["action"], [letter for letter, _ in intent["letters"]]) == (
        *("copy", "redriven"),
        [1, 2, 3],
    )
    created = (await stream_info(connection, name))["created"]
    assert intent["target"] == {"stream": name, "created": created, "last": 3, "archive": f"{name}-archive"}
    lease = await read_lease(connection, f"{name}-audit", name)
    assert lease is not None
    assert lease.open_since is None


async def test_what_is_no_intent_is_passed_over(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may publish to the audit can store anything there."""
    queue = await begin(connection, name)
    with killed(monkeypatch, seams.STEPS_STORE_JOBS):
        await redrive_dead_letters(connection, queue, COPY)
    jetstream = connection.client.jetstream()
    for subject in (f"audit.{name}.intents.any", letter_audit_subject(name, 0).removesuffix("0") + "x"):
        for body in (b"", b"\xff", b"{}", b'{"letters": 1}', b'{"created": "x", "letters": [[1, "a"]]}'):
            await jetstream.publish(subject, body)
    done = await work(connection, queue)
    await asyncio.sleep(0.2)
    assert await finish(connection, queue, COPY, done) == dict.fromkeys("abc", 1)


@NEXT
async def test_a_parked_record_of_a_job_that_was_requeued_since_is_no_letter(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch, again: RedriveRequest
) -> None:
    """The redrive that parked it was killed before the original was removed; the one in place, before the entries."""
    if connection.server_version < (2, 14):
        pytest.skip("consumers are reset since 2.14")
    queue = await begin(connection, name, consumer={"ack_wait": "50ms", "sample_freq": "100%"})
    with killed(monkeypatch, seams.STORED_LETTERS_REMOVE_ORIGINALS, after=False):
        await redrive_dead_letters(connection, queue, PARK)
    with killed(monkeypatch, seams.REQUEUEING_REMOVE_ENTRIES, after=False):
        await redrive_dead_letters(connection, queue, IN_PLACE)
    done = await work(connection, queue)
    assert done == dict.fromkeys("abc", 1)
    assert (await find_dead_letters(connection, queue, Selection(parked=True))).letters == ()
    assert await finish(connection, queue, again, done) == dict.fromkeys("abc", 1)


async def test_intents_of_an_earlier_queue_of_the_same_name_do_not_count(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await begin(connection, name)
    with killed(monkeypatch, seams.STEPS_STORE_JOBS):
        await redrive_dead_letters(connection, queue, COPY)
    for stream in (name, f"{name}-dead"):
        await connection.api(f"STREAM.DELETE.{stream}")
    queue = await begin(connection, name, "xyz")
    assert await finish(connection, queue, COPY, Counter()) == dict.fromkeys("xyz", 1)


async def test_letters_of_a_try_that_was_cut_off_count_as_resumed(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for their jobs has to read the ends from before this try."""
    queue = await begin(connection, name)
    request = RedriveRequest(protocol=Protocol.COPY, run="first")
    with killed(monkeypatch, seams.STEPS_STORE_JOBS):
        await redrive_dead_letters(connection, queue, request)
    report = await redrive_dead_letters(connection, queue, request)
    assert (dict(report.redriven), report.resumed, report.awaited_sequences()) == ({1: 4, 2: 5, 3: 6}, 3, {4, 5, 6})
