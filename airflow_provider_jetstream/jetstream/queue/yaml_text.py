"""The declaration of a queue as YAML: what it declares, without what follows from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from airflow_provider_jetstream.jetstream.queue.declaration import Consumer
from airflow_provider_jetstream.jetstream.queue.partitions import PLACEHOLDER, partition_subject
from airflow_provider_jetstream.jetstream.queue.stream_declaration import Stream
from airflow_provider_jetstream.jetstream.units import format_duration, format_size, parse_duration, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pydantic.fields import FieldInfo

    from airflow_provider_jetstream.jetstream.queue.stream_declaration import Declaration

# Companions that may be declared as true or false, and whose names follow from the queue's.
_SWITCHED = ("archive", "audit", "schedules")
_WIDTH = 120
_LINE_BREAKS = "\x85\u2028\u2029"


def declared_values(queue: Stream, add_defaults: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """Return the values of JSON and YAML from which a work queue's declaration loads as an equal one.

    :param add_defaults: adds to a queue's values what follows from them, such as the subjects of its companions
    """
    declared = {field: getattr(queue, field) for field in type(queue).model_fields if field in queue.model_fields_set}
    companions = {field: value for field, value in declared.items() if isinstance(value, Stream)}
    plain = {field: value for field, value in declared.items() if field not in companions}
    named = {field: stream.name for field, stream in companions.items() if field not in _SWITCHED}
    unswitched = {field: value for field, value in plain.items() if field not in _SWITCHED}
    implied = add_defaults(unswitched | named)
    following = add_defaults(unswitched | named | {field: True for field in companions if field in _SWITCHED})
    values: dict[str, Any] = {}
    for field, value in declared.items():
        if field in companions:
            changed = _values(value, following[field])
            if field not in _SWITCHED:
                changed = {"name": value.name, **changed}
            if changed:
                values[field] = changed["name"] if changed.keys() == {"name"} else changed
            elif not implied.get(field):
                values[field] = True
        elif field in _SWITCHED:
            values[field] = False
        else:
            values[field] = _value(value, type(queue).model_fields[field])
    return values


def yaml_text(values: Mapping[str, Any]) -> str:
    """Return the values of a declaration as YAML.

    :param values: those of :func:`declared_values`
    """
    import yaml

    class Dumper(yaml.SafeDumper):
        """Quotes texts so that they load as they are."""

    def represent_text(dumper: Dumper, text: str) -> yaml.ScalarNode:
        # Only in double quotes a line break of Unicode is written so that it isn't folded into a space.
        breaks = any(character in text for character in _LINE_BREAKS)
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if breaks else None)

    Dumper.add_representer(str, represent_text)
    text: str = yaml.dump(dict(values), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=_WIDTH)
    return text


def _values(declaration: Declaration, following: Mapping[str, Any]) -> dict[str, Any]:
    """Return the declared values, without those that follow from the rest of the queue."""
    fields = {
        field: info for field, info in type(declaration).model_fields.items() if field in declaration.model_fields_set
    }
    declared = {field: getattr(declaration, field) for field in fields}
    return {
        field: _value(value, fields[field])
        for field, value in declared.items()
        if field not in following or _comparable(value) != _comparable(following[field])
    }


def _comparable(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _value(value: Any, field: FieldInfo) -> Any:
    if isinstance(value, tuple):
        if value and isinstance(value[0], Consumer):
            return [_consumer_values(consumer) for consumer in _undivided(value)]
        return [_value(item, field) for item in value]
    # -1 and 0 have meanings of their own, and no unit.
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        parsers = {*_parsers(field.annotation), *(getattr(item, "func", None) for item in field.metadata)}
        if parse_duration in parsers:
            return format_duration(value)
        if parse_size in parsers:
            text = format_size(value)
            return value if text.isdecimal() else text
    return dict(value) if isinstance(value, dict) else value


def _parsers(annotation: Any) -> Iterator[object]:
    """Return the functions that parse the values of a type, or of the types that it consists of."""
    yield from (getattr(item, "func", None) for item in getattr(annotation, "__metadata__", ()))
    for argument in get_args(annotation):
        yield from _parsers(argument)


def _consumer_values(consumer: Consumer) -> dict[str, Any]:
    values = _values(consumer, {})
    if len(consumer.filter_subjects) == 1:
        name, (subject,) = values.pop("name"), values.pop("filter_subjects")
        return {"name": name, "filter_subject": subject, **values}
    return values


def _undivided(consumers: Sequence[Consumer]) -> Iterator[Consumer]:
    """Return the consumers as they were declared: one for all of its partitions."""
    position = 0
    while position < len(consumers):
        first = consumers[position]
        count = first.partitions if first.partition == 0 and first.partitions else 1
        whole = _whole(consumers[position : position + count]) if first.partition == 0 else None
        yield whole or first
        position += count if whole else 1


def _whole(partitions: Sequence[Consumer]) -> Consumer | None:
    """Return the consumer whose partitions these are, if there is one."""
    first = partitions[0]
    declared = {field: getattr(first, field) for field in first.model_fields_set - {"partition"}}
    tokens = [subject.split(".") for subject in first.filter_subjects]
    for place in range(max(map(len, tokens), default=0)):
        filters = [
            ".".join([*parts[:place], PLACEHOLDER, *parts[place + 1 :]])
            for parts in tokens
            if place < len(parts) and parts[place] == "0"
        ]
        if len(filters) < len(tokens):
            continue
        numbered = tuple(
            tuple(partition_subject(subject, number) for subject in filters) for number in range(len(partitions))
        )
        if numbered == tuple(partition.filter_subjects for partition in partitions):
            whole = Consumer(**declared | {"name": first.base_name, "filter_subjects": filters})
            return whole if whole.per_partition() == tuple(partitions) else None
    return None
