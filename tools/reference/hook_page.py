"""The page about the hook, with a blocking method and its awaitable twin in one section."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from airflow_provider_jetstream.hooks.jetstream import JetStreamHook
from tools.reference.arguments import function_arguments
from tools.reference.docstrings import own_docstring
from tools.reference.entries import argument_table, public_methods, result_parts
from tools.reference.markdown import anchor, code, heading, join, plain

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

FILE = "hook.md"


def hook_page(links: Mapping[str, str]) -> str:
    """Return the page."""
    methods = _methods()
    links = {**links, **{name: f"{FILE}#{anchor(name)}" for name in methods}}
    parts = [
        heading(1, "JetStreamHook"),
        code(f"{JetStreamHook.__module__}.JetStreamHook"),
        plain(own_docstring(JetStreamHook).text, links, FILE),
    ]
    for name, method in methods.items():
        if _is_twin(name, methods):
            continue
        text = own_docstring(method)
        parts += [
            heading(2, name),
            plain(text.text, links, FILE),
            _awaited(name, methods),
            argument_table(function_arguments(method), links, FILE),
            *result_parts(text, links, FILE),
        ]
    return join(parts)


def hook_problems() -> list[str]:
    """Return what the reference lacks about the hook's methods."""
    methods = _methods()
    return [
        f"JetStreamHook.{name}: {problem}"
        for name, method in methods.items()
        if not _is_twin(name, methods)
        for argument in function_arguments(method)
        for problem in argument.problems
    ]


def _methods() -> dict[str, Callable[..., Any]]:
    """Return the methods for tasks: those of a class are called by Airflow."""
    return {name: method for name, method in public_methods(JetStreamHook) if inspect.isfunction(method)}


def _awaited(name: str, methods: Mapping[str, object]) -> str:
    return next((f"Awaited: `{twin}`." for twin in (f"a{name}", f"a{name}_") if twin in methods), "")


def _is_twin(name: str, methods: Mapping[str, object]) -> bool:
    # The one of wait can't be named await.
    return name.startswith("a") and name[1:].rstrip("_") in methods
