"""Models of connections and queues: their numbers, now and over the last hour."""

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from airflow_provider_jetstream.jetstream.client.wire_text import readable_text


class MonitorModel(BaseModel):
    """Base of the page's models: immutable, without unknown fields, and with text that JSON can hold."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _make_readable(cls, values: Any) -> Any:
        return _readable(values)


def _readable(value: Any) -> Any:
    # Text of the wire may stand for any bytes: in subjects, headers, names, and what is made of them.
    if isinstance(value, str):
        return readable_text(value)
    if isinstance(value, dict):
        return {_readable(name): _readable(item) for name, item in value.items()}
    return type(value)(map(_readable, value)) if type(value) in (list, tuple) else value


class Problem(MonitorModel):
    """An error.

    :param code: stays the same between releases
    :param message: what was expected, what was found, and what to do
    """

    code: str
    message: str


class Limit(MonitorModel):
    """A limit of a stream, and how much of it is used.

    :param name: JetStream's name of it
    :param share: the used share, 1.0 for all of it
    """

    name: Literal["max_msgs", "max_bytes", "max_age"]
    used: float
    limit: float
    share: float


class LetterCounts(MonitorModel):
    """The counts of the last scan of a queue's dead letters.

    :param certain: proved dead letters in circulation
    :param uncertain: jobs that may be dead but aren't proved yet
    :param parked: taken out of circulation
    :param lost: dead letters whose body wasn't preserved, so that they can't be redriven
    :param scanned_at: when the scan ended
    :param scan_seconds: how long the scan took
    """

    certain: int
    uncertain: int
    parked: int
    lost: int = 0
    scanned_at: datetime
    scan_seconds: float


class ConsumerNumbers(MonitorModel):
    """The numbers of a consumer.

    :param filters: its filter subjects
    :param pending: jobs never delivered
    :param in_flight: delivered and not ended
    :param redelivered: of those, delivered more than once
    :param open_pulls: pull requests that wait for a job; 0 means that no worker waits now
    :param lag: how far the last delivered job is behind the last stored one, in stream sequences; 0 where nothing
        is pending
    :param paused: delivers nothing at present
    :param deliveries_per_second: between the last two polls
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
    """The numbers of a queue, as of the snapshot.

    :param connection: the Airflow connection's id
    :param queue: the stream's name
    :param declared: whether it has a dead letter queue, which dead letters can be redriven from
    :param pending: jobs never delivered
    :param in_flight: delivered and not ended
    :param redelivered: of those, delivered more than once
    :param dead_in_queue: stored jobs that will never be delivered again, by counting; exact while no job comes or
        goes. ``null`` where the queue has too many subjects to count
    :param undeliverable: stored jobs that match no consumer's filter; ``null`` likewise
    :param schedules: scheduled jobs; ``null`` likewise
    :param letters: the counts of the last scan; ``null`` until the first one has ended
    :param stored: messages in the stream
    :param bytes: their bytes
    :param oldest_seconds: age of the oldest message; ``null`` where there is none
    :param in_per_second: messages stored a second, between the last two polls; ``null`` after the first one
    :param out_per_second: messages gone a second, likewise
    :param consumers: the number of consumers
    :param open_pulls: of all consumers
    :param limits: limits that are set, nearest first
    :param state: ``idle`` no jobs, ``working`` jobs end, ``waiting`` jobs are pending or in flight and none ended
        between the last two polls, ``stuck`` jobs are pending, no worker pulls them and none is in flight
    :param problem: why the numbers are missing, if they are
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
    """An Airflow connection and the state of its server.

    :param connection: the connection's id
    :param state: ``up``, ``away`` where the server doesn't answer or refuses, ``starting`` before the first answer
    :param problem: why the server is away and what to do
    :param taken_at: the time of the last successful poll
    :param age_seconds: how long ago that was
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
    """All connections with their queues.

    :param connections: in the configured order
    :param refresh_seconds: after how many seconds to request the next one
    """

    connections: list[ConnectionState]
    refresh_seconds: float


class Point(MonitorModel):
    """A queue at one time of the last hour.

    :param pending: jobs never delivered
    :param in_flight: delivered and not ended
    :param dead: certain dead letters of the last scan before that time; without a scan, ``dead_in_queue``
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
    """The details of a queue.

    :param numbers: as in the snapshot
    :param state: of its connection
    :param problem: why the server is away
    :param age_seconds: the age of the numbers
    :param subjects: the stream's subjects
    :param retention: the stream's retention
    :param description: the stream's description
    :param dead_letter_queue: the stream that captures its dead letters
    :param events: the stream that stores the ends of its jobs
    :param archive: the stream that stores copies of its jobs
    :param audit: the stream that records redrives
    :param history: the last hour, oldest first
    :param risks: what could be lost in the queue's present state, a sentence each; of the last scan
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
