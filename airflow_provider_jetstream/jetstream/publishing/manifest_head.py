"""The head of a manifest, as it is stored: which task published, from where on, and the last of its jobs."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias
from uuid import uuid4

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from airflow_provider_jetstream.jetstream.origin import Origin, TaskTry

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from airflow_provider_jetstream.jetstream.publishing.report import PublishReport

_Count: TypeAlias = Annotated[int, Field(ge=0, lt=2**64)]


class ManifestHead(BaseModel):
    """What one task has published; by its key, the task's jobs and dead letters name it.

    :param stream: the work queue
    :param created: when its stream was created, in the server's own text
    :param dag_id: the task's DAG
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
    :param operation: the call of the task that published them, where it has several
    :param rows: the last of its jobs in base64
    :param pages: the sequences in the events stream of the pages with the jobs before those
    :param unrecorded_from: the first sequence of the queue that may have a job which isn't in the manifest; ``None``
        where all of them are
    :param begun_by: the try that began last; only this one knows when all of its jobs are in the manifest
    :param published: how many jobs it stored, where known; stays when the record is closed
    :param max_tries: Airflow's number of the task's tries when it began, which a clear raises
    :param attempt: what Airflow told the try that began last
    :param run: what stands for the run in the message ids besides its name
    :param is_further_run: whether another run of the same name has the manifest of that name
    :param further_runs: what :attr:`run` is in the manifests of other runs of the same name, the latest last
    :param salts: what the message ids of jobs are made of besides, whose own ids somebody else had taken, the latest
        last
    :param over: whether waiting is over for good although jobs may still run
    :param closed: whether the task has nothing more to do
    """

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)

    type: Literal["io.airflow.jetstream.v1.published"] = "io.airflow.jetstream.v1.published"
    stream: str
    created: str
    dag_id: str
    run_id: str
    task_id: str
    map_index: int = -1
    round: _Count = 0
    began_at: AwareDatetime
    queue_from: _Count
    first_job: _Count
    last_job: _Count | None = None
    scheduled: bool = False
    cursor: dict[str, Any] = Field(default_factory=dict, validation_alias="mark", serialization_alias="mark")
    runs: list[tuple[_Count, _Count, _Count]] | None = None
    idempotency_key: str | None = None
    operation: str | None = None
    rows: str
    pages: list[_Count] = Field(default_factory=list)
    unrecorded_from: _Count | None = None
    begun_by: str = ""
    published: _Count | None = None
    max_tries: int | None = None
    attempt: TaskTry | None = None
    run: str | None = None
    is_further_run: bool = False
    further_runs: list[str] = Field(default_factory=list)
    salts: list[str] = Field(default_factory=list)
    over: bool = False
    closed: bool = False

    @property
    def origin(self) -> Origin:
        """The task."""
        return Origin(self.dag_id, self.run_id, self.task_id, self.map_index)

    @property
    def manifest_origin(self) -> Origin:
        """The task with what its manifest's key is made of besides."""
        return replace(
            self.origin,
            idempotency_key=self.idempotency_key,
            operation=self.operation,
            run=self.run,
            is_further_run=self.is_further_run,
        )

    @property
    def shares_task_key(self) -> bool:
        """Whether jobs of other manifests have the key of its task, too."""
        return self.operation is not None or self.is_further_run or bool(self.further_runs)

    def is_about(self, queue: str, key: str) -> bool:
        """Return whether it may be the record under a task's key."""
        return self.stream == queue and self.manifest_origin.manifest_key == key

    def position(self, name: str) -> int | None:
        """Return a position of its cursor, such as ``events_from``; ``None`` where it has none."""
        value = self.cursor.get(name)
        return value if isinstance(value, int) and value > 0 else None

    def may_name_any(self, sequences: Sequence[int]) -> bool:
        """Return whether one of the jobs of these sequences may be the task's.

        :param sequences: in ascending order
        """
        position = bisect_left(sequences, self.first_job)
        last = self.last_job if self.closed else None
        return position < len(sequences) and (last is None or sequences[position] <= last)

    def covering(self, sequences: Sequence[int]) -> ManifestHead:
        """Return the record with more jobs; zeros are left out."""
        lowest = min(filter(None, sequences), default=None)
        if lowest is None:
            return self
        highest = max(sequences)
        last = None if self.last_job is None else max(self.last_job, highest)
        return self.model_copy(update={"first_job": min(self.first_job, lowest), "last_job": last})


def new_head(
    queue: str, info: Mapping[str, Any], origin: Origin, cursor: Mapping[str, Any] | None = None
) -> ManifestHead:
    """Return the record of a task that begins to publish.

    :param queue: the work queue's name
    :param info: its STREAM.INFO, read before anything is published
    :param cursor: where the ends of the task's jobs will be found
    """
    first = info["state"]["last_seq"] + 1
    return ManifestHead(
        stream=queue,
        created=info["created"],
        dag_id=origin.dag_id,
        run_id=origin.run_id,
        task_id=origin.task_id,
        map_index=origin.map_index,
        began_at=datetime.now(UTC),
        queue_from=first,
        first_job=first,
        last_job=first - 1,
        cursor=dict(cursor or {}),
        rows="",
        unrecorded_from=first,
        begun_by=uuid4().hex[:8],
        max_tries=origin.max_tries,
        attempt=origin.attempt,
        run=origin.run_mark,
        is_further_run=origin.is_further_run,
    )


def resumed_head(earlier: ManifestHead, record: ManifestHead) -> ManifestHead | None:
    """Return the head of an earlier try for one that goes on with its jobs; ``None`` where it can stay as it is.

    :param record: the head that a first try would store
    """
    changed: dict[str, Any] = {
        "closed": False,
        "over": False,
        "max_tries": record.max_tries,
        "begun_by": record.begun_by,
    }
    if record.attempt:
        changed["attempt"] = record.attempt
    if earlier.unrecorded_from is None:
        changed["unrecorded_from"] = record.queue_from
    resumed = earlier.model_copy(update=changed)
    return None if resumed == earlier else resumed


def following_head(record: ManifestHead, earlier: ManifestHead, *, number: int) -> ManifestHead:
    """Return a new record as the one after an earlier one, whose jobs it covers too.

    :param number: the number of its round, where the queue is still the same
    """
    same_stream = earlier.created == record.created
    # Sequences of an earlier stream of this name don't bound those of this one.
    last = record.last_job if same_stream and earlier.last_job is not None else None
    following = {
        "first_job": min(earlier.first_job, record.queue_from),
        "last_job": last,
        "scheduled": earlier.scheduled,
    }
    same_runs = {"run": earlier.run, "further_runs": earlier.further_runs} if same_stream else {}
    return record.model_copy(update={**following, **same_runs, "round": number if same_stream else 0})


def published_head(record: ManifestHead, report: PublishReport) -> ManifestHead:
    """Return a record with the jobs that a call has published."""
    covering = record.covering(report.queue_sequences())
    return covering.model_copy(update={"scheduled": True}) if report.scheduled else covering


def parse_manifest_head(data: bytes) -> ManifestHead | None:
    """Parse a stored record; ``None`` where it is none."""
    try:
        return ManifestHead.model_validate_json(data)
    except ValidationError:
        return None
