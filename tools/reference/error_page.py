"""The page about errors: the tree, and each class with its code, meaning and what to do."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

import airflow_provider_jetstream
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError, TerminalError, TransientError
from tools.reference.arguments import PACKAGE, Argument, function_arguments
from tools.reference.docstrings import own_docstring
from tools.reference.entries import argument_table
from tools.reference.error_actions import ACTIONS
from tools.reference.markdown import anchor, code, heading, join, plain, table

if TYPE_CHECKING:
    from collections.abc import Mapping

FILE = "errors.md"
_INTRO = (
    "Every error of this package derives from `JetStreamProviderError` and has a code that stays the same between"
    " releases. A *terminal* error fails an Airflow task at once (`AirflowFailException`); a *transient* one"
    " follows the task's `retries`; the kind of the rest depends on their cause. A message says what was"
    " expected, what was found and what to do."
)
_FACES = ("jetstream", "worker", "spark")


def error_classes() -> dict[str, type[JetStreamProviderError]]:
    """Return every error of the package by its name, in the order of the codes."""
    for module in pkgutil.walk_packages(airflow_provider_jetstream.__path__, f"{PACKAGE}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found: list[type[JetStreamProviderError]] = []
    left = [JetStreamProviderError]
    while left:
        error = left.pop()
        # Tests derive classes of their own.
        if error.__module__.startswith(PACKAGE) and error not in found:
            found.append(error)
            left += error.__subclasses__()
    return {error.__name__: error for error in sorted(found, key=lambda error: error.code)}


def error_links() -> dict[str, str]:
    """Return where each error is described."""
    return {name: f"{FILE}#{anchor(_title(error))}" for name, error in error_classes().items()}


def kind(error: type[JetStreamProviderError]) -> str:
    """Return whether another try may succeed."""
    for base, name in ((TerminalError, "terminal"), (TransientError, "transient")):
        if issubclass(error, base):
            return name
    return "depends"


def error_problems() -> list[str]:
    """Return what the reference lacks about errors."""
    errors = error_classes()
    found = [f"{name}: no action" for name in errors.keys() - ACTIONS.keys()]
    found += [f"{name}: an action and no such class" for name in ACTIONS.keys() - errors.keys()]
    for name, error in errors.items():
        found += [] if own_docstring(error).summary else [f"{name}: no meaning"]
        found += [f"{name}: {problem}" for argument in _arguments(error) for problem in argument.problems]
    return found


def error_page(links: Mapping[str, str]) -> str:
    """Return the page."""
    errors = error_classes()
    rows = [
        [f"[{error.code}](#{anchor(_title(error))})", code(name), _builtin(error), kind(error)]
        for name, error in errors.items()
    ]
    return join(
        [
            heading(1, "Errors"),
            _INTRO,
            table(["code", "error", "also", "kind"], rows),
            heading(2, "The tree"),
            f"```text\n{_tree(JetStreamProviderError, errors)}\n```",
            *(_section(error, links) for error in errors.values()),
        ]
    )


def _section(error: type[JetStreamProviderError], links: Mapping[str, str]) -> str:
    documented = own_docstring(error)
    return join(
        [
            heading(2, _title(error)),
            plain(documented.text, links, FILE),
            f"**What to do:** {ACTIONS.get(error.__name__, '')}",
            f"{_imported_from(error)} Derives from {', '.join(code(base.__name__) for base in error.__bases__)}.",
            argument_table(_arguments(error), links, FILE),
        ]
    )


def _arguments(error: type[JetStreamProviderError]) -> list[Argument]:
    constructor = vars(error).get("__init__")
    if constructor is None:
        return []
    described = own_docstring(error).arguments
    return function_arguments(constructor, {"message": "what happened"} | described)


def _title(error: type[JetStreamProviderError]) -> str:
    return f"{error.code} {error.__name__}"


def _imported_from(error: type[JetStreamProviderError]) -> str:
    for face in _FACES:
        module = importlib.import_module(f"{PACKAGE}.{face}")
        if error.__name__ in module.__all__:
            return f"Import it from `{module.__name__}`."
    return f"Defined in `{error.__module__}`."


def _builtin(error: type[JetStreamProviderError]) -> str:
    names = [
        base.__name__
        for base in error.__mro__
        if base.__module__ == "builtins" and base not in (Exception, BaseException, object)
    ]
    # A ConnectionError is an OSError too, as everybody knows.
    return ", ".join(code(name) for name in names if name != "OSError")


def _tree(error: type[JetStreamProviderError], errors: Mapping[str, type], depth: int = 0) -> str:
    lines = [f"{'    ' * depth}{error.code} {error.__name__}"]
    below = [child for child in errors.values() if child.__bases__[0] is error]
    return "\n".join([*lines, *(_tree(child, errors, depth + 1) for child in below)])
