"""A number of the page with its age and its certainty."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

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
