"""Refuses misspelt and missing fields of a dataclass with an error of this package, rather than with Python's own."""

from __future__ import annotations

from dataclasses import fields
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from airflow_provider_jetstream.jetstream.errors import TerminalError

_Class = TypeVar("_Class", bound=type)


def checked_field_names(error: type[TerminalError]) -> Callable[[_Class], _Class]:
    """Return a decorator of a dataclass.

    :param error: what is raised where fields are missing, or unknown
    """

    def checked(decorated: _Class) -> _Class:
        kind: Any = decorated
        construct, names = kind.__init__, ", ".join(field.name for field in fields(kind))

        @wraps(construct)
        def __init__(self: object, *values: object, **named: object) -> None:  # noqa: N807 - it takes that one's place
            try:
                construct(self, *values, **named)
            except TypeError as problem:
                if "__init__() " not in str(problem):
                    raise
                _, _, found = str(problem).partition("__init__() ")
                raise error(f"expected fields of {kind.__name__} among {names}; found: {found}") from None

        kind.__init__ = __init__
        return decorated

    return checked
