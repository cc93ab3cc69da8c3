"""Queues as numbers, now and over the last hour."""

from datetime import datetime
from typing import Literal

from pydantic import Field

from airflow_provider_jetstream.plugins.monitor.models.base import MonitorModel, Problem


class Limit(MonitorModel):
    """A limit of a stream, and how near it is.

    :param name: JetStream's name of it
    :param used: what is used
    :param limit: how much may be
    :param share: the used share, 1.0 for all of it
    """

    name: Literal["max_msgs", "max_bytes", "max_age"]
    used: float
    limit: float
    share: float


class LetterCounts(MonitorModel):
    """What the last scan of a queue's dead letters found.

    :param certain: dead beyond doubt and in circulation
    :param uncertain: may be dead; it can't be told yet
    :param parked: taken out of circulation
    :param lost: jobs that died and whose body nobody kept, so that they can't be brought back
    :param scanned_at: when the scan ended
    :param scan_seconds: how long it took
    """

    certain: int
    uncertain: int
    parked: int
    lost: int = 0
    scanned_at: datetime
    scan_seconds: float


class ConsumerNumbers(MonitorModel):
    """A consumer as numbers.

    :param name: its name
    :param filters: the subjects it takes
    :param pending: jobs never delivered
    :param in_flight: delivered and not ended
    :param redelivered: of those, delivered more than once
    :param open_pulls: requests of workers that wait for a job; 0 means that nobody waits just now
    :param lag: how far the last delivered job is behind the last stored one, in stream sequences; 0 where nothing
        is pending
    :param paused: delivers nothing for now
    :param deliveries_per_second: between the last two looks
    """

    name: str
    filters: list[str]
    pending: int
    in_flight: int
    redelivered: int
    open_pulls: int
    lag: int
    paused: bool
    deliveries_per_second: float | None


class QueueNumbers(MonitorModel):
    """A queue as numbers, as of the snapshot.

    :param connection: the Airflow connection's id
    :param queue: the stream's name
    :param declared: whether it has a dead letter queue, so that deaths are kept and can be redriven
    :param pending: jobs never delivered
    :param in_flight: delivered and not ended
    :param redelivered: of those, delivered more than once
    :param dead_in_queue: stored jobs that will never be delivered again, by counting; exact while nothing moves.
        ``null`` where the queue has more subjects than are counted for a glance
    :param undeliverable: stored jobs that no consumer takes; ``null`` likewise
    :param schedules: jobs for later; ``null`` likewise
    :param letters: what the last scan found; ``null`` until the first one is done
    :param stored: messages in the stream
    :param bytes: their bytes
    :param oldest_seconds: age of the oldest message; ``null`` where there is none
    :param in_per_second: messages stored a second, between the last two looks; ``null`` at the first one
    :param out_per_second: messages gone a second, likewise
    :param consumers: the number of consumers
    :param open_pulls: of all consumers
    :param limits: limits that are set, nearest first
    :param state: ``idle`` nothing to do, ``working`` jobs end, ``waiting`` jobs are pending or in flight and none
        ended between the last two looks, ``stuck`` jobs are pending and no worker asks for them and none is in flight
    :param problem: why the numbers are missing, where they are
    :param pending_history: pending jobs over the last hour, oldest first, at most 60 points for a sparkline
    """

    connection: str
    queue: str
    declared: bool
    pending: int = 0
    in_flight: int = 0
    redelivered: int = 0
    dead_in_queue: int | None = None
    undeliverable: int | None = None
    schedules: int | None = None
    letters: LetterCounts | None = None
    stored: int = 0
    bytes: int = 0
    oldest_seconds: float | None = None
    in_per_second: float | None = None
    out_per_second: float | None = None
    consumers: int = 0
    open_pulls: int = 0
    limits: list[Limit] = Field(default_factory=list)
    state: Literal["idle", "working", "waiting", "stuck", "unknown"] = "unknown"
    problem: Problem | None = None
    pending_history: list[int] = Field(default_factory=list)


class ConnectionState(MonitorModel):
    """An Airflow connection, and whether its server answers.

    :param connection: its id
    :param state: ``up``, ``away`` where the server doesn't answer or refuses, ``starting`` before the first answer
    :param problem: why it is away and what to do
    :param taken_at: when the shown numbers were seen; older than the refresh where the server is away
    :param age_seconds: how old they are now
    :param server: the server's version
    :param queues: its queues by name; the last known ones while it is away
    """

    connection: str
    state: Literal["up", "away", "starting"]
    problem: Problem | None = None
    taken_at: datetime | None = None
    age_seconds: float | None = None
    server: str | None = None
    queues: list[QueueNumbers] = Field(default_factory=list)


class Snapshot(MonitorModel):
    """All that is shown of all servers.

    :param connections: the connections, in the configured order
    :param refresh_seconds: when to ask again
    """

    connections: list[ConnectionState]
    refresh_seconds: float


class Point(MonitorModel):
    """A queue at one moment of the last hour.

    :param at: the moment
    :param pending: jobs never delivered
    :param in_flight: delivered and not ended
    :param dead: certain dead letters, of the last scan before it; else those counted in the queue
    :param in_per_second: stored a second
    :param out_per_second: gone a second
    """

    at: datetime
    pending: int
    in_flight: int
    dead: int | None
    in_per_second: float | None
    out_per_second: float | None


class QueueDetail(MonitorModel):
    """One queue.

    :param numbers: as in the snapshot
    :param state: whether its server answers
    :param problem: why it doesn't
    :param age_seconds: how old the numbers are
    :param subjects: the stream's subjects
    :param retention: the stream's retention
    :param description: the stream's description
    :param dead_letter_queue: the stream that keeps its deaths
    :param events: the stream that keeps the ends of its jobs
    :param archive: the stream that keeps copies of its jobs
    :param audit: the stream that records redrives
    :param consumers: its consumers
    :param history: the last hour, oldest first
    :param risks: what could be lost as things are, a sentence each; of the last scan
    """

    numbers: QueueNumbers
    state: Literal["up", "away", "starting"]
    problem: Problem | None = None
    age_seconds: float | None = None
    subjects: list[str] = Field(default_factory=list)
    retention: str = "workqueue"
    description: str | None = None
    dead_letter_queue: str | None = None
    events: str | None = None
    archive: str | None = None
    audit: str | None = None
    consumers: list[ConsumerNumbers] = Field(default_factory=list)
    history: list[Point] = Field(default_factory=list)
    risks: list[str] = Field(default_factory=list)
