"""The arguments that type checkers are told of are those that constructors take, with the same types."""

from __future__ import annotations

import ast
import inspect
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import BaseOperator, BaseSensorOperator

from airflow_provider_jetstream.operators.cancel import JetStreamCancelOperator
from airflow_provider_jetstream.operators.consume import JetStreamConsumeOperator
from airflow_provider_jetstream.operators.provision import JetStreamProvisionOperator
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator
from airflow_provider_jetstream.operators.redrive import JetStreamRedriveOperator
from airflow_provider_jetstream.operators.spark import JetStreamDeadLetterReportOperator
from airflow_provider_jetstream.sensors.dead_letter import JetStreamDeadLetterSensor
from airflow_provider_jetstream.sensors.jobs import JetStreamJobsSensor
from airflow_provider_jetstream.sensors.queue import JetStreamQueueDrainedSensor
from airflow_provider_jetstream.tasks import argument_types
from airflow_provider_jetstream.triggers.message import JetStreamMessageTrigger

CLASSES: list[type[BaseOperator]] = [
    JetStreamCancelOperator,
    JetStreamConsumeOperator,
    JetStreamDeadLetterReportOperator,
    JetStreamDeadLetterSensor,
    JetStreamJobsSensor,
    JetStreamProvisionOperator,
    JetStreamPublishOperator,
    JetStreamQueueDrainedSensor,
    JetStreamRedriveOperator,
]
# An overload narrows them, so that arguments exclude each other.
NARROWED = {"engine", "wait_for_completion"}


def plain(annotation: str) -> str:
    """Return a type without what says only that it may be absent or is required."""
    text = annotation.removeprefix("Required[").removesuffix("]") if annotation.startswith("Required[") else annotation
    return text.removesuffix(" | None")


@cache
def typed_dict(name: str) -> dict[str, str]:
    """Return the keys of a typed dict and their types, as they are written."""
    found: dict[str, str] = {}
    tree = ast.parse(Path(str(argument_types.__file__)).read_text(encoding="utf-8"))
    (definition,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    for base in definition.bases:
        if isinstance(base, ast.Name) and base.id != "TypedDict":
            found |= typed_dict(base.id)
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = ast.unparse(node.annotation)
    return found


def written_arguments(function: ast.FunctionDef) -> dict[str, str]:
    """Return the arguments of a function and their types, those of its typed dict too."""
    own = {item.arg: ast.unparse(item.annotation) for item in function.args.kwonlyargs if item.annotation}
    rest = function.args.kwarg
    unpacked = ast.unparse(rest.annotation) if rest and rest.annotation else ""
    assert unpacked.startswith("Unpack["), f"{function.name} takes {unpacked}"
    return typed_dict(unpacked.removeprefix("Unpack[").removesuffix("]")) | own


def definitions(cls: type, name: str) -> list[ast.FunctionDef]:
    """Return the definitions of a method that type checkers see: its overloads, or else itself."""
    tree = ast.parse(Path(str(inspect.getsourcefile(cls))).read_text(encoding="utf-8"))
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls.__name__)
    typed = [node.body for node in body if isinstance(node, ast.If)]
    found = [
        node
        for statement in (body, *typed)
        for node in statement
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    overloads = [node for node in found if any(ast.unparse(mark) == "overload" for mark in node.decorator_list)]
    return overloads or found


def constructor_arguments(cls: type) -> dict[str, str]:
    """Return what the constructors of a class and its bases name, with the types as they are written."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if "__init__" in vars(base) and issubclass(base, BaseOperator):
            for parameter in inspect.signature(base.__init__).parameters.values():
                if parameter.kind is parameter.KEYWORD_ONLY:
                    found[parameter.name] = str(parameter.annotation)
    return found


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("method", ["__init__", "partial"])
def test_a_type_checker_sees_every_argument_that_a_constructor_takes(cls: type[BaseOperator], method: str) -> None:
    seen: dict[str, set[str]] = {}
    for definition in definitions(cls, method):
        for name, annotation in written_arguments(definition).items():
            seen.setdefault(name, set()).add(plain(annotation))
    taken = constructor_arguments(cls)
    assert seen.keys() == taken.keys()
    airflows = set(typed_dict("SensorOptions")) | {"task_id"}
    differing = {
        name: (types, taken[name])
        for name, types in seen.items()
        if name not in airflows | NARROWED and types != {plain(taken[name])}
    }
    assert differing == {}


@pytest.mark.parametrize(
    ("name", "cls"), [("TaskOptions", BaseOperator), ("SensorOptions", BaseSensorOperator)], ids=["task", "sensor"]
)
def test_airflows_own_arguments_are_those_of_this_airflow(name: str, cls: type[BaseOperator]) -> None:
    assert typed_dict(name).keys() | {"task_id"} == constructor_arguments(cls).keys()


def test_no_public_class_hides_arguments() -> None:
    hidden: dict[str, Any] = {}
    classes: list[type] = [*CLASSES, JetStreamMessageTrigger]
    for cls in classes:
        for definition in definitions(cls, "__init__"):
            rest = definition.args.kwarg
            if rest and rest.annotation and not ast.unparse(rest.annotation).startswith("Unpack["):
                hidden[cls.__name__] = ast.unparse(rest.annotation)
    assert hidden == {}
