"""Deaths that were reported before the server restarted, or another server of a cluster took over."""

from __future__ import annotations

import asyncio
import json
import shutil
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.dev.nats_binary import find_nats_server
from airflow_provider_jetstream.jetstream import (
    DeadLetter,
    Protocol,
    RedriveRequest,
    Selection,
    Status,
    account_for_jobs,
    connect,
    connection_settings,
    find_dead_letters,
    get_message,
    redrive_dead_letters,
    take_cursor,
    wait,
)
from airflow_provider_jetstream.jetstream.contract import MAX_DELIVERIES, late_ack_subject
from airflow_provider_jetstream.jetstream.errors import DeadLetterGoneError, NotFoundError, UnreachableError
from airflow_provider_jetstream.worker import Delivery, GiveUpError, Worker
from testbed.dead_letters import change_stream, request_for, stream_messages
from testbed.face import Scan, consumer_info, last_message, stream_info, summarise_dead_letters
from testbed.nats_binaries import nats_server_of
from testbed.nats_cluster import NatsCluster
from testbed.nats_server import NatsServer
from testbed.queues import (
    CONSUMER,
    completion_body,
    eventually,
    exhaust_deliveries,
    make_dead_letters,
    make_queue,
    probe,
    process_all,
    publish_jobs,
    pull_jobs,
    running_worker,
    stored_count,
    until_stored,
)
from testbed.tcp_proxy import tcp_proxy

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator
    from pathlib import Path

    from airflow_provider_jetstream.jetstream import ConnectionSettings, WorkQueue
    from testbed.face import NatsPyConnection

# After this time the server has stored what it knows of its consumers.
PERSISTED = 1.5
COUNT = 13

# The consumer whose start shows that the server was restarted.
UPTIME_CONSUMER = "uptime"


def settings_of(server: NatsServer) -> ConnectionSettings:
    return connection_settings({"servers": (server.url,), "timeout": 5})


async def finish(connection: NatsPyConnection, queue: WorkQueue, sequences: Iterable[int]) -> None:
    """Acknowledge jobs as the workers do that have them still."""
    for sequence in sequences:
        await connection.request(late_ack_subject(queue.name, CONSUMER, sequence), b"+ACK")


async def forget_deaths(server: NatsServer, name: str) -> tuple[WorkQueue, list[int], list[int]]:
    """Kill a server right after it has reported deaths, while as many others went unreported and one job runs.

    :return: the queue, the unreported dead jobs, and those whose reported death the server has forgotten
    """
    async with connect(settings_of(server)) as connection:
        queue = await make_queue(connection, name, consumer={"ack_wait": "120s"}, jobs=["running"])
        await pull_jobs(connection, queue, 1)
        unreported = await make_dead_letters(connection, queue, map(str, range(COUNT)))
        await connection.api(f"STREAM.PURGE.{name}-dead")
        reported = await publish_jobs(connection, queue, [f"held {number}" for number in range(COUNT)])
        await asyncio.sleep(PERSISTED)
        held = await pull_jobs(connection, queue, COUNT)
        # The server stores these deliveries; it would store the deaths, too, if more time passed before them.
        await asyncio.sleep(0.1)
        for message in held:
            await message.nak()
        # A probe of the package waits for a moment, in which the server stores what it knows of its consumers.
        request = json.dumps({"batch": 1, "no_wait": True, "max_bytes": 1}).encode()
        inbox = connection.client.new_inbox()
        await connection.client.subscribe(inbox)
        while await stored_count(connection, f"{name}-dead") < COUNT:
            await connection.client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{name}.{CONSUMER}", request, reply=inbox)
        server.kill()
    server.start()
    async with connect(settings_of(server)) as connection:
        if await count_alive(connection, queue) > 1:
            return queue, unreported, reported
    # On a busy machine the server may have stored the deaths after all.
    return await forget_deaths(server, f"{name}-again")


async def count_alive(connection: NatsPyConnection, queue: WorkQueue) -> int:
    info = await consumer_info(connection, queue.name, CONSUMER)
    return int(info["num_ack_pending"] + info["num_pending"])


@pytest.mark.slow
async def test_deaths_that_a_kill_has_undone_are_not_believed_though_the_numbers_agree(
    own_nats: NatsServer, name: str
) -> None:
    queue, unreported, reported = await forget_deaths(own_nats, name)
    async with connect(settings_of(own_nats)) as connection:
        name = queue.name
        info = await consumer_info(connection, name, CONSUMER)
        alive = await count_alive(connection, queue) - 1
        dead = 2 * COUNT - alive
        print(f"{alive} of {COUNT} reported deaths undone, {dead} jobs are dead by the numbers")
        found = await find_dead_letters(connection, queue)
        assert (found.letters, found.uncertain) == ((), dead)
        assert {job.status for job in found.dismissed} == {Status.UNCERTAIN}
        assert [risk.name for risk in found.risks].count("deaths-before-restart") == 1
        # Nor are they redriven, named or not.
        assert not (await redrive_dead_letters(connection, queue)).redriven
        named = RedriveRequest(Selection(sequences=frozenset(reported)))
        with pytest.raises(DeadLetterGoneError, match="it was dead before the server last restarted"):
            await redrive_dead_letters(connection, queue, named)
        # What was done runs no second time, and the others are found once nothing is in flight.
        await finish(connection, queue, [job for job in (*reported, 1) if job <= info["delivered"]["stream_seq"]])
        await process_all(connection, queue)
        found = await find_dead_letters(connection, queue)
        assert ([letter.sequence for letter in found.letters], found.uncertain) == (unreported, 0)
        assert await stored_count(connection, name) == COUNT


@pytest.mark.slow
@pytest.mark.since_server("2.11", "the pause of a consumer")
async def test_a_count_under_a_pause_makes_them_certain(own_nats: NatsServer, name: str) -> None:
    queue, unreported, reported = await forget_deaths(own_nats, name)
    name = queue.name
    async with connect(settings_of(own_nats)) as connection:
        look = asyncio.create_task(find_dead_letters(connection, queue, count_under_pause=True))

        async def is_paused() -> bool:
            return bool((await consumer_info(connection, name, CONSUMER)).get("paused"))

        await eventually(is_paused)
        # Workers finish what they have.
        info = await consumer_info(connection, name, CONSUMER)
        await finish(connection, queue, [job for job in (*reported, 1) if job <= info["delivered"]["stream_seq"]])
        found = await look
        assert ([letter.sequence for letter in found.letters], found.uncertain) == (unreported, 0)
        assert not await is_paused()


async def test_deaths_after_a_restart_are_believed_once_the_server_is_watched_again(
    own_nats: NatsServer, name: str
) -> None:
    async with connect(settings_of(own_nats)) as connection:
        queue = await make_queue(connection, name, consumer={"ack_wait": "120s"})
        first = await consumer_info(connection, f"{name}-audit", UPTIME_CONSUMER)
        await publish_jobs(connection, queue, ["running"])
        await pull_jobs(connection, queue, 1)
        await make_dead_letters(connection, queue, ["before"])
        found = await find_dead_letters(connection, queue)
        assert ([letter.sequence for letter in found.letters], found.uncertain) == ([2], 0)
        await asyncio.sleep(PERSISTED)
        own_nats.kill()
    own_nats.start()
    async with connect(settings_of(own_nats)) as connection:
        with pytest.raises(NotFoundError):
            await consumer_info(connection, f"{name}-audit", UPTIME_CONSUMER)
        found = await find_dead_letters(connection, queue)
        assert ([letter.sequence for letter in found.letters], found.uncertain) == ([], 1)
        second = await consumer_info(connection, f"{name}-audit", UPTIME_CONSUMER)
        assert second["created"] > first["created"]
        await make_dead_letters(connection, queue, ["after"])
        summary = await summarise_dead_letters(connection, queue)
        assert (summary.ranges, summary.uncertain, summary.dismissed) == ([(3, 3)], 1, {"uncertain": 1})
        # Once nothing is in flight, the numbers alone decide.
        await finish(connection, queue, [1])
        found = await find_dead_letters(connection, queue)
        assert ([letter.sequence for letter in found.letters], found.uncertain) == ([2, 3], 0)


async def test_a_scan_of_an_idle_queue_begins_to_watch_the_server(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    await connection.api(f"CONSUMER.DELETE.{name}-audit.{UPTIME_CONSUMER}")
    await find_dead_letters(connection, queue)
    assert (await stream_info(connection, f"{name}-audit"))["state"]["consumer_count"] == 1


async def test_a_consumer_that_survives_restarts_proves_no_uptime(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s"})
    await connection.api(f"CONSUMER.DELETE.{name}-audit.{UPTIME_CONSUMER}")
    config = {"durable_name": UPTIME_CONSUMER, "name": UPTIME_CONSUMER, "ack_policy": "none"}
    request = {"stream_name": f"{name}-audit", "config": config}
    await connection.api(f"CONSUMER.CREATE.{name}-audit.{UPTIME_CONSUMER}", request)
    await publish_jobs(connection, queue, ["running"])
    await pull_jobs(connection, queue, 1)
    (risk,) = [risk for risk in (await find_dead_letters(connection, queue)).risks if risk.name == "restart-unknown"]
    assert "the audit's consumer in memory that shows it can't be created, or isn't in memory" in risk


async def test_without_an_audit_restarts_are_unknown_and_the_numbers_decide(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "30s"}, audit=False, jobs=["running"])
    await pull_jobs(connection, queue, 1)
    await make_dead_letters(connection, queue, "ab")
    found = await find_dead_letters(connection, queue)
    assert ([letter.sequence for letter in found.letters], found.uncertain) == ([2, 3], 0)
    assert "restart-unknown" in {risk.name for risk in found.risks}
    await finish(connection, queue, [1])
    assert "restart-unknown" not in {risk.name for risk in (await find_dead_letters(connection, queue)).risks}


@pytest.mark.slow
async def test_letters_of_a_scan_that_lost_the_server_are_proved_anew(own_nats: NatsServer, name: str) -> None:
    async with connect(settings_of(own_nats)) as connection:
        queue = await make_queue(connection, name, consumer={"ack_wait": "120s"}, jobs=["running"])
        await pull_jobs(connection, queue, 1)
        await make_dead_letters(connection, queue, "ab")
        scan = await Scan.begin(connection, queue)
        await asyncio.sleep(PERSISTED)
        own_nats.kill()
        own_nats.start()
        await eventually(lambda: connection.client.is_connected and connection.client.stats["reconnects"] > 0)
        assert [letter.sequence async for letter in scan.letters()] == []
        assert scan.dismissed == {Status.UNCERTAIN: 2}


@pytest.mark.slow
@pytest.mark.since_server("2.12", "since when a leader leads")
async def test_another_leader_of_a_cluster_may_have_forgotten_deaths() -> None:
    with NatsCluster() as cluster:
        async with connect(connection_settings({"servers": cluster.urls, "timeout": 10})) as connection:
            queue = await make_queue(connection, "q", consumer={"ack_wait": "120s"}, num_replicas=3, jobs=["running"])
            await pull_jobs(connection, queue, 1)
            await publish_jobs(connection, queue, ["before"])
            await exhaust_deliveries(connection, queue, 1)
            found = await find_dead_letters(connection, queue)
            assert ([letter.sequence for letter in found.letters], found.uncertain) == ([2], 0)
            before = cluster.consumer_leader("q", CONSUMER)
            await connection.api(f"CONSUMER.LEADER.STEPDOWN.q.{CONSUMER}")
            await eventually(lambda: cluster.consumer_leader("q", CONSUMER) != before)
            await probe(connection, queue)
            found = await find_dead_letters(connection, queue)
            assert ([letter.sequence for letter in found.letters], found.uncertain) == ([], 1)
            (finding,) = [risk for risk in found.risks if risk.name == "deaths-before-restart"]
            assert "when another server led" in finding


@pytest.mark.slow
async def test_the_first_account_of_a_cluster_whose_streams_have_several_leaders() -> None:
    with NatsCluster() as cluster:
        async with connect(connection_settings({"servers": cluster.urls, "timeout": 10})) as connection:
            queue = await make_queue(connection, "q", consumer={"sample_freq": "100%"}, num_replicas=3)
            while cluster.leader("q") == cluster.leader("q-events"):
                await connection.api("STREAM.LEADER.STEPDOWN.q-events")
                cluster.wait_settled("q-events")
            await publish_jobs(connection, queue, ["done"] * 3)
            await process_all(connection, queue)
            account = await account_for_jobs(connection, queue)
            assert (account.ended, account.unaccounted, account.unknown) == (3, (), ())


@pytest.mark.since_server("2.14", "the reset of a consumer")
@pytest.mark.parametrize("times", [1, 2])
async def test_a_job_requeued_in_place_that_dies_after_a_kill_of_the_server_is_a_letter(
    own_nats: NatsServer, name: str, times: int
) -> None:
    """Its record in the audit is as young as the job, and both are older than the server's start."""
    in_place = RedriveRequest(protocol=Protocol.IN_PLACE)
    async with connect(settings_of(own_nats)) as connection:
        queue = await make_queue(connection, name, consumer={"ack_wait": "0.2s"})
        await make_dead_letters(connection, queue, "ab")
        for _ in range(times):
            assert list((await redrive_dead_letters(connection, queue, in_place)).redriven) == [1, 2]
            if times > 1:
                await exhaust_deliveries(connection, queue, 2)
        await asyncio.sleep(PERSISTED)
        own_nats.kill()
    own_nats.start()
    async with connect(settings_of(own_nats)) as connection:
        if times == 1:
            await exhaust_deliveries(connection, queue, 2)
        found = await find_dead_letters(connection, queue)
        assert ([letter.sequence for letter in found.letters], found.uncertain) == ([1, 2], 0)
        assert list((await redrive_dead_letters(connection, queue, in_place)).redriven) == [1, 2]


@pytest.mark.since_server("2.14", "the reset of a consumer")
async def test_a_restart_that_the_connection_doesnt_show_is_noticed_at_the_next_look(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "60s"}, dead="ab")
    scan = await Scan.begin(connection, queue)
    letters = [letter async for letter in scan.letters()]
    await publish_jobs(connection, queue, ["running"])
    await pull_jobs(connection, queue, 1)
    # What a restart of the server behind a leaf node does, and a lost acknowledgement floor with it.
    await connection.api(f"CONSUMER.DELETE.{name}-audit.{UPTIME_CONSUMER}")
    await connection.api(f"CONSUMER.RESET.{name}.{CONSUMER}", {"seq": 1})
    await pull_jobs(connection, queue, 3)
    jobs = await scan.classify_again(letters, refresh=True)
    assert [job.status for job in jobs if not isinstance(job, DeadLetter)] == [Status.UNCERTAIN] * 2


# Ends that are older than the message of their sequence, and terminations of jobs that are done.


_SAMPLED = {"max_deliver": 5, "ack_wait": "300ms", "sample_freq": "100%"}


@pytest.fixture(params=["2.15.0", "2.12.8"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NatsServer]:
    binary = find_nats_server() if request.param == "2.15.0" else nats_server_of(request.param)
    with NatsServer(tmp_path / "server", binary=binary) as running:
        yield running


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("evidence", ["completions", "ack metrics", "redriven", "handled"])
async def test_ends_of_jobs_that_a_loss_of_power_took_back_hide_no_dead_job_of_their_sequences(
    server: NatsServer, evidence: str
) -> None:
    settings = connection_settings({"servers": (server.url,), "timeout": 10})
    async with connect(settings) as connection:
        queue = await make_queue(connection, "q", consumer={"sample_freq": "100%"})
        (early,) = await publish_jobs(connection, queue, ["early"])
        (message,) = await pull_jobs(connection, queue, 1)
        await message.ack_sync()
        await asyncio.sleep(0.4)
        server.keep("q")
        await end_jobs(connection, queue, evidence)
    server.lose_power("q")
    async with connect(connection_settings({"servers": (server.url,), "timeout": 10})) as connection:
        cursor = await take_cursor(connection, queue)
        new = await make_dead_letters(connection, queue, ["new1", "new2"])
        # It ends with the first death.
        awaited = await asyncio.wait_for(wait(connection, cursor, new), 30)
        assert awaited.completed == set()
        assert awaited.dead.keys() <= set(new)
        assert awaited.dead
        assert new == [early + 1, early + 2]
        report = await redrive_dead_letters(connection, queue)
        assert report.failed == {}
        findings = await find_dead_letters(connection, queue)
        left = {letter.sequence for letter in findings.letters} | set(report.redriven)
        uncertain = {job.sequence for job in findings.dismissed if job.status == Status.UNCERTAIN}
        assert left | uncertain == set(new)
        assert await stored_count(connection, "q") == 2
        if evidence == "completions":
            assert set(report.redriven) == set(new)


# Where acknowledgements are sampled, times of jobs are read first, in another order than bodies.
@pytest.mark.parametrize("sampled", ["0", "100%"])
async def test_a_terminated_job_has_its_own_body_where_an_older_one_had_its_sequence(
    server: NatsServer, sampled: str
) -> None:
    settings = connection_settings({"servers": (server.url,), "timeout": 10})
    async with connect(settings) as connection:
        queue = await make_queue(connection, "q", consumer={"sample_freq": sampled}, jobs=["early"])
        await asyncio.sleep(0.4)
        server.keep("q")
        await publish_jobs(connection, queue, ["old1", "old2", "old3"])
    server.lose_power("q")
    async with connect(connection_settings({"servers": (server.url,), "timeout": 10})) as connection:
        await publish_jobs(connection, queue, ["new1", "new2"])
        for message in await pull_jobs(connection, queue, 3):
            await message.term()

        async def entered() -> bool:
            return await stored_count(connection, "q-dead") >= 3

        await eventually(entered)
        found = await find_dead_letters(connection, queue)
        bodies = {letter.sequence: letter.body for letter in found.letters}
        assert bodies == {1: b"early", 2: b"new1", 3: b"new2"}


async def test_a_job_without_a_copy_in_the_archive_doesnt_come_back_as_the_earlier_one_of_its_sequence(
    server: NatsServer,
) -> None:
    """Another tool had taken republish back as the later job was stored: its worker has the only copy of it."""
    settings = connection_settings({"servers": (server.url,), "timeout": 10})
    async with connect(settings) as connection:
        queue = await make_queue(connection, "q")
        await asyncio.sleep(0.4)
        server.keep("q")
        await publish_jobs(connection, queue, ["earlier"])
        await asyncio.sleep(0.4)
    server.lose_power("q")
    settings = connection_settings({"servers": (server.url,), "timeout": 10})
    async with connect(settings) as connection:
        config = await change_stream(connection, "q", republish=None)
        await publish_jobs(connection, queue, ["later"])

        def refuse(_: Delivery) -> None:
            raise GiveUpError("no paper")

        async with running_worker(Worker(queue, CONSUMER, refuse, settings)):
            await eventually(lambda: _is_gone(connection, "q"))
        await change_stream(connection, "q", republish=config["republish"])
        found = await find_dead_letters(connection, queue)
        assert ([letter.body for letter in found.letters], found.dismissed[0].status) == ([], Status.UNCERTAIN)
        assert [risk.name for risk in found.risks].count("sequences-given-again") == 1
        assert (await redrive_dead_letters(connection, queue)).redriven == {}
        assert (await redrive_dead_letters(connection, queue, request_for([1]))).redriven == {1: 2}
        assert [message.data for message in await pull_jobs(connection, queue, 1)] == [b"later"]


async def _is_gone(connection: NatsPyConnection, stream: str) -> bool:
    return await stored_count(connection, stream) == 0


async def test_a_terminated_job_is_no_earlier_one_that_was_redriven(server: NatsServer) -> None:
    settings = connection_settings({"servers": (server.url,), "timeout": 10})
    async with connect(settings) as connection:
        queue = await make_queue(connection, "q")
        await asyncio.sleep(0.4)
        server.keep("q")
        await end_jobs(connection, queue, "redriven")
    server.lose_power("q")
    async with connect(connection_settings({"servers": (server.url,), "timeout": 10})) as connection:
        new = await publish_jobs(connection, queue, ["new1", "new2"])
        assert new == [1, 2]
        for message in await pull_jobs(connection, queue, 2):
            await message.term()

        async def entered() -> bool:
            return await stored_count(connection, "q-dead") >= len(new)

        await eventually(entered)
        found = await find_dead_letters(connection, queue)
        uncertain = {job.sequence for job in found.dismissed if job.status == Status.UNCERTAIN}
        assert {letter.sequence for letter in found.letters} | uncertain == set(new)
        report = await redrive_dead_letters(connection, queue, request_for(new))
        assert set(report.redriven) == set(new)
        assert {message.data for message in await pull_jobs(connection, queue, 2)} == {b"new1", b"new2"}


@pytest.mark.parametrize("archive", [True, False])
@pytest.mark.parametrize("evidence", ["completions", "ack metrics"])
async def test_an_earlier_jobs_end_hides_no_terminated_job_without_a_copy(
    server: NatsServer, evidence: str, *, archive: bool
) -> None:
    """Nothing says when the job was stored: its copy was lost with another loss of power, or there is no archive."""
    async with connect(settings_of(server)) as connection:
        queue = await make_queue(connection, "q", archive=archive, consumer={"sample_freq": "100%"})
        await publish_jobs(connection, queue, ["early"])
        (message,) = await pull_jobs(connection, queue, 1)
        await message.ack_sync()
        await asyncio.sleep(0.4)
        server.keep("q")
        await end_jobs(connection, queue, evidence)
    server.lose_power("q")
    async with connect(settings_of(server)) as connection:
        new = await publish_jobs(connection, queue, ["new1", "new2"])
        assert new == [2, 3]

        async def archived() -> bool:
            return await stored_count(connection, "q-archive") == 5

        if archive:
            await eventually(archived)
            await connection.api("STREAM.PURGE.q-archive")
        for message in await pull_jobs(connection, queue, 2):
            await message.term()
        await _wait_for(connection, 2)
        assert (await redrive_dead_letters(connection, queue)).redriven == {}
        found = await find_dead_letters(connection, queue)
        assert {job.sequence: job.status for job in found.dismissed} == dict.fromkeys(new, Status.UNCERTAIN)
        assert [risk.name for risk in found.risks].count("unclear-ends") == 1
        # Whoever names them is told what is known of them.
        named = await find_dead_letters(connection, queue, Selection(sequences=new))
        assert {job.sequence: job.status for job in named.dismissed} == dict.fromkeys(new, Status.LOST)


@pytest.mark.parametrize("end", ["acknowledged", "completed", "terminated"])
async def test_a_letter_whose_sequence_another_job_has_since_has_its_own_body(server: NatsServer, end: str) -> None:
    """Of ends by subject the last one is stored, and it is the later job's: what became of the first one is unclear."""
    async with connect(settings_of(server)) as connection:
        queue = await make_queue(connection, "q", consumer={"ack_wait": "60s"}, jobs=["early"])
        await asyncio.sleep(0.4)
        server.keep("q")
        assert await publish_jobs(connection, queue, ["old"]) == [2]
        _, old = await pull_jobs(connection, queue, 2)
        await old.term()
        await _wait_for(connection, 1)
        (letter,) = (await find_dead_letters(connection, queue)).letters
        assert (letter.sequence, letter.body) == (2, b"old")
    server.lose_power("q")
    async with connect(settings_of(server)) as connection:
        assert await publish_jobs(connection, queue, ["new"]) == [2]
        (message,) = [job for job in await pull_jobs(connection, queue, 2) if job.data == b"new"]
        if end == "completed":
            time = int(message.metadata.timestamp.timestamp() * 1_000_000) * 1_000
            headers = {"Nats-Msg-Id": f"done:q:2:{time}"}
            body = completion_body("q", 2)
            await connection.client.jetstream().publish(f"completed.q.{CONSUMER}.2", body, headers=headers)
        if end == "terminated":
            await message.term()
            await _wait_for(connection, 2)
        else:
            await message.ack_sync()
        found = await find_dead_letters(connection, queue)
        if end == "terminated":
            # The first one's entry stays.
            assert [(letter.sequence, letter.body) for letter in found.letters] == [(2, b"new")]
            assert (await redrive_dead_letters(connection, queue)).redriven == {2: 3}
            found = await find_dead_letters(connection, queue)
        assert found.letters == ()
        assert {job.sequence: job.status for job in found.dismissed} == {2: Status.UNCERTAIN}
        assert [risk.name for risk in found.risks].count("sequences-given-again") == 1
        assert (await redrive_dead_letters(connection, queue)).redriven == {}
        named = await find_dead_letters(connection, queue, Selection(sequences=[2]))
        assert [(letter.sequence, letter.body) for letter in named.letters] == [(2, b"old")]
        (new,) = (await redrive_dead_letters(connection, queue, request_for([2]))).redriven.values()
        assert (await get_message(connection, "q", new or 0)).data == b"old"  # type: ignore[union-attr]
        assert (await find_dead_letters(connection, queue)).dismissed == ()


@pytest.mark.since_server("2.14", "the reset of a consumer")
async def test_a_job_that_is_requeued_once_more_after_a_loss_of_power_is_recorded_once_more(
    own_nats: NatsServer,
) -> None:
    """The audit remembers the record of the first time, after which others came."""
    request, copy = RedriveRequest(protocol=Protocol.IN_PLACE), RedriveRequest(protocol=Protocol.COPY)
    async with connect(settings_of(own_nats)) as connection:
        queue = await make_queue(connection, "q")
        await make_dead_letters(connection, queue, ["dead"])
        await asyncio.sleep(0.4)
        own_nats.keep("q")
        own_nats.keep("q-dead")
        assert (await redrive_dead_letters(connection, queue, request)).redriven == {1: 1}
        await exhaust_deliveries(connection, queue, 1)
        assert (await redrive_dead_letters(connection, queue, copy)).redriven == {1: 2}
    own_nats.lose_power("q")
    own_nats.lose_power("q-dead")
    async with connect(settings_of(own_nats)) as connection:
        assert (await redrive_dead_letters(connection, queue, request)).redriven == {1: 1}
        record = await last_message(connection, "q-audit", "audit.q.letters.1")
        assert record is not None
        assert json.loads(record.data)["action"] == "requeued"


@pytest.mark.since_server("2.14", "the reset of a consumer")
async def test_no_letter_is_requeued_in_place_beside_a_job_that_is_uncertain(own_nats: NatsServer) -> None:
    """A reset delivers all dead jobs of the consumer."""
    async with connect(settings_of(own_nats)) as connection:
        queue = await make_queue(connection, "q", consumer={"sample_freq": "100%", "ack_wait": "1s"}, jobs=["job"])
        await asyncio.sleep(0.4)
        own_nats.keep("q")
        (message,) = await pull_jobs(connection, queue, 1)
        await message.ack_sync()
        await until_stored(connection, "q-events", 1)
    own_nats.lose_power("q")
    async with connect(settings_of(own_nats)) as connection:
        await exhaust_deliveries(connection, queue, 1)
        await connection.api("STREAM.PURGE.q-dead")
        (dead,) = await make_dead_letters(connection, queue, ["dead"])
        report = await redrive_dead_letters(connection, queue, RedriveRequest(protocol=Protocol.IN_PLACE))
        assert (dict(report.redriven), list(report.failed)) == ({}, [dead])
        assert "found 1, of which it isn't known whether" in report.failed[dead]
        assert await count_alive(connection, queue) == 0
        # A person names the one, and then the other one comes back.
        assert list((await redrive_dead_letters(connection, queue, request_for([1]))).redriven) == [1]


async def test_a_dead_job_of_which_an_earlier_end_is_stored_is_named_and_comes_back_by_its_sequence(
    server: NatsServer,
) -> None:
    """A loss of power took its acknowledgement back, and it died in its next delivery, of which nothing is stored."""
    async with connect(settings_of(server)) as connection:
        queue = await make_queue(connection, "q", consumer={"sample_freq": "100%", "ack_wait": "1s"}, jobs=["job"])
        await asyncio.sleep(0.4)
        server.keep("q")
        (message,) = await pull_jobs(connection, queue, 1)
        await message.ack_sync()
        await until_stored(connection, "q-events", 1)
    server.lose_power("q")
    async with connect(settings_of(server)) as connection:
        await exhaust_deliveries(connection, queue, 1)
        await connection.api("STREAM.PURGE.q-dead")
        found = await find_dead_letters(connection, queue)
        assert {job.sequence: job.status for job in found.dismissed} == {1: Status.UNCERTAIN}
        assert [risk.name for risk in found.risks].count("unclear-ends") == 1
        assert (await redrive_dead_letters(connection, queue)).redriven == {}
        assert list((await redrive_dead_letters(connection, queue, request_for([1]))).redriven) == [1]


async def end_jobs(connection: NatsPyConnection, queue: WorkQueue, evidence: str) -> None:
    """End the two jobs of the next sequences, so that the companions have evidence of one kind about them."""
    if evidence in ("redriven", "handled"):
        dead = await make_dead_letters(connection, queue, ["old1", "old2"])
        if evidence == "redriven":
            assert set((await redrive_dead_letters(connection, queue)).redriven) == set(dead)
        for sequence in dead if evidence == "handled" else ():
            await connection.request(f"handled.q.{sequence}", b'{"by": "ann"}')
        return
    await publish_jobs(connection, queue, ["old1", "old2"])
    if evidence == "completions":
        for message in await pull_jobs(connection, queue, 2):
            metadata = message.metadata
            time = int(metadata.timestamp.timestamp() * 1_000_000) * 1_000
            headers = {"Nats-Msg-Id": f"done:q:{metadata.sequence.stream}:{time}"}
            subject = f"completed.q.{CONSUMER}.{metadata.sequence.stream}"
            body = completion_body("q", metadata.sequence.stream)
            await connection.client.jetstream().publish(subject, body, headers=headers)
            await message.ack_sync()
        return
    for message in await pull_jobs(connection, queue, 2):
        await message.ack_sync()

    async def reported() -> bool:
        return await stored_count(connection, "q-events") >= 3

    await eventually(reported)


@pytest.mark.parametrize("evidence", ["ack metric", "completion"])
@pytest.mark.parametrize("order", ["acknowledged first", "terminated first"])
async def test_a_termination_beside_a_stored_end_makes_no_letter(server: NatsServer, evidence: str, order: str) -> None:
    settings = connection_settings({"servers": (server.url,), "timeout": 10})
    async with connect(settings) as connection:
        queue = await make_queue(connection, "q", consumer=_SAMPLED)
        cursor = await take_cursor(connection, queue)
        await publish_jobs(connection, queue, ["job"])
        waiting = asyncio.ensure_future(wait(connection, cursor, [1]))
        (slow,) = await pull_jobs(connection, queue, 1)
        (other,) = await pull_jobs(connection, queue, 1)
        steps: list[Callable[[], Awaitable[Any]]] = [
            other.ack_sync,
            lambda: connection.client.publish(slow.reply, b"+TERM gave up"),
        ]
        if evidence == "completion":
            steps[0] = lambda: connection.client.jetstream().publish(
                f"completed.q.{CONSUMER}.1", completion_body("q", 1)
            )
        elif order == "terminated first":
            # The server reports no acknowledgement of a job that is gone: it is terminated instead.
            steps[0] = other.ack
        for step in steps if order == "acknowledged first" else reversed(steps):
            await step()
            await connection.client.flush()
        await until_stored(connection, "q-dead", 1)
        findings = await find_dead_letters(connection, queue)
        late = asyncio.ensure_future(wait(connection, cursor, [1]))
        if (evidence, order) == ("ack metric", "terminated first"):
            assert [letter.sequence for letter in findings.letters] == [1]
            assert [set((await found).dead) for found in (waiting, late)] == [{1}, {1}]
            return
        assert (await late).completed == {1}
        await waiting
        assert findings.letters == ()
        assert [job.status for job in findings.dismissed] == [Status.COMPLETED]
        assert findings.uncertain == 0
        assert (await redrive_dead_letters(connection, queue)).redriven == {}
        assert await stored_count(connection, "q") == 0


@pytest.mark.slow
async def test_a_redrive_during_which_entries_are_lost_removes_no_others_that_have_their_sequences(
    own_nats: NatsServer, name: str
) -> None:
    """The power fails while the redrive waits for workers; then another job is terminated."""
    async with connect(settings_of(own_nats)) as connection, connect(settings_of(own_nats)) as other:
        queue = await make_queue(connection, name, archive=True, consumer={"ack_wait": "4s"})
        await asyncio.sleep(0.4)
        own_nats.keep(f"{name}-dead")
        await make_dead_letters(connection, queue, ["dead"])
        await until_stored(other, f"{name}-dead", 1)
        redriving = asyncio.create_task(redrive_dead_letters(connection, queue))

        async def has_begun() -> bool:
            return await last_message(other, f"{name}-audit", f"audit.{name}.redrives.>") is not None

        await eventually(has_begun)
        own_nats.lose_power(f"{name}-dead")
        await eventually(lambda: other.client.is_connected and other.client.stats["reconnects"] > 0)
        await publish_jobs(other, queue, ["terminated"])
        (message,) = await pull_jobs(other, queue, 1)
        await message.term()
        await until_stored(other, f"{name}-dead", 1)
        with suppress(UnreachableError):
            await redriving
        await redrive_dead_letters(connection, queue)
        bodies = [message.data for message in await pull_jobs(connection, queue, 2)]
        assert sorted(bodies) == [b"dead", b"terminated"]
        assert await stored_count(connection, name) == 2


@pytest.mark.parametrize(("others", "done"), [(0, False), (2, False), (2, True)])
async def test_a_letter_whose_new_job_a_loss_of_power_took_is_redriven_once_more(
    server: NatsServer, others: int, *, done: bool
) -> None:
    """The audit says that it was redriven; but the queue has neither the new job nor that the letter was removed."""
    streams, kept = server.store / "jetstream" / "$G" / "streams", server.folder / "before"
    async with connect(connection_settings({"servers": (server.url,), "timeout": 10})) as connection:
        queue = await make_queue(connection, "q", dead=["a"])
        assert len((await find_dead_letters(connection, queue)).letters) == 1
        await asyncio.sleep(0.4)
        for stream in ("q", "q-dead"):
            shutil.copytree(streams / stream, kept / stream)
        assert (await redrive_dead_letters(connection, queue)).redriven == {1: 2}
    server.kill()
    for stream in ("q", "q-dead"):
        shutil.rmtree(streams / stream)
        shutil.copytree(kept / stream, streams / stream)
    server.start()
    async with connect(connection_settings({"servers": (server.url,), "timeout": 10})) as connection:
        if others:
            # Another job has the sequence of the one that is lost.
            await publish_jobs(connection, queue, ["b"] * others)
        if done:
            assert await process_all(connection, queue) == {"b": others}
        report = await redrive_dead_letters(connection, queue)
        assert report.failed == {}
        assert report.redriven == {1: 2 + others}
        left = [b"a"] if done else [b"a"] + [b"b"] * others
        bodies = [message.data for message in await pull_jobs(connection, queue, len(left))]
        assert sorted(bodies) == left


async def test_a_letter_whose_new_job_and_the_copy_of_the_job_in_its_place_are_lost_is_named_and_comes_back(
    server: NatsServer,
) -> None:
    """The audit says that it was redriven; another job has had the new job's sequence, and a second loss its copy."""
    streams, kept = server.store / "jetstream" / "$G" / "streams", server.folder / "before"
    async with connect(connection_settings({"servers": (server.url,), "timeout": 10})) as connection:
        queue = await make_queue(connection, "q", dead=["a"])
        assert len((await find_dead_letters(connection, queue)).letters) == 1
        await asyncio.sleep(0.4)
        for stream in ("q", "q-dead", "q-archive"):
            shutil.copytree(streams / stream, kept / stream)
        assert (await redrive_dead_letters(connection, queue)).redriven == {1: 2}
    _lose_power(server, kept, "q", "q-dead", "q-archive")
    async with connect(connection_settings({"servers": (server.url,), "timeout": 10})) as connection:
        await publish_jobs(connection, queue, ["b"])
        assert await process_all(connection, queue) == {"b": 1}
        await asyncio.sleep(0.4)
    _lose_power(server, kept, "q-archive")
    async with connect(connection_settings({"servers": (server.url,), "timeout": 10})) as connection:
        assert (await redrive_dead_letters(connection, queue)).redriven == {}
        found = await find_dead_letters(connection, queue)
        assert [(job.sequence, job.status) for job in found.dismissed] == [(1, Status.UNCERTAIN)]
        assert [risk.name for risk in found.risks].count("new-jobs-without-copies") == 1
        report = await redrive_dead_letters(connection, queue, RedriveRequest(Selection(sequences=[1])))
        assert report.redriven == {1: 3}
        assert [message.data for message in await pull_jobs(connection, queue, 1)] == [b"a"]


def _lose_power(server: NatsServer, kept: Path, *streams: str) -> None:
    """Kill a server, and have some of its streams be as they were before."""
    server.kill()
    for stream in streams:
        folder = server.store / "jetstream" / "$G" / "streams" / stream
        shutil.rmtree(folder)
        shutil.copytree(kept / stream, folder)
    server.start()


@pytest.mark.parametrize("is_parked", [False, True])
async def test_an_account_names_the_terminated_jobs_whose_entries_a_loss_of_power_took(
    server: NatsServer, *, is_parked: bool
) -> None:
    """An account had read the entries, and is stored in the audit, whose file is newer than the dead letter queue's."""
    async with connect(connection_settings({"servers": (server.url,), "timeout": 10})) as connection:
        queue = await make_queue(connection, "q", archive=True, consumer={"sample_freq": "100%"})
        await publish_jobs(connection, queue, ["early", "redriven", "lost"])
        early, redriven, lost = await pull_jobs(connection, queue, 3)
        await early.term()
        await _wait_for(connection, 1)
        await asyncio.sleep(0.4)
        server.keep("q-dead")
        await redriven.term()
        await lost.term()
        await _wait_for(connection, 3)
        assert (await account_for_jobs(connection, queue)).unaccounted == ()
        assert (await redrive_dead_letters(connection, queue, request_for([2]))).redriven == {2: 4}
        if is_parked:
            parked = await redrive_dead_letters(connection, queue, request_for([3], max_redrives=0))
            assert list(parked.parked) == [3]
        # The first account reads the entries, the second one also what was done with them.
        assert (await account_for_jobs(connection, queue)).unaccounted == ()
    server.lose_power("q-dead")
    async with connect(connection_settings({"servers": (server.url,), "timeout": 10})) as connection:
        assert [letter.sequence for letter in (await find_dead_letters(connection, queue)).letters] == [1]
        for _ in range(2):
            account = await account_for_jobs(connection, queue)
            assert (account.unaccounted, account.unknown) == (((3, 3),), ())
        assert (await redrive_dead_letters(connection, queue, request_for([3]))).redriven == {3: 5}
        assert {message.data for message in await pull_jobs(connection, queue, 2)} == {b"redriven", b"lost"}
        assert (await account_for_jobs(connection, queue)).unaccounted == ()


async def _wait_for(connection: NatsPyConnection, entries: int) -> None:
    async def entered() -> bool:
        return await stored_count(connection, "q-dead") >= entries

    await eventually(entered)


@pytest.mark.parametrize(("death", "archive"), [("terminated", True), ("used up", True), ("used up", False)])
async def test_a_parked_job_whose_death_a_restarted_server_announces_again_is_brought_back(
    server: NatsServer, *, death: str, archive: bool
) -> None:
    async with connect(settings_of(server)) as connection:
        queue = await make_queue(connection, "q", archive=archive, jobs=["job"])
        (message,) = await pull_jobs(connection, queue, 1)
        await (message.term() if death == "terminated" else message.nak())
        await probe(connection, queue)
        await _wait_for(connection, 1)
    server.kill()
    server.start()
    async with connect(settings_of(server)) as connection:
        parked = await redrive_dead_letters(connection, queue, RedriveRequest(max_redrives=0))
        assert list(parked.parked) == [1]
        advisory = {
            "type": "io.nats.jetstream.advisory.v1.max_deliver",
            "timestamp": datetime.now(UTC).isoformat(),
            "stream": "q",
            "consumer": CONSUMER,
            "stream_seq": 1,
            "deliveries": 1,
        }
        subject = f"{MAX_DELIVERIES}.q.{CONSUMER}"
        await connection.client.jetstream().publish(subject, json.dumps(advisory).encode())
        found = await find_dead_letters(connection, queue)
        assert (found.letters, found.dismissed) == ((), ())
        report = await redrive_dead_letters(connection, queue, RedriveRequest(Selection(parked=True)))
        assert dict(report.redriven) == {1: 2}


# Ends of deliveries from before a loss of power: they are nobody else's, although another job has the sequence.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "end"),
    [("2.15.0", "done"), ("2.12.8", "done"), ("2.15.0", "acknowledged"), ("2.15.0", "failed"), ("2.15.0", "given up")],
)
async def test_an_end_from_before_a_loss_of_power_ends_no_other_job_of_its_sequence(
    tmp_path: Path, version: str, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    binary = find_nats_server() if version == "2.15.0" else nats_server_of(version)
    caplog.set_level("INFO", "jetstream.worker")
    began: list[tuple[str, int]] = []
    ends = {"early": asyncio.Event(), "late": asyncio.Event()}

    async def handle(job: Delivery) -> None:
        body = job.body.decode()
        began.append((body, job.attempt))
        await ends[body].wait()
        if (body == "late" and job.attempt == 1) or (body == "early" and end == "failed"):
            raise ValueError("failed")
        if body == "early" and end == "given up":
            raise GiveUpError("broken")

    with NatsServer(tmp_path / "server", binary=binary) as server:
        async with tcp_proxy(server.port) as proxy:
            async with connect(connection_settings({"servers": (server.url,), "timeout": 10})) as connection:
                queue = await make_queue(connection, "q", consumer={"ack_wait": "60s", "max_deliver": 3})
                await asyncio.sleep(0.4)
                server.keep("q")
            settings = connection_settings({"servers": (proxy.url,), "timeout": 10})
            async with running_worker(Worker(queue, "worker", handle, settings, concurrency=2)):
                early = await _publish(server, queue, "early")
                await eventually(lambda: began == [("early", 1)])
                if end == "acknowledged":
                    proxy.pause_at(b"$JS.ACK.q.worker.")
                    ends["early"].set()
                    await proxy.found.wait()
                proxy.cut()
                proxy.drop()
                server.lose_power("q")
                assert await _publish(server, queue, "late") == early
                proxy.mend()
                await eventually(lambda: ("late", 1) in began)
                ends["early"].set()
                await eventually(lambda: "job ended" in caplog.text, within=30)
                for _ in range(4 if end == "failed" else 1):
                    await asyncio.sleep(0.4)
                    assert began == [("early", 1), ("late", 1)]
                ends["late"].set()
                await eventually(lambda: began[2:] == [("late", 2)], within=30)


async def _publish(server: NatsServer, queue: WorkQueue, body: str) -> int:
    async with connect(connection_settings({"servers": (server.url,), "timeout": 10})) as connection:
        (sequence,) = await publish_jobs(connection, queue, [body])
        return sequence


@pytest.mark.slow
async def test_a_redrive_that_a_loss_of_power_interrupts_ends_no_other_job_of_its_letters_sequence(
    own_nats: NatsServer,
) -> None:
    """The power fails before an original is removed whose copy a killed redrive had stored."""
    async with connect(settings_of(own_nats)) as connection, tcp_proxy(own_nats.port) as proxy:
        queue = await make_queue(connection, "q", archive=True, consumer={"ack_wait": "2s"})
        await asyncio.sleep(0.4)
        own_nats.keep("q")
        await make_dead_letters(connection, queue, ["dead"])
        settings = connection_settings({"servers": (proxy.url,), "timeout": 10})
        async with connect(settings) as redriving:
            proxy.pause_at(b"$JS.ACK.q.worker.")
            redrive = asyncio.create_task(redrive_dead_letters(redriving, queue))
            await proxy.found.wait()
            redrive.cancel()
            proxy.cut()
            proxy.drop()
            with suppress(asyncio.CancelledError):
                await redrive
        proxy.mend()
        async with connect(settings) as redriving:
            # The first time it proves the letter; the second time it looks whether the copy is recorded.
            record = b'{"last_by_subj": "audit.q.letters.1"}'
            proxy.pause_at(record)
            redrive_again = asyncio.create_task(redrive_dead_letters(redriving, queue))
            await proxy.found.wait()
            proxy.pause_at(record)
            proxy.resume()
            await proxy.found.wait()
            proxy.cut()
            proxy.drop()
            own_nats.lose_power("q")
            await eventually(lambda: connection.reconnects > 0)
            assert await publish_jobs(connection, queue, ["other"]) == [1]
            (message,) = await pull_jobs(connection, queue, 1)
            proxy.mend()
            report = await redrive_again
        assert (dict(report.redriven), list(report.failed)) == ({}, [1])
        assert report.failed[1].startswith("it is redriven, but q stores another job as 1")
        assert [job.data for job in await stream_messages(connection, "q")] == [b"other"]
        await message.ack_sync()
