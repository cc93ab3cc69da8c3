"""What is done to many letters is one record of the audit, and each reader finds what it says about a letter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import Protocol, RedriveRequest, redrive_dead_letters
from testbed.dead_letters import stream_messages
from testbed.face import LetterRecord, open_audit
from testbed.queues import make_dead_letters, make_queue

if TYPE_CHECKING:
    from testbed.face import NatsPyConnection

LETTERS = 300


@pytest.mark.slow
@pytest.mark.parametrize(
    "protocol",
    [
        Protocol.COPY,
        pytest.param(Protocol.IN_PLACE, marks=pytest.mark.since_server("2.14", "the reset of a consumer")),
    ],
)
async def test_many_letters_of_a_redrive_share_records(
    connection: NatsPyConnection, name: str, protocol: Protocol
) -> None:
    queue = await make_queue(connection, name, archive=None)
    sequences = await make_dead_letters(connection, queue, [str(number) for number in range(LETTERS)])
    request = RedriveRequest(protocol=protocol, why="repaired", who={"dag_id": "d"}, run="r")
    report = await redrive_dead_letters(connection, queue, request)
    report.raise_for_failures()
    ranges = await stream_messages(connection, f"{name}-audit", f"audit.{name}.ranges.>")
    singles = await stream_messages(connection, f"{name}-audit", f"audit.{name}.letters.*")
    assert 1 <= len(ranges) <= 4
    assert singles == []
    assert sum(len(message.data) for message in ranges) < 40 * LETTERS
    audit = await open_audit(connection, queue)
    for sequence in sequences:
        record = await audit.last_record(sequence)
        assert record
        assert (record.why, record.who, record.run) == ("repaired", {"dag_id": "d"}, "r")
        assert record.new_sequence == report.redriven[sequence]
        assert record.died_at
    assert await audit.last_record(sequences[-1] + 1) is None
    assert [record.sequence async for record in audit.letters()] == sequences
    action = "requeued" if protocol == Protocol.IN_PLACE else "redriven"
    assert [record.action async for record in audit.history(sequences[0])] == [action]


async def test_the_last_record_counts_whichever_form_it_has(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, archive=None)
    audit = await open_audit(connection, queue)

    def record(sequence: int, new_sequence: int) -> LetterRecord:
        common: dict[str, Any] = {
            "stream": name,
            "created": audit.created,
            "subject": "s",
            "reason": "terminated",
            "fingerprint": "f",
        }
        return LetterRecord(sequence=sequence, action="redriven", new_sequence=new_sequence, **common)

    # As an earlier version stored them, one message each.
    for sequence in range(1, 21):
        assert await audit.write([record(sequence, 100 + sequence)]) == [None]
    assert await audit.write([record(sequence, 200 + sequence) for sequence in range(6, 16)]) == [None] * 10
    assert await audit.write([record(10, 300)]) == [None]
    read = await audit.with_ranges_of(range(1, 21))
    for reader in (audit, read):
        found = [await reader.last_record(sequence) for sequence in (5, 6, 10, 15, 16)]
        assert [each and each.new_sequence for each in found] == [105, 206, 300, 215, 116]
    assert [each.new_sequence async for each in audit.history(10)] == [110, 210, 300]
    assert [each.new_sequence async for each in audit.history(16)] == [116]


async def test_an_action_that_concurrent_redrives_record_in_other_ranges_is_read_once(
    connection: NatsPyConnection, name: str
) -> None:
    queue = await make_queue(connection, name, archive=None)
    audit = await open_audit(connection, queue)
    common: dict[str, Any] = {
        "stream": name,
        "created": audit.created,
        "subject": "s",
        "reason": "r",
        "fingerprint": "f",
    }
    records = [
        LetterRecord(sequence=each, action="redriven", new_sequence=100 + each, **common) for each in range(1, 41)
    ]
    # One attempt finds all of them; others find that some are redriven already.
    for found in (records, records[10:], records[37:]):
        assert await audit.write(found) == [None] * len(found)
    assert len(await stream_messages(connection, f"{name}-audit")) == 2 + 3
    assert [record.sequence async for record in audit.letters()] == list(range(1, 41))
    for sequence in (10, 11, 40):
        assert [record.new_sequence async for record in audit.history(sequence)] == [100 + sequence]


async def test_records_that_are_too_large_together_stay_alone(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, archive=None, audit={"name": f"{name}-audit", "max_msg_size": 2_000})
    audit = await open_audit(connection, queue)
    common: dict[str, Any] = {"stream": name, "created": audit.created, "reason": "terminated", "fingerprint": "f"}
    records = [
        LetterRecord(sequence=each, action="redriven", new_sequence=each + 50, subject=f"{each}" * 99, **common)
        for each in range(1, 21)
    ]
    assert await audit.write(records) == [None] * 20
    assert await stream_messages(connection, f"{name}-audit", f"audit.{name}.ranges.>") == []
    assert [record.new_sequence async for record in audit.letters()] == list(range(51, 71))
