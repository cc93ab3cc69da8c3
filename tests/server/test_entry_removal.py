from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    RedriveRequest,
    Selection,
    Status,
    connect,
    connection_settings,
    find_dead_letters,
    get_message,
    provision,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.contract import MAX_DELIVERIES
from airflow_provider_jetstream.jetstream.errors import DeadlineError, TransientError
from testbed.face import consumer_info, remove_entries, summarise_dead_letters
from testbed.queues import make_dead_letters, make_queue, process_all, small_queue, stored_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

HANDLER: dict[str, Any] = {"name": "unprocessed_order_handler", "max_deliver": 2, "backoff": ["5s"]}


def letters(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": f"{name}-dead", **fields}


def work_queue_letters(name: str, *consumers: dict[str, Any]) -> dict[str, Any]:
    return letters(name, retention="workqueue", deny_delete=True, consumers=list(consumers))


async def consumers(connection: NatsPyConnection, stream: str) -> list[str]:
    return (await connection.api(f"CONSUMER.NAMES.{stream}")).get("consumers") or []


def only(*sequences: int) -> RedriveRequest:
    return RedriveRequest(selection=Selection(sequences=frozenset(sequences)))


async def left(connection: NatsPyConnection, queue: WorkQueue, *entries: int) -> list[int]:
    return [entry for entry in entries if await get_message(connection, f"{queue.name}-dead", entry) is not None]


@pytest.mark.parametrize("retention", ["limits", "workqueue", "interest"])
async def test_entries_are_deleted_where_that_is_allowed(
    connection: NatsPyConnection, name: str, retention: str
) -> None:
    # Interest retention stores only messages that a consumer matches.
    fields = {"consumers": [HANDLER]} if retention == "interest" else {}
    queue = await make_queue(connection, name, dead_letters=letters(name, retention=retention, **fields))
    await make_dead_letters(connection, queue, "abc")
    report = await redrive_dead_letters(connection, queue, only(1, 3))
    assert report.entries_left == 0
    assert await left(connection, queue, 1, 2, 3) == [2]


async def test_entries_of_letters_that_were_not_redriven_stay_however_many_are_purged(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, dead=[str(number) for number in range(1, 161)])
    # The first hundred entries go at once, then every tenth stays between finished ones.
    staying = [sequence for sequence in range(101, 161) if sequence % 10 == 0]
    report = await redrive_dead_letters(connection, queue, only(*(set(range(1, 161)) - set(staying))))
    assert (report.redriven.keys() & set(staying), report.entries_left) == (set(), 0)
    assert await left(connection, queue, *range(1, 161)) == staying
    assert [letter.sequence for letter in (await find_dead_letters(connection, queue)).letters] == staying


async def test_repeated_entries_of_one_letter_are_all_removed(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, dead=["a"])
    advisory = await get_message(connection, f"{name}-dead", 1)
    assert advisory is not None
    await connection.client.jetstream().publish(advisory.subject, advisory.data)
    assert (await redrive_dead_letters(connection, queue)).entries_left == 0
    assert await stored_count(connection, f"{name}-dead") == 0


async def test_entries_under_deny_delete_are_acknowledged_through_the_consumer_that_is_there(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, deny_delete=True, dead_letters=work_queue_letters(name, HANDLER))
    await make_dead_letters(connection, queue, "abcd")
    report = await redrive_dead_letters(connection, queue, only(1, 3))
    assert report.entries_left == 0
    assert await left(connection, queue, 1, 2, 3, 4) == [2, 4]
    assert await consumers(connection, f"{name}-dead") == ["unprocessed_order_handler"]
    # The entry behind the last requested one hasn't been delivered.
    assert (await consumer_info(connection, f"{name}-dead", HANDLER["name"]))["delivered"]["stream_seq"] == 3
    report = await redrive_dead_letters(connection, queue)
    assert (report.entries_left, await stored_count(connection, f"{name}-dead")) == (0, 0)
    assert await process_all(connection, queue) == {"a": 1, "b": 1, "c": 1, "d": 1}


@pytest.mark.slow
async def test_entries_under_deny_delete_are_acknowledged_through_a_temporary_consumer(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, dead_letters=work_queue_letters(name), dead="ab")
    assert (await redrive_dead_letters(connection, queue)).entries_left == 0
    assert await stored_count(connection, f"{name}-dead") == 0
    (own,) = await consumers(connection, f"{name}-dead")
    config = (await consumer_info(connection, f"{name}-dead", own))["config"]
    assert (own, config["inactive_threshold"]) == (f"redrive-{name}", 300 * 10**9)
    # The next redrive uses the same consumer.
    await process_all(connection, queue)
    await make_dead_letters(connection, queue, ["c"])
    assert (await redrive_dead_letters(connection, queue)).entries_left == 0
    assert await consumers(connection, f"{name}-dead") == [own]


async def test_a_consumer_of_other_entries_is_left_alone(connection: NatsPyConnection, name: str) -> None:
    terminated = {
        "name": "a",
        "max_deliver": 2,
        "filter_subject": f"$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.{name}.*",
    }
    queue = await make_queue(connection, name, dead_letters=work_queue_letters(name, terminated), dead="ab")
    assert (await redrive_dead_letters(connection, queue)).entries_left == 0
    assert await stored_count(connection, f"{name}-dead") == 0
    assert (await consumer_info(connection, f"{name}-dead", "a"))["delivered"]["consumer_seq"] == 0


@pytest.mark.slow
async def test_queues_that_share_a_dead_letter_queue_each_remove_their_own(
    connection: NatsPyConnection, name: str
) -> None:
    subjects = [f"{MAX_DELIVERIES}.{name}.*", f"{MAX_DELIVERIES}.{name}x.*"]
    shared = work_queue_letters(name) | {"subjects": subjects}
    ours = await make_queue(connection, name, dead_letters=shared)
    theirs = await make_queue(connection, f"{name}x", dead_letters=shared)
    await make_dead_letters(connection, ours, "ab")
    await make_dead_letters(connection, theirs, "cd")
    assert (await redrive_dead_letters(connection, ours)).entries_left == 0
    assert await left(connection, ours, 1, 2, 3, 4) == [3, 4]
    assert (await redrive_dead_letters(connection, theirs)).entries_left == 0
    assert await stored_count(connection, f"{name}-dead") == 0


@pytest.mark.slow
async def test_more_entries_than_the_consumer_allows_unacknowledged_are_removed_however_long_it_takes(
    connection: NatsPyConnection, name: str
) -> None:
    handler = HANDLER | {"max_ack_pending": 2}
    queue = await make_queue(connection, name, dead_letters=work_queue_letters(name, handler))
    sequences = await make_dead_letters(connection, queue, map(str, range(60)))
    # Thirty rounds together take longer than the timeout, and none of them alone does.
    connection.timeout = 1
    async with asyncio.timeout(15):
        assert await remove_entries(connection, queue, sequences) == 0
    assert await stored_count(connection, f"{name}-dead") == 0


@pytest.mark.slow
async def test_entries_that_the_consumer_never_delivers_are_counted_after_one_time_limit(
    own_nats: NatsServer, name: str
) -> None:
    async with connect(connection_settings({"servers": (own_nats.url,), "timeout": 1})) as connection:
        handler = HANDLER | {"max_ack_pending": 2}
        queue = await make_queue(connection, name, dead_letters=work_queue_letters(name, handler))
        sequences = await make_dead_letters(connection, queue, "abcdefgh")
        # The first two aren't requested, so they stay unacknowledged, and the server delivers nothing behind them.
        async with asyncio.timeout(4):
            assert await remove_entries(connection, queue, sequences[2:]) == 6


async def test_entries_that_have_to_stay_never_become_dead_letters_again(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, dead_letters=letters(name, deny_delete=True), dead="ab")
    report = await redrive_dead_letters(connection, queue)
    assert (dict(report.redriven), report.entries_left) == ({1: 3, 2: 4}, 2)
    assert await left(connection, queue, 1, 2) == [1, 2]
    findings = await find_dead_letters(connection, queue)
    assert findings.letters == ()
    assert [job.status for job in findings.dismissed] == [Status.REDRIVEN, Status.REDRIVEN]
    again = await redrive_dead_letters(connection, queue)
    assert (dict(again.redriven), list(again.gone), again.entries_left) == ({}, [1, 2], 2)
    assert await process_all(connection, queue) == {"a": 1, "b": 1}


async def test_the_report_is_returned_when_the_entries_cannot_be_removed(
    connection: NatsPyConnection, name: str
) -> None:
    # A consumer of some of the advisories keeps the server from accepting one of them all.
    narrow = HANDLER | {"filter_subject": f"{MAX_DELIVERIES}.{name}.other"}
    queue = await make_queue(connection, name, dead_letters=work_queue_letters(name, narrow), dead="ab")
    report = await redrive_dead_letters(connection, queue)
    assert (dict(report.redriven), report.entries_left) == ({1: 3, 2: 4}, 2)
    assert (await redrive_dead_letters(connection, queue)).redriven == {}


async def test_a_missing_dead_letter_queue_is_no_error_since_the_letters_are_redriven(
    connection: NatsPyConnection, name: str
) -> None:
    assert await remove_entries(connection, small_queue(name), [1, 2, 3]) == 3
    assert await remove_entries(connection, small_queue(name), []) == 0


async def test_entries_that_are_gone_already_count_as_removed(connection: NatsPyConnection, name: str) -> None:
    for suffix, fields in (("a", letters(f"{name}a")), ("b", work_queue_letters(f"{name}b", HANDLER))):
        queue = small_queue(f"{name}{suffix}", dead_letters=fields)
        await provision(connection, queue)
        sequences = await make_dead_letters(connection, queue, "ab")
        assert await remove_entries(connection, queue, sequences) == 0
        async with asyncio.timeout(2):
            assert await remove_entries(connection, queue, sequences) == 0


async def test_advisories_and_copies_under_deny_delete_are_acknowledged_through_the_consumers_that_match_them(
    connection: NatsPyConnection, name: str
) -> None:
    handler = HANDLER | {"filter_subject": f"{MAX_DELIVERIES}.{name}.*"}
    queue = await make_queue(connection, name, dead_letters=work_queue_letters(name, handler), dead="ab")
    assert (
        (await summarise_dead_letters(connection, queue)).preserved,
        await stored_count(connection, f"{name}-dead"),
    ) == (2, 4)
    letters = (await find_dead_letters(connection, queue)).letters
    assert [letter.entries for letter in letters] == [(1, 3), (2, 4)]
    assert await remove_entries(connection, queue, [1, 2, 3, 4]) == 0
    assert await stored_count(connection, f"{name}-dead") == 0
    assert sorted(await consumers(connection, f"{name}-dead")) == [f"redrive-{name}", HANDLER["name"]]


@pytest.mark.parametrize(("count", "requests"), [(63, 64), (64, 3)])
async def test_so_many_entries_that_this_takes_fewer_requests_are_purged(
    connection: NatsPyConnection, name: str, count: int, requests: int
) -> None:
    queue = await make_queue(connection, name)
    entries = await make_dead_letters(connection, queue, map(str, range(count)))
    before = connection.client.stats["out_msgs"]
    assert await remove_entries(connection, queue, entries) == 0
    # One reads the configuration; fewer are deleted without a look at what is stored.
    assert connection.client.stats["out_msgs"] - before == requests
    assert await stored_count(connection, f"{name}-dead") == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["deleted", "acknowledged"])
async def test_a_page_of_entries_is_removed_together(connection: NatsPyConnection, name: str, kind: str) -> None:
    fields = letters(name) if kind == "deleted" else work_queue_letters(name)
    queue = await make_queue(connection, name, dead_letters=fields, consumer={"max_ack_pending": -1})
    sequences = await make_dead_letters(connection, queue, map(str, range(1_000)))
    before = connection.client.stats["out_msgs"]
    started = time.monotonic()
    assert await remove_entries(connection, queue, sequences) == 0
    taken = time.monotonic() - started
    requests = connection.client.stats["out_msgs"] - before
    print(f"1000 entries {kind} in {taken:.2f} s with {requests} requests")
    assert await stored_count(connection, f"{name}-dead") == 0


@pytest.mark.parametrize("arrives", ["no", "yes"])
async def test_an_entry_whose_delete_got_no_answer_is_looked_at(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch, arrives: str
) -> None:
    queue = await make_queue(connection, name, dead="abc")
    request_many = connection.request_many

    async def lose(messages: Sequence[tuple[str, bytes]]) -> list[bytes | TransientError]:
        if arrives == "yes":
            await request_many(messages)
        return [DeadlineError("lost") for _ in messages]

    monkeypatch.setattr(connection, "request_many", lose)
    assert await remove_entries(connection, queue, [1, 3]) == (0 if arrives == "yes" else 2)
    assert await left(connection, queue, 1, 2, 3) == ([2] if arrives == "yes" else [1, 2, 3])
