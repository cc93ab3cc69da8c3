"""What the server would refuse of a plan, found before anything is changed.

The server has no dry run, so its rules are reproduced here, each beside its error code; observed with nats-server 2.10
to 2.15. What only the server itself knows stays to be found when the plan is applied: the limits of its disk and
memory, the number and placement of a cluster's servers, and what others create meanwhile.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from airflow_provider_jetstream.jetstream.client.concurrency import map_concurrently
from airflow_provider_jetstream.jetstream.client.stream_api import consumer_names
from airflow_provider_jetstream.jetstream.client.subjects import overlaps
from airflow_provider_jetstream.jetstream.errors import ApiError, JetStreamProviderError
from airflow_provider_jetstream.jetstream.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.provisioning.plan import Step

_INVALID = 10052
_MIRROR_SUBJECTS = 10034
_SUBJECT_TAKEN = 10065
_REPLICAS = 10074
_NOT_CLUSTERED = 10010


async def with_refusals(connection: Connection, steps: Sequence[Step]) -> list[Step]:
    """Return steps with what the server would refuse of each.

    :param steps: all steps of a plan, in their order
    """
    changing = [step for step in steps if step.action in ("create", "update")]
    if not changing:
        return list(steps)
    refusals = await _stream_refusals(connection, [step for step in changing if step.kind == "stream"])
    account = _Account(await connection.api("INFO"))
    for step in changing:
        refusals.setdefault(step.name, []).extend(account.add(step))
    for name, reason in (await _consumer_limits(connection, steps, account.limits)).items():
        refusals[name].append(reason)
    return [replace(step, blocked=(*step.blocked, *refusals.get(step.name, ()))) for step in steps]


async def _stream_refusals(connection: Connection, changing: Sequence[Step]) -> dict[str, list[str]]:
    refusals = {step.name: list(_invalid_settings(step)) for step in changing}
    for name, reasons in (await _taken_subjects(connection, changing)).items():
        refusals[name] += reasons
    # Before 2.15 the server accepts an update, without effect.
    replicated = [step for step in changing if _is_new(step, "num_replicas") and step.config["num_replicas"] > 1]
    if replicated and await _is_single_server(connection):
        for step in replicated:
            refusals[step.name].append(
                f"num_replicas {step.config['num_replicas']} needs a cluster, and this server is alone (error"
                f" {_REPLICAS}): declare 1, or connect to a cluster"
            )
    return refusals


def _invalid_settings(step: Step) -> Iterator[str]:
    """Yield combinations that the server refuses, which a declaration that leaves fields out can't show."""
    config = step.config
    window, age = config.get("duplicate_window") or 0, config.get("max_age") or 0
    if window > age > 0:
        yield (
            f"duplicate_window {format_duration(window)} is longer than max_age {format_duration(age)} (error"
            f" {_INVALID}): declare a shorter window, or a longer age"
        )
    if config.get("allow_rollup_hdrs") and config.get("deny_purge"):
        yield f"allow_rollup_hdrs needs purges, which deny_purge excludes (error {_INVALID}): declare one of them"
    if config.get("discard_new_per_subject"):
        if config.get("discard", "old") != "new":
            yield f'it has discard_new_per_subject, which needs discard "new" (error {_INVALID}): declare that'
        if (config.get("max_msgs_per_subject") or -1) < 1:
            yield (
                f"it has discard_new_per_subject, which needs a max_msgs_per_subject (error {_INVALID}): declare one"
            )
    if config.get("allow_atomic") and config.get("persist_mode") == "async":
        yield f"it has persist_mode async, which excludes atomic batches (error {_INVALID}): use another stream"
    if step.action == "update":
        if config.get("sealed"):
            yield f"the stream is sealed, and no update can unseal it (error {_INVALID}): use another stream"
        if config.get("mirror") and config.get("subjects"):
            yield f"the stream is a mirror, and a mirror has no subjects (error {_MIRROR_SUBJECTS}): use another stream"


async def _taken_subjects(connection: Connection, steps: Sequence[Step]) -> dict[str, list[str]]:
    """Return by stream which of its new subjects another stream captures at the time of its step."""

    async def capturing(subject: str) -> list[str]:
        return (await connection.api("STREAM.NAMES", {"subject": subject})).get("streams") or []

    wanted = [(step, subject) for step in steps for subject in _new_subjects(step)]
    names = await map_concurrently(capturing, [subject for _, subject in wanted])
    taken: dict[str, list[str]] = {}
    for (step, subject), found in zip(wanted, names, strict=True):
        given_up = {
            earlier.name
            for earlier in steps[: steps.index(step)]
            if not any(overlaps(subject, kept) for kept in earlier.config.get("subjects") or ())
        }
        if others := sorted({*found} - {step.name} - given_up):
            taken.setdefault(step.name, []).append(
                f"stream {', '.join(others)} already captures {subject}, and a subject has one stream (error"
                f" {_SUBJECT_TAKEN}): declare that stream's name instead, or other subjects"
            )
    return taken


def _new_subjects(step: Step) -> list[str]:
    subjects: list[str] = step.config.get("subjects") or []
    if step.action == "create":
        return subjects
    before = next((change.existing or () for change in step.differences if change.field == "subjects"), subjects)
    return [subject for subject in subjects if subject not in before]


def _is_new(step: Step, field: str) -> bool:
    return step.action == "create" or any(change.field == field for change in step.differences)


async def _is_single_server(connection: Connection) -> bool:
    """Return whether JetStream runs on one server, as far as this connection may find out.

    A server without a cluster refuses to move a stream's leader before it looks for the stream, of which there is none.
    """
    try:
        await connection.api(f"STREAM.LEADER.STEPDOWN.none-{uuid4().hex}")
    except ApiError as error:
        return error.err_code == _NOT_CLUSTERED
    except JetStreamProviderError:
        return False
    return False


class _Account:
    """The limits of an account, and what it uses of them after the steps so far."""

    def __init__(self, info: Mapping[str, Any]) -> None:
        self._info = info
        self.limits: Mapping[str, Any] = info.get("limits") or {}
        self._streams = 0
        self._reserved: dict[str, int] = {"file": 0, "memory": 0}

    def add(self, step: Step) -> Iterator[str]:
        """Count a step, and yield the limits that it exceeds."""
        if step.kind != "stream":
            return
        tier = (self._info.get("tiers") or {}).get(f"R{step.config.get('num_replicas', 1)}")
        usage = tier or self._info
        limits = usage.get("limits") or {}
        size, storage = step.config.get("max_bytes") or -1, step.config.get("storage", "file")
        if step.action == "create":
            self._streams += 1
            most = limits.get("max_streams", -1)
            if 0 < most < usage.get("streams", 0) + self._streams:
                yield f"the account may have {most} streams, and has them (error 10027): remove one, or raise the limit"
        if not _is_new(step, "max_bytes"):
            return
        if limits.get("max_bytes_required") and size <= 0:
            yield "the account requires max_bytes for every stream (error 10113): declare it"
        field, code = ("memory_max_stream_bytes", 10120) if storage == "memory" else ("storage_max_stream_bytes", 10122)
        if 0 < limits.get(field, -1) < size:
            yield f"max_bytes {size} exceeds the account's {limits[field]} for one stream (error {code}): declare less"
        if tier is None:
            yield from self._space(step, limits, size, storage)

    def _space(self, step: Step, limits: Mapping[str, Any], size: int, storage: str) -> Iterator[str]:
        kind, code = ("memory", 10028) if storage == "memory" else ("storage", 10047)
        before = next((change.existing for change in step.differences if change.field == "max_bytes"), 0) or 0
        needed = max(size, 0) - max(before, 0)
        if needed <= 0:
            return
        self._reserved[storage] += needed * step.config.get("num_replicas", 1)
        reserved = self._info.get(f"reserved_{kind}", 0)
        # Before 2.12 the server may have subtracted too much from an unsigned number.
        reserved = 0 if reserved >= 1 << 63 else reserved
        most = limits.get(f"max_{kind}", -1)
        if 0 <= most < reserved + self._reserved[storage]:
            yield (
                f"max_bytes {size} exceeds the account's {kind}: {reserved + self._reserved[storage]} of {most} bytes"
                f" would be reserved (error {code}): declare less, or raise the limit"
            )


async def _consumer_limits(connection: Connection, steps: Sequence[Step], limits: Mapping[str, Any]) -> dict[str, str]:
    """Return by consumer which limit of its stream, or of the account for each stream, its step would exceed."""
    refusals: dict[str, str] = {}
    streams = {step.name: step for step in steps if step.kind == "stream"}
    counts: dict[str, int] = {}
    for step in steps:
        if step.kind != "consumer" or step.action == "keep":
            continue
        stream = step.name.partition("/")[0]
        own = streams[stream].config
        if most := _lowest(own.get("max_consumers"), limits.get("max_consumers")):
            if stream not in counts:
                exists = streams[stream].action != "create"
                counts[stream] = len(await consumer_names(connection, stream)) if exists else 0
            counts[stream] += {"create": 1, "remove": -1}.get(step.action, 0)
            if step.action == "create" and counts[stream] > most:
                refusals[step.name] = (
                    f"stream {stream} may have {most} consumers, and would have {counts[stream]} (error 10026): remove"
                    " one, or raise the limit of the account or stream"
                )
        most = _lowest((own.get("consumer_limits") or {}).get("max_ack_pending"), limits.get("max_ack_pending"))
        wanted = step.config.get("max_ack_pending") or 0
        if most and wanted > most and _is_new(step, "max_ack_pending"):
            refusals[step.name] = (
                f"max_ack_pending {wanted} exceeds the limit of {most} of the account or stream (error 10121): declare"
                " at most that"
            )
    return refusals


def _lowest(*limits: int | None) -> int:
    """Return the lowest of several limits; 0 where there is none."""
    return min((limit for limit in limits if limit and limit > 0), default=0)
