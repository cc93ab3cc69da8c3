"""Bringing a queue's streams and consumers into being: compare first, then change only what differs.

Everything goes over the wire as JSON with the server's own fields kept, so that an update never drops a setting that
this package doesn't know. What would need a stream or consumer to be rebuilt is refused, never done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from airflow_provider_jetstream.jetstream.errors import ApiError, DriftError, ProvisioningError
from airflow_provider_jetstream.jetstream.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from airflow_provider_jetstream.jetstream.connection import Connection
    from airflow_provider_jetstream.jetstream.queue import Consumer, Stream, WorkQueue

_STREAM_MISSING = 10059
_CONSUMER_MISSING = 10014
_SUBJECT_TAKEN = 10065

_FIXED_STREAM_FIELDS = frozenset({"retention", "storage"})
_ONE_WAY_STREAM_FIELDS = frozenset({"deny_delete", "deny_purge"})
_FIXED_CONSUMER_FIELDS = frozenset({"ack_policy", "deliver_policy", "replay_policy"})

_UNLIMITED = frozenset({"max_msgs", "max_bytes", "max_msgs_per_subject", "max_msg_size"})
_DURATIONS = frozenset({"max_age", "duplicate_window", "ack_wait"})
_SERVER_DEFAULTS = {"discard": "old", "storage": "file", "replay_policy": "instant", "max_deliver": -1}


@dataclass(frozen=True, slots=True)
class Difference:
    """One field that differs.

    :param field: JetStream's name of it
    :param found: what the server has
    :param declared: what the declaration says
    """

    field: str
    found: Any
    declared: Any

    def __str__(self) -> str:
        return f"{self.field}: {_shown(self.field, self.found)} → {_shown(self.field, self.declared)}"


@dataclass(frozen=True, slots=True)
class Step:
    """What has to be done about one stream or consumer.

    :param kind: ``stream`` or ``consumer``
    :param name: the stream, or ``stream/consumer``
    :param action: ``create``, ``update`` or ``keep``
    :param config: the whole configuration to send
    :param differences: what an update changes
    :param blocked: why the server can't make the change, and what to do instead
    """

    kind: Literal["stream", "consumer"]
    name: str
    action: Literal["create", "update", "keep"]
    config: dict[str, Any]
    differences: tuple[Difference, ...] = ()
    blocked: tuple[str, ...] = ()

    def __str__(self) -> str:
        changes = "".join(f"\n    {difference}" for difference in self.differences)
        reasons = "".join(f"\n    not possible: {reason}" for reason in self.blocked)
        return f"{self.action} {self.kind} {self.name}{changes}{reasons}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps that make the server match a declaration, in the order in which they must be taken.

    :param steps: dead letter queue and events first, so that no end of a job is missed
    """

    steps: tuple[Step, ...]

    @property
    def changes(self) -> tuple[Step, ...]:
        """The steps that change something."""
        return tuple(step for step in self.steps if step.action != "keep")

    def __str__(self) -> str:
        return "\n".join(str(step) for step in self.steps)


async def plan(connection: Connection, queue: WorkQueue) -> Plan:
    """Compare a declaration with the server; change nothing.

    :param connection: the server
    :param queue: the declaration
    :return: what :func:`apply` would do
    :raises ApiError: the server refused to tell
    """
    steps: list[Step] = []
    for stream, consumers in _streams(queue):
        steps.append(await _plan_stream(connection, stream))
        steps += [await _plan_consumer(connection, stream.name, consumer) for consumer in consumers]
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
    :raises DriftError: as :func:`apply` does
    :raises ProvisioningError: as :func:`apply` does
    """
    intended = await plan(connection, queue)
    await apply(connection, intended)
    return intended


def _streams(queue: WorkQueue) -> Iterator[tuple[Stream, tuple[Consumer, ...]]]:
    if queue.dead_letters:
        yield queue.dead_letters, queue.dead_letters.consumers
    if queue.events:
        yield queue.events, ()
    yield queue, queue.consumers


async def _plan_stream(connection: Connection, stream: Stream) -> Step:
    declared = stream.config()
    existing = await _existing(connection, f"STREAM.INFO.{stream.name}", _STREAM_MISSING)
    if existing is None:
        return Step("stream", stream.name, "create", declared)
    differences = tuple(_differences(existing, declared))
    blocked = tuple(
        reason for difference in differences if (reason := _stream_block(stream.name, difference)) is not None
    )
    action: Literal["update", "keep"] = "update" if differences else "keep"
    return Step("stream", stream.name, action, _merged(existing, declared), differences, blocked)


async def _plan_consumer(connection: Connection, stream: str, consumer: Consumer) -> Step:
    declared = consumer.config()
    name = f"{stream}/{consumer.name}"
    missing = {_CONSUMER_MISSING, _STREAM_MISSING}
    existing = await _existing(connection, f"CONSUMER.INFO.{stream}.{consumer.name}", *missing)
    if existing is None:
        return Step("consumer", name, "create", declared)
    existing = _one_filter_as_such(existing)
    differences = (*_differences(existing, declared), *_leftovers(existing, declared))
    blocked = tuple(
        f"{difference.field} of a consumer is fixed when it is created; remove the consumer by hand if no job is in"
        " flight, then provision again"
        for difference in differences
        if difference.field in _FIXED_CONSUMER_FIELDS
    )
    merged = _merged(existing, declared)
    for field in _replaced_fields(declared):
        merged.pop(field, None)
    action: Literal["update", "keep"] = "update" if differences else "keep"
    return Step("consumer", name, action, merged, differences, blocked)


async def _existing(connection: Connection, subject: str, *missing: int) -> dict[str, Any] | None:
    try:
        config: dict[str, Any] = (await connection.api(subject))["config"]
    except ApiError as error:
        if error.err_code in missing:
            return None
        raise
    return config


def _differences(existing: Mapping[str, Any], declared: Mapping[str, Any]) -> Iterator[Difference]:
    for field, value in declared.items():
        found = existing.get(field)
        if field == "metadata":
            found = {key: text for key, text in (found or {}).items() if key in value}
        if _canonical(field, found) != _canonical(field, value):
            yield Difference(field, found, value)


def _replaced_fields(declared: Mapping[str, Any]) -> set[str]:
    """Name the fields of a consumer that would contradict the declaration if the server's were kept."""
    replaced = {"filter_subject", "filter_subjects"} - declared.keys()
    if "ack_wait" in declared and "backoff" not in declared:
        replaced.add("backoff")
    return replaced


def _leftovers(existing: Mapping[str, Any], declared: Mapping[str, Any]) -> Iterator[Difference]:
    filtered = {"filter_subject", "filter_subjects"} & declared.keys()
    for field in sorted(_replaced_fields(declared)):
        # A filter that another kind of filter replaces is told by the other one.
        if existing.get(field) and not (filtered and field.startswith("filter")):
            yield Difference(field, existing[field], None)


def _one_filter_as_such(existing: Mapping[str, Any]) -> dict[str, Any]:
    config = dict(existing)
    filters: list[str] = config.get("filter_subjects") or []
    if len(filters) == 1:
        config["filter_subject"] = filters[0]
        del config["filter_subjects"]
    return config


def _canonical(field: str, value: Any) -> Any:
    if field in _UNLIMITED and value in (None, 0, -1):
        return -1
    if value is None:
        return _SERVER_DEFAULTS.get(field, False)
    if field in ("subjects", "filter_subjects"):
        return sorted(value)
    if value in (0, ""):
        return False
    return value


def _merged(existing: Mapping[str, Any], declared: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**existing, **declared}
    if "metadata" in declared:
        merged["metadata"] = {**(existing.get("metadata") or {}), **declared["metadata"]}
    return merged


def _stream_block(name: str, difference: Difference) -> str | None:
    if difference.field in _FIXED_STREAM_FIELDS:
        return (
            f"{difference.field} of a stream is fixed when it is created; declare {difference.found!r}, or drain"
            f" {name} and remove it by hand, then provision again"
        )
    if difference.field in _ONE_WAY_STREAM_FIELDS and difference.found:
        return f"{difference.field} can't be taken back once it is set; declare true, or leave it out"
    return None


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


def _shown(field: str, value: Any) -> str:
    if field in _DURATIONS and isinstance(value, int):
        return format_duration(value)
    if field == "backoff" and value:
        return "[" + ", ".join(format_duration(step) for step in value) + "]"
    return "unset" if value is None else str(value)
