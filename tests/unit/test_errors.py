from __future__ import annotations

import importlib
import pkgutil
import re
from typing import TYPE_CHECKING

import pytest

import airflow_provider_jetstream
from airflow_provider_jetstream.jetstream import errors
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError
from airflow_provider_jetstream.jetstream.publishing import report

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

_PACKAGE = airflow_provider_jetstream.__name__
_ROW = re.compile(r"^(?P<branch>[ │├└─]*)(?P<name>[A-Z]\w+)(?: {2,}(?P<remark>.*))?$")
_INDENT = 4


def _package_modules() -> Iterator[ModuleType]:
    yield airflow_provider_jetstream
    for module in pkgutil.walk_packages(airflow_provider_jetstream.__path__, f"{_PACKAGE}."):
        yield importlib.import_module(module.name)


def _exceptions_of(module: ModuleType) -> dict[str, type[BaseException]]:
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, BaseException) and value.__module__ == module.__name__
    }


def _trees() -> dict[str, ModuleType]:
    """Find the module of errors of the core, of the worker and of Spark."""
    return {module.__name__: module for module in _package_modules() if module.__name__.rpartition(".")[2] == "errors"}


def _classes_of_tree(tree: ModuleType) -> dict[str, type[BaseException]]:
    """Collect the errors of a tree's module, and for the core those that are defined beside the report they carry."""
    return _exceptions_of(tree) | (_exceptions_of(report) if tree is errors else {})


def _rows(module: ModuleType) -> Iterator[tuple[str, str | None, list[str]]]:
    """Read class, parent and further bases from the tree at the top of a module."""
    above: list[str] = []
    for line in (module.__doc__ or "").splitlines():
        row = _ROW.match(line.removeprefix("    "))
        if row is None or not line.startswith("    "):
            continue
        depth = len(row["branch"]) // _INDENT
        del above[depth:]
        also = re.findall(r"also (\w+)", row["remark"] or "")
        yield row["name"], above[-1] if above else None, also
        above.append(row["name"])


def _defined() -> dict[str, type[BaseException]]:
    """Collect the errors of the whole package, by their full names."""
    return {
        f"{module.__name__}.{name}": error
        for module in _package_modules()
        for name, error in _exceptions_of(module).items()
    }


def test_the_core_and_the_worker_have_trees() -> None:
    assert {f"{_PACKAGE}.jetstream.errors", f"{_PACKAGE}.worker.errors"} <= set(_trees())
    assert [name for name, module in _trees().items() if not _exceptions_of(module)] == []


@pytest.mark.parametrize("part", sorted(_trees()))
def test_a_tree_draws_every_class_of_its_module(part: str) -> None:
    module = _trees()[part]
    names = [name for name, _, _ in _rows(module)]
    assert len(names) == len(set(names))
    assert set(_classes_of_tree(module)) <= set(names)


@pytest.mark.parametrize("part", sorted(_trees()))
def test_other_classes_in_a_tree_are_base_classes_of_the_core(part: str) -> None:
    module = _trees()[part]
    foreign = {name: parent for name, parent, _ in _rows(module) if name not in _classes_of_tree(module)}
    assert {name: getattr(module, name) for name in foreign} == {name: getattr(errors, name) for name in foreign}
    # A class of this part derives from it, and it derives from the class above it.
    assert set(foreign) <= {parent for _, parent, _ in _rows(module)}
    assert [
        (name, parent)
        for name, parent in foreign.items()
        if parent is not None and getattr(errors, parent) not in getattr(errors, name).__bases__
    ] == []


@pytest.mark.parametrize("part", sorted(_trees()))
def test_every_class_has_exactly_the_bases_that_its_tree_draws(part: str) -> None:
    module = _trees()[part]
    own = _classes_of_tree(module)
    expected = {
        name: {parent, *also} if parent else {"Exception", *also} for name, parent, also in _rows(module) if name in own
    }
    assert {name: {base.__name__ for base in error.__bases__} for name, error in own.items()} == expected


def test_there_is_one_root() -> None:
    roots = [path for path, error in _defined().items() if JetStreamProviderError not in error.__mro__[1:]]
    assert roots == [f"{errors.__name__}.JetStreamProviderError"]
    assert next(name for name, _, _ in _rows(errors)) == "JetStreamProviderError"


def test_every_class_of_the_package_has_a_code_of_its_own() -> None:
    codes = {path: vars(error).get("code") for path, error in _defined().items()}
    assert all(re.fullmatch(r"JS\d{3}", code or "") for code in codes.values()), codes
    assert len(set(codes.values())) == len(codes), sorted(codes.items(), key=lambda item: item[1] or "")


def test_no_error_is_both_terminal_and_transient() -> None:
    both = [
        path
        for path, error in _defined().items()
        if issubclass(error, errors.TerminalError) and issubclass(error, errors.TransientError)
    ]
    assert both == []


def test_every_error_class_is_drawn_in_a_tree() -> None:
    drawn = {
        f"{error.__module__}.{name}" for module in _trees().values() for name, error in _classes_of_tree(module).items()
    }
    assert set(_defined()) == drawn


def test_an_api_error_keeps_the_servers_codes() -> None:
    error = errors.ApiError(404, 10059, "stream not found", "STREAM.INFO.q")
    assert (error.status, error.err_code, error.description, error.subject) == (
        404,
        10059,
        "stream not found",
        "STREAM.INFO.q",
    )
    assert str(error) == "stream not found (status 404, error 10059) in answer to STREAM.INFO.q"


def test_a_declaration_error_lists_its_problems_by_line() -> None:
    error = errors.QueueDeclarationError("q", ["one", "two"])
    assert str(error) == "the declaration of work queue 'q' can't be used:\n  - one\n  - two"
    assert error.problems == ("one", "two")
