"""A work queue as one declaration, from Python, a dict or a YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import field_validator, model_validator

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

__all__ = ["Archive", "Audit", "Consumer", "DeadLetterQueue", "Events", "QueueSource", "WorkQueue"]

QueueSource: TypeAlias = "WorkQueue | Mapping[str, Any] | str | Path"

# What a part takes over from its queue, as text, so that a bad value is told once rather than for each part.
_REPLICAS = {"num_replicas": frozenset("12345")}
_REPLICAS_AND_STORAGE = _REPLICAS | {"storage": frozenset({"file", "memory"})}
_SCHEDULES = {"schedules": frozenset({"True", "true", "1", "yes", "on"})}


class WorkQueue(Stream):
    """A work queue: a stream from which every job is removed when a worker acknowledges it.

    :param name: the stream's name
    :param subjects: the subjects of its jobs
    :param consumers: who takes them; their filters may not overlap
    :param dead_letters: where dead letters go; a name is enough. ``None``: nowhere
    :param events: where the ends of jobs are stored; a name is enough. ``None``: nobody can wait for jobs
    :param archive: where the server stores a copy of each job; ``True`` or a name is enough, ``False``: nowhere. Where
        it isn't said, a queue with dead letters has one
    :param audit: where it is recorded what became of dead letters; said as for ``archive``
    :param atomic_redrive: whether dead letters are redriven in atomic batches, which no crash at any time can repeat;
        takes server 2.12.1, and a marker of one day in the queue for each redriven letter
    :param schedules: whether jobs may be published for later; takes server 2.12, and a queue that drops no new jobs
    :raises QueueDeclarationError: if the server would refuse it, or jobs would be lost
    """

    consumers: Consumers = ()
    dead_letters: DeadLetterQueue | None = None
    events: Events | None = None
    archive: Archive | None = None
    audit: Audit | None = None
    atomic_redrive: bool = False
    schedules: bool = False

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = values | _switched("archive", values) | _switched("audit", values)
        name = values.get("name")
        replicas, alike = _inherited(values, _REPLICAS), _inherited(values, _REPLICAS_AND_STORAGE)
        scheduled = _inherited(values, _SCHEDULES)
        ends = (
            completion_filter(name),
            cancellation_filter(name),
            publish_log_filter(name),
            *([f"{ACK_METRIC}.{name}.*"] if _sampled(values.get("consumers")) else []),
        )
        for field, model, defaults in (
            ("dead_letters", DeadLetterQueue, replicas | {"subjects": dead_letter_subjects(name)}),
            ("events", Events, replicas | {"subjects": ends}),
            ("archive", Archive, alike | scheduled | {"name": f"{name}-archive", "subjects": (archive_filter(name),)}),
            ("audit", Audit, alike | {"name": f"{name}-audit", "subjects": (audit_filter(name),)}),
        ):
            part = values.get(field)
            if isinstance(part, str):
                part = {"name": part}
            elif isinstance(part, model):
                part = {key: getattr(part, key) for key in part.model_fields_set}
            if isinstance(part, dict):
                values[field] = defaults | part
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
        """Whether the declaration says that there is to be no archive, rather than nothing about it."""
        return self.archive is None and "archive" in self.model_fields_set

    def companions(self) -> tuple[Stream, ...]:
        """Give the streams that belong to the queue.

        :return: those it declares, in the order in which they are provisioned, all before the queue itself
        """
        parts = (self.dead_letters, self.events, self.archive, self.audit)
        return tuple(part for part in parts if part is not None)

    def companion_names(self) -> tuple[str, ...]:
        """Give the names of the streams that belong to the queue.

        :return: the names, in the order of :meth:`companions`
        """
        return tuple(stream.name for stream in self.companions())

    def captured_subjects(self) -> tuple[str, ...]:
        """Give the subjects that the stream has on the server.

        :return: the jobs' subjects, and those that its features reserve
        """
        return (*self.subjects, *(each.subjects for each in self.reserved_subjects()))

    def reserved_subjects(self) -> tuple[Reserved, ...]:
        """Give the subjects of the stream that aren't for jobs.

        :return: those of the features that are declared
        """
        return tuple(each for each in reserved_subjects(self.name) if getattr(self, each.flag))

    def config(self) -> dict[str, Any]:
        """Give the stream's configuration as JetStream's JSON.

        :return: only what is declared
        """
        config = super().config()
        if self.archive:
            # A narrower source would keep atomic redrives out: the archive refuses a batch of which it gets a part.
            config["republish"] = {"src": ">", "dest": archive_filter(self.name)}
        if self.atomic_redrive:
            config |= {"allow_atomic": True, "allow_msg_ttl": True}
        if self.schedules:
            config["allow_msg_schedules"] = True
        return config

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


def _inherited(values: Mapping[str, Any], fields: Mapping[str, frozenset[str]]) -> dict[str, Any]:
    return {field: values[field] for field, good in fields.items() if str(values.get(field)) in good}


def _switched(field: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Read whether a part that need not be described is on; by default it is where there are dead letters."""
    if field not in values:
        return {field: {}} if values.get("dead_letters") else {}
    if values[field] is True:
        return {field: {}}
    return {field: None} if values[field] is False else {}


def _sampled(consumers: Any) -> bool:
    if not isinstance(consumers, list | tuple):
        return False
    shares = [
        consumer.get("sample_freq") if isinstance(consumer, dict) else getattr(consumer, "sample_freq", None)
        for consumer in consumers
    ]
    return any(share not in (None, "", "0", "0%") for share in shares)
