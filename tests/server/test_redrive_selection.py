"""Which letters a redrive brings back, and in which order."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    Protocol,
    Reason,
    RedriveRequest,
    Repair,
    Selection,
    find_dead_letters,
    preview,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.contract import dead_letter_subjects, parked_filter, parked_subject
from airflow_provider_jetstream.jetstream.errors import DeadLetterGoneError, RedriveError, RedriveRequestError
from testbed import seams
from testbed.dead_letters import (
    change_consumer,
    letter_records,
    make_terminated_letters,
    request_for,
    stored_message,
    stream_messages,
)
from testbed.face import Headers, record_headers, stream_info
from testbed.queues import (
    eventually,
    exhaust_deliveries,
    make_dead_letters,
    make_queue,
    process_all,
    publish_jobs,
    pull_jobs,
    stored_count,
)

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import DeadLetter, WorkQueue
    from testbed.face import NatsPyConnection

ORIGIN = {"Airflow-Dag-Id": "shop", "Airflow-Run-Id": "r1", "Airflow-Task-Id": "send", "Airflow-Map-Index": "-1"}
ERROR = {"Dead-Letter-Error-Class": "PrinterError", "Dead-Letter-Error-Message": "no paper in tray 7"}


async def wait_for_letters(connection: NatsPyConnection, queue: WorkQueue, count: int, **selected: Any) -> None:
    async def are_found() -> bool:
        return len((await find_dead_letters(connection, queue, Selection(**selected))).letters) == count

    await eventually(are_found)


async def five_letters(connection: NatsPyConnection, name: str) -> WorkQueue:
    """Make five dead letters of different causes.

    An Airflow task's, a terminated one, one with a worker's copy, one of another subject, and one of a second consumer.
    """
    consumers = [
        {"name": consumer, "max_deliver": 1, "ack_wait": "500ms", "filter_subjects": [f"{name}.jobs.{end}"]}
        for consumer, end in (("worker", "plain.*"), ("other", "else"))
    ]
    queue = await make_queue(connection, name, consumers=consumers)
    await publish_jobs(connection, queue, ["from airflow"], kind="plain.a", headers=ORIGIN)
    await publish_jobs(connection, queue, ["terminated", "printer"], kind="plain.a")
    await publish_jobs(connection, queue, ["subject"], kind="plain.b")
    await publish_jobs(connection, queue, ["consumer"], kind="else")
    first, second, *others = [
        *await pull_jobs(connection, queue, 4),
        *await pull_jobs(connection, queue, 1, consumer="other"),
    ]
    headers = {"Dead-Letter-Version": "1", "Dead-Letter-Subject": second.subject, **ERROR}
    await connection.client.jetstream().publish(f"dead.{name}.worker.3", b"printer", headers=headers)
    await second.respond(b"+TERM no such customer")
    for message in (first, *others):
        await message.nak()
    await wait_for_letters(connection, queue, 5)
    return queue


@pytest.mark.slow
async def test_letters_are_selected_by_each_field(connection: NatsPyConnection, name: str) -> None:
    queue = await five_letters(connection, name)
    letters = {letter.sequence: letter for letter in (await find_dead_letters(connection, queue)).letters}
    selections: dict[int | None, dict[str, Any]] = {
        4: {"subject": f"{name}.jobs.*.b"},
        1: {"dag_id": "shop", "run_id": "r1", "task_id": "send"},
        2: {"reasons": [Reason.TERMINATED]},
        3: {"error_class": "PrinterError", "fingerprint": letters[3].death.fingerprint},
        5: {"consumer": "other", "younger_than": "1h", "subject": f"{name}.>"},
    }
    nothing: tuple[dict[str, Any], ...] = (
        {"subject": "elsewhere.>"},
        {"dag_id": "shop", "task_id": "other"},
        {"older_than": "1h"},
        {"consumer": "worker", "subject": f"{name}.jobs.else"},
        {"reasons": []},
    )
    before = [await stream_messages(connection, stream) for stream in (name, f"{name}-dead")]
    for selected in nothing:
        report = await redrive_dead_letters(connection, queue, RedriveRequest(Selection(**selected)))
        assert (dict(report.redriven), report.failed, list(report.gone), list(report.parked)) == ({}, {}, [], [])
    assert [await stream_messages(connection, stream) for stream in (name, f"{name}-dead")] == before
    assert await letter_records(connection, queue) == []
    for new, (sequence, selected) in enumerate(selections.items(), 6):
        report = await redrive_dead_letters(connection, queue, RedriveRequest(Selection(**selected)))
        assert (dict(report.redriven), report.failed) == ({sequence: new}, {})
    assert (await find_dead_letters(connection, queue)).letters == ()
    assert sum([await drain_of(connection, queue, consumer) for consumer in ("worker", "other")]) == 5


async def drain_of(connection: NatsPyConnection, queue: WorkQueue, consumer: str) -> int:
    pending = (await connection.api(f"CONSUMER.INFO.{queue.name}.{consumer}"))["num_pending"]
    messages = await pull_jobs(connection, queue, pending, consumer=consumer) if pending else []
    for message in messages:
        await message.ack_sync()
    return len(messages)


@pytest.mark.slow
async def test_sequences_that_the_rest_of_the_selection_excludes_are_named(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, dead="ab")
    await make_terminated_letters(connection, queue, "c")
    await redrive_dead_letters(connection, queue, request_for([2], max_redrives=0))
    terminated = Selection(sequences=frozenset({1, 2, 3}), reasons=frozenset({Reason.TERMINATED}))
    expected = (
        r"found otherwise for 2 of 3 sequences \(1: it is dead, but the rest of the selection excludes it; 2: it is"
        r" parked; select parked to bring it back\); nothing was redriven"
    )
    for work in (redrive_dead_letters, preview):
        with pytest.raises(DeadLetterGoneError, match=expected):
            await work(connection, queue, RedriveRequest(terminated))
    assert await stored_count(connection, name) == 1
    both = Selection(sequences=frozenset({3}), reasons=frozenset({Reason.TERMINATED}))
    assert (await redrive_dead_letters(connection, queue, RedriveRequest(both))).redriven == {3: 4}
    assert await process_all(connection, queue) == {"c": 1}


@pytest.mark.slow
async def test_unaccounted_letters_come_back_only_when_they_are_selected(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, dead="ab")
    # As if the server had lost it.
    await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": 1})
    selected = RedriveRequest(Selection(unaccounted=True))
    assert (await preview(connection, queue, RedriveRequest())).redriven == 1
    assert (await preview(connection, queue, selected)).redriven == 2
    report = await redrive_dead_letters(connection, queue)
    assert (dict(report.redriven), list(report.gone)) == ({2: 3}, [1])
    report = await redrive_dead_letters(connection, queue, selected)
    assert report.redriven == {1: 4}
    assert (await redrive_dead_letters(connection, queue, selected)).redriven == {}
    assert await process_all(connection, queue) == {"a": 1, "b": 1}


UNDELIVERABLE = Selection(reasons=frozenset({Reason.UNDELIVERABLE}))


async def with_undeliverable(connection: NatsPyConnection, name: str, **fields: Any) -> WorkQueue:
    consumers = [{"name": "worker", "max_deliver": 1, "ack_wait": "500ms", "filter_subject": f"{name}.jobs.plain"}]
    queue = await make_queue(connection, name, consumers=consumers, **fields)
    await make_dead_letters(connection, queue, "a")
    await publish_jobs(connection, queue, "bc", kind="typo")
    return queue


@pytest.mark.slow
async def test_selected_undeliverable_jobs_are_redriven_to_a_subject_with_a_consumer(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await with_undeliverable(connection, name)
    request = RedriveRequest(UNDELIVERABLE, subject=f"{name}.jobs.plain")
    shown = await preview(connection, queue, RedriveRequest())
    assert (shown.redriven, shown.undeliverable) == (1, 2)
    report = await redrive_dead_letters(connection, queue)
    assert (dict(report.redriven), report.undeliverable) == ({1: 4}, 2)
    assert (await preview(connection, queue, request)).redriven == 2
    report = await redrive_dead_letters(connection, queue, request)
    assert (dict(report.redriven), report.failed) == ({2: 5, 3: 6}, {})
    copy = await stored_message(connection, name, 5)
    assert (copy.subject, copy.header("Redrive-Consumer")) == (f"{name}.jobs.plain", "")
    assert [record.reason for record in await letter_records(connection, queue)] == ["max_deliveries"] + [
        "undeliverable"
    ] * 2
    assert await process_all(connection, queue) == {"a": 1, "b": 1, "c": 1}
    assert await stored_count(connection, name) == 0


@pytest.mark.slow
async def test_undeliverable_jobs_can_be_parked(connection: NatsPyConnection, name: str) -> None:
    queue = await with_undeliverable(connection, name)
    report = await redrive_dead_letters(connection, queue, RedriveRequest(UNDELIVERABLE, max_redrives=0))
    assert list(report.parked) == [2, 3]
    assert await stored_count(connection, name) == 1


async def test_undeliverable_jobs_that_cannot_be_removed_are_refused_and_stay(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await with_undeliverable(connection, name)
    expected = (
        f"^expected a subject that a consumer takes for undeliverable jobs, found none: .* \\({name}.jobs.typo\\); name"
    )
    with pytest.raises(RedriveRequestError, match=expected):
        await redrive_dead_letters(connection, queue, RedriveRequest(UNDELIVERABLE))
    queue = await with_undeliverable(connection, f"{name}d", deny_delete=True)
    request = RedriveRequest(UNDELIVERABLE, subject=f"{name}d.jobs.plain")
    expected = (
        f"^expected a queue that allows jobs to be deleted, found deny_delete on {name}d: those that no consumer takes"
    )
    with pytest.raises(RedriveRequestError, match=expected):
        await redrive_dead_letters(connection, queue, request)
    assert await stored_count(connection, f"{name}d") == 3


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 40_000])
async def test_copies_come_back_in_the_order_of_their_jobs_whatever_order_they_died_in(
    connection: NatsPyConnection, name: str, size: int
) -> None:
    queue = await make_queue(connection, name, consumer={"filter_subject": f"{name}.jobs.>", "ack_wait": "2s"})
    for number in range(300):
        subject = f"{name}.jobs.{number % 3}"
        await connection.client.publish(subject, str(number).encode().ljust(size))
    for message in reversed(await pull_jobs(connection, queue, 300)):
        await message.nak()
    await wait_for_letters(connection, queue, 300)
    report = await redrive_dead_letters(connection, queue, RedriveRequest(protocol=Protocol.COPY))
    report.raise_for_failures()
    assert list(report.redriven) == [*range(1, 301)]
    for kind in range(3):
        copies = await stream_messages(connection, name, f"{name}.jobs.{kind}")
        assert [int(copy.data) for copy in copies] == [*range(kind, 300, 3)]


# Previews of a redrive: what it would do, without changing anything.


async def everything(connection: NatsPyConnection, queue: WorkQueue) -> list[Any]:
    """Read everything on the server that a redrive could change."""
    streams = [queue.name, *(stream.name for stream in queue.companions())]
    consumer = await connection.api(f"CONSUMER.INFO.{queue.name}.worker")
    # The time of the answer, and the count of pull requests.
    del consumer["ts"], consumer["num_waiting"]
    infos = [await stream_info(connection, stream) for stream in streams]
    return [
        consumer,
        [(info["config"], info["state"]) for info in infos],
        [await stream_messages(connection, stream) for stream in streams],
    ]


async def set_ack_wait(connection: NatsPyConnection, queue: WorkQueue, *, seconds: float) -> None:
    """Change for how long the jobs in flight stay so."""
    await change_consumer(connection, queue.name, ack_wait=round(seconds * 1e9))


@pytest.mark.slow
async def test_a_preview_has_counts_groups_and_a_sample_and_changes_nothing(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, dead="a")
    await redrive_dead_letters(connection, queue)
    await exhaust_deliveries(connection, queue, 1)
    jobs = [f"job {number}" for number in range(7)]
    await make_dead_letters(connection, queue, jobs, headers={"Job-Id": "order"})
    await make_terminated_letters(connection, queue, ["terminated", "x" * 300])
    await set_ack_wait(connection, queue, seconds=30)
    await publish_jobs(connection, queue, ["waiting", "in flight"])
    running = await pull_jobs(connection, queue, 2)

    def repair(letter: DeadLetter) -> Repair | None:
        if letter.body == b"terminated":
            raise KeyError("customer")
        return Repair(letter.body + b"!") if letter.body.startswith(b"x") else None

    request = RedriveRequest(transform=repair, max_redrives=1, rate=0.1, run="never", why="to see")
    # The first preview makes the server publish the advisories that are due.
    await preview(connection, queue, request)
    before = await everything(connection, queue)
    shown = await preview(connection, queue, request)
    assert await everything(connection, queue) == before
    for message in running:
        await message.ack_sync()
    await set_ack_wait(connection, queue, seconds=0.5)
    assert shown.protocol == Protocol.COPY
    assert (shown.redriven, shown.parked, shown.failures) == (8, 1, 1)
    cause = "the transform raised KeyError: 'customer'; the letter is untouched"
    assert shown.failed == {10: cause}
    reasons: Counter[str | None] = Counter()
    for key, group in shown.groups.items():
        reasons[key[0]] += group.count
    assert reasons == {"max_deliveries": 8, "terminated": 2}
    assert [letter["sequence"] for letter in shown.sample] == [3, 4, 5, 6, 7]
    first = shown.sample[0]
    assert (first["job_id"], first["body"], first["changes"], first["redrives"]) == ("order", "job 0", None, 0)
    long = await preview(connection, queue, request_for([11], transform=repair))
    (last,) = long.sample
    assert (last["body"], last["reason"]) == ("x" * 200, "terminated")
    assert last["changes"]["body"]["after"]["bytes"] == 301
    as_json = shown.as_json()
    assert (as_json["dry_run"], as_json["failed"], as_json["failures"]) == (True, 1, {10: cause})
    assert as_json["groups"][0]["count"] == 8
    report = await redrive_dead_letters(connection, queue, RedriveRequest(transform=repair, max_redrives=1))
    assert (len(report.redriven), len(report.parked), report.failed) == (8, 1, shown.failed)


@pytest.mark.slow
async def test_a_preview_counts_failures_beyond_those_it_names(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, dead=map(str, range(120)))

    def refuse(_: DeadLetter) -> Repair:
        raise ValueError("no")

    shown = await preview(connection, queue, RedriveRequest(transform=refuse))
    assert (shown.failures, len(shown.failed), shown.redriven) == (120, 100, 0)
    assert (shown.as_json()["failed"], len(shown.as_json()["failures"])) == (120, 20)


@pytest.mark.slow
async def test_a_preview_groups_by_the_requested_fields(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, "ab", headers={"Airflow-Dag-Id": "shop"})
    await make_dead_letters(connection, queue, "c", kind="other")
    shown = await preview(connection, queue, RedriveRequest(), ["dag_id", "subject"])
    assert {key: group.count for key, group in shown.groups.items()} == {
        ("shop", f"{name}.jobs.plain"): 2,
        (None, f"{name}.jobs.other"): 1,
    }
    shown = await preview(connection, queue, RedriveRequest(Selection(dag_id="shop")), ["consumer"])
    assert {key: group.count for key, group in shown.groups.items()} == {("worker",): 2}


# Parked letters, and their redrive.


ALL = RedriveRequest(max_redrives=0, why="the customer is gone")
PARKED = RedriveRequest(Selection(parked=True))


async def parked_letters(connection: NatsPyConnection, queue: WorkQueue) -> dict[int, DeadLetter]:
    findings = await find_dead_letters(connection, queue, PARKED.selection)
    return {letter.sequence: letter for letter in findings.letters}


async def test_a_letter_is_parked_when_it_has_been_redriven_often_enough(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, dead="a")
    request = RedriveRequest(max_redrives=2)
    for sequence in (1, 2):
        report = await redrive_dead_letters(connection, queue, request)
        assert (dict(report.redriven), list(report.parked)) == ({sequence: sequence + 1}, [])
        await exhaust_deliveries(connection, queue, 1)
    shown = await preview(connection, queue, request)
    assert (shown.redriven, shown.parked) == (0, 1)
    report = await redrive_dead_letters(connection, queue, request)
    assert (dict(report.redriven), list(report.parked), report.failed) == ({}, [3], {})
    assert await stored_count(connection, name) == 0
    letter = (await parked_letters(connection, queue))[3]
    assert (letter.redrives, letter.parked) == (2, "dead again after 2 redrives")
    assert [(record.action, record.redrives) for record in await letter_records(connection, queue)] == [
        ("redriven", 1),
        ("redriven", 2),
        ("parked", 2),
    ]


async def test_parked_letters_have_complete_records_and_no_scan_counts_them(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    pairs = (("Tag", "one"), ("Tag", "zwölf"), ("Job-Id", "order-7"), ("Nats-Msg-Id", "first"))
    body = bytes(range(256))
    await connection.client.jetstream().publish(f"{name}.jobs.a", body, headers=Headers(pairs))
    await exhaust_deliveries(connection, queue, 1)
    await make_terminated_letters(connection, queue, "b", reason="no such customer")
    before = {letter.sequence: letter for letter in (await find_dead_letters(connection, queue)).letters}
    report = await redrive_dead_letters(connection, queue, ALL)
    assert (dict(report.redriven), list(report.parked), report.failed, report.entries_left) == ({}, [1, 2], {}, 0)
    findings = await find_dead_letters(connection, queue)
    assert (findings.letters, findings.dismissed, findings.uncertain) == ((), (), 0)
    assert [message.subject for message in await stream_messages(connection, f"{name}-dead")] == [
        parked_subject(name, "worker", 1),
        parked_subject(name, "worker", 2),
    ]
    letters = await parked_letters(connection, queue)
    for sequence, letter in letters.items():
        assert (letter.body, letter.subject, letter.time, letter.death) == (
            before[sequence].body,
            before[sequence].subject,
            before[sequence].time,
            before[sequence].death,
        )
        assert sorted(letter.headers) == sorted(before[sequence].headers)
        assert letter.parked == "the customer is gone"
    assert [value for key, value in letters[1].headers if key == "Tag"] == ["one", "zwölf"]
    assert (letters[2].death.reason, letters[2].death.explanation) == (Reason.TERMINATED, "no such customer")


async def test_parked_letters_come_back_when_they_are_selected_and_leave_nothing(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, "ab", headers={"Customer": "x"})
    await redrive_dead_letters(connection, queue, ALL)
    assert (await redrive_dead_letters(connection, queue)).redriven == {}
    one = RedriveRequest(Selection(parked=True, sequences=frozenset({2})), subject=f"{name}.jobs.slow")
    report = await redrive_dead_letters(connection, queue, one)
    assert (report.protocol, list(report.redriven), report.entries_left) == (Protocol.COPY, [2], 0)
    copy = await stored_message(connection, name, report.redriven[2])
    assert (copy.header("Customer"), copy.header("Redrive-Count")) == ("x", "1")
    assert [key for key, _ in copy.headers if key.startswith("Dead-Letter-")] == []
    assert set(await parked_letters(connection, queue)) == {1}
    assert list((await redrive_dead_letters(connection, queue, PARKED)).redriven) == [1]
    assert await stored_count(connection, f"{name}-dead") == 0
    assert await process_all(connection, queue) == {"a": 1, "b": 1}


@pytest.mark.slow
async def test_three_concurrent_redrives_of_parked_letters_redrive_each_once(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    jobs = [str(number) for number in range(60)]
    await make_dead_letters(connection, queue, jobs)
    reports = await asyncio.gather(*(redrive_dead_letters(connection, queue, ALL) for _ in range(3)))
    assert all(report.failed == {} for report in reports)
    assert len(await parked_letters(connection, queue)) == 60
    assert await stored_count(connection, f"{name}-dead") == 60
    reports = await asyncio.gather(*(redrive_dead_letters(connection, queue, PARKED) for _ in range(3)))
    assert all(report.failed == {} for report in reports)
    assert await process_all(connection, queue) == dict.fromkeys(jobs, 1)
    assert await stored_count(connection, f"{name}-dead") == 0


async def test_a_dead_letter_queue_without_the_parked_subject_keeps_the_letter_and_the_failure_says_what_to_do(
    connection: NatsPyConnection, name: str
) -> None:
    *others, parked = dead_letter_subjects(name)
    assert parked == parked_filter(name)
    queue = await make_queue(connection, name, dead_letters={"name": f"{name}-dead", "subjects": others}, dead="ab")
    report = await redrive_dead_letters(connection, queue, ALL)
    expected = (
        f"expected {name}-dead to capture parked.{name}.>, found that no stream does: add that subject to be able to"
    )
    assert (list(report.parked), report.failures) == ([], 2)
    assert report.failed[1] == f"{expected} park letters"
    assert any(f"doesn't capture parked.{name}.>" in risk for risk in report.risks)
    assert len((await find_dead_letters(connection, queue)).letters) == 2
    assert (await redrive_dead_letters(connection, queue)).redriven == {1: 3, 2: 4}


async def test_a_full_dead_letter_queue_keeps_the_letter(connection: NatsPyConnection, name: str) -> None:
    letters = {"name": f"{name}-dead", "discard": "new", "max_msgs": 2}
    queue = await make_queue(connection, name, dead_letters=letters, dead="ab")
    report = await redrive_dead_letters(connection, queue, ALL)
    assert report.failed == {
        sequence: f"{name}-dead refused to park {sequence}: maximum messages exceeded" for sequence in (1, 2)
    }
    assert (await redrive_dead_letters(connection, queue)).redriven == {1: 3, 2: 4}


async def test_parking_makes_room_in_a_queue_that_is_full_of_dead_letters(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, discard="new", max_msgs=3, dead="abc")
    report = await redrive_dead_letters(connection, queue, ALL)
    assert (list(report.parked), report.failed) == ([1, 2, 3], {})
    await publish_jobs(connection, queue, "def")
    assert await process_all(connection, queue) == {"d": 1, "e": 1, "f": 1}
    assert (await redrive_dead_letters(connection, queue, PARKED)).redriven == {1: 7, 2: 8, 3: 9}
    assert await process_all(connection, queue) == {"a": 1, "b": 1, "c": 1}


async def test_parking_that_was_cut_off_before_the_original_was_removed_is_finished(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name, dead="ab")

    async def fail(*_: object) -> None:
        raise RedriveError("the original could not be removed")

    with monkeypatch.context() as patch:
        patch.setattr(seams.STORED_LETTERS_REMOVE_ORIGINALS, fail)
        report = await redrive_dead_letters(connection, queue, ALL)
    assert report.failed == dict.fromkeys((1, 2), "it is parked, but the original could not be removed")
    assert len((await find_dead_letters(connection, queue)).letters) == 2
    report = await redrive_dead_letters(connection, queue, request_for([1], max_redrives=0))
    assert list(report.parked) == [1]
    assert set(await parked_letters(connection, queue)) == {1}
    # The other letter may also be redriven.
    assert (await redrive_dead_letters(connection, queue)).redriven == {2: 3}
    assert set(await parked_letters(connection, queue)) == {1}
    assert await process_all(connection, queue) == {"b": 1}


async def test_a_letter_whose_copy_is_stored_already_is_not_parked(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name, dead="a")

    async def fail(*_: object) -> None:
        raise RedriveError("the original could not be removed")

    with monkeypatch.context() as patch:
        patch.setattr(seams.STORED_LETTERS_REMOVE_ORIGINALS, fail)
        assert (await redrive_dead_letters(connection, queue)).failures == 1
    report = await redrive_dead_letters(connection, queue, ALL)
    assert (dict(report.redriven), list(report.parked)) == ({1: 2}, [])
    assert await parked_letters(connection, queue) == {}
    assert await process_all(connection, queue) == {"a": 1}


@pytest.mark.since_server("2.14", "the reset of a consumer")
@pytest.mark.slow
@pytest.mark.parametrize("cut_off", [1, 2])
async def test_letters_that_were_parked_and_requeued_before_are_parked_again(
    connection: NatsPyConnection, name: str, cut_off: int
) -> None:
    queue = await make_queue(connection, name)
    jobs = [str(number) for number in range(10)]
    await make_dead_letters(connection, queue, jobs)
    for _ in range(cut_off):
        # A redrive that parks is killed before it records anything.
        for letter in (await find_dead_letters(connection, queue)).letters:
            await seams.current(seams.STEPS_STORE_PARKED)(connection, letter, f"{name}-dead", "the customer is gone")
        report = await redrive_dead_letters(connection, queue, RedriveRequest(protocol=Protocol.IN_PLACE))
        assert len(report.redriven) == 10
        await exhaust_deliveries(connection, queue, 10)
    report = await redrive_dead_letters(connection, queue, ALL)
    assert (len(report.parked), report.failed) == (10, {})
    assert {letter.body.decode() for letter in (await parked_letters(connection, queue)).values()} == set(jobs)
    assert len((await redrive_dead_letters(connection, queue, PARKED)).redriven) == 10
    assert await process_all(connection, queue) == dict.fromkeys(jobs, 1)


async def test_a_forged_parked_letter_does_not_take_the_place_of_a_letter(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, dead="a")
    (letter,) = (await find_dead_letters(connection, queue)).letters
    forged = record_headers(letter.death, subject="x", time=letter.time, headers=(), writer="park", parked="x")
    await connection.client.jetstream().publish(parked_subject(name, "worker", 1), b"forged", headers=forged)
    assert list((await redrive_dead_letters(connection, queue, ALL)).parked) == [1]
    assert (await parked_letters(connection, queue))[1].body == b"a"
