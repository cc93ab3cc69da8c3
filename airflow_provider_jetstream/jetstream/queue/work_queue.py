"""The declaration of a work queue, from Python, a dict or a YAML file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from pydantic import field_validator, model_validator

from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any, overlaps
from airflow_provider_jetstream.jetstream.contract import (
    archive_filter,
    attempt_filter,
    audit_filter,
    cancellation_filter,
    dead_letter_subjects,
    due_subject,
    entry_copies_filter,
    entry_terminations,
    handled_filter,
    schedule_filter,
)
from airflow_provider_jetstream.jetstream.errors import NotFoundError, QueueDeclarationError
from airflow_provider_jetstream.jetstream.queue.checks import queue_problems
from airflow_provider_jetstream.jetstream.queue.declaration import (
    ARCHIVE_LIMITS,
    Archive,
    Attempts,
    Audit,
    Consumer,
    Consumers,
    DeadLetterQueue,
    Events,
    Schedules,
    Stream,
    partition_subject,
)
from airflow_provider_jetstream.jetstream.queue.end_evidence import (
    advisory_subject_problems,
    default_event_subjects,
    with_sampled_consumers,
)
from airflow_provider_jetstream.jetstream.queue.queue_file import declared_values, read_queue_file, yaml_text

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.queue.field_rules import Kind
    from airflow_provider_jetstream.jetstream.queue.queue_warning import QueueWarning


_REMOVING = ("workqueue", "interest")
# Valid values, as text, that a companion stream inherits; an invalid one is reported once rather than for each stream.
_REPLICAS = {"num_replicas": frozenset("12345")}
_REPLICAS_AND_STORAGE = _REPLICAS | {"storage": frozenset({"file", "memory"})}


def audit_subjects(queue: object, dead_letters: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the subjects that an audit has by default.

    :param dead_letters: the declared fields of the dead letter queue
    """
    if dead_letters is None:
        return (audit_filter(queue),)
    subjects = (audit_filter(queue), handled_filter(queue))
    if not _is_copied(queue, dead_letters):
        return subjects
    terminations = entry_terminations(dead_letters.get("name"))
    # The server allows one stream per subject.
    taken = any(overlaps(subject, terminations) for subject in _captured(queue, dead_letters))
    return (*subjects, entry_copies_filter(queue), *([] if taken else [terminations]))


def with_entry_copies(
    queue: object, dead_letters: Mapping[str, Any], audit: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the declared fields of a dead letter queue, with ``republish`` where it has that by default.

    Copies that nothing would store aren't made.

    :param audit: the fields of the audit, with its subjects
    """
    rule = {"src": ">", "dest": entry_copies_filter(queue)}
    subjects = audit.get("subjects") or () if audit else ()
    if not covered_by_any((subjects,) if isinstance(subjects, str) else subjects, rule["dest"]):
        return {field: value for field, value in dead_letters.items() if (field, value) != ("republish", rule)}
    copied = {"republish": rule} if _is_copied(queue, dead_letters) else {}
    return copied | dict(dead_letters)


def _is_copied(queue: object, dead_letters: Mapping[str, Any]) -> bool:
    """Return whether an acknowledgement removes entries, and all of them are about jobs of this queue.

    A stream republishes to one destination only, so the entries of a dead letter queue that several work queues share
    aren't copied.
    """
    own = dead_letter_subjects(queue)
    captured = _captured(queue, dead_letters)
    return dead_letters.get("retention") in _REMOVING and all(covered_by_any(own, subject) for subject in captured)


def _captured(queue: object, dead_letters: Mapping[str, Any]) -> tuple[str, ...]:
    subjects = dead_letters.get("subjects") or dead_letter_subjects(queue)
    return (subjects,) if isinstance(subjects, str) else tuple(str(subject) for subject in subjects)


__all__ = [
    "Archive",
    "Attempts",
    "Audit",
    "Consumer",
    "DeadLetterQueue",
    "Events",
    "QueueSource",
    "Schedules",
    "WorkQueue",
]

QueueSource: TypeAlias = "WorkQueue | Mapping[str, Any] | str | Path"


class WorkQueue(Stream):
    """A work queue: a stream from which every job is removed when a worker acknowledges it.

    :param name: the stream's name
    :param subjects: the subjects of its jobs; ``[]`` for a queue that other streams feed, by ``sources`` or as a mirror
    :param consumers: durable pull consumers, whose filters may not overlap
    :param dead_letters: the dead letter queue, or its name. ``None``: there is none
    :param events: the stream of the ends of jobs, or its name. ``None``: there is none, and jobs can't be waited for
    :param archive: the stream of copies of all jobs, or its name; ``True`` for one of the default name, ``False`` for
        none. By default, a queue with dead letters has one
    :param audit: the stream that records what was done to dead letters; declared as ``archive`` is
    :param schedules: the stream of jobs that are published later, or its name; ``True`` for one of the default name.
        ``None``: jobs can't be scheduled. Needs server 2.12, and a mover (``jetstream-queue schedules run``)
    :param attempts: the stream of what workers say of attempts at jobs, their progress and their errors, or its name;
        ``True`` for one of the default name. ``None``: only the error of the last attempt is stored, with a dead letter
    :param execute_at_header: whether workers of this package start a job with the header ``X-Execute-At`` only at that
        time; waiting for it costs one of its deliveries
    :param advisory_subjects: filters of the subjects on which workers of any make publish the id of a job that they
        have finished, where the job names such a subject; the events stream captures them
    :raises QueueDeclarationError: the server would refuse it, or jobs would be lost
    """

    if TYPE_CHECKING:

        def __init__(self, **values: Any) -> None: ...

    consumers: Consumers = ()
    dead_letters: DeadLetterQueue | None = None
    events: Events | None = None
    archive: Archive | None = None
    audit: Audit | None = None
    schedules: Schedules | None = None
    attempts: Attempts | None = None
    execute_at_header: bool = False
    advisory_subjects: tuple[str, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _add_defaults(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = with_sampled_consumers(values)
        for field in ("archive", "audit", "schedules", "attempts"):
            values = values | _enabled(field, values)
        name = values.get("name")
        replicas, stored_alike = _inherited(values, _REPLICAS), _inherited(values, _REPLICAS_AND_STORAGE)
        archive = {"name": f"{name}-archive", "subjects": (archive_filter(name),)}
        letters, audited = (
            _fields_of(values.get("dead_letters"), DeadLetterQueue),
            _fields_of(values.get("audit"), Audit),
        )
        audit = {"name": f"{name}-audit", "subjects": audit_subjects(name, letters)}
        if letters is not None:
            values["dead_letters"] = with_entry_copies(name, letters, None if audited is None else audit | audited)
        advisory_subjects = _subjects(values.get("advisory_subjects"))
        event_subjects = default_event_subjects(name, values.get("consumers"), advisory_subjects)
        due = tuple(due_subject(name, subject) for subject in _subjects(values.get("subjects")))
        schedules = {"name": f"{name}-schedules", "subjects": (schedule_filter(name), *due)}
        attempts = {"name": f"{name}-attempts", "subjects": (attempt_filter(name),)}
        for field, model, defaults in (
            ("dead_letters", DeadLetterQueue, replicas | {"subjects": dead_letter_subjects(name)}),
            ("events", Events, replicas | {"subjects": event_subjects}),
            ("archive", Archive, stored_alike | archive),
            ("audit", Audit, stored_alike | audit),
            ("schedules", Schedules, stored_alike | schedules),
            ("attempts", Attempts, stored_alike | attempts),
        ):
            if (companion := _fields_of(values.get(field), model)) is not None:
                values[field] = defaults | companion
        return values

    @field_validator("subjects", "advisory_subjects", mode="before")
    @classmethod
    def _accept_one_subject(cls, subjects: Any) -> Any:
        return (subjects,) if isinstance(subjects, str) else subjects

    def _problems(self) -> list[str]:
        return [*queue_problems(self), *advisory_subject_problems(self)]

    def _retention(self) -> str:
        return "workqueue"

    @property
    def archive_disabled(self) -> bool:
        """Whether the declaration excludes an archive, rather than leaving it out."""
        return self.archive is None and "archive" in self.model_fields_set

    @property
    def fed_by_others(self) -> bool:
        """Whether it does without subjects, since other streams feed it: declared so, with consumers."""
        return bool(self.consumers) and "subjects" in self.model_fields_set

    def companions(self) -> tuple[Stream, ...]:
        """Return the declared streams around the queue, in the order of provisioning: all before the queue itself."""
        streams: tuple[Stream | None, ...] = (self.dead_letters, self.events, self.archive, self.audit)
        if self.dead_letters and self.dead_letters.republish:
            # The audit stores the copies from the first one on.
            streams = (self.audit, *streams[:-1])
        streams = (*streams, self.schedules, self.attempts)
        return tuple(stream for stream in streams if stream is not None)

    def companion_kind(self, companion: Stream) -> Kind:
        """Return the role of one of :meth:`companions`."""
        kinds: tuple[Kind, ...] = ("dead_letters", "events", "archive", "audit", "schedules", "attempts")
        return next(kind for kind in kinds if getattr(self, kind) is companion)

    def companion_names(self) -> tuple[str, ...]:
        """Return the names of :meth:`companions`, in their order."""
        return tuple(stream.name for stream in self.companions())

    def config(self) -> dict[str, Any]:
        """Return what is declared of the stream's configuration, as JetStream's JSON."""
        config = super().config()
        if self.archive:
            # With a narrower source, an archive would refuse a batch of a publisher that isn't complete there.
            config["republish"] = {"src": ">", "dest": archive_filter(self.name)}
        return config

    def new_archive_limits(self) -> dict[str, int]:
        """Return the limits that the archive takes over from the queue when it is created; an existing one keeps its.

        They are the limits that the queue has and the archive doesn't declare. A copy lives longer than its job may, by
        the archive's default ``max_age``: a job that expires while a worker has it is brought back from its copy.
        """
        if self.archive is None:
            return {}
        own = self.archive.model_fields_set
        limits = {field: getattr(self, field) for field in ARCHIVE_LIMITS if field not in own}
        limits = {field: limit for field, limit in limits.items() if limit is not None and limit > 0}
        if "max_age" in limits:
            limits["max_age"] += self.archive.max_age or 0
        return limits

    def warnings(self) -> list[QueueWarning]:
        """Return a sentence for each setting that works and will cause trouble later."""
        # DAG files and workers load queues, and few of them ask for warnings.
        from airflow_provider_jetstream.jetstream.queue.lint import queue_warnings

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
            name, values = str(source), read_queue_file(Path(source))
        if not isinstance(values, Mapping):
            raise QueueDeclarationError(
                name, [f"expected a mapping with name, subjects, consumers…, found {type(values).__name__}"]
            )
        if other_keys := [key for key in values if not isinstance(key, str)]:
            raise QueueDeclarationError(name, [f"expected names of fields, found {other_keys[0]!r}: quote it"])
        return cls(**values)

    def to_yaml(self) -> str:
        """Return the declaration as YAML, which :meth:`load` loads from a file as an equal one."""
        return yaml_text(self.as_values())

    def serialize(self) -> dict[str, Any]:
        """Return what Airflow shows of a queue that is an argument of a task: what its author wrote, as JSON."""
        values = self.as_values()
        # Defaults of consumers are left out.
        plain = [
            {field: value for field, value in consumer.items() if (field, value) != ("sample_freq", "100%")}
            for consumer in values.get("consumers", ())
        ]
        shorter = values | {"consumers": plain}
        return shorter if plain and WorkQueue.load(shorter) == self else values

    def as_values(self) -> dict[str, Any]:
        """Return the declaration as values of JSON, which :meth:`load` loads as an equal one."""
        # For type checkers it isn't the function that it is.
        add_defaults: Any = self._add_defaults
        return declared_values(self, add_defaults)


def require_dead_letters(queue: WorkQueue) -> DeadLetterQueue:
    """Return a queue's dead letter queue.

    :raises QueueDeclarationError: the queue declares none
    """
    if queue.dead_letters is None:
        raise QueueDeclarationError(
            queue.name, ["expected dead_letters, which the scan reads: declare a dead letter queue"]
        )
    return queue.dead_letters


def events_stream(queue: WorkQueue) -> str:
    """Return the name of the events stream, which stores the cancellations.

    :raises QueueDeclarationError: the queue declares no events that capture cancellations
    """
    subject = cancellation_filter(queue.name)
    if queue.events is None or not covered_by_any(queue.events.subjects, subject):
        raise QueueDeclarationError(
            queue.name, [f"expected events that capture {subject}, so that cancellations are stored: declare them"]
        )
    return queue.events.name


def chosen_consumers(names: Sequence[str] | str | None) -> tuple[str, ...] | None:
    """Return the consumers' names, each once; ``None`` for all consumers.

    :param names: names, or one name
    :raises NotFoundError: there is no name
    """
    if names is None:
        return None
    is_list = isinstance(names, Iterable) and not isinstance(names, Mapping)
    listed = [names] if isinstance(names, str) else list(names) if is_list else []
    if not listed or not all(isinstance(name, str) and name.strip() for name in listed):
        raise NotFoundError(
            f"expected names of consumers to inspect, found {names!r}: name some, or leave consumers out to inspect all"
        )
    return tuple(dict.fromkeys(listed))


def _fields_of(companion: Any, model: type[Stream]) -> dict[str, Any] | None:
    """Return the declared fields of a companion; ``None`` where none is declared, or something else in its place."""
    if isinstance(companion, str):
        return {"name": companion}
    if isinstance(companion, model):
        return {key: getattr(companion, key) for key in companion.model_fields_set}
    return companion if isinstance(companion, dict) else None


def _inherited(values: Mapping[str, Any], fields: Mapping[str, frozenset[str]]) -> dict[str, Any]:
    return {field: values[field] for field, valid in fields.items() if _is_one_of(values.get(field), valid)}


def _is_one_of(value: object, valid: frozenset[str]) -> bool:
    # Nothing else is written as text: it may be of any size.
    is_plain = isinstance(value, str) or (isinstance(value, int) and value in range(10))
    return is_plain and str(value) in valid


def _enabled(field: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace ``True`` and ``False`` for a stream; by default, a queue with dead letters has it."""
    if field not in values:
        return {field: {}} if values.get("dead_letters") and field in ("archive", "audit") else {}
    if values[field] is True:
        return {field: {}}
    return {field: None} if values[field] is False else {}


def _subjects(declared: Any) -> tuple[str, ...]:
    """Return the subjects of a field that takes one or several; none where the field is invalid."""
    subjects = (declared,) if isinstance(declared, str) else declared
    return tuple(map(str, subjects)) if isinstance(subjects, list | tuple) else ()
