"""Dead letters whose consumer is gone stay dead letters, and nothing runs them again unasked."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    Protocol,
    RedriveRequest,
    Selection,
    Status,
    WorkQueue,
    account_for_jobs,
    connect,
    connection_settings,
    discover_queue,
    find_dead_letters,
    plan,
    provision,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.contract import completion_subject
from airflow_provider_jetstream.jetstream.errors import DriftError
from testbed.dead_letters import make_terminated_letters
from testbed.face import last_message
from testbed.queues import (
    CONSUMER,
    completion_body,
    eventually,
    exhaust_deliveries,
    make_dead_letters,
    make_queue,
    probe,
    publish_jobs,
    pull_jobs,
    store_completion,
    stored_count,
    until_stored,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from nats.aio.msg import Msg

    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

_LONG = {"ack_wait": "30s"}
_BY_HAND = {"durable_name": CONSUMER, "name": CONSUMER, "ack_policy": "explicit", "deliver_policy": "all"}


async def _delete(connection: NatsPyConnection, name: str, consumer: str = CONSUMER) -> None:
    await connection.api(f"CONSUMER.DELETE.{name}.{consumer}")


async def _bodies(connection: NatsPyConnection, queue: WorkQueue, count: int) -> list[bytes]:
    return sorted(message.data for message in await pull_jobs(connection, queue, count))


@pytest.mark.slow
@pytest.mark.parametrize("deny_delete", [False, True])
async def test_letters_of_a_deleted_consumer_stay_and_are_redriven_or_parked_once(
    any_nats: NatsServer, name: str, *, deny_delete: bool
) -> None:
    async with connect(connection_settings({"servers": (any_nats.url,), "timeout": 10})) as connection:
        queue = await make_queue(connection, name, consumer=_LONG, deny_delete=deny_delete)
        await make_dead_letters(connection, queue, ["redriven", "parked", "left"])
        await publish_jobs(connection, queue, ["alive"])
        await _delete(connection, name)
        findings = await find_dead_letters(connection, queue)
        assert [(letter.sequence, letter.death.consumer, letter.consumer_absent) for letter in findings.letters] == [
            (1, CONSUMER, True),
            (2, CONSUMER, True),
            (3, CONSUMER, True),
        ]
        assert findings.uncertain == 0
        assert "consumer-missing" in [risk.name for risk in findings.risks]
        (await redrive_dead_letters(connection, queue, _named(1))).raise_for_failures()
        (await redrive_dead_letters(connection, queue, _named(2, max_redrives=0))).raise_for_failures()
        with pytest.raises(DriftError, match="it would run 1 dead letter again \\(3\\)"):
            await provision(connection, queue)
        done = await provision(connection, queue, park_dead=True)
        assert [str(step.parking) for step in done.steps if step.parking] == [
            "parks 1 dead letter first, which it would run again"
        ]
        assert await _bodies(connection, queue, 2) == [b"alive", b"redriven"]
        parked = await find_dead_letters(connection, queue, Selection(parked=True))
        assert [letter.body for letter in parked.letters] == [b"parked", b"left"]


def _command(nats: NatsServer, *arguments: object) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "airflow_provider_jetstream.command.program", *map(str, arguments)],
        capture_output=True,
        check=False,
        timeout=60,
        env={"NATS_URL": nats.url, "COLUMNS": "200"},
    )
    return done.returncode, (done.stdout + done.stderr).decode()


def _named(*sequences: int, **fields: Any) -> RedriveRequest:
    return RedriveRequest(Selection(sequences=frozenset(sequences)), **fields)


@pytest.mark.slow
async def test_letters_of_a_consumer_that_the_server_removed_are_listed_and_parked_by_commands(
    nats: NatsServer, connection: NatsPyConnection, name: str, tmp_path: Path
) -> None:
    queue = await make_queue(connection, name, consumer=_LONG, dead="ab")
    config = (await connection.api(f"CONSUMER.INFO.{name}.{CONSUMER}"))["config"]
    short = {"stream_name": name, "config": config | {"inactive_threshold": 100_000_000}}
    await connection.api(f"CONSUMER.CREATE.{name}.{CONSUMER}", short)

    async def removed() -> bool:
        return not (await connection.api(f"CONSUMER.NAMES.{name}", {}))["consumers"]

    await eventually(removed)
    file = tmp_path / "queue.yaml"
    file.write_text(queue.to_yaml())

    command = partial(_command, nats)
    code, listed = command("letters", "list", file, "--json")
    letters = [json.loads(line) for line in listed.splitlines()]
    assert (code, [letter["consumer_absent"] for letter in letters]) == (0, [True, True])
    assert f"{CONSUMER} (absent)" in command("letters", "list", file)[1]
    code, planned = command("queue", "plan", file)
    assert (code, "it would run 2 dead letters again (1, 2)" in planned) == (1, True)
    code, refused = command("queue", "apply", file)
    assert (code, "--park-dead" in refused) == (7, True)
    assert await removed()
    code, applied = command("queue", "apply", file, "--park-dead")
    assert (code, "parks 2 dead letters first" in applied) == (0, True)
    assert await stored_count(connection, name) == 0


async def test_letters_of_a_consumer_in_memory_outlive_a_restart(own_nats: NatsServer, name: str) -> None:
    settings = connection_settings({"servers": (own_nats.url,), "timeout": 10})
    async with connect(settings) as connection:
        queue = await make_queue(connection, name, consumer=_LONG | {"mem_storage": True}, dead="ab")
    own_nats.stop()
    own_nats.start()
    async with connect(settings) as connection:
        letters = (await find_dead_letters(connection, queue)).letters
        assert [(letter.sequence, letter.consumer_absent) for letter in letters] == [(1, True), (2, True)]
        assert (await connection.api(f"CONSUMER.NAMES.{name}", {}))["consumers"] in (None, [])
        await provision(connection, queue, park_dead=True)
        assert await stored_count(connection, name) == 0


async def test_a_terminated_job_a_waiting_one_and_one_that_nobody_takes_are_no_reason_to_refuse(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=_LONG)
    await make_terminated_letters(connection, queue, ["terminated"])
    await publish_jobs(connection, queue, ["waiting"])
    await _delete(connection, name)
    assert [letter.consumer_absent for letter in (await find_dead_letters(connection, queue)).letters] == [False]
    await provision(connection, queue)
    assert await _bodies(connection, queue, 1) == [b"waiting"]


async def test_another_consumer_for_the_subject_is_refused_too(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, consumer=_LONG, dead="ab")
    await make_dead_letters(connection, queue, "c", kind="other")
    await _delete(connection, name)
    consumers = [
        {"name": "plain", "max_deliver": 1, "filter_subject": f"{name}.jobs.plain"},
        {"name": "other", "max_deliver": 1, "filter_subject": f"{name}.jobs.other"},
    ]
    divided = type(queue)(**queue.model_dump(exclude_unset=True) | {"consumers": consumers})
    blocked = {step.name: step.blocked for step in (await plan(connection, divided)).blocked}
    assert {consumer.partition("/")[2]: reasons[0][:35] for consumer, reasons in blocked.items()} == {
        "plain": "it would run 2 dead letters again (",
        "other": "it would run 1 dead letter again (3",
    }


async def test_a_consumer_that_another_tool_created_anew_runs_them_and_they_are_alive(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=_LONG, dead="ab")
    await _delete(connection, name)
    await connection.api(f"CONSUMER.CREATE.{name}.{CONSUMER}", {"stream_name": name, "config": _BY_HAND})
    assert (await find_dead_letters(connection, queue)).letters == ()
    assert (await redrive_dead_letters(connection, queue)).redriven == {}
    assert await _bodies(connection, queue, 2) == [b"a", b"b"]


async def test_a_consumer_that_gave_its_subject_up_leaves_letters_behind(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=_LONG, dead="ab")
    config = (await connection.api(f"CONSUMER.INFO.{name}.{CONSUMER}"))["config"] | {"filter_subject": f"{name}.none"}
    request = {"stream_name": name, "config": config, "action": "update"}
    await connection.api(f"CONSUMER.CREATE.{name}.{CONSUMER}.{name}.none", request)
    letters = (await find_dead_letters(connection, queue)).letters
    assert [(letter.sequence, letter.consumer_absent) for letter in letters] == [(1, True), (2, True)]
    (await redrive_dead_letters(connection, queue, RedriveRequest(max_redrives=0))).raise_for_failures()
    assert await stored_count(connection, name) == 0


async def test_plan_lint_and_import_name_what_makes_a_consumer_go(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    await _delete(connection, name)
    config = _BY_HAND | {"max_deliver": 1, "inactive_threshold": 3_600_000_000_000, "mem_storage": True}
    await connection.api(f"CONSUMER.CREATE.{name}.{CONSUMER}", {"stream_name": name, "config": config})
    (step,) = [step for step in (await plan(connection, queue)).steps if step.kind == "consumer"]
    assert [note.partition(":")[0] for note in step.notes] == [
        f"consumer {CONSUMER} has an inactive_threshold of 1h",
        f"consumer {CONSUMER} is in memory (mem_storage)",
    ]
    assert all(f"note: {note}" in str(step) for note in step.notes)
    imported = await discover_queue(connection, name)
    consumer = imported.consumer(CONSUMER)
    assert (consumer.inactive_threshold, consumer.mem_storage) == (3_600_000_000_000, True)
    assert {"inactive-threshold", "memory-consumer"} <= {warning.name for warning in imported.warnings()}
    assert (await plan(connection, imported)).changes == ()
    # The threshold can be given up; the storage is what it was created with.
    kept = queue.model_dump(exclude_unset=True)
    kept["consumers"] = [kept["consumers"][0] | {"inactive_threshold": 0, "ack_wait": "30s"}]
    await provision(connection, type(queue)(**kept))
    assert (await discover_queue(connection, name)).consumer(CONSUMER).inactive_threshold is None
    kept["consumers"] = [kept["consumers"][0] | {"mem_storage": False}]
    (blocked,) = (await plan(connection, type(queue)(**kept))).blocked
    assert "mem_storage of a consumer is fixed when it is created" in blocked.blocked[0]


@pytest.mark.slow
async def test_a_job_that_died_under_an_earlier_stream_is_no_letter_of_an_absent_consumer(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=_LONG, dead="ab")
    await connection.api(f"STREAM.DELETE.{name}")
    await make_queue(connection, name, consumer=_LONG)
    await publish_jobs(connection, queue, ["new"])
    await _delete(connection, name)
    assert (await find_dead_letters(connection, queue)).letters == ()
    await provision(connection, queue)
    await exhaust_deliveries(connection, queue, 1)


async def _numbers(nats: NatsServer, name: str) -> list[tuple[int, int]]:
    """Return the dead and the undeliverable jobs by the commands for one queue and for all queues."""
    one = json.loads((await asyncio.to_thread(_command, nats, "queue", "show", name, "--json"))[1])
    # What it says of other tests' queues comes after the document.
    every, _ = json.JSONDecoder().raw_decode((await asyncio.to_thread(_command, nats, "queues", "--json"))[1])
    (row,) = [row for row in every if row["queue"] == name]
    return [(one["dead"], sum(one["undeliverable"].values())), (row["dead"], row["undeliverable"])]


@pytest.mark.slow
async def test_letters_of_a_deleted_consumer_are_counted_as_dead(
    connection: NatsPyConnection, nats: NatsServer, name: str
) -> None:
    queue = await make_queue(connection, name, consumer=_LONG, dead="abcd")
    await make_dead_letters(connection, queue, "e", kind="other")
    await publish_jobs(connection, queue, ["waits"])
    await publish_jobs(connection, queue, ["waits"], kind="untaken")
    await _delete(connection, name)
    assert await _numbers(nats, name) == [(5, 2), (5, 2)]
    for command in (("queue", "lint", name), ("queue", "show", name), ("queue", "show", name, "--json")):
        _, out = await asyncio.to_thread(_command, nats, *command)
        assert "2 jobs match no consumer" in out
        assert "have no entry, would run again" in out
    # One that took a part of the subjects since counts its own.
    by_hand = _BY_HAND | {"name": "next", "durable_name": "next", "filter_subject": f"{name}.jobs.plain"}
    await connection.api(f"CONSUMER.CREATE.{name}.next", {"stream_name": name, "config": by_hand})
    assert await _numbers(nats, name) == [(1, 1), (1, 1)]


# Jobs that another tool's change of consumers makes indistinguishable from dead ones are uncertain and left alone.


OTHER = "other"


async def _two(connection: NatsPyConnection, name: str, own: Sequence[str], others: Sequence[str]) -> WorkQueue:
    """Provision a queue with two consumers, each with the jobs of some kinds."""
    consumers = [
        {
            "name": consumer,
            "max_deliver": 3,
            "ack_wait": "30s",
            "filter_subjects": [f"{name}.jobs.{kind}" for kind in kinds],
        }
        for consumer, kinds in ((CONSUMER, own), (OTHER, others))
    ]
    return await make_queue(connection, name, consumers=consumers, archive=True)


async def _change(connection: NatsPyConnection, queue: str, consumer: str, kinds: Sequence[str], **fields: Any) -> None:
    """Update a consumer as other tools do."""
    config: dict[str, Any] = (await connection.api(f"CONSUMER.INFO.{queue}.{consumer}"))["config"]
    without = {key: value for key, value in config.items() if not key.startswith("filter_subject")}
    filters = {"filter_subjects": [f"{queue}.jobs.{kind}" for kind in kinds]}
    request = {"stream_name": queue, "config": without | filters | fields, "action": "update"}
    await connection.api(f"CONSUMER.CREATE.{queue}.{consumer}", request)


async def _work(connection: NatsPyConnection, queue: WorkQueue, kind: str, count: int, consumer: str) -> None:
    await publish_jobs(connection, queue, [b"done"] * count, kind=kind)
    for message in await pull_jobs(connection, queue, count, consumer=consumer):
        await message.ack_sync()


async def _untouched(connection: NatsPyConnection, queue: WorkQueue, uncertain: int, held: Sequence[Msg]) -> None:
    """Check that no letter is found or redriven, and that the workers complete what they have."""
    findings = await find_dead_letters(connection, queue)
    assert ([letter.sequence for letter in findings.letters], findings.uncertain) == ([], uncertain)
    assert "changed-consumer" in [risk.name for risk in findings.risks]
    for request in (
        RedriveRequest(),
        RedriveRequest(max_redrives=0),
        RedriveRequest(protocol=Protocol.COPY, waves=(1, "rest")),
    ):
        report = await redrive_dead_letters(connection, queue, request)
        assert (dict(report.redriven), list(report.parked)) == ({}, [])
    for message in held:
        await message.ack_sync()
    info = await connection.api(f"STREAM.INFO.{queue.name}")
    assert info["state"]["messages"] == uncertain - len(held)


async def test_a_job_in_flight_goes_to_the_consumer_that_gets_its_subject_too(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await _two(connection, name, "ac", "b")
    await publish_jobs(connection, queue, "12", kind="a")
    held, failed = await pull_jobs(connection, queue, 2)
    await failed.nak(delay=0.2)
    await _change(connection, name, CONSUMER, "c")
    await _change(connection, name, OTHER, "ab")
    both = [await pull_jobs(connection, queue, 2, consumer=OTHER), [held, *await pull_jobs(connection, queue, 1)]]
    assert [[message.data for message in of_one] for of_one in both] == [[b"1", b"2"]] * 2
    findings = await find_dead_letters(connection, queue)
    assert [letter.sequence for letter in findings.letters] == []
    for message in both[1] + both[0]:
        await message.ack_sync()
    assert await stored_count(connection, name) == 0
    account = await account_for_jobs(connection, queue)
    assert (list(account.unaccounted), list(account.unknown)) == ([], [])


@pytest.mark.slow
async def test_the_end_of_a_job_counts_whose_consumer_got_its_subject_while_an_account_was_made(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await _two(connection, name, "ac", "b")
    (deleted,) = await publish_jobs(connection, queue, ["deleted"], kind="a")
    await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": deleted})
    events = (await connection.api(f"STREAM.INFO.{name}-events"))["config"]
    # It waits for the end of the job that is gone.
    account = asyncio.create_task(account_for_jobs(connection, queue))
    await asyncio.sleep(0.5)
    await _change(connection, name, CONSUMER, "c")
    await _change(connection, name, OTHER, "ab")
    (done,) = await publish_jobs(connection, queue, ["done"], kind="a")
    (message,) = await pull_jobs(connection, queue, 1, consumer=OTHER)
    # The server reports no acknowledgement.
    await connection.api(f"STREAM.UPDATE.{name}-events", events | {"subjects": [f"completed.{name}.>"]})
    subject = completion_subject(name, OTHER, done)
    await connection.client.jetstream().publish(subject, completion_body(name, done, OTHER))
    await message.ack_sync()
    assert not account.done()
    await account
    later = await account_for_jobs(connection, queue)
    assert [*later.unaccounted, *later.unknown] == [(deleted, deleted)]


@pytest.mark.slow
async def test_a_subject_moved_to_a_consumer_that_was_delivered_further(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await _two(connection, name, "ac", "b")
    await publish_jobs(connection, queue, "1234", kind="a")
    await _work(connection, queue, "b", 1, OTHER)
    held = await pull_jobs(connection, queue, 2)
    await _change(connection, name, CONSUMER, "c")
    await _change(connection, name, OTHER, "ab")
    await _untouched(connection, queue, 4, held)


@pytest.mark.slow
async def test_a_subject_moved_from_a_consumer_that_was_deleted_to_a_busy_one(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await _two(connection, name, "a", "b")
    await _work(connection, queue, "b", 20, OTHER)
    await publish_jobs(connection, queue, "12", kind="a")
    await pull_jobs(connection, queue, 1)
    await _work(connection, queue, "b", 1, OTHER)
    await connection.api(f"CONSUMER.DELETE.{name}.{CONSUMER}")
    await _change(connection, name, OTHER, "ab")
    await _untouched(connection, queue, 2, [])


@pytest.mark.slow
async def test_a_subject_moved_away_and_back(connection: NatsPyConnection, name: str) -> None:
    queue = await _two(connection, name, "ac", "b")
    await _work(connection, queue, "a", 20, CONSUMER)
    await _change(connection, name, CONSUMER, "c")
    await _change(connection, name, OTHER, "ab")
    await publish_jobs(connection, queue, "12", kind="a")
    held = await pull_jobs(connection, queue, 1, consumer=OTHER)
    await _work(connection, queue, "c", 1, CONSUMER)
    await _change(connection, name, OTHER, "b")
    await _change(connection, name, CONSUMER, "ac")
    await _untouched(connection, queue, 2, held)


@pytest.mark.slow
async def test_a_filter_that_was_widened(connection: NatsPyConnection, name: str) -> None:
    queue = await _two(connection, name, "a", "b")
    await publish_jobs(connection, queue, "12", kind="c")
    await _work(connection, queue, "a", 20, CONSUMER)
    await _change(connection, name, CONSUMER, "ac")
    await _untouched(connection, queue, 2, [])


@pytest.mark.slow
@pytest.mark.since_server("2.14", "the reset of a consumer")
async def test_a_consumer_that_was_reset_past_its_jobs(connection: NatsPyConnection, name: str) -> None:
    queue = await _two(connection, name, "a", "b")
    await publish_jobs(connection, queue, "123", kind="a")
    held = await pull_jobs(connection, queue, 2)
    await connection.api(f"CONSUMER.RESET.{name}.{CONSUMER}", {"seq": 4})
    await _untouched(connection, queue, 3, held)


@pytest.mark.slow
async def test_two_consumers_that_exchanged_their_subjects(connection: NatsPyConnection, name: str) -> None:
    queue = await _two(connection, name, "a", "b")
    for kind in "aab":
        await publish_jobs(connection, queue, [kind], kind=kind)
    held = await pull_jobs(connection, queue, 2)
    for message in await pull_jobs(connection, queue, 1, consumer=OTHER):
        await message.ack_sync()
    await _change(connection, name, OTHER, "x")
    await _change(connection, name, CONSUMER, "b")
    await _change(connection, name, OTHER, "a")
    await _untouched(connection, queue, 2, held)


@pytest.mark.slow
async def test_an_entry_of_the_consumer_before_proves_nothing_about_a_delivery_of_this_one(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await _two(connection, name, "a", "b")
    await publish_jobs(connection, queue, "12", kind="a")
    await exhaust_deliveries(connection, queue, 2)
    assert len((await find_dead_letters(connection, queue)).letters) == 2
    await _change(connection, name, CONSUMER, "c")
    await _change(connection, name, OTHER, "ab")
    held = await pull_jobs(connection, queue, 2, consumer=OTHER)
    findings = await find_dead_letters(connection, queue)
    assert (findings.letters, findings.uncertain) == ((), 2)
    assert dict((await redrive_dead_letters(connection, queue)).redriven) == {}
    for message in held:
        await message.ack_sync()
    assert (await find_dead_letters(connection, queue)).letters == ()


@pytest.mark.slow
async def test_letters_with_entries_come_back_through_the_consumer_that_has_passed_them(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await _two(connection, name, "a", "b")
    await publish_jobs(connection, queue, "12", kind="a")
    await exhaust_deliveries(connection, queue, 2)
    await _work(connection, queue, "b", 1, OTHER)
    await connection.api(f"CONSUMER.DELETE.{name}.{CONSUMER}")
    await _change(connection, name, OTHER, "ab")
    report = await redrive_dead_letters(connection, queue)
    report.raise_for_failures()
    assert list(report.redriven) == [1, 2]
    assert [m.data for m in await pull_jobs(connection, queue, 2, consumer=OTHER)] == [b"1", b"2"]


@pytest.mark.slow
@pytest.mark.parametrize("has_entry", [False, True])
async def test_a_job_that_a_consumer_without_jobs_passed_is_named_and_comes_back_by_its_sequence(
    connection: NatsPyConnection, name: str, *, has_entry: bool
) -> None:
    """The consumer says neither that it skipped ahead, nor that the job of its new subject is pending."""
    queue = await _two(connection, name, "ab", "c")
    await _work(connection, queue, "b", 1, CONSUMER)
    (dead,) = await publish_jobs(connection, queue, ["dead"], kind="a")
    await exhaust_deliveries(connection, queue, 1)
    if not has_entry:
        await connection.api(f"STREAM.PURGE.{name}-dead")
    with pytest.raises(TimeoutError):
        await pull_jobs(connection, queue, 1, consumer=OTHER, within=0.3)
    await _change(connection, name, CONSUMER, "b")
    await _change(connection, name, OTHER, "ca")
    found = await find_dead_letters(connection, queue)
    assert (found.letters, found.uncertain) == ((), 1)
    if not has_entry:
        assert [risk.name for risk in found.risks if f"({dead})" in str(risk)] == ["changed-consumer"]
    # A redrive of all leaves it alone; one that names it brings it back.
    assert (await redrive_dead_letters(connection, queue)).redriven == {}
    report = await redrive_dead_letters(connection, queue, RedriveRequest(Selection(sequences=frozenset({dead}))))
    report.raise_for_failures()
    assert report.redriven == {dead: dead + 1}
    (job,) = await pull_jobs(connection, queue, 1, consumer=OTHER)
    assert (job.data, job.metadata.sequence.stream) == (b"dead", dead + 1)
    assert (await find_dead_letters(connection, queue)).uncertain == 0


@pytest.mark.slow
async def test_a_job_that_a_consumer_passed_comes_back_though_an_entry_is_about_an_earlier_job_of_its_sequence(
    connection: NatsPyConnection, name: str
) -> None:
    """So seems the entry of the job itself, where the servers of a cluster have clocks that differ."""
    await make_dead_letters(connection, await _two(connection, name, "ab", "c"), ["earlier", "earlier too"], kind="a")
    await connection.api(f"STREAM.DELETE.{name}")
    queue = await _two(connection, name, "ab", "c")
    sequences = await publish_jobs(connection, queue, ["dead", "dead too", "no entry"], kind="a")
    await exhaust_deliveries(connection, queue, 3)
    entries = (await connection.api(f"STREAM.INFO.{name}-dead"))["state"]["last_seq"]
    for entry in range(entries - 2, entries + 1):
        await connection.api(f"STREAM.MSG.DELETE.{name}-dead", {"seq": entry})
    with pytest.raises(TimeoutError):
        await pull_jobs(connection, queue, 1, consumer=OTHER, within=0.3)
    await _change(connection, name, CONSUMER, "b")
    await _change(connection, name, OTHER, "ca", ack_wait=1_000_000_000)
    found = await find_dead_letters(connection, queue)
    assert (found.letters, found.uncertain) == ((), 3)
    assert [(job.sequence, job.status) for job in found.dismissed] == [(1, Status.UNCERTAIN), (2, Status.UNCERTAIN)]
    assert [risk.name for risk in found.risks if "(1, 2, 3)" in str(risk)] == ["changed-consumer"]
    assert (await redrive_dead_letters(connection, queue)).redriven == {}
    report = await redrive_dead_letters(connection, queue, RedriveRequest(Selection(sequences=sequences)))
    report.raise_for_failures()
    assert sorted(report.redriven) == sequences
    assert len(await pull_jobs(connection, queue, 3, consumer=OTHER)) == 3
    assert (await find_dead_letters(connection, queue)).uncertain == 0


@pytest.mark.slow
async def test_a_disputed_job_whose_completion_is_stored_is_removed_by_a_redrive_of_all(
    connection: NatsPyConnection, name: str
) -> None:
    """Its worker was stopped before it acknowledged the job; its entry is lost, and another tool has edited filters."""
    queue = await _two(connection, name, "ab", "c")
    done, dead = await publish_jobs(connection, queue, ["done", "dead"], kind="a")
    await exhaust_deliveries(connection, queue, 2)
    await connection.api(f"STREAM.PURGE.{name}-dead")
    await store_completion(connection, queue, done)
    await _change(connection, name, CONSUMER, "a")
    assert (await find_dead_letters(connection, queue)).uncertain == 2
    report = await redrive_dead_letters(connection, queue)
    assert (dict(report.redriven), dict(report.failed)) == ({}, {})
    found = await find_dead_letters(connection, queue)
    assert (found.letters, found.uncertain, await stored_count(connection, name)) == ((), 1, 1)
    report = await redrive_dead_letters(connection, queue, RedriveRequest(Selection(sequences=[dead])))
    assert list(report.redriven) == [dead]


@pytest.mark.slow
@pytest.mark.since_server("2.14", "the reset of a consumer")
async def test_what_a_consumer_takes_once_it_is_reset_is_recorded(connection: NatsPyConnection, name: str) -> None:
    """A redrive in place waits an ack wait after the last death, in which another tool moves a subject."""
    queue = await _two(connection, name, "a", "b")
    for consumer, kinds in ((CONSUMER, "a"), (OTHER, "b")):
        await _change(connection, name, consumer, kinds, max_deliver=1, ack_wait=2_000_000_000)
    for kind in "aba":
        await publish_jobs(connection, queue, [kind], kind=kind)
    for consumer, count in ((CONSUMER, 2), (OTHER, 1)):
        for message in await pull_jobs(connection, queue, count, consumer=consumer):
            await message.nak()
        with pytest.raises(TimeoutError):
            await pull_jobs(connection, queue, 1, consumer=consumer, within=0.3)
    await until_stored(connection, f"{name}-dead", 3)
    async with asyncio.TaskGroup() as group:
        redrive = group.create_task(redrive_dead_letters(connection, queue, RedriveRequest(protocol=Protocol.IN_PLACE)))
        await eventually(lambda: last_message(connection, f"{name}-audit", f"audit.{name}.lease"))
        await asyncio.sleep(0.5)
        await _change(connection, name, OTHER, "c")
        await _change(connection, name, CONSUMER, "ab")
    redrive.result().raise_for_failures()
    redriven = dict(redrive.result().redriven)
    delivered = {job.metadata.sequence.stream for job in await pull_jobs(connection, queue, len(redriven))}
    for sequence in delivered:
        record = await last_message(connection, f"{name}-audit", f"audit.{name}.letters.{sequence}")
        assert record is not None
        assert json.loads(record.data)["action"] == "requeued"
    assert delivered == redriven.keys() == {1, 2, 3}


@pytest.mark.slow
async def test_a_person_redrives_them_by_their_sequences(connection: NatsPyConnection, name: str) -> None:
    queue = await _two(connection, name, "a", "b")
    await publish_jobs(connection, queue, "12", kind="c")
    await _work(connection, queue, "a", 20, CONSUMER)
    await _change(connection, name, CONSUMER, "ac")
    report = await redrive_dead_letters(connection, queue, RedriveRequest(Selection(sequences=frozenset({2}))))
    report.raise_for_failures()
    assert list(report.redriven) == [2]
    assert (await find_dead_letters(connection, queue)).uncertain == 1
    assert [m.data for m in await pull_jobs(connection, queue, 1)] == [b"2"]


async def test_provisioning_what_another_tool_has_made_counts_from_then_on(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await _two(connection, name, "a", "b")
    await publish_jobs(connection, queue, "12", kind="c")
    await _work(connection, queue, "a", 20, CONSUMER)
    await _change(connection, name, CONSUMER, "ac")
    queue = await _two(connection, name, "ac", "b")
    await publish_jobs(connection, queue, "3", kind="c")
    await _lose_deaths(connection, queue, 1)
    findings = await find_dead_letters(connection, queue)
    assert ([letter.body for letter in findings.letters], findings.uncertain) == ([b"3"], 2)


async def _lose_deaths(connection: NatsPyConnection, queue: WorkQueue, count: int) -> None:
    """Have jobs die whose advisories nothing stores."""
    letters = f"{queue.name}-dead"
    config = (await connection.api(f"STREAM.INFO.{letters}"))["config"]
    await connection.api(f"STREAM.UPDATE.{letters}", config | {"subjects": [f"dead.{queue.name}.>"]})
    for _ in range(3):
        for message in await pull_jobs(connection, queue, count):
            await message.nak()
    await probe(connection, queue)
    await connection.api(f"STREAM.UPDATE.{letters}", config)


CHANGES: Mapping[str, Mapping[str, Any]] = {
    "nothing": {},
    "ack_wait": {"ack_wait": 20_000_000_000},
    "max_deliver": {"max_deliver": 9},
    "max_ack_pending": {"max_ack_pending": 7},
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
async def test_deaths_that_nothing_stored_are_found_while_no_filter_was_changed(
    connection: NatsPyConnection, name: str, change: str
) -> None:
    queue = await _two(connection, name, "a", "b")
    await _work(connection, queue, "b", 3, OTHER)
    await publish_jobs(connection, queue, "12", kind="a")
    await _lose_deaths(connection, queue, 2)
    if CHANGES[change]:
        await _change(connection, name, CONSUMER, "a", **CHANGES[change])
    findings = await find_dead_letters(connection, queue)
    assert ([letter.body for letter in findings.letters], findings.uncertain) == ([b"1", b"2"], 0)


@pytest.mark.slow
async def test_they_are_found_after_provisioning_has_widened_a_filter(connection: NatsPyConnection, name: str) -> None:
    queue = await _two(connection, name, "a", "b")
    await publish_jobs(connection, queue, "12", kind="a")
    await _lose_deaths(connection, queue, 2)
    queue = await _two(connection, name, "ac", "b")
    findings = await find_dead_letters(connection, queue)
    assert ([letter.body for letter in findings.letters], findings.uncertain) == ([b"1", b"2"], 0)
