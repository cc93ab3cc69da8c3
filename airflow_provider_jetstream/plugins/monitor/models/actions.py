"""What a person may do, what would be done, and the jobs of a task."""

from datetime import datetime
from typing import Any, Literal, TypeAlias

from pydantic import Field

from airflow_provider_jetstream.plugins.monitor.models.base import MonitorModel
from airflow_provider_jetstream.plugins.monitor.models.queues import ConnectionState


class Me(MonitorModel):
    """What the one who asks may do, and what the page needs to know to begin with.

    :param may_act: whether Airflow lets them trigger the DAG that redrives
    :param payloads: whether they see bodies and headers of jobs
    :param dag_id: the DAG that redrives
    :param refresh_seconds: how often a look is taken at the servers while anybody asks
    :param connections: ids of the Airflow connections that are shown
    :param version: the package's
    """

    may_act: bool
    payloads: bool
    dag_id: str
    refresh_seconds: float
    connections: list[str]
    version: str


Act: TypeAlias = Literal["redrive", "park", "in_place"]


class DryRunRequest(MonitorModel):
    """What would be done, asked before it is.

    :param select: which letters, as in ``conf``; all in circulation where empty
    :param action: what with them
    """

    select: dict[str, Any] = Field(default_factory=dict)
    action: Act = "redrive"


class DryRun(MonitorModel):
    """What would be done now; a letter that dies meanwhile is done too.

    :param protocol: how letters would come back
    :param guarantee: what that protects from
    :param redriven: how many would come back
    :param parked: how many would be taken out of circulation
    :param failed: how many would stay where they are
    :param failures: sequence → why it would stay; the first 20
    :param uncertain: may be dead; it can't be told yet
    :param undeliverable: jobs that no consumer takes
    :param risks: what could be lost as things are, a sentence each
    :param counted_at: when it was counted
    :param conf: what to trigger the DAG with to do just this; ``why``, ``rate`` and ``dry_run`` may be added
    """

    protocol: str
    guarantee: str
    redriven: int
    parked: int
    failed: int
    failures: dict[str, str]
    uncertain: int
    undeliverable: int
    risks: list[str]
    counted_at: datetime
    conf: dict[str, Any]


class TaskQueue(MonitorModel):
    """What one Airflow task did with one queue.

    :param connection: the Airflow connection's id
    :param queue: the queue
    :param map_index: which of the task's instances, -1 where it isn't mapped
    :param task_id: which task
    :param published_at: when it began to publish
    :param published: jobs that it is known to have stored; ``null`` where that isn't recorded
    :param ended: of those, how many have ended; ``null`` likewise
    :param stored: of those, how many are still in the queue; ``null`` likewise
    :param closed: whether the task has nothing more to do
    :param letters: dead letters in circulation whose headers name the task
    :param parked: parked letters likewise
    :param select: the selection that means those letters
    """

    connection: str
    queue: str
    task_id: str | None
    map_index: int | None
    published_at: datetime | None = None
    published: int | None = None
    ended: int | None = None
    stored: int | None = None
    closed: bool | None = None
    letters: int = 0
    parked: int = 0
    select: dict[str, Any] = Field(default_factory=dict)


class TaskJobs(MonitorModel):
    """The jobs of a DAG run or of one of its tasks.

    :param dag_id: the DAG
    :param run_id: the run
    :param task_id: the task; ``null`` for all of the run's
    :param map_index: the mapped instance; ``null`` for all of them
    :param queues: a line for each queue and task instance that anything is known of
    :param connections: whether the servers answer, without their queues
    :param scanning: queues whose dead letters haven't been looked at yet, as ``connection/queue``
    """

    dag_id: str
    run_id: str
    task_id: str | None
    map_index: int | None
    queues: list[TaskQueue]
    connections: list[ConnectionState]
    scanning: list[str]
