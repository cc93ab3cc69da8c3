"""The ids of a run's jobs, in columns."""

from __future__ import annotations

from array import array
from binascii import b2a_base64
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Final, Protocol

from airflow_provider_jetstream.jetstream.origin import DIGEST_BYTES, URL_SAFE, digest_of, short_digest
from airflow_provider_jetstream.jetstream.publishing.job_keys import JobKey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow_provider_jetstream.jetstream.origin import ShortDigests
    from airflow_provider_jetstream.jetstream.publishing.job_keys import RunContents

# Of the 22 characters of a message id, so many are the job's number, and the others the digest of the call. Ten digits
# number as many jobs as fit into no stream; the others are 72 bits.
_NUMBER: Final = 10
_BATCH: Final = 12
_PADDING: Final = bytes(2)
_WORD: Final = 8


class RunIdentity(Protocol):
    """The ids of jobs that follow each other.

    :ivar given_ids: the ids that their author gave them, in ASCII; ``None`` where they have none
    """

    given_ids: Sequence[bytes] | None

    def given_id(self, offset: int) -> str | None:
        """Return the id that the author gave a job."""

    def message_id(self, offset: int) -> str:
        """Return the value of a job's ``Nats-Msg-Id``."""

    def message_ids(self) -> Sequence[bytes]:
        """Return the values of ``Nats-Msg-Id``."""

    def key(self, offset: int, body: bytes) -> JobKey:
        """Return what identifies a job among those of its task."""

    def part(self, start: int, stop: int) -> RunIdentity:
        """Return the ids of some of the jobs."""

    def row_columns(self, bodies: Sequence[bytes]) -> tuple[array[int], array[int]]:
        """Return message ids, as two numbers each, and the beginnings of the bodies' digests, as one."""


def batch_of(call: str) -> bytes:
    """Return what the message ids of one call have in common."""
    return short_digest(call)[:_BATCH].encode()


@dataclass(slots=True)
class NumberedIds:
    """The ids of jobs that no other call publishes again: their numbers within the call.

    :param batch: what the ids of the call have in common
    :param first: the number of the first job
    """

    batch: bytes
    first: int
    count: int
    given_ids: Sequence[bytes] | None = None

    def given_id(self, offset: int) -> str | None:
        """Return the id that the author gave a job."""
        return self.given_ids[offset].decode() if self.given_ids else None

    def message_id(self, offset: int) -> str:
        """Return the value of a job's ``Nats-Msg-Id``."""
        return f"{self.first + offset:0{_NUMBER}d}{self.batch.decode()}"

    def message_ids(self) -> Sequence[bytes]:
        """Return the values of ``Nats-Msg-Id``."""
        form = b"%%0%dd%b" % (_NUMBER, self.batch)
        return [form % number for number in range(self.first, self.first + self.count)]

    def key(self, offset: int, body: bytes) -> JobKey:
        """Return what identifies a job: its given id, or its number."""
        given_id = self.given_id(offset)
        return JobKey(("number", self.first + offset) if given_id is None else (given_id,), sha256(body).digest())

    def part(self, start: int, stop: int) -> NumberedIds:
        """Return the ids of some of the jobs."""
        given = self.given_ids[start:stop] if self.given_ids else None
        return NumberedIds(self.batch, self.first + start, min(stop, self.count) - start, given)

    def row_columns(self, bodies: Sequence[bytes]) -> tuple[array[int], array[int]]:
        """Return message ids, as two numbers each, and the beginnings of the bodies' digests, as one."""
        digests = [digest_of(self.message_id(offset)) or b"" for offset in range(self.count)]
        return array("Q", b"".join(digests)), body_column(bodies)


@dataclass(slots=True)
class DigestIds:
    """The ids of jobs that a later try of their task gives them again.

    :param task: makes the message ids, when they are asked for: a list is checked as a whole before any job is sent
    :param contents: the jobs' contents; ``None`` where their author gave them ids
    :param first: the place of the first job in its run
    :param count: the number of jobs
    """

    task: ShortDigests
    given_ids: Sequence[bytes] | None
    contents: RunContents | None
    first: int
    count: int
    _made: list[bytes] = field(default_factory=list)
    _texts: list[bytes] = field(default_factory=list)

    @property
    def digests(self) -> Sequence[bytes]:
        """Those of the message ids."""
        if not self._made:
            if self.contents is None:
                self._made = self.task.of_texts([given.decode() for given in self.given_ids or ()])
            else:
                digests = self.contents.digests[self.first : self.first + self.count]
                self._made = self.task.of_contents(digests, self._counts())
        return self._made

    def _counts(self) -> Sequence[int]:
        counts = self.contents.counts if self.contents else None
        return counts[self.first : self.first + self.count] if counts else bytes(self.count)

    def given_id(self, offset: int) -> str | None:
        """Return the id that the author gave a job."""
        return self.given_ids[offset].decode() if self.given_ids else None

    def message_id(self, offset: int) -> str:
        """Return the value of a job's ``Nats-Msg-Id``."""
        return self.message_ids()[offset].decode()

    def message_ids(self) -> Sequence[bytes]:
        """Return the values of ``Nats-Msg-Id``: as by :func:`~.origin.short_digest`, all at once."""
        if not self._texts:
            # Base64 has four characters for three bytes.
            size = (DIGEST_BYTES + len(_PADDING)) // 3 * 4
            text = b2a_base64(_PADDING.join([*self.digests, b""]), newline=False).translate(URL_SAFE)
            self._texts = [text[start : start + 22] for start in range(0, len(text), size)]
        return self._texts

    def key(self, offset: int, body: bytes) -> JobKey:
        """Return what identifies a job: its given id, or its content and the number of equal jobs before it."""
        digest = sha256(body).digest()
        if (given_id := self.given_id(offset)) is not None:
            return JobKey((given_id,), digest)
        contents = self.contents.digests if self.contents else []
        return JobKey((contents[self.first + offset].hex(), self._counts()[offset]), digest)

    def part(self, start: int, stop: int) -> DigestIds:
        """Return the ids of some of the jobs."""
        given = self.given_ids[start:stop] if self.given_ids else None
        part = DigestIds(self.task, given, self.contents, self.first + start, min(stop, self.count) - start)
        part._made, part._texts = self._made[start:stop], self._texts[start:stop]
        return part

    def row_columns(self, bodies: Sequence[bytes]) -> tuple[array[int], array[int]]:
        """Return message ids, as two numbers each, and the beginnings of the bodies' digests, as one.

        The message id of a job without a given one is made of its body, so that its row has no other digest.
        """
        column = array("Q", bytes(_WORD * self.count)) if self.given_ids is None else body_column(bodies)
        return array("Q", b"".join(self.digests)), column


def body_column(bodies: Sequence[bytes]) -> array[int]:
    """Return the first eight bytes of the digest of each body, as one number each."""
    digests = array("Q", b"".join([sha256(body).digest() for body in bodies]))
    return digests[:: sha256().digest_size // _WORD]
