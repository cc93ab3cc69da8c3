"""What identifies a job among those of one call: its given id, else its content and the number of equal jobs before it.

Never its position, and never the number of the try: a retry may list the same jobs in another order. The content is
what the author declares: a delay counts as it is written, and not as the time that it gives at this try. Headers of a
trace say which try has sent a job, so they don't count.
"""

from __future__ import annotations

import json
from array import array
from collections import deque
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, TypeAlias

from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import TRACE_PARENT, TRACE_STATE
from airflow_provider_jetstream.jetstream.errors import JobError
from airflow_provider_jetstream.jetstream.publishing.digest_table import DIGEST_BYTES, DigestTable
from airflow_provider_jetstream.jetstream.publishing.job_fields import blank_problem
from airflow_provider_jetstream.jetstream.publishing.job_identity import body_field
from airflow_provider_jetstream.jetstream.queue.partitions import PLACEHOLDER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

JobIdSource: TypeAlias = "str | Callable[[Any], object]"

# What is stored of the digest of a body.
BODY_DIGEST_BYTES = 8

# The names in lower case of headers that differ at each try.
_OF_A_TRY = frozenset(name.lower() for name in (TRACE_PARENT, TRACE_STATE, "baggage"))


@dataclass(frozen=True, slots=True)
class JobKey:
    """What identifies a job among those of its task.

    :param parts: the given id; or the digest of the content, and the number of jobs before it with the same
    :param body_digest: the SHA-256 of the body
    """

    parts: tuple[str | int, ...]
    body_digest: bytes

    @property
    def given_id(self) -> str | None:
        """The id that the author gave; ``None`` for a job that is known by its content."""
        return str(self.parts[0]) if len(self.parts) == 1 else None


class RunContents:
    """The contents of a run of jobs without ids.

    :param name: what the content of each begins with
    :param find: finds the contents of all runs up to this one
    :ivar counts: how many equal jobs came before each; ``None`` where no job is equal to another one
    """

    __slots__ = ("_bodies", "_digests", "_find", "_name", "counts")

    def __init__(self, name: bytes, bodies: Sequence[bytes], find: Callable[[RunContents], None]) -> None:
        self._name = name
        self._bodies = bodies
        self.counts: list[int] | None = None
        self._digests: list[bytes] | None = None
        self._find = find

    @property
    def digests(self) -> list[bytes]:
        """Those of the contents."""
        if self._digests is None:
            self._find(self)
        return self._digests or []

    def digest(self) -> list[bytes]:
        """Digest the contents, and return the digests."""
        self._digests, self._bodies = [sha256(self._name + body).digest() for body in self._bodies], ()
        return self._digests


class JobKeys:
    """The keys of the jobs of one call.

    :param is_whole: whether all jobs are prepared before one is sent: the contents of runs are then digested as they
        are sent, while the server stores those before
    """

    def __init__(self, *, is_whole: bool = False) -> None:
        self._is_whole = is_whole
        # Of a source that isn't whole, one thread prepares jobs while another one sends: nothing waits there.
        self._waiting: deque[RunContents] = deque()
        # The position of the first job with an id; the number of jobs with a content.
        self._known = DigestTable(8)
        # Of runs, as long as none of their jobs may have the id or the content of another one.
        self._contents: set[int] = set()
        self._content_digests = array("Q")
        self._ids: set[int] = set()
        self._id_texts: list[tuple[int, bytes]] = []
        self._name: tuple[tuple[str, str | None], bytes] = (("", None), b"")

    def key_of(
        self,
        index: int,
        given_id: str | None,
        subject: str,
        partition_key: str | None,
        body: bytes | None,
        declared: Sequence[object] = (),
    ) -> JobKey:
        """Return the key of the next job.

        :param given_id: the id that the author gave it
        :param subject: its subject as the author gave it, before a partition takes its place
        :param partition_key: what its partition is made of
        :param body: its encoded body; ``None`` where it can't be encoded, so that it is never sent
        :param declared: what else counts as its content: see :func:`declared_content`
        :raises JobError: a job before it has the same id
        """
        digest = sha256(body or b"").digest()
        self._note_exactly()
        if given_id is not None:
            place = _place(given_id.encode("utf-8", "surrogatepass"))
            if (first := self._known.get(place)) is not None:
                raise JobError(
                    f"jobs {int.from_bytes(first)} and {index} both have the id {given_id!r}, and only one of them"
                    " would be stored: expected an id for each job; give each its own, or none, where equal jobs count"
                )
            self._known.set(place, index.to_bytes(8))
            return JobKey((given_id,), digest)
        if body is None:
            return JobKey(("not sent", index), digest)
        named = (subject, partition_key if PLACEHOLDER in subject else None)
        name = _line(*named, *declared) if declared else self._line_of(named)
        content = sha256(name + body)
        return JobKey((content.hexdigest(), self._known.increment(content.digest()[:DIGEST_BYTES])), digest)

    def _line_of(self, named: tuple[str, str | None]) -> bytes:
        # That of most jobs is the one of the job before.
        if self._name[0] != named or not self._name[1]:
            self._name = (named, _line(*named))
        return self._name[1]

    def contents_of(self, subject: str, bodies: Sequence[bytes]) -> RunContents:
        """Return the contents of a run of jobs without ids.

        :param subject: that of all jobs
        """
        run = RunContents(self._line_of((subject, None)), bodies, self._find)
        self._waiting.append(run)
        if not self._is_whole:
            self._find(run)
        return run

    def _find(self, last: RunContents) -> None:
        """Digest runs in their order up to this one: a job's number depends on those before it."""
        while self._waiting:
            run = self._waiting.popleft()
            run.counts = self._counts_of(run.digest())
            if run is last:
                return

    def _counts_of(self, digests: Sequence[bytes]) -> list[int] | None:
        if not len(self._known):
            words = array("Q", b"".join(digests))
            starts = words[::4].tolist()
            if len(set(starts)) == len(starts) and self._contents.isdisjoint(starts):
                self._contents.update(starts)
                kept = array("Q", bytes(DIGEST_BYTES * len(digests)))
                kept[::2], kept[1::2] = words[::4], words[1::4]
                self._content_digests.extend(kept)
                return None
            self._move_to_table()
        return [self._known.increment(digest[:DIGEST_BYTES]) for digest in digests]

    def note_ids(self, index: int, ids: Sequence[str], text: bytes) -> bool:
        """Note the given ids of a run of jobs; return ``False``, with nothing noted, where one may be known already.

        :param index: that of the first job
        :param text: the ids, each followed by a line feed but for the last
        """
        if len(self._known):
            places = [_place(given_id) for given_id in text.split(b"\n")]
            if len(set(places)) < len(places) or any(self._known.position(place) is not None for place in places):
                return False
            for number, place in enumerate(places, index):
                self._known.set(place, number.to_bytes(8))
            return True
        hashes = set(map(hash, ids))
        if len(hashes) < len(ids) or not self._ids.isdisjoint(hashes):
            return False
        self._ids |= hashes
        self._id_texts.append((index, text))
        return True

    def _note_exactly(self) -> None:
        """Move what runs have noted to the table, with those that wait."""
        if self._waiting:
            self._find(self._waiting[-1])
        self._move_to_table()

    def _move_to_table(self) -> None:
        """Move what runs have noted to the table, which knows how often and where."""
        if self._content_digests:
            digests = self._content_digests.tobytes()
            for start in range(0, len(digests), DIGEST_BYTES):
                self._known.increment(digests[start : start + DIGEST_BYTES])
            self._content_digests, self._contents = array("Q"), set()
        for first, text in self._id_texts:
            for index, given_id in enumerate(text.split(b"\n"), first):
                self._known.set(_place(given_id), index.to_bytes(8))
        self._id_texts, self._ids = [], set()


def _place(given_id: bytes) -> bytes:
    return sha256(b"id " + given_id).digest()[:DIGEST_BYTES]


def declared_content(
    headers: Mapping[str, str], advisory: str | None, schedule: Sequence[object] | None, body: bytes
) -> Sequence[object]:
    """Return what tells a job from others with the same subject and body: all that its author declares for it.

    :param schedule: its fields as declared; ``None`` where it has none
    :return: nothing where there is nothing more
    """
    counting = sorted([name, value] for name, value in headers.items() if name.lower() not in _OF_A_TRY)
    stated = advisory if advisory and advisory != body_field(body, "advisory") else None
    if not counting and stated is None and schedule is None:
        return ()
    return (counting, stated, *(None if value is None else str(value) for value in schedule or ()))


def _line(*names: object) -> bytes:
    return json.dumps(names).encode() + b"\n"


def given_id(
    index: int,
    item: object,
    own_id: str | None,
    body: bytes | None,
    source: JobIdSource | None,
    advisory_subjects: tuple[str, ...],
) -> str | None:
    """Return the id that the author gave a job; ``None`` where a job is known by its content.

    :param item: the job as it was listed
    :param own_id: that of a :class:`Job`
    :param source: a field of its body that is a JSON object, or what returns its id
    :param advisory_subjects: those that its queue declares: a body with ``id`` and one of them as ``advisory`` states
        the id by which its worker reports it
    :raises JobError: the source gives no id
    """
    if own_id is not None:
        return _exact_id(index, str(own_id))
    if source is not None:
        return _sourced_id(index, item, body, source)
    if body and advisory_subjects and (advisory := body_field(body, "advisory")):
        return body_field(body, "id") if covered_by_any(advisory_subjects, advisory) else None
    return None


def text_or_none(value: object) -> str | None:
    """Return a value as text without white space around it, which a header's value isn't sent with."""
    return None if value is None else str(value).strip() or None


def _sourced_id(index: int, item: object, body: bytes | None, source: JobIdSource) -> str:
    if callable(source):
        try:
            value = source(item)
        except Exception as error:
            raise JobError(
                f"job {index}: expected an id from job_id ({getattr(source, '__name__', source)}), found"
                f" {type(error).__name__}: {error}; return the id of each job"
            ) from error
        where = f"from job_id ({getattr(source, '__name__', source)})"
    else:
        if (fields := _json_object(body)) is None:
            raise JobError(
                f"job {index}: expected a JSON object with the field {source!r}, which job_id names, found another"
                " body: give the job an id of its own, or pass a callable as job_id"
            )
        value, where = fields.get(source), f"in the field {source!r}, which job_id names"
    is_id = isinstance(value, str | int) and not isinstance(value, bool)
    if not is_id or not str(value).strip():
        raise JobError(f"job {index}: expected text or a whole number {where}, found {value!r}: give each job an id")
    return _exact_id(index, str(value))


def _exact_id(index: int, text: str) -> str:
    if problem := blank_problem(text):
        raise JobError(f"job {index}: {problem}")
    return text


def _json_object(body: bytes | None) -> dict[str, Any] | None:
    try:
        value = json.loads(body or b"")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
