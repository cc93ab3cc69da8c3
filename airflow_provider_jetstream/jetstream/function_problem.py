"""What keeps a function of an author from being called here: with one value, for a result that needs no awaiting."""

from __future__ import annotations

import inspect
from typing import Any


def function_problem(name: str, function: Any, parameter: str) -> str | None:
    """Return what is wrong with a function; ``None`` where nothing is, or where there is no function.

    :param name: the argument's
    :param parameter: what the function gets
    """
    if function is None:
        return None
    if not callable(function):
        return (
            f"expected a function that takes a {parameter} as {name}, found {type(function).__name__}: pass the"
            " function itself"
        )
    if _is_asynchronous(function):
        return (
            f"expected a function that returns its result as {name}, found {function!r}, which is asynchronous: write"
            " it with def, without async"
        )
    try:
        inspect.signature(function).bind(object())
    except TypeError as problem:
        return f"expected a function that takes one value, a {parameter}, as {name}, found {function!r}: {problem}"
    except ValueError:
        # A function of an extension module may have no signature.
        return None
    return None


def _is_asynchronous(function: Any) -> bool:
    """Return whether a call gives a coroutine or an asynchronous generator."""
    called = getattr(function, "func", function)
    method = getattr(called, "__call__", None)  # noqa: B004 - the method itself is looked at
    return any(inspect.iscoroutinefunction(part) or inspect.isasyncgenfunction(part) for part in (called, method))
