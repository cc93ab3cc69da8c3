"""Models of a user's permissions, of dry runs, and of a task's jobs."""

from datetime import datetime
from typing import Any, Literal, TypeAlias

from pydantic import Field

from airflow_provider_jetstream.plugins.monitor.models.base import MonitorModel
from airflow_provider_jetstream.plugins.monitor.models.figure import Figure
from airflow_provider_jetstream.plugins.monitor.models.queues import ConnectionState


class Me(MonitorModel):
    """The user's permissions, and the page's settings.

    :param may_act: whether Airflow lets the user trigger the DAG that redrives
    :param payloads: whether the user sees bodies and headers of jobs
    :param dag_id: the DAG that redrives
    :param refresh_seconds: the interval at which servers are polled
    :param connections: ids of the Airflow connections that are shown
    :param version: the package's
    :param user: the user's name, as the audit will say
    :param default_timezone: Airflow's ``[core] default_timezone``; all times of the API are in UTC
    """

    may_act: bool
    payloads: bool
    dag_id: str
    refresh_seconds: float
    connections: list[str]
    version: str
    user: str = ""
    default_timezone: str = "UTC"


Act: TypeAlias = Literal["redrive", "park", "in_place"]


class DryRunRequest(MonitorModel):
    """A request to count what an action would do.

    :param select: which letters, as in ``conf``; all in circulation where empty
    :param patch: a JSON Patch (RFC 6902) of the letters' bodies, as its JSON text; only with ``redrive``
    """

    select: dict[str, Any] = Field(default_factory=dict)
    action: Act = "redrive"
    patch: str | None = Field(default=None, max_length=65_536)


class PatchedLetter(MonitorModel):
    """What a patch changes in one letter.

    :param difference: of the body, in the unified form: JSON with a line for each value, the first forty lines
    """

    sequence: int
    job_id: str
    difference: str


class DryRun(MonitorModel):
    """What the action would do now; when it runs, it includes letters that have died by then.

    :param protocol: the redrive protocol
    :param guarantee: what the protocol guarantees
    :param redriven: how many letters would be redriven
    :param parked: how many would be parked
    :param failed: how many would stay where they are
    :param failures: sequence → why it would stay; the first 20
    :param causes: why letters would stay → how many; the 20 most frequent. Like ``failures`` empty where some of the
        letters may be of DAGs that the user may not see
    :param changed: how many of the redriven a patch would change
    :param samples: with a patch, the first five letters that it changes
    :param uncertain: jobs that may be dead but aren't proved yet
    :param undeliverable: jobs that match no consumer's filter
    :param risks: what could be lost in the queue's present state, a sentence each
    :param awaits_ends: whether the ends of redriven jobs are stored, so that a canary can be awaited
    :param conf: the DAG run's configuration for this action; ``why``, ``rate`` and ``dry_run`` may be added
    """

    protocol: str
    guarantee: str
    redriven: int
    parked: int
    failed: int
    failures: dict[str, str]
    causes: dict[str, int] = Field(default_factory=dict)
    changed: int = 0
    samples: list[PatchedLetter] = Field(default_factory=list)
    uncertain: int
    undeliverable: int
    risks: list[str]
    counted_at: datetime
    awaits_ends: bool
    conf: dict[str, Any]


class TaskQueue(MonitorModel):
    """The jobs of one task instance in one queue.

    :param connection: the Airflow connection's id
    :param map_index: -1 where the task isn't mapped
    :param published_at: when the task began to publish
    :param published: the number of published jobs on record
    :param ended: of those, how many have ended: unknown once the task is closed, since its jobs aren't recorded then
    :param stored: of those, how many are still in the queue; unknown likewise
    :param closed: whether the task has published all jobs and awaited those that it waits for
    :param letters: dead letters in circulation whose headers name the task
    :param parked: parked letters likewise
    :param select: the selection of those letters
    """

    connection: str
    queue: str
    task_id: str | None
    map_index: int | None
    published_at: datetime | None = None
    published: Figure
    ended: Figure
    stored: Figure
    closed: bool | None = None
    letters: Figure
    parked: Figure
    select: dict[str, Any] = Field(default_factory=dict)


class TaskJobs(MonitorModel):
    """The jobs of a DAG run or of one of its tasks.

    :param task_id: ``null`` for all tasks of the run
    :param map_index: the mapped instance; ``null`` for all of them
    :param queues: a line for each queue and task instance with a manifest or a dead letter
    :param connections: the states of the connections, without their queues
    :param scanning: queues whose dead letters haven't been scanned yet, as ``connection/queue``
    """

    dag_id: str
    run_id: str
    task_id: str | None
    map_index: int | None
    queues: list[TaskQueue]
    connections: list[ConnectionState]
    scanning: list[str]
