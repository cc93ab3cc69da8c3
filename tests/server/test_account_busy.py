"""The account of a queue whose jobs come and end meanwhile: no job that was done is ever called unaccounted."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    Consumer,
    JobAccount,
    Protocol,
    RedriveRequest,
    Selection,
    WorkQueue,
    account_for_jobs,
    connect,
    connection_settings,
    find_dead_letters,
    provision,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.errors import DeadLetterGoneError
from testbed.dead_letters import make_terminated_letters, request_for
from testbed.queues import (
    completion_body,
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
    from collections.abc import Awaitable, Callable

    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

SAMPLED = {"sample_freq": "100%"}
PATIENT = SAMPLED | {"ack_wait": "30s", "max_ack_pending": -1}


class Interleaved:
    """A connection before each of whose requests something else happens."""

    def __init__(self, connection: NatsPyConnection, meanwhile: Callable[[], Awaitable[None]]) -> None:
        self._connection, self._meanwhile, self._open = connection, meanwhile, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    async def api(self, *arguments: Any, **options: Any) -> Any:
        await self._happen()
        return await self._connection.api(*arguments, **options)

    async def api_request(self, *arguments: Any, **options: Any) -> Any:
        await self._happen()
        return await self._connection.api_request(*arguments, **options)

    async def _happen(self) -> None:
        if self._open:
            self._open = False
            await self._meanwhile()
            self._open = True


class BeforeRequest(Interleaved):
    """A connection before whose first request of a subject something else happens."""

    def __init__(self, connection: NatsPyConnection, subject: str, meanwhile: Callable[[], Awaitable[None]]) -> None:
        super().__init__(connection, meanwhile)
        self._subject = subject

    async def _happen(self) -> None:
        """Nothing happens before other requests."""

    async def api(self, *arguments: Any, **options: Any) -> Any:
        await self._happen_before(arguments[0])
        return await super().api(*arguments, **options)

    async def api_request(self, *arguments: Any, **options: Any) -> Any:
        await self._happen_before(arguments[0])
        return await super().api_request(*arguments, **options)

    async def _happen_before(self, subject: str) -> None:
        if subject == self._subject and self._open:
            self._open = False
            await self._meanwhile()


async def done_job(connection: NatsPyConnection, queue: WorkQueue, *, is_completed: bool = False) -> None:
    """Publish a job and have it done; where ``is_completed``, by a worker that stores completions."""
    await publish_jobs(connection, queue, ["done"])
    (message,) = await pull_jobs(connection, queue, 1)
    if is_completed:
        await store_completion(connection, queue, message.metadata.sequence.stream)
    await message.ack_sync()


async def all_told(connection: NatsPyConnection, queue: WorkQueue, count: int) -> None:
    """Wait until the events stream holds so many ends."""

    async def is_told() -> bool:
        return await stored_count(connection, f"{queue.name}-events") >= count

    await eventually(is_told)


@pytest.mark.slow
@pytest.mark.parametrize("completed", [True, False])
async def test_jobs_that_come_and_are_done_between_any_two_reads_are_accounted_for(
    connection: NatsPyConnection, name: str, *, completed: bool
) -> None:
    queue = await make_queue(connection, name, consumer=({} if completed else SAMPLED) | {"ack_wait": "30s"})
    done = 0

    async def meanwhile() -> None:
        nonlocal done
        await done_job(connection, queue, is_completed=completed)
        done += 1
        await all_told(connection, queue, done)

    await meanwhile()
    for _ in range(4):
        account = await account_for_jobs(Interleaved(connection, meanwhile), queue)
        assert (account.unaccounted, account.unknown, account.stored) == ((), (), 0)
        assert account.ended == account.jobs
    account = await account_for_jobs(connection, queue)
    assert (account.ended, account.unaccounted) == (done, ())
    assert done > 20


@pytest.mark.slow
async def test_a_job_that_is_deleted_or_purged_is_named_also_one_that_was_seen_as_a_dead_letter(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=SAMPLED, dead=["dead", "dead too"])
    await publish_jobs(connection, queue, ["waiting"])
    assert [letter.sequence for letter in (await find_dead_letters(connection, queue)).letters] == [1, 2]
    assert (await account_for_jobs(connection, queue)).unaccounted == ()
    await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": 2})
    assert (await account_for_jobs(connection, queue)).unaccounted == ((2, 2),)
    await connection.api(f"STREAM.PURGE.{name}")
    account = await account_for_jobs(connection, queue)
    assert (account.unaccounted, account.stored, account.ended) == (((1, 3),), 0, 0)
    # Redriven by their sequences, and by a handler's word.
    report = await redrive_dead_letters(connection, queue, request_for([1, 3]))
    assert set(report.redriven) == {1, 3}
    assert await process_all(connection, queue) == {"dead": 1, "waiting": 1}
    assert (await account_for_jobs(connection, queue)).unaccounted == ((2, 2),)


@pytest.mark.slow
async def test_a_redrive_of_named_sequences_takes_no_job_whose_end_is_stored(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=SAMPLED, jobs=["done", "deleted"])
    (done,) = await pull_jobs(connection, queue, 1)
    await done.ack_sync()
    await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": 2})
    await all_told(connection, queue, 1)
    named = Selection(sequences=frozenset({1, 2}))
    assert [letter.sequence for letter in (await find_dead_letters(connection, queue, named)).letters] == [2]
    # Looking stores nothing.
    assert await stored_count(connection, f"{name}-audit") == 0
    with pytest.raises(DeadLetterGoneError):
        await redrive_dead_letters(connection, queue, request_for([1, 2]))
    with pytest.raises(DeadLetterGoneError):
        await redrive_dead_letters(connection, queue, request_for([1]))
    assert set((await redrive_dead_letters(connection, queue, request_for([2]))).redriven) == {2}
    assert await process_all(connection, queue) == {"deleted": 1}
    assert (await account_for_jobs(connection, queue)).unaccounted == ()


@pytest.mark.slow
async def test_copies_in_the_archive_stay_whatever_became_of_their_jobs(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=SAMPLED, dead=["dead"])
    await done_job(connection, queue)
    await find_dead_letters(connection, queue)
    await redrive_dead_letters(connection, queue)
    await process_all(connection, queue)
    await account_for_jobs(connection, queue)
    await account_for_jobs(connection, queue)
    assert await stored_count(connection, f"{name}-archive") == 3


@pytest.mark.slow
async def test_an_account_goes_on_where_the_last_one_was_when_the_server_was_restarted(
    own_nats: NatsServer, name: str
) -> None:
    settings = connection_settings({"servers": (own_nats.url,), "timeout": 5})
    async with connect(settings) as connection:
        queue = await make_queue(connection, name, consumer=PATIENT, jobs=["deleted", *map(str, range(20))])
        await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": 1})
        done = await pull_jobs(connection, queue, 20)
        for message in done[:10]:
            await message.ack_sync()
        await all_told(connection, queue, 10)
        assert (await account_for_jobs(connection, queue)).unaccounted == ((1, 1),)
    await asyncio.to_thread(own_nats.restart)
    async with connect(settings) as connection:
        for message in done[10:]:
            await connection.request(message.reply, b"+ACK")
        await all_told(connection, queue, 20)
        account = await account_for_jobs(connection, queue)
        assert (account.jobs, account.stored, account.ended, account.unaccounted) == (21, 0, 20, ((1, 1),))


@pytest.mark.slow
@pytest.mark.since_server("2.14", "requeueing in place")
async def test_a_job_that_is_requeued_in_place_and_done_while_an_account_is_made_is_accounted_for(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=SAMPLED, dead="abcdefgh")
    requests = 0

    async def meanwhile() -> None:
        # At each fourth request, so that all of them come between some two reads of some account.
        nonlocal requests
        requests += 1
        if requests % 4 == 0 and await stored_count(connection, name):
            await redrive_dead_letters(connection, queue, RedriveRequest(protocol=Protocol.IN_PLACE))
            (message,) = await pull_jobs(connection, queue, 1)
            await message.ack_sync()
            for other in await pull_jobs(connection, queue, await stored_count(connection, name)):
                await other.nak()

    while await stored_count(connection, name):
        account = await account_for_jobs(Interleaved(connection, meanwhile), queue)
        assert account.unaccounted == ()
    account = await account_for_jobs(connection, queue)
    assert (account.ended, account.unaccounted) == (8, ())


@pytest.mark.slow
async def test_a_terminated_job_that_is_redriven_while_an_account_is_made_is_accounted_for(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=SAMPLED)

    async def meanwhile() -> None:
        await make_terminated_letters(connection, queue, ["t"])
        await redrive_dead_letters(connection, queue)
        await process_all(connection, queue)

    await meanwhile()
    account = await account_for_jobs(Interleaved(connection, meanwhile), queue)
    assert account.unaccounted == ()
    assert (await account_for_jobs(connection, queue)).unaccounted == ()


@pytest.mark.slow
async def test_evidence_about_jobs_that_do_not_exist_yet_proves_nothing_about_them(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=SAMPLED, jobs=["first"])
    for sequence in (2, 3, 2**40):
        await store_completion(connection, queue, sequence)
    assert (await account_for_jobs(connection, queue)).unaccounted == ()
    await publish_jobs(connection, queue, ["second", "third"])
    await connection.api(f"STREAM.PURGE.{name}")
    assert (await account_for_jobs(connection, queue)).unaccounted == ((1, 3),)


@pytest.mark.slow
@pytest.mark.parametrize("archive", [True, False])
async def test_a_queue_without_an_archive_or_dead_letters_is_accounted_for(
    connection: NatsPyConnection, name: str, *, archive: bool
) -> None:
    queue = await make_queue(connection, name, consumer=SAMPLED, archive=archive, dead_letters=None)
    await done_job(connection, queue)
    await publish_jobs(connection, queue, ["deleted"])
    await connection.api(f"STREAM.PURGE.{name}")
    await all_told(connection, queue, 1)
    for _ in range(2):
        account = await account_for_jobs(connection, queue)
        assert (account.ended, account.unaccounted, account.unknown) == (1, ((2, 2),), ())
    assert json.loads(json.dumps(account.as_json()))["unaccounted"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("stored", [True, False], ids=["open", "published since"])
async def test_ends_that_were_dropped_between_two_reads_of_one_account_are_not_known(
    connection: NatsPyConnection, name: str, *, stored: bool
) -> None:
    events = {"name": f"{name}-events", "max_msgs": 2, "discard": "old"}
    queue = await make_queue(connection, name, consumer=PATIENT, events=events)
    assert (await account_for_jobs(connection, queue)).jobs == 0
    if stored:
        await publish_jobs(connection, queue, ["done"] * 4)

    async def meanwhile() -> None:
        await publish_jobs(connection, queue, ["done"] * (0 if stored else 4))
        assert await process_all(connection, queue) == {"done": 4}

    await account_for_jobs(BeforeRequest(connection, f"STREAM.INFO.{name}-events", meanwhile), queue)
    account = await account_for_jobs(connection, queue)
    assert (account.unaccounted, account.ended + account.unknown_count) == ((), 4)
    assert account.unknown_count >= 2


async def test_ends_that_are_dropped_while_one_account_reads_them_are_not_known(
    connection: NatsPyConnection, name: str
) -> None:
    events = {"name": f"{name}-events", "max_msgs": 2, "discard": "old"}
    queue = await make_queue(connection, name, consumer=PATIENT, events=events)

    told = 0

    async def do_two() -> None:
        nonlocal told
        told += 2
        await publish_jobs(connection, queue, ["done"] * 2)
        assert await process_all(connection, queue) == {"done": 2}
        await eventually(is_told)

    async def is_told() -> bool:
        return bool((await connection.api(f"STREAM.INFO.{name}-events"))["state"]["last_seq"] == told)

    await do_two()
    # The account knows already which events are stored, and reads none of them yet.
    account = await account_for_jobs(BeforeRequest(connection, f"STREAM.MSG.GET.{name}-events", do_two), queue)
    assert (account.unaccounted, account.unknown) == ((), ((1, 2),))
    assert "has dropped what it stored" in " ".join(account.why_unknown)
    account = await account_for_jobs(connection, queue)
    assert (account.unaccounted, account.unknown, account.ended) == ((), ((1, 2),), 2)


async def test_a_job_that_was_deleted_in_flight_is_named_also_once_its_entry_is_removed(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=PATIENT, jobs=["deleted"])
    await pull_jobs(connection, queue, 1)

    async def meanwhile() -> None:
        await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": 1})
        await until_stored(connection, f"{name}-dead", 1)

    await account_for_jobs(BeforeRequest(connection, f"STREAM.INFO.{name}-dead", meanwhile), queue)
    await connection.api(f"STREAM.PURGE.{name}-dead")
    assert (await account_for_jobs(connection, queue)).unaccounted == ((1, 1),)


# What a worker of another consumer states of a job that it never had is no end of that job in an account.


_KINDS = ("a completion", "a cancelled job", "a termination")


async def _queue(connection: NatsPyConnection, name: str, *, archive: bool = True, ack_wait: str = "30s") -> WorkQueue:
    queue = WorkQueue(
        name=name,
        subjects=[f"{name}.jobs.>"],
        consumers=[
            Consumer(name=one, filter_subject=f"{name}.jobs.{one}", max_deliver=2, ack_wait=ack_wait)
            for one in ("own", "other")
        ],
        dead_letters=f"{name}-dead",
        events=f"{name}-events",
        archive=archive,
        audit=True,
    )
    await provision(connection, queue)
    return queue


async def _state(connection: NatsPyConnection, name: str, what: str, sequence: int, consumer: str) -> None:
    """Do what a worker of a consumer may do, whatever job it is."""
    if what == "a termination":
        before = await stored_count(connection, f"{name}-dead")
        await connection.publish(f"$JS.ACK.{name}.{consumer}.1.{sequence}.1.0.0", b"+TERM forged")

        async def announced() -> bool:
            return await stored_count(connection, f"{name}-dead") > before

        await eventually(announced)
        return
    kind = "cancelled" if what == "a cancelled job" else "completion"
    body = json.loads(completion_body(name, sequence, consumer)) | {"type": f"io.airflow.jetstream.v1.{kind}"}
    await connection.publish_acknowledged(f"completed.{name}.{consumer}.{sequence}", json.dumps(body).encode(), {})


async def _delete(connection: NatsPyConnection, name: str, sequence: int) -> None:
    await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": sequence})


def _numbers(account: JobAccount) -> tuple[int, list[tuple[int, int]], list[tuple[int, int]]]:
    return account.ended, list(account.unaccounted), list(account.unknown)


@pytest.mark.slow
@pytest.mark.parametrize("what", _KINDS)
@pytest.mark.parametrize("stated_first", [True, False])
async def test_a_deleted_job_is_unaccounted_whatever_another_consumers_worker_states(
    connection: NatsPyConnection, name: str, what: str, *, stated_first: bool
) -> None:
    queue = await _queue(connection, name, ack_wait="1s")
    await publish_jobs(connection, queue, ["job"], kind="own")
    for step in (True, False):
        if step is stated_first:
            await _state(connection, name, what, 1, "other")
        else:
            await _delete(connection, name, 1)
        await account_for_jobs(connection, queue)
    assert _numbers(await account_for_jobs(connection, queue)) == (0, [(1, 1)], [])
    report = await redrive_dead_letters(connection, queue, request_for([1]))
    assert set(report.redriven) == {1}
    assert _numbers(await account_for_jobs(connection, queue)) == (1, [], [])


@pytest.mark.slow
@pytest.mark.parametrize("what", _KINDS)
@pytest.mark.parametrize("stated_first", [True, False])
async def test_without_an_archive_it_is_not_known_whether_a_deleted_job_has_ended(
    connection: NatsPyConnection, name: str, what: str, *, stated_first: bool
) -> None:
    queue = await _queue(connection, name, archive=False)
    await publish_jobs(connection, queue, ["job"], kind="own")
    if not stated_first:
        await _delete(connection, name, 1)
    await _state(connection, name, what, 1, "other")
    if stated_first:
        # Whose job it is shows as long as it is stored.
        await account_for_jobs(connection, queue)
        await _delete(connection, name, 1)
    account = await account_for_jobs(connection, queue)
    assert _numbers(account) == ((0, [(1, 1)], []) if stated_first else (0, [], [(1, 1)]))
    assert ("no archive shows whose they were" in "".join(account.why_unknown)) is not stated_first
    assert _numbers(await account_for_jobs(connection, queue)) == _numbers(account)


@pytest.mark.slow
async def test_what_is_stated_of_an_unaccounted_job_makes_its_end_unknown_at_most(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await _queue(connection, name, archive=False)
    await publish_jobs(connection, queue, ["first", "second"], kind="own")
    for sequence in (1, 2):
        await _delete(connection, name, sequence)
    assert _numbers(await account_for_jobs(connection, queue)) == (0, [(1, 2)], [])
    await _state(connection, name, "a completion", 2, "other")
    assert _numbers(await account_for_jobs(connection, queue)) == (0, [(1, 1)], [(2, 2)])


@pytest.mark.slow
async def test_the_audits_copy_of_a_termination_by_another_consumer_ends_no_job(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await _queue(connection, name)
    await publish_jobs(connection, queue, ["job"], kind="own")
    await _state(connection, name, "a termination", 1, "other")
    await connection.api(f"STREAM.PURGE.{name}-dead")
    await _delete(connection, name, 1)
    assert _numbers(await account_for_jobs(connection, queue)) == (0, [(1, 1)], [])


@pytest.mark.slow
async def test_a_job_that_comes_after_the_queue_was_read_is_judged_as_any_other(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await _queue(connection, name)
    await publish_jobs(connection, queue, ["job"], kind="own")
    # Of a job that doesn't exist yet, as of one that does.
    for sequence in (1, 2, 3):
        await _state(connection, name, "a completion", sequence, "other")
    await account_for_jobs(connection, queue)
    await publish_jobs(connection, queue, ["later"], kind="own")
    for sequence in (1, 2):
        await _delete(connection, name, sequence)
    assert _numbers(await account_for_jobs(connection, queue)) == (0, [(1, 2)], [])


@pytest.mark.slow
@pytest.mark.parametrize("archive", [True, False])
@pytest.mark.parametrize("what", _KINDS)
async def test_a_job_that_was_done_has_ended_whatever_another_consumers_worker_states(
    connection: NatsPyConnection, name: str, what: str, *, archive: bool
) -> None:
    queue = await _queue(connection, name, archive=archive)
    await publish_jobs(connection, queue, ["before", "after"], kind="own")
    first, second = await pull_jobs(connection, queue, 2, consumer="own")
    await _state(connection, name, what, 1, "other")
    await first.ack_sync()
    await second.ack_sync()
    await _state(connection, name, what, 2, "other")
    assert _numbers(await account_for_jobs(connection, queue)) == (2, [], [])


@pytest.mark.slow
@pytest.mark.parametrize("what", _KINDS)
async def test_what_the_jobs_own_worker_states_counts(connection: NatsPyConnection, name: str, what: str) -> None:
    queue = await _queue(connection, name)
    await connection.api(
        f"CONSUMER.CREATE.{name}.own",
        {"stream_name": name, "config": await _unsampled(connection, name), "action": "update"},
    )
    await publish_jobs(connection, queue, ["job"], kind="own")
    (message,) = await pull_jobs(connection, queue, 1, consumer="own")
    for consumer in ("other", "own", "other"):
        await _state(connection, name, what, 1, consumer)
    await message.ack_sync()
    assert _numbers(await account_for_jobs(connection, queue)) == (1, [], [])


async def _unsampled(connection: NatsPyConnection, name: str) -> dict[str, object]:
    info = await connection.api(f"CONSUMER.INFO.{name}.own")
    return {key: value for key, value in info["config"].items() if key != "sample_freq"}


@pytest.mark.slow
async def test_an_acknowledgement_of_another_consumers_job_makes_no_metric(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await _queue(connection, name)
    await publish_jobs(connection, queue, ["job"], kind="own")
    (message,) = await pull_jobs(connection, queue, 1, consumer="own")
    await connection.publish(f"$JS.ACK.{name}.other.1.1.1.0.0", b"+ACK")
    await connection.publish(f"$JS.ACK.{name}.other.1.1.1.{message.metadata.timestamp.timestamp():.0f}.0", b"+ACK")
    await connection.api(f"STREAM.INFO.{name}")
    await _delete(connection, name, 1)
    assert await stored_count(connection, f"{name}-events") == 0
    assert _numbers(await account_for_jobs(connection, queue)) == (0, [(1, 1)], [])


async def test_a_letter_that_is_published_and_discarded_while_an_account_reads_is_counted_by_the_next(
    connection: NatsPyConnection, name: str
) -> None:
    """The first account counts the jobs of before, and reads the record of the discard."""
    queue = await make_queue(connection, name)

    async def discard() -> None:
        await make_dead_letters(connection, queue, ["dead"])
        report = await redrive_dead_letters(connection, queue, RedriveRequest(discard=True, why="a test order"))
        assert len(report.discarded) == 1

    during = await account_for_jobs(BeforeRequest(connection, f"STREAM.INFO.{name}-events", discard), queue)
    assert (during.jobs, during.discarded) == (0, 0)
    after = await account_for_jobs(connection, queue)
    assert (after.jobs, after.ended, after.discarded) == (1, 1, 1)
