"""What identifies a job among those of one call: its given id, else its content and the number of equal jobs before it.

Never its position, and never the number of the try: a retry may list the same jobs in another order. The content is
what the author declares: a delay counts as it is written, and not as the time that it gives at this try. Headers of a
trace say which try has sent a job, so they don't count.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import AIRFLOW_TASK, JOB_ID, TRACE_PARENT, TRACE_STATE
from airflow_provider_jetstream.jetstream.errors import JobError
from airflow_provider_jetstream.jetstream.publishing.digest_table import DIGEST_BYTES, DigestTable
from airflow_provider_jetstream.jetstream.publishing.job_identity import body_field
from airflow_provider_jetstream.jetstream.queue.partitions import PLACEHOLDER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

JobIdSource: TypeAlias = "str | Callable[[Any], object]"

# What is stored of the digest of a body.
BODY_DIGEST_BYTES = 8

# What the content of a job without an id is, by a number that its task's manifest holds. A task that was begun with one
# goes on with it, since its jobs have other message ids with another.
SUBJECT_AND_BODY: Final = 1
WITH_HEADERS: Final = 2
CONTENTS: Final = WITH_HEADERS

# The names in lower case of headers that differ at each try, or that the publisher sets.
_OF_A_TRY = frozenset(name.lower() for name in (TRACE_PARENT, TRACE_STATE, "baggage", JOB_ID, AIRFLOW_TASK))


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


class JobKeys:
    """The keys of the jobs of one call."""

    def __init__(self) -> None:
        # The position of the first job with an id; the number of jobs with a content.
        self._known = DigestTable(8)
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
        if given_id is not None:
            place = sha256(b"id " + given_id.encode("utf-8", "surrogatepass")).digest()[:DIGEST_BYTES]
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
        if declared:
            name = _line(*named, *declared)
        else:
            # That of most jobs is the one of the job before.
            if self._name[0] != named or not self._name[1]:
                self._name = (named, _line(*named))
            name = self._name[1]
        content = sha256(name + body)
        return JobKey((content.hexdigest(), self._known.increment(content.digest()[:DIGEST_BYTES])), digest)


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
        return text_or_none(own_id)
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
    if not is_id or not (text := text_or_none(value)):
        raise JobError(f"job {index}: expected text or a whole number {where}, found {value!r}: give each job an id")
    return text


def _json_object(body: bytes | None) -> dict[str, Any] | None:
    try:
        value = json.loads(body or b"")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
