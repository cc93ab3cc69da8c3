"""What is done to a letter is one record of the audit under its subject."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from airflow_provider_jetstream.jetstream import Protocol, RedriveRequest, redrive_dead_letters
from testbed.dead_letters import stream_messages
from testbed.face import LetterRecord, open_audit
from testbed.queues import make_dead_letters, make_queue, stored_count

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
async def test_each_letter_of_a_redrive_has_a_record_under_its_subject(
    connection: NatsPyConnection, name: str, protocol: Protocol
) -> None:
    queue = await make_queue(connection, name, archive=None)
    sequences = await make_dead_letters(connection, queue, [str(number) for number in range(LETTERS)])
    request = RedriveRequest(protocol=protocol, why="repaired", who={"dag_id": "d"}, run="r")
    report = await redrive_dead_letters(connection, queue, request)
    report.raise_for_failures()
    stored = await stream_messages(connection, f"{name}-audit", f"audit.{name}.letters.*")
    assert [message.subject for message in stored] == [f"audit.{name}.letters.{sequence}" for sequence in sequences]
    audit = await open_audit(connection, queue)
    for sequence in sequences:
        record = await audit.last_record(sequence)
        assert record
        assert (record.why, record.who, record.run) == ("repaired", {"dag_id": "d"}, "r")
        assert (record.new_sequence, record.job_id) == (report.redriven[sequence], str(sequence))
        assert record.died_at
    assert await audit.last_record(sequences[-1] + 1) is None
    assert [record.sequence async for record in audit.letters()] == sequences
    action = "requeued" if protocol == Protocol.IN_PLACE else "redriven"
    assert [record.action async for record in audit.history(sequences[0])] == [action]


async def test_the_last_record_counts_and_an_action_is_stored_once(connection: NatsPyConnection, name: str) -> None:
    queue = await make_queue(connection, name, archive=None)
    audit = await open_audit(connection, queue)

    def record(sequence: int, new_sequence: int) -> LetterRecord:
        common: dict[str, Any] = {"stream": name, "created": audit.created, "reason": "terminated"}
        return LetterRecord(
            **common, sequence=sequence, action="redriven", new_sequence=new_sequence, subject="s", fingerprint="f"
        )

    first = [record(sequence, 100 + sequence) for sequence in range(1, 21)]
    # Concurrent redrives record some of them once more.
    for records in (
        first,
        first[10:],
        [record(sequence, 200 + sequence) for sequence in range(6, 16)],
        [record(10, 300)],
    ):
        assert await audit.write(records) == [None] * len(records)
    assert await stored_count(connection, f"{name}-audit") == 20 + 10 + 1
    found = [await audit.last_record(sequence) for sequence in (5, 6, 10, 15, 16)]
    assert [each and each.new_sequence for each in found] == [105, 206, 300, 215, 116]
    assert [each.new_sequence async for each in audit.history(10)] == [110, 210, 300]
    assert [each.new_sequence async for each in audit.history(16)] == [116]
