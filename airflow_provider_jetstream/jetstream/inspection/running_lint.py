"""Warnings about a queue that is in use: its best practices against what is measured rather than declared.

Handler times come from the server's ack metrics, where consumers are sampled. A worker's progress report restarts the
measured time, as it restarts the ack wait: only workers that report no progress show whole times. Deliveries and
results come from the completions that workers store, too. Only the latest events are read. Whoever may publish
completions could make up some, so nothing but a warning follows from them.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.advisories import AckMetric, Completion
from airflow_provider_jetstream.jetstream.client.stream_api import list_consumers, stream_info
from airflow_provider_jetstream.jetstream.client.streams import read_range
from airflow_provider_jetstream.jetstream.errors import NotFoundError, QueueDeclarationError
from airflow_provider_jetstream.jetstream.evidence import event_of
from airflow_provider_jetstream.jetstream.inspection.health import MAX_SUBJECTS, count_left_over, inspect_consumers
from airflow_provider_jetstream.jetstream.publishing.schedules import inspect_due_jobs
from airflow_provider_jetstream.jetstream.queue.consumer_state import filter_subjects
from airflow_provider_jetstream.jetstream.queue.discovery import discover_queue
from airflow_provider_jetstream.jetstream.queue.queue_warning import QueueWarning
from airflow_provider_jetstream.jetstream.queue.server_fields import field_findings
from airflow_provider_jetstream.jetstream.queue.stream_config import outside_filters, stored_subjects
from airflow_provider_jetstream.jetstream.queue.undeclared_changes import read_streams, undeclared_changes
from airflow_provider_jetstream.jetstream.units import NANOSECONDS, format_duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue

_EVENTS = 1_000
# Results may be as large as messages may be.
_BYTES = 8 * 2**20
# The server counts nanoseconds in 64 bits; others may write any number.
_LONGEST_TIME = 2**63 - 1
_FEW_JOBS = 20
_WORTH_SHORTENING = 60 * NANOSECONDS
# An ack wait is long from this multiple of the longest handler time on.
_LONG_FACTOR = 10
# A handler time is close to the ack wait from this share on.
_CLOSE = 0.8
_MANY_REPEATED = 0.05


@dataclass(slots=True)
class _Measurements:
    """What the latest events of a queue say."""

    ack_times: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    deliveries: dict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    results: dict[tuple[str, int], list[Any]] = field(default_factory=lambda: defaultdict(list))


async def running_warnings(connection: Connection, queue: WorkQueue) -> list[QueueWarning]:
    """Return a sentence for each practice that a provisioned queue violates, besides the warnings of its declaration.

    They are about consumers that others made, settings that aren't declared, jobs in flight and the latest ends of
    jobs. See :meth:`~airflow_provider_jetstream.jetstream.WorkQueue.warnings` for those of the declaration.

    :raises NotFoundError: the queue doesn't exist
    :raises ApiError: the server refused a request
    """
    info = await stream_info(connection, queue.name)
    declared = set(queue.warnings())
    consumers = await list_consumers(connection, queue.name)
    reported = await _reported(connection, queue, info, consumers)
    found = list(dict.fromkeys((*await _configured(connection, queue.name), *reported)))
    found = [warning for warning in found if warning not in declared]
    streams = {queue.name: info, **await read_streams(connection, queue.companion_names())}
    changed = undeclared_changes(queue, streams, consumers)
    found += [QueueWarning("not-as-declared", str(finding)) for finding in changed.values() if finding]
    if queue.schedules:
        due = await inspect_due_jobs(connection, queue.name, queue.schedules.name)
        found += [QueueWarning("due-jobs", due.problem)] if due.problem else []
    measured = await _measure(connection, queue)
    if queue.execute_at_header:
        # Waiting for their time costs these jobs a delivery each.
        measured.deliveries.clear()
    for name, consumer in consumers.items():
        if consumer["config"].get("durable_name") and "deliver_subject" not in consumer["config"]:
            found += _consumer_warnings(name, consumer, measured)
    found += _result_warnings(measured)
    # The declaration may warn of it, too, and one warning is enough.
    if not any(warning.name == "unbounded-archive" for warning in declared):
        found += await _archive_warnings(connection, queue)
    if info["state"].get("num_subjects", 0) <= MAX_SUBJECTS:
        left_over = await count_left_over(connection, await inspect_consumers(connection, info))
        found += [QueueWarning("untaken-subjects", left_over.warning)] if left_over.warning else []
    return found


async def _configured(connection: Connection, queue: str) -> list[QueueWarning]:
    """Return the warnings of the declaration that the server's configuration amounts to."""
    try:
        warnings = (await discover_queue(connection, queue)).warnings()
    except QueueDeclarationError as error:
        return [QueueWarning("unusable-declaration", problem) for problem in error.problems]
    # A declaration doesn't know which subjects the stream stores.
    return [warning for warning in warnings if warning.name != "filter-outside-subjects"]


async def _reported(
    connection: Connection, queue: WorkQueue, info: Mapping[str, Any], consumers: Mapping[str, Mapping[str, Any]]
) -> list[QueueWarning]:
    """Return the warnings about fields of the server's configuration, whoever set them."""
    found = [*field_findings("queue", info, "lint")]
    for name, consumer in consumers.items():
        found += field_findings("consumer", consumer, "lint", name=name, queue=queue.name)
        stored = stored_subjects(info["config"])
        found += [
            QueueWarning("filter-outside-subjects", problem)
            for problem in outside_filters(queue.name, name, filter_subjects(consumer["config"]), stored)
        ]
    for companion in queue.companions():
        with suppress(NotFoundError):
            reported = await stream_info(connection, companion.name)
            found += field_findings(queue.companion_kind(companion), reported, "lint", queue=queue.name)
    return QueueWarning.of(found)


async def _measure(connection: Connection, queue: WorkQueue) -> _Measurements:
    measured = _Measurements()
    if queue.events is None:
        return measured
    try:
        state = (await stream_info(connection, queue.events.name))["state"]
    except NotFoundError:
        return measured
    start = max(1, int(state["last_seq"]) - _EVENTS + 1)
    size = 0
    async for message in read_range(connection, queue.events.name, ">", start):
        size += len(message.data)
        if size > _BYTES:
            break
        event = event_of(message, queue.name, connection.domain)
        if not isinstance(event, AckMetric | Completion):
            continue
        measured.deliveries[event.consumer][event.stream_seq] = event.deliveries
        if isinstance(event, Completion):
            # Not by the job's id, which the next run may use again.
            results = measured.results[event.consumer, event.stream_seq]
            if event.result not in results:
                results.append(event.result)
        elif 0 <= event.ack_time <= _LONGEST_TIME:
            measured.ack_times[event.consumer].append(event.ack_time)
    return measured


def _consumer_warnings(name: str, info: Mapping[str, Any], measured: _Measurements) -> Iterator[QueueWarning]:
    config = info["config"]
    limit = config.get("max_ack_pending", 0)
    if 0 < limit <= info["num_ack_pending"]:
        yield QueueWarning(
            "max-ack-pending",
            f"consumer {name} has {info['num_ack_pending']:,} jobs in flight, as many as max_ack_pending allows, so its"
            " workers get no others: see whether they hang; else raise it, or declare partitions",
        )
    ack_wait, times = config.get("ack_wait", 0), measured.ack_times.get(name) or []
    longest = max(times, default=0)
    jobs = f"the longest of the last {len(times):,} jobs took {longest / NANOSECONDS:.3g} s"
    if times and longest >= _CLOSE * ack_wait:
        yield QueueWarning(
            "short-ack-wait",
            f"consumer {name} has an ack_wait of {format_duration(ack_wait)}, and {jobs}: the server delivers one that"
            " takes longer to a second worker; raise it, or let workers report progress",
        )
    elif len(times) >= _FEW_JOBS and ack_wait > max(_WORTH_SHORTENING, _LONG_FACTOR * longest):
        yield QueueWarning(
            "long-ack-wait",
            f"consumer {name} has an ack_wait of {format_duration(ack_wait)}, and {jobs}: a crashed worker's jobs wait"
            " for that time; use a shorter one",
        )
    deliveries = measured.deliveries.get(name) or {}
    repeated = sum(count > 1 for count in deliveries.values())
    if repeated > _MANY_REPEATED * len(deliveries):
        yield QueueWarning(
            "repeated-deliveries",
            f"{repeated:,} of the last {len(deliveries):,} jobs that consumer {name} delivered were done in a second"
            " delivery or later: their handlers have to be idempotent; see why the first ones failed",
        )


def _result_warnings(measured: _Measurements) -> Iterator[QueueWarning]:
    if differing := [job for job, results in measured.results.items() if len(results) > 1]:
        consumer, sequence = differing[0]
        yield QueueWarning(
            "differing-results",
            f"{len(differing):,} of the last {len(measured.results):,} jobs were done more than once with different"
            f" results, such as job {sequence} of consumer {consumer}: let the handler look up the result under the"
            " job's id before it runs again, and keep no state in workers",
        )


async def _archive_warnings(connection: Connection, queue: WorkQueue) -> list[QueueWarning]:
    archive = queue.archive
    if archive is None or {archive.max_bytes, archive.max_msgs} != {None}:
        return []
    try:
        info = await stream_info(connection, archive.name)
    except NotFoundError:
        return []
    config, state = info["config"], info["state"]
    if config["max_bytes"] > 0 or config["max_msgs"] > 0:
        return []
    return [
        QueueWarning(
            "unbounded-archive",
            f"{archive.name} has no limit of size and holds {state['messages']:,} copies in {state['bytes']:,} bytes:"
            " declare its max_bytes; an archive that existed before keeps the limits that aren't declared",
        )
    ]
