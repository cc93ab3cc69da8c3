"""A queue's YAML file: read within limits (size, levels, values that its aliases stand for), and written."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, get_args

from airflow_provider_jetstream.jetstream.errors import QueueDeclarationError
from airflow_provider_jetstream.jetstream.limits import QUANTITY, QUEUE_FILE, QUEUE_FILE_LEVELS, QUEUE_FILE_VALUES
from airflow_provider_jetstream.jetstream.line_text import one_line, shown_value
from airflow_provider_jetstream.jetstream.queue.declaration import (
    PLACEHOLDER,
    Consumer,
    Declaration,
    Stream,
    partition_subject,
)
from airflow_provider_jetstream.jetstream.units import format_duration, format_size, parse_duration, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from pydantic.fields import FieldInfo


# A number to the base 60, as YAML 1.1 has them; making one takes a time that grows with the square of its length.
_SEXAGESIMAL: Final = re.compile(r"[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?")
# Companions that may be declared as true or false, and whose names follow from the queue's.
_SWITCHED = ("archive", "audit", "schedules", "attempts")
_WIDTH = 120
_LINE_BREAKS = "\x85\u2028\u2029"


def read_queue_file(path: Path) -> Any:
    """Read the content of a YAML file.

    :raises QueueDeclarationError: there is no such file, it isn't YAML, or more than any queue needs
    """
    try:
        with path.open("rb") as file:
            content = file.read(QUEUE_FILE + 1)
    except (OSError, ValueError) as error:
        # ValueError: the path has a null character.
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise QueueDeclarationError(str(path), [f"expected a YAML file at this path, found: {reason}"]) from None
    try:
        return parse_queue_yaml(content)
    except ValueError as error:
        raise QueueDeclarationError(str(path), [str(error)]) from None


def parse_queue_yaml(content: bytes) -> Any:
    """Parse YAML.

    :raises ValueError: it isn't YAML in UTF-8, or more than any queue needs
    """
    import yaml

    if len(content) > QUEUE_FILE:
        raise ValueError(f"expected a queue's file of at most {QUEUE_FILE} bytes, found more")
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        text = content.decode()
        _DocumentSize().check(yaml.parse(text, Loader=loader))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"expected YAML, found something else: {error}") from None
    try:
        return yaml.load(text, Loader=loader)  # noqa: S506
    except (yaml.YAMLError, OverflowError, ValueError) as error:
        # Not YAML's own: a number of thousands of digits, or a date that there isn't.
        raise ValueError(f"expected YAML, found something else: {one_line(str(error))}") from None


class _DocumentSize:
    """The levels and values of a document, counted before any value is made; an alias counts as its anchor does."""

    def __init__(self) -> None:
        self._values = 0
        # For each open collection the anchor that it has, and how many values began before it.
        self._opened: list[tuple[str | None, int]] = []
        self._anchors: dict[str, int] = {}

    def check(self, events: Iterable[Any]) -> None:
        """Count what a document consists of.

        :raises ValueError: it is more than any queue needs
        """
        for event in events:
            if tag := getattr(event, "tag", None):
                # Tags make other things than a declaration consists of.
                raise ValueError(f"expected values without tags, found {shown_value(tag)}: leave it out")
            self._count(event)
            if len(self._opened) > QUEUE_FILE_LEVELS:
                raise ValueError(f"expected at most {QUEUE_FILE_LEVELS} levels, found more")
            if self._values > QUEUE_FILE_VALUES:
                raise ValueError(f"expected at most {QUEUE_FILE_VALUES} values, with those of aliases, found more")

    def _count(self, event: Any) -> None:
        from yaml import events as kinds

        match event:
            case kinds.AliasEvent(anchor=anchor):
                if anchor not in self._anchors:
                    raise ValueError(f"expected an anchor before its alias, found *{anchor} within it or before")
                self._values += self._anchors[anchor]
            case kinds.ScalarEvent(anchor=anchor, value=text, implicit=(is_plain, _)):
                if is_plain and len(text) > QUANTITY and _SEXAGESIMAL.fullmatch(text):
                    raise ValueError(f"expected a number of at most {QUANTITY} characters, found {shown_value(text)}")
                self._values += 1
                if anchor:
                    self._anchors[anchor] = 1
            case kinds.CollectionStartEvent(anchor=anchor):
                self._opened.append((anchor, self._values))
                self._values += 1
            case kinds.CollectionEndEvent():
                anchor, before = self._opened.pop()
                if anchor:
                    self._anchors[anchor] = self._values - before


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
    """Return the declared values, without values that follow from the rest of the queue."""
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
    if isinstance(value, Declaration):
        return _values(value, {})
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
