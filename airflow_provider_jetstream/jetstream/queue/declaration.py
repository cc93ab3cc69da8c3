"""The parts of which a queue's declaration consists: streams and consumers.

Field names and units are JetStream's own; durations and sizes may also be written as ``"30s"`` and ``"256MB"``. A field
that isn't declared keeps the server's default when the stream is created and whatever it has when it exists.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from airflow_provider_jetstream.jetstream.contract import DEAD_LETTER_MARK, PARTITIONS
from airflow_provider_jetstream.jetstream.errors import QueueDeclarationError
from airflow_provider_jetstream.jetstream.queue.consumer_checks import consumer_problems
from airflow_provider_jetstream.jetstream.queue.partitions import partition_subject
from airflow_provider_jetstream.jetstream.queue.priority_groups import PriorityPolicy
from airflow_provider_jetstream.jetstream.units import NANOSECONDS, parse_duration, parse_size

# Before the models, which pydantic builds in full only where these names are already known.
Duration = Annotated[int, BeforeValidator(parse_duration)]
Size = Annotated[int, BeforeValidator(parse_size)]

_DAY = 86_400 * NANOSECONDS


class Declaration(BaseModel):
    """What every part has in common: it can't be changed, knows all its fields, and tells all that is wrong at once.

    :raises QueueDeclarationError: if the server would refuse it, or jobs would be lost
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: ClassVar[str] = "work queue"

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise QueueDeclarationError(str(values.get("name", "?")), _told(error), self.kind) from None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if problems := self._problems():
            raise ValueError("\n".join(problems))
        return self

    def _problems(self) -> list[str]:
        return []


class Consumer(Declaration):
    """A durable pull consumer with explicit acknowledgement.

    :param name: its durable name
    :param filter_subjects: the jobs it takes; also as ``filter_subject`` with one. Empty: all jobs of the queue
    :param max_deliver: deliveries after which a job is a dead letter; ``-1`` for endless retries, which only a queue
        without dead letters may have
    :param ack_wait: how long a worker may stay silent; the server takes the first ``backoff`` where there is one
    :param backoff: waits between deliveries
    :param max_ack_pending: jobs in flight at a time
    :param sample_freq: share of acknowledgements the server reports, such as ``"100%"``
    :param description: for people
    :param metadata: for tools
    :param partitions: among how many consumers its jobs are divided, named after it with ``-0``, ``-1`` and so on; its
        filters have ``{partition}`` in place of one token
    :param partition: which of them it is; follows from ``partitions``
    :param priority_groups: names of which each pull request has to give one; workers give the first
    :param priority_policy: whom the server prefers among those who ask; takes server 2.11, ``prioritized`` takes 2.12
    """

    kind = "consumer"

    name: str
    description: str | None = None
    filter_subjects: tuple[str, ...] = ()
    max_deliver: int | None = None
    ack_wait: Duration | None = None
    backoff: tuple[Duration, ...] = ()
    max_ack_pending: int | None = None
    sample_freq: str | None = None
    metadata: dict[str, str] | None = None
    partitions: int | None = Field(default=None, ge=1, le=1000)
    partition: int | None = None
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

    def config(self, default_filters: tuple[str, ...] = ()) -> dict[str, Any]:
        """Give the consumer's configuration as JetStream's JSON.

        :param unfiltered: the filters of a consumer that declares none; none where empty
        :return: only what is declared or what a work queue can't do without
        """
        config: dict[str, Any] = {
            "durable_name": self.name,
            "name": self.name,
            "ack_policy": "explicit",
            "deliver_policy": "all",
            "replay_policy": "instant",
            "max_deliver": self.max_deliver,
        }
        filters = self.filter_subjects or default_filters
        if len(filters) == 1:
            config["filter_subject"] = filters[0]
        elif filters:
            config["filter_subjects"] = list(filters)
        if self.backoff:
            config["backoff"] = list(self.backoff)
        if self.priority_groups:
            config["priority_groups"] = list(self.priority_groups)
        for field in ("description", "ack_wait", "max_ack_pending", "sample_freq", "metadata", "priority_policy"):
            if (value := getattr(self, field)) is not None:
                config[field] = value
        if self.partitions is not None:
            config["metadata"] = {**(self.metadata or {}), PARTITIONS: str(self.partitions)}
        return config

    def per_partition(self) -> tuple[Consumer, ...]:
        """Give the consumers that it stands for.

        :return: one for each of its partitions, or itself
        """
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


def _all_divided(consumers: tuple[Consumer, ...]) -> tuple[Consumer, ...]:
    return tuple(each for consumer in consumers for each in consumer.per_partition())


Consumers = Annotated[tuple[Consumer, ...], AfterValidator(_all_divided)]


class Stream(Declaration):
    """What every stream of a queue may declare; see JetStream's stream configuration for each field."""

    name: str
    subjects: tuple[str, ...] = ()
    description: str | None = None
    storage: Literal["file", "memory"] = "file"
    num_replicas: int = Field(default=1, ge=1, le=5)
    discard: Literal["old", "new"] | None = None
    max_msgs: int | None = Field(default=None, ge=-1)
    max_msgs_per_subject: int | None = Field(default=None, ge=-1)
    max_bytes: Size | None = None
    max_msg_size: Size | None = None
    max_age: Duration | None = None
    duplicate_window: Duration | None = None
    deny_delete: bool | None = None
    deny_purge: bool | None = None
    allow_direct: bool | None = None
    allow_rollup_hdrs: bool | None = None
    metadata: dict[str, str] | None = None

    def captured_subjects(self) -> tuple[str, ...]:
        """Give the subjects that the stream has on the server.

        :return: those that are declared, and what its features add
        """
        return self.subjects

    def config(self) -> dict[str, Any]:
        """Give the stream's configuration as JetStream's JSON.

        :return: only what is declared
        """
        declared = {field: getattr(self, field) for field in Stream.model_fields}
        config = {field: value for field, value in declared.items() if value is not None}
        # The server counts a missing age as none but answers with 0, where people write -1.
        if config.get("max_age") == -1:
            config["max_age"] = 0
        return config | {"subjects": list(self.captured_subjects()), "retention": self._retention()}

    def _retention(self) -> str:
        return "limits"


class DeadLetterQueue(Stream):
    """The stream that keeps the dead letters of a work queue.

    :param retention: ``limits`` unless the stream exists otherwise: a work-queue retention lets one consumer read it
    :param consumers: consumers to provision on it, for processors other than this package's
    """

    kind = "dead letter queue"

    retention: Literal["limits", "workqueue", "interest"] = "limits"
    consumers: Consumers = ()
    allow_direct: bool | None = True
    metadata: dict[str, str] | None = Field(default_factory=lambda: {DEAD_LETTER_MARK: "true"})

    def _retention(self) -> str:
        return self.retention

    def config(self) -> dict[str, Any]:
        """Give the stream's configuration as JetStream's JSON.

        :return: only what is declared
        """
        config = super().config()
        if not self.metadata:
            config.pop("metadata", None)
        return config


class Events(Stream):
    """The stream that stores how jobs ended, for whoever waits for them.

    :param max_age: how long an end is kept; nobody can wait longer than that for a job already done
    """

    kind = "events stream"

    discard: Literal["old", "new"] | None = "old"
    max_age: Duration | None = 7 * _DAY
    allow_direct: bool | None = True


class Archive(Stream):
    """The stream in which the server stores a copy of each job, so that no death can destroy it.

    :param max_age: how long a copy is kept
    :param duplicate_window: short, since a job that is stored again after the queue forgot its id needs a copy again
    :param schedules: whether it takes the jobs that the server makes of schedules; follows from the queue's
    """

    kind = "archive"

    discard: Literal["old", "new"] | None = "old"
    max_age: Duration | None = 7 * _DAY
    duplicate_window: Duration | None = NANOSECONDS // 10
    allow_direct: bool | None = True
    schedules: bool = False

    def config(self) -> dict[str, Any]:
        """Give the stream's configuration as JetStream's JSON.

        :return: what is declared, and the features without which copies would be refused: a copy keeps its job's
            headers, and the archive obeys them
        """
        config = super().config() | {"allow_msg_ttl": True, "allow_atomic": True}
        # Schedules themselves it refuses even so, since their target isn't among its subjects.
        return config | {"allow_msg_schedules": True} if self.schedules else config


class Audit(Stream):
    """The stream that records what became of dead letters.

    :param max_age: how long a record is kept
    """

    kind = "audit stream"

    discard: Literal["old", "new"] | None = "old"
    max_age: Duration | None = 90 * _DAY
    allow_direct: bool | None = True


def _told(error: ValidationError) -> list[str]:
    found: list[str] = []
    for problem in error.errors(include_url=False):
        cause = problem.get("ctx", {}).get("error")
        place = ".".join(str(part) for part in problem["loc"])
        if isinstance(cause, QueueDeclarationError):
            texts = list(cause.problems)
        elif problem["type"] == "extra_forbidden":
            texts = ["no such field: check its spelling, it is JetStream's own name"]
        else:
            texts = problem["msg"].removeprefix("Value error, ").split("\n")
        found += [f"{place}: {text}" if place else text for text in texts]
    return found
