"""One public name in the reference: what it is, its arguments, results, errors and methods."""

from __future__ import annotations

import importlib
import inspect
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel

from tools.reference.arguments import (
    Argument,
    class_arguments,
    function_arguments,
    own_bases,
    passes_to_airflow,
)
from tools.reference.docstrings import DocText, attribute_texts, own_docstring
from tools.reference.markdown import anchor, code, heading, join, plain, table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

# What Airflow calls on a task; the task's page has the errors that they raise, and no other line about them.
_RUN_BY_AIRFLOW = ("execute", "poke", "execute_complete", "resume_execution")


class Entry(NamedTuple):
    """A public name.

    :param module: where users import it from
    :param with_methods: whether the methods are for users too, rather than for Airflow
    """

    module: str
    name: str
    with_methods: bool = True

    @property
    def item(self) -> Any:
        """The class or function itself."""
        return getattr(importlib.import_module(self.module), self.name)

    @property
    def arguments(self) -> list[Argument]:
        """Its arguments or fields."""
        item = self.item
        if not isinstance(item, type):
            return function_arguments(item)
        return [] if issubclass(item, Enum) or getattr(item, "_is_protocol", False) else class_arguments(item)

    @property
    def problems(self) -> list[str]:
        """What the reference lacks about it."""
        found = [] if own_docstring(self.item).summary else ["no description"]
        found += [problem for argument in self.arguments for problem in argument.problems]
        if isinstance(self.item, type):
            found += _member_problems(self.item) if issubclass(self.item, Enum) else []
            found += _method_problems(self.item) if self.with_methods else []
        return [f"{self.module}.{self.name}: {problem}" for problem in found]


def names_of(entries: list[Entry], page: str) -> dict[str, str]:
    """Return where the names of a page are described."""
    return {entry.name: f"{page}#{anchor(entry.name)}" for entry in entries}


def render_entry(entry: Entry, links: Mapping[str, str], page: str) -> str:
    """Return the section about a name."""
    item = entry.item
    documented = own_docstring(item)
    parts = [heading(2, entry.name), code(f"{entry.module}.{entry.name}"), plain(documented.text, links, page)]
    has_fields = isinstance(item, type) and (issubclass(item, BaseModel) or "__dataclass_params__" in vars(item))
    label = "field" if has_fields else "argument"
    parts.append(argument_table(entry.arguments, links, page, label))
    if isinstance(item, type):
        parts += _class_parts(item, links, page, with_methods=entry.with_methods)
        documented = _with_errors_of_runs(item, documented)
    parts += result_parts(documented, links, page)
    return join(parts)


def argument_table(arguments: list[Argument], links: Mapping[str, str], page: str, label: str = "argument") -> str:
    """Return the table of arguments; nothing where there are none."""
    if not arguments:
        return ""
    rows = [
        [code(argument.name), code(argument.type), argument.default, plain(argument.text, links, page)]
        for argument in arguments
    ]
    return table([label, "type", "default", "meaning"], rows)


def method_table(item: type, links: Mapping[str, str], page: str) -> str:
    """Return the table of a class's public methods and properties; nothing where it has none."""
    rows = [
        [code(_shown_method(name, member)), plain(_summary(member), links, page)]
        for name, member in public_methods(item)
    ]
    return table(["method or property", "meaning"], rows) if rows else ""


def result_parts(documented: DocText, links: Mapping[str, str], page: str) -> list[str]:
    """Return what is returned and raised."""
    parts = []
    if documented.returns:
        parts.append(f"Returns {plain(documented.returns, links, page).rstrip('.')}.")
    if documented.raises:
        rows = [
            [
                f"[{code(name)}]({links[name].removeprefix(page)})" if name in links else code(name),
                plain(text, links, page),
            ]
            for name, text in documented.raises.items()
        ]
        parts.append(table(["raises", "when"], rows))
    return parts


def public_methods(item: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties that this package gives to a class, in the order of their definition."""
    seen: set[str] = set()
    for base in own_bases(item):
        for name, member in vars(base).items():
            function = _function_of(member)
            if name.startswith("_") or name in seen or function is None:
                continue
            seen.add(name)
            yield name, member


def _class_parts(item: type, links: Mapping[str, str], page: str, *, with_methods: bool) -> Iterator[str]:
    if passes_to_airflow(item):
        yield "It takes the arguments of Airflow's own class too, such as `task_id`."
    if templated := getattr(item, "template_fields", ()):
        yield f"Templates: {', '.join(map(code, templated))}."
    texts = attribute_texts(item)
    if issubclass(item, Enum):
        rows = [[code(member.value), plain(texts.get(member.name, ""), links, page)] for member in item]
        yield table(["value", "meaning"], rows)
    elif texts:
        rows = [[code(name), plain(text, links, page)] for name, text in texts.items() if not name.startswith("_")]
        yield table(["attribute", "meaning"], rows)
    if with_methods:
        yield method_table(item, links, page)


def _member_problems(item: type[Enum]) -> list[str]:
    texts = attribute_texts(item)
    return [f"{member.name} has no text" for member in item if member.name not in texts]


def _method_problems(item: type) -> list[str]:
    return [f"{name}() has no text" for name, member in public_methods(item) if not _summary(member)]


def _summary(member: object) -> str:
    return own_docstring(_function_of(member)).summary


def _shown_method(name: str, member: object) -> str:
    function = _function_of(member)
    if isinstance(member, property) or function is None:
        return name
    parameters = [
        str(parameter.replace(annotation=parameter.empty, default=parameter.empty))
        + ("" if parameter.default is parameter.empty else "=…")
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name not in ("self", "cls")
    ]
    return f"{'await ' if inspect.iscoroutinefunction(function) else ''}{name}({', '.join(parameters)})"


def _function_of(member: object) -> Callable[..., Any] | None:
    match member:
        case property():
            return member.fget
        case classmethod() | staticmethod():
            function: Callable[..., Any] = member.__func__
            return function
        case _:
            return member if inspect.isfunction(member) else None


def _with_errors_of_runs(item: type, documented: DocText) -> DocText:
    raises = dict(documented.raises)
    for name in _RUN_BY_AIRFLOW:
        for base in own_bases(item):
            if function := vars(base).get(name):
                raises |= own_docstring(function).raises | raises
                break
    return DocText(documented.summary, documented.description, documented.arguments, documented.returns, raises)
