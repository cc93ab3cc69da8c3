"""Whose a stream is, and whose a subject: a subject has one stream, and the subjects of a companion name its queue.

A companion belongs to one queue. Another queue that declares it would replace its subjects, so that deaths and ends of
the first one's jobs went unseen. A stream of another tool that captures the server's advisories of several queues can
be shared as it is; nothing is taken from it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any, overlaps
from airflow_provider_jetstream.jetstream.contract import (
    MAX_DELIVERIES,
    archive_filter,
    audit_filter,
    cancellation_filter,
    completion_filter,
    copy_filter,
    entry_copies_filter,
    handled_filter,
    manifest_filter,
    parked_filter,
    schedule_filter,
)
from airflow_provider_jetstream.jetstream.provisioning.plan import listed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.provisioning.plan import Step
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

_SUBJECT_TAKEN = 10065
_WILDCARDS = frozenset({"*", ">"})
_EVENTS = ("$JS.EVENT.ADVISORY", "$JS.EVENT.METRIC")
# The place of the queue's name in the subjects of the server's events.
_EVENT_QUEUE = MAX_DELIVERIES.count(".") + 1
_COMPANION_FILTERS = (
    *(copy_filter, parked_filter, archive_filter, entry_copies_filter, handled_filter, audit_filter),
    *(completion_filter, cancellation_filter, manifest_filter, schedule_filter),
)


class _Named(NamedTuple):
    """The queue that a subject names, a wildcard for any; the server's own events are captured by other tools, too."""

    queue: str
    by_server: bool


def owner_blockers(queue: WorkQueue, existing: Mapping[str, Any] | None, step: Step) -> Iterator[str]:
    """Yield why a stream that exists can't become a queue's stream: it is another's.

    :param existing: the server's configuration, if it has the stream
    :param step: the step of the stream as it would be otherwise
    """
    if existing is None or step.action == "keep":
        return
    captured: list[str] = existing.get("subjects") or []
    copied: str | None = (existing.get("republish") or {}).get("dest")
    # An audit stores what the server says about the entries of the dead letter queue.
    entries = _Named(queue.dead_letters.name, by_server=True) if queue.dead_letters else None
    named = {subject: _named_queue(subject) for subject in [*captured, *([copied] if copied else [])]}
    lost = [subject for subject in captured if not covered_by_any(step.config.get("subjects") or [], subject)]
    is_queue = step.name == queue.name
    is_own = any(found and (found.queue == queue.name or found == entries) for found in named.values())
    owners = sorted(
        {
            found.queue
            for subject, found in named.items()
            if found
            and found != entries
            and found.queue not in {queue.name, *_WILDCARDS}
            # Jobs may have any subject. Several queues may share what another tool has made.
            and (found.by_server or not is_queue)
            and (subject in lost or not (found.by_server or is_own))
        }
    )
    if owners:
        yield (
            f"it belongs to work queue {listed(owners)} ({_shown(named, owners)}), and a companion has one queue: name"
            f" another stream for {queue.name}. If {queue.name} is {owners[0]} under a new name, it gets companions of"
            f" its own: redrive what {step.name} holds as {owners[0]}, then remove both by hand"
        )
        return
    if is_queue:
        return
    # Wildcards capture for every queue of the server; of any other subject it isn't known whose it is.
    shared = [subject for subject in lost if (found := named[subject]) and found.queue in _WILDCARDS]
    foreign = [] if is_own else [subject for subject in lost if named[subject] is None]
    if shared or foreign:
        yield (
            f"it captures {listed([*shared, *foreign])}, which {queue.name} doesn't declare and others may need: name"
            " another stream, or declare these subjects of it too"
        )


def _named_queue(subject: str) -> _Named | None:
    """Return which queue a companion's subject is about; ``None`` for any other subject."""
    if subject.startswith(_EVENTS):
        tokens = subject.split(".")
        return _Named(tokens[_EVENT_QUEUE] if len(tokens) > _EVENT_QUEUE else ">", by_server=True)
    first, _, rest = subject.partition(".")
    queue = rest.partition(".")[0]
    for companion in _COMPANION_FILTERS:
        if subject == companion(queue) or (queue in _WILDCARDS and companion("").startswith(f"{first}.")):
            return _Named(queue, by_server=False)
    return None


def _shown(named: Mapping[str, _Named | None], owners: Sequence[str]) -> str:
    return listed([subject for subject, found in named.items() if found and found.queue in owners], 2)


async def with_taken_subjects(connection: Connection, steps: Sequence[Step]) -> list[Step]:
    """Return steps, those blocked whose new subjects another stream captures: the server's refusal names none.

    :param steps: all steps of a plan, in their order
    """

    async def capturing(subject: str) -> list[str]:
        return (await connection.api("STREAM.NAMES", {"subject": subject})).get("streams") or []

    wanted = [(number, subject) for number, step in enumerate(steps) for subject in _new_subjects(step)]
    checked = list(steps)
    found = await map_concurrently(capturing, [subject for _, subject in wanted])
    for (number, subject), names in zip(wanted, found, strict=True):
        given_up = {
            earlier.name
            for earlier in steps[:number]
            if not any(overlaps(subject, kept) for kept in earlier.config.get("subjects") or ())
        }
        if others := sorted({*names} - {steps[number].name} - given_up):
            reason = (
                f"stream {', '.join(others)} already captures {subject}, and a subject has one stream (error"
                f" {_SUBJECT_TAKEN}): declare that stream's name instead, or other subjects"
            )
            checked[number] = replace(checked[number], blocked=(*checked[number].blocked, reason))
    return checked


def _new_subjects(step: Step) -> list[str]:
    subjects: list[str] = step.config.get("subjects") or [] if step.kind == "stream" else []
    if step.action == "update":
        before = next((change.existing or () for change in step.differences if change.field == "subjects"), subjects)
        return [subject for subject in subjects if subject not in before]
    return subjects if step.action == "create" else []
