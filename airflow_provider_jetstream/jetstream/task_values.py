"""Objects that a task returns to another one: a serialiser's methods, without the serialiser.

Airflow's serialiser of XComs looks for ``serialize`` and ``deserialize`` by name. A report becomes its JSON; a value,
such as a job, comes back as an equal one. What it stores consists of JSON's types and of other such values.
"""

from __future__ import annotations

import json
import sys
from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import MISSING, Field, fields, is_dataclass
from datetime import datetime, timedelta
from enum import Enum
from importlib import import_module
from types import NoneType
from typing import Any, ClassVar, Final, Self

from airflow_provider_jetstream.jetstream.errors import ArgumentError, JetStreamProviderError
from airflow_provider_jetstream.jetstream.units import parse_duration

_VERSION = 1


class TaskReport:
    """Part of a report, a dataclass: what another task gets of it is its JSON."""

    __slots__ = ()
    __version__: ClassVar[int] = _VERSION

    def as_json(self) -> dict[str, Any]:
        """Return the report in JSON's types."""
        return {field.name: json_value(getattr(self, field.name)) for field in _fields(self)}

    def serialize(self) -> dict[str, Any]:
        """Return what an XCom stores."""
        # Tuples and whole numbers as keys would need serialisers of their own.
        values: dict[str, Any] = json.loads(json.dumps(self.as_json()))
        return values

    @staticmethod
    def deserialize(data: Any, version: int) -> Any:
        """Return what another task gets: the report's JSON.

        :param version: of its form
        """
        _require_version(version, "a report")
        return data


class TaskValue:
    """Part of a dataclass whose values come back as equal ones."""

    __slots__ = ()
    __version__: ClassVar[int] = _VERSION

    def serialize(self) -> dict[str, Any]:
        """Return what an XCom stores: the fields that aren't as by default.

        :raises ArgumentError: one of them can't be stored
        """
        values = given_fields(self)
        for name, value in values.items():
            if callable(value):
                raise ArgumentError(
                    f"expected a {type(self).__name__} that another task can get, found a function as {name}: make it"
                    " in the task that uses it"
                )
        return {name: _packed(value) for name, value in values.items()}

    @classmethod
    def deserialize(cls, data: Any, version: int) -> Self:
        """Return an equal value.

        :param version: of the form in which it is stored
        :raises ArgumentError: another version of this package has stored it, or something else
        """
        _require_version(version, cls.__name__)
        try:
            return cls(**{name: _unpacked(value) for name, value in data.items()})
        except JetStreamProviderError:
            raise
        except (AttributeError, LookupError, TypeError, ValueError) as problem:
            raise ArgumentError(
                f"expected a {cls.__name__} as this version of the package stores one, found another form ({problem}):"
                " install the same version in all components"
            ) from None


def packed_body(body: Any) -> Any:
    """Return a job's body as an XCom stores it: JSON as text, which Airflow's serialiser doesn't change.

    A body that is no JSON stays as it is. Airflow stores a DAG with the same methods: there, it may hold the result of
    another task; otherwise the error comes where the job is published.
    """
    if isinstance(body, str | bytes):
        return _packed(body)
    try:
        return {_PACKED: "json", "text": json.dumps(body, allow_nan=False, separators=(",", ":"))}
    except (TypeError, ValueError, RecursionError):
        return {_PACKED: "value", "text": body}


def _readable(content: bytes) -> Any:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return {"base64": b64encode(content).decode()}


# A key that no mapping of a public class has: it is no name of a header.
_PACKED: Final = "packed as"
_TO_TEXT: Final[tuple[tuple[type, str, Callable[[Any], str]], ...]] = (
    (bytes, "base64", lambda value: b64encode(value).decode()),
    (datetime, "time", lambda value: value.isoformat()),
    (timedelta, "microseconds", lambda value: str(parse_duration(value) // 1_000)),
)
_FROM_TEXT: Final[Mapping[str, Callable[[Any], Any]]] = {
    "base64": b64decode,
    "time": datetime.fromisoformat,
    "microseconds": lambda text: timedelta(microseconds=int(text)),
    "zone": lambda name: import_module("zoneinfo").ZoneInfo(name),
    "json": json.loads,
    "value": lambda value: value,
}
_TO_JSON: Final[tuple[tuple[Any, Callable[[Any], Any]], ...]] = (
    (Enum, lambda value: value.value),
    # Sentences with a name are texts, too.
    (str, str),
    (bool | int | float | NoneType, lambda value: value),
    (datetime, lambda value: value.isoformat()),
    (timedelta, lambda value: value.total_seconds()),
    (bytes, _readable),
    (Mapping, lambda value: {str(name): json_value(item) for name, item in value.items()}),
    (AbstractSet, lambda value: sorted(map(json_value, value))),
    (list | tuple | array, lambda value: [json_value(item) for item in value]),
)


def json_value(value: Any) -> Any:
    """Return a report's value in JSON's types; text of what has no such form."""
    if hasattr(value, "as_json"):
        return value.as_json()
    if is_dataclass(value):
        return {field.name: json_value(getattr(value, field.name)) for field in _fields(value)}
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    convert = next((convert for kind, convert in _TO_JSON if isinstance(value, kind)), str)
    return convert(value)


def _packed(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    for kind, name, to_text in _TO_TEXT:
        if isinstance(value, kind):
            return {_PACKED: name, "text": to_text(value)}
    # By its module: importing that takes as long as the rest of this one, and few values are time zones.
    zones: Any = sys.modules.get("zoneinfo")
    if zones and isinstance(value, zones.ZoneInfo):
        return {_PACKED: "zone", "text": value.key}
    if isinstance(value, Mapping):
        return {name: _packed(item) for name, item in value.items()}
    return type(value)(map(_packed, value)) if type(value) in (list, tuple) else value


def _unpacked(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_unpacked, value))
    if isinstance(value, dict):
        is_packed = _PACKED in value
        return _FROM_TEXT[value[_PACKED]](value["text"]) if is_packed else {k: _unpacked(v) for k, v in value.items()}
    return value


def given_fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that aren't as by default."""
    return {field.name: getattr(value, field.name) for field in _fields(value) if not _is_default(value, field)}


def _fields(value: Any) -> list[Field[Any]]:
    return [field for field in fields(value) if field.init]


def _is_default(value: Any, field: Field[Any]) -> bool:
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    held = getattr(value, field.name)
    return held is default or (type(held) is type(default) and bool(held == default))


def _require_version(version: int, what: str) -> None:
    if version > _VERSION:
        raise ArgumentError(
            f"expected {what} in form {_VERSION} at most, found {version}: a later version of this package has stored"
            " it; install the same one in all components"
        )
