"""A redrive that is cut off between its steps: the next one finds out how far each letter came, and finishes it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from contextlib import AsyncExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    Protocol,
    Reason,
    RedriveRequest,
    Selection,
    connect,
    connection_settings,
    find_dead_letters,
    preview,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.contract import intent_filter, lease_subject, letter_audit_subject
from airflow_provider_jetstream.jetstream.errors import (
    JetStreamProviderError,
    RedriveError,
    RedriveRequestError,
    TransientError,
    UnreachableError,
)
from testbed import seams
from testbed.crash_points import crash_at_every_call
from testbed.dead_letters import (
    change_stream,
    letter_records,
    make_terminated_letters,
    request_for,
    run_records,
    stream_messages,
)
from testbed.face import NatsPyConnection, last_message, stream_info
from testbed.queues import (
    CONSUMER,
    eventually,
    make_dead_letters,
    make_queue,
    process_all,
    publish_jobs,
    stored_count,
    unhurried,
)
from testbed.sent_frames import sent_messages

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from airflow_provider_jetstream.jetstream import ConnectionSettings, WorkQueue
    from testbed.nats_server import NatsServer

COPY = RedriveRequest(protocol=Protocol.COPY)
PARK = RedriveRequest(max_redrives=0)
IN_PLACE = RedriveRequest(protocol=Protocol.IN_PLACE)
RESETS = pytest.mark.since_server("2.14", "the reset of a consumer")
NEXT = pytest.mark.parametrize(
    "again",
    [COPY, pytest.param(IN_PLACE, marks=RESETS), PARK],
    ids=["copy", "in place", "park"],
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


async def begin(connection: NatsPyConnection, name: str, letters: str = "abc", **fields: Any) -> WorkQueue:
    """Make a queue with dead letters whose workers are certainly away."""
    declared: dict[str, Any] = {"consumer": {"ack_wait": "50ms"}, "duplicate_window": "100ms"}
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
    [(COPY, "redriven"), pytest.param(IN_PLACE, "requeued", marks=RESETS), (PARK, "parked")],
    ids=["copy", "in place", "park"],
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
    queue = await make_queue(connection, name, duplicate_window="100ms")
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


async def test_without_an_audit_nothing_is_changed(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, audit=False, dead="ab")
    for request in (None, PARK, IN_PLACE):
        with pytest.raises(RedriveRequestError, match=f"^expected an audit of {name}, found none: .* provision the"):
            await redrive_dead_letters(connection, queue, request)
    with pytest.raises(RedriveRequestError, match=f"^expected an audit of {name}, found none"):
        await preview(connection, queue, RedriveRequest())
    assert [letter.sequence for letter in (await find_dead_letters(connection, queue)).letters] == [1, 2]
    assert await stored_count(connection, name) == 2
    assert await stored_count(connection, f"{name}-dead") == 2


@pytest.mark.parametrize("request_", [COPY, PARK], ids=["copy", "park"])
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
    assert (intent["action"], [letter for letter, _ in intent["letters"]]) == ("redriven", [1, 2, 3])
    created = (await stream_info(connection, name))["created"]
    assert intent["target"] == {"stream": name, "created": created, "last": 3, "archive": f"{name}-archive"}
    lease = await last_message(connection, f"{name}-audit", lease_subject(name))
    assert lease is not None
    state = json.loads(lease.data)
    assert (state["released"], state.get("open_since")) == (True, None)


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


# Redrives that are killed, cut off or concurrent: no job is lost or done twice.


JOBS = ["a", "b", "c"]
AT_ONCE = 8

HANDLER = {"name": "unprocessed_order_handler", "max_deliver": 2, "backoff": ["5s"]}


def fields(kind: str, name: str) -> dict[str, Any]:
    """Return the fields of a queue: the defaults, or those of the orders document."""
    if kind == "plain":
        return {}
    letters = {"name": f"{name}-dead", "retention": "workqueue", "deny_delete": True, "consumers": [HANDLER]}
    return {"discard": "new", "deny_delete": True, "dead_letters": letters}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "orders"])
@pytest.mark.parametrize("workers", ["workers are away", "workers take each copy at once"])
async def test_a_redrive_killed_before_any_of_its_calls_loses_and_repeats_nothing_when_it_is_run_again(
    nats: NatsServer, connection: NatsPyConnection, name: str, kind: str, workers: str, tmp_path: Path
) -> None:
    async def prepare(call: int) -> WorkQueue:
        queue = await make_queue(connection, f"{name}-{call}", **fields(kind, f"{name}-{call}"))
        await make_dead_letters(connection, queue, JOBS)
        return queue

    deaths = await crash_at_every_call(
        (nats.url,), f"{redrive_dead_letters.__module__}:redrive_dead_letters", prepare, logs=tmp_path
    )
    print(deaths.table())
    assert set(deaths.statuses) == {-signal.SIGKILL, 0}
    # Reading, then five calls for each of three letters, then the removal of the entries.
    assert len(deaths.killed_calls) >= 20

    async def redrive_again(queue: WorkQueue) -> None:
        done: Counter[str] = Counter()
        if workers == "workers take each copy at once":
            done += await process_all(connection, queue)
        report = await redrive_dead_letters(connection, queue)
        assert report.failed == {}
        done += await process_all(connection, queue)
        assert done == dict.fromkeys(JOBS, 1), queue.name
        assert await stored_count(connection, queue.name) == 0
        assert (await find_dead_letters(connection, queue)).letters == ()

    for start in range(0, len(deaths.queues), AT_ONCE):
        await asyncio.gather(*map(redrive_again, deaths.queues[start : start + AT_ONCE]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "orders"])
@pytest.mark.parametrize("redrivers", [2, 3])
async def test_concurrent_redrives_lose_and_repeat_nothing(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str, kind: str, redrivers: int
) -> None:
    # On a loaded machine, forty acknowledgements take longer than the half second that other tests give them. Once its
    # ack wait is over a job is done without evidence, and its entry stays.
    queue = await make_queue(connection, name, consumer={"ack_wait": "3s"}, **fields(kind, name))
    jobs = [str(number) for number in range(40)]
    await make_dead_letters(connection, queue, jobs, headers={"Customer": "x"})
    async with AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(connect(settings)) for _ in range(redrivers)]
        draining = asyncio.create_task(drain_until_empty(connection, queue, len(jobs)))
        reports = await asyncio.gather(*(redrive_dead_letters(client, queue) for client in connections))
    assert await draining == dict.fromkeys(jobs, 1)
    assert all(report.failed == {} for report in reports)
    # One after the other: whoever had the lease first redrove all.
    assert sorted(sequence for report in reports for sequence in report.redriven) == list(range(1, 41))
    assert await stored_count(connection, name) == 0
    assert await stored_count(connection, f"{name}-dead") == 0


async def drain_until_empty(connection: NatsPyConnection, queue: WorkQueue, count: int) -> Counter[str]:
    """Do jobs until so many were done and none is left, while the redrives run."""
    done: Counter[str] = Counter()

    async def over() -> bool:
        done.update(await process_all(connection, queue))
        return done.total() >= count and not await stored_count(connection, queue.name)

    await eventually(over, within=20)
    return done


@pytest.mark.slow
@pytest.mark.parametrize("call", [2, 6, 8, 10, 11, 12, 13, 16])
async def test_a_redrive_whose_server_is_killed_is_finished_by_the_next(
    own_nats: NatsServer, name: str, call: int
) -> None:
    async with connect(connection_settings({"servers": (own_nats.url,), "timeout": 2})) as connection:
        queue = await make_queue(connection, name, dead=JOBS)
        await kill_server_before(own_nats, connection, call, redrive_dead_letters(connection, queue))
        await eventually(lambda: connection.client.is_connected)
        report = await redrive_dead_letters(connection, queue)
        assert report.failed == {}
        assert await process_all(connection, queue) == dict.fromkeys(JOBS, 1)
        assert await stored_count(connection, name) == 0


async def kill_server_before(server: NatsServer, connection: NatsPyConnection, call: int, redrive_module: Any) -> None:
    """Run a redrive, and kill and restart the server before its n-th call."""
    write, sent = connection.write, 0

    def killing_write(frames: bytes, messages: int = 1) -> None:
        nonlocal sent
        written = list(sent_messages(frames))
        assert len(written) == messages
        for _, message in written:
            sent += 1
            if sent == call:
                server.kill()
                server.start()
            write(message, 1)

    connection.write = killing_write  # type: ignore[method-assign]
    try:
        await redrive_module
    except TransientError:
        pass
    finally:
        connection.write = write  # type: ignore[method-assign]
    assert sent >= call


@pytest.mark.slow
async def test_a_cancelled_redrive_is_finished_by_the_next(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    jobs = [str(number) for number in range(1_000)]
    await make_dead_letters(connection, queue, jobs)
    first = asyncio.create_task(redrive_dead_letters(connection, queue))

    async def begun() -> bool:
        return int((await connection.api(f"STREAM.INFO.{name}"))["state"]["last_seq"]) > 1_000

    await eventually(begun)
    first.cancel()
    await asyncio.wait([first])
    assert first.cancelled()
    second = await redrive_dead_letters(connection, queue)
    assert second.redriven
    assert await process_all(connection, queue) == dict.fromkeys(jobs, 1)


async def test_letters_whose_consumer_is_deleted_in_the_middle_are_redriven_all_the_same(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name, dead="ab")
    looked_at = 0

    async def delete_before_the_second(*_: object) -> bool:
        nonlocal looked_at
        looked_at += 1
        if looked_at == 2:
            await connection.api(f"CONSUMER.DELETE.{name}.worker")
        return True

    monkeypatch.setattr(seams.REDRIVE_STEP_WAIT_UNTIL, delete_before_the_second)
    monkeypatch.setattr(seams.REDRIVE_STEP_PAGE, 1)
    report = await redrive_dead_letters(connection, queue)
    report.raise_for_failures()
    assert report.redriven == {1: 3, 2: 4}
    assert (await stored_count(connection, name), await stored_count(connection, f"{name}-dead")) == (2, 0)


async def test_an_original_that_the_server_keeps_is_named_and_keeps_its_entry(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name, dead="a")
    store_jobs = seams.current(seams.STEPS_STORE_JOBS)

    async def store_and_create_the_consumer_anew(*arguments: Any, **options: Any) -> Any:
        stored = await store_jobs(*arguments, **options)
        place = f"{name}.worker"
        config = (await connection.api(f"CONSUMER.INFO.{place}"))["config"]
        await connection.api(f"CONSUMER.DELETE.{place}")
        await connection.api(f"CONSUMER.CREATE.{place}", {"stream_name": name, "config": config, "action": "create"})
        return stored

    monkeypatch.setattr(seams.STEPS_STORE_JOBS, store_and_create_the_consumer_anew)
    # The server never answers an acknowledgement of what it has not delivered.
    monkeypatch.setattr(connection, "timeout", 3)
    report = await redrive_dead_letters(connection, queue)
    assert "the original 1 could not be removed" in str(report.failed[1])
    assert (await stored_count(connection, name), await stored_count(connection, f"{name}-dead")) == (2, 1)


# A redrive of many letters that is cut off before, within or after any of its requests loses and repeats nothing.


LETTERS = 60
BATCH = 20
# Parts of what a request group holds that still leave this process.
PARTS = (0.0, 0.5, 1.0)
# Two batches of two parts each under way at once; so many more cuts than requests end a redrive.
MOST_REQUESTS = 60


class Cut:
    """Lets the redrive's requests out until a number of them, then only those that give the lease and a pause back."""

    def __init__(self, number: int, part: float) -> None:
        self.left = number
        self.part = part
        self.has_begun = False
        self.is_cut = False
        self.task: asyncio.Task[object] | None = None

    def allowed(self, frames: bytes) -> bytes | None:
        """Return what is sent of encoded messages; ``None`` for nothing, as from a process that isn't there."""
        if self.is_cut:
            return frames if b".lease" in frames or b"CONSUMER.PAUSE" in frames else None
        self.has_begun |= b".intents." in frames or b"CONSUMER.PAUSE" in frames
        if not self.has_begun or self.task is None:
            return frames
        self.left -= 1
        if self.left >= 0:
            return frames
        self.is_cut = True
        self.task.cancel()
        whole = [*split(frames)]
        return b"".join(whole[: int(len(whole) * self.part)])


def split(frames: bytes) -> Iterator[bytes]:
    """Return encoded messages one by one."""
    start = 0
    while start < len(frames):
        line = frames.index(b"\r\n", start) + 2
        end = line + int(frames[start:line].split()[-1]) + 2
        yield frames[start:end]
        start = end


async def redrive_until_cut(connection: NatsPyConnection, queue: WorkQueue, request: RedriveRequest, cut: Cut) -> None:
    write = NatsPyConnection.write

    def write_or_cut(self: NatsPyConnection, frames: bytes, messages: int = 1) -> None:
        if (sent := cut.allowed(frames)) is None:
            raise UnreachableError("the process is gone")
        if sent:
            write(self, sent, messages)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NatsPyConnection, "write", write_or_cut)
        cut.task = asyncio.create_task(redrive_dead_letters(connection, queue, request))
        with suppress(asyncio.CancelledError, JetStreamProviderError):
            await cut.task


def cases() -> list[tuple[Protocol, int]]:
    """Return the protocol with the turn of the parts that the first request leaves."""
    turns = range(len(PARTS)) if os.environ.get("FAULTS") == "full" else [1]
    return [(Protocol.COPY, turn) for turn in turns]


@pytest.mark.slow
@pytest.mark.parametrize(("protocol", "turn"), cases())
async def test_a_redrive_that_is_cut_off_at_any_request_is_finished_by_the_next_one(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch, protocol: Protocol, turn: int
) -> None:
    monkeypatch.setattr(seams.REDRIVE_STEP_PAGE, BATCH)
    monkeypatch.setattr(seams.STEPS_LEAST_OVERLAPPED, 1)
    bodies = [str(number) for number in range(LETTERS)]
    cuts = 0

    async def cut_at(number: int) -> bool:
        """Cut a redrive off; return whether it had so many requests."""
        queue = await make_queue(connection, f"{name}{number}", archive=None, dead=bodies)
        request = RedriveRequest(protocol=protocol, run="r")
        cut = Cut(number, PARTS[(number + turn) % len(PARTS)])
        await redrive_until_cut(connection, queue, request, cut)
        what = f"{protocol.value}, cut at request {number}, {cut.part} of it sent"

        async def is_finished() -> bool:
            report = await redrive_dead_letters(connection, queue, request)
            return not report.failures

        await eventually(is_finished)
        stored = Counter(message.data.decode() for message in await stream_messages(connection, queue.name))
        assert stored == Counter(bodies), what
        consumer = await connection.api(f"CONSUMER.INFO.{queue.name}.worker")
        assert (consumer["num_pending"], consumer["num_ack_pending"]) == (LETTERS, 0), what
        assert not await stream_messages(connection, f"{queue.name}-dead"), what
        recorded = Counter(record.sequence for record in await letter_records(connection, queue))
        assert set(recorded) == set(range(1, LETTERS + 1)), what
        for stream in (queue.name, f"{queue.name}-dead", f"{queue.name}-audit", f"{queue.name}-events"):
            with suppress(JetStreamProviderError):
                await connection.api(f"STREAM.DELETE.{stream}")
        return cut.is_cut

    for number in range(MOST_REQUESTS):
        if not await cut_at(number):
            break
        cuts += 1
    print(f"{protocol.value}: cut off at {cuts} requests")
    assert 5 <= cuts < MOST_REQUESTS


# Redrives that are cut off between storing a new job and removing the original, and finished at any later time.


RUN = RedriveRequest(run="orders-1")


async def keep_original(*_: object) -> None:
    raise RedriveError("the original could not be removed")


async def duplicates_forgotten(connection: NatsPyConnection, queue: WorkQueue) -> None:
    """Wait until the queue's duplicate window has passed."""
    body, jetstream = "probe", connection.client.jetstream()
    await jetstream.publish(f"{queue.name}.jobs.probe", body.encode(), headers={"Nats-Msg-Id": "probe"})

    async def forgotten() -> bool:
        ack = await jetstream.publish(f"{queue.name}.jobs.probe", body.encode(), headers={"Nats-Msg-Id": "probe"})
        return not ack.duplicate

    await eventually(forgotten)


@pytest.mark.slow
@pytest.mark.parametrize("death", ["with an entry", "without an entry"])
async def test_a_letter_recorded_but_not_removed_is_finished_without_a_second_copy_at_any_time(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch, death: str
) -> None:
    queue = await make_queue(connection, name, duplicate_window="100ms", dead="ab")
    if death == "without an entry":
        await connection.api(f"STREAM.PURGE.{name}-dead")
    with monkeypatch.context() as patch:
        patch.setattr(seams.STORED_LETTERS_REMOVE_ORIGINALS, keep_original)
        report = await redrive_dead_letters(connection, queue, RUN)
    assert report.failed == dict.fromkeys((1, 2), "it is redriven, but the original could not be removed")
    assert await stored_count(connection, name) == 4
    await duplicates_forgotten(connection, queue)
    assert (await process_all(connection, queue)).keys() == {"a", "b", "probe"}

    def refuse(_: object) -> None:
        raise ValueError("it isn't to be called again")

    again = await redrive_dead_letters(connection, queue, RedriveRequest(run="orders-1", transform=refuse))
    again.raise_for_failures()
    assert (dict(again.redriven), list(again.gone)) == ({1: 3, 2: 4}, [])
    assert await process_all(connection, queue) == {}
    assert await stored_count(connection, name) == 0
    assert len(await letter_records(connection, queue)) == 2
    assert (await run_records(connection, queue, "orders-1"))[-1].finished


async def test_an_undeliverable_job_recorded_but_not_removed_is_finished_without_a_second_copy(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumers = [{"name": CONSUMER, "max_deliver": 1, "ack_wait": "500ms", "filter_subject": f"{name}.jobs.probe"}]
    queue = await make_queue(connection, name, consumers=consumers, duplicate_window="100ms")
    await publish_jobs(connection, queue, "a", kind="typo")
    undeliverable = Selection(reasons=frozenset({Reason.UNDELIVERABLE}))
    request = RedriveRequest(undeliverable, subject=f"{name}.jobs.probe")
    with monkeypatch.context() as patch:
        patch.setattr(seams.STORED_LETTERS_REMOVE_ORIGINALS, keep_original)
        assert (await redrive_dead_letters(connection, queue, request)).failures == 1
    await duplicates_forgotten(connection, queue)
    report = await redrive_dead_letters(connection, queue, request)
    assert report.redriven == {1: 2}
    assert (await process_all(connection, queue))["a"] == 1
    assert len(await letter_records(connection, queue)) == 1
