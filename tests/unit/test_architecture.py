"""The rules that docs/architecture.md states: what may import what, and how a module is named and sized.

Each rule returns its offenders. It is applied to the package, and to a small tree that breaks it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import nats
import pytest
from source_code import Package, circles, package_of_tests

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from source_code import Module

_FORBIDDEN_IN_CORE = {"airflow", "pyspark", "pyarrow", "pandas", "numpy"}
# Beside the rooms, and for skins only.
_AIRFLOW_MODULES = {"airflow_compat"}
_BELOW_SKINS = ("jetstream", "worker", "spark", "command")
# The module that starts what stands above it: the sub-command that starts Airflow and workers as processes.
_STARTS = {"command.dev_command": {"dev"}}
_MAX_LINES = 800
# All evidence about one job, and the rules in the order in which they are asked.
_LONGER: dict[str, int] = {}
_VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}

# From the lowest level to the highest. A room imports its own level and those below.
_CORE_LEVELS = (
    {
        "errors",
        "contract",
        "units",
        "advisories",
        "origin",
        "limits",
        "line_text",
        "function_problem",
        "field_names",
        "task_values",
    }
    | {"needed_permissions", "evidence"},
    {"client"},
    {"queue"},
    {"documents"},
    {"archive", "attempts", "audit", "publishing", "cancellation", "roles"},
    {"dead_letters", "mover"},
    {"waiting"},
    {"publication", "redrive", "inspection", "retries"},
    # A consumer that is created would run dead letters again: they are found, and parked, before.
    {"provisioning"},
)
_SPARK_LEVELS = (
    {"errors", "connection_options", "connections"},
    {"source"},
    {"dead_letters"},
    {"bulk_redrive"},
    {"application"},
)

# Modules of the core that may share their name: each is the report of its room's operation, or one of the two
# implementations of a connection.
_SHARED_MODULE_NAMES = {
    "__init__": "every room",
    "connection": "client, client.blocking",
    "report": "publishing, redrive, waiting",
}


# One process parses the package for all of them.
pytestmark = pytest.mark.group("source code")


@pytest.fixture(scope="module")
def package() -> Package:
    return package_of_tests()


def _skins(package: Package) -> list[str]:
    rooms = {folder.name for folder in package.root.iterdir() if (folder / "__init__.py").exists()}
    return sorted(rooms.difference(_BELOW_SKINS))


def _own_rooms(package: Package, module: Module) -> set[str]:
    return {package.modules[name].room for name in package.own_imports(module)} - {""}


def _above(package: Package, module: Module) -> set[str]:
    """Return what a module below the skins imports from neither the core nor its own room."""
    rooms = _own_rooms(package, module) - {"jetstream", module.room} - _STARTS.get(module.name, set())
    return rooms | package.own_imports(module) & _AIRFLOW_MODULES


def core_stands_alone(package: Package) -> list[str]:
    return [
        f"{module.name} imports {', '.join(sorted(wrong))}"
        for module in package.in_rooms("jetstream")
        if (wrong := _above(package, module) | package.distributions(module) & _FORBIDDEN_IN_CORE)
    ]


def middle_stands_on_core(package: Package) -> list[str]:
    return [
        f"{module.name} imports {', '.join(sorted(wrong))}"
        for module in package.in_rooms("worker", "spark", "command")
        if (
            wrong := _above(package, module)
            | package.distributions(module) & ({"airflow"} if module.room == "spark" else _FORBIDDEN_IN_CORE)
        )
    ]


def skins_leave_nats_to_the_core(package: Package) -> list[str]:
    return [module.name for module in package.in_rooms(*_skins(package)) if "nats" in package.distributions(module)]


def private_names_of_nats_py() -> set[str]:
    """Return the private names of nats-py's classes and functions, those of its instances included."""
    names: set[str] = set()
    for folder in ("aio", "js", "protocol"):
        for path in (Path(nats.__file__).parent / folder).rglob("*.py"):
            names |= _names(ast.parse(path.read_text(encoding="utf-8")))
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def _names(tree: ast.AST, *, own: bool = True) -> set[str]:
    """Return the names of attributes, functions and keyword arguments, those in texts included (``getattr``).

    :param own: whether those of ``self`` count, as where a class may derive from one of nats-py's
    """
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self")) if not own:
                pass
            case ast.Attribute(attr=name) | ast.keyword(arg=str(name)) | ast.Constant(value=str(name)):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if own:
                names.add(name)
    return names


def used_private_names_of_nats_py(package: Package) -> dict[str, set[str]]:
    """Return the private names of nats-py by the module that uses them: it imports nats-py, or uses a client."""
    private = private_names_of_nats_py()
    used: dict[str, set[str]] = {}
    for module in package.modules.values():
        if "nats" in package.distributions(module) or "client._" in module.source:
            at_run_time = any(
                isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "nats"
                for node in module.tree.body
            )
            used[module.name] = _names(module.tree, own=at_run_time) & private
    return {name: names for name, names in used.items() if names}


def modules_beside_the_rooms_are_light(package: Package) -> list[str]:
    light = {*sys.stdlib_module_names, package.root.name}
    modules = [module for module in package.in_rooms("") if module.name not in _AIRFLOW_MODULES]
    return [module.name for module in modules if package.distributions(module) - light]


def rooms_in_order(package: Package, floor: str, levels: Sequence[set[str]]) -> list[str]:
    """Return the imports that run upwards inside a floor, its rooms without a level, and circles of its rooms."""
    level = {room: number for number, rooms in enumerate(levels) for room in rooms}
    imports: dict[str, set[str]] = defaultdict(set)
    offenders = []
    for name, targets in package.imports.items():
        source = _room_inside(name, floor)
        if source is None:
            continue
        if source not in level:
            offenders.append(f"{source} has no level")
            continue
        for target in sorted(targets):
            room = _room_inside(target, floor)
            if room is not None and room != source:
                imports[source].add(room)
                if room in level and level[room] > level[source]:
                    offenders.append(f"{name} imports {target}")
    return sorted(set(offenders)) + [" <-> ".join(circle) for circle in circles(imports)]


def _room_inside(name: str, floor: str) -> str | None:
    first, *rest = name.split(".")
    # The face of a floor imports from all of its rooms.
    return rest[0] if first == floor and rest else None


def no_circles(package: Package) -> list[str]:
    return [" <-> ".join(circle) for circle in circles(package.imports)]


def long_modules(package: Package) -> list[str]:
    lines = {name: module.source.count("\n") for name, module in package.modules.items()}
    return [f"{name} has {count} lines" for name, count in lines.items() if count >= _LONGER.get(name, _MAX_LINES)]


def vague_names(package: Package) -> list[str]:
    return [name for name in package.modules if {part.strip("_").lower() for part in name.split(".")} & _VAGUE_NAMES]


def modules_without_docstring(package: Package) -> list[str]:
    return [name for name, module in package.modules.items() if not ast.get_docstring(module.tree)]


def rooms_of_core_with_code(package: Package) -> list[str]:
    """Return the ``__init__`` modules below the core's face that hold more than a docstring."""
    return [
        module.name
        for module in package.in_rooms("jetstream")
        if module.path.name == "__init__.py" and module.name != "jetstream" and len(module.tree.body) > 1
    ]


def repeated_module_names(package: Package) -> list[str]:
    by_name: dict[str, list[str]] = defaultdict(list)
    for module in package.in_rooms("jetstream"):
        if module.name != "jetstream":
            by_name[module.path.stem].append(module.name)
    return [
        f"{name}: {', '.join(modules)}"
        for name, modules in by_name.items()
        if len(modules) > 1 and name not in _SHARED_MODULE_NAMES
    ]


def repeated_class_names(package: Package) -> list[str]:
    by_name: dict[str, list[str]] = defaultdict(list)
    for name, module in package.class_definitions():
        by_name[name].append(module.name)
    return [f"{name}: {', '.join(modules)}" for name, modules in by_name.items() if len(modules) > 1]


def core_order(package: Package) -> list[str]:
    return rooms_in_order(package, "jetstream", _CORE_LEVELS)


def spark_order(package: Package) -> list[str]:
    return rooms_in_order(package, "spark", _SPARK_LEVELS)


# What encodes and parses frames; Spark's in bulk, by columns.
_PROTOCOL = ("jetstream.client.", "spark.source.bulk_parser", "spark.source.row_encoder")
_VERB = re.compile(r"H?(PUB|MSG) |(UN)?SUB |CONNECT |P[IO]NG\b|[+]OK\b|-ERR\b")


def protocol_only_in_the_client(package: Package) -> list[str]:
    """Return the modules that have a part of a frame of the NATS protocol in a text."""
    offenders = []
    for module in package.modules.values():
        if module.name.startswith(_PROTOCOL):
            continue
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
                text = node.value if isinstance(node.value, str) else node.value.decode("latin-1")
                if verb := _VERB.match(text):
                    offenders.append(f"{module.name}: {verb[0].strip()}")
    return offenders


def _assert_kept(rule: Callable[[Package], list[str]], package: Package) -> None:
    offenders = rule(package)
    assert not offenders, "\n".join([f"{rule.__name__}: {len(offenders)} offenders", *offenders])


def test_the_core_imports_nothing_above_it_and_no_airflow_or_spark_module(package: Package) -> None:
    _assert_kept(core_stands_alone, package)


def test_worker_spark_and_command_import_the_core_only_and_never_airflow(package: Package) -> None:
    _assert_kept(middle_stands_on_core, package)


def test_skins_never_import_nats(package: Package) -> None:
    _assert_kept(skins_leave_nats_to_the_core, package)


def test_one_module_uses_at_most_ten_private_names_of_nats_py(package: Package) -> None:
    assert {"_transport", "_pending", "_process_msg", "_ps", "_client"} <= private_names_of_nats_py()
    used = used_private_names_of_nats_py(package)
    assert list(used) == ["jetstream.client.nats_client"]
    # Ten at most, each with a guard and another way without it; see docs/decisions.md.
    assert used["jetstream.client.nats_client"] == {"_inbox_prefix"}


def test_modules_beside_the_rooms_import_nothing_heavy(package: Package) -> None:
    _assert_kept(modules_beside_the_rooms_are_light, package)


def test_rooms_of_the_core_import_downwards(package: Package) -> None:
    _assert_kept(core_order, package)


def test_rooms_of_spark_import_downwards(package: Package) -> None:
    _assert_kept(spark_order, package)


def test_no_modules_import_each_other(package: Package) -> None:
    _assert_kept(no_circles, package)


def test_modules_stay_short(package: Package) -> None:
    _assert_kept(long_modules, package)


def test_modules_are_named_after_their_subject(package: Package) -> None:
    _assert_kept(vague_names, package)


def test_every_module_has_a_docstring(package: Package) -> None:
    _assert_kept(modules_without_docstring, package)


def test_rooms_of_the_core_are_imported_module_by_module(package: Package) -> None:
    _assert_kept(rooms_of_core_with_code, package)


def test_no_two_modules_of_the_core_share_a_name(package: Package) -> None:
    _assert_kept(repeated_module_names, package)


def test_no_class_name_is_defined_twice(package: Package) -> None:
    _assert_kept(repeated_class_names, package)


def test_only_the_client_and_bulk_code_speak_the_protocol(package: Package) -> None:
    _assert_kept(protocol_only_in_the_client, package)
    own = [module.source for module in package.modules.values() if module.name.startswith(_PROTOCOL)]
    assert sum("HPUB " in source for source in own) >= 2


def test_the_rules_apply_to_every_room(package: Package) -> None:
    assert {"jetstream", "worker", "spark", ""} <= {module.room for module in package.modules.values()}
    assert {"hooks", "operators", "sensors", "triggers", "tasks"} <= set(_skins(package))
    assert {module.name for module in package.in_rooms("jetstream")} >= {"jetstream", "jetstream.client.connection"}
