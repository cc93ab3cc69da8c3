"""Declarations of streams and consumers, of which a queue's declaration consists.

Field names and units are JetStream's own; durations and sizes may also be written as ``"30s"`` and ``"256MB"``. A field
that isn't declared gets the server's default when the stream is created, and keeps its value where the stream exists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from airflow_provider_jetstream.jetstream.contract import DEAD_LETTER_MARK, MOVER, PARTITIONS, due_subject
from airflow_provider_jetstream.jetstream.queue.consumer_checks import PriorityPolicy, consumer_problems
from airflow_provider_jetstream.jetstream.queue.partitions import partition_subject
from airflow_provider_jetstream.jetstream.queue.stream_declaration import Declaration, Duration, Stream, Text
from airflow_provider_jetstream.jetstream.units import NANOSECONDS

_DAY = 86_400 * NANOSECONDS
# How long a job is late at most whose mover was killed, and how many jobs movers hold while the queue is full.
_MOVER_ACK_WAIT, _MOVER_MAX_ACK_PENDING = 30 * NANOSECONDS, 1_000
# The fields of a consumer that JetStream has by the same name and in the same form.
_PLAIN_FIELDS = (
    *("description", "ack_wait", "max_ack_pending", "sample_freq", "metadata", "priority_policy"),
    *("inactive_threshold", "mem_storage"),
)


class Consumer(Declaration):
    """A durable pull consumer with explicit acknowledgement.

    :param name: its durable name
    :param description: text for people
    :param filter_subjects: the subjects of its jobs; also as ``filter_subject`` with one. Empty: all jobs of the queue
    :param max_deliver: deliveries after which a job is a dead letter; ``-1`` for endless retries, which only a queue
        without dead letters may have
    :param ack_wait: how long a worker may take without a progress report; the first ``backoff`` replaces it
    :param backoff: waits between deliveries
    :param max_ack_pending: the largest number of jobs in flight
    :param sample_freq: the share of acknowledgements that the server reports, such as ``"100%"``
    :param metadata: names and values for programs
    :param partitions: the number of consumers among which its jobs are divided, named after it with ``-0``, ``-1`` and
        so on; its filters have ``{partition}`` in place of one token
    :param partition: the number of this one; follows from ``partitions``
    :param inactive_threshold: after so long without a pull the server removes the consumer; none where absent or ``0``
    :param mem_storage: whether its state is in memory, so that a restart of its server removes it; fixed when created
    :param priority_groups: names of groups, of which each pull request has to name one; workers name the first
    :param priority_policy: how the server chooses among pull requests of a group; needs server 2.11, ``prioritized``
        needs 2.12
    """

    kind = "consumer"

    if TYPE_CHECKING:

        def __init__(self, **values: Any) -> None: ...

    name: Text
    description: Text | None = None
    filter_subjects: tuple[str, ...] = ()
    max_deliver: int | None = None
    ack_wait: Duration | None = None
    backoff: tuple[Duration, ...] = ()
    max_ack_pending: int | None = None
    sample_freq: str | None = None
    metadata: dict[Text, Text] | None = None
    partitions: int | None = Field(default=None, ge=1, le=1000)
    partition: int | None = None
    inactive_threshold: Duration | None = None
    mem_storage: bool | None = None
    priority_groups: tuple[str, ...] = ()
    priority_policy: PriorityPolicy | None = None

    @model_validator(mode="before")
    @classmethod
    def _accept_one_filter(cls, values: Any) -> Any:
        if isinstance(values, dict) and "filter_subject" in values:
            if "filter_subjects" in values:
                raise ValueError("expected filter_subject or filter_subjects, found both: keep one")
            values = {**values, "filter_subjects": (values["filter_subject"],)}
            del values["filter_subject"]
        return values

    def _problems(self) -> list[str]:
        return consumer_problems(self)

    def config(self) -> dict[str, Any]:
        """Return the consumer's configuration as JetStream's JSON: what is declared, and what a work queue needs."""
        config: dict[str, Any] = {
            "durable_name": self.name,
            "name": self.name,
            "ack_policy": "explicit",
            "deliver_policy": "all",
            "replay_policy": "instant",
            "max_deliver": self.max_deliver,
        }
        filters = self.filter_subjects
        if len(filters) == 1:
            config["filter_subject"] = filters[0]
        elif filters:
            config["filter_subjects"] = list(filters)
        if self.backoff:
            config["backoff"] = list(self.backoff)
        if self.priority_groups:
            config["priority_groups"] = list(self.priority_groups)
        for field in _PLAIN_FIELDS:
            if (value := getattr(self, field)) is not None:
                config[field] = value
        if self.partitions is not None:
            config["metadata"] = {**(self.metadata or {}), PARTITIONS: str(self.partitions)}
        return config

    @property
    def base_name(self) -> str:
        """The name under which a consumer with partitions was declared."""
        return self.name.removesuffix(f"-{self.partition}")

    def per_partition(self) -> tuple[Consumer, ...]:
        """Return a consumer for each of its partitions, or itself where it has none."""
        if self.partitions is None or self.partition is not None:
            return (self,)
        declared = {field: getattr(self, field) for field in self.model_fields_set}
        return tuple(
            Consumer(
                **declared
                | {
                    "name": f"{self.name}-{number}",
                    "filter_subjects": tuple(partition_subject(subject, number) for subject in self.filter_subjects),
                    "partition": number,
                }
            )
            for number in range(self.partitions)
        )


def _expand_partitions(consumers: tuple[Consumer, ...]) -> tuple[Consumer, ...]:
    return tuple(single for consumer in consumers for single in consumer.per_partition())


Consumers = Annotated[tuple[Consumer, ...], AfterValidator(_expand_partitions)]


class DeadLetterQueue(Stream):
    """The stream that captures the dead letters of a work queue.

    :param retention: ``limits`` unless the stream exists with another: a work-queue retention admits one consumer
    :param consumers: consumers to provision on it, for handlers other than this package's
    :param republish: where the server copies each entry to, so that what a handler has acknowledged is known; by
        default to the audit, if the retention removes acknowledged entries. ``None``: unchanged where it exists
    """

    kind = "dead letter queue"

    if TYPE_CHECKING:

        def __init__(self, **values: Any) -> None: ...

    retention: Literal["limits", "workqueue", "interest"] = "limits"
    consumers: Consumers = ()
    republish: dict[str, Any] | None = None
    allow_direct: bool | None = True
    metadata: dict[Text, Text] | None = Field(default_factory=lambda: {DEAD_LETTER_MARK: "true"})

    def _retention(self) -> str:
        return self.retention

    def config(self) -> dict[str, Any]:
        """Return what is declared of the stream's configuration, as JetStream's JSON."""
        config = super().config()
        if not self.metadata:
            config.pop("metadata", None)
        return config | ({"republish": self.republish} if self.republish else {})


class Events(Stream):
    """The stream that stores the ends of jobs, from which waiters read them.

    :param max_age: how long an end is stored; a waiter that comes later never learns of it. Records of the tasks that
        published jobs are stored for as long as anything names the task
    """

    kind = "events stream"

    if TYPE_CHECKING:

        def __init__(self, **values: Any) -> None: ...

    discard: Literal["old", "new"] | None = "old"
    max_age: Duration | None = 7 * _DAY
    allow_direct: bool | None = True

    def config(self) -> dict[str, Any]:
        """Return what is declared of the stream's configuration, as JetStream's JSON."""
        return super().config() | {"allow_msg_ttl": True}


# The limits that a new archive takes over from its queue where it declares none of its own.
ARCHIVE_LIMITS = ("max_msgs", "max_bytes", "max_age")


class Archive(Stream):
    """The stream in which the server stores a copy of each job, which outlives a terminated or deleted job.

    Where it declares no ``max_msgs``, ``max_bytes`` or ``max_age``, a new archive has those of its queue.

    :param max_age: how long a copy is stored
    :param duplicate_window: short: a job stored again after the queue forgot its id needs another copy
    """

    kind = "archive"

    if TYPE_CHECKING:

        def __init__(self, **values: Any) -> None: ...

    discard: Literal["old", "new"] | None = "old"
    max_age: Duration | None = 7 * _DAY
    duplicate_window: Duration | None = NANOSECONDS // 10
    allow_direct: bool | None = True

    def config(self) -> dict[str, Any]:
        """Return the stream's configuration as JetStream's JSON.

        A copy has its job's headers, and the archive acts on them: without the features that they use it would refuse
        the copy.
        """
        return super().config() | {"allow_msg_ttl": True, "allow_atomic": True}


class Audit(Stream):
    """The stream that records what was done to dead letters.

    An audit that refuses records when it is full keeps doing so: what it would drop instead may be the only evidence of
    what became of a job.

    :param max_age: how long a record is stored
    """

    kind = "audit stream"

    if TYPE_CHECKING:

        def __init__(self, **values: Any) -> None: ...

    max_age: Duration | None = 90 * _DAY
    allow_direct: bool | None = True


class Schedules(Stream):
    """The stream that stores schedules, and jobs that are due until a mover has stored them in their work queue.

    It is apart from the queue: a stream with schedules acts on ``Nats-Rollup`` too, with which any publisher could
    purge it. It has work-queue retention: what a mover has acknowledged is gone.
    """

    kind = "schedules stream"

    if TYPE_CHECKING:

        def __init__(self, **values: Any) -> None: ...

    allow_direct: bool | None = True

    def _retention(self) -> str:
        return "workqueue"

    def config(self) -> dict[str, Any]:
        """Return what is declared of the stream's configuration, as JetStream's JSON."""
        # The server sets it for schedules: each replaces the one before it on its subject.
        return super().config() | {"allow_msg_schedules": True, "allow_rollup_hdrs": True}


def mover_consumer(queue: str) -> Consumer:
    """Return the consumer by which movers take jobs that are due from a queue's stream of schedules."""
    return Consumer(
        name=MOVER,
        description="jobs that are due; jetstream-queue schedules run stores them in the queue",
        filter_subjects=(due_subject(queue, ">"),),
        max_deliver=-1,
        ack_wait=_MOVER_ACK_WAIT,
        max_ack_pending=_MOVER_MAX_ACK_PENDING,
    )
