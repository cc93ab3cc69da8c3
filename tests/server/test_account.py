"""The account: jobs that are gone without evidence of their end are named, and come back only by name."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    Protocol,
    Reason,
    RedriveRequest,
    Selection,
    account_for_jobs,
    connect,
    connection_settings,
    find_dead_letters,
    provision,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.contract import (
    ACK_METRIC,
    account_subject,
    completion_subject,
    handled_subject,
)
from airflow_provider_jetstream.jetstream.errors import DeadLetterGoneError
from testbed import seams
from testbed.dead_letters import change_stream, make_terminated_letters, request_for
from testbed.face import summarise_dead_letters
from testbed.foreign_programs import create_or_update_consumer, pull
from testbed.queues import (
    CONSUMER,
    eventually,
    make_dead_letters,
    make_queue,
    process_all,
    publish_jobs,
    pull_jobs,
    store_completion,
    stored_count,
    until_stored,
)

if TYPE_CHECKING:
    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

SAMPLED = {"sample_freq": "100%"}


async def unaccounted(connection: NatsPyConnection, queue: WorkQueue) -> list[tuple[int, int]]:
    """Make an account, and return the jobs that it names."""
    return list((await account_for_jobs(connection, queue)).unaccounted)


async def process_until_empty(connection: NatsPyConnection, queue: WorkQueue) -> None:
    """Acknowledge every job, and wait until the server has removed them: an account takes them for ended only then."""
    await process_all(connection, queue)
    await until_stored(connection, queue.name, 0)


async def terminate(connection: NatsPyConnection, queue: WorkQueue, count: int) -> list[int]:
    """Terminate jobs, and return their sequences once they are gone."""
    sequences = []
    for message in await pull_jobs(connection, queue, count):
        await connection.request(message.reply, b"+TERM no paper")
        sequences.append(message.metadata.sequence.stream)
    return sequences


async def full_dead_letter_queue(connection: NatsPyConnection, name: str, **fields: Any) -> WorkQueue:
    """Make a queue with one dead letter, which fills its dead letter queue, and three done jobs."""
    letters = {"name": f"{name}-dead", "max_msgs": 1, "discard": "new"}
    queue = await make_queue(connection, name, consumer=SAMPLED, dead_letters=letters, **fields)
    await make_dead_letters(connection, queue, ["dead"])
    await publish_jobs(connection, queue, ["done"] * 3)
    await process_all(connection, queue)
    return queue


@pytest.mark.slow
async def test_jobs_terminated_while_the_dead_letter_queue_is_full_are_found_and_redriven_by_their_sequences(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await full_dead_letter_queue(connection, name)
    bodies = ["first", "second", "third"]
    await publish_jobs(connection, queue, bodies)
    lost = await terminate(connection, queue, 3)
    await publish_jobs(connection, queue, ["last"])
    await process_all(connection, queue)
    for _ in range(3):
        account = await account_for_jobs(connection, queue)
        assert (account.jobs, account.stored, account.ended, account.unaccounted) == (8, 1, 4, ((5, 7),))
        assert account.as_json()["unaccounted_sequences"] == [[5, 7]]
        assert str(account) == f"8 jobs of {name}: 1 stored, 4 ended, 3 unaccounted (5-7)"
    # A redrive of all leaves them alone.
    report = await redrive_dead_letters(connection, queue)
    assert (set(report.redriven), report.uncertain) == ({1}, 0)
    assert await process_all(connection, queue) == {"dead": 1}
    named = Selection(sequences=frozenset(lost))
    findings = await find_dead_letters(connection, queue, named)
    assert [(letter.sequence, letter.body, letter.source, letter.death.reason) for letter in findings.letters] == [
        (sequence, body.encode(), "archive", Reason.UNACCOUNTED) for sequence, body in zip(lost, bodies, strict=True)
    ]
    report = await redrive_dead_letters(connection, queue, request_for(lost))
    assert (set(report.redriven), report.failures) == (set(lost), 0)
    assert await process_all(connection, queue) == dict.fromkeys(bodies, 1)
    assert (await summarise_dead_letters(connection, queue)).dead == 0
    assert await unaccounted(connection, queue) == []
    with pytest.raises(DeadLetterGoneError):
        await redrive_dead_letters(connection, queue, request_for(lost))


@pytest.mark.slow
@pytest.mark.parametrize("purged", [True, False])
async def test_jobs_that_somebody_purged_or_deleted_are_unaccounted(
    connection: NatsPyConnection, name: str, *, purged: bool
) -> None:
    queue = await make_queue(connection, name, consumer=SAMPLED | {"ack_wait": "1500ms"})
    await publish_jobs(connection, queue, ["done", "held", "waiting"])
    done, _ = await pull_jobs(connection, queue, 2)
    await done.ack_sync()
    assert await unaccounted(connection, queue) == []
    if purged:
        await connection.api(f"STREAM.PURGE.{name}")
    else:
        for sequence in (2, 3):
            await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": sequence})
    assert await unaccounted(connection, queue) == [(2, 3)]
    report = await redrive_dead_letters(connection, queue, request_for([2, 3]))
    assert set(report.redriven) == {2, 3}
    assert await process_all(connection, queue) == {"held": 1, "waiting": 1}
    assert await unaccounted(connection, queue) == []


@pytest.mark.slow
async def test_a_queue_whose_first_sequence_is_large_has_no_jobs_below_it(
    connection: NatsPyConnection, name: str
) -> None:
    first = 10**15
    config = {"name": name, "subjects": [f"{name}.jobs.>"], "retention": "workqueue", "first_seq": first}
    await connection.api(f"STREAM.CREATE.{name}", config)
    queue = await make_queue(connection, name, consumer=SAMPLED)
    jobs = await publish_jobs(connection, queue, "abc")
    (message,) = await pull_jobs(connection, queue, 1)
    await message.ack_sync()
    await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": jobs[1]})
    account = await account_for_jobs(connection, queue)
    assert jobs == [first, first + 1, first + 2]
    assert (account.jobs, account.stored, account.ended, account.unaccounted) == (3, 1, 1, ((jobs[1], jobs[1]),))


@pytest.mark.slow
async def test_a_report_of_a_handler_accounts_for_a_job(connection: NatsPyConnection, name: str) -> None:
    queue = await full_dead_letter_queue(connection, name)
    await publish_jobs(connection, queue, "ab")
    first, second = await terminate(connection, queue, 2)
    assert await unaccounted(connection, queue) == [(first, second)]
    await connection.request(handled_subject(name, first), b"{}")
    assert await unaccounted(connection, queue) == [(second, second)]
    with pytest.raises(DeadLetterGoneError):
        await redrive_dead_letters(connection, queue, request_for([first]))


@pytest.mark.slow
async def test_the_ends_of_jobs_that_leave_no_evidence_are_not_known(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name, consumer={"sample_freq": "0"}, jobs="abc")
    await process_until_empty(connection, queue)
    for _ in range(2):
        account = await account_for_jobs(connection, queue)
        assert (account.unaccounted, account.unknown, account.unknown_share) == ((), ((1, 3),), 1.0)
        (why,) = account.why_unknown
        assert "sample_freq" in why
    assert await stored_count(connection, f"{name}-archive") == 3
    # A worker that stores completions is a source of ends from then on.
    await publish_jobs(connection, queue, "de")
    await store_completion(connection, queue, 4)
    for message in await pull_jobs(connection, queue, 2):
        await message.ack_sync()
    assert await unaccounted(connection, queue) == [(5, 5)]


@pytest.mark.slow
async def test_an_event_that_comes_a_moment_later_counts(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, jobs="ab")
    await store_completion(connection, queue, 1)
    for message in await pull_jobs(connection, queue, 2):
        await message.ack_sync()
    accounting = asyncio.create_task(account_for_jobs(connection, queue))
    await asyncio.sleep(0.3)
    await store_completion(connection, queue, 2)
    assert (await accounting).unaccounted == ()


@pytest.mark.slow
async def test_each_event_is_read_once_over_all_accounts(connection: NatsPyConnection, name: str) -> None:
    # The server stores no metric of what is acknowledged after the ack wait.
    queue = await make_queue(connection, name, consumer=SAMPLED | {"ack_wait": "30s"}, jobs=map(str, range(200)))
    await process_all(connection, queue)
    sent: list[int] = []
    for _ in range(3):
        before = connection.client.stats["out_msgs"]
        assert await unaccounted(connection, queue) == []
        sent.append(connection.client.stats["out_msgs"] - before)
    assert sent[0] > 200
    assert max(sent[1:]) < 30


@pytest.mark.slow
async def test_jobs_whose_metric_a_crash_of_the_server_lost_are_never_redriven_by_themselves(
    own_nats: NatsServer, name: str
) -> None:
    async with connect(connection_settings({"servers": (own_nats.url,), "timeout": 5})) as connection:
        queue = await make_queue(connection, name, consumer=SAMPLED | {"ack_wait": "2s", "max_deliver": 20})
        await publish_jobs(connection, queue, map(str, range(600)))
        messages = await pull_jobs(connection, queue, 600)
        for message in messages:
            await message.ack()
        await asyncio.sleep(0.001)
        assert own_nats.pid
        os.kill(own_nats.pid, signal.SIGKILL)
        await asyncio.to_thread(own_nats.restart)
        await eventually(lambda: connection.client.is_connected)
        again = await process_all(connection, queue, within=30)
        account = await account_for_jobs(connection, queue)
        metrics = await stored_count(connection, f"{name}-events")
        print(f"{600 - metrics} of 600 jobs lost their metric, {len(again)} were done again")
        assert account.unaccounted_count == 600 - metrics
        report = await redrive_dead_letters(connection, queue)
        assert (len(report.redriven), report.uncertain) == (0, 0)
        assert await stored_count(connection, name) == 0


async def test_an_entry_that_a_handler_has_removed_accounts_for_its_job(
    connection: NatsPyConnection, name: str
) -> None:
    letters = {"name": f"{name}-dead", "retention": "workqueue"}
    queue = await make_queue(connection, name, consumer=SAMPLED, dead_letters=letters)
    await make_terminated_letters(connection, queue, "abc")
    await create_or_update_consumer(connection.client, f"{name}-dead", {"durable_name": "handler"})
    async for message in pull(connection.client, f"{name}-dead", "handler", batch=2, expires=2):
        await connection.client.request(message.reply, b"+ACK", timeout=5)
    summary = await summarise_dead_letters(connection, queue)
    assert (summary.dead, summary.ranges) == (1, [(3, 3)])
    assert await unaccounted(connection, queue) == []


@pytest.mark.slow
@pytest.mark.parametrize("archived", [True, False])
async def test_an_entry_about_used_up_deliveries_does_not_account_for_a_job_that_is_gone(
    connection: NatsPyConnection, name: str, *, archived: bool
) -> None:
    queue = await make_queue(connection, name, consumer=SAMPLED, dead="ab")
    await summarise_dead_letters(connection, queue)
    if not archived:
        await connection.api(f"STREAM.PURGE.{name}-archive")
    # A consumer that is created anew delivers it once more, so that it needn't be a dead letter that somebody deletes.
    config = (await connection.api(f"CONSUMER.INFO.{name}.{CONSUMER}"))["config"]
    await connection.api(f"CONSUMER.DELETE.{name}.{CONSUMER}")
    await connection.api(f"CONSUMER.CREATE.{name}.{CONSUMER}", {"stream_name": name, "config": config})
    await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": 1})
    assert (await summarise_dead_letters(connection, queue)).dead == 0
    assert await unaccounted(connection, queue) == [(1, 1)]
    assert (await redrive_dead_letters(connection, queue)).redriven == {}
    found = await find_dead_letters(connection, queue, Selection(sequences=frozenset({1})))
    assert [(letter.body, letter.death.reason) for letter in found.letters] == [(b"a", Reason.UNACCOUNTED)]
    assert found.letters[0].source == ("archive" if archived else "copy")
    assert set((await redrive_dead_letters(connection, queue, request_for([1]))).redriven) == {1}
    assert await process_all(connection, queue) == {"a": 1, "b": 1}
    assert (await summarise_dead_letters(connection, queue)).dead == 0
    assert await unaccounted(connection, queue) == []


@pytest.mark.slow
async def test_a_dead_letter_that_was_deleted_counts_until_it_is_reported(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=SAMPLED, dead="ab")
    await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": 1})
    for selected in (True, False):
        found = await find_dead_letters(connection, queue, Selection(unaccounted=selected))
        assert {letter.sequence for letter in found.letters} == ({1, 2} if selected else {2})
    assert await unaccounted(connection, queue) == [(1, 1)]
    await connection.request(handled_subject(name, 1), b"{}")
    assert (await summarise_dead_letters(connection, queue)).dead == 1
    assert await unaccounted(connection, queue) == []


@pytest.mark.slow
async def test_evidence_about_an_earlier_stream_or_another_domain_does_not_count(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=SAMPLED)
    for sequence in (1, 2):
        await store_completion(connection, queue, sequence)
    await connection.api(f"STREAM.DELETE.{name}")
    await provision(connection, queue)
    metric = {"type": "io.nats.jetstream.metric.v1.consumer_ack", "timestamp": "2026-01-01T00:00:00Z", "deliveries": 1}
    metric |= {"stream": name, "consumer": CONSUMER, "stream_seq": 2, "domain": "leaf"}
    await connection.client.jetstream().publish(f"{ACK_METRIC}.{name}.{CONSUMER}", json.dumps(metric).encode())
    await publish_jobs(connection, queue, "ab")
    await connection.api(f"STREAM.PURGE.{name}")
    assert await unaccounted(connection, queue) == [(1, 2)]


@pytest.mark.slow
async def test_a_queue_with_too_many_gaps_for_one_answer_is_looked_at_job_by_job(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored_sequences = seams.current(seams.ACCOUNT_STORED_SEQUENCES)

    async def inexact(*args: Any) -> Any:
        return replace(await stored_sequences(*args), deleted=(), exact=False)

    monkeypatch.setattr(seams.ACCOUNT_STORED_SEQUENCES, inexact)
    queue = await full_dead_letter_queue(connection, name)
    await publish_jobs(connection, queue, "abcde")
    lost = await terminate(connection, queue, 2)
    await pull_jobs(connection, queue, 1)
    for _ in range(2):
        assert await unaccounted(connection, queue) == [(lost[0], lost[-1])]


@pytest.mark.slow
@pytest.mark.parametrize("body", [b"", b"{}", b"no json", b'{"version": 1, "open": "AAAA"}'])
async def test_a_checkpoint_that_is_none_is_replaced(connection: NatsPyConnection, name: str, body: bytes) -> None:
    queue = await full_dead_letter_queue(connection, name)
    await publish_jobs(connection, queue, "a")
    lost = await terminate(connection, queue, 1)
    await connection.request(account_subject(name), body)
    for _ in range(2):
        assert await unaccounted(connection, queue) == [(lost[0], lost[0])]


@pytest.mark.since_server("2.14", "the reset of a consumer")
@pytest.mark.slow
async def test_a_job_that_is_requeued_in_place_has_yet_to_end(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer=SAMPLED, dead="a")
    assert (await summarise_dead_letters(connection, queue)).dead == 1
    await redrive_dead_letters(connection, queue, RedriveRequest(protocol=Protocol.IN_PLACE))
    # Nothing reports that the worker terminates it.
    await change_stream(connection, f"{name}-dead", subjects=[f"dead.{name}.>", f"parked.{name}.>"])
    await terminate(connection, queue, 1)
    assert await unaccounted(connection, queue) == [(1, 1)]


@pytest.mark.since_server("2.14", "the reset of a consumer")
async def test_a_job_that_was_requeued_in_place_and_then_done_is_accounted_for(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=SAMPLED, dead="ab")
    await redrive_dead_letters(connection, queue, RedriveRequest(protocol=Protocol.IN_PLACE))
    await process_all(connection, queue)
    assert await unaccounted(connection, queue) == []


@pytest.mark.slow
async def test_parked_and_cancelled_jobs_are_accounted_for(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer=SAMPLED, dead="ab")
    await redrive_dead_letters(connection, queue, request_for([1], max_redrives=0))
    cancelled = {"type": "io.airflow.jetstream.v1.cancelled", "stream": name, "consumer": CONSUMER, "stream_seq": 3}
    body = json.dumps(cancelled | {"timestamp": "2026-11-27T00:00:00Z", "deliveries": 1}).encode()
    await connection.request(completion_subject(name, CONSUMER, 3), body)
    await publish_jobs(connection, queue, "c")
    await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": 3})
    assert (await summarise_dead_letters(connection, queue)).ranges == [(2, 2)]
    assert await unaccounted(connection, queue) == []


@pytest.mark.slow
@pytest.mark.since_server("2.11", "direct gets in batches")
async def test_many_ends_are_read_in_batches(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer=SAMPLED | {"max_ack_pending": -1, "ack_wait": "30s"})
    for _ in range(6):
        await publish_jobs(connection, queue, ["x"] * 500)
        for message in await pull_jobs(connection, queue, 500):
            await message.ack()
    await until_stored(connection, f"{name}-events", 3_000)
    await publish_jobs(connection, queue, "ab")
    before = connection.client.stats["out_msgs"]
    assert await unaccounted(connection, queue) == []
    # Single reads would be three thousand.
    assert connection.client.stats["out_msgs"] - before < 60
    await connection.api(f"STREAM.PURGE.{name}")
    assert await unaccounted(connection, queue) == [(3_001, 3_002)]


@pytest.mark.since_server("2.14", "the reset of a consumer")
@pytest.mark.slow
async def test_a_job_that_nobody_names_stays_when_all_letters_are_redriven_in_place(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=SAMPLED | {"ack_wait": "1s"}, dead="a")
    await publish_jobs(connection, queue, "b")
    await pull_jobs(connection, queue, 1)
    # The server says that it was deleted while a worker had it, as of jobs that were done just before a crash.
    await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": 2})
    report = await redrive_dead_letters(connection, queue, RedriveRequest(protocol=Protocol.IN_PLACE))
    assert set(report.redriven) == {1}
    assert await unaccounted(connection, queue) == [(2, 2)]
    report = await redrive_dead_letters(connection, queue, request_for([2]))
    assert set(report.redriven) == {2}


@pytest.mark.slow
async def test_an_unaccounted_job_can_be_parked(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer=SAMPLED, jobs="ab")
    await connection.api(f"STREAM.PURGE.{name}")
    report = await redrive_dead_letters(connection, queue, request_for([1], max_redrives=0))
    assert list(report.parked) == [1]
    (letter,) = (await find_dead_letters(connection, queue, Selection(parked=True))).letters
    assert (letter.sequence, letter.body, letter.death.reason) == (1, b"a", Reason.UNACCOUNTED)
    assert await unaccounted(connection, queue) == [(2, 2)]


@pytest.mark.slow
async def test_what_ended_while_no_acknowledgement_was_stored_is_not_known(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=SAMPLED, jobs="a")
    await process_until_empty(connection, queue)
    assert await unaccounted(connection, queue) == []
    config = await change_stream(connection, f"{name}-events", subjects=[f"completed.{name}.>"])
    assert await unaccounted(connection, queue) == []
    await publish_jobs(connection, queue, "bc")
    await process_until_empty(connection, queue)
    await change_stream(connection, f"{name}-events", subjects=config["subjects"])
    account = await account_for_jobs(connection, queue)
    assert (account.unaccounted, account.unknown) == ((), ((2, 3),))
    await publish_jobs(connection, queue, "d")
    await connection.api(f"STREAM.PURGE.{name}")
    account = await account_for_jobs(connection, queue)
    assert (account.unaccounted, account.unknown) == (((4, 4),), ((2, 3),))


@pytest.mark.slow
async def test_an_events_stream_that_was_created_anew_leaves_earlier_ends_unknown(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=SAMPLED, jobs="a")
    await process_until_empty(connection, queue)
    assert await unaccounted(connection, queue) == []
    await publish_jobs(connection, queue, "b")
    await process_until_empty(connection, queue)
    await connection.api(f"STREAM.DELETE.{name}-events")
    await provision(connection, queue)
    await publish_jobs(connection, queue, "c")
    await connection.api(f"STREAM.PURGE.{name}")
    account = await account_for_jobs(connection, queue)
    assert (account.unaccounted, account.unknown) == (((3, 3),), ((2, 2),))


@pytest.mark.slow
@pytest.mark.parametrize("by", ["max_msgs", "purge", "purge of the audit"])
async def test_where_evidence_was_dropped_the_ends_of_jobs_are_not_known(
    connection: NatsPyConnection, name: str, by: str
) -> None:
    queue = await make_queue(connection, name, consumer=SAMPLED, jobs="abcdef")
    await process_all(connection, queue)
    if by == "purge of the audit":
        await make_terminated_letters(connection, queue, "t")
        await redrive_dead_letters(connection, queue)
        await connection.api(f"STREAM.PURGE.{name}-audit")
    elif by == "purge":
        await connection.api(f"STREAM.PURGE.{name}-events", {"seq": 5})
    else:
        await change_stream(connection, f"{name}-events", max_msgs=2)
    account = await account_for_jobs(connection, queue)
    lost = ((7, 7),) if "audit" in by else ((1, 4),)
    assert (account.unaccounted, account.unknown) == ((), lost)
    assert f"{account.unknown_share:.3f}" == ("0.143" if "audit" in by else "0.667")
    # What comes later isn't in doubt.
    deleted = await publish_jobs(connection, queue, ["later"])
    await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": deleted[0]})
    account = await account_for_jobs(connection, queue)
    assert (account.unaccounted, account.unknown) == (((deleted[0], deleted[0]),), lost)


@pytest.mark.slow
async def test_an_audit_that_was_created_anew_has_lost_what_was_done_to_letters(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=SAMPLED, jobs="ab")
    await process_all(connection, queue)
    await publish_jobs(connection, queue, "c")
    await connection.api(f"STREAM.PURGE.{name}")
    assert await unaccounted(connection, queue) == [(3, 3)]
    await connection.api(f"STREAM.DELETE.{name}-audit")
    await provision(connection, queue)
    account = await account_for_jobs(connection, queue)
    assert (account.unaccounted, account.unknown, account.ended) == ((), ((3, 3),), 2)


@pytest.mark.parametrize("count", [2, 9])
async def test_an_account_of_letters_takes_no_request_for_each(
    connection: NatsPyConnection, name: str, count: int
) -> None:
    queue = await make_queue(connection, name, consumer=SAMPLED)
    await make_terminated_letters(connection, queue, ["x"] * count)
    await publish_jobs(connection, queue, "y")
    assert await unaccounted(connection, queue) == []
    before = connection.client.stats["out_msgs"]
    assert await unaccounted(connection, queue) == []
    # The snapshot takes seven; then the queue, the streams, their last messages, the checkpoint and its successor.
    assert connection.client.stats["out_msgs"] - before <= 20


@pytest.mark.slow
@pytest.mark.parametrize("limits", [{"max_bytes": 10, "discard": "new"}, {"max_msg_size": 10}, {"deny_purge": True}])
async def test_an_audit_that_does_not_store_the_account_hides_no_job(
    connection: NatsPyConnection, name: str, limits: dict[str, Any]
) -> None:
    queue = await full_dead_letter_queue(connection, name)
    await publish_jobs(connection, queue, "a")
    lost = await terminate(connection, queue, 1)
    await change_stream(connection, f"{name}-audit", **limits)
    for _ in range(2):
        assert await unaccounted(connection, queue) == [(lost[0], lost[0])]


class Life:
    """Random events in the life of a queue's jobs, and which of them left no evidence of their end."""

    def __init__(self, connection: NatsPyConnection, queue: WorkQueue, seed: int) -> None:
        self._connection, self._queue, self._random = connection, queue, Random(seed)  # noqa: S311
        self._held: dict[int, Msg] = {}
        self._pending: list[int] = []
        self.lost: set[int] = set()

    async def happen(self) -> None:
        name = self._queue.name
        self._pending += await publish_jobs(self._connection, self._queue, ["x"] * self._random.randrange(1, 6))
        for message in await pull_jobs(self._connection, self._queue, self._random.randrange(len(self._pending) + 1)):
            self._held[message.metadata.sequence.stream] = message
            self._pending.remove(message.metadata.sequence.stream)
        captured = self._random.random() < 0.5
        subjects = [f"dead.{name}.>", *([f"$JS.EVENT.ADVISORY.CONSUMER.*.{name}.*"] if captured else [])]
        await change_stream(self._connection, f"{name}-dead", subjects=subjects)
        for sequence in sorted(self._held):
            match self._random.randrange(5):
                case 0:
                    await self._held.pop(sequence).ack_sync()
                case 1:
                    await self._connection.request(self._held.pop(sequence).reply, b"+TERM")
                    self.lost |= set() if captured else {sequence}
                case 2:
                    await self._held.pop(sequence).nak()
                case 3:
                    del self._held[sequence]
                    await self._delete(sequence)
        if self._pending and self._random.random() < 0.5:
            await self._delete(self._pending.pop(self._random.randrange(len(self._pending))))
        if self.lost and self._random.random() < 0.3:
            reported = self._random.choice(sorted(self.lost))
            await self._connection.request(handled_subject(name, reported), b"{}")
            self.lost.discard(reported)

    async def _delete(self, sequence: int) -> None:
        await self._connection.api(f"STREAM.MSG.DELETE.{self._queue.name}", {"seq": sequence})
        self.lost.add(sequence)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
async def test_whatever_happens_the_account_names_the_lost_jobs_and_no_other(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(seams.ACCOUNT_PAUSES, (0.05, 0.2))
    queue = await make_queue(connection, name, consumer=SAMPLED | {"ack_wait": "30s", "max_ack_pending": -1})
    life = Life(connection, queue, seed)
    named: set[int] = set()
    for _ in range(8):
        await life.happen()
        pairs = await unaccounted(connection, queue)
        named = {sequence for first, last in pairs for sequence in range(first, last + 1)}
        assert life.lost <= named
    # What was stored too late for the last account counts in the next one.
    pairs = await unaccounted(connection, queue)
    assert {sequence for first, last in pairs for sequence in range(first, last + 1)} == life.lost
    letters = await find_dead_letters(connection, queue, Selection(sequences=frozenset(life.lost)))
    assert {letter.sequence for letter in letters.letters} == life.lost
    print(f"{len(life.lost)} jobs lost without evidence")
