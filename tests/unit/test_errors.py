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

_ROW = re.compile(r"^(?P<branch>[ │├└─]*)(?P<name>[A-Z]\w+)(?: {2,}(?P<remark>.*))?$")
_INDENT = 4


def _drawn() -> Iterator[tuple[str, str | None, list[str]]]:
    """Read class, parent and further bases from the tree at the top of the module."""
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        row = _ROW.match(line.removeprefix("    "))
        if row is None or not line.startswith("    "):
            continue
        depth = len(row["branch"]) // _INDENT
        del above[depth:]
        also = re.findall(r"also (\w+)", row["remark"] or "")
        yield row["name"], above[-1] if above else None, also
        above.append(row["name"])


def _defined() -> dict[str, type[Exception]]:
    return {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception) and value.__module__ == errors.__name__
    }


def _package_modules() -> Iterator[str]:
    package = airflow_provider_jetstream
    yield package.__name__
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        yield module.name


def _package_exceptions() -> dict[str, type[BaseException]]:
    found: dict[str, type[BaseException]] = {}
    for module in map(importlib.import_module, _package_modules()):
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, BaseException) and value.__module__ == module.__name__:
                found[f"{module.__name__}.{value.__qualname__}"] = value
    return found


def test_the_tree_draws_every_class_and_no_other() -> None:
    drawn = [name for name, _, _ in _drawn()]
    assert sorted(drawn) == sorted(_defined())
    assert drawn[0] == "JetStreamProviderError"


def test_every_class_has_exactly_the_bases_that_the_tree_draws() -> None:
    drawn = {name: {parent, *also} if parent else {"Exception", *also} for name, parent, also in _drawn()}
    actual = {name: {base.__name__ for base in error.__bases__} for name, error in _defined().items()}
    assert actual == drawn


def test_there_is_one_root() -> None:
    roots = [name for name, error in _defined().items() if JetStreamProviderError not in error.__mro__[1:]]
    assert roots == ["JetStreamProviderError"]


def test_every_class_has_a_code_of_its_own() -> None:
    codes = {name: vars(error).get("code") for name, error in _defined().items()}
    assert all(re.fullmatch(r"JS\d{3}", code or "") for code in codes.values()), codes
    assert len(set(codes.values())) == len(codes)


def test_no_error_is_both_terminal_and_transient() -> None:
    both = [
        name
        for name, error in _defined().items()
        if issubclass(error, errors.TerminalError) and issubclass(error, errors.TransientError)
    ]
    assert both == []


def test_every_error_class_of_the_package_derives_from_the_root() -> None:
    found = _package_exceptions()
    strays = {path for path, error in found.items() if not issubclass(error, JetStreamProviderError)}
    assert strays == set()
    assert len(found) > len(_defined()) - 1


def test_every_error_class_of_the_ground_floor_lives_in_one_module() -> None:
    elsewhere = [
        path
        for path in _package_exceptions()
        if path.startswith("airflow_provider_jetstream.jetstream.") and not path.startswith(f"{errors.__name__}.")
    ]
    assert elsewhere == []


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
