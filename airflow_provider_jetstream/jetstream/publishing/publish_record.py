"""The record of what one task has published, as it is stored."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain, islice
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from airflow_provider_jetstream.jetstream.origin import Origin
from airflow_provider_jetstream.jetstream.publishing.report import index_runs

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.publishing.report import PublishReport

# Of the 22 characters of a message id: 66 bits.
ID_LENGTH = 11

_Count: TypeAlias = Annotated[int, Field(ge=0, lt=2**64)]


class PublishRecord(BaseModel):
    """What one task has published; by its key, the task's jobs and dead letters name it.

    :param stream: the work queue
    :param created: when its stream was created, in the server's own text
    :param dag_id: the task's DAG; ``None`` in records of earlier versions, as with the next three
    :param run_id: the DAG run
    :param task_id: the task
    :param map_index: its index in a mapped task, ``-1`` otherwise
    :param round: how many times all of the task's jobs have ended before
    :param began_at: when the task began to publish in this round
    :param queue_from: the first sequence of the queue that the task's jobs may have
    :param first_job: the lowest sequence of the task's jobs in all rounds
    :param last_job: the highest one, redriven copies included; ``None`` where unknown
    :param scheduled: whether the server may still make jobs of the task's schedules
    :param cursor: where the ends of its jobs are found, as a dict; its JSON name is ``mark``
    :param runs: its jobs as index, sequence and count of each run; ``None`` where unknown
    :param idempotency_key: the key under which all runs of the task publish the same jobs; this record is theirs
    :param ids: where there is such a key, the beginning of each job's message id, in the order of the runs
    :param published: how many jobs it stored, where known; stays when the record is closed
    :param closed: whether the task has nothing more to do
    """

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)

    type: Literal["io.airflow.jetstream.v1.published"] = "io.airflow.jetstream.v1.published"
    stream: str
    created: str
    dag_id: str | None = None
    run_id: str | None = None
    task_id: str | None = None
    map_index: int = -1
    round: _Count = 0
    began_at: AwareDatetime
    queue_from: _Count
    first_job: _Count | None = None
    last_job: _Count | None = None
    scheduled: bool = False
    cursor: dict[str, Any] = Field(default_factory=dict, validation_alias="mark", serialization_alias="mark")
    runs: list[tuple[_Count, _Count, _Count]] | None = None
    idempotency_key: str | None = None
    ids: str | None = None
    published: _Count | None = None
    closed: bool = False

    @property
    def origin(self) -> Origin | None:
        """The task, where the record names it."""
        if self.dag_id is None or self.run_id is None or self.task_id is None:
            return None
        return Origin(self.dag_id, self.run_id, self.task_id, self.map_index)

    def is_about(self, queue: str, key: str) -> bool:
        """Return whether it may be the record under a task's key; one of an earlier version names no task."""
        origin = self.origin
        named = origin is None or replace(origin, idempotency_key=self.idempotency_key).log_key == key
        return named and self.stream == queue

    def position(self, name: str) -> int | None:
        """Return a position of its cursor, such as ``events_from``; ``None`` where it has none."""
        value = self.cursor.get(name)
        return value if isinstance(value, int) and value > 0 else None

    @property
    def is_of_earlier_version(self) -> bool:
        """Whether a version stored it first that didn't name the task, and gave jobs longer message ids."""
        return self.first_job is None

    def may_name_any(self, sequences: Sequence[int]) -> bool:
        """Return whether one of the jobs of these sequences may be the task's.

        :param sequences: in ascending order
        """
        position = bisect_left(sequences, self.queue_from if self.first_job is None else self.first_job)
        last = self.last_job if self.closed else None
        return position < len(sequences) and (last is None or sequences[position] <= last)

    def recorded_jobs(self) -> dict[str, int]:
        """Return the stream sequences of jobs by the beginnings of their message ids, where the record has them."""
        if self.ids is None or self.runs is None:
            return {}
        ids = [self.ids[start : start + ID_LENGTH] for start in range(0, len(self.ids), ID_LENGTH)]
        sequences = chain.from_iterable(range(start, start + count) for _, start, count in self.runs)
        return dict(zip(ids, islice(sequences, len(ids)), strict=False))

    @property
    def names_all_jobs(self) -> bool:
        """Whether it has the id of each job that it knows to be stored."""
        return len(self.recorded_jobs()) >= (self.published or 0)

    def covering(self, sequences: Iterable[int]) -> PublishRecord:
        """Return the record with more jobs; zeros are left out."""
        known = [sequence for sequence in sequences if sequence]
        first = None if self.first_job is None else min([self.first_job, *known])
        last = None if self.last_job is None else max([self.last_job, *known])
        return self.model_copy(update={"first_job": first, "last_job": last})


def new_record(
    queue: str, info: Mapping[str, Any], origin: Origin, cursor: Mapping[str, Any] | None = None
) -> PublishRecord:
    """Return the record of a task that begins to publish.

    :param queue: the work queue's name
    :param info: its STREAM.INFO, read before anything is published
    :param cursor: where the ends of the task's jobs will be found
    """
    first = info["state"]["last_seq"] + 1
    return PublishRecord(
        stream=queue,
        created=info["created"],
        **_names(origin),
        began_at=datetime.now(UTC),
        queue_from=first,
        first_job=first,
        last_job=first - 1,
        cursor=dict(cursor or {}),
    )


def named_record(record: PublishRecord, origin: Origin) -> PublishRecord:
    """Return a record of an earlier version with the names of its task."""
    return record.model_copy(update=_names(origin))


def _names(origin: Origin) -> dict[str, Any]:
    return {
        "dag_id": origin.dag_id,
        "run_id": origin.run_id,
        "task_id": origin.task_id,
        "map_index": origin.map_index,
    }


def following_record(record: PublishRecord, earlier: PublishRecord, *, number: int) -> PublishRecord:
    """Return a new record as the one after an earlier one, whose jobs it covers too.

    :param number: the number of its round, where the queue is still the same
    """
    same_stream = earlier.created == record.created
    # Sequences of an earlier stream of this name don't bound those of this one.
    last = record.last_job if same_stream and earlier.last_job is not None else None
    first = earlier.queue_from if earlier.first_job is None else earlier.first_job
    following = {"first_job": min(first, record.queue_from), "last_job": last, "scheduled": earlier.scheduled}
    return record.model_copy(update=following | {"round": number if same_stream else 0})


def published_record(record: PublishRecord, report: PublishReport) -> PublishRecord:
    """Return a record with the jobs that a call has published."""
    covering = record.covering(report.sequences)
    return covering.model_copy(update={"scheduled": True}) if report.scheduled else covering


def identified_record(record: PublishRecord, report: PublishReport, *, max_ids: int, max_runs: int) -> PublishRecord:
    """Return the record of a task with an idempotency key with the ids of the jobs that a call has published.

    Runs of a list in another order, or of a longer list, are to find their jobs in it.

    :param max_ids: how many jobs it may name
    :param max_runs: how many runs of jobs it may have
    """
    published = zip(report.message_ids, report.sequences, strict=False)
    jobs = record.recorded_jobs() | {message_id[:ID_LENGTH]: sequence for message_id, sequence in published if sequence}
    named = dict(list(jobs.items())[:max_ids])
    runs = index_runs(named.values())
    known = {"ids": "".join(named), "runs": runs} if len(runs) <= max_runs else {"ids": None, "runs": None}
    return record.model_copy(update=known | {"published": max(len(jobs), record.published or 0)})


def parse_publish_record(data: bytes) -> PublishRecord | None:
    """Parse a stored record; ``None`` where it is none."""
    try:
        return PublishRecord.model_validate_json(data)
    except ValidationError:
        return None
