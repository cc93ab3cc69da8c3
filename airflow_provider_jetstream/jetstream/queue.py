"""A work queue as one declaration, from Python, a dict or a YAML file.

Field names and units are JetStream's own; durations and sizes may also be written as ``"30s"`` and ``"256MB"``. A field
that isn't declared keeps the server's default when the stream is created and whatever it has when it exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from airflow_provider_jetstream.jetstream.errors import QueueDeclarationError
from airflow_provider_jetstream.jetstream.names import DEAD_LETTER_MARK, completion_filter, dead_letter_subjects
from airflow_provider_jetstream.jetstream.queue_rules import consumer_problems, queue_problems, queue_warnings
from airflow_provider_jetstream.jetstream.units import Duration, Size

_Declared = TypeVar("_Declared")

QueueSource: TypeAlias = "WorkQueue | Mapping[str, Any] | str | Path"


class _Declaration(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: ClassVar[str] = "work queue"

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise QueueDeclarationError(str(values.get("name", "?")), _problems(error), self.kind) from None


class Consumer(_Declaration):
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

    @model_validator(mode="before")
    @classmethod
    def _accept_one_filter(cls, values: Any) -> Any:
        if isinstance(values, dict) and "filter_subject" in values:
            if "filter_subjects" in values:
                raise ValueError("expected filter_subject or filter_subjects, found both: keep one")
            values = {**values, "filter_subjects": (values["filter_subject"],)}
            del values["filter_subject"]
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        return _raise_or(self, consumer_problems(self))

    def config(self) -> dict[str, Any]:
        """Give the consumer's configuration as JetStream's JSON.

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
        if len(self.filter_subjects) == 1:
            config["filter_subject"] = self.filter_subjects[0]
        elif self.filter_subjects:
            config["filter_subjects"] = list(self.filter_subjects)
        if self.backoff:
            config["backoff"] = list(self.backoff)
        for field in ("description", "ack_wait", "max_ack_pending", "sample_freq", "metadata"):
            if (value := getattr(self, field)) is not None:
                config[field] = value
        return config


class Stream(_Declaration):
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

    def config(self) -> dict[str, Any]:
        """Give the stream's configuration as JetStream's JSON.

        :return: only what is declared
        """
        declared = {field: getattr(self, field) for field in Stream.model_fields}
        config = {field: value for field, value in declared.items() if value is not None}
        # The server counts a missing age as none but answers with 0, where people write -1.
        if config.get("max_age") == -1:
            config["max_age"] = 0
        return config | {"subjects": list(self.subjects), "retention": self._retention()}

    def _retention(self) -> str:
        return "limits"


class DeadLetterQueue(Stream):
    """The stream that keeps the dead letters of a work queue.

    :param retention: ``limits`` unless the stream exists otherwise: a work-queue retention lets one consumer read it
    :param consumers: consumers to provision on it, for processors other than this package's
    """

    kind = "dead letter queue"

    retention: Literal["limits", "workqueue", "interest"] = "limits"
    consumers: tuple[Consumer, ...] = ()
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
    max_age: Duration | None = 7 * 86_400 * 1_000_000_000
    allow_direct: bool | None = True


class WorkQueue(Stream):
    """A work queue: a stream from which every job is removed when a worker acknowledges it.

    :param name: the stream's name
    :param subjects: the subjects of its jobs
    :param consumers: who takes them; their filters may not overlap
    :param dead_letters: where dead letters go; a name is enough. ``None``: nowhere
    :param events: where the ends of jobs are stored; a name is enough. ``None``: nobody can wait for jobs
    :raises QueueDeclarationError: if the server would refuse it, or jobs would be lost
    """

    consumers: tuple[Consumer, ...] = ()
    dead_letters: DeadLetterQueue | None = None
    events: Events | None = None

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = dict(values)
        name = values.get("name")
        for field, model, subjects in (
            ("dead_letters", DeadLetterQueue, dead_letter_subjects(name)),
            ("events", Events, (completion_filter(name),)),
        ):
            part = values.get(field)
            if isinstance(part, str):
                part = {"name": part}
            elif isinstance(part, model):
                part = {key: getattr(part, key) for key in part.model_fields_set}
            if isinstance(part, dict):
                values[field] = {"subjects": subjects, "num_replicas": values.get("num_replicas", 1)} | part
        return values

    @field_validator("subjects", mode="before")
    @classmethod
    def _accept_one_subject(cls, subjects: Any) -> Any:
        return (subjects,) if isinstance(subjects, str) else subjects

    @model_validator(mode="after")
    def _check(self) -> Self:
        return _raise_or(self, queue_problems(self))

    def _retention(self) -> str:
        return "workqueue"

    def warnings(self) -> list[str]:
        """Say what works but will hurt later.

        :return: a sentence each
        """
        return queue_warnings(self)

    def consumer(self, name: str) -> Consumer:
        """Find a consumer.

        :param name: its name
        :return: the consumer
        :raises QueueDeclarationError: if the queue declares none of that name
        """
        for consumer in self.consumers:
            if consumer.name == name:
                return consumer
        known = ", ".join(consumer.name for consumer in self.consumers) or "none"
        raise QueueDeclarationError(self.name, [f"expected one of its consumers ({known}), found {name!r}"])

    @classmethod
    def load(cls, source: QueueSource) -> WorkQueue:
        """Take a queue in any of the forms in which the operators take it.

        :param source: a queue, its dict, or the path of its YAML file
        :return: the queue
        :raises QueueDeclarationError: if there is no such file, or what it says can't be used
        """
        if isinstance(source, WorkQueue):
            return source
        name, values = "?", source
        if isinstance(source, (str, Path)):
            name, values = str(source), _read(Path(source))
        if not isinstance(values, Mapping):
            raise QueueDeclarationError(
                name, [f"expected a mapping with name, subjects, consumers…, found {type(values).__name__}"]
            )
        if strange := [key for key in values if not isinstance(key, str)]:
            raise QueueDeclarationError(name, [f"expected names of fields, found {strange[0]!r}: quote it"])
        return cls(**values)


def _read(path: Path) -> Any:
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        found = f"expected a YAML file at this path, found: {error.strerror or type(error).__name__}"
        raise QueueDeclarationError(str(path), [found]) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise QueueDeclarationError(str(path), [f"expected YAML, found something else: {error}"]) from None


def _raise_or(declaration: _Declared, problems: list[str]) -> _Declared:
    if problems:
        raise ValueError("\n".join(problems))
    return declaration


def _problems(error: ValidationError) -> list[str]:
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
