"""Creates and updates a queue's streams and consumers: compares them first, then changes only what differs.

Requests are JSON that keeps the server's own fields, so an update never drops a setting that this package doesn't know.
A change that would rebuild a stream or consumer is refused.
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

# The API level that knows a field: older servers drop it silently, and it would differ for ever.
_FIELD_LEVELS = {"allow_msg_ttl": 1, "allow_atomic": 2, "allow_msg_schedules": 2}
# The first server that refuses a batch with an id that it has stored before.
_ATOMIC_SERVER = (2, 12, 1)
_SCHEDULING_SERVER = (2, 12, 0)
# By priority policy: the API level and the first server version that knows it.
_POLICY_LEVELS = {"overflow": (1, (2, 11, 0)), "pinned_client": (1, (2, 11, 0)), "prioritized": (2, (2, 12, 0))}


async def plan(connection: Connection, queue: WorkQueue) -> Plan:
    """Compare a declaration with the server, and return what :func:`apply` would do; change nothing.

    :raises ServerTooOldError: the declaration needs a feature that the server lacks
    :raises ApiError: the server refused a request
    """
    _require_features(connection, queue)
    steps: list[Step] = []
    for stream in queue.companions():
        existing = await _existing_stream(connection, stream.name)
        steps.append(stream_step(existing, _supported(stream.config(), connection.api_level)))
        if stream is queue.dead_letters:
            for consumer in queue.dead_letters.consumers:
                existing = await _existing_consumer(connection, stream.name, consumer.name)
                steps.append(consumer_step(stream.name, existing, consumer.config()))
    existing = await _existing_stream(connection, queue.name)
    steps.append(stream_step(existing, declared_queue_config(queue, existing)))
    steps += await _plan_consumers(
        connection, queue, reserved_subjects_in_use(queue, existing), exists=existing is not None
    )
    return Plan(tuple(steps))


async def apply(connection: Connection, plan: Plan) -> None:
    """Execute a plan.

    :raises DriftError: a step is blocked; nothing has been changed
    :raises ProvisioningError: the server refused a step; the steps before it are done, and applying again is safe
    """
    if blocked := [step for step in plan.steps if step.blocked]:
        raise DriftError(
            "what exists differs from the declaration in ways the server can't change, so nothing was changed:\n"
            + "\n".join(str(step) for step in blocked)
        )
    for step in plan.changes:
        try:
            await _execute(connection, step)
        except ApiError as error:
            raise ProvisioningError(await _explain(connection, step, error)) from None


async def provision(connection: Connection, queue: WorkQueue) -> Plan:
    """Create and update a queue's streams and consumers, and return the plan that was executed.

    :raises ServerTooOldError: the declaration needs a feature that the server lacks; nothing has been changed
    :raises DriftError: what exists differs in a way that no update can change; nothing has been changed
    :raises ProvisioningError: the server refused a step; the steps before it are done, and provisioning again is safe
    """
    executed = await plan(connection, queue)
    await apply(connection, executed)
    return executed


def _require_features(connection: Connection, queue: WorkQueue) -> None:
    for flag, field, first, harm in (
        ("atomic_redrive", "allow_atomic", _ATOMIC_SERVER, "store the messages of a batch one by one"),
        ("schedules", "allow_msg_schedules", _SCHEDULING_SERVER, "store a schedule and never make a job of it"),
    ):
        level, version = connection.api_level, connection.server_version
        if getattr(queue, flag) and (level < _FIELD_LEVELS[field] or version < first):
            raise ServerTooOldError(
                f"{flag} of work queue {queue.name}: expected nats-server {_dotted(first)} or later (API level"
                f" {_FIELD_LEVELS[field]}), found {_dotted(version)} (API level {level}), which would {harm}:"
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
                f" level {connection.api_level}), which would drop it silently: upgrade every server, or leave"
                " priority_groups and priority_policy out; nothing was changed"
            )


def _dotted(version: tuple[int, int, int]) -> str:
    return ".".join(map(str, version))


def _supported(config: dict[str, Any], level: int) -> dict[str, Any]:
    return {field: value for field, value in config.items() if _FIELD_LEVELS.get(field, 0) <= level}


async def _existing_stream(connection: Connection, name: str) -> dict[str, Any] | None:
    return await _existing(connection, f"STREAM.INFO.{name}", _STREAM_MISSING)


async def _existing_consumer(connection: Connection, stream: str, name: str) -> dict[str, Any] | None:
    return await _existing(connection, f"CONSUMER.INFO.{stream}.{name}", _CONSUMER_MISSING, _STREAM_MISSING)


async def _plan_consumers(
    connection: Connection, queue: WorkQueue, reserved: tuple[Reserved, ...], *, exists: bool
) -> list[Step]:
    names = [consumer.name for consumer in queue.consumers]
    has_partitions = any(consumer.partition is not None for consumer in queue.consumers)
    # Undeclared consumers matter only where the stream reserves subjects, or as partitions of another number of them.
    others = await consumer_names(connection, queue.name) if exists and (reserved or has_partitions) else []
    existing: dict[str, dict[str, Any]] = {}
    for name in (*names, *(other for other in others if other not in names)):
        if config := await _existing_consumer(connection, queue.name, name):
            existing[name] = config
    blockers = await resize_blockers(connection, queue, existing) if has_partitions and existing else {}
    steps: list[Step] = []
    for consumer in queue.consumers:
        declared = consumer.config(default_filters=queue.subjects if reserved else ())
        name = consumer.name
        steps.append(consumer_step(queue.name, existing.get(name), declared, reserved, blockers.get(name)))
    for name, config in existing.items():
        if name not in names:
            steps += undeclared_consumer_steps(queue.name, config, reserved, blockers.get(name))
    return steps


async def _existing(connection: Connection, subject: str, *missing: int) -> dict[str, Any] | None:
    try:
        config: dict[str, Any] = (await connection.api(subject))["config"]
    except ApiError as error:
        if error.err_code in missing:
            return None
        raise
    return config


async def _execute(connection: Connection, step: Step) -> None:
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
        capturing = (await connection.api("STREAM.NAMES", {"subject": subject})).get("streams") or []
        if names := [name for name in capturing if name != step.name]:
            return f"{text}: stream {', '.join(names)} already captures {subject}; declare that stream's name instead"
    return text
