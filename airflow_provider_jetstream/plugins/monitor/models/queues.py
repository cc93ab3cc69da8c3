"""Models of connections and queues: their numbers now, and their history."""

from datetime import datetime
from typing import Literal, TypeAlias

from pydantic import Field

from airflow_provider_jetstream.plugins.monitor.models.figure import UNKNOWN, Figure, MonitorModel


class Point(MonitorModel):
    """A queue at one time.

    A point whose numbers are all ``null`` says that nobody sampled the queue from there to the next point: no line.

    :param pending: jobs never delivered
    :param in_flight: delivered and not ended
    :param dead: certain dead letters of the last scan before that time; without a scan, ``dead_in_queue``
    :param in_per_second: stored a second, since the point before
    :param out_per_second: gone a second, likewise
    """

    at: datetime
    pending: int | None
    in_flight: int | None
    dead: int | None
    in_per_second: float | None
    out_per_second: float | None


class Deaths(MonitorModel):
    """How many jobs died in a time, by the times that the server stored: known for times without samples too.

    :param at: when it begins
    :param seconds: how long it is
    :param count: how many died
    """

    at: datetime
    seconds: float
    count: int


class History(MonitorModel):
    """The history of a queue.

    :param since: when it begins
    :param until: when it ends
    :param points: oldest first, at most 360
    :param deaths: oldest first, without times in which none died
    :param deaths_known_since: deaths before that time are left out, since their records are gone or weren't read;
        ``null`` where all are known
    :param stored: where the samples are stored: ``stream``, shared by all API workers, or ``memory`` of this one
    :param sampler: who samples, as it names itself; ``null`` where nobody does
    :param problem: why the samples aren't stored, if they aren't
    """

    since: datetime
    until: datetime
    points: list[Point] = Field(default_factory=list)
    deaths: list[Deaths] = Field(default_factory=list)
    deaths_known_since: datetime | None = None
    stored: Literal["stream", "memory"] = "memory"
    sampler: str | None = None
    problem: str | None = None


QueueStateName: TypeAlias = Literal[
    "no_consumer", "stuck", "unserved", "full", "dying", "paused", "waiting", "working", "dead", "idle", "unknown"
]


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


class StateFinding(MonitorModel):
    """A state of a part of a queue, and what shows it.

    :param state: see ``QueueNumbers.state``
    :param part: ``queue``, ``consumer`` or ``subject``
    :param name: of the queue, the consumer or the subject
    :param evidence: the numbers that show it, a sentence
    :param since: since when this is known to be so; ``null`` where it was seen just now for the first time
    :param pending: jobs that wait because of it
    """

    state: QueueStateName
    part: Literal["queue", "consumer", "subject"]
    name: str
    evidence: str
    since: datetime | None = None
    pending: int = 0


class ConsumerNumbers(MonitorModel):
    """The numbers of a consumer.

    :param filters: its filter subjects
    :param state: as of a queue
    :param evidence: the numbers that show the state, a sentence
    :param since: since when it is in this state, as far as that is known
    :param partition: its number among the consumers that divide the jobs, where they do
    :param partitions: the number of these consumers
    :param paused_until: until when it is paused
    :param max_in_flight: the limit of jobs in flight; ``null`` where there is none
    :param ack_wait_seconds: after which a delivery counts as failed
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
    pending: Figure
    in_flight: Figure
    redelivered: Figure
    open_pulls: Figure
    lag: Figure
    paused: bool
    deliveries_per_second: Figure
    state: QueueStateName = "unknown"
    evidence: str = ""
    since: datetime | None = None
    partition: int | None = None
    partitions: int | None = None
    paused_until: datetime | None = None
    max_in_flight: int | None = None
    ack_wait_seconds: float | None = None


class NewestCause(MonitorModel):
    """What the newest dead letter of a queue died of, and whose it is.

    :param reason: why it died
    :param error_class: the error's type
    :param error_place: the code location where the handler failed
    :param dag_id: the DAG that published its job; ``null`` where none did, or where that isn't known
    :param team: the DAG's team, where Airflow has teams
    """

    reason: str
    error_class: str | None
    error_place: str | None
    dag_id: str | None
    team: str | None = None
    died_at: datetime


class QueueNumbers(MonitorModel):
    """The numbers of a queue, as of the snapshot.

    :param connection: the Airflow connection's id
    :param queue: the stream's name
    :param declared: whether it has a dead letter queue, which dead letters can be redriven from
    :param pending: jobs never delivered
    :param in_flight: delivered and not ended
    :param redelivered: of those, delivered more than once
    :param dead: proved dead letters in circulation, of the last scan. Before the first one, and in a queue without a
        dead letter queue, the stored jobs that will never be delivered again, by counting
    :param uncertain: jobs that may be dead but aren't proved yet
    :param parked: dead letters that were taken out of circulation
    :param lost: dead letters whose body wasn't preserved, so that they can't be redriven
    :param deaths_per_minute: of the last five minutes' dead letters
    :param deaths_of_hour: how many of the dead letters died in each five minutes of the last hour, oldest first; empty
        where none did
    :param newest: what the newest dead letter died of, of those whose DAG the user may see; only in a snapshot
    :param undeliverable: stored jobs that match no consumer's filter; ``null`` likewise
    :param schedules: scheduled jobs; ``null`` likewise
    :param stored: messages in the stream
    :param bytes: their bytes
    :param oldest_seconds: age of the oldest message; ``null`` where there is none
    :param in_per_second: messages stored a second, between the last two polls; unknown after the first one
    :param out_per_second: messages gone a second, likewise
    :param consumers: the number of consumers
    :param open_pulls: of all consumers
    :param limits: limits that are set, nearest first
    :param state: the most urgent of its findings, in this order: ``no_consumer`` jobs are stored, there is no consumer;
        ``stuck`` jobs are pending, and nobody pulls or none ends; ``unserved`` some jobs have no consumer, or their
        consumer has no worker while others have; ``full`` the stream takes no more jobs; ``dying`` jobs died in the
        last minutes; ``paused``; ``waiting`` jobs are pending or in flight, and none has ended yet; ``working`` jobs
        end; ``dead`` no jobs but dead letters; ``idle`` no jobs; ``unknown``
    :param findings: what shows the state, most urgent first; without those that are idle or working
    :param problem: why the numbers are missing, if they are
    :param pending_history: pending jobs over the last hour, oldest first, at most 60 points for a sparkline; ``null``
        for a time without samples
    """

    connection: str
    queue: str
    declared: bool
    pending: Figure = UNKNOWN
    in_flight: Figure = UNKNOWN
    redelivered: Figure = UNKNOWN
    dead: Figure = UNKNOWN
    uncertain: Figure = UNKNOWN
    parked: Figure = UNKNOWN
    lost: Figure = UNKNOWN
    deaths_per_minute: Figure = UNKNOWN
    deaths_of_hour: list[int] = Field(default_factory=list)
    newest: NewestCause | None = None
    undeliverable: Figure = UNKNOWN
    schedules: Figure = UNKNOWN
    stored: Figure = UNKNOWN
    bytes: Figure = UNKNOWN
    oldest_seconds: Figure = UNKNOWN
    in_per_second: Figure = UNKNOWN
    out_per_second: Figure = UNKNOWN
    consumers: Figure = UNKNOWN
    open_pulls: Figure = UNKNOWN
    limits: list[Limit] = Field(default_factory=list)
    state: QueueStateName = "unknown"
    findings: list[StateFinding] = Field(default_factory=list)
    problem: Problem | None = None
    pending_history: list[int | None] = Field(default_factory=list)


ServerState: TypeAlias = Literal["up", "away", "refused", "starting"]


class ConnectionState(MonitorModel):
    """An Airflow connection and the state of its server.

    :param connection: the connection's id
    :param state: ``up``; ``starting`` before the first answer; ``away`` where the server doesn't answer, which goes on
        by itself once it does; ``refused`` where the server refuses this user, its credentials or its encryption, or
        the Airflow connection can't be used: that needs a person
    :param problem: why it is ``away`` or ``refused``, and what to do
    :param taken_at: the time of the last successful poll
    :param age_seconds: how long ago that was
    :param server: the server's version
    :param queues: its queues by name; the last known ones while it is away
    """

    connection: str
    state: ServerState
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


class Account(MonitorModel):
    """The account of a queue's jobs that was made last.

    :param at: as of when; ``null`` where none was made, so that the other fields say nothing
    :param age_seconds: how long ago that was
    :param jobs: how many jobs the queue has ever stored
    :param stored: how many of them are stored
    :param ended: how many are gone with evidence of their end
    :param unaccounted: how many are gone without
    :param sequences: those, as text of ranges
    :param unknown: of how many that are gone the end isn't known
    :param unknown_share: which share of the jobs that are gone this is
    :param why_unknown: why it isn't known, a clause each
    """

    at: datetime | None = None
    age_seconds: float = 0.0
    jobs: int = 0
    stored: int = 0
    ended: int = 0
    unaccounted: int = 0
    sequences: str = ""
    unknown: int = 0
    unknown_share: float = 0.0
    why_unknown: list[str] = Field(default_factory=list)


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
    :param history: the last hour, oldest first; a gap is a point whose numbers are all ``null``
    :param deaths: how many jobs died, over the last hour
    :param max_pause_seconds: the longest pause of a consumer that the page sets; 0 where the server has no pauses
    :param risks: what could be lost in the queue's present state, a sentence each; of the last scan
    """

    numbers: QueueNumbers
    state: ServerState
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
    deaths: list[Deaths] = Field(default_factory=list)
    max_pause_seconds: float = 0.0
    risks: list[str] = Field(default_factory=list)
