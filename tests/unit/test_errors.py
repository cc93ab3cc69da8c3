from __future__ import annotations

import importlib
import pkgutil
import re
from typing import TYPE_CHECKING

import airflow_provider_jetstream
from airflow_provider_jetstream.jetstream import errors
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError

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
    """Collect the errors that a caller may see; a private class is a signal within its module."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, BaseException)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    }


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
