"""Finding queues that exist already: dead letter queues, and the declaration that a queue would have here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.stream_api import (
    consumer_info,
    consumer_names,
    list_streams,
    stream_info,
)
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any, overlaps
from airflow_provider_jetstream.jetstream.contract import (
    DEAD_LETTER_MARK,
    MAX_DELIVERIES,
    PARTITIONS,
    archive_filter,
    audit_filter,
    completion_filter,
    reserved_subjects,
)
from airflow_provider_jetstream.jetstream.errors import NotFoundError, QueueDeclarationError
from airflow_provider_jetstream.jetstream.queue.declaration import Archive, Audit, DeadLetterQueue, Events, Stream
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection

ANY_QUEUE = "*"
_ANY = frozenset({"*", ">"})
_QUEUE_TOKEN = MAX_DELIVERIES.count(".") + 1
_CONSUMER_FIELDS = (
    *("description", "filter_subjects", "filter_subject", "max_deliver", "ack_wait", "backoff"),
    *("max_ack_pending", "sample_freq", "priority_groups", "priority_policy"),
)


@dataclass(frozen=True, slots=True)
class DeadLetterQueueInfo:
    """A stream that holds dead letters, or is meant to.

    :param name: the stream
    :param queues: the work queues whose deaths it captures; :data:`ANY_QUEUE` for any
    :param marked: whether its metadata says that it is a dead letter queue
    :param messages: how many messages it holds
    """

    name: str
    queues: tuple[str, ...]
    marked: bool
    messages: int


async def find_dead_letter_queues(connection: Connection) -> list[DeadLetterQueueInfo]:
    """List the streams that are marked as dead letter queues, or capture what the server tells of deaths.

    :param connection: the server
    :return: all of them, by name
    :raises ApiError: the server refused to tell
    """
    found: list[DeadLetterQueueInfo] = []
    for info in await list_streams(connection):
        marked = has_dead_letter_mark(info["config"])
        queues = captured_queues(info["config"])
        if marked or queues:
            name, messages = info["config"]["name"], info["state"]["messages"]
            found.append(DeadLetterQueueInfo(name, tuple(sorted(queues)), marked, messages))
    return sorted(found, key=lambda each: each.name)


async def discover_queue(connection: Connection, name: str) -> WorkQueue:
    """Make the declaration of a work queue that exists.

    :param connection: the server
    :param name: the work queue's stream
    :return: the queue with its consumers, and with the streams around it that exist
    :raises NotFoundError: there is no such stream
    :raises QueueDeclarationError: it isn't a work queue, or it loses jobs as it is
    """
    config = (await stream_info(connection, name))["config"]
    if config["retention"] != "workqueue":
        problem = (
            f"expected a stream of work-queue retention, found {config['retention']}: name the work queue itself rather"
            " than a stream around it; a retention can't be changed"
        )
        raise QueueDeclarationError(name, [problem])
    subjects = list(config.get("subjects") or [])
    on = {
        "atomic_redrive": config.get("allow_atomic") and config.get("allow_msg_ttl"),
        "schedules": config.get("allow_msg_schedules"),
    }
    reserved = [each for each in reserved_subjects(name) if on[each.flag] and each.subjects in subjects]
    parts = {
        "dead_letters": await _dead_letters(connection, name),
        "events": _part(Events, await _capturing(connection, completion_filter(name))),
        "archive": await _archive(connection, name, config),
        "audit": _part(Audit, await _capturing(connection, audit_filter(name))) or False,
    }
    return WorkQueue(
        **_fields(Stream, config)
        | {"subjects": [each for each in subjects if each not in {own.subjects for own in reserved}]}
        | {"consumers": await _consumers(connection, name)}
        | {own.flag: True for own in reserved}
        | parts
    )


def captured_queues(config: Mapping[str, Any]) -> set[str]:
    """Name the work queues of whose deaths a stream captures what the server tells.

    :param config: the stream's configuration
    :return: their names; :data:`ANY_QUEUE` for any
    """
    return {_queue_of(subject) for subject in config.get("subjects") or [] if _tells_deaths(subject)}


def dead_letter_stream(configs: Iterable[Mapping[str, Any]], queue: str) -> Mapping[str, Any] | None:
    """Find the stream that captures what the server tells of a queue's deaths.

    :param configs: the configurations of all streams
    :param queue: the work queue
    :return: the configuration of the one that is marked, or captures most, if there is any
    """
    deaths = f"{MAX_DELIVERIES}.{queue}.*"
    capturing = [
        config for config in configs if any(overlaps(subject, deaths) for subject in config.get("subjects") or [])
    ]
    # The server lets only one stream capture a subject, but several may capture those of different consumers.
    capturing.sort(
        key=lambda config: (not has_dead_letter_mark(config), not covered_by_any(config["subjects"], deaths))
    )
    return capturing[0] if capturing else None


async def _dead_letters(connection: Connection, queue: str) -> dict[str, Any] | None:
    return _part(
        DeadLetterQueue, dead_letter_stream([info["config"] for info in await list_streams(connection)], queue)
    )


async def _archive(connection: Connection, queue: str, config: Mapping[str, Any]) -> dict[str, Any] | bool:
    if (config.get("republish") or {}).get("dest") != archive_filter(queue):
        return False
    return _part(Archive, await _capturing(connection, archive_filter(queue))) or False


async def _capturing(connection: Connection, subject: str) -> Mapping[str, Any] | None:
    """Find the stream that captures all of a filter."""
    names = (await connection.api("STREAM.NAMES", {"subject": subject})).get("streams") or []
    for name in names:
        try:
            config: dict[str, Any] = (await stream_info(connection, name))["config"]
        except NotFoundError:
            continue
        if covered_by_any(config.get("subjects") or [], subject):
            return config
    return None


async def _consumers(connection: Connection, queue: str) -> list[dict[str, Any]]:
    consumers: list[dict[str, Any]] = []
    for name in await consumer_names(connection, queue):
        config = (await consumer_info(connection, queue, name))["config"]
        if "deliver_subject" in config or not config.get("durable_name"):
            continue
        consumer = {field: config[field] for field in _CONSUMER_FIELDS if config.get(field)}
        if consumer.get("backoff"):
            # The server has put the first step there.
            consumer.pop("ack_wait", None)
        if metadata := _own_metadata(config):
            consumer["metadata"] = metadata
        partitions, number = metadata.get(PARTITIONS, ""), name.rpartition("-")[2]
        if partitions.isdecimal() and number in map(str, range(int(partitions))):
            consumer |= {"partitions": int(partitions), "partition": int(number)}
        consumers.append({"name": name, "max_deliver": -1} | consumer)
    return consumers


def _part(model: type[Stream], config: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if config is None:
        return None
    part = _fields(model, config)
    if model is DeadLetterQueue:
        part["retention"] = config["retention"]
        part.setdefault("metadata", None)
    return part


def _fields(model: type[Stream], config: Mapping[str, Any]) -> dict[str, Any]:
    found = {field: config[field] for field in Stream.model_fields if config.get(field) not in (None, "", 0)}
    if "max_age" in model.model_fields and not config.get("max_age"):
        found["max_age"] = -1
    found.pop("metadata", None)
    if metadata := _own_metadata(config):
        found["metadata"] = metadata
    return found


def _own_metadata(config: Mapping[str, Any]) -> dict[str, str]:
    """Leave out what the server adds."""
    return {key: value for key, value in (config.get("metadata") or {}).items() if not key.startswith("_nats.")}


def has_dead_letter_mark(config: Mapping[str, Any]) -> bool:
    """Tell whether a stream's metadata says that it is a dead letter queue.

    :param config: its configuration
    :return: whether it does
    """
    return str((config.get("metadata") or {}).get(DEAD_LETTER_MARK)).lower() == "true"


def _tells_deaths(subject: str) -> bool:
    return overlaps(subject, f"{MAX_DELIVERIES}.*.*")


def _queue_of(subject: str) -> str:
    tokens = subject.split(".")
    token = tokens[_QUEUE_TOKEN] if len(tokens) > _QUEUE_TOKEN else ANY_QUEUE
    return ANY_QUEUE if token in _ANY else token
