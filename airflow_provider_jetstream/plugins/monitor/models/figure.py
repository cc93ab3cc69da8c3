"""What all models of the page share: their base, and a number with its age and its certainty."""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, model_validator

from airflow_provider_jetstream.jetstream.client.wire_text import readable_text


class MonitorModel(BaseModel):
    """Base of the page's models: immutable, without unknown fields, and with text that JSON can hold."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _make_readable(cls, values: Any) -> Any:
        return _readable(values)


def _readable(value: Any) -> Any:
    # Text of the wire may stand for any bytes: in subjects, headers, names, and what is made of them.
    if isinstance(value, str):
        return readable_text(value)
    if isinstance(value, dict):
        return {_readable(name): _readable(item) for name, item in value.items()}
    return type(value)(map(_readable, value)) if type(value) in (list, tuple) else value


Certainty: TypeAlias = Literal["exact", "about", "at_least", "old", "unknown"]


@dataclass(frozen=True, slots=True)
class Figure:
    """A number, how old it is, and how certain.

    :param value: ``null`` exactly where it is unknown
    :param age: seconds since it was so; ``null`` where it is unknown
    :param certainty: ``exact`` it was so then; ``about`` counted from numbers of slightly different moments, not
        proved; ``at_least`` a part of it isn't known; ``old`` it was so then, and has changed since or may have;
        ``unknown``
    """

    value: int | float | None = None
    age: float | None = None
    certainty: Certainty = "unknown"


UNKNOWN = Figure()


def figure(value: float | None, age: float | None, certainty: Certainty = "exact") -> Figure:
    """Return a number with its age and certainty; an unknown one where either is missing."""
    return UNKNOWN if value is None or age is None else Figure(value, round(age, 1), certainty)
