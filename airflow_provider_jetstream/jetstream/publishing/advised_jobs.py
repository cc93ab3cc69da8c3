"""Jobs whose ends workers of any make report: on the subject that the job names, by the job's id.

A worker that knows nothing of this package publishes ``{"id": …}`` to the ``advisory`` of the job that it has finished.
Anybody may publish there, so a message counts only by subject and id together; hence a task waits for one job of each.
"""

from __future__ import annotations

import json
from base64 import urlsafe_b64encode
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.errors import JobError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.jetstream.publishing.job import OutgoingJob
    from airflow_provider_jetstream.jetstream.publishing.report import PublishReport
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

_DIGEST_BYTES = 16


def reported_job(subject: str, data: bytes) -> str | None:
    """Return the digest of the job that a message on an advisory subject reports; ``None`` where it names none."""
    job_id = _id_of(_json_object(data))
    return None if job_id is None else advised_job_digest(subject, job_id)


def advised_job_digest(subject: str, job_id: str) -> str:
    """Return the digest by which a job of this id is known on its advisory subject.

    :return: 22 characters, however long subject and id are
    """
    digest = sha256(f"{subject} {job_id}".encode("utf-8", "surrogatepass")).digest()
    return urlsafe_b64encode(digest[:_DIGEST_BYTES]).decode().rstrip("=")


@dataclass(slots=True)
class AdvisedJobs:
    """The jobs of one call that name an advisory subject of their queue, by their digests.

    :param advisory_subjects: the queue's
    :param indexes: the position of each job among those of the call
    :param names: subject and id of each job, for messages
    """

    advisory_subjects: tuple[str, ...]
    indexes: dict[str, int] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    # Those of the ids that the jobs have here, and those that several jobs have in their bodies only.
    _named: set[str] = field(default_factory=set)
    _ambiguous: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, queue: WorkQueue | None) -> AdvisedJobs:
        """Return an empty collection for a queue."""
        return cls(queue.advisory_subjects if queue else ())

    def note(self, index: int, outgoing: OutgoingJob) -> None:
        """Note a job that names an advisory subject.

        :raises JobError: a job before it has the same id on the same advisory subject
        """
        if not outgoing.scheduled:
            self._note(index, outgoing)

    def sequences(self, report: PublishReport) -> dict[str, int]:
        """Return the stream sequence of each job that is stored."""
        stored = {
            digest: report.sequences[index]
            for digest, index in self.indexes.items()
            if index < len(report.sequences) and digest not in self._ambiguous
        }
        return {digest: sequence for digest, sequence in stored.items() if sequence}

    def _note(self, index: int, outgoing: OutgoingJob) -> None:
        job = outgoing.job
        body = job.body if isinstance(job.body, dict) else _json_object(job.body)
        subject, job_id = job.advisory or body.get("advisory"), outgoing.key.given_id or _id_of(body)
        self._add(index, subject, job_id, is_named=True)
        # A worker of another make knows the body only, and reports what stands there word for word.
        if (named := (body.get("advisory", subject), _id_of(body) or job_id)) != (subject, job_id):
            self._add(index, *named, is_named=False)

    def _add(self, index: int, subject: object, job_id: str | None, *, is_named: bool) -> None:
        if not isinstance(subject, str) or job_id is None or not covered_by_any(self.advisory_subjects, subject):
            return
        digest = advised_job_digest(subject, job_id)
        name = f"id {job_id!r} on advisory subject {subject}"
        first = self.indexes.get(digest, index)
        if first != index and not is_named and digest not in self._named:
            # Their jobs have ids of their own besides.
            self._ambiguous.add(digest)
        elif first != index:
            raise JobError(
                f"jobs {first} and {index} both have {name}, and a message there wouldn't say which of them has ended:"
                " give each its own id or its own subject"
            )
        self.indexes[digest] = first
        self.names[digest] = name
        if is_named:
            self._named.add(digest)


def _json_object(body: object) -> Mapping[str, Any]:
    if not isinstance(body, bytes | str):
        return {}
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _id_of(body: Mapping[str, Any]) -> str | None:
    """Return the id in a body as text: some publishers write whole numbers.

    Others than whole ones have no text on which all languages agree, and are no ids of jobs elsewhere either.
    """
    value = body.get("id")
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else None
