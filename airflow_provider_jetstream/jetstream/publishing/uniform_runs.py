"""Finds out whether jobs differ in body and ids only, and makes a run of them whose checks are made once for all."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Final

from airflow_provider_jetstream.jetstream.contract import AIRFLOW_TASK, JOB_ID, MSG_ID
from airflow_provider_jetstream.jetstream.errors import JobNotSerializableError
from airflow_provider_jetstream.jetstream.publishing.job import Job
from airflow_provider_jetstream.jetstream.publishing.job_identity import MAX_JOB_ID
from airflow_provider_jetstream.jetstream.publishing.outgoing_run import UniformRun
from airflow_provider_jetstream.jetstream.publishing.run_identity import DigestIds, NumberedIds, batch_of
from airflow_provider_jetstream.jetstream.queue.message_size import Measured

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow_provider_jetstream.jetstream.origin import Origin, ShortDigests
    from airflow_provider_jetstream.jetstream.publishing.job_keys import JobKeys
    from airflow_provider_jetstream.jetstream.queue.message_size import SizeLimit
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

_MESSAGE_ID: Final = "x" * 22
# What a job of a uniform run has none of, besides headers.
_ABSENT: Final = ("subject", "advisory", "partition_key", "at", "delay", "every", "time_zone")
_absent = attrgetter(*_ABSENT)
_NOTHING: Final = (None,) * len(_ABSENT)


class UniformRuns:
    """Makes uniform runs.

    :param subject: that of jobs that name none
    :param origin: the publishing task, if there is one
    :param batch: unique for this call
    :param given_ids: the message ids of jobs with ids, where they don't depend on the call
    :param by_key: whether a stored record names the task
    """

    def __init__(
        self,
        subject: str | None,
        origin: Origin | None,
        batch: str,
        queue: WorkQueue | None,
        limit: SizeLimit | None,
        given_ids: ShortDigests | None = None,
        *,
        by_key: bool,
    ) -> None:
        self._subject = subject or ""
        self._limit = limit
        self._given_ids = given_ids
        self._batch = None if origin else batch_of(batch)
        self._constant: dict[str, str] = {}
        if origin:
            self._constant = {AIRFLOW_TASK: origin.key} if by_key else origin.headers()
        self._advisory_subjects = queue.advisory_subjects if queue else ()

    def run_of(
        self, first: int, items: Sequence[object], target: str, keys: JobKeys, message_ids: ShortDigests
    ) -> UniformRun | None:
        """Return jobs as a run; ``None``, with nothing noted of them, where they have to be looked at one by one.

        :param first: the index of the first job
        :param target: the subject of the jobs, which is checked
        """
        contents, given = _columns(items)
        bodies = _encoded(contents) if contents else None
        if bodies is None or not self._have_no_fields(bodies, has_ids=given is not None):
            return None
        id_text = _id_text(given) if given else b""
        if id_text is None or not self._fit(bodies, max(given, key=len) if given else None):
            return None
        if given and not keys.note_ids(first, given, id_text):
            return None
        identity = self._identity(first, bodies, given, id_text, keys, message_ids)
        return UniformRun(items, target, bodies, identity, self._constant)

    def _identity(
        self,
        first: int,
        bodies: Sequence[bytes],
        given: Sequence[str] | None,
        id_text: bytes,
        keys: JobKeys,
        message_ids: ShortDigests,
    ) -> NumberedIds | DigestIds:
        given_ids = id_text.split(b"\n") if given else None
        if given_ids and self._given_ids:
            return DigestIds(self._given_ids, given_ids, None, 0, len(bodies))
        if self._batch is not None:
            return NumberedIds(self._batch, first, len(bodies), given_ids)
        contents = None if given else keys.contents_of(self._subject, bodies)
        return DigestIds(message_ids, given_ids, contents, 0, len(bodies))

    def _have_no_fields(self, bodies: Sequence[bytes], *, has_ids: bool) -> bool:
        """Return whether no body names an advisory subject, nor an id where the author gives another."""
        text = b"\n".join([b"", *bodies])
        if self._advisory_subjects and (b'"advisory"' in text or b"\\u" in text):
            return False
        if b"\n{" not in text:
            return True
        return b'"advisory"' not in text and not (has_ids and b'"id"' in text)

    def _fit(self, bodies: Sequence[bytes], longest_id: str | None) -> bool:
        """Return whether the queue stores the largest of the jobs, and its redriven copy."""
        if self._limit is None:
            return True
        headers = {MSG_ID: _MESSAGE_ID, **({} if longest_id is None else {JOB_ID: longest_id}), **self._constant}
        measured = Measured(max(map(len, bodies)), copied_id=_MESSAGE_ID if longest_id is None else None)
        return self._limit.problem(measured, headers) is None


def _columns(items: Sequence[object]) -> tuple[Sequence[object], list[str] | None]:
    """Return the bodies of jobs and their given ids, if they have any; no bodies where there is more to the jobs."""
    kinds = set(map(type, items))
    if kinds != {Job}:
        return () if any(issubclass(kind, Job) for kind in kinds) else items, None
    if not _are_plain(items):
        return (), None
    given = [item.id for item in items]  # type: ignore[attr-defined]
    return [item.body for item in items], None if set(given) == {None} else given  # type: ignore[attr-defined]


def _are_plain(jobs: Sequence[object]) -> bool:
    return set(map(_absent, jobs)) == {_NOTHING} and not any(map(attrgetter("headers"), jobs))


def _encoded(contents: Sequence[object]) -> list[bytes] | None:
    """Return bodies as they are sent; ``None`` where one can't be encoded."""
    kinds = set(map(type, contents))
    if kinds == {bytes}:
        return list(contents)  # type: ignore[arg-type]
    try:
        if kinds == {str}:
            return [text.encode() for text in contents]  # type: ignore[attr-defined]
        return [Job(content).payload() for content in contents]
    except (JobNotSerializableError, UnicodeEncodeError):
        return None


def _id_text(given: Sequence[str]) -> bytes | None:
    """Return ids in one text, a line each; ``None`` where one may be no id."""
    if set(map(type, given)) != {str}:
        return None
    text = "\n".join(given)
    if not text.isascii() or text.count("\n") != len(given) - 1 or not text.replace("\n", "").isprintable():
        return None
    if not all(given) or max(map(len, given)) > MAX_JOB_ID or list(map(str.strip, given)) != list(given):
        return None
    return text.encode()
