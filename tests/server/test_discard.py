"""Dead letters are discarded with a reason, and come back, parked, as long as a copy is stored."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    Protocol,
    Reason,
    RedriveRequest,
    Selection,
    Status,
    WaitPolicy,
    account_for_jobs,
    connect,
    connection_settings,
    find_dead_letters,
    preview,
    read_job_reports,
    redrive_dead_letters,
    take_cursor,
    wait,
)
from airflow_provider_jetstream.jetstream.contract import MAX_DELIVERIES, MSG_ID, copy_subject
from airflow_provider_jetstream.jetstream.errors import DeadLetterGoneError, RedriveRequestError
from testbed import seams
from testbed.dead_letters import (
    letter_records,
    make_terminated_letters,
    publish_raw,
    request_for,
    stream_messages,
)
from testbed.foreign_programs import acknowledge, create_or_update_consumer, pull
from testbed.queues import (
    CONSUMER,
    eventually,
    exhaust_deliveries,
    make_dead_letters,
    make_queue,
    process_all,
    publish_jobs,
    pull_jobs,
    stored_count,
    until_stored,
)

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import ConnectionSettings, DeadLetter, RedriveReport, WorkQueue
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

DISCARD = RedriveRequest(discard=True, why="orders of a shop that closed", who={"task_id": "tidy"})
SHORT = {"ack_wait": "50ms"}
# No archive: the record in the audit has the body.
BARE: dict[str, Any] = {"archive": None, "consumer": SHORT}
QUEUES = pytest.mark.parametrize("fields", [{"consumer": SHORT}, BARE], ids=["archive", "audit"])


async def discard(
    connection: NatsPyConnection, queue: WorkQueue, request: RedriveRequest = DISCARD, *, count: int = 1
) -> RedriveReport:
    report = await redrive_dead_letters(connection, queue, request)
    report.raise_for_failures()
    assert (len(report.discarded), len(report.redriven), len(report.parked)) == (count, 0, 0)
    return report


async def undo(connection: NatsPyConnection, queue: WorkQueue, discarded: str, **fields: Any) -> RedriveReport:
    return await redrive_dead_letters(connection, queue, RedriveRequest(undo=discarded, **fields))


async def parked_letters(connection: NatsPyConnection, queue: WorkQueue) -> list[DeadLetter]:
    return list((await find_dead_letters(connection, queue, Selection(parked=True))).letters)


def identity(letter: DeadLetter) -> tuple[object, ...]:
    death = letter.death
    what = (letter.sequence, letter.subject, letter.body, letter.time, letter.job_id, letter.redrives)
    return (*what, *sorted(letter.headers), death.reason, death.consumer, death.fingerprint, death.died_at)


async def streams(connection: NatsPyConnection, queue: WorkQueue) -> list[int]:
    return [await stored_count(connection, name) for name in (queue.name, f"{queue.name}-dead", f"{queue.name}-audit")]


@QUEUES
async def test_a_discarded_letter_is_gone_with_its_reason_in_the_audit_and_comes_back_as_it_was(
    connection: NatsPyConnection, nats: NatsServer, name: str, fields: dict[str, Any]
) -> None:
    queue = await make_queue(connection, name, **fields)
    headers = b"Job-Id: order-7\r\nX-Note: caf\xe9\r\nX-Two: 1\r\nX-Two: 2\r\n" + MSG_ID.encode() + b": first"
    await publish_raw(nats, f"{name}.jobs.plain", headers, b"\xff\x00 no text")
    await until_stored(connection, queue.name, 1)
    await exhaust_deliveries(connection, queue, 1)
    (before,) = (await find_dead_letters(connection, queue)).letters
    report = await discard(connection, queue)
    assert report.state == "finished"
    assert await stored_count(connection, queue.name) == await stored_count(connection, f"{name}-dead") == 0
    assert (await find_dead_letters(connection, queue)).letters == ()
    (record,) = await letter_records(connection, queue)
    assert (record.action, record.why, record.who) == ("discarded", DISCARD.why, DISCARD.who)
    assert record.kept is not None
    assert record.kept.copy_in == ("record" if fields is BARE else "archive")

    undone = await undo(connection, queue, report.redrive, why="it was open after all")
    undone.raise_for_failures()
    assert list(undone.parked) == [1]
    (after,) = await parked_letters(connection, queue)
    assert identity(after) == identity(before)
    assert after.parked == "it was open after all"
    assert [found.action for found in await letter_records(connection, queue)] == ["discarded", "parked"]

    # Nothing runs until somebody redrives it; then it runs once, as the same job.
    assert not await process_all(connection, queue, within=0.3)
    await redrive_dead_letters(connection, queue, RedriveRequest(Selection(parked=True)))
    (job,) = await stream_messages(connection, queue.name)
    assert (job.subject, job.data, job.header("Job-Id")) == (before.subject, before.body, "order-7")
    assert [value for key, value in job.headers if key == "X-Two"] == ["1", "2"]
    assert await stored_count(connection, queue.name) == 1


async def test_a_letter_that_was_terminated_and_one_that_was_parked_are_discarded_and_come_back(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=SHORT)
    await make_terminated_letters(connection, queue, ["terminated", "parked"])
    await redrive_dead_letters(connection, queue, request_for([2], max_redrives=0, why="look at it"))
    found = await find_dead_letters(connection, queue)
    before = [*found.letters, *await parked_letters(connection, queue)]
    first = await discard(connection, queue, request_for([1], discard=True))
    selection = Selection(sequences=frozenset({2}), parked=True)
    second = await discard(connection, queue, RedriveRequest(selection, discard=True))
    assert await stored_count(connection, f"{name}-dead") == 0
    for report in (first, second):
        (await undo(connection, queue, report.redrive)).raise_for_failures()
    after = await parked_letters(connection, queue)
    assert list(map(identity, after)) == list(map(identity, before))


async def test_a_letter_that_came_back_is_discarded_and_comes_back_once_more(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, dead=["a"], consumer=SHORT)
    first = await discard(connection, queue)
    await undo(connection, queue, first.redrive)
    second = await discard(connection, queue, RedriveRequest(Selection(parked=True), discard=True))
    assert (await undo(connection, queue, first.redrive)).done == 0
    assert (await undo(connection, queue, second.redrive)).done == 1
    actions = [record.action for record in await letter_records(connection, queue)]
    assert actions == ["discarded", "parked", "discarded", "parked"]


async def test_a_dry_run_says_what_would_be_dropped_and_changes_nothing(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, dead=["a", "b"], consumer=SHORT)
    await find_dead_letters(connection, queue)
    before = await streams(connection, queue)
    found = await preview(connection, queue, DISCARD)
    assert (found.discarded, found.without_copy, found.redriven, found.failures) == (2, 0, 0, 0)
    assert len(found.groups.largest()) == 1
    assert await streams(connection, queue) == before
    report = await discard(connection, queue, count=2)
    before = await streams(connection, queue)
    found = await preview(connection, queue, RedriveRequest(undo=report.redrive))
    assert (found.parked, found.discarded, found.failures) == (2, 0, 0)
    assert await streams(connection, queue) == before


async def test_a_selection_is_discarded_and_the_others_stay(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, dead=["a", "b", "c"], consumer=SHORT)
    report = await discard(connection, queue, request_for([1, 3], discard=True, rate=100), count=2)
    assert [letter.sequence for letter in (await find_dead_letters(connection, queue)).letters] == [2]
    undone = await undo(connection, queue, report.redrive, selection=Selection(sequences=frozenset({3})))
    assert list(undone.parked) == [3]
    assert list((await undo(connection, queue, report.redrive)).parked) == [1]


async def test_a_letter_without_a_copy_stays_unless_the_request_says_that_it_may_go(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, audit={"name": f"{name}-audit", "max_msg_size": 4_096}, **BARE)
    await make_dead_letters(connection, queue, ["small", "x" * 5_000])
    found = await preview(connection, queue, DISCARD)
    assert (found.discarded, found.failures) == (1, 1)
    assert "can't be undone" in found.failed[2]
    report = await redrive_dead_letters(connection, queue, DISCARD)
    assert list(report.discarded) == [1]
    assert "expected a copy of dead letter 2" in report.failed[2]
    assert await stored_count(connection, queue.name) == 1

    final = RedriveRequest(discard=True, without_copy=True)
    found = await preview(connection, queue, final)
    assert (found.discarded, found.without_copy, found.failures) == (1, 1, 0)
    report = await discard(connection, queue, final)
    undone = await undo(connection, queue, report.redrive)
    assert undone.failed == {2: "it was discarded without a copy, so nothing brings it back"}


async def test_a_dead_letter_queue_that_takes_no_letters_back_is_named_before_anything_is_dropped(
    connection: NatsPyConnection, name: str
) -> None:
    letters = {"name": f"{name}-dead", "subjects": [f"{MAX_DELIVERIES}.{name}.*"]}
    queue = await make_queue(connection, name, dead_letters=letters, consumer=SHORT)
    await make_dead_letters(connection, queue, ["a"])
    report = await redrive_dead_letters(connection, queue, DISCARD)
    assert f"expected {name}-dead to capture parked.{name}.>" in report.failed[1]
    assert await stored_count(connection, queue.name) == 1
    await discard(connection, queue, RedriveRequest(discard=True, without_copy=True))
    assert await stored_count(connection, queue.name) == 0


async def test_an_undo_after_the_archive_dropped_the_copy_says_so(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, dead=["a", "b"], consumer=SHORT)
    report = await discard(connection, queue, count=2)
    await connection.api(f"STREAM.PURGE.{name}-archive", {"seq": 2})
    found = await preview(connection, queue, RedriveRequest(undo=report.redrive))
    assert (found.parked, found.failures) == (1, 1)
    undone = await undo(connection, queue, report.redrive)
    assert list(undone.parked) == [2]
    assert undone.failed == {
        1: f"expected {name}-archive to store its copy, found none: copies that reach its limits are dropped"
    }
    assert undone.state == "failed"


async def test_an_undo_twice_brings_each_letter_back_once(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, dead=["a"], consumer=SHORT)
    report = await discard(connection, queue)
    first, second = await asyncio.gather(*(undo(connection, queue, report.redrive) for _ in range(2)))
    assert first.done + second.done == 1
    assert len(await parked_letters(connection, queue)) == 1
    with pytest.raises(DeadLetterGoneError, match=r"1: it was parked last"):
        await undo(connection, queue, report.redrive, selection=Selection(sequences=frozenset({1})))
    await redrive_dead_letters(connection, queue, RedriveRequest(Selection(parked=True)))
    assert (await undo(connection, queue, report.redrive)).done == 0
    assert await stored_count(connection, queue.name) == 1


async def test_an_undo_needs_the_id_of_a_discard(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, dead=["a", "b"], consumer=SHORT)
    parked = await redrive_dead_letters(connection, queue, request_for([1], max_redrives=0))
    for redrive, why in (("20260101T000000-0", "no redrive of that id"), (parked.redrive, "discarded nothing")):
        with pytest.raises(RedriveRequestError, match=why):
            await undo(connection, queue, redrive)
    report = await discard(connection, queue)
    with pytest.raises(DeadLetterGoneError, match=r"1: it was parked last; 9: the audit has no record of it"):
        await undo(connection, queue, report.redrive, selection=Selection(sequences=frozenset({1, 2, 9})))
    assert [letter.sequence for letter in await parked_letters(connection, queue)] == [1]


async def test_two_discards_at_once_drop_each_letter_once(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, dead=map(str, range(20)), consumer=SHORT)
    reports = await asyncio.gather(*(redrive_dead_letters(connection, queue, DISCARD) for _ in range(2)))
    assert sorted(len(report.discarded) for report in reports) == [0, 20]
    assert len(await letter_records(connection, queue)) == 20


async def test_a_discard_beside_a_redrive_leaves_each_letter_with_one_end(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, dead=map(str, range(20)), consumer=SHORT)
    requests = [RedriveRequest(rate=100), RedriveRequest(discard=True, rate=100)]
    redriven, discarded = await asyncio.gather(*(redrive_dead_letters(connection, queue, each) for each in requests))
    assert len(redriven.redriven) + len(discarded.discarded) == 20
    assert sum((await process_all(connection, queue)).values()) == len(redriven.redriven)


async def test_a_job_that_somebody_published_again_runs_once_until_a_person_redrives_the_letter(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, dead=["a"], consumer=SHORT)
    report = await discard(connection, queue)
    await publish_jobs(connection, queue, ["a"])
    await undo(connection, queue, report.redrive)
    # Nor does a scheduled redrive bring it back.
    assert (await redrive_dead_letters(connection, queue)).done == 0
    assert (await process_all(connection, queue)) == {"a": 1}
    assert [letter.body for letter in await parked_letters(connection, queue)] == [b"a"]


async def test_a_wait_an_account_and_the_reports_of_jobs_say_that_a_job_was_discarded(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=SHORT)
    cursor = await take_cursor(connection, queue)
    waiting = asyncio.create_task(wait(connection, cursor, [1, 2], policy=WaitPolicy(max_dead=None)))
    await make_dead_letters(connection, queue, ["a"])
    await make_terminated_letters(connection, queue, ["b"])
    await discard(connection, queue, count=2)
    late = await asyncio.wait_for(wait(connection, cursor, [1, 2], policy=WaitPolicy(max_dead=None)), 10)
    told = "it died and was discarded: orders of a shop that closed"
    assert late.dead == {1: told, 2: told}
    assert (await asyncio.wait_for(waiting, 10)).dead.keys() == {1, 2}
    document = json.loads(json.dumps(late.as_json()))
    reports = [report async for report in read_job_reports(connection, cursor, document)]
    assert [(report.state, report.error_message) for report in reports] == [("dead", told)] * 2
    account = await account_for_jobs(connection, queue)
    assert (account.jobs, account.ended, account.unaccounted_count, account.unknown_count) == (2, 2, 0, 0)
    assert account.discarded == 2
    assert "2 of them discarded" in str(account)


async def test_nobody_brings_a_discarded_letter_back_by_its_sequence(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer=SHORT)
    await make_terminated_letters(connection, queue, ["a"])
    await discard(connection, queue)
    for selection in (Selection(sequences=frozenset({1})), Selection(unaccounted=True, sequences=frozenset({1}))):
        with pytest.raises(DeadLetterGoneError):
            await redrive_dead_letters(connection, queue, RedriveRequest(selection))
    # The server may announce a death once more after it has restarted.
    advisory = json.dumps({"type": "io.nats.jetstream.advisory.v1.terminated", "id": "x", "stream": name})
    with suppress(Exception):
        await connection.client.publish(f"dead.{name}.{CONSUMER}.1", advisory.encode())
    assert (await redrive_dead_letters(connection, queue)).done == 0


@pytest.mark.slow
@pytest.mark.parametrize("has_copy", [False, True], ids=["terminated", "with a worker's copy"])
async def test_a_discarded_letter_whose_death_a_killed_server_announces_again_stays_discarded(
    own_nats: NatsServer, name: str, *, has_copy: bool
) -> None:
    async with connect(connection_settings({"servers": (own_nats.url,)})) as connection:
        queue = await make_queue(connection, name, consumer=SHORT)
        await publish_jobs(connection, queue, ["a"])
        (message,) = await pull_jobs(connection, queue, 1)
        if has_copy:
            headers = {"Dead-Letter-Subject": f"{name}.jobs.plain", "Dead-Letter-Reason": "terminated"}
            await connection.client.jetstream().publish(copy_subject(name, CONSUMER, 1), b"a", headers=headers)
        await connection.request(message.reply, b"+TERM broken")
        await until_stored(connection, f"{name}-dead", 1 + has_copy)
        report = await discard(connection, queue)
        await asyncio.sleep(0.3)
        own_nats.kill()
    own_nats.start()
    async with connect(connection_settings({"servers": (own_nats.url,)})) as connection:
        advisory = {
            "type": "io.nats.jetstream.advisory.v1.max_deliver",
            "timestamp": datetime.now(UTC).isoformat(),
            "id": "again",
            "stream": name,
            "consumer": CONSUMER,
            "stream_seq": 1,
            "deliveries": 1,
        }
        await connection.client.publish(f"{MAX_DELIVERIES}.{name}.{CONSUMER}", json.dumps(advisory).encode())
        await until_stored(connection, f"{name}-dead", 1)
        found = await find_dead_letters(connection, queue)
        assert [(job.sequence, job.status) for job in found.dismissed] == [(1, Status.DISCARDED)]
        assert list((await undo(connection, queue, report.redrive)).parked) == [1]


@pytest.mark.since_server("2.14", "the reset of a consumer")
async def test_a_redrive_in_place_does_not_run_a_letter_whose_discard_was_cut_off(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name, dead=["a", "b"], consumer=SHORT)

    async def cut_off(*_: object) -> None:
        raise asyncio.CancelledError

    with monkeypatch.context() as patch:
        patch.setattr(seams.STORED_LETTERS_REMOVE_ORIGINALS, cut_off)
        with suppress(asyncio.CancelledError):
            await redrive_dead_letters(connection, queue, request_for([1], discard=True))
    assert await stored_count(connection, queue.name) == 2
    assert [letter.sequence for letter in (await find_dead_letters(connection, queue)).letters] == [2]
    await redrive_dead_letters(connection, queue, RedriveRequest(protocol=Protocol.IN_PLACE))
    assert await process_all(connection, queue) == {"b": 1}


@pytest.mark.parametrize("is_handled", [False, True], ids=["held by this redrive", "acknowledged by the handler"])
async def test_beside_a_handler_of_the_dead_letter_queue_a_letter_has_one_end(
    connection: NatsPyConnection, name: str, *, is_handled: bool
) -> None:
    letters = {
        "name": f"{name}-dead",
        "subjects": [f"{MAX_DELIVERIES}.{name}.*", f"parked.{name}.>"],
        "retention": "workqueue",
        "deny_delete": True,
    }
    queue = await make_queue(connection, name, dead_letters=letters, consumer=SHORT)
    handler = {
        "durable_name": "handler",
        "ack_policy": "explicit",
        "filter_subject": f"{MAX_DELIVERIES}.{name}.*",
        "ack_wait": 1_000_000_000,
    }
    await create_or_update_consumer(connection.client, f"{name}-dead", handler)
    await make_dead_letters(connection, queue, ["a"])
    if is_handled:
        async for message in pull(connection.client, f"{name}-dead", "handler", batch=1, expires=1):
            await acknowledge(connection.client, message)
            break
        await until_stored(connection, f"{name}-dead", 0)
        assert (await redrive_dead_letters(connection, queue, DISCARD)).done == 0
        return
    report = await discard(connection, queue)
    assert [message async for message in pull(connection.client, f"{name}-dead", "handler", batch=1, expires=0.3)] == []
    (await undo(connection, queue, report.redrive)).raise_for_failures()
    assert [letter.body for letter in await parked_letters(connection, queue)] == [b"a"]


async def test_undeliverable_jobs_are_discarded_by_their_reason(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(
        connection,
        name,
        subjects=[f"{name}.jobs.>", f"{name}.other"],
        consumer=SHORT | {"filter_subject": f"{name}.jobs.>"},
    )
    await connection.client.jetstream().publish(f"{name}.other", b"x")
    selection = Selection(reasons=frozenset({Reason.UNDELIVERABLE}))
    report = await discard(connection, queue, RedriveRequest(selection, discard=True))
    assert await stored_count(connection, queue.name) == 0
    (await undo(connection, queue, report.redrive)).raise_for_failures()
    parked = Selection(parked=True, reasons=frozenset({Reason.UNDELIVERABLE}))
    assert [letter.body for letter in (await find_dead_letters(connection, queue, parked)).letters] == [b"x"]


async def test_a_paused_discard_goes_on_and_an_aborted_one_ends(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, dead=map(str, range(10)), consumer=SHORT)
    request = RedriveRequest(discard=True, rate=10, run="tidy")
    stops = iter([False, False, True])
    first = await redrive_dead_letters(connection, queue, request, stopped=lambda: next(stops, True))
    assert first.cancelled
    assert 0 < len(first.discarded) < 10
    second = await redrive_dead_letters(connection, queue, RedriveRequest(discard=True, run="tidy"))
    assert (second.redrive, len(second.discarded), second.resumed) == (first.redrive, 10, len(first.discarded))
    assert len((await undo(connection, queue, first.redrive)).parked) == 10


async def test_records_of_an_audit_from_before_are_read(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, dead=["a", "b"], consumer=SHORT)
    await redrive_dead_letters(connection, queue, request_for([1], max_redrives=0))
    before = (await letter_records(connection, queue))[0]
    assert before.kept is None
    report = await discard(connection, queue)
    # A record that an earlier version would have written has no copy to bring back.
    _, record = await letter_records(connection, queue)
    body = record.model_copy(update={"kept": None}).model_dump_json(exclude_none=True).encode()
    await connection.client.jetstream().publish(f"audit.{name}.letters.2", body)
    assert (await find_dead_letters(connection, queue)).letters == ()
    assert (await undo(connection, queue, report.redrive)).done == 0


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"discard": True, "max_redrives": 0}, "max_redrives"),
        ({"discard": True, "subject": "a.b"}, "subject"),
        ({"discard": True, "waves": [1, "rest"]}, "waves"),
        ({"discard": True, "order_key": "subject:1"}, "order_key"),
        ({"discard": True, "patch": [{"op": "remove", "path": "/a"}]}, "patch"),
        ({"discard": True, "protocol": "in_place"}, "protocol"),
        ({"discard": True, "undo": "x"}, "discard"),
        ({"discard": "yes"}, 'True, False or "by_policy" as discard'),
        ({"without_copy": True}, "expected discard beside without_copy"),
        ({"undo": "x", "selection": Selection(consumer="a")}, "nothing but sequences"),
    ],
)
def test_what_a_discard_can_not_have_is_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(RedriveRequestError, match=problem):
        RedriveRequest(**fields)


async def test_a_discard_waits_for_the_lease_that_another_redrive_holds(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name, dead=map(str, range(4)), consumer=SHORT)
    began = asyncio.Event()
    slow = RedriveRequest(request_for([1, 2]).selection, rate=4)
    redriving = asyncio.create_task(redrive_dead_letters(connection, queue, slow, progress=lambda _: began.set()))
    async with connect(settings) as other:
        await eventually(lambda: stored_count(connection, f"{name}-audit"))
        report = await redrive_dead_letters(other, queue, request_for([3, 4], discard=True))
    assert list(report.discarded) == [3, 4]
    assert len((await redriving).redriven) == 2
