"""A batch: jobs that are checked, encoded, sent and acknowledged together.

The jobs of a batch differ in body and ids only, and are held in columns; what says more of a single job is made when it
is asked for. A job that differs in more is a batch of one.
"""

from __future__ import annotations

from array import array
from binascii import a2b_base64, b2a_base64
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from airflow_provider_jetstream.jetstream.client.headers import encode_headers
from airflow_provider_jetstream.jetstream.contract import JOB_ID, MSG_ID
from airflow_provider_jetstream.jetstream.origin import DIGEST_BYTES, URL_SAFE
from airflow_provider_jetstream.jetstream.publishing.job import Job, OutgoingJob, body_field

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MESSAGE_ID_LENGTH: Final = 22
_FIRST_LINE: Final = b"NATS/1.0\r\n"
_WORD: Final = 8
# Base64 has four characters for three bytes: with two bytes more, a digest has 24 characters, the last of them "AA".
_PADDED: Final = DIGEST_BYTES + 2
_STANDARD: Final = bytes.maketrans(b"-_", b"+/")


@dataclass(slots=True)
class Batch:
    """Jobs that follow each other.

    :param subject: the subject of all jobs
    :param headers: the headers that all jobs have, written after the headers with their ids
    :param message_ids: the values of ``Nats-Msg-Id``
    :param given_ids: the ids that their author gave them, in ASCII; ``None`` where they have none
    :param items: the jobs as they were listed
    :param single: a job that has more to it, which is a batch by itself; ``headers`` are all of its headers
    """

    subject: str
    bodies: Sequence[bytes]
    headers: Mapping[str, str]
    message_ids: Sequence[bytes] = ()
    given_ids: Sequence[bytes] | None = None
    items: Sequence[object] = ()
    single: OutgoingJob | None = None
    size: int = field(init=False)
    _encoded: bytes = b""

    def __post_init__(self) -> None:
        self.size = sum(map(len, self.bodies))

    @classmethod
    def of(cls, job: OutgoingJob) -> Batch:
        """Return a job as a batch."""
        return cls(job.subject, (job.body or b"",), job.headers, single=job)

    def __len__(self) -> int:
        return len(self.bodies)

    @property
    def is_plain(self) -> bool:
        """Whether any server stores all jobs as they are: each has a body, and none needs a later server."""
        return self.single is None or (self.single.body is not None and not self.single.api_level)

    @property
    def unique_job(self) -> OutgoingJob | None:
        """The job with a unique key, which is a batch by itself."""
        return self.single if self.single and self.single.job.unique is not None else None

    @property
    def largest(self) -> int:
        """At least the size of the largest body with its headers."""
        given = self.given_ids
        return max(map(len, self.bodies)) + len(self._block(b"")) + (max(map(len, given)) if given else 0)

    def job(self, offset: int) -> OutgoingJob:
        """Return a job by its place in the batch."""
        if self.single:
            return self.single
        item, body, message_id = self.items[offset], self.bodies[offset], self.message_ids[offset].decode()
        given_id = self.given_ids[offset].decode() if self.given_ids else None
        headers = {MSG_ID: message_id, **({} if given_id is None else {JOB_ID: given_id}), **self.headers}
        job_id = given_id or body_field(body, "id") or message_id
        job = item if isinstance(item, Job) else Job(item)
        return OutgoingJob(job, self.subject, body, given_id, job_id, message_id, headers)

    def job_ids(self) -> Sequence[bytes]:
        """Return the ids by which the jobs are known, in UTF-8."""
        if self.single:
            return (self.single.job_id.encode("utf-8", "surrogatepass"),)
        if self.given_ids or not any(body.startswith(b"{") for body in self.bodies):
            return self.given_ids or self.message_ids
        named = [body_field(body, "id") for body in self.bodies]
        pairs = zip(named, self.message_ids, strict=True)
        return [message_id if name is None else name.encode() for name, message_id in pairs]

    def part(self, start: int, stop: int) -> Batch:
        """Return some of the jobs."""
        if self.single or (start == 0 and stop >= len(self)):
            return self
        given = self.given_ids[start:stop] if self.given_ids else None
        ids, items = self.message_ids[start:stop], self.items[start:stop]
        return Batch(self.subject, self.bodies[start:stop], self.headers, ids, given, items)

    def row_columns(self) -> tuple[array[int], array[int]]:
        """Return message ids, as two numbers each, and the beginnings of the bodies' digests, as one.

        The message id of a job without a given one is made of its body, so that its row has no other digest.
        """
        padded = a2b_base64(b"AA".join([*self.message_ids, b""]).translate(_STANDARD))
        digests = [padded[start : start + DIGEST_BYTES] for start in range(0, len(padded), _PADDED)]
        column = array("Q", bytes(_WORD * len(self)))
        if self.given_ids:
            column = array("Q", b"".join([sha256(body).digest()[:_WORD] for body in self.bodies]))
        return array("Q", b"".join(digests)), column

    def encode(self, reply_prefix: bytes, first: int) -> bytes:
        """Return the jobs as they are sent: one format for all of them.

        :param first: the index of the first job; a job's index ends the subject for its answer
        """
        # Only who sends needs it: jobs are checked when a DAG is parsed, too.
        from airflow_provider_jetstream.jetstream.client.wire import encode_message, encode_numbered, encode_subject

        subject, block = encode_subject(self.subject), self._block(b"%b")
        if self.single:
            return encode_message(subject, self.bodies[0], block, b"%b%d" % (reply_prefix, first))
        values, sizes = [self.message_ids], len(self._block(b""))
        if given := self.given_ids:
            each = [sizes + len(given_id) for given_id in given]
            return encode_numbered(subject, reply_prefix, first, block, [*values, given], each, self.bodies)
        return encode_numbered(subject, reply_prefix, first, block, values, sizes, self.bodies)

    def _block(self, place: bytes) -> bytes:
        """Return the headers, with a place for each id; of a message id's length where the place is empty."""
        self._encoded = self._encoded or encode_headers(self.headers)
        if self.single:
            return self._encoded
        rest = self._encoded[len(_FIRST_LINE) :]
        job_id = b"%b: %b\r\n" % (JOB_ID.encode(), place) if self.given_ids else b""
        message_id = place or bytes(MESSAGE_ID_LENGTH)
        constant = rest.replace(b"%", b"%%") if place else rest
        return b"%b%b: %b\r\n%b%b" % (_FIRST_LINE, MSG_ID.encode(), message_id, job_id, constant)


def digest_texts(digests: Sequence[bytes]) -> list[bytes]:
    """Return digests as message ids: as by :func:`~.origin.short_digest`, all at once."""
    padding, size = bytes(_PADDED - DIGEST_BYTES), _PADDED // 3 * 4
    text = b2a_base64(padding.join([*digests, b""]), newline=False).translate(URL_SAFE)
    return [text[start : start + MESSAGE_ID_LENGTH] for start in range(0, len(text), size)]
