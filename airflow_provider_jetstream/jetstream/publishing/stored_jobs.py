"""Which jobs of a task are stored already: those in its manifest, and those that a try stored which was cut off."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.errors import JobError
from airflow_provider_jetstream.jetstream.origin import digest_of
from airflow_provider_jetstream.jetstream.publishing.digest_table import DigestTable
from airflow_provider_jetstream.jetstream.publishing.job_identity import body_field
from airflow_provider_jetstream.jetstream.publishing.job_keys import BODY_DIGEST_BYTES
from airflow_provider_jetstream.jetstream.publishing.manifest_head import ID_LENGTH

if TYPE_CHECKING:
    from collections.abc import Iterator

    from airflow_provider_jetstream.jetstream.origin import Origin
    from airflow_provider_jetstream.jetstream.publishing.job import OutgoingJob

_UNKNOWN_BODY = bytes(BODY_DIGEST_BYTES)


def _table() -> DigestTable:
    return DigestTable(BODY_DIGEST_BYTES + 8)


@dataclass(slots=True)
class EarlierVersion:
    """What an earlier version recorded of a task's jobs, by their positions and their longer message ids.

    :param origin: the task
    :param runs: index, sequence and count of each run of jobs, in the order of the indexes
    :param recorded: stream sequences by the beginnings of message ids, of a task with an idempotency key
    :param long_ids: whether it gave jobs the longer message ids
    """

    origin: Origin
    runs: tuple[tuple[int, int, int], ...] = ()
    recorded: dict[str, int] = field(default_factory=dict)
    long_ids: bool = False

    def message_ids(self, index: int, job: OutgoingJob) -> Iterator[str]:
        """Yield the message ids that it may have given to a job."""
        key: str | int = job.key.given_id or body_field(job.body or b"", "id") or index
        yield self.origin.message_id(key)
        if self.long_ids:
            yield self.origin.long_message_id(key)

    def sequence_of(self, index: int, job: OutgoingJob) -> int | None:
        """Return the stream sequence that it recorded for a job."""
        for message_id in (job.message_id, *self.message_ids(index, job)):
            if sequence := self.recorded.get(message_id[:ID_LENGTH]):
                return sequence
        run = bisect_right(self.runs, index, key=lambda run: run[0]) - 1
        if run >= 0:
            first, start, count = self.runs[run]
            if index < first + count:
                return start + index - first
        return None


class StoredJobs:
    """The jobs of a task that are known to be stored.

    :param earlier: what an earlier version recorded of them
    """

    def __init__(self, earlier: EarlierVersion | None = None) -> None:
        self._earlier = earlier
        # By the digests of message ids: body digest and sequence of the task's jobs, and of others.
        self._own = _table()
        self._others = _table()
        self._named = bytearray()
        self._other_ids: dict[str, tuple[bytes, int]] = {}

    def __len__(self) -> int:
        return len(self._own)

    def add(self, digest: bytes, body_digest: bytes, sequence: int) -> bool:
        """Add a job of the task's manifest, and return whether it is new."""
        value = body_digest[:BODY_DIGEST_BYTES] + sequence.to_bytes(8)
        is_new = self._own.position(digest) is None
        self._own.set(digest, value)
        return is_new

    def add_found(self, message_id: str, body_digest: bytes | None, sequence: int) -> None:
        """Add a job that is stored, whoever has published it.

        :param body_digest: ``None`` where the body isn't known
        """
        body = (body_digest or _UNKNOWN_BODY)[:BODY_DIGEST_BYTES]
        if digest := digest_of(message_id):
            if self._others.get(digest) is None or body_digest:
                self._others.set(digest, body + sequence.to_bytes(8))
        elif self._earlier:
            self._other_ids[message_id] = (body, sequence)

    def check(self, index: int, job: OutgoingJob) -> None:
        """Refuse a job whose given id is stored with another body.

        :raises JobError: it is
        """
        if job.key.given_id is None or self.is_empty or (known := self._value_of(index, job)) is None:
            return
        body_digest, sequence = known
        found = job.key.body_digest[:BODY_DIGEST_BYTES]
        if body_digest not in (_UNKNOWN_BODY, found):
            raise JobError(
                f"job {index} has the id {job.key.given_id!r}, under which this task has stored another body (sequence"
                f" {sequence}: the SHA-256 of its body begins with {body_digest.hex()}, that of this one with"
                f" {found.hex()}): expected the same job when a task is tried again; give the changed job another id,"
                " or clear the task once its jobs have ended, which publishes all of them anew"
            )

    def sequence_of(self, index: int, job: OutgoingJob) -> int | None:
        """Return the stream sequence of a job, which is listed; ``None`` where it isn't known to be stored.

        :raises JobError: its given id is stored with another body
        """
        if self.is_empty:
            return None
        self.check(index, job)
        if (digest := digest_of(job.message_id)) and (position := self._own.position(digest)) is not None:
            self._named.extend(bytes(max(0, len(self._own) - len(self._named))))
            self._named[position] = 1
        known = self._value_of(index, job)
        return known[1] if known else None

    @property
    def is_empty(self) -> bool:
        """Whether no job is known to be stored."""
        return not (len(self._own) or len(self._others) or self._other_ids or self._earlier)

    def is_recorded(self, job: OutgoingJob) -> bool:
        """Return whether a job is in the task's manifest."""
        if not len(self._own):
            return False
        digest = digest_of(job.message_id)
        return digest is not None and self._own.position(digest) is not None

    def extra(self) -> array[int]:
        """Return the sequences of jobs of the task that :meth:`sequence_of` wasn't called for."""
        self._named.extend(bytes(max(0, len(self._own) - len(self._named))))
        unnamed = (value for (_, value), named in zip(self._own, self._named, strict=False) if not named)
        return array("Q", (int.from_bytes(value[BODY_DIGEST_BYTES:]) for value in unnamed))

    def _value_of(self, index: int, job: OutgoingJob) -> tuple[bytes, int] | None:
        digest = digest_of(job.message_id)
        if digest and (value := self._own.get(digest) or self._others.get(digest)):
            return value[:BODY_DIGEST_BYTES], int.from_bytes(value[BODY_DIGEST_BYTES:])
        if self._earlier is None:
            return None
        if sequence := self._earlier.sequence_of(index, job):
            return _UNKNOWN_BODY, sequence
        for message_id in self._earlier.message_ids(index, job):
            if (digest := digest_of(message_id)) and (value := self._others.get(digest)):
                return _UNKNOWN_BODY, int.from_bytes(value[BODY_DIGEST_BYTES:])
            if known := self._other_ids.get(message_id):
                return _UNKNOWN_BODY, known[1]
        return None
