from __future__ import annotations

import json
import re
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import (
    Protocol,
    RedriveRequest,
    Selection,
    find_dead_letters,
    get_message,
    redrive_dead_letters,
)
from airflow_provider_jetstream.jetstream.contract import late_ack_subject
from airflow_provider_jetstream.jetstream.errors import (
    DeadLetterGoneError,
    NotFoundError,
    QueueDeclarationError,
    RedriveError,
)
from testbed import seams
from testbed.dead_letters import publish_raw
from testbed.face import redrive_message_id
from testbed.queues import (
    exhaust_deliveries,
    make_dead_letters,
    make_queue,
    process_all,
    publish_jobs,
    pull_jobs,
    small_queue,
    stored_count,
)

if TYPE_CHECKING:
    from nats.aio.msg import Msg

    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection, StoredMessage
    from testbed.nats_server import NatsServer


async def stored(connection: NatsPyConnection, queue: WorkQueue, sequence: int) -> StoredMessage:
    message = await get_message(connection, queue.name, sequence)
    assert message is not None
    return message


def only(*sequences: int) -> RedriveRequest:
    return RedriveRequest(Selection(sequences=frozenset(sequences)))


async def test_a_copy_carries_its_origin_and_none_of_the_servers_headers(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    headers = {"Nats-Msg-Id": "first", "Nats-Expected-Stream": name, "Job-Id": "order-1", "Customer": "Ünal"}
    await make_dead_letters(connection, queue, ["größe"], headers=headers)
    original = await stored(connection, queue, 1)
    report = await redrive_dead_letters(connection, queue)
    assert (dict(report.redriven), report.failed, list(report.gone), report.entries_left) == ({1: 2}, {}, [], 0)
    copy = await stored(connection, queue, 2)
    assert (copy.subject, copy.data) == (original.subject, original.data)
    assert dict(copy.headers) == {
        "Job-Id": "order-1",
        "Customer": "Ünal",
        "Redrive-Count": "1",
        "Redrive-Stream": name,
        "Redrive-Sequence": "1",
        "Redrive-Consumer": "worker",
        "Nats-Msg-Id": redrive_message_id(name, 1, original.time, 1),
    }


@pytest.mark.parametrize("deny_delete", [True, False], ids=["deny_delete", "plain"])
async def test_the_original_is_gone_and_the_copy_has_fresh_deliveries(
    connection: NatsPyConnection, name: str, *, deny_delete: bool
) -> None:
    queue = await make_queue(connection, name, deny_delete=deny_delete, consumer={"max_deliver": 3})
    await make_dead_letters(connection, queue, ["a"])
    await redrive_dead_letters(connection, queue)
    assert await get_message(connection, name, 1) is None
    (message,) = await pull_jobs(connection, queue, 1)
    assert (message.metadata.num_delivered, message.metadata.sequence.stream) == (1, 2)
    await message.ack_sync()
    assert await stored_count(connection, name) == 0
    assert (await find_dead_letters(connection, queue)).letters == ()


async def test_the_count_grows_with_every_redrive(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, ["a"])
    for count in (1, 2, 3):
        assert (await redrive_dead_letters(connection, queue)).redriven == {count: count + 1}
        copy = await stored(connection, queue, count + 1)
        assert (copy.header("Redrive-Count"), copy.header("Redrive-Sequence")) == (str(count), str(count))
        assert len([key for key, _ in copy.headers if key.startswith("Redrive-")]) == 4
        await exhaust_deliveries(connection, queue, 1)
    assert await stored_count(connection, name) == 1


async def test_a_job_with_an_id_inside_the_duplicate_window_is_not_swallowed(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, duplicate_window="2m")
    await make_dead_letters(connection, queue, ["a"], headers={"Nats-Msg-Id": "dag/run/task/-1/0"})
    assert (await redrive_dead_letters(connection, queue)).redriven == {1: 2}
    assert await process_all(connection, queue) == {"a": 1}


async def test_nothing_is_copied_before_the_consumers_ack_wait_has_passed(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, consumer={"ack_wait": "1s"})
    await make_dead_letters(connection, queue, "ab")
    letters = (await find_dead_letters(connection, queue)).letters
    report = await redrive_dead_letters(connection, queue)
    for letter in letters:
        copy = await stored(connection, queue, report.redriven[letter.sequence])
        assert copy.stored_at >= letter.ready_at > letter.death.died_at


async def test_a_job_finished_while_the_redrive_waits_for_its_worker_is_gone(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, "ab")

    async def finish_late(*_: object) -> bool:
        await connection.request(late_ack_subject(name, "worker", 1), b"+ACK")
        return True

    monkeypatch.setattr(seams.REDRIVE_STEP_WAIT_UNTIL, finish_late)
    report = await redrive_dead_letters(connection, queue)
    assert (dict(report.redriven), list(report.gone)) == ({2: 3}, [1])
    assert await process_all(connection, queue) == {"b": 1}


@pytest.mark.since_server("2.14", "the reset of a consumer")
async def test_a_job_that_is_alive_again_after_the_redrive_waited_is_not_copied(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, "ab")

    async def forget_the_deaths(*_: object) -> bool:
        await connection.api(f"CONSUMER.RESET.{name}.worker", {"seq": 2})
        return True

    monkeypatch.setattr(seams.REDRIVE_STEP_WAIT_UNTIL, forget_the_deaths)
    report = await redrive_dead_letters(connection, queue)
    assert (dict(report.redriven), list(report.gone)) == ({1: 3}, [2])
    assert await process_all(connection, queue) == {"a": 1, "b": 1}


async def test_only_the_requested_letters_are_redriven(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, "abcd")
    report = await redrive_dead_letters(connection, queue, only(4, 2, 4))
    assert report.redriven == {2: 5, 4: 6}
    assert await process_all(connection, queue) == {"b": 1, "d": 1}
    assert [letter.sequence for letter in (await find_dead_letters(connection, queue)).letters] == [1, 3]
    assert await stored_count(connection, f"{name}-dead") == 2


@pytest.mark.slow
async def test_a_request_with_sequences_that_are_no_dead_letters_redrives_nothing(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, "abc")
    await connection.request(late_ack_subject(name, "worker", 2), b"+ACK")
    expected = (
        f"expected dead letters of {name}, found otherwise for 2 of 3 sequences (2: its job is no longer stored,"
        " though a copy is stored (finished late by a slow worker, or lost by the server); select vanished to bring it"
        " back all the same; 99: no entry in the dead letter queue); nothing was redriven:"
        " leave them out, or redrive all"
    )
    with pytest.raises(DeadLetterGoneError, match=f"^{re.escape(expected)}$"):
        await redrive_dead_letters(connection, queue, only(1, 2, 99))
    assert await process_all(connection, queue) == {}
    report = await redrive_dead_letters(connection, queue)
    assert (dict(report.redriven), list(report.gone)) == ({1: 4, 3: 5}, [2])


async def test_a_requested_sequence_of_an_earlier_stream_is_named_as_such(
    connection: NatsPyConnection, name: str
) -> None:
    await make_dead_letters(connection, await make_queue(connection, name), ["old"])
    await connection.api(f"STREAM.DELETE.{name}")
    queue = await make_queue(connection, name)
    await publish_jobs(connection, queue, ["new"])
    cause = r"\(1: its entry is about an earlier stream, consumer or message of the same name and number\)"
    with pytest.raises(DeadLetterGoneError, match=cause):
        await redrive_dead_letters(connection, queue, only(1))
    assert (await redrive_dead_letters(connection, queue)).redriven == {}
    assert await process_all(connection, queue) == {"new": 1}


async def test_a_full_stream_keeps_its_letters_and_is_named(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, discard="new", max_msgs=2)
    await make_dead_letters(connection, queue, "ab")
    by_copy = RedriveRequest(protocol=Protocol.COPY)
    report = await redrive_dead_letters(connection, queue, by_copy)
    refusal = f"{name} refused the copy of 1: maximum messages exceeded"
    assert (dict(report.redriven), report.failed[1], sorted(report.failed)) == ({}, refusal, [1, 2])
    with pytest.raises(
        RedriveError, match=f"0 dead letters were redriven, 2 stayed where they were: 1: {refusal}; 2: .*again is safe"
    ):
        report.raise_for_failures()
    assert len((await find_dead_letters(connection, queue)).letters) == 2
    await make_queue(connection, name, discard="new", max_msgs=4)
    report = await redrive_dead_letters(connection, queue, by_copy)
    report.raise_for_failures()
    assert await process_all(connection, queue) == {"a": 1, "b": 1}


async def test_a_letter_that_cannot_be_copied_stays_and_does_not_stop_the_others(
    nats: NatsServer, connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, archive=None, allow_direct=False)
    await publish_raw(nats, f"{name}.jobs.a\udcff", b"City: Bonn", b"unknown subject")
    await publish_jobs(connection, queue, ["x" * (connection.client.max_payload - 20), "good"])
    await exhaust_deliveries(connection, queue, 3)
    report = await redrive_dead_letters(connection, queue)
    assert report.redriven == {3: 4}
    assert report.failed[1].startswith(
        f"expected the exact subject of job 1, found {name}.jobs.a\ufffd: its bytes that"
    )
    assert re.match(
        r"expected a copy of at most 1048576 bytes \(the server's max_payload\), found 10486\d\d", report.failed[2]
    )
    assert (await stored(connection, queue, 1)).data == b"unknown subject"
    assert await process_all(connection, queue) == {"good": 1}


async def test_a_copy_that_another_subscriber_answers_leaves_the_original(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await make_queue(connection, name)
    await make_dead_letters(connection, queue, ["a"])
    # The stream stops capturing the subject, and a service answers there.
    config: dict[str, Any] = (await connection.api(f"STREAM.INFO.{name}"))["config"]
    await connection.api(f"STREAM.UPDATE.{name}", config | {"subjects": [f"{name}.elsewhere"]})
    report = await redrive_dead_letters(connection, queue)
    assert report.failed[1].startswith(f"expected a subject of {name} ({name}.elsewhere), found {name}.jobs.plain: ")
    # It may do so just after the scan.
    monkeypatch.setattr(seams.REDRIVE_TARGET_CHECK_SUBJECT, lambda *_: None)

    async def respond(answer: bytes, message: Msg) -> None:
        await message.respond(answer)

    answers = [b"not JSON", b'"text"', json.dumps({"stream": "other", "seq": 7}).encode()]
    strange = (
        f"expected a stream's acknowledgement on {name}.jobs.plain, found another answer: something else subscribes to"
        " it"
    )
    other = f"expected {name} to store the copy of 1, found an answer of other: original kept"
    for answer, expected in zip(answers, [strange, strange, other], strict=True):
        service = await connection.client.subscribe(f"{name}.jobs.>", cb=partial(respond, answer))
        report = await redrive_dead_letters(connection, queue)
        await service.unsubscribe()
        assert (dict(report.redriven), report.failed) == ({}, {1: expected})
    assert (await redrive_dead_letters(connection, queue)).failed == {
        1: f"no stream captures {name}.jobs.plain just now"
    }
    assert (await stored(connection, queue, 1)).data == b"a"


async def test_a_queue_without_a_dead_letter_queue_or_without_its_streams_raises(
    connection: NatsPyConnection, name: str
) -> None:
    with pytest.raises(NotFoundError, match=f"expected stream {name} on the server, found none: provision the queue"):
        await redrive_dead_letters(connection, small_queue(name))
    queue = await make_queue(connection, name, dead_letters=None)
    with pytest.raises(QueueDeclarationError, match="expected dead_letters, which the scan reads"):
        await redrive_dead_letters(connection, queue)
