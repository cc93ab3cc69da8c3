"""Bringing dead letters back as jobs with fresh deliveries, so that no crash at any point loses or repeats one.

The protocol: publish a copy under an id that only this letter has; require an acknowledgement for a sequence other
than the original's; then acknowledge the original away; then remove the entry from the dead letter queue. Whoever is
killed in between and runs again finds the copy by its id, or the original gone. A repeat is possible only when the
second run comes after the stream's duplicate window, or after a restart of the server, and the copy was stored but the
original not yet acknowledged.
"""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.dead_letters import DeadLetter, Findings, find_dead_letters, will_deliver
from airflow_provider_jetstream.jetstream.entry_removal import remove_entries
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    DeadLetterGoneError,
    DeadlineError,
    NotFoundError,
    RedriveError,
    TransientError,
    UnreachableError,
)
from airflow_provider_jetstream.jetstream.names import (
    MSG_ID,
    REDRIVE_CONSUMER,
    REDRIVE_COUNT,
    REDRIVE_SEQUENCE,
    REDRIVE_STREAM,
    late_ack_subject,
)
from airflow_provider_jetstream.jetstream.publishing import ranges
from airflow_provider_jetstream.jetstream.stored import get_message

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from airflow_provider_jetstream.jetstream.connection import Connection
    from airflow_provider_jetstream.jetstream.queue import WorkQueue

log = logging.getLogger(__name__)

_HEADER_FRAME = len("NATS/1.0\r\n\r\n")

_OURS = frozenset({REDRIVE_COUNT, REDRIVE_STREAM, REDRIVE_SEQUENCE, REDRIVE_CONSUMER})


@dataclass(slots=True)
class RedriveReport:
    """What a redrive did.

    :param redriven: original sequence → the new one
    :param failed: original sequence → why it stayed a dead letter
    :param gone: sequences of entries that are no dead letters (any more)
    :param entries_left: entries that the dead letter queue doesn't allow to be removed; they are recognised as done
    """

    redriven: dict[int, int] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    gone: tuple[int, ...] = ()
    entries_left: int = 0

    def as_json(self) -> dict[str, Any]:
        """Give the report in a form that fits an XCom.

        :return: counts, and sequences as ranges
        """
        return {
            "redriven": len(self.redriven),
            "failed": len(self.failed),
            "gone": len(self.gone),
            "entries_left": self.entries_left,
            "from_sequences": ranges(self.redriven),
            "to_sequences": ranges(self.redriven.values()),
            "failures": dict(sorted(self.failed.items())[:20]),
        }

    def raise_for_failures(self) -> None:
        """Do nothing if every dead letter was redriven.

        :raises RedriveError: some weren't
        """
        if self.failed:
            named = "; ".join(f"{sequence}: {reason}" for sequence, reason in sorted(self.failed.items())[:5])
            raise RedriveError(
                f"{len(self.redriven)} dead letters were redriven, {len(self.failed)} stayed where they were: {named};"
                " running it again is safe"
            )


async def redrive(
    connection: Connection, queue: WorkQueue, *, sequences: Collection[int] | None = None
) -> RedriveReport:
    """Bring dead letters back.

    Waits until no worker can be presumed to be still at a letter: at most the consumer's ack wait after its death.

    :param connection: the server
    :param queue: the work queue, with its dead letter queue
    :param sequences: only these; all where absent
    :return: the report, also of letters that failed; nothing is raised for them
    :raises DeadLetterGoneError: a sequence that was asked for is no dead letter (any more)
    :raises QueueDeclarationError: the queue declares no dead letter queue
    :raises NotFoundError: the work queue or its dead letter queue doesn't exist
    """
    findings = await find_dead_letters(connection, queue)
    letters = findings.letters if sequences is None else _chosen(queue, findings, sequences)
    report = RedriveReport(gone=tuple(entry.sequence for entry, _ in findings.dismissed))
    done: list[DeadLetter] = []
    for letter in letters:
        await _until(letter.ready_at)
        try:
            report.redriven[letter.entry.sequence] = await _redrive_one(connection, letter)
            done.append(letter)
        except DeadLetterGoneError as error:
            log.warning("%s", error)
            report.gone = (*report.gone, letter.entry.sequence)
        except (TransientError, NotFoundError, ApiError) as error:
            report.failed[letter.entry.sequence] = str(error)
    entries = [sequence for letter in done for sequence in letter.entry.entry_sequences]
    report.entries_left = await remove_entries(connection, queue, entries)
    return report


def _chosen(queue: WorkQueue, findings: Findings, sequences: Collection[int]) -> tuple[DeadLetter, ...]:
    known = {letter.entry.sequence: letter for letter in findings.letters}
    dismissed = {entry.sequence: verdict for entry, verdict in findings.dismissed}
    if missing := sorted(set(sequences) - known.keys()):
        told = "; ".join(
            f"{sequence}: {_WHY[dismissed[sequence]] if sequence in dismissed else 'no entry in the dead letter queue'}"
            for sequence in missing[:5]
        )
        raise DeadLetterGoneError(
            f"expected dead letters of {queue.name}, found otherwise for {len(missing)} of {len(set(sequences))}"
            f" sequences ({told}); nothing was redriven: leave them out, or redrive all"
        )
    return tuple(known[sequence] for sequence in sorted(set(sequences)))


_WHY = {
    "gone": "its job is no longer stored (finished late, redriven before, or deleted)",
    "alive": "its consumer is about to deliver it again",
    "stale": "its entry is about an earlier stream, consumer or message of the same name and number",
}


async def _until(moment: datetime) -> None:
    if (seconds := (moment - datetime.now(UTC)).total_seconds()) > 0:
        await asyncio.sleep(seconds)


async def _redrive_one(connection: Connection, letter: DeadLetter) -> int:
    original = letter.entry.sequence
    # A slow worker may have finished it while we waited.
    if await get_message(connection, letter.entry.stream, original) is None:
        raise DeadLetterGoneError(f"job {letter.job_id} (sequence {original}) was finished before it was redriven")
    # A server that crashed since may have forgotten the death.
    if await will_deliver(connection, letter.entry.stream, letter.entry.consumer, original):
        raise DeadLetterGoneError(
            f"job {letter.job_id} (sequence {original}) is about to be delivered again and needs no redrive"
        )
    copy = await _publish_copy(connection, letter)
    if copy == original:
        raise RedriveError(f"the server took the copy for the original (sequence {original})")
    await _acknowledge_original(connection, letter)
    return copy


async def _publish_copy(connection: Connection, letter: DeadLetter) -> int:
    from nats import errors
    from nats.js import errors as js_errors

    entry, message = letter.entry, letter.message
    headers = _sendable_headers(letter, connection.client.max_payload)
    try:
        answer = await connection.client.request(
            message.subject, message.data, timeout=connection.timeout, headers=headers
        )
    except errors.NoRespondersError:
        raise UnreachableError(f"no stream captures {message.subject} just now") from None
    except (TimeoutError, js_errors.Error) as error:
        raise DeadlineError(f"no acknowledgement for the copy of {entry.sequence}: {error}") from None
    except errors.Error as error:
        raise UnreachableError(f"the copy of {entry.sequence} was not sent: {error}") from None
    ack = _decoded(answer.data)
    if refusal := ack.get("error"):
        raise RedriveError(f"{entry.stream} refused the copy of {entry.sequence}: {refusal.get('description')}")
    if ack.get("stream") != entry.stream:
        raise RedriveError(
            f"expected {entry.stream} to store the copy of {entry.sequence}, found an answer of"
            f" {ack.get('stream', 'something other than a stream')}: original kept"
        )
    return int(ack["seq"])


def _sendable_headers(letter: DeadLetter, limit: int) -> Headers:
    headers = copy_headers(letter)
    sequence, size = letter.entry.sequence, len(letter.message.data)
    try:
        size += _HEADER_FRAME + sum(len(f"{name}: {value}\r\n".encode()) for name, value in headers.items())
    except UnicodeEncodeError:
        raise RedriveError(
            f"expected headers in UTF-8, found others on job {sequence}: it can't be copied unchanged; original kept"
        ) from None
    if size > limit:
        # The server would close the connection over it.
        raise RedriveError(
            f"expected a copy of at most {limit} bytes, found {size} for job {sequence} with the headers that tell its"
            " origin: raise the server's max_payload; original kept"
        )
    return headers


def _decoded(answer: bytes) -> dict[str, Any]:
    # Whoever else listens on the subject may answer first.
    try:
        ack = json.loads(answer)
    except ValueError:
        return {}
    return ack if isinstance(ack, dict) else {}


class Headers(dict[str, str]):
    """Headers in which a name may come more than once; the client sends what :meth:`items` gives.

    :param pairs: name and value in order
    """

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        self._pairs = tuple(pairs)
        super().__init__(self._pairs)

    def items(self) -> tuple[tuple[str, str], ...]:  # type: ignore[override]
        """Give every pair.

        :return: name and value in order
        """
        return self._pairs


def copy_headers(letter: DeadLetter) -> Headers:
    """Give the headers of a letter's copy.

    The server's own headers are left out: an expectation, a time to live or the id of the first publication would make
    the server refuse or swallow the copy.

    :param letter: the dead letter
    :return: the job's own headers, where it comes from, and an id that only this letter has
    """
    entry, message = letter.entry, letter.message
    kept = [
        (name, value) for name, value in message.headers if not name.lower().startswith("nats-") and name not in _OURS
    ]
    added = {
        REDRIVE_COUNT: str(letter.redrives + 1),
        REDRIVE_STREAM: entry.stream,
        REDRIVE_SEQUENCE: str(entry.sequence),
        REDRIVE_CONSUMER: entry.consumer,
        MSG_ID: f"redrive:{entry.stream}:{entry.sequence}:{message.time}",
    }
    return Headers([*kept, *added.items()])


async def _acknowledge_original(connection: Connection, letter: DeadLetter) -> None:
    entry = letter.entry
    try:
        await connection.request(late_ack_subject(entry.stream, entry.consumer, entry.sequence), b"+ACK")
    except TransientError as error:
        if await get_message(connection, entry.stream, entry.sequence) is not None:
            raise RedriveError(
                f"its copy is stored, but the original could not be acknowledged ({error}); run it again soon, inside"
                " the stream's duplicate window, so that the copy isn't stored twice"
            ) from None
    if await get_message(connection, entry.stream, entry.sequence) is not None:
        raise RedriveError("its copy is stored, but the server kept the original; run it again soon")
