"""Runs of jobs: jobs that were read together, and are checked, encoded, sent and acknowledged together.

Most runs are uniform: their jobs differ in body and ids only. Such a run is held in columns, and what says more of a
single job is made when it is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from airflow_provider_jetstream.jetstream.client.headers import encode_headers
from airflow_provider_jetstream.jetstream.client.wire import encode_message, encode_numbered, encode_subject
from airflow_provider_jetstream.jetstream.contract import JOB_ID, MSG_ID
from airflow_provider_jetstream.jetstream.publishing.job import Job, OutgoingJob
from airflow_provider_jetstream.jetstream.publishing.job_identity import body_field

if TYPE_CHECKING:
    from array import array
    from collections.abc import Collection, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.publishing.run_identity import RunIdentity

_FIRST_LINE: Final = b"NATS/1.0\r\n"
_MESSAGE_ID_LENGTH: Final = 22


class OutgoingRun(Protocol):
    """Jobs that follow each other."""

    def __len__(self) -> int: ...

    @property
    def size(self) -> int:
        """The size of all bodies together."""

    @property
    def largest(self) -> int:
        """At least the size of the largest body with its headers."""

    @property
    def subjects(self) -> Collection[str]:
        """The subjects of the jobs."""

    @property
    def is_plain(self) -> bool:
        """Whether any server stores all of the jobs as they are: each has a body, and none has a schedule."""

    def job(self, offset: int) -> OutgoingJob:
        """Return a job by its place in the run."""

    def part(self, start: int, stop: int) -> OutgoingRun:
        """Return some of the jobs."""

    def encode(self, reply_prefix: bytes, first: int) -> bytes:
        """Return the jobs as they are sent.

        :param first: the index of the first job; a job's index ends the subject for its answer
        """


class ListedRun:
    """Jobs of any kind."""

    __slots__ = ("_blocks", "_jobs", "size")

    def __init__(self, jobs: Sequence[OutgoingJob]) -> None:
        self._jobs = jobs
        self._blocks: list[bytes] = []
        self.size = sum([len(job.body or b"") for job in jobs])

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def largest(self) -> int:
        """The size of the largest job."""
        return max(len(job.body or b"") + len(block) for job, block in zip(self._jobs, self._headers(), strict=True))

    @property
    def subjects(self) -> Collection[str]:
        """The subjects of the jobs."""
        return {job.subject for job in self._jobs}

    @property
    def is_plain(self) -> bool:
        """Whether each job has a body, and none a schedule."""
        return all(job.body is not None and not job.api_level and not job.scheduled for job in self._jobs)

    def job(self, offset: int) -> OutgoingJob:
        """Return a job by its place in the run."""
        return self._jobs[offset]

    def part(self, start: int, stop: int) -> ListedRun:
        """Return some of the jobs."""
        return ListedRun(self._jobs[start:stop])

    def encode(self, reply_prefix: bytes, first: int) -> bytes:
        """Return the jobs as they are sent."""
        return b"".join(
            [
                encode_message(encode_subject(job.subject), job.body or b"", block, b"%b%d" % (reply_prefix, index))
                for index, (job, block) in enumerate(zip(self._jobs, self._headers(), strict=True), first)
            ]
        )

    def _headers(self) -> Sequence[bytes]:
        if not self._blocks:
            self._blocks = [encode_headers(job.headers) for job in self._jobs]
        return self._blocks


@dataclass(slots=True)
class UniformRun:
    """Jobs with the same subject and headers, but for their ids.

    :param items: as they were listed
    :param identity: their ids
    :param constant: the headers after those with their ids
    """

    items: Sequence[object]
    subject: str
    bodies: Sequence[bytes]
    identity: RunIdentity
    constant: Mapping[str, str]
    size: int = 0

    def __post_init__(self) -> None:
        self.size = sum(map(len, self.bodies))

    def __len__(self) -> int:
        return len(self.bodies)

    @property
    def subjects(self) -> Collection[str]:
        """The subject of all jobs."""
        return (self.subject,)

    @property
    def is_plain(self) -> bool:
        """True: a job without a body, or with a schedule, is in no uniform run."""
        return True

    @property
    def largest(self) -> int:
        """The size of a job with the largest body and the longest id."""
        given = self.identity.given_ids
        return max(map(len, self.bodies)) + len(self._block(b"")) + (max(map(len, given)) if given else 0)

    def job(self, offset: int) -> OutgoingJob:
        """Return a job by its place in the run."""
        item, body, message_id = self.items[offset], self.bodies[offset], self.identity.message_id(offset)
        given_id = self.identity.given_id(offset)
        headers = {MSG_ID: message_id, **({} if given_id is None else {JOB_ID: given_id}), **self.constant}
        job_id = given_id or body_field(body, "id") or message_id
        job = item if isinstance(item, Job) else Job(item)
        return OutgoingJob(job, self.subject, body, self.identity.key(offset, body), job_id, message_id, headers)

    def job_ids(self) -> Sequence[bytes]:
        """Return the ids by which the jobs are known, in UTF-8."""
        if given := self.identity.given_ids:
            return given
        ids = self.identity.message_ids()
        if not any(body.startswith(b"{") for body in self.bodies):
            return ids
        named = [body_field(body, "id") for body in self.bodies]
        return [message_id if name is None else name.encode() for name, message_id in zip(named, ids, strict=True)]

    def part(self, start: int, stop: int) -> UniformRun:
        """Return some of the jobs."""
        identity = self.identity.part(start, stop)
        return UniformRun(self.items[start:stop], self.subject, self.bodies[start:stop], identity, self.constant)

    def row_columns(self) -> tuple[array[int], array[int]]:
        """Return message ids, as two numbers each, and the beginnings of the bodies' digests, as one."""
        return self.identity.row_columns(self.bodies)

    def encode(self, reply_prefix: bytes, first: int) -> bytes:
        """Return the jobs as they are sent: one format for all of them."""
        identity, size = self.identity, len(self._block(b""))
        values = [identity.message_ids()]
        sizes: int | list[int] = size
        if given := identity.given_ids:
            values, sizes = [*values, given], [size + len(given_id) for given_id in given]
        subject, headers = encode_subject(self.subject), self._block(b"%b")
        return encode_numbered(subject, reply_prefix, first, headers, values, sizes, self.bodies)

    def _block(self, place: bytes) -> bytes:
        """Return the headers, with a place for each id; of a message id's length where the place is empty."""
        rest = encode_headers(self.constant)[len(_FIRST_LINE) :]
        job_id = b"%b: %b\r\n" % (JOB_ID.encode(), place) if self.identity.given_ids else b""
        return b"%b%b: %b\r\n%b%b" % (
            _FIRST_LINE,
            MSG_ID.encode(),
            place or bytes(_MESSAGE_ID_LENGTH),
            job_id,
            _escaped(rest) if place else rest,
        )


def _escaped(text: bytes) -> bytes:
    return text.replace(b"%", b"%%")
