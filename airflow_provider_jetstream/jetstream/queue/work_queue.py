"""The declaration of a work queue, from Python, a dict or a YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from pydantic import field_validator, model_validator

from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any
from airflow_provider_jetstream.jetstream.contract import (
    ACK_METRIC,
    Reserved,
    archive_filter,
    audit_filter,
    cancellation_filter,
    completion_filter,
    dead_letter_subjects,
    publish_log_filter,
    reserved_subjects,
)
from airflow_provider_jetstream.jetstream.errors import QueueDeclarationError
from airflow_provider_jetstream.jetstream.queue.checks import queue_problems
from airflow_provider_jetstream.jetstream.queue.declaration import (
    Archive,
    Audit,
    Consumer,
    Consumers,
    DeadLetterQueue,
    Events,
    Stream,
)
from airflow_provider_jetstream.jetstream.queue.lint import queue_warnings
from airflow_provider_jetstream.jetstream.queue.partitions import partition_subject

__all__ = ["Archive", "Audit", "Consumer", "DeadLetterQueue", "Events", "QueueSource", "WorkQueue"]

QueueSource: TypeAlias = "WorkQueue | Mapping[str, Any] | str | Path"

# Valid values, as text, that a companion stream inherits; an invalid one is reported once rather than for each stream.
_REPLICAS = {"num_replicas": frozenset("12345")}
_REPLICAS_AND_STORAGE = _REPLICAS | {"storage": frozenset({"file", "memory"})}
_SCHEDULES = {"schedules": frozenset({"True", "true", "1", "yes", "on"})}


class WorkQueue(Stream):
    """A work queue: a stream from which every job is removed when a worker acknowledges it.

    :param name: the stream's name
    :param subjects: the subjects of its jobs
    :param consumers: durable pull consumers, whose filters may not overlap
    :param dead_letters: the dead letter queue, or its name. ``None``: there is none
    :param events: the stream of the ends of jobs, or its name. ``None``: there is none, and jobs can't be waited for
    :param archive: the stream of copies of all jobs, or its name; ``True`` for one of the default name, ``False`` for
        none. By default, a queue with dead letters has one
    :param audit: the stream that records what was done to dead letters; declared as ``archive`` is
    :param atomic_redrive: whether dead letters are redriven in atomic batches, which no crash can repeat; needs server
        2.12.1, and a marker in the queue for one day for each redriven letter
    :param schedules: whether jobs may be scheduled; needs server 2.12, and a queue that refuses no new jobs
    :raises QueueDeclarationError: the server would refuse it, or jobs would be lost
    """

    if TYPE_CHECKING:

        def __init__(self, **values: Any) -> None: ...

    consumers: Consumers = ()
    dead_letters: DeadLetterQueue | None = None
    events: Events | None = None
    archive: Archive | None = None
    audit: Audit | None = None
    atomic_redrive: bool = False
    schedules: bool = False

    @model_validator(mode="before")
    @classmethod
    def _add_defaults(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = values | _enabled("archive", values) | _enabled("audit", values)
        name = values.get("name")
        replicas, stored_alike = _inherited(values, _REPLICAS), _inherited(values, _REPLICAS_AND_STORAGE)
        schedules = _inherited(values, _SCHEDULES)
        archive = {"name": f"{name}-archive", "subjects": (archive_filter(name),)}
        audit = {"name": f"{name}-audit", "subjects": (audit_filter(name),)}
        event_subjects = (
            completion_filter(name),
            cancellation_filter(name),
            publish_log_filter(name),
            *([f"{ACK_METRIC}.{name}.*"] if _is_sampled(values.get("consumers")) else []),
        )
        for field, model, defaults in (
            ("dead_letters", DeadLetterQueue, replicas | {"subjects": dead_letter_subjects(name)}),
            ("events", Events, replicas | {"subjects": event_subjects}),
            ("archive", Archive, stored_alike | schedules | archive),
            ("audit", Audit, stored_alike | audit),
        ):
            companion = values.get(field)
            if isinstance(companion, str):
                companion = {"name": companion}
            elif isinstance(companion, model):
                companion = {key: getattr(companion, key) for key in companion.model_fields_set}
            if isinstance(companion, dict):
                values[field] = defaults | companion
        return values

    @field_validator("subjects", mode="before")
    @classmethod
    def _accept_one_subject(cls, subjects: Any) -> Any:
        return (subjects,) if isinstance(subjects, str) else subjects

    def _problems(self) -> list[str]:
        return queue_problems(self)

    def _retention(self) -> str:
        return "workqueue"

    @property
    def archive_disabled(self) -> bool:
        """Whether the declaration excludes an archive, rather than leaving it out."""
        return self.archive is None and "archive" in self.model_fields_set

    def companions(self) -> tuple[Stream, ...]:
        """Return the declared streams around the queue, in the order of provisioning: all before the queue itself."""
        streams = (self.dead_letters, self.events, self.archive, self.audit)
        return tuple(stream for stream in streams if stream is not None)

    def companion_names(self) -> tuple[str, ...]:
        """Return the names of :meth:`companions`, in their order."""
        return tuple(stream.name for stream in self.companions())

    def captured_subjects(self) -> tuple[str, ...]:
        """Return the subjects of the stream on the server: those of jobs, and those that its features reserve."""
        return (*self.subjects, *(reserved.subjects for reserved in self.reserved_subjects()))

    def reserved_subjects(self) -> tuple[Reserved, ...]:
        """Return the subjects of the stream that aren't for jobs: those of the declared features."""
        return tuple(reserved for reserved in reserved_subjects(self.name) if getattr(self, reserved.flag))

    def config(self) -> dict[str, Any]:
        """Return what is declared of the stream's configuration, as JetStream's JSON."""
        config = super().config()
        if self.archive:
            # With a narrower source, an archive would refuse atomic redrives: it refuses a batch that isn't complete.
            config["republish"] = {"src": ">", "dest": archive_filter(self.name)}
        if self.atomic_redrive:
            config |= {"allow_atomic": True, "allow_msg_ttl": True}
        if self.schedules:
            config["allow_msg_schedules"] = True
        return config

    def warnings(self) -> list[str]:
        """Return a sentence for each setting that works and will cause trouble later."""
        return queue_warnings(self)

    def consumer(self, name: str) -> Consumer:
        """Return the consumer of a name.

        :raises QueueDeclarationError: the queue declares none of that name
        """
        for consumer in self.consumers:
            if consumer.name == name:
                return consumer
        declared = ", ".join(consumer.name for consumer in self.consumers) or "none"
        raise QueueDeclarationError(self.name, [f"expected one of its consumers ({declared}), found {name!r}"])

    def partition_count(self, template: str) -> int | None:
        """Return the number of partitions of a subject; ``None`` where no consumer divides its jobs.

        :param template: the subject, with ``{partition}`` in place of a token
        """
        subject = partition_subject(template, 0)
        for consumer in self.consumers:
            if consumer.partition == 0 and covered_by_any(consumer.filter_subjects, subject):
                return consumer.partitions
        return None

    @classmethod
    def load(cls, source: QueueSource) -> WorkQueue:
        """Make a queue of any form that the operators accept.

        :param source: a queue, its dict, or the path of its YAML file
        :raises QueueDeclarationError: there is no such file, or its declaration can't be used
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
        if other_keys := [key for key in values if not isinstance(key, str)]:
            raise QueueDeclarationError(name, [f"expected names of fields, found {other_keys[0]!r}: quote it"])
        return cls(**values)


def _read(path: Path) -> Any:
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        problem = f"expected a YAML file at this path, found: {error.strerror or type(error).__name__}"
        raise QueueDeclarationError(str(path), [problem]) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise QueueDeclarationError(str(path), [f"expected YAML, found something else: {error}"]) from None


def _inherited(values: Mapping[str, Any], fields: Mapping[str, frozenset[str]]) -> dict[str, Any]:
    return {field: values[field] for field, valid in fields.items() if str(values.get(field)) in valid}


def _enabled(field: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace ``True`` and ``False`` for a stream; by default, a queue with dead letters has it."""
    if field not in values:
        return {field: {}} if values.get("dead_letters") else {}
    if values[field] is True:
        return {field: {}}
    return {field: None} if values[field] is False else {}


def _is_sampled(consumers: Any) -> bool:
    if not isinstance(consumers, list | tuple):
        return False
    shares = [
        consumer.get("sample_freq") if isinstance(consumer, dict) else getattr(consumer, "sample_freq", None)
        for consumer in consumers
    ]
    return any(share not in (None, "", "0", "0%") for share in shares)
