from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import airflow_provider_jetstream

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROOT = Path(airflow_provider_jetstream.__file__).parent
_PACKAGE = _ROOT.name
_MODULES = sorted(_ROOT.rglob("*.py"))

_HEAVY = {"airflow", "pyspark", "pyarrow", "pandas"}
_SKINS = sorted(
    folder.name
    for folder in _ROOT.iterdir()
    if (folder / "__init__.py").exists() and folder.name not in ("jetstream", "worker", "spark")
)
_LONGEST_MODULE = 350


def _imports(module: Path) -> Iterator[str]:
    """Name what a module imports anywhere in it, in functions and for type checkers too."""
    package = (_PACKAGE, *module.relative_to(_ROOT).parent.parts)
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            # A name may be a module of its own: "from package import module".
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("import_module", "importlib.import_module", "__import__")
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield str(node.args[0].value)


def _floor(module: Path) -> str:
    parts = module.relative_to(_ROOT).parts
    return parts[0] if len(parts) > 1 else ""


def _own_floors(module: Path) -> set[str]:
    """Name the parts of this package that a module stands on."""
    names = [name.split(".") for name in _imports(module)]
    return {name[1] for name in names if name[0] == _PACKAGE and len(name) > 1 and (_ROOT / name[1]).is_dir()}


def _foreign(module: Path) -> set[str]:
    return {name.split(".")[0] for name in _imports(module)}


def _of(*floors: str) -> list[Path]:
    return [module for module in _MODULES if _floor(module) in floors]


def _name(module: Path) -> str:
    return str(module.relative_to(_ROOT))


@pytest.mark.parametrize("module", _of("jetstream"), ids=_name)
def test_the_ground_floor_stands_on_nothing_above_it(module: Path) -> None:
    assert _own_floors(module) <= {"jetstream"}
    assert _foreign(module) & _HEAVY == set()


@pytest.mark.parametrize("module", _of("worker", "spark"), ids=_name)
def test_worker_and_spark_stand_on_the_ground_floor_only(module: Path) -> None:
    assert _own_floors(module) <= {"jetstream", _floor(module)}
    assert "airflow" not in _foreign(module)
    assert _floor(module) == "spark" or _foreign(module) & _HEAVY == set()


@pytest.mark.parametrize("module", _of(*_SKINS), ids=_name)
def test_skins_never_talk_to_nats_themselves(module: Path) -> None:
    assert "nats" not in _foreign(module)


@pytest.mark.parametrize("module", _of(""), ids=_name)
def test_what_lies_beside_the_floors_is_light(module: Path) -> None:
    assert _foreign(module) <= {"__future__", "typing", _PACKAGE}


@pytest.mark.parametrize("module", _MODULES, ids=_name)
def test_a_module_says_what_is_inside_and_stays_small(module: Path) -> None:
    parts = {part.removesuffix(".py").strip("_").lower() for part in module.relative_to(_ROOT).parts}
    assert parts & {"utils", "util", "common", "helpers", "helper", "misc"} == set()
    assert len(module.read_text(encoding="utf-8").splitlines()) < _LONGEST_MODULE


def test_the_rule_looks_at_every_floor() -> None:
    assert {"jetstream", "worker"} <= {_floor(module) for module in _MODULES}
    assert {"hooks", "operators", "sensors", "triggers"} <= set(_SKINS)


@pytest.mark.parametrize(
    ("line", "floors", "foreign"),
    [
        ("import airflow.sdk", set(), {"airflow"}),
        ("def f():\n    from airflow import DAG", set(), {"airflow"}),
        ("from airflow_provider_jetstream.hooks import jetstream", {"hooks"}, {_PACKAGE}),
        ("from airflow_provider_jetstream import hooks", {"hooks"}, {_PACKAGE}),
        ("from ..hooks.jetstream import JetStreamHook", {"hooks"}, {_PACKAGE}),
        ("from .. import operators", {"operators"}, {_PACKAGE}),
        ("from . import errors", {"jetstream"}, {_PACKAGE}),
        ("import importlib\nimportlib.import_module('pyspark.sql')", set(), {"importlib", "pyspark"}),
        ("import json", set(), {"json"}),
    ],
)
def test_the_rule_sees_an_import_in_every_spelling(
    line: str, floors: set[str], foreign: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / _PACKAGE
    for floor in ("jetstream", "hooks", "operators"):
        (root / floor).mkdir(parents=True)
    monkeypatch.setattr(f"{__name__}._ROOT", root)
    module = root / "jetstream" / "module.py"
    module.write_text(line)
    assert _own_floors(module) == floors
    assert _foreign(module) == foreign
