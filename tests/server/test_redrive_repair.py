"""Repairs of letters by a redrive, and their records in the audit."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.jetstream import (
    Protocol,
    RedriveRequest,
    Repair,
    find_dead_letters,
    preview,
    redrive_dead_letters,
)
from testbed.dead_letters import letter_records, publish_raw, stored_message
from testbed.face import Headers
from testbed.queues import exhaust_deliveries, make_dead_letters, make_queue, process_all, publish_jobs

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import DeadLetter
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer


@pytest.mark.slow
@pytest.mark.parametrize("protocol", [Protocol.COPY, Protocol.ATOMIC])
async def test_the_repaired_job_is_stored_and_the_audit_records_the_difference(
    connection: NatsPyConnection, name: str, protocol: Protocol
) -> None:
    atomic = protocol == Protocol.ATOMIC
    queue = await make_queue(connection, name, atomic_redrive=atomic, consumer={"filter_subject": f"{name}.jobs.>"})
    pairs = (("Tag", "one"), ("Tag", "two"), ("Customer", "x"), ("Old", "1"), ("Nats-Msg-Id", "first"))
    body = json.dumps({"id": 7, "amount": "12,50", "secret": "x" * 600}).encode()
    await connection.client.jetstream().publish(f"{name}.jobs.a", body, headers=Headers(pairs))
    await exhaust_deliveries(connection, queue, 1)

    def repair(letter: DeadLetter) -> Repair:
        fields = json.loads(letter.body)
        del fields["secret"]
        return Repair(fields | {"amount": 12.5}, {"Customer": "Ünal", "Old": None, "New": "n"})

    report = await redrive_dead_letters(connection, queue, RedriveRequest(transform=repair, protocol=protocol))
    report.raise_for_failures()
    copy = await stored_message(connection, name, report.redriven[1])
    assert json.loads(copy.data) == {"id": 7, "amount": 12.5}
    own = [pair for pair in copy.headers if not pair[0].startswith(("Nats-", "Redrive-"))]
    assert own == [("Tag", "one"), ("Tag", "two"), ("Customer", "Ünal"), ("New", "n")]
    assert copy.header("Nats-Msg-Id") != "first"
    (record,) = await letter_records(connection, queue)
    assert record.changes == {
        "body": {
            "amount": {"before": "12,50", "after": 12.5},
            "secret": {"before": "x" * 500 + "… (600 characters)", "after": None},
        },
        "headers": {
            "Customer": {"before": ["x"], "after": "Ünal"},
            "Old": {"before": ["1"], "after": None},
            "New": {"before": None, "after": "n"},
        },
    }


@pytest.mark.slow
async def test_a_transform_that_raises_or_returns_an_invalid_repair_fails_only_its_letter(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name)
    jobs = ["raises", "returns", "unserialisable", "servers", "large", "unchanged", "good"]
    await make_dead_letters(connection, queue, jobs)
    before = {number: await stored_message(connection, name, number) for number in range(1, 8)}

    def repair(letter: DeadLetter) -> Repair | None:
        match letter.body:
            case b"raises":
                raise ValueError("no such customer")
            case b"returns":
                return {"body": 1}  # type: ignore[return-value]
            case b"unserialisable":
                return Repair(object())
            case b"servers":
                return Repair(headers={"Nats-Msg-Id": "mine"})
            case b"large":
                return Repair("x" * connection.client.max_payload)
            case b"good":
                return Repair("better")
        return None

    request = RedriveRequest(transform=repair)
    shown = await preview(connection, queue, request)
    report = await redrive_dead_letters(connection, queue, request)
    assert report.redriven == {6: 8, 7: 9}
    assert shown.failed == report.failed
    assert (shown.redriven, shown.failures, report.failures) == (2, 5, 5)
    causes = {
        1: "the transform raised ValueError: no such customer; the letter is untouched",
        2: "expected the transform to return a Repair, or None for no change, found dict; the letter is untouched",
        3: "the transform's repair can't be sent: expected a body of bytes, text or JSON values, found object: .*",
        4: "the transform's repair can't be sent: job 4 sets Nats-Msg-Id: headers starting with Nats- belong to .*",
        5: r"expected a copy of at most \d+ bytes \(the server's max_payload\), found \d+ for job 5, \d+ of them .*",
    }
    for number, expected in causes.items():
        assert re.fullmatch(expected, report.failed[number])
        assert await stored_message(connection, name, number) == before[number]
    assert [record.changes is None for record in await letter_records(connection, queue)] == [True, False]
    assert [letter.sequence for letter in (await find_dead_letters(connection, queue)).letters] == [1, 2, 3, 4, 5]
    assert await process_all(connection, queue) == {"unchanged": 1, "better": 1}
    assert set((await redrive_dead_letters(connection, queue)).redriven) == {1, 2, 3, 4, 5}
    assert await process_all(connection, queue) == dict.fromkeys(jobs[:5], 1)


@pytest.mark.slow
async def test_text_that_utf_8_cannot_represent_is_repaired_and_recorded(
    connection: NatsPyConnection, nats: NatsServer, name: str
) -> None:
    queue = await make_queue(connection, name)
    await publish_raw(nats, f"{name}.jobs.a", b"City: K\xf6ln\r\nTwo Words: x", b'{"name": "\\ud800"}')
    await exhaust_deliveries(connection, queue, 1)
    repair = Repair({"name": "?"}, {"City": "Köln", "Two Words": None})
    report = await redrive_dead_letters(connection, queue, RedriveRequest(transform=lambda _: repair))
    assert report.redriven == {1: 2}
    copy = await stored_message(connection, name, 2)
    assert (copy.data, copy.header("City"), copy.header("Two Words")) == (b'{"name":"?"}', "Köln", None)
    (record,) = await letter_records(connection, queue)
    assert record.changes is not None
    assert record.changes["headers"] == {
        "City": {"before": ["K?ln"], "after": "Köln"},
        "Two Words": {"before": ["x"], "after": None},
    }


@pytest.mark.slow
async def test_a_change_of_many_fields_still_fits_the_audit(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name)
    body = json.dumps({f"field{number}": "x" * 50 for number in range(8_000)})
    await publish_jobs(connection, queue, [body])
    await exhaust_deliveries(connection, queue, 1)
    emptied = dict.fromkeys(json.loads(body), "y" * 50)
    report = await redrive_dead_letters(connection, queue, RedriveRequest(transform=lambda _: Repair(emptied)))
    report.raise_for_failures()
    (record,) = await letter_records(connection, queue)
    assert record.changes is not None
    assert record.changes["body"]["before"]["bytes"] == len(body)
    assert await process_all(connection, queue) == {json.dumps(emptied, separators=(",", ":")): 1}
