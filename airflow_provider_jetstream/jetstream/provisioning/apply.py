"""Bringing a queue's streams and consumers into being: compare first, then change only what differs.

Everything goes over the wire as JSON with the server's own fields kept, so that an update never drops a setting that
this package doesn't know. What would need a stream or consumer to be rebuilt is refused, never done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.stream_api import consumer_names
from airflow_provider_jetstream.jetstream.errors import ApiError, DriftError, ProvisioningError, ServerTooOldError
from airflow_provider_jetstream.jetstream.provisioning.diff import Difference
from airflow_provider_jetstream.jetstream.provisioning.partition_resize import resize_blockers
from airflow_provider_jetstream.jetstream.provisioning.plan import (
    Plan,
    Step,
    consumer_step,
    declared_queue_config,
    reserved_subjects_in_use,
    stream_step,
    undeclared_consumer_steps,
)

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.contract import Reserved
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

__all__ = ["Difference", "Plan", "Step", "apply", "plan", "provision"]

_STREAM_MISSING = 10059
_CONSUMER_MISSING = 10014
_SUBJECT_TAKEN = 10065

# The API level that knows a field: older servers drop it without a word, and it would differ for ever.
_FIELD_LEVELS = {"allow_msg_ttl": 1, "allow_atomic": 2, "allow_msg_schedules": 2}
# The first server that refuses a batch with an id that it has stored before.
_ATOMIC_SERVER = (2, 12, 1)
_SCHEDULING_SERVER = (2, 12, 0)
# By priority policy: the API level and the first server version that knows it.
_POLICY_LEVELS = {"overflow": (1, (2, 11, 0)), "pinned_client": (1, (2, 11, 0)), "prioritized": (2, (2, 12, 0))}


async def plan(connection: Connection, queue: WorkQueue) -> Plan:
    """Compare a declaration with the server; change nothing.

    :param connection: the server
    :param queue: the declaration
    :return: what :func:`apply` would do
    :raises ServerTooOldError: the declaration needs a feature that the server lacks
    :raises ApiError: the server refused to tell
    """
    _require_features(connection, queue)
    steps: list[Step] = []
    for part in queue.companions():
        existing = await _existing_stream(connection, part.name)
        steps.append(stream_step(existing, _known(part.config(), connection.api_level)))
        if part is queue.dead_letters:
            for consumer in queue.dead_letters.consumers:
                found = await _existing_consumer(connection, part.name, consumer.name)
                steps.append(consumer_step(part.name, found, consumer.config()))
    existing = await _existing_stream(connection, queue.name)
    steps.append(stream_step(existing, declared_queue_config(queue, existing)))
    steps += await _plan_consumers(
        connection, queue, reserved_subjects_in_use(queue, existing), exists=existing is not None
    )
    return Plan(tuple(steps))


async def apply(connection: Connection, intended: Plan) -> None:
    """Carry out a plan.

    :param connection: the server
    :param intended: the plan
    :raises DriftError: a step is blocked; nothing has been changed
    :raises ProvisioningError: the server refused a step; the ones before it are done, and applying again is safe
    """
    if blocked := [step for step in intended.steps if step.blocked]:
        raise DriftError(
            "what exists differs from the declaration in ways the server can't change, so nothing was changed:\n"
            + "\n".join(str(step) for step in blocked)
        )
    for step in intended.changes:
        try:
            await _carry_out(connection, step)
        except ApiError as error:
            raise ProvisioningError(await _explain(connection, step, error)) from None


async def provision(connection: Connection, queue: WorkQueue) -> Plan:
    """Plan and apply.

    :param connection: the server
    :param queue: the declaration
    :return: what was done
    :raises ServerTooOldError: as :func:`plan` does, before anything is changed
    :raises DriftError: as :func:`apply` does
    :raises ProvisioningError: as :func:`apply` does
    """
    intended = await plan(connection, queue)
    await apply(connection, intended)
    return intended


def _require_features(connection: Connection, queue: WorkQueue) -> None:
    for flag, field, first, otherwise in (
        ("atomic_redrive", "allow_atomic", _ATOMIC_SERVER, "take a batch for single messages"),
        ("schedules", "allow_msg_schedules", _SCHEDULING_SERVER, "keep a schedule and never make a job of it"),
    ):
        level, version = connection.api_level, connection.server_version
        if getattr(queue, flag) and (level < _FIELD_LEVELS[field] or version < first):
            raise ServerTooOldError(
                f"{flag} of work queue {queue.name}: expected nats-server {_dotted(first)} or later (API level"
                f" {_FIELD_LEVELS[field]}), found {_dotted(version)} (API level {level}), which would {otherwise}:"
                " upgrade every server, or leave the flag out; nothing was changed"
            )
    for consumer in (*queue.consumers, *(queue.dead_letters.consumers if queue.dead_letters else ())):
        if consumer.priority_policy is None:
            continue
        needed, first = _POLICY_LEVELS[consumer.priority_policy]
        if connection.api_level < needed:
            raise ServerTooOldError(
                f"priority_policy {consumer.priority_policy} of consumer {consumer.name}: expected nats-server"
                f" {_dotted(first)} or later (API level {needed}), found {_dotted(connection.server_version)} (API"
                f" level {connection.api_level}), which would drop it without a word: upgrade every server, or leave"
                " priority_groups and priority_policy out; nothing was changed"
            )


def _dotted(version: tuple[int, int, int]) -> str:
    return ".".join(map(str, version))


def _known(config: dict[str, Any], level: int) -> dict[str, Any]:
    return {field: value for field, value in config.items() if _FIELD_LEVELS.get(field, 0) <= level}


async def _existing_stream(connection: Connection, name: str) -> dict[str, Any] | None:
    return await _existing(connection, f"STREAM.INFO.{name}", _STREAM_MISSING)


async def _existing_consumer(connection: Connection, stream: str, name: str) -> dict[str, Any] | None:
    return await _existing(connection, f"CONSUMER.INFO.{stream}.{name}", _CONSUMER_MISSING, _STREAM_MISSING)


async def _plan_consumers(
    connection: Connection, queue: WorkQueue, reserved: tuple[Reserved, ...], *, exists: bool
) -> list[Step]:
    names = [consumer.name for consumer in queue.consumers]
    divided = any(consumer.partition is not None for consumer in queue.consumers)
    # Others are in the way only of what the stream reserves, or as partitions of another number of them.
    others = await consumer_names(connection, queue.name) if exists and (reserved or divided) else []
    found: dict[str, dict[str, Any]] = {}
    for name in (*names, *(other for other in others if other not in names)):
        if existing := await _existing_consumer(connection, queue.name, name):
            found[name] = existing
    resizing = await resize_blockers(connection, queue, found) if divided and found else {}
    steps: list[Step] = []
    for consumer in queue.consumers:
        declared = consumer.config(default_filters=queue.subjects if reserved else ())
        name = consumer.name
        steps.append(consumer_step(queue.name, found.get(name), declared, reserved, resizing.get(name)))
    for name, config in found.items():
        if name not in names:
            steps += undeclared_consumer_steps(queue.name, config, reserved, resizing.get(name))
    return steps


async def _existing(connection: Connection, subject: str, *missing: int) -> dict[str, Any] | None:
    try:
        config: dict[str, Any] = (await connection.api(subject))["config"]
    except ApiError as error:
        if error.err_code in missing:
            return None
        raise
    return config


async def _carry_out(connection: Connection, step: Step) -> None:
    if step.kind == "stream":
        await connection.api(f"STREAM.{step.action.upper()}.{step.name}", step.config)
        return
    stream, consumer = step.name.split("/")
    body = {"stream_name": stream, "config": step.config, "action": step.action}
    subject = f"CONSUMER.CREATE.{stream}.{consumer}"
    if filter_subject := step.config.get("filter_subject"):
        subject += f".{filter_subject}"
    await connection.api(subject, body)


async def _explain(connection: Connection, step: Step, error: ApiError) -> str:
    text = f"the server refused to {step.action} {step.kind} {step.name}: {error.description} (error {error.err_code})"
    if error.err_code != _SUBJECT_TAKEN:
        return text
    for subject in step.config["subjects"]:
        found = (await connection.api("STREAM.NAMES", {"subject": subject})).get("streams") or []
        if names := [name for name in found if name != step.name]:
            return f"{text}: stream {', '.join(names)} already captures {subject}; declare that stream's name instead"
    return text
