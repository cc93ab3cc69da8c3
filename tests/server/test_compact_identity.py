"""Jobs of tasks with long names in queues with little room: published, read, redriven and cancelled."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    Job,
    Origin,
    Protocol,
    RedriveRequest,
    Repair,
    cancel,
    find_dead_letters,
    get_message,
    preview,
    publish,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.contract import completion_filter, letter_audit_subject
from airflow_provider_jetstream.jetstream.errors import JobError, JobTooLargeError
from airflow_provider_jetstream.worker import Worker
from testbed.dead_letters import publish_raw
from testbed.face import Headers, LetterRecord, PreparedJobs, last_message, stream_info
from testbed.queues import (
    CONSUMER,
    eventually,
    exhaust_deliveries,
    make_queue,
    process_all,
    publish_jobs,
    pull_jobs,
    running_mover,
    running_worker,
    stored_count,
    until_stored,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from airflow_provider_jetstream.jetstream import ConnectionSettings, WorkQueue
    from airflow_provider_jetstream.worker import Delivery
    from testbed.face import NatsPyConnection, StoredMessage
    from testbed.nats_server import NatsServer

ORIGIN = Origin("d" * 60, "manual__" + "r" * 52, "t" * 60, 7)
IMAGE = "5e91425fc89dac47f6d2e95d4cf6b74a"
IMAGE_JOB = {"id": IMAGE, "image": f"file:///data/work/{IMAGE}.jpg", "advisory": f"advisory.{IMAGE}"}
# Its size as the document writes it.
IMAGE_BODY = json.dumps(IMAGE_JOB).encode()
LIMIT = 512
# The least headers of a job that a task publishes, and of its copy, where the body doesn't state the id.
JOB_HEADERS, COPY_HEADERS = 97, 140


async def stored(connection: NatsPyConnection, stream: str, sequence: int) -> StoredMessage:
    message = await get_message(connection, stream, sequence)
    assert message is not None
    return message


def wire_size(headers: Mapping[str, str]) -> int:
    """Return how many bytes headers take on the wire."""
    return len("NATS/1.0\r\n\r\n") + sum(len(f"{name}: {value}\r\n".encode()) for name, value in headers.items())


def size(message: StoredMessage) -> int:
    return len(message.data) + wire_size(Headers(message.headers))


async def make_letter(connection: NatsPyConnection, queue: WorkQueue, *jobs: object) -> list[int]:
    report = await publish(connection, queue, list(jobs), subject=f"{queue.name}.jobs.a", origin=ORIGIN)
    await exhaust_deliveries(connection, queue, len(jobs))
    return list(report.sequences)


@pytest.mark.slow
async def test_an_image_job_of_a_task_with_long_names_is_published_and_redriven_within_512_bytes(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, max_msg_size=LIMIT)
    assert len(IMAGE_BODY) >= 161
    await make_letter(connection, queue, Job(IMAGE_BODY, id=IMAGE, advisory=IMAGE_JOB["advisory"]))
    job = await stored(connection, name, 1)
    assert dict(job.headers) == {"Nats-Msg-Id": ORIGIN.message_id(IMAGE), "Airflow-Task": ORIGIN.key}
    assert size(job) == len(IMAGE_BODY) + JOB_HEADERS
    for redrives in (1, 2):
        (letter,) = (await find_dead_letters(connection, queue)).letters
        assert (letter.job_id, letter.origin, letter.redrives) == (IMAGE, ORIGIN, redrives - 1)
        report = await redrive_dead_letters(connection, queue)
        assert report.protocol == Protocol.COPY
        assert (len(report.redriven), report.failed) == (1, {})
        copy = await stored(connection, name, report.redriven[letter.sequence])
        assert size(copy) <= LIMIT
        assert copy.header("Redrive-Sequence") == str(letter.sequence)
        assert copy.header("Job-Id") is None
        await exhaust_deliveries(connection, queue, 1)


@pytest.mark.slow
async def test_the_largest_job_whose_copy_fits_is_published_and_one_byte_more_is_refused(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, max_msg_size=LIMIT)
    room = LIMIT - COPY_HEADERS
    with pytest.raises(JobTooLargeError) as caught:
        await publish(connection, queue, [b"small", b"x" * (room + 1)], subject=f"{name}.jobs.a", origin=ORIGIN)
    assert str(caught.value) == (
        f"job 1 has {room + 1 + JOB_HEADERS} bytes, but its redriven copy would have at least 513, and {name} stores at"
        " most 512, so that it couldn't be redriven as a dead letter: send a reference instead of the data, or raise"
        f" max_msg_size of {name}"
    )
    with pytest.raises(
        JobTooLargeError, match=r"job 0 has 513 bytes, 416 of them its body, and \w+ stores at most 512"
    ):
        await publish(connection, queue, [b"x" * (LIMIT - JOB_HEADERS + 1)], subject=f"{name}.jobs.a", origin=ORIGIN)
    assert (await stream_info(connection, name))["state"]["last_seq"] == 0
    await make_letter(connection, queue, b"x" * room)
    (first,) = (await find_dead_letters(connection, queue)).letters
    job_id = first.job_id
    (job,) = PreparedJobs([b"x" * room], subject=f"{name}.jobs.a", origin=ORIGIN, batch="")
    assert job_id == job.message_id
    for redrives in (1, 2, 3):
        (letter,) = (await find_dead_letters(connection, queue)).letters
        report = await redrive_dead_letters(connection, queue)
        assert (report.protocol, report.failed) == (Protocol.COPY, {})
        copy = await stored(connection, name, report.redriven[letter.sequence])
        # The message id of the proof has two digits for the count.
        assert size(copy) == LIMIT - 1
        assert set(dict(copy.headers)) == {"Airflow-Task", "Job-Id", "Nats-Msg-Id"}
        record = await last_message(connection, f"{name}-audit", letter_audit_subject(name, letter.sequence))
        assert record is not None
        audited = LetterRecord.model_validate_json(record.data)
        assert (audited.redrives, audited.consumer, audited.new_sequence) == (redrives, CONSUMER, copy.sequence)
        assert audited.left_out == {
            "Redrive-Count": str(redrives),
            "Redrive-Stream": name,
            "Redrive-Sequence": str(letter.sequence),
            "Redrive-Consumer": CONSUMER,
        }
        await exhaust_deliveries(connection, queue, 1)
        (again,) = (await find_dead_letters(connection, queue)).letters
        assert (again.job_id, again.redrives, again.origin) == (job_id, redrives, ORIGIN)


async def test_jobs_of_an_iterator_are_published_up_to_the_first_that_does_not_fit(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, max_msg_size=LIMIT)

    def bodies() -> Iterator[bytes]:
        yield b"a"
        yield b"x" * LIMIT

    with pytest.raises(JobTooLargeError, match="job 1 has 609 bytes"):
        await publish(connection, queue, bodies(), subject=f"{name}.jobs.a", origin=ORIGIN)
    await eventually(lambda: stored_count(connection, name))
    assert (await stored(connection, name, 1)).data == b"a"


async def test_a_queue_without_dead_letters_takes_jobs_that_could_not_be_redriven(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, max_msg_size=LIMIT, dead_letters=None)
    await publish(connection, queue, [b"x" * (LIMIT - JOB_HEADERS)], subject=f"{name}.jobs.a", origin=ORIGIN)
    assert size(await stored(connection, name, 1)) == LIMIT


async def test_the_limit_of_the_stream_counts_where_the_declaration_has_none(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    config = (await stream_info(connection, name))["config"]
    await connection.api(f"STREAM.UPDATE.{name}", config | {"max_msg_size": 200})
    with pytest.raises(JobTooLargeError, match="stores at most 200"):
        await publish(connection, queue, [b"x", b"x" * 104], subject=f"{name}.jobs.a", origin=ORIGIN)
    assert await stored_count(connection, name) == 0


@pytest.mark.since_server("2.14", "the reset of a consumer")
async def test_foreign_jobs_that_leave_no_room_for_a_copy_are_requeued_in_place(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, max_msg_size=LIMIT)
    full = "x" * (LIMIT - len("NATS/1.0\r\n\r\n") - len("Airflow-Dag-Id: d\r\n"))
    await publish_jobs(connection, queue, [full, "small"], headers={"Airflow-Dag-Id": "d"})
    await exhaust_deliveries(connection, queue, 2)
    named = RedriveRequest(protocol=Protocol.COPY)
    assert set((await preview(connection, queue, named)).failed) == {1}
    expected = await preview(connection, queue, RedriveRequest())
    assert (expected.redriven, expected.failures) == (2, 0)
    report = await redrive_dead_letters(connection, queue)
    assert (dict(report.redriven), report.failed, report.entries_left) == ({2: 3, 1: 1}, {}, 0)
    assert await process_all(connection, queue) == {full: 1, "small": 1}
    assert await stored_count(connection, name) == 0
    assert (await find_dead_letters(connection, queue)).letters == ()


@pytest.mark.slow
async def test_a_letter_without_room_stays_where_in_place_is_impossible(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, max_msg_size=LIMIT)
    full = "x" * LIMIT
    await publish_jobs(connection, queue, [full, "small"])
    await exhaust_deliveries(connection, queue, 2)
    report = await redrive_dead_letters(connection, queue, RedriveRequest(rate=1_000))
    assert dict(report.redriven) == {2: 3}
    assert report.failed == {
        1: f"expected a copy of at most 512 bytes (max_msg_size of {name}), found 571 for job 1, 512 of them its body:"
        " raise that limit, repair the body, or redrive all letters in place; original kept"
    }
    assert await process_all(connection, queue) == {"small": 1}


@pytest.mark.parametrize(("room", "named"), [(1_000, True), (400, False)])
async def test_without_a_record_the_task_is_named_where_there_is_room(
    connection: NatsPyConnection, name: str, room: int, *, named: bool
) -> None:
    queue = await make_queue(connection, name, max_msg_size=room, events=None)
    await publish(connection, queue, [b"x" * 100], subject=f"{name}.jobs.a", origin=ORIGIN)
    job = await stored(connection, name, 1)
    names = {"Airflow-Dag-Id", "Airflow-Run-Id", "Airflow-Task-Id", "Airflow-Map-Index"} if named else set()
    assert set(dict(job.headers)) == {"Nats-Msg-Id", *names}


@pytest.mark.slow
async def test_the_worker_knows_a_job_by_its_message_id(
    connection: NatsPyConnection, settings: ConnectionSettings, name: str
) -> None:
    queue = await make_queue(connection, name)
    jetstream = connection.client.jetstream()
    for body in (b"a", b"b"):
        await jetstream.publish(f"{name}.jobs.a", body, headers={"Nats-Msg-Id": f"own-{body.decode()}"})
    await cancel(connection, queue, "own-b", "not wanted")
    ran: list[str] = []

    def handler(job: Delivery) -> None:
        ran.append(job.id)

    async with running_worker(Worker(queue, CONSUMER, handler, settings)):
        await until_stored(connection, name, 0)
    assert ran == ["own-a"]
    message = await last_message(connection, f"{name}-events", completion_filter(name))
    assert message is not None
    ended: dict[str, Any] = json.loads(message.data)
    assert (ended["job_id"], ended["why"]) == ("own-b", "not wanted")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("headers", "body", "repair", "job_id"),
    [
        ({}, b'{"id": "a"}', Repair(body={"id": "b"}), "a"),
        ({}, b'{"id": "a"}', Repair(body="x"), "a"),
        ({}, b'{"id": "a"}', Repair(headers={"Job-Id": "c"}), "c"),
        ({"Nats-Msg-Id": "m"}, b"x", Repair(), "m"),
        ({"Nats-Msg-Id": "m"}, b"x", Repair(body={"id": "m"}), "m"),
        ({"Job-Id": "j"}, b"x", Repair(headers={"Job-Id": None}), "2"),
        # No header can hold it.
        ({}, b'{"id": "a\\r\\nX: y"}', Repair(body="x"), "2"),
        ({}, b"x", Repair(), "2"),
    ],
)
async def test_a_repaired_copy_is_known_by_the_id_of_the_original(
    connection: NatsPyConnection, name: str, headers: dict[str, str], body: bytes, repair: Repair, job_id: str
) -> None:
    queue = await make_queue(connection, name)
    await connection.client.jetstream().publish(f"{name}.jobs.a", body, headers=headers or None)
    await exhaust_deliveries(connection, queue, 1)
    await redrive_dead_letters(connection, queue, RedriveRequest(transform=lambda _: repair))
    copy = await stored(connection, name, 2)
    assert copy.header("X") is None
    await exhaust_deliveries(connection, queue, 1)
    (letter,) = (await find_dead_letters(connection, queue)).letters
    assert letter.job_id == job_id


@pytest.mark.slow
@pytest.mark.parametrize(
    "every", [None, pytest.param("1s", marks=pytest.mark.since_server("2.14", "repeated schedules"))]
)
async def test_a_schedule_whose_job_the_server_could_not_store_is_refused(
    connection: NatsPyConnection, name: str, every: str | None
) -> None:
    filtered = {"filter_subject": f"{name}.jobs.>"}
    queue = await make_queue(connection, name, max_msg_size=LIMIT, schedules=True, consumer=filtered)

    async def schedule(body: bytes) -> None:
        job = Job(body, id="a", every=every) if every else Job(body, id="a", delay="1s")
        await publish(connection, queue, [job], subject=f"{name}.jobs.a", origin=ORIGIN)

    room = LIMIT
    while True:
        try:
            await schedule(b"x" * room)
            break
        except JobTooLargeError as error:
            refused, room = str(error), room - 1
    copied = f"but its redriven copy would have at least {LIMIT + 1}"
    assert (f"job 0 has {LIMIT + 1} bytes, {room + 1} of them its body" if every else copied) in refused
    async with running_mover(connection, queue):
        (message,) = await pull_jobs(connection, queue, 1)
    made = len(message.data) + wire_size(message.headers or {})
    # The sequence in the id of a repeated one has fewer digits than it might have; the copy of the other is larger.
    assert LIMIT - 20 <= made <= LIMIT
    await message.term()

    async def is_dead() -> bool:
        return bool((await find_dead_letters(connection, queue)).letters)

    await eventually(is_dead)
    assert (await redrive_dead_letters(connection, queue)).failed == {}


async def test_ids_that_could_not_be_read_alike_are_refused(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    for job_id in ("x" * 10_001, "a\ufffd"):
        with pytest.raises(JobError, match="job 0 has an id of"):
            await publish(connection, queue, [Job(b"a", id=job_id)], subject=f"{name}.jobs.a")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("headers", "body", "job_id", "redrives"),
    [
        (b"Job-Id: \xff", b'{"id": "a"}', "a", 0),
        (b"Job-Id: \xff", b"x", "1", 0),
        (b"Job-Id: " + b"x" * 20_000 + b"\r\nNats-Msg-Id: m", b"x", "m", 0),
        (b"Job-Id: \r\nNats-Msg-Id: m", b"x", "m", 0),
        (b"Nats-Msg-Id: \xff", b"x", "1", 0),
        (b"Job-Id: " + b"x" * 10_000, b"x", "x" * 10_000, 0),
        (b"Redrive-Count: " + b"9" * 4_300, b"x", "1", 0),
        (b"Redrive-Count: 1_0", b"x", "1", 0),
        (b"Redrive-Count: 999999999", b"x", "1", 999_999_999),
    ],
)
async def test_what_any_publisher_may_write_is_read_alike_by_worker_scan_and_redrive(
    nats: NatsServer,
    connection: NatsPyConnection,
    settings: ConnectionSettings,
    name: str,
    headers: bytes,
    body: bytes,
    job_id: str,
    redrives: int,
) -> None:
    queue = await make_queue(connection, name)
    await publish_raw(nats, f"{name}.jobs.a", headers, body)
    await exhaust_deliveries(connection, queue, 1)
    (letter,) = (await find_dead_letters(connection, queue)).letters
    assert (letter.job_id, letter.redrives) == (job_id, redrives)
    report = await redrive_dead_letters(connection, queue)
    (new,) = report.redriven.values()
    # In place where its headers can't be sent again.
    known_as = job_id if new == 1 or job_id != "1" else str(new)
    ran: list[str] = []

    def handler(job: Delivery) -> None:
        ran.append(job.id)

    async with running_worker(Worker(queue, CONSUMER, handler, settings)):
        await until_stored(connection, name, 0)
    assert ran == [known_as]
