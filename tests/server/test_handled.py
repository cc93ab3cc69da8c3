"""Letters that a handler of the dead letter queue has handled: a bare consumer that knows nothing of this package."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    Protocol,
    RedriveRequest,
    Selection,
    Status,
    discover_queue,
    find_dead_letters,
    plan,
    provision,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.contract import MAX_DELIVERIES, TERMINATED
from airflow_provider_jetstream.jetstream.errors import RedriveRequestError
from testbed.face import Scan, summarise_dead_letters
from testbed.foreign_programs import create_or_update_consumer, pull
from testbed.queues import (
    CONSUMER,
    eventually,
    make_dead_letters,
    make_queue,
    process_all,
    publish_jobs,
    pull_jobs,
    small_queue,
    stored_count,
    until_stored,
)

if TYPE_CHECKING:
    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection

HANDLER = {"durable_name": "unprocessed_order_handler", "backoff": [5_000_000_000], "max_deliver": 2}


def letters(name: str, **fields: Any) -> dict[str, Any]:
    """Return a dead letter queue as the orders document declares it."""
    subjects = [f"{MAX_DELIVERIES}.{name}.*"]
    limits = {"retention": "workqueue", "discard": "new", "max_bytes": "256MB", "deny_delete": True}
    return {"name": f"{name}-dead", "subjects": subjects, **limits, **fields}


async def orders(connection: NatsPyConnection, name: str, **fields: Any) -> WorkQueue:
    declared: dict[str, Any] = {"discard": "new", "deny_delete": True, "dead_letters": letters(name)}
    return await make_queue(connection, name, **declared | fields)


async def handle(
    connection: NatsPyConnection, queue: WorkQueue, count: int, answer: bytes = b"+ACK", **config: Any
) -> list[int]:
    """Do what the document's handler does: read so many entries, and acknowledge each; return the jobs' sequences."""
    client, stream = connection.client, f"{queue.name}-dead"
    await create_or_update_consumer(client, stream, HANDLER | config)
    handled: list[int] = []
    async for message in pull(client, stream, str(HANDLER["durable_name"]), batch=count, expires=2):
        copied = (message.headers or {}).get("Dead-Letter-Sequence")
        handled.append(int(copied or json.loads(message.data)["stream_seq"]))
        # With an answer of the server: an acknowledgement takes effect a moment after it is received.
        await client.request(message.reply, answer, timeout=5)
    return handled


async def statuses(connection: NatsPyConnection, queue: WorkQueue) -> tuple[list[int], dict[int, Status]]:
    """Return which jobs are dead letters, and the status of the others."""
    found = await find_dead_letters(connection, queue)
    return [letter.sequence for letter in found.letters], {job.sequence: job.status for job in found.dismissed}


@pytest.mark.slow
async def test_a_handler_that_only_acknowledges_has_handled_its_letters(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await orders(connection, name)
    await make_dead_letters(connection, queue, "abcde")
    assert await handle(connection, queue, 3) == [1, 2, 3]
    # As in the document: the entries are gone, the jobs stay stored.
    assert (await stored_count(connection, f"{name}-dead"), await stored_count(connection, name)) == (2, 5)
    handled = dict.fromkeys([1, 2, 3], Status.HANDLED)
    assert await statuses(connection, queue) == ([4, 5], handled)
    scan = await Scan.begin(connection, queue)
    assert (list(scan.reconciliation.orphans), scan.reconciliation.uncertain) == ([], 0)
    summary = await summarise_dead_letters(connection, queue)
    assert (summary.dead, summary.dismissed) == (2, {"handled": 3})
    report = await redrive_dead_letters(connection, queue)
    assert (set(report.redriven), list(report.gone), report.failed) == ({4, 5}, [1, 2, 3], {})
    assert await process_all(connection, queue) == {"d": 1, "e": 1}
    # Only the handler's word would have the originals removed; a purge looks like acknowledgements.
    assert await stored_count(connection, name) == 3
    assert await statuses(connection, queue) == ([], handled)


@pytest.mark.slow
async def test_a_handler_that_ends_an_entry_otherwise_has_not_handled_it(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await orders(connection, name)
    await make_dead_letters(connection, queue, "abc")
    assert await handle(connection, queue, 1, b"+TERM can't read it") == [1]
    assert await handle(connection, queue, 1) == [2]
    assert await stored_count(connection, f"{name}-dead") == 1
    assert await statuses(connection, queue) == ([1, 3], {2: Status.HANDLED})


@pytest.mark.slow
async def test_a_dead_letter_queue_that_was_purged_has_handled_nothing(connection: NatsPyConnection, name: str) -> None:
    queue = await orders(connection, name)
    await make_dead_letters(connection, queue, "abc")
    await create_or_update_consumer(connection.client, f"{name}-dead", HANDLER)
    await connection.api(f"STREAM.PURGE.{name}-dead")
    # The purge has moved the consumer past entries that it never delivered.
    found = await find_dead_letters(connection, queue)
    assert [letter.sequence for letter in found.letters] == [1, 2, 3]
    assert (await redrive_dead_letters(connection, queue)).redriven.keys() == {1, 2, 3}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limits", "handled"),
    [
        ({"discard": "old", "max_msgs": 10}, []),
        ({"discard": "new", "max_msgs": 10}, [1]),
        ({"discard": "old", "max_msgs": -1, "max_bytes": -1}, [1]),
        ({"max_msgs_per_subject": 10}, []),
        ({"max_age": "1h"}, [1]),
        ({"max_age": "1s", "duplicate_window": "1s"}, []),
    ],
)
async def test_what_a_limit_may_have_removed_does_not_count_as_handled(
    connection: NatsPyConnection, name: str, limits: dict[str, Any], handled: list[int]
) -> None:
    queue = await orders(connection, name, dead_letters=letters(name, **limits))
    await make_dead_letters(connection, queue, "a")
    await handle(connection, queue, 1)
    if limits.get("max_age") == "1s":
        await asyncio.sleep(1.0)
    assert await statuses(connection, queue) == (
        [sequence for sequence in [1] if sequence not in handled],
        dict.fromkeys(handled, Status.HANDLED),
    )


async def test_without_a_consumer_of_the_dead_letter_queue_nothing_is_handled(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await orders(connection, name)
    await make_dead_letters(connection, queue, "ab")
    await handle(connection, queue, 1)
    await connection.api(f"CONSUMER.DELETE.{name}-dead.{HANDLER['durable_name']}")
    assert await statuses(connection, queue) == ([1, 2], {})
    # One that was created later can't have acknowledged more entries than it was delivered.
    await create_or_update_consumer(connection.client, f"{name}-dead", HANDLER)
    assert await statuses(connection, queue) == ([1, 2], {})


@pytest.mark.slow
@pytest.mark.parametrize("retention", ["limits", "workqueue"])
async def test_a_handler_can_report_what_it_has_handled(
    connection: NatsPyConnection, name: str, retention: str
) -> None:
    queue = await orders(connection, name, dead_letters=letters(name, retention=retention, deny_delete=False))
    await make_dead_letters(connection, queue, "abc")
    await connection.client.jetstream().publish(f"handled.{name}.2", b'{"by": "ann"}')
    if retention == "workqueue":
        await handle(connection, queue, 1)
    handled = [1, 2] if retention == "workqueue" else [2]
    left = [sequence for sequence in (1, 2, 3) if sequence not in handled]
    assert await statuses(connection, queue) == (left, dict.fromkeys(handled, Status.HANDLED))
    report = await redrive_dead_letters(connection, queue)
    assert (set(report.redriven), list(report.gone)) == (set(left), handled)
    # A reported job is removed with its entries; of the other one only the entry is gone.
    assert await stored_count(connection, name) == len(left) + (retention == "workqueue")
    assert await stored_count(connection, f"{name}-dead") == 0
    assert (await process_all(connection, queue)).total() == len(left)


@pytest.mark.slow
async def test_a_report_counts_only_after_the_job_was_stored_and_dead(connection: NatsPyConnection, name: str) -> None:
    queue = await orders(connection, name)
    jetstream = connection.client.jetstream()
    # Anybody who may publish on the subject could say so of jobs to come.
    await jetstream.publish(f"handled.{name}.1", b"{}")
    await make_dead_letters(connection, queue, "a")
    assert await statuses(connection, queue) == ([1], {})
    await publish_jobs(connection, queue, "b")
    await jetstream.publish(f"handled.{name}.2", b"{}")
    await pull_jobs(connection, queue, 1)
    report = await redrive_dead_letters(connection, queue)
    assert report.redriven.keys() == {1}
    assert await stored_count(connection, name) == 2


@pytest.mark.slow
async def test_a_job_that_dies_again_after_its_redrive_is_a_letter_again(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await orders(connection, name, dead_letters=letters(name, retention="limits", deny_delete=False))
    await make_dead_letters(connection, queue, "a")
    if connection.api_level < 4:
        pytest.skip("this server can't requeue in place")
    await redrive_dead_letters(connection, queue, RedriveRequest(protocol=Protocol.IN_PLACE))
    await connection.client.jetstream().publish(f"handled.{name}.1", b"{}")
    for message in await pull_jobs(connection, queue, 1):
        await message.nak()

    async def dead() -> bool:
        return (await statuses(connection, queue)) == ([], {1: Status.HANDLED})

    # The report is younger than the requeue, so it is about the job's last life.
    await eventually(dead)


@pytest.mark.slow
async def test_a_redrive_in_place_is_refused_beside_a_handler(connection: NatsPyConnection, name: str) -> None:
    queue = await orders(connection, name)
    await make_dead_letters(connection, queue, "ab")
    await handle(connection, queue, 1)
    if connection.api_level < 4:
        pytest.skip("this server can't requeue in place")
    with pytest.raises(RedriveRequestError, match="found its consumer unprocessed_order_handler: a redrive in place"):
        await redrive_dead_letters(connection, queue, RedriveRequest(protocol=Protocol.IN_PLACE))
    # A full queue is redriven in place by default, but not here.
    full = await orders(connection, f"{name}-full", max_msgs=2)
    await make_dead_letters(connection, full, "ab")
    await handle(connection, full, 1)
    report = await redrive_dead_letters(connection, full)
    assert (report.protocol, list(report.gone), set(report.failed)) == (Protocol.COPY, [1], {2})


async def test_copies_that_contradict_each_other_prove_nothing(connection: NatsPyConnection, name: str) -> None:
    queue = await orders(connection, name)
    await make_dead_letters(connection, queue, "ab")
    await handle(connection, queue, 1)
    advisory = {"type": "io.nats.jetstream.advisory.v1.max_deliver", "stream": name, "consumer": CONSUMER}
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    body = json.dumps(advisory | {"timestamp": now, "stream_seq": 2, "deliveries": 1}).encode()
    subject = f"{MAX_DELIVERIES}.{name}.{CONSUMER}"
    headers = {"Nats-Stream": f"{name}-dead", "Nats-Subject": subject, "Nats-Time-Stamp": now}
    # The server can't have made a copy that says it is older than what it is a copy of.
    to_come = headers | {"Nats-Sequence": "1", "Nats-Time-Stamp": "2036-01-01T00:00:00Z"}
    await connection.client.jetstream().publish(f"entries.{name}.{subject}", body, headers=to_come)
    assert await statuses(connection, queue) == ([2], {1: Status.HANDLED})
    for entry in ("1", "2", "7", "x"):
        forged = headers | {"Nats-Sequence": entry}
        await connection.client.jetstream().publish(f"entries.{name}.{subject}", body, headers=forged)
    await connection.client.jetstream().publish(f"entries.{name}.{subject}", b"\xff", headers={"Nats-Sequence": "1"})
    # Neither that the handler's first letter is handled, nor that the second one is.
    assert await statuses(connection, queue) == ([1, 2], {})


@pytest.mark.slow
async def test_entries_of_an_earlier_dead_letter_queue_or_work_queue_do_not_count(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await orders(connection, name)
    await make_dead_letters(connection, queue, "a")
    await handle(connection, queue, 1)
    assert await statuses(connection, queue) == ([], {1: Status.HANDLED})
    await connection.api(f"STREAM.DELETE.{name}")
    await provision(connection, queue)
    await make_dead_letters(connection, queue, "b")
    assert await statuses(connection, queue) == ([1], {})
    await connection.api(f"STREAM.DELETE.{name}-dead")
    await provision(connection, queue)
    await handle(connection, queue, 0)
    assert await statuses(connection, queue) == ([1], {})


@pytest.mark.slow
async def test_an_existing_dead_letter_queue_is_adopted_and_discovered_with_its_copies(
    connection: NatsPyConnection, name: str
) -> None:
    declared = small_queue(name, dead_letters=letters(name))
    assert declared.dead_letters is not None
    config = declared.dead_letters.config()
    del config["republish"]
    await connection.api(f"STREAM.CREATE.{name}-dead", config)
    without_copies = small_queue(name, dead_letters=letters(name, republish=None))
    await provision(connection, without_copies)
    await make_dead_letters(connection, without_copies, "ab")
    await handle(connection, without_copies, 1)
    found = await find_dead_letters(connection, without_copies)
    assert ([letter.sequence for letter in found.letters], found.uncertain) == ([2], 1)
    risk = f"{name}-dead has a handler (unprocessed_order_handler) and keeps no copies of its entries"
    assert any(text.startswith(risk) for text in found.risks)
    assert f"republish: unset → > to entries.{name}.>" in str(await plan(connection, declared))
    await provision(connection, declared)
    assert all(step.action == "keep" for step in (await plan(connection, declared)).steps)
    discovered = await discover_queue(connection, name)
    assert discovered.dead_letters is not None
    assert discovered.dead_letters.republish == {"src": ">", "dest": f"entries.{name}.>"}
    assert all(step.action == "keep" for step in (await plan(connection, discovered)).steps)


async def test_a_dead_letter_queue_that_republishes_elsewhere_is_not_changed(
    connection: NatsPyConnection, name: str
) -> None:
    declared = small_queue(name, dead_letters=letters(name))
    assert declared.dead_letters is not None
    config = declared.dead_letters.config() | {"republish": {"src": ">", "dest": f"theirs.{name}.>"}}
    await connection.api(f"STREAM.CREATE.{name}-dead", config)
    assert "declare republish: null to keep that" in str(await plan(connection, declared))
    kept = small_queue(name, dead_letters=letters(name, republish=None))
    await provision(connection, kept)
    assert (await connection.api(f"STREAM.INFO.{name}-dead"))["config"]["republish"]["dest"] == f"theirs.{name}.>"


@pytest.mark.slow
@pytest.mark.parametrize("change", ["deleted", "recreated", "renamed", "other queue", "purged"])
async def test_what_was_found_handled_stays_so_whatever_becomes_of_the_handler(
    connection: NatsPyConnection, name: str, change: str
) -> None:
    queue = await orders(connection, name)
    await make_dead_letters(connection, queue, "abcde")
    client, stream, handler = connection.client, f"{name}-dead", HANDLER["durable_name"]
    assert await handle(connection, queue, 3) == [1, 2, 3]
    assert (await summarise_dead_letters(connection, queue)).dismissed == {"handled": 3}
    match change:
        case "deleted" | "recreated" | "renamed":
            await connection.api(f"CONSUMER.DELETE.{stream}.{handler}")
            if change != "deleted":
                name_now = handler if change == "recreated" else "handler_v2"
                await create_or_update_consumer(client, stream, HANDLER | {"durable_name": name_now, "max_deliver": 5})
        case "other queue":
            await connection.api(f"STREAM.DELETE.{stream}")
            await provision(connection, queue)
        case "purged":
            # More entries are gone than the handler has ever had.
            await connection.api(f"STREAM.PURGE.{stream}")
    assert await statuses(connection, queue) == ([4, 5], dict.fromkeys([1, 2, 3], Status.HANDLED))
    report = await redrive_dead_letters(connection, queue)
    assert (set(report.redriven), report.failed) == ({4, 5}, {})
    assert await process_all(connection, queue) == {"d": 1, "e": 1}
    again = await summarise_dead_letters(connection, queue)
    assert (again.dead, again.dismissed) == (0, {"handled": 3})


@pytest.mark.slow
async def test_a_redrive_records_what_it_finds_handled(connection: NatsPyConnection, name: str) -> None:
    queue = await orders(connection, name)
    await make_dead_letters(connection, queue, "abc")
    assert await handle(connection, queue, 2) == [1, 2]
    assert (await redrive_dead_letters(connection, queue)).redriven.keys() == {3}
    await connection.api(f"CONSUMER.DELETE.{name}-dead.{HANDLER['durable_name']}")
    assert (await redrive_dead_letters(connection, queue)).redriven.keys() == set()
    assert await process_all(connection, queue) == {"c": 1}


@pytest.mark.slow
async def test_a_handled_job_that_a_recreated_consumer_delivers_again_can_die_again(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await orders(connection, name)
    await make_dead_letters(connection, queue, "a")
    assert await handle(connection, queue, 1) == [1]
    assert (await summarise_dead_letters(connection, queue)).dismissed == {"handled": 1}
    await connection.api(f"CONSUMER.DELETE.{name}.{CONSUMER}")
    await provision(connection, queue)
    for message in await pull_jobs(connection, queue, 1):
        await message.nak()

    async def dead_again() -> bool:
        return (await statuses(connection, queue))[0] == [1]

    await eventually(dead_again)
    assert (await redrive_dead_letters(connection, queue)).redriven.keys() == {1}


@pytest.mark.parametrize(
    "story", ["taken late", "handled", "found handled", "announced again", "copy", "both", "reported"]
)
async def test_what_a_handler_did_about_a_job_that_a_worker_terminated_is_known_or_uncertain(
    connection: NatsPyConnection, name: str, story: str
) -> None:
    every = [f"{MAX_DELIVERIES}.{name}.*", f"{TERMINATED}.{name}.*", f"dead.{name}.>"]
    queue = await orders(connection, name, archive=True, dead_letters=letters(name, subjects=every, deny_delete=False))
    await publish_jobs(connection, queue, "ab")
    late, other = await pull_jobs(connection, queue, 2)
    if story == "announced again":
        await other.nak()
        await announce_again(connection, queue, late)
    else:
        await eventually_statuses(connection, queue, ([1, 2], {}))
    if story in ("handled", "found handled"):
        # It did the job that a slow worker terminated only then.
        await handle(connection, queue, 2, filter_subjects=every[:1])
    if story == "found handled":
        assert (await summarise_dead_letters(connection, queue)).dismissed == {"handled": 2}
    if story != "announced again":
        await late.term()
        await eventually_stored(connection, name, 1)
    if story == "copy":
        # The look makes it.
        await summarise_dead_letters(connection, queue)
    if story not in ("handled", "found handled"):
        count, filters = {"copy": (4, [every[0], every[2]]), "both": (3, every)}.get(story, (2, every[:1]))
        await handle(connection, queue, count, filter_subjects=filters)
    if story == "reported":
        await connection.client.jetstream().publish(f"handled.{name}.1", b'{"by": "ann"}')
    is_known = story in ("both", "reported", "copy")
    expected = {1: Status.HANDLED if is_known else Status.UNCERTAIN, 2: Status.HANDLED}
    if story == "both":
        # Nothing is left of it.
        del expected[1]
    await eventually_statuses(connection, queue, ([], expected))
    risks = {risk.name for risk in (await find_dead_letters(connection, queue)).risks}
    assert ("unclear-handling" in risks) == (not is_known)
    assert (await redrive_dead_letters(connection, queue)).redriven == {}
    if not is_known:
        named = await redrive_dead_letters(connection, queue, RedriveRequest(Selection(sequences=[1])))
        assert set(named.redriven) == {1}
    assert await process_all(connection, queue) == ({} if is_known else {"a": 1})


async def announce_again(connection: NatsPyConnection, queue: WorkQueue, message: Msg) -> None:
    """Terminate a job, and announce that its deliveries are used up: a server that was killed forgets terminations."""
    await message.term()
    entries, subject = f"{queue.name}-dead", f"{queue.name}.{CONSUMER}"
    await eventually_statuses(connection, queue, ([1, 2], {}))
    advisory = await connection.client.jetstream().get_last_msg(entries, f"{TERMINATED}.{subject}")
    again = json.loads(advisory.data or b"") | {"type": "io.nats.jetstream.advisory.v1.max_deliver"}
    await connection.client.publish(f"{MAX_DELIVERIES}.{subject}", json.dumps(again).encode())
    await eventually_stored(connection, entries, 3)


async def eventually_statuses(
    connection: NatsPyConnection, queue: WorkQueue, expected: tuple[list[int], dict[int, Status]]
) -> None:
    """Wait until the jobs of a queue are what is expected."""

    async def are_so() -> bool:
        return await statuses(connection, queue) == expected

    await eventually(are_so)


async def eventually_stored(connection: NatsPyConnection, stream: str, count: int) -> None:
    """Wait until a stream stores so many messages."""
    await until_stored(connection, stream, count)


@pytest.mark.slow
async def test_what_a_handler_did_before_its_queue_was_adopted_is_uncertain_and_not_done_again(
    connection: NatsPyConnection, name: str
) -> None:
    declared = small_queue(name, deny_delete=True, dead_letters=letters(name))
    without = small_queue(name, deny_delete=True, dead_letters=letters(name, republish=None))
    await provision(connection, without)
    await make_dead_letters(connection, without, "abcd")
    assert await handle(connection, without, 2) == [1, 2]
    await provision(connection, declared)
    found = await find_dead_letters(connection, declared)
    assert ([letter.sequence for letter in found.letters], found.uncertain) == ([3, 4], 2)
    assert any("whether 2 dead jobs without an entry are handled isn't known" in risk for risk in found.risks)
    report = await redrive_dead_letters(connection, declared)
    assert (set(report.redriven), report.uncertain) == ({3, 4}, 2)
    # From now on it is known.
    await make_dead_letters(connection, declared, "ef")
    assert len(await handle(connection, declared, 1)) == 1
    found = await find_dead_letters(connection, declared)
    assert (len(found.letters), found.uncertain) == (1, 2)
    # Whoever knows better names them.
    named = RedriveRequest(Selection(sequences=frozenset({2})))
    assert (await redrive_dead_letters(connection, declared, named)).redriven.keys() == {2}
    assert (await process_all(connection, declared))["b"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["full", "created anew"])
async def test_what_was_handled_while_the_audit_took_no_copies_is_uncertain_and_not_done_again(
    connection: NatsPyConnection, name: str, lost: str
) -> None:
    queue = await orders(connection, name)
    assert queue.audit is not None
    audit = queue.audit.name
    await make_dead_letters(connection, queue, "ab")
    if lost == "full":
        config = (await connection.api(f"STREAM.INFO.{audit}"))["config"]
        full = config | {"discard": "new", "max_msgs": await stored_count(connection, audit)}
        await connection.api(f"STREAM.UPDATE.{audit}", full)
        await make_dead_letters(connection, queue, "cd")
        assert await handle(connection, queue, 3) == [1, 2, 3]
        await connection.api(f"STREAM.UPDATE.{audit}", config)
        expected: tuple[list[int], int] = ([4], 1)
    else:
        assert await handle(connection, queue, 1) == [1]
        await connection.api(f"STREAM.DELETE.{audit}")
        await provision(connection, queue)
        expected = ([2], 1)
    found = await find_dead_letters(connection, queue)
    assert ([letter.sequence for letter in found.letters], found.uncertain) == expected
    assert set((await redrive_dead_letters(connection, queue)).redriven) == set(expected[0])
    assert (await process_all(connection, queue)).total() == 1


@pytest.mark.slow
async def test_a_dead_job_that_never_had_an_entry_is_found_beside_a_handler(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await orders(connection, name)
    await make_dead_letters(connection, queue, "ab")
    assert await handle(connection, queue, 2) == [1, 2]
    # The dead letter queue is away while a job dies.
    stream = f"{name}-dead"
    config = (await connection.api(f"STREAM.INFO.{stream}"))["config"]
    await connection.api(f"STREAM.UPDATE.{stream}", config | {"subjects": [f"{name}.elsewhere"]})
    await publish_jobs(connection, queue, "c")
    for message in await pull_jobs(connection, queue, 1):
        await message.nak()
    await find_dead_letters(connection, small_queue(name, dead_letters=letters(name)))
    await connection.api(f"STREAM.UPDATE.{stream}", config)
    await make_dead_letters(connection, queue, "d")
    found = await find_dead_letters(connection, queue)
    assert ([letter.sequence for letter in found.letters], found.uncertain) == ([3, 4], 0)
