"""The arguments of functions, classes and models: names, types, defaults, and what docstrings say of them."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from datetime import datetime, timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from airflow.sdk import BaseOperator
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from airflow_provider_jetstream.jetstream.units import NANOSECONDS, format_duration, format_size
from airflow_provider_jetstream.tasks import argument_types
from tools.reference.docstrings import own_docstring

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PACKAGE = "airflow_provider_jetstream"
REQUIRED = "required"

# They mean the same wherever they are, and need no more words than their types.
_SHARED = {
    "connection": "an open connection, as :func:`connect` gives it",
    "queue": "the declaration of the queue",
    "settings": "where the servers are, and as whom to connect",
    "session": "the Spark session",
}
# Airflow's configuration decides when the module is imported.
_CONFIGURED = {"deferrable": "`[operators] default_deferrable`"}
_ALIASES = {name: value for name, value in vars(argument_types).items() if name[0].isupper() and isinstance(value, str)}
_STARS: dict[int, str] = {inspect.Parameter.VAR_KEYWORD: "**", inspect.Parameter.VAR_POSITIONAL: "*"}


class Argument(NamedTuple):
    """One argument or field."""

    name: str
    type: str
    default: str
    text: str

    @property
    def problems(self) -> list[str]:
        """What the reference lacks about it."""
        return [f"{self.name} has no {part}" for part in ("type", "text") if not getattr(self, part)]


def function_arguments(function: Callable[..., Any], texts: dict[str, str] | None = None) -> list[Argument]:
    """Return a function's arguments, without ``self`` and ``cls``."""
    described = _SHARED | (own_docstring(function).arguments if texts is None else texts)
    arguments = [_argument(parameter, described) for parameter in _parameters(function)]
    if not (function.__module__ or "").startswith((f"{PACKAGE}.operators", f"{PACKAGE}.sensors")):
        return arguments
    return [argument._replace(type=_without_aliases(argument.type)) for argument in arguments]


def class_arguments(cls: type) -> list[Argument]:
    """Return what a class is made of: the fields of a model or dataclass, or its constructors' arguments.

    Where a constructor passes further arguments on, those of the base class follow, as far as this package defines it.
    """
    if issubclass(cls, BaseModel):
        return list(_model_fields(cls))
    if "__dataclass_params__" in vars(cls):
        return list(_dataclass_fields(cls))
    found: dict[str, Argument] = {}
    given: set[str] = set()
    texts = class_texts(cls)
    for base in own_bases(cls):
        constructor = vars(base).get("__init__")
        # Airflow sets one of its own on a class that has none and begins with a mixin.
        if constructor is None or not (constructor.__module__ or "").startswith(PACKAGE):
            continue
        arguments = function_arguments(constructor, texts)
        passes_on = [argument for argument in arguments if argument.name.startswith("**")]
        plain = [argument for argument in arguments if argument not in passes_on]
        found |= {argument.name: argument for argument in plain if argument.name not in found.keys() | given}
        if not passes_on:
            break
        given |= _given_to_base(constructor)
    # A task's arguments are given by name: those that it needs come first.
    return sorted(found.values(), key=lambda argument: argument.default != REQUIRED)


def class_texts(cls: type) -> dict[str, str]:
    """Return what the docstrings of a class and of its bases in this package say of its arguments."""
    texts: dict[str, str] = {}
    for base in own_bases(cls):
        texts = own_docstring(base).arguments | texts
    return texts


def own_bases(cls: type) -> list[type]:
    """Return a class and its bases, without those of other packages."""
    return [base for base in cls.__mro__ if base.__module__.startswith(PACKAGE)]


def passes_to_airflow(cls: type) -> bool:
    """Return whether a constructor takes the arguments of every Airflow task too."""
    return issubclass(cls, BaseOperator)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    parameters = inspect.signature(function).parameters.values()
    return [parameter for parameter in parameters if parameter.name not in ("self", "cls")]


def _argument(parameter: inspect.Parameter, texts: dict[str, str]) -> Argument:
    stars = _STARS.get(parameter.kind, "")
    default = REQUIRED if parameter.default is parameter.empty else default_text(parameter.default, parameter.name)
    type_ = "" if parameter.annotation is parameter.empty else _type_text(parameter.annotation)
    return Argument(
        stars + parameter.name,
        type_,
        "" if stars else default,
        texts.get(parameter.name, ""),
    )


def _model_fields(cls: type[BaseModel]) -> Iterator[Argument]:
    texts, types = class_texts(cls), _annotations(cls)
    for name, field in cls.model_fields.items():
        default = field.get_default(call_default_factory=True, validated_data={})
        shown = REQUIRED if default is PydanticUndefined else _model_default(default, types[name])
        yield Argument(name, types[name], shown, texts.get(name, ""))


def _dataclass_fields(cls: Any) -> Iterator[Argument]:
    texts, types = class_texts(cls), _annotations(cls)
    for field in dataclasses.fields(cls):
        if field.name.startswith("_"):
            continue
        factory = field.default_factory
        if factory is not dataclasses.MISSING:
            shown = default_text(factory())
        else:
            shown = REQUIRED if field.default is dataclasses.MISSING else default_text(field.default)
        yield Argument(field.name, types[field.name], shown if field.init else "", texts.get(field.name, ""))


def _annotations(cls: type) -> dict[str, str]:
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        found |= {name: _type_text(type_) for name, type_ in inspect.get_annotations(base).items()}
    return found


def _without_aliases(type_: str) -> str:
    """Return a type of an operator's argument with what its aliases stand for."""
    return re.sub(r"\w+", lambda found: _ALIASES.get(found[0], found[0]), type_)


def _type_text(annotation: object) -> str:
    return " ".join((annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)).split())


def _model_default(default: object, type_: str) -> str:
    if isinstance(default, int) and not isinstance(default, bool) and default > 0:
        if "Duration" in type_:
            return f'`"{format_duration(default)}"`'
        if "Size" in type_:
            return f'`"{format_size(default)}"`'
    return default_text(default)


def default_text(default: object, name: str = "") -> str:
    """Return a default as Markdown.

    :param name: the argument's, where the default may be one that Airflow's configuration sets
    """
    if name in _CONFIGURED:
        return _CONFIGURED[name]
    if inspect.isfunction(default):
        return "optional"
    match default:
        case datetime():
            return "now"
        case Enum():
            return default_text(default.value)
        case timedelta():
            shown = f'"{format_duration(round(default.total_seconds() * NANOSECONDS))}"'
        case BaseModel() | type():
            shown = f"{default.__name__ if isinstance(default, type) else type(default).__name__}()"
        case str():
            shown = f'"{default}"'
        case _ if dataclasses.is_dataclass(default):
            shown = f"{type(default).__name__}()"
        case _:
            shown = repr(default)
    return f"`{shown}`"


def _given_to_base(constructor: Callable[..., Any]) -> set[str]:
    """Return the arguments that a constructor itself gives to that of its base."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(constructor)))
    return {
        keyword.arg
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "super().__init__"
        for keyword in node.keywords
        if keyword.arg
    }
