"""What shows how the jobs of a queue ended: the subjects that its events stream captures, and sampled acknowledgements.

A worker in any language acknowledges its jobs, so a consumer whose acknowledgements the server reports needs nothing of
its workers. That is the default of a queue with events; a declaration may turn it off where workers store completions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.subjects import PRIVATE_SUBJECTS, covered_by_any, overlaps
from airflow_provider_jetstream.jetstream.contract import (
    ACK_METRIC,
    cancellation_filter,
    completion_filter,
    manifest_filter,
)
from airflow_provider_jetstream.jetstream.queue.declaration import Consumer, Events
from airflow_provider_jetstream.jetstream.queue.queue_warning import QueueWarning

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from airflow_provider_jetstream.jetstream.queue.checks import QueueFields

ALL_SAMPLED = "100%"
_NOT_SAMPLED = "0"

_SHARE = re.compile(r"(\d{1,3})%?")
_CONTRACT_TOKENS = frozenset({"completed", "cancelled", "published", "*", ">"})


def sampled_percent(sample_freq: str | None) -> int:
    """Return the share of acknowledgements that the server reports, in percent; 0 for text that it can't read."""
    share = _SHARE.fullmatch(sample_freq or "")
    return int(share[1]) if share else 0


def ack_metric_filter(queue: object) -> str:
    """Return the filter of the subjects on which the server reports acknowledgements."""
    return f"{ACK_METRIC}.{queue}.*"


def with_sampled_consumers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a declaration whose consumers sample every acknowledgement unless they declare a share.

    Where the events stream doesn't capture the reports, they stay as they are.

    :param values: the fields as they were declared, in any form
    """
    consumers, events = values.get("consumers"), values.get("events")
    if not events or not isinstance(consumers, list | tuple):
        return dict(values)
    subjects = _declared_subjects(events)
    if subjects is not None and not covered_by_any(subjects, ack_metric_filter(values.get("name"))):
        return dict(values)
    return {**values, "consumers": type(consumers)(_sampled(consumer) for consumer in consumers)}


def default_event_subjects(name: object, consumers: object, advisory_subjects: tuple[str, ...]) -> tuple[str, ...]:
    """Return the subjects that an events stream captures unless it declares its own.

    :param name: the queue's
    :param consumers: as they were declared, in any form
    """
    declared = consumers if isinstance(consumers, list | tuple) else ()
    is_sampled = any(sampled_percent(_share_of(consumer)) for consumer in declared)
    return (
        completion_filter(name),
        cancellation_filter(name),
        manifest_filter(name),
        *([ack_metric_filter(name)] if is_sampled else []),
        *advisory_subjects,
    )


def advisory_subject_problems(queue: QueueFields) -> Iterator[str]:
    """Yield what makes the declared advisory subjects unusable.

    Invalid subjects, subjects of the server and subjects that another stream captures too are found with the events
    stream, which captures these subjects.
    """
    subjects = queue.advisory_subjects
    if not subjects:
        return
    if queue.events is None:
        yield (
            f"advisory_subjects ({', '.join(subjects)}) need events, the stream that captures them: declare it, or drop"
            " them"
        )
        return
    own = (
        completion_filter(queue.name),
        cancellation_filter(queue.name),
        manifest_filter(queue.name),
    )
    for subject in subjects:
        if not covered_by_any(queue.events.subjects, subject):
            yield (
                f"the events stream {queue.events.name} doesn't capture the advisory subject {subject}, so what workers"
                " publish there would not be stored: add that subject"
            )
        elif subject.startswith(PRIVATE_SUBJECTS):
            yield (
                f"advisory subject {subject}: subjects that begin with $ are the server's, and those with _INBOX are"
                " for answers to clients; choose another"
            )
        for other in own:
            if overlaps(subject, other):
                yield (
                    f"advisory subject {subject} overlaps {other}, on which this package stores its own events: choose"
                    " another"
                )


def end_evidence_warnings(queue: QueueFields) -> Iterator[QueueWarning]:
    """Yield the consumers whose jobs may end without any stored evidence."""
    if queue.events is None:
        return
    metrics = ack_metric_filter(queue.name)
    if not covered_by_any(queue.events.subjects, metrics):
        uncaptured = [consumer.name for consumer in queue.consumers if not _turns_sampling_off(consumer)]
        if uncaptured:
            yield QueueWarning(
                "ends-unseen",
                f"{queue.events.name} doesn't capture {metrics}: the job of a worker that only acknowledges ends"
                " without evidence, and a task that waits for it fails; add that subject",
            )
    for consumer in queue.consumers:
        if consumer.sample_freq is not None and sampled_percent(consumer.sample_freq) < sampled_percent(ALL_SAMPLED):
            yield QueueWarning(
                "ends-unseen",
                f"consumer {consumer.name} has sample_freq {consumer.sample_freq}: a job that a worker only"
                " acknowledges ends without evidence, and a task that waits for it fails. That is right where all its"
                " workers store completions, as this package's do; for any other worker leave sample_freq out, which"
                f" means {ALL_SAMPLED}",
            )


def discovered_sample_freq(existing: str | None, events: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the ``sample_freq`` of a consumer that exists, as a field of its declaration.

    :param existing: the server's
    :param events: the fields of the queue's events stream, if it has one; a declaration without a ``sample_freq`` would
        then mean another consumer than the one that exists
    """
    if existing:
        return {"sample_freq": existing}
    return {"sample_freq": _NOT_SAMPLED} if events else {}


def discovered_advisory_subjects(subjects: Iterable[str]) -> tuple[str, ...]:
    """Return the subjects of an events stream on which only workers of other makes publish."""
    return tuple(
        subject
        for subject in subjects
        if subject.partition(".")[0] not in _CONTRACT_TOKENS and not subject.startswith("$")
    )


def _declared_subjects(events: object) -> Iterable[str] | None:
    """Return the subjects that a declaration of an events stream names; ``None`` where it names none."""
    if isinstance(events, Events):
        return events.subjects if "subjects" in events.model_fields_set else None
    if isinstance(events, Mapping) and isinstance(events.get("subjects"), list | tuple):
        return [subject for subject in events["subjects"] if isinstance(subject, str)]
    return None


def _sampled(consumer: object) -> object:
    if _share_of(consumer) is not None:
        return consumer
    if isinstance(consumer, Consumer):
        return consumer.model_copy(update={"sample_freq": ALL_SAMPLED})
    return {**consumer, "sample_freq": ALL_SAMPLED} if isinstance(consumer, Mapping) else consumer


def _share_of(consumer: object) -> str | None:
    share = consumer.get("sample_freq") if isinstance(consumer, Mapping) else getattr(consumer, "sample_freq", None)
    return None if share is None else str(share)


def _turns_sampling_off(consumer: Consumer) -> bool:
    return consumer.sample_freq is not None and not sampled_percent(consumer.sample_freq)
