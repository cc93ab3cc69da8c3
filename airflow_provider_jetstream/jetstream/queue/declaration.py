"""The consumers and streams that a queue declares: units, checks of values and names, and partitions.

A key always goes to the same partition, by a hash that publishers and servers share. Protocol: FNV-1a with 32 bits over
the key's UTF-8 bytes, modulo the number of partitions; nats-server's own subject mapping ``{{partition(N, …)}}``
computes the same.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.json_schema import WithJsonSchema

from airflow_provider_jetstream.jetstream.client.subjects import first_overlap, subject_problem
from airflow_provider_jetstream.jetstream.contract import DEAD_LETTER_MARK, MOVER, NO_CONSUMER, PARTITIONS, due_subject
from airflow_provider_jetstream.jetstream.errors import QueueDeclarationError
from airflow_provider_jetstream.jetstream.line_text import shown_field, shown_value
from airflow_provider_jetstream.jetstream.units import (
    DURATION_FORM,
    NANOSECONDS,
    SIZE_FORM,
    format_duration,
    parse_duration,
    parse_size,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


PLACEHOLDER = "{partition}"

_FNV_OFFSET = 0x811C9DC5
_FNV_PRIME = 0x01000193
_32_BITS = 0xFFFFFFFF
_NAME = re.compile(r"[^\s.*>/\\\x00-\x1f\x7f]{1,255}")
_GROUP = re.compile(r"[A-Za-z0-9/_=-]{1,16}")
_SAMPLE = re.compile(r"(\d{1,3})%?")
_MAX_PERCENT = 100
_MIN_WAIT = 1_000_000
# Fields of earlier declarations.
_REMOVED = {
    "atomic_redrive": (
        "no such field any more: leave it out, and declare an archive (the default beside dead_letters), with which a"
        " redrive by copy repeats no letter either"
    ),
}
_DAY = 86_400 * NANOSECONDS
# The fields of a consumer that JetStream has by the same name and in the same form.
_PLAIN_FIELDS = (
    *("description", "ack_wait", "max_ack_pending", "sample_freq", "metadata", "priority_policy"),
    *("inactive_threshold", "mem_storage"),
)
# The limits that a new archive takes over from its queue where it declares none of its own.
ARCHIVE_LIMITS = ("max_msgs", "max_bytes", "max_age")


def partition_of(key: str | bytes, count: int) -> int:
    """Return the partition of a key, from 0 to ``count - 1``.

    :param key: text is hashed as its UTF-8 bytes
    :param count: the number of partitions
    :raises ValueError: there are no partitions
    """
    if count < 1:
        raise ValueError(f"expected at least 1 partition, found {count}")
    digest = _FNV_OFFSET
    for byte in key.encode() if isinstance(key, str) else key:
        digest = ((digest ^ byte) * _FNV_PRIME) & _32_BITS
    return digest % count


def partition_subject(template: str, partition: int | str) -> str:
    """Return a subject or filter with a partition in place of :data:`PLACEHOLDER`."""
    return template.replace(PLACEHOLDER, str(partition))


def placeholder_problem(template: str) -> str | None:
    """Return what is wrong with the placeholder of a subject or filter; ``None`` where it is exactly one token."""
    if template.split(".").count(PLACEHOLDER) == 1 and template.count("{") == template.count("}") == 1:
        return None
    return f"expected {PLACEHOLDER} as one of its tokens, once"


# Protocol: NATS ADR-42.
PriorityPolicy: TypeAlias = Literal["overflow", "prioritized", "pinned_client"]


class ConsumerFields(Protocol):
    """The fields of a consumer's declaration that the checks read."""

    name: str
    filter_subjects: tuple[str, ...]
    max_deliver: int | None
    ack_wait: int | None
    backoff: tuple[int, ...]
    max_ack_pending: int | None
    sample_freq: str | None
    partitions: int | None
    partition: int | None
    inactive_threshold: int | None
    mem_storage: bool | None
    priority_groups: tuple[str, ...]
    priority_policy: PriorityPolicy | None


def consumer_problems(consumer: ConsumerFields) -> list[str]:
    """Return a sentence for each thing that makes a consumer unusable, whatever its queue."""
    problems = list(name_problems("consumer", consumer.name))
    problems += [
        f"filter subject {subject!r} of consumer {consumer.name}: {problem}"
        for subject in consumer.filter_subjects
        if (problem := subject_problem(subject))
    ]
    if pair := first_overlap(consumer.filter_subjects):
        problems.append(f"the filter subjects {pair[0]} and {pair[1]} of consumer {consumer.name} overlap: keep one")
    problems += _partition_problems(consumer)
    problems += _priority_problems(consumer)
    if consumer.max_deliver is None:
        problems.append(
            f"consumer {consumer.name} has no max_deliver, so the server would retry a poison job for ever and no job"
            " could become a dead letter: set it (5, say), or -1 where endless retries are wanted"
            " (docs/reference/server-fields.md#no-max-deliver)"
        )
    elif consumer.max_deliver < 1 and consumer.max_deliver != -1:
        problems.append(f"consumer {consumer.name}: expected max_deliver of at least 1, found {consumer.max_deliver}")
    if consumer.backoff and consumer.ack_wait is not None and consumer.ack_wait != consumer.backoff[0]:
        problems.append(
            f"consumer {consumer.name}: the server replaces ack_wait ({format_duration(consumer.ack_wait)}) by the"
            f" first backoff ({format_duration(consumer.backoff[0])}): drop ack_wait"
        )
    if consumer.backoff and consumer.max_deliver and 0 < consumer.max_deliver < len(consumer.backoff):
        problems.append(
            f"consumer {consumer.name}: expected at most max_deliver ({consumer.max_deliver}) backoff steps, found"
            f" {len(consumer.backoff)}"
        )
    waits = [*consumer.backoff, *([] if consumer.ack_wait is None else [consumer.ack_wait])]
    if too_short := [wait for wait in waits if wait < _MIN_WAIT]:
        problems.append(
            f"consumer {consumer.name}: expected ack_wait and backoff of at least 1ms, found"
            f" {format_duration(too_short[0])}"
        )
    if consumer.max_ack_pending is not None and consumer.max_ack_pending < 1 and consumer.max_ack_pending != -1:
        problems.append(
            f"consumer {consumer.name}: expected max_ack_pending of at least 1, or -1 for no limit, found"
            f" {consumer.max_ack_pending}"
        )
    if consumer.inactive_threshold is not None and consumer.inactive_threshold < 0:
        problems.append(
            f"consumer {consumer.name}: expected an inactive_threshold of at least 0, found"
            f" {format_duration(consumer.inactive_threshold)}: leave it out to keep the consumer"
        )
    sample = _SAMPLE.fullmatch(consumer.sample_freq or "0")
    if not sample or int(sample[1]) > _MAX_PERCENT:
        problems.append(
            f'consumer {consumer.name}: expected sample_freq such as "100%", found {consumer.sample_freq!r}'
        )
    return problems


def name_problems(kind: str, name: str) -> Iterator[str]:
    """Yield what is wrong with the name of a stream or consumer."""
    if not _NAME.fullmatch(name):
        yield f"{name!r} can't name a {kind}: expected no white space, dots, wildcards or slashes, at most 255 of them"
    if kind == "consumer" and name == NO_CONSUMER:
        yield f"{name!r} can't name a consumer: subjects have it where no consumer is meant"


def _partition_problems(consumer: ConsumerFields) -> Iterator[str]:
    is_numbered = consumer.partition is not None
    if is_numbered and not (
        consumer.partitions is not None
        and 0 <= (consumer.partition or 0) < consumer.partitions
        and consumer.name.endswith(f"-{consumer.partition}")
    ):
        yield (
            f"consumer {consumer.name}: expected partition {consumer.partition} to be one of its partitions and the end"
            " of its name: declare partitions only, and the partition follows"
        )
    has_placeholders = consumer.partitions is not None and not is_numbered
    if has_placeholders and not consumer.filter_subjects:
        yield (
            f"consumer {consumer.name} has partitions and no filter subject: give it one such as"
            f' "tasks.{PLACEHOLDER}.>"'
        )
    for subject in consumer.filter_subjects:
        if has_placeholders and (problem := placeholder_problem(subject)):
            yield f"filter subject {subject!r} of consumer {consumer.name}, which has partitions: {problem}"
        if not has_placeholders and PLACEHOLDER in subject:
            yield f"filter subject {subject!r} of consumer {consumer.name} needs partitions: declare their number"


def _priority_problems(consumer: ConsumerFields) -> Iterator[str]:
    groups, policy = consumer.priority_groups, consumer.priority_policy
    for group in groups:
        if not _GROUP.fullmatch(group):
            yield (
                f"consumer {consumer.name}: expected a priority group of 1 to 16 letters, digits, -, _, / and =, found"
                f" {group!r}"
            )
    for group in sorted({group for group in groups if groups.count(group) > 1}):
        yield f"consumer {consumer.name}: the priority group {group!r} is named twice: keep one"
    if groups and policy is None:
        yield (
            f"consumer {consumer.name} has priority groups ({', '.join(groups)}) without a policy, which the server"
            " refuses: set priority_policy to overflow or prioritized"
        )
    if policy is not None and not groups:
        yield (
            f"consumer {consumer.name} has the priority policy {policy} without a group, which the server refuses: name"
            ' one in priority_groups, such as ["workers"]'
        )


# Before the models, which pydantic builds in full only where these names are already known.
Duration = Annotated[int, BeforeValidator(parse_duration), WithJsonSchema(DURATION_FORM)]
Size = Annotated[int, BeforeValidator(parse_size), WithJsonSchema(SIZE_FORM)]


def _require_utf8(text: str) -> str:
    if text != text.encode(errors="replace").decode():
        raise ValueError(f"expected text that UTF-8 can encode, found {shown_value(text)}")
    return text


Text = Annotated[str, AfterValidator(_require_utf8)]


class Declaration(BaseModel):
    """A frozen model without unknown fields, which reports every problem of its values at once.

    :raises QueueDeclarationError: the server would refuse it, or jobs would be lost
    """

    # Built when the first one is made: importing this is most of what a DAG file pays that names no such model.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    kind: ClassVar[str] = "work queue"

    # Each model repeats the signature for type checkers: they would derive one from the fields and refuse the other
    # forms that fields accept, such as a list, ``"30s"`` or a stream's name.
    def __init__(self, *unnamed: object, **values: Any) -> None:
        if unnamed:
            raise QueueDeclarationError("?", [f"expected its fields by name, found {unnamed[0]!r}"], self.kind)
        try:
            super().__init__(**values)
        except ValidationError as error:
            name = values.get("name", "?")
            shown = name if isinstance(name, str) else shown_value(name)
            raise QueueDeclarationError(shown, _problem_texts(error), self.kind) from None

    # As of a function of pydantic's own: the consumers and companions of a queue are then validated with it, by one
    # validator, and not by one for each class.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """Return the declared fields; one that isn't declared keeps its value on the server, so none is added.

        :param options: as pydantic takes them
        """
        return super().model_dump(**{"exclude_unset": True} | options)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if problems := self._problems():
            raise ValueError("\n".join(problems))
        return self

    def _problems(self) -> list[str]:
        return []


class Stream(Declaration):
    """The fields that every stream of a queue may declare, as in JetStream's stream configuration.

    :param name: the stream's name
    :param subjects: the subjects that it captures
    :param description: text for people
    :param storage: ``file`` or ``memory``
    :param num_replicas: the number of servers that store it, 1 to 5
    :param discard: what happens when it is full: ``old`` drops the oldest messages, ``new`` refuses new ones
    :param max_msgs: messages at most; ``-1`` for no limit
    :param max_msgs_per_subject: messages of each subject at most; ``-1`` for no limit
    :param max_bytes: bytes at most, headers included; ``-1`` for no limit
    :param max_msg_size: bytes of a message at most, headers included; ``-1`` for no limit
    :param max_age: how long a message is stored; ``-1`` for no limit
    :param duplicate_window: how long the server remembers the id of a message and stores no second one with it
    :param deny_delete: whether the server refuses to delete single messages
    :param deny_purge: whether the server refuses to purge the stream
    :param allow_direct: whether many messages can be read at once, and from every server that stores them
    :param allow_rollup_hdrs: ``False`` as by default: with it, one message with ``Nats-Rollup`` removes all others
    :param metadata: names and values for programs
    """

    if TYPE_CHECKING:

        def __init__(self, **values: Any) -> None: ...

    name: Text
    subjects: tuple[str, ...] = ()
    description: Text | None = None
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
    metadata: dict[Text, Text] | None = None

    @property
    def fed_by_others(self) -> bool:
        """Whether it may do without subjects, since other streams feed it."""
        return False

    def config(self) -> dict[str, Any]:
        """Return what is declared of the stream's configuration, as JetStream's JSON."""
        declared = {field: getattr(self, field) for field in Stream.model_fields}
        config = {"allow_rollup_hdrs": False} | {field: value for field, value in declared.items() if value is not None}
        # Users write -1 for no limit; the server answers with 0.
        if config.get("max_age") == -1:
            config["max_age"] = 0
        return config | {"subjects": list(self.subjects), "retention": self._retention()}

    def _retention(self) -> str:
        return "limits"


def _problem_texts(error: ValidationError) -> list[str]:
    problems: list[str] = []
    for problem in error.errors(include_url=False):
        cause = problem.get("ctx", {}).get("error")
        field = shown_field(problem["loc"])
        if isinstance(cause, QueueDeclarationError):
            texts = list(cause.problems)
        elif problem["type"] == "extra_forbidden":
            texts = [_REMOVED.get(field) or "no such field: check its spelling, it is JetStream's own name"]
        else:
            texts = problem["msg"].removeprefix("Value error, ").split("\n")
        problems += [f"{field}: {text}" if field else text for text in texts]
    return problems


# How late a job can be whose mover was killed; how many jobs movers hold while the queue is full.
_MOVER_ACK_WAIT, _MOVER_MAX_ACK_PENDING = 30 * NANOSECONDS, 1_000


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


class Retention(Declaration):
    """How long dead letters are kept, by why they died; whoever applies it discards the older ones.

    A field is an age, or ``-1`` for letters that are kept for as long as they are stored. The server's clock counts:
    from the death, and of a parked letter from when it was parked.

    :param max_deliveries: letters that used up their deliveries
    :param terminated: letters that a worker terminated
    :param deadline: letters whose last delivery ran past the job's deadline
    :param expired: letters whose deadline had passed
    :param orphan: letters without an advisory, found by counting
    :param default: letters of each other reason; where absent, these are kept
    :param parked: parked letters, whatever their reason; where absent, these are kept
    """

    kind = "retention of dead letters"

    if TYPE_CHECKING:

        def __init__(self, **values: Any) -> None: ...

    max_deliveries: Duration | None = None
    terminated: Duration | None = None
    deadline: Duration | None = None
    expired: Duration | None = None
    orphan: Duration | None = None
    default: Duration | None = None
    parked: Duration | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_reasons(cls, values: Any) -> Any:
        unknown = [name for name in values if name not in cls.model_fields] if isinstance(values, dict) else []
        if unknown:
            raise ValueError(
                f"expected ages by {', '.join(cls.model_fields)}, found {shown_value(unknown[0])}: jobs that are"
                " undeliverable or unaccounted for are no dead letters, and are kept"
            )
        return values

    def _problems(self) -> list[str]:
        if not self.ages:
            return ["expected an age for at least one reason, found none: leave keep out, and letters are kept"]
        return [
            f"{name}: expected an age above 0, or -1 to keep these letters, found {age}"
            for name, age in self.ages.items()
            if age == 0
        ]

    @property
    def ages(self) -> dict[str, int]:
        """The declared ages in nanoseconds by their names."""
        declared = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: age for name, age in declared.items() if age is not None}

    def age_of(self, reason: str, *, is_parked: bool) -> int | None:
        """Return for how many nanoseconds a letter is kept; ``None`` for as long as it is stored."""
        age = self.parked
        if not is_parked:
            # A job that is no dead letter has no field.
            age = self.ages.get(reason, self.default) if reason in type(self).model_fields else None
        return age if age and age > 0 else None

    def describe(self) -> str:
        """Return the ages as text for people."""
        return ", ".join(
            f"{name} {format_duration(age) if age > 0 else 'without a limit'}" for name, age in self.ages.items()
        )


class DeadLetterQueue(Stream):
    """The stream that captures the dead letters of a work queue.

    :param retention: ``limits`` unless the stream exists with another: a work-queue retention admits one consumer
    :param consumers: consumers to provision on it, for handlers other than this package's
    :param republish: where the server copies each entry to, so that what a handler has acknowledged is known; by
        default to the audit, if the retention removes acknowledged entries. ``None``: unchanged where it exists
    :param keep: how long letters are kept, by their reasons: a ``Retention`` or its dict, such as
        ``{"terminated": "7d", "default": "90d"}``. No server knows it: ``discard="by_policy"`` applies it
    """

    kind = "dead letter queue"

    if TYPE_CHECKING:

        def __init__(self, **values: Any) -> None: ...

    retention: Literal["limits", "workqueue", "interest"] = "limits"
    consumers: Consumers = ()
    republish: dict[str, Any] | None = None
    keep: Retention | None = None
    allow_direct: bool | None = True
    metadata: dict[Text, Text] | None = Field(default_factory=lambda: {DEAD_LETTER_MARK: "true"})

    def _problems(self) -> list[str]:
        limit = self.max_age or 0
        return [
            f"keep.{name}: expected an age below the max_age ({format_duration(limit)}) of {self.name}, found"
            f" {format_duration(age) if age > 0 else 'none'}: the stream would drop what it knows of these letters"
            " first; shorten the age, or leave max_age out"
            for name, age in (self.keep.ages if self.keep and limit > 0 else {}).items()
            if age < 0 or age >= limit
        ]

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


class Attempts(Stream):
    """The stream that stores how far attempts at jobs are, and how they failed: one message for each attempt.

    It is apart from the events: what workers say of a running job may be stored once a second, and must not make the
    server drop ends of jobs.

    :param max_msgs_per_subject: 1: what is stored later of an attempt replaces what was before
    :param max_msg_size: of one attempt; the texts in it are bounded
    :param max_age: how long the last message of an attempt is stored
    """

    kind = "attempts stream"

    if TYPE_CHECKING:

        def __init__(self, **values: Any) -> None: ...

    discard: Literal["old", "new"] | None = "old"
    max_msgs_per_subject: int | None = Field(default=1, ge=1, le=1)
    max_msg_size: Size | None = 16 << 10
    max_age: Duration | None = 7 * _DAY
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
