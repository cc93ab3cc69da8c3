"""Which jobs of a task are stored already: those in its manifest, and those that a try stored which was cut off."""

from __future__ import annotations

from array import array
from hashlib import sha256
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.contract import AIRFLOW_TASK, MSG_ID, SCHEDULED_MSG_ID
from airflow_provider_jetstream.jetstream.errors import JobError
from airflow_provider_jetstream.jetstream.origin import digest_of, short_digest
from airflow_provider_jetstream.jetstream.publishing.digest_table import DigestTable
from airflow_provider_jetstream.jetstream.publishing.job_content import content_of_job, content_of_message
from airflow_provider_jetstream.jetstream.publishing.job_keys import BODY_DIGEST_BYTES
from airflow_provider_jetstream.jetstream.publishing.report import SCHEDULED

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.publishing.job import OutgoingJob

_UNKNOWN_BODY = bytes(BODY_DIGEST_BYTES)


def _table() -> DigestTable:
    return DigestTable(BODY_DIGEST_BYTES + 8)


class StoredJobs:
    """The jobs of a task that are known to be stored."""

    def __init__(self) -> None:
        # By the digests of message ids: body digest and sequence of the jobs in the task's manifest.
        self._own = _table()
        self._named = bytearray()
        # What a search has found. By the digests of message id and content: the sequence, whoever has published it.
        self._found = DigestTable(8)
        # By the digests of message ids: body digest and sequence of the last message; of jobs that have ended.
        self._others = _table()
        self._ended = _table()
        # The same of those that name the task, as another list of the task may have had them.
        self._named_task = _table()
        self._listed: set[bytes] = set()
        self._unverified: dict[bytes, int] = {}
        # What makes other message ids of jobs whose own ids somebody else had taken.
        self.salts: Sequence[str] = ()
        self.of_any_task = False

    def __len__(self) -> int:
        return len(self._own)

    def add(self, digest: bytes, body_digest: bytes, sequence: int) -> bool:
        """Add a job of the task's manifest, and return whether it is new."""
        value = body_digest[:BODY_DIGEST_BYTES] + sequence.to_bytes(8)
        is_new = self._own.position(digest) is None
        self._own.set(digest, value)
        self._unverified.pop(digest, None)
        return is_new

    def add_unverified(self, digest: bytes, sequence: int) -> None:
        """Add a job whose message id a message had of which it isn't known whether it was the job."""
        if self._own.position(digest) is None:
            self._unverified[digest] = sequence

    def add_message(self, message: StoredMessage, sequence: int, *, task_key: str | None) -> None:
        """Add a message that is stored, whoever has published it.

        :param sequence: its stream sequence in the queue, or that of a schedule, marked
        :param task_key: the key in the task's jobs; ``None`` where other jobs have it too
        """
        message_id = message.header(SCHEDULED_MSG_ID) or message.header(MSG_ID) or ""
        value = sha256(message.data).digest()[:BODY_DIGEST_BYTES] + sequence.to_bytes(8)
        if (digest := digest_of(message_id)) is None:
            return
        content = content_of_message(message, of_any_task=self.of_any_task)
        self._found.set(_both(digest, content), sequence.to_bytes(8))
        self._others.set(digest, value)
        if task_key and message.header(AIRFLOW_TASK) == task_key:
            self._named_task.set(digest, value)

    def add_ended(self, message_id: str, sequence: int) -> None:
        """Add a job that has ended, by its message id; a message that is stored counts in its place."""
        if digest := digest_of(message_id):
            self._ended.set(digest, _UNKNOWN_BODY + sequence.to_bytes(8))

    def check(self, index: int, job: OutgoingJob) -> None:
        """Refuse a job whose given id is stored with another body.

        :raises JobError: it is
        """
        if job.key.given_id is None or self.is_empty:
            return
        known = self._value_of(job) or self._named_as(job)
        if known is None:
            return
        body_digest, sequence = known
        found = job.key.body_digest[:BODY_DIGEST_BYTES]
        if body_digest not in (_UNKNOWN_BODY, found):
            raise JobError(
                f"job {index} has the id {job.key.given_id!r}, under which this task has stored another body (sequence"
                f" {sequence & ~SCHEDULED}: the SHA-256 of its body begins with {body_digest.hex()}, that of this one"
                f" with {found.hex()}): expected the same job when a task is tried again; give the changed job another"
                " id, or clear the task once its jobs have ended, which publishes all of them anew"
            )

    def sequence_of(self, index: int, job: OutgoingJob) -> int | None:
        """Return the stream sequence of a job, which is listed; ``None`` where it isn't known to be stored.

        :raises JobError: its given id is stored with another body
        """
        if self.is_empty:
            return None
        self.check(index, job)
        if len(self._named_task):
            self._listed.update(self._digests(job))
        if (digest := digest_of(job.message_id)) and (position := self._own.position(digest)) is not None:
            self._named.extend(bytes(max(0, len(self._own) - len(self._named))))
            self._named[position] = 1
        known = self._value_of(job)
        return known[1] if known else None

    @property
    def is_empty(self) -> bool:
        """Whether no job is known to be stored."""
        return not (len(self._own) or len(self._others) or len(self._ended) or self._unverified)

    def unverified(self, job: OutgoingJob) -> int | None:
        """Return the sequence of the message of which it isn't known whether it was a job; ``None`` without any."""
        digest = digest_of(job.message_id) if self._unverified else None
        return self._unverified.get(digest) if digest else None

    def forget_unverified(self) -> None:
        """Send the jobs once more of which it isn't known whether they were stored: a person has cleared the task."""
        self._unverified.clear()

    def not_listed(self) -> Iterator[tuple[bytes, bytes, int]]:
        """Yield message id, body digest and sequence of messages that name the task and are none of the list's jobs."""
        for digest, value in self._named_task:
            if digest not in self._listed and self._own.position(digest) is None:
                yield digest, value[:BODY_DIGEST_BYTES], int.from_bytes(value[BODY_DIGEST_BYTES:])

    def is_recorded(self, job: OutgoingJob) -> bool:
        """Return whether a job is in the task's manifest."""
        if not len(self._own):
            return False
        digest = digest_of(job.message_id)
        return digest is not None and self._own.position(digest) is not None

    def extra(self) -> array[int]:
        """Return the sequences of jobs of the task that :meth:`sequence_of` wasn't called for, without schedules."""
        self._named.extend(bytes(max(0, len(self._own) - len(self._named))))
        unnamed = (value for (_, value), named in zip(self._own, self._named, strict=False) if not named)
        sequences = (int.from_bytes(value[BODY_DIGEST_BYTES:]) for value in unnamed)
        return array("Q", (sequence for sequence in sequences if sequence < SCHEDULED))

    def _value_of(self, job: OutgoingJob) -> tuple[bytes, int] | None:
        digest = digest_of(job.message_id)
        if digest and (value := self._own.get(digest)):
            return value[:BODY_DIGEST_BYTES], int.from_bytes(value[BODY_DIGEST_BYTES:])
        if sequence := self._found_sequence(job):
            return job.key.body_digest[:BODY_DIGEST_BYTES], sequence
        if digest and self._others.get(digest) is None and (value := self._ended.get(digest)):
            return _UNKNOWN_BODY, int.from_bytes(value[BODY_DIGEST_BYTES:])
        return None

    def _digests(self, job: OutgoingJob) -> Iterator[bytes]:
        """Yield the message ids that a job may be stored under."""
        for message_id in (job.message_id, *(salted_id(salt, job.message_id) for salt in self.salts)):
            if digest := digest_of(message_id):
                yield digest

    def _found_sequence(self, job: OutgoingJob) -> int | None:
        """Return the sequence of the message that was found and is a job."""
        if not len(self._found):
            return None
        content = content_of_job(job, of_any_task=self.of_any_task)
        values = (self._found.get(_both(digest, content)) for digest in self._digests(job))
        return next((int.from_bytes(value) for value in values if value), None)

    def _named_as(self, job: OutgoingJob) -> tuple[bytes, int] | None:
        """Return body digest and sequence of what the task itself seems to have stored under a given id."""
        values = (self._named_task.get(digest) for digest in self._digests(job))
        return next(
            ((value[:BODY_DIGEST_BYTES], int.from_bytes(value[BODY_DIGEST_BYTES:])) for value in values if value), None
        )


def salted_id(salt: str, message_id: str) -> str:
    """Return the message id of a job whose own id somebody else has taken."""
    return short_digest(salt, message_id)


def _both(digest: bytes, content: bytes) -> bytes:
    return sha256(digest + content).digest()[: len(digest)]
