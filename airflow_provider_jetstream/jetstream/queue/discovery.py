"""Finds the dead letter queues of a server, and makes the declaration of a work queue that exists already."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from airflow_provider_jetstream.jetstream.client.stream_api import (
    list_consumers,
    list_streams,
    stream_info,
)
from airflow_provider_jetstream.jetstream.client.subjects import covered_by_any, overlaps
from airflow_provider_jetstream.jetstream.contract import (
    DEAD_LETTER_MARK,
    MAX_DELIVERIES,
    PARTITIONS,
    archive_filter,
    attempt_filter,
    audit_filter,
    companion_filter,
    completion_filter,
    redrive_consumer,
    schedule_filter,
    schedules_stream,
)
from airflow_provider_jetstream.jetstream.errors import QueueDeclarationError
from airflow_provider_jetstream.jetstream.queue.declaration import (
    Archive,
    Attempts,
    Audit,
    DeadLetterQueue,
    Events,
    Schedules,
    Stream,
)
from airflow_provider_jetstream.jetstream.queue.end_evidence import (
    discovered_advisory_subjects,
    discovered_sample_freq,
)
from airflow_provider_jetstream.jetstream.queue.filter_marks import without_marks
from airflow_provider_jetstream.jetstream.queue.undeclared_changes import (
    DECLARATION,
    PROVISIONED_AT,
    provisioned_declaration,
)
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection

ANY_QUEUE = "*"
# The prefixes of the names and the subjects of buckets' streams: of keys and values, and of objects.
_BUCKETS: Final = (("KV_", "$KV."), ("OBJ_", "$O."))
_ANY = frozenset({"*", ">"})
_QUEUE_TOKEN = MAX_DELIVERIES.count(".") + 1
_CONSUMER_FIELDS = (
    *("description", "filter_subjects", "filter_subject", "max_deliver", "ack_wait", "backoff"),
    *("max_ack_pending", "sample_freq", "priority_groups", "priority_policy", "inactive_threshold", "mem_storage"),
)


def is_bucket(config: Mapping[str, Any]) -> bool:
    """Return whether a stream is a bucket of keys and values or an object store: it is no work queue.

    :param config: its configuration on the server
    """
    # A bucket that mirrors another one has no subjects. A queue that captures a bucket's changes has another name.
    subjects: list[str] = config.get("subjects") or []
    prefixes = tuple(prefix for name, prefix in _BUCKETS if config["name"].startswith(name))
    return bool(prefixes) and all(subject.startswith(prefixes) for subject in subjects)


async def discover_queue(connection: Connection, name: str) -> WorkQueue:
    """Make the declaration of a work queue that exists.

    :param name: the work queue's stream
    :return: the queue with its consumers, and with the streams around it that exist
    :raises NotFoundError: there is no such stream
    :raises QueueDeclarationError: it isn't a work queue, or it loses jobs as it is
    """
    config = (await stream_info(connection, name))["config"]
    check_work_queue(config)
    events = _companion(Events, await _capturing(connection, completion_filter(name)))
    companions = {
        "dead_letters": await _dead_letters(connection, name),
        "events": events,
        "archive": await _archive(connection, name, config),
        "audit": _companion(Audit, await _capturing(connection, audit_filter(name))) or False,
    }
    overlapping = [info["config"] for info in await list_streams(connection, schedule_filter(name))]
    companions["schedules"] = _companion(Schedules, schedules_stream(overlapping, name))
    companions["attempts"] = _companion(Attempts, await _capturing(connection, attempt_filter(name)))
    return WorkQueue(
        **_fields(Stream, config)
        | {"subjects": list(config.get("subjects") or [])}
        | {"consumers": await _consumers(connection, name, events)}
        | {"advisory_subjects": discovered_advisory_subjects((events or {}).get("subjects", ()))}
        | companions
    )


def check_work_queue(config: Mapping[str, Any]) -> None:
    """Check that a stream may be a work queue, by its configuration.

    :raises QueueDeclarationError: it has another retention, or is a bucket
    """
    problem = ""
    if config["retention"] != "workqueue":
        problem = (
            f"expected a stream of work-queue retention, found {config['retention']}: name the work queue itself rather"
            " than a stream around it; a retention can't be changed"
        )
    elif is_bucket(config):
        problem = "expected a work queue, found a bucket of keys and values or objects: name a queue's stream"
    if problem:
        raise QueueDeclarationError(config["name"], [problem])


async def known_queue(connection: Connection, name: str) -> WorkQueue:
    """Return the declaration of a work queue that exists, as :func:`discover_queue` does.

    Where somebody has changed the queue so that it loses jobs, or a companion so that it isn't known as one, it is what
    was provisioned: a scan says what differs.

    :raises NotFoundError: there is no such stream
    :raises QueueDeclarationError: it isn't a work queue, or it loses jobs and nobody knows what was provisioned
    """
    infos = await list_streams(connection, companion_filter(name))
    provisioned, _ = provisioned_declaration(name, infos)
    try:
        discovered = await discover_queue(connection, name)
    except QueueDeclarationError:
        if provisioned is None:
            raise
        return provisioned
    existing = {info["config"]["name"] for info in infos} - {*discovered.companion_names()}
    return provisioned if provisioned and not existing.isdisjoint(provisioned.companion_names()) else discovered


def captured_queues(config: Mapping[str, Any]) -> set[str]:
    """Return the names of the work queues whose advisories a stream captures; :data:`ANY_QUEUE` for any.

    :param config: the stream's configuration
    """
    subjects = [subject for subject in config.get("subjects") or [] if overlaps(subject, f"{MAX_DELIVERIES}.*.*")]
    return {_queue_of(subject) for subject in subjects}


def dead_letter_stream(configs: Iterable[Mapping[str, Any]], queue: str) -> Mapping[str, Any] | None:
    """Return the configuration of the stream that captures a queue's advisories: a marked one first, if there is any.

    :param configs: the configurations of all streams
    """
    advisories = f"{MAX_DELIVERIES}.{queue}.*"
    capturing = [
        config for config in configs if any(overlaps(subject, advisories) for subject in config.get("subjects") or [])
    ]
    # Only one stream can capture a subject, but several may capture the advisories of different consumers.
    capturing.sort(
        key=lambda config: (not has_dead_letter_mark(config), not covered_by_any(config["subjects"], advisories))
    )
    return capturing[0] if capturing else None


async def _dead_letters(connection: Connection, queue: str) -> dict[str, Any] | None:
    infos = {info["config"]["name"]: info for info in await list_streams(connection, f"{MAX_DELIVERIES}.{queue}.*")}
    config = dead_letter_stream([info["config"] for info in infos.values()], queue)
    fields = _companion(DeadLetterQueue, config)
    if fields and infos[fields["name"]]["state"].get("consumer_count"):
        consumers = await _consumers(connection, fields["name"], None)
        fields["consumers"] = [consumer for consumer in consumers if consumer["name"] != redrive_consumer(queue)]
    return fields


async def _archive(connection: Connection, queue: str, config: Mapping[str, Any]) -> dict[str, Any] | bool:
    if (config.get("republish") or {}).get("dest") != archive_filter(queue):
        return False
    return _companion(Archive, await _capturing(connection, archive_filter(queue))) or False


async def _capturing(connection: Connection, subject: str) -> Mapping[str, Any] | None:
    """Return the configuration of the stream that captures every subject of a filter."""
    configs = [info["config"] for info in await list_streams(connection, subject)]
    return next((config for config in configs if covered_by_any(config.get("subjects") or [], subject)), None)


async def _consumers(connection: Connection, queue: str, events: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    consumers: list[dict[str, Any]] = []
    for name, info in (await list_consumers(connection, queue)).items():
        config = info["config"]
        if "deliver_subject" in config or not config.get("durable_name"):
            continue
        if (config["ack_policy"], config["deliver_policy"]) != ("explicit", "all"):
            # On a stream of another retention than a work queue's: nothing that a declaration could describe.
            continue
        consumer = {field: config[field] for field in _CONSUMER_FIELDS if config.get(field)}
        consumer |= discovered_sample_freq(config.get("sample_freq"), events)
        if consumer.get("backoff"):
            # The server has set it to the first backoff.
            consumer.pop("ack_wait", None)
        metadata = _own_metadata(config)
        partitions, number = metadata.get(PARTITIONS, ""), name.rpartition("-")[2]
        if partitions.isdecimal() and number in map(str, range(int(partitions))):
            consumer |= {"partitions": int(partitions), "partition": int(number)}
            del metadata[PARTITIONS]
        if metadata:
            consumer["metadata"] = metadata
        consumers.append({"name": name, "max_deliver": -1} | consumer)
    # The server sorts by name, and worker-10 comes after worker-9.
    return sorted(consumers, key=_declared_order)


def _declared_order(consumer: Mapping[str, Any]) -> tuple[str, int]:
    number = consumer.get("partition")
    return (consumer["name"], -1) if number is None else (consumer["name"].removesuffix(f"-{number}"), number)


def _companion(model: type[Stream], config: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if config is None:
        return None
    fields = _fields(model, config)
    if model is DeadLetterQueue:
        fields |= {"retention": config["retention"], "republish": config.get("republish")}
        fields.setdefault("metadata", None)
    return fields


def _fields(model: type[Stream], config: Mapping[str, Any]) -> dict[str, Any]:
    fields = {field: config[field] for field in Stream.model_fields if config.get(field) not in (None, "", 0)}
    if "max_age" in model.model_fields and not config.get("max_age"):
        fields["max_age"] = -1
    if model.model_fields["allow_direct"].default and not config.get("allow_direct"):
        fields["allow_direct"] = False
    # Provisioning switches roll-ups off, but those of schedules.
    fields.pop("allow_rollup_hdrs", None)
    fields.pop("metadata", None)
    if metadata := _own_metadata(config):
        fields["metadata"] = metadata
    return fields


def _own_metadata(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata without the server's own, and without that of provisioning."""
    metadata = without_marks(config.get("metadata") or {})
    noted = {DECLARATION, PROVISIONED_AT}
    return {key: value for key, value in metadata.items() if not key.startswith("_nats.") and key not in noted}


def has_dead_letter_mark(config: Mapping[str, Any]) -> bool:
    """Return whether a stream's metadata marks it as a dead letter queue."""
    return str((config.get("metadata") or {}).get(DEAD_LETTER_MARK)).lower() == "true"


def _queue_of(subject: str) -> str:
    tokens = subject.split(".")
    token = tokens[_QUEUE_TOKEN] if len(tokens) > _QUEUE_TOKEN else ANY_QUEUE
    return ANY_QUEUE if token in _ANY else token
