"""What a declaration asks of the server, where the server differs, and what others have set since it was provisioned.

A program that creates or updates a stream or consumer with a configuration of its own, as many do at each start, resets
what its configuration doesn't name: the archive's copies, the report of acknowledgements, the number of deliveries.
Scans, waits, publishers and workers compare when they begin, with what they have read anyway.

Provisioning notes its declaration and the time in the metadata of the events stream, or of the audit where there are no
events: companions that such programs don't know. So programs without a declaration, such as the page, compare with
that.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.stream_api import stream_info
from airflow_provider_jetstream.jetstream.contract import archive_filter
from airflow_provider_jetstream.jetstream.errors import ApiError, JetStreamProviderError, QueueDeclarationError
from airflow_provider_jetstream.jetstream.queue.declaration import ARCHIVE_LIMITS
from airflow_provider_jetstream.jetstream.queue.end_evidence import sampled_percent
from airflow_provider_jetstream.jetstream.queue.finding import Risk
from airflow_provider_jetstream.jetstream.queue.server_fields import config_fields
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.jetstream.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.declaration import Stream

_UNLIMITED = config_fields("queue", unit="limit").keys()
_DURATIONS = config_fields("queue", unit="duration").keys() | config_fields("consumer", unit="duration").keys()
_SERVER_DEFAULTS = {"discard": "old", "storage": "file", "replay_policy": "instant", "max_deliver": -1}
log = logging.getLogger(__name__)
NOT_AS_DECLARED: Final = "not-as-declared"
DECLARATION: Final = "declaration"
PROVISIONED_AT: Final = "provisioned_at"
# The server allows 128 KiB of metadata.
_LONGEST: Final = 64 * 2**10
# Older servers drop them, and no update resets them.
_NOT_COMPARED: Final = frozenset({"allow_msg_ttl", "allow_msg_schedules", "description", "num_replicas", "placement"})
_LIMITS: Final = ("max_age", "max_msgs", "max_bytes", "max_msgs_per_subject", "max_msg_size", "discard")
_LOST_BODIES: Final = "bodies of terminated jobs may be lost"
_LOST_RECORDS: Final = "what redrives have done may be forgotten, and run twice"
_LOST_LETTERS: Final = "dead letters, their bodies and what is parked may go unseen or be lost"
_LOST_ENDS: Final = "ends of jobs may be missing, so that a wait doesn't see them"
_LOST_ATTEMPTS: Final = "progress and errors of attempts may be missing"
_LOST_JOBS: Final = "jobs may be refused, or deleted undone"
_MORE_COPIES: Final = "a job that takes longer runs in a second worker meanwhile"
_OTHER_JOBS: Final = "jobs of other subjects are delivered, or none"
_EFFECTS: Final[Mapping[tuple[str, str], str]] = {
    **{("queue", field): _LOST_JOBS for field in (*_LIMITS, "subjects")},
    **{("dead letter queue", field): _LOST_LETTERS for field in (*_LIMITS, "subjects", "retention")},
    **{("events stream", field): _LOST_ENDS for field in (*_LIMITS, "subjects", "retention")},
    **{("archive", field): _LOST_BODIES for field in (*_LIMITS, "subjects", "retention")},
    **{("audit stream", field): _LOST_RECORDS for field in (*_LIMITS, "subjects", "retention")},
    **{("attempts stream", field): _LOST_ATTEMPTS for field in (*_LIMITS, "subjects", "retention")},
    ("queue", "republish"): "jobs have no copy in the archive: what is terminated or deleted takes its body with it",
    ("queue", "duplicate_window"): "a job that is published again after that is stored twice",
    ("queue", "allow_rollup_hdrs"): "a message with Nats-Rollup deletes jobs",
    ("dead letter queue", "republish"): "which entries its handlers have handled isn't known",
    ("dead letter queue", "metadata"): "tools don't find it as a dead letter queue",
    ("consumer", "max_deliver"): "which jobs become dead letters, and when, is another matter",
    ("consumer", "sample_freq"): "a job that its worker only acknowledges ends unseen, so that a wait for it fails",
    ("consumer", "ack_wait"): _MORE_COPIES,
    ("consumer", "backoff"): "jobs that fail come back at other times",
    ("consumer", "filter_subject"): _OTHER_JOBS,
    ("consumer", "filter_subjects"): _OTHER_JOBS,
    ("consumer", "max_ack_pending"): "another number of jobs may be in flight",
}
_NO_DEATHS: Final = "a job that fails is delivered for ever and never becomes a dead letter"


def declared_companion_config(
    queue: WorkQueue, companion: Stream, existing: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the declared fields of a companion of a queue.

    A new archive takes over the limits of its queue; an existing one keeps limits that aren't declared for it. A stream
    that another tool has made may refuse direct gets: reading is slower then.

    :param existing: the server's configuration, if it has the stream
    """
    config = companion.config()
    if existing is not None and "allow_direct" not in companion.model_fields_set:
        config.pop("allow_direct", None)
    if companion is queue.schedules and queue.duplicate_window is not None:
        return {"duplicate_window": queue.duplicate_window} | config
    if companion is not queue.archive:
        return config
    if existing is None:
        return config | queue.new_archive_limits()
    kept = set(ARCHIVE_LIMITS) - companion.model_fields_set
    return {field: value for field, value in config.items() if field not in kept}


def declared_queue_config(queue: WorkQueue, existing: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the declared fields of a work queue's own stream; a field to remove is ``None``.

    A new queue allows direct gets unless that is declared otherwise; an existing one stays as it is.

    :param existing: the server's configuration, if it has the stream from an earlier declaration
    """
    declared = queue.config()
    if existing is None:
        declared.setdefault("allow_direct", True)
    elif existing.get("subject_delete_marker_ttl"):
        # With it the server allows roll-ups.
        declared["subject_delete_marker_ttl"] = None
    republish = (existing or {}).get("republish") or {}
    if queue.archive_disabled and republish.get("dest") == archive_filter(queue.name):
        declared["republish"] = None
    return declared


def declared_consumers(queue: WorkQueue) -> dict[str, dict[str, Any]]:
    """Return the declared configurations of a work queue's consumers by name."""
    return {consumer.name: consumer.config() for consumer in queue.consumers}


@dataclass(frozen=True, slots=True)
class Difference:
    """One field that differs.

    :param field: its name in JetStream's JSON
    :param existing: the server's value
    :param declared: the declaration's value
    """

    field: str
    existing: Any
    declared: Any

    @property
    def undone(self) -> str:
        """The difference as a clause about the server."""
        declared = _shown(self.field, self.declared)
        return f"{self.field} is {_shown(self.field, self.existing)}, declared {declared}"

    def __str__(self) -> str:
        return f"{self.field}: {_shown(self.field, self.existing)} → {_shown(self.field, self.declared)}"


def stream_differences(existing: Mapping[str, Any], declared: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Return the declared fields of a stream that differ.

    :param existing: the server's configuration
    :param declared: the declared fields; ``None`` for one to remove
    """
    return tuple(_differences(existing, declared))


def consumer_differences(existing: Mapping[str, Any], declared: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Return the declared fields of a consumer that differ, and undeclared ones that contradict the declaration."""
    existing = _with_single_filter(existing)
    return (*_differences(existing, declared), *_leftovers(existing, declared))


def merged_stream(existing: Mapping[str, Any], declared: Mapping[str, Any]) -> dict[str, Any]:
    """Return the whole configuration for an update of a stream: the declared fields, and the server's other fields.

    :param declared: the declared fields; ``None`` for one to remove
    """
    merged = {**existing, **declared}
    if "metadata" in declared:
        merged["metadata"] = {**(existing.get("metadata") or {}), **declared["metadata"]}
    return {field: value for field, value in merged.items() if value is not None}


def merged_consumer(existing: Mapping[str, Any], declared: Mapping[str, Any]) -> dict[str, Any]:
    """Return the whole configuration for an update of a consumer, without what contradicts the declaration."""
    merged = merged_stream(_with_single_filter(existing), declared)
    for field in _replaced_fields(declared):
        merged.pop(field, None)
    return merged


def _differences(existing: Mapping[str, Any], declared: Mapping[str, Any]) -> Iterator[Difference]:
    for field, value in declared.items():
        present = existing.get(field)
        if field == "metadata":
            present = {key: text for key, text in (present or {}).items() if key in value}
        if _canonical(field, present) != _canonical(field, value):
            yield Difference(field, present, value)


def _replaced_fields(declared: Mapping[str, Any]) -> set[str]:
    """Return the fields of a consumer whose server's value would contradict the declaration."""
    replaced = {"filter_subject", "filter_subjects"} - declared.keys()
    if "ack_wait" in declared and "backoff" not in declared:
        replaced.add("backoff")
    return replaced


def _leftovers(existing: Mapping[str, Any], declared: Mapping[str, Any]) -> Iterator[Difference]:
    filtered = {"filter_subject", "filter_subjects"} & declared.keys()
    for field in sorted(_replaced_fields(declared)):
        # The difference of the field that replaces a filter is reported already.
        if existing.get(field) and not (filtered and field.startswith("filter")):
            yield Difference(field, existing[field], None)


def _with_single_filter(existing: Mapping[str, Any]) -> dict[str, Any]:
    config = dict(existing)
    filters: list[str] = config.get("filter_subjects") or []
    if len(filters) == 1:
        config["filter_subject"] = filters[0]
        del config["filter_subjects"]
    return config


def _canonical(field: str, value: Any) -> Any:
    if field in ("subjects", "filter_subjects"):
        return sorted(value or ())
    if field in _UNLIMITED and value in (None, 0, -1):
        return -1
    if field == "sample_freq":
        return sampled_percent(value)
    if value is None:
        return _SERVER_DEFAULTS.get(field, False)
    if field == "republish":
        return {key: setting for key, setting in value.items() if setting}
    return False if value in (0, "") else value


def _shown(field: str, value: Any) -> str:
    if field in _DURATIONS and isinstance(value, int):
        return format_duration(value)
    if field == "backoff" and value:
        return "[" + ", ".join(format_duration(step) for step in value) + "]"
    if field == "republish" and value:
        return f"{value.get('src')} to {value.get('dest')}"
    return "unset" if value is None else str(value)


# By queue and stream or consumer, what was logged last.
_logged: dict[tuple[str, str], str] = {}


def undeclared_changes(
    queue: WorkQueue,
    streams: Mapping[str, Mapping[str, Any]],
    consumers: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> dict[str, Risk | None]:
    """Compare what was read of a queue with its declaration, and with the one that was provisioned last.

    :param streams: by name, STREAM.INFO of the queue and its companions, as far as they were read
    :param consumers: by name, CONSUMER.INFO of the queue's consumers, as far as they were read
    :return: by name of the stream or consumer what differs, in a sentence; ``None`` where nothing does
    """
    provisioned, at = provisioned_declaration(queue.name, streams.values())
    wanted = _Differences(queue, streams, consumers)
    before = wanted if provisioned in (None, queue) else _Differences(provisioned, streams, consumers)
    findings: dict[str, Risk | None] = {}
    for name, (label, info) in wanted.compared.items():
        own, recorded = wanted.of.get(name, {}), before.of.get(name, {})
        since_changed = own.keys() - recorded.keys()
        changed = recorded | {field: text for field, text in own.items() if field not in since_changed}
        parts = []
        if changed:
            parts.append(f"isn't as declared: {', '.join(changed.values())}; {_since(info, at)}")
        if since_changed:
            texts = ", ".join(own[field] for field in sorted(since_changed))
            parts.append(f"isn't provisioned as it is declared now: {texts}")
        findings[name] = (
            Risk(
                NOT_AS_DECLARED,
                f"{label} {'; and '.join(parts)}. Provision the queue before work"
                + (", and let the program that sets it use what exists, or these values" if changed else ""),
            )
            if parts
            else None
        )
    return findings


def log_changes(queue: str, findings: Mapping[str, Risk | None]) -> None:
    """Log what differs, once in a process until it changes.

    :param findings: what :func:`undeclared_changes` returned
    """
    for name, finding in findings.items():
        if finding is None:
            _logged.pop((queue, name), None)
        elif _logged.get((queue, name)) != finding:
            _logged[queue, name] = str(finding)
            log.warning("%s", finding)


async def read_streams(connection: Connection, names: Iterable[str]) -> dict[str, Mapping[str, Any]]:
    """Read STREAM.INFO of some streams by name; streams that don't exist or may not be read are left out."""

    async def read(name: str) -> Mapping[str, Any] | None:
        try:
            return await stream_info(connection, name)
        except (JetStreamProviderError, ApiError) as error:
            log.debug("Stream %s isn't compared with its declaration: %s", name, error)
            return None

    chosen = list(names)
    infos = await map_concurrently(read, chosen)
    return {name: info for name, info in zip(chosen, infos, strict=True) if info is not None}


def provisioned_declaration(
    queue: str, streams: Iterable[Mapping[str, Any]]
) -> tuple[WorkQueue | None, datetime | None]:
    """Return the declaration that was provisioned last, and when, by the server's clock; ``None`` where unknown.

    :param streams: STREAM.INFO of the queue's companions, in any order, and of any others: a list by subjects has those
        of other queues whose subjects overlap as well, such as a wide ``advisory_subjects``
    """
    for info in streams:
        metadata = info["config"].get("metadata") or {}
        found = _load(metadata.get(DECLARATION, ""))
        if found and found.name == queue and info["config"]["name"] in (queue, *found.companion_names()):
            return found, _moment(metadata.get(PROVISIONED_AT, ""))
    return None, None


def declaration_note(queue: WorkQueue) -> dict[str, str]:
    """Return the declaration as metadata, without a time; empty where it is too long."""
    text = json.dumps(queue.as_values(), separators=(",", ":"))
    return {DECLARATION: text} if len(text.encode()) <= _LONGEST else {}


class _Differences:
    """The differences from a declaration.

    :ivar compared: by name of the streams and consumers that were compared, what each is, and the server's answer
    :ivar of: by that name and by field, what differs
    """

    def __init__(
        self,
        queue: WorkQueue,
        streams: Mapping[str, Mapping[str, Any]],
        consumers: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self.compared: dict[str, tuple[str, Mapping[str, Any]]] = {}
        self.of: dict[str, dict[str, str]] = {}
        own = (streams.get(queue.name) or {}).get("config")
        ignored = _NOT_COMPARED | {"allow_atomic"}
        if own:
            declared = declared_queue_config(queue, own)
            self._add(queue.name, "queue", queue.name, streams[queue.name], stream_differences(own, declared), ignored)
        for companion in queue.companions():
            if info := streams.get(companion.name):
                declared = declared_companion_config(queue, companion, info["config"])
                found = stream_differences(info["config"], declared)
                self._add(companion.name, companion.kind, companion.name, info, found, ignored)
        configs = declared_consumers(queue)
        for name, declared in configs.items():
            if info := consumers.get(name):
                found = consumer_differences({"name": name, **info["config"]}, declared)
                self._add(f"{queue.name}/{name}", "consumer", f"{name} of {queue.name}", info, found, ignored)

    def _add(
        self,
        key: str,
        kind: str,
        name: str,
        info: Mapping[str, Any],
        differences: Iterable[Difference],
        ignored: frozenset[str],
    ) -> None:
        self.compared[key] = (f"{kind} {name}", info)
        if texts := dict(_texts(kind, differences, ignored)):
            self.of[key] = texts


def _texts(kind: str, differences: Iterable[Difference], ignored: frozenset[str]) -> Iterator[tuple[str, str]]:
    for difference in differences:
        if difference.field in ignored:
            continue
        effect = _EFFECTS.get((kind, difference.field))
        if difference.field == "max_deliver" and difference.existing in (None, -1, 0):
            effect = _NO_DEATHS
        yield difference.field, f"{difference.undone}{f' ({effect})' if effect else ''}"


def _since(info: Mapping[str, Any], at: datetime | None) -> str:
    created = _moment(info.get("created") or "")
    if created and at and created > at:
        return f"created anew at {_shown_time(created)}, after the queue was provisioned at {_shown_time(at)}"
    if at:
        return f"changed since it was provisioned at {_shown_time(at)}"
    return f"changed since it was created at {_shown_time(created)}" if created else "changed by somebody else"


def _shown_time(moment: datetime) -> str:
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")


def _moment(text: str) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo else None


@lru_cache(maxsize=64)
def _load(text: str) -> WorkQueue | None:
    """Parse a declaration from the stream's metadata, which whoever may update the stream may have written."""
    if not text or len(text) > _LONGEST:
        return None
    try:
        values = json.loads(text)
        return WorkQueue(**values) if isinstance(values, dict) else None
    except (ValueError, TypeError, RecursionError, QueueDeclarationError):
        return None
