"""Tests outside tests/unit hold on to faces: what lies behind them may be rebuilt without them.

A face is a public name of the package, the wire contract, or a name of testbed, whose module ``face`` has what tests
need of the inside. A file that imports or names anything else of the package is behind the faces, with all its lines.
"""

from __future__ import annotations

import ast
import importlib
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from airflow_provider_jetstream.provider_info import get_provider_info

if TYPE_CHECKING:
    from collections.abc import Iterator

_PACKAGE = "airflow_provider_jetstream"
_TESTS = Path(__file__).parents[1]
# The least share of lines on faces.
_FLOOR = 0.85
# What tests need of the inside; each of its names is one that a rebuilt room has to keep.
_FACADE, _MOST_NAMES = ("face", "page", "spark_face"), 35
# Faces that export their names lazily: all others of the rooms below them are inner.
_LAZY = ("jetstream", "worker", "spark")
_MODULES = {
    *(f"{room}.errors" for room in ("dev", *_LAZY)),
    "jetstream.contract",
    "plugins.monitor",
    "provider_info",
    # What the commands start, and what they and make demo do.
    "command.program",
    "worker.cli",
    # Names of Airflow that it has in several places.
    "airflow_compat",
}
# What Airflow loads is named in the provider's information; a DAG is made of reprocessing; the others have own pages.
_PREFIXES = ("dev", "reprocessing", "testing")
_NAMED_IN_TEXT = re.compile(rf"\b{_PACKAGE}((?:\.\w+)+)")


class _Name(NamedTuple):
    """A name of the package as a test uses it, without the package's own name."""

    module: str
    name: str

    def __str__(self) -> str:
        return ".".join(filter(None, self))


@cache
def _provider_modules() -> frozenset[str]:
    """Return the modules that the provider's information names, whole or with a class or function of theirs."""
    found = re.findall(rf"{_PACKAGE}\.([a-z_.]*[a-z])", str(get_provider_info()))
    return frozenset(found) | {module.rpartition(".")[0] for module in found}


@cache
def _exported(room: str) -> frozenset[str]:
    return frozenset(importlib.import_module(f"{_PACKAGE}.{room}").__all__)


def _is_face(used: _Name) -> bool:
    module, name = used
    if name.startswith("_") and name != "__version__":
        return False
    if module in _LAZY:
        return name in _exported(module) or f"{module}.{name}" in _MODULES
    whole = str(used)
    return (
        whole in ("", "__version__")
        or bool({module, whole} & (_MODULES | _provider_modules()))
        or whole.partition(".")[0] in _PREFIXES
        or whole in _LAZY
    )


def _used(source: str) -> Iterator[_Name]:
    """Yield what a file imports of the package, or names within a text: a place to patch, or the code of a process."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == _PACKAGE:
            module = str(node.module).removeprefix(_PACKAGE).removeprefix(".")
            yield from (_Name(module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            dotted = [alias.name.removeprefix(_PACKAGE) for alias in node.names if alias.name.startswith(_PACKAGE)]
            yield from map(_name, dotted)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            for module, names in re.findall(rf"from {_PACKAGE}\.([\w.]+) import ([\w, ]+)", node.value):
                yield from (_Name(module, name) for name in re.findall(r"\w+", names.replace(" as ", ",")))
            rest = re.sub(rf"from {_PACKAGE}[\w.]* import", "", node.value)
            yield from map(_name, filter(_is_module, _NAMED_IN_TEXT.findall(rest)))


def _is_module(dotted: str) -> bool:
    """Return whether a text names a place of the package, and not a file such as its zip."""
    room = _TESTS.parent / _PACKAGE / dotted.split(".")[1]
    return room.is_dir() or room.with_suffix(".py").exists()


def _name(dotted: str) -> _Name:
    module, _, name = dotted.removeprefix(".").rpartition(".")
    return _Name(module, name)


def _inner_names(source: str) -> list[str]:
    return sorted({str(used) for used in _used(source) if not _is_face(used)})


def test_tests_hold_on_to_faces() -> None:
    on_faces = everything = 0
    behind: list[tuple[int, str]] = []
    for file in sorted(_TESTS.glob("**/*.py")):
        place = file.relative_to(_TESTS)
        if place.parts[0] == "unit":
            continue
        source = file.read_text()
        lines = source.count("\n")
        everything += lines
        if names := _inner_names(source):
            behind.append((lines, f"{lines:4} {place}: {', '.join(names)}"))
        else:
            on_faces += lines
    share = on_faces / everything
    listed = "\n".join(text for _, text in sorted(behind, reverse=True))
    print(f"{share:.1%} of {everything} lines hold on to faces; {len(behind)} files don't:\n{listed}")
    assert share >= _FLOOR, f"{share:.1%} of the lines hold on to faces, expected {_FLOOR:.0%}; these don't:\n{listed}"


def _testbed_imports(source: str) -> set[str]:
    """Return what a file imports of modules of testbed, as ``testbed.module.name``."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    modules = [node for node in found if (node.module or "").startswith("testbed")]
    return {f"{node.module}.{alias.name}" for node in modules for alias in node.names}


def _all(source: str) -> list[str]:
    """Return the value of ``__all__``."""
    assigned = [node for node in ast.parse(source).body if isinstance(node, ast.Assign)]
    (value,) = [node.value for node in assigned if getattr(node.targets[0], "id", "") == "__all__"]
    return list(ast.literal_eval(value))


def test_the_facade_has_few_names_and_no_other_module_of_testbed_hands_on_inner_names() -> None:
    testbed = {file.stem: file.read_text() for file in (_TESTS.parent / "testbed").glob("*.py")}
    used = {name for file in _TESTS.glob("**/*.py") for name in _testbed_imports(file.read_text())}
    names = {f"testbed.{module}.{name}" for module in _FACADE for name in _all(testbed[module])}
    assert len(names) <= _MOST_NAMES, sorted(names)
    assert sorted(names - used) == [], "no test uses these"
    for module in testbed.keys() - {*_FACADE}:
        inner = {f"testbed.{module}.{name.name}" for name in _used(testbed[module]) if not _is_face(name)}
        assert sorted(inner & used) == []
