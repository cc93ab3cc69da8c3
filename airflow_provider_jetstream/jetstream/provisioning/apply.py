"""Creates and updates a queue's streams and consumers: compares them first, then changes only what differs.

Requests are JSON that keeps the server's own fields, so an update never drops a setting that this package doesn't know.
A change that would rebuild a stream or consumer is refused.

A companion belongs to one queue. Another queue that declares it would replace its subjects, so that deaths and ends of
the first one's jobs went unseen. A stream of another tool that captures the server's advisories of several queues can
be shared as it is; nothing is taken from it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
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
from airflow_provider_jetstream.jetstream.errors import (
    ApiError,
    DeadLetterGoneError,
    DriftError,
    ProvisioningError,
    ServerTooOldError,
    TransientError,
)
from airflow_provider_jetstream.jetstream.provisioning.consumer_steps import (
    MULTIPLE_UNFILTERED,
    NOT_UNIQUE,
    dead_letter_consumer_steps,
    existing_consumers,
    mover_steps,
    work_queue_consumer_steps,
)
from airflow_provider_jetstream.jetstream.provisioning.drain import Draining, park, update_consumer, with_dead_letters
from airflow_provider_jetstream.jetstream.provisioning.plan import Plan, Step, listed, stream_step
from airflow_provider_jetstream.jetstream.publishing.manifest_record import maintain_manifests
from airflow_provider_jetstream.jetstream.queue.filter_marks import filter_marks
from airflow_provider_jetstream.jetstream.queue.server_fields import config_fields
from airflow_provider_jetstream.jetstream.queue.server_uptime import watch_server
from airflow_provider_jetstream.jetstream.queue.stream_config import stored_subjects
from airflow_provider_jetstream.jetstream.queue.undeclared_changes import (
    DECLARATION,
    PROVISIONED_AT,
    Difference,
    declaration_note,
    declared_companion_config,
    declared_consumers,
    declared_queue_config,
    provisioned_declaration,
    stream_differences,
    undeclared_changes,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.field_rules import Kind
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

_STREAM_EXISTS, _STREAM_MISSING = 10058, 10059
# What the server says where another process has made the same change in another way since the plan was made: a stream
# exists otherwise or is missing, a consumer exists otherwise or doesn't exist, or another one has its subjects.
_CHANGED_MEANWHILE = (_STREAM_EXISTS, _STREAM_MISSING, 10148, 10149, MULTIPLE_UNFILTERED, NOT_UNIQUE)
_ATTEMPTS = 3
# The API level that knows a field: older servers drop it silently, and it would differ for ever.
_FIELD_LEVELS = {name: field.level for name, field in config_fields("queue").items()}
# The API level that can set a field of an existing stream: nats-server 2.11 answers error 10052.
_CHANGE_LEVELS = {"allow_msg_ttl": 2}
_SCHEDULING_SERVER = (2, 12, 0)
# By priority policy: the API level and the first server version that knows it.
_POLICY_LEVELS = {"overflow": (1, (2, 11, 0)), "pinned_client": (1, (2, 11, 0)), "prioritized": (2, (2, 12, 0))}


class _Named(NamedTuple):
    """The queue that a subject names, a wildcard for any; the server's own events are captured by other tools, too."""

    queue: str
    by_server: bool


def owner_blockers(queue: WorkQueue, existing: Mapping[str, Any] | None, step: Step) -> Iterator[str]:
    """Yield why a stream that exists can't become a queue's stream: it belongs to another queue.

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
    """Block the steps whose new subjects another stream captures: the server's refusal doesn't name it.

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


__all__ = ["Difference", "Plan", "Step", "apply", "plan", "provision"]


async def plan(connection: Connection, queue: WorkQueue, *, drain: bool = False, park_dead: bool = False) -> Plan:
    """Compare a declaration with the server, and return what :func:`apply` would do; change nothing.

    Steps that the server would refuse, or that would lose or repeat jobs, are blocked.

    :param drain: whether a change of filters waits until the jobs that would get another consumer are done, and parks
        those that are dead; undeclared consumers that are in the way are removed then
    :param park_dead: whether dead letters that a new consumer would run again, since theirs is gone, are parked first
    :raises ServerTooOldError: the declaration needs a feature that the server lacks
    :raises ApiError: the server refused a request
    """
    _require_features(connection, queue)
    steps: list[Step] = []
    for stream in queue.companions():
        existing = await _existing_stream(connection, stream.name)
        config = _supported(declared_companion_config(queue, stream, existing), existing, connection.api_level)
        steps.append(_own_step(queue, existing, config, queue.companion_kind(stream)))
        if stream is queue.dead_letters:
            steps += await dead_letter_consumer_steps(connection, queue.dead_letters, existing)
        elif stream is queue.schedules:
            steps += await mover_steps(connection, queue.name, stream.name, existing)
    info = await _existing_info(connection, queue.name)
    existing = info["config"] if info else None
    declared = declared_consumers(queue)
    consumers = await existing_consumers(connection, queue.name) if info else {}
    metadata, last = (existing.get("metadata") or {}, info["state"]["last_seq"]) if info and existing else (None, 0)
    marks = filter_marks(declared, metadata, consumers, last)
    config = declared_queue_config(queue, existing)
    if existing is None and marks:
        config["metadata"] = {**(config.get("metadata") or {}), **marks}
    steps.append(own := _own_step(queue, existing, config, "queue"))
    stored = stored_subjects(own.config)
    steps += await work_queue_consumer_steps(connection, queue, declared, consumers, stored, drain=drain)
    steps = await with_taken_subjects(connection, steps)
    if info:
        steps = await with_dead_letters(connection, queue, steps, park_dead=park_dead or drain)
    if existing and marks:
        # Last: until the consumers have their filters, the earlier marks hold.
        marking = stream_step(own.config, {"name": queue.name, "metadata": marks}, "queue")
        steps += [marking] if marking.differences else []
    return Plan(tuple(steps))


async def apply(connection: Connection, plan: Plan) -> Plan:
    """Execute a plan, and return it with the dead letters that were parked.

    :param plan: the steps, as :func:`plan` gives them
    :raises DriftError: a step is blocked, and nothing has been changed; or a drained consumer has a stored job that
        isn't known to be dead
    :raises ProvisioningError: the server refused a step; it says which steps are done, and provisioning goes on there
    :raises TransientError: the connection was lost, jobs aren't done, or another process has changed the queue since
        the plan was made; provisioning again goes on there too
    """
    parked: list[str] = []
    await _apply(connection, plan, parked)
    return replace(plan, parked=tuple(parked))


async def _apply(connection: Connection, plan: Plan, parked: list[str]) -> None:
    if plan.blocked:
        raise DriftError(
            "the server can't be made to match the declaration, so nothing was changed:\n"
            + "\n".join(str(step) for step in plan.blocked)
        )
    draining: Draining | None = None
    for number, step in enumerate(plan.changes):
        try:
            if step.drain and draining is None:
                draining = Draining(connection, [step for step in plan.changes if step.drain], parked)
                await draining.begin()
            await _execute(connection, step, draining, parked)
        except ApiError as error:
            if error.err_code in _CHANGED_MEANWHILE:
                raise TransientError(
                    f"{step.kind} {step.name} was changed by another process after the plan was made:"
                    f" {error.description} (error {error.err_code}); {_progress(plan, number, parked)}"
                ) from error
            raise ProvisioningError(
                f"the server refused to {step.action} {step.kind} {step.name}: {error.description} (error"
                f" {error.err_code}); {_progress(plan, number, parked)}"
            ) from None
        except (DriftError, TransientError) as error:
            raise type(error)(f"{error}; {_progress(plan, number, parked)}") from error.__cause__


async def provision(connection: Connection, queue: WorkQueue, *, drain: bool = False, park_dead: bool = False) -> Plan:
    """Create and update a queue's streams and consumers, and return the plan that was executed.

    What was interrupted is continued by calling it again. Where another process changes the queue meanwhile, the plan
    is made again; of two different declarations the later one to be applied holds.

    :param drain: whether a change of filters waits until the jobs that would get another consumer are done, and parks
        those that are dead; undeclared consumers that are in the way are removed then
    :param park_dead: whether dead letters that a new consumer would run again, since theirs is gone, are parked first
    :raises ServerTooOldError: the declaration needs a feature that the server lacks; nothing has been changed
    :raises DriftError: what exists differs in a way that no update can change; nothing has been changed
    :raises ProvisioningError: the server refused a step; the steps before it are done, and provisioning again is safe
    """
    parked: list[str] = []
    for attempt in range(1, _ATTEMPTS + 1):
        executed = await plan(connection, queue, drain=drain, park_dead=park_dead)
        try:
            await _apply(connection, executed, parked)
            break
        except TransientError as error:
            if attempt == _ATTEMPTS or not isinstance(error.__cause__, ApiError | DeadLetterGoneError):
                raise
    await _note_declaration(connection, queue, executed)
    await maintain_manifests(connection, queue)
    if queue.audit:
        await watch_server(connection, await stream_info(connection, queue.audit.name))
    return replace(executed, parked=tuple(parked))


async def _note_declaration(connection: Connection, queue: WorkQueue, executed: Plan) -> None:
    """Note what was provisioned, and when, so that others see what is changed later.

    It is no step of a plan: the note says what a plan was, and isn't declared.
    """
    companion = queue.events or queue.audit
    if companion is None or (not executed.changes and _is_noted(queue, executed)):
        return
    info = await stream_info(connection, companion.name)
    metadata = {key: text for key, text in (info["config"].get("metadata") or {}).items() if key != DECLARATION}
    metadata |= {**declaration_note(queue), PROVISIONED_AT: info["ts"]}
    await connection.api(f"STREAM.UPDATE.{companion.name}", {**info["config"], "metadata": metadata})


def _is_noted(queue: WorkQueue, executed: Plan) -> bool:
    """Return whether what the note declares is what the server has."""
    steps = {step.name: {"config": step.config} for step in executed.steps}
    streams = {name: info for name, info in steps.items() if "/" not in name}
    consumers = {consumer.name: steps[f"{queue.name}/{consumer.name}"] for consumer in queue.consumers}
    noted, _ = provisioned_declaration(queue.name, streams.values())
    return noted is not None and not any(undeclared_changes(noted, streams, consumers).values())


def _own_step(queue: WorkQueue, existing: Mapping[str, Any] | None, declared: dict[str, Any], role: Kind) -> Step:
    step = stream_step(existing, declared, role)
    has_own: tuple[str, ...] = ()
    if role == "queue" and queue.schedules and (existing or {}).get("allow_msg_schedules"):
        # The queue's own schedules keep the stream of schedules from having their subjects, and nobody moves them.
        has_own = tuple(note for note in step.notes if "allow_msg_schedules" in note)
    return replace(step, blocked=(*step.blocked, *has_own, *owner_blockers(queue, existing, step)))


def _require_features(connection: Connection, queue: WorkQueue) -> None:
    level, version = connection.api_level, connection.server_version
    needed = _FIELD_LEVELS["allow_msg_schedules"]
    if queue.schedules and (level < needed or version < _SCHEDULING_SERVER):
        raise ServerTooOldError(
            f"schedules of work queue {queue.name}: expected nats-server {_dotted(_SCHEDULING_SERVER)} or later (API"
            f" level {needed}), found {_dotted(version)} (API level {level}), which would store a schedule and never"
            " make a job of it: upgrade every server, or leave the flag out; nothing was changed"
        )
    for consumer in (*queue.consumers, *(queue.dead_letters.consumers if queue.dead_letters else ())):
        if consumer.priority_policy is None:
            continue
        needed, first = _POLICY_LEVELS[consumer.priority_policy]
        if connection.api_level < needed:
            raise ServerTooOldError(
                f"priority_policy {consumer.priority_policy} of consumer {consumer.name}: expected nats-server"
                f" {_dotted(first)} or later (API level {needed}), found {_dotted(connection.server_version)} (API"
                f" level {connection.api_level}), which would drop it silently: upgrade every server, or leave"
                " priority_groups and priority_policy out; nothing was changed"
            )


def _dotted(version: tuple[int, int, int]) -> str:
    return ".".join(map(str, version))


def _supported(config: dict[str, Any], existing: Mapping[str, Any] | None, level: int) -> dict[str, Any]:
    """Return the fields of a companion that the server knows and, of one that exists, can change."""
    levels = _FIELD_LEVELS if existing is None else _FIELD_LEVELS | _CHANGE_LEVELS
    return {field: value for field, value in config.items() if levels.get(field, 0) <= level}


async def _existing_stream(connection: Connection, name: str) -> dict[str, Any] | None:
    info = await _existing_info(connection, name)
    return info and dict(info["config"])


async def _existing_info(connection: Connection, name: str) -> dict[str, Any] | None:
    try:
        return await connection.api(f"STREAM.INFO.{name}")
    except ApiError as error:
        if error.err_code == _STREAM_MISSING:
            return None
        raise


async def _execute(connection: Connection, step: Step, draining: Draining | None, parked: list[str]) -> None:
    if step.parking:
        why = f"its consumer was gone, and {step.consumer} would have run it again"
        parking = step.parking
        parked.append(await park(connection, parking.queue, parking.sequences, why, step.consumer))
    if step.kind == "stream":
        try:
            await connection.api(f"STREAM.{step.action.upper()}.{step.name}", step.config)
        except ApiError as error:
            if error.err_code != _STREAM_EXISTS or not await _is_as_declared(connection, step):
                raise
    elif step.drain and draining:
        await draining.switch(step)
    else:
        await update_consumer(connection, step.name.partition("/")[0], step.config, step.action)


async def _is_as_declared(connection: Connection, step: Step) -> bool:
    """Return whether a stream that another process has just created is as it is declared, but for the note."""
    existing = await _existing_stream(connection, step.name)
    return existing is not None and not stream_differences(existing, step.config)


def _progress(plan: Plan, number: int, parked: Sequence[str]) -> str:
    """Return where the execution of a plan stopped."""
    letters = "".join(f"; {sentence}" for sentence in parked)
    if not number:
        return f"nothing was changed before that{letters}"
    done, last = f"{number} of {len(plan.changes)} steps", plan.changes[number - 1]
    return f"{done} are done, {last.action} {last.kind} {last.name} the last; provision again to go on{letters}"
