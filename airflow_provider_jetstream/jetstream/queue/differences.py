"""Differences between the configuration of a stream or consumer and its declaration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.queue.end_evidence import sampled_percent
from airflow_provider_jetstream.jetstream.queue.server_fields import config_fields
from airflow_provider_jetstream.jetstream.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_UNLIMITED = config_fields("queue", unit="limit").keys()
_DURATIONS = config_fields("queue", unit="duration").keys() | config_fields("consumer", unit="duration").keys()
_SERVER_DEFAULTS = {"discard": "old", "storage": "file", "replay_policy": "instant", "max_deliver": -1}


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
        """The difference, for whoever finds that the server isn't as declared."""
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
