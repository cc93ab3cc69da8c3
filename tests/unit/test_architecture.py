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
_MAX_LINES = 350
# Deep modules, whose face is small: cut, each part would be about the same facts.
_DEEP = {
    # Both directions of one protocol: what is written by one side is parsed for the other.
    "jetstream.client.wire": 600,
    # One connection, from its first byte to its restoration: each state is a condition of what may be sent.
    "jetstream.client.session": 760,
    # The connection, and nats-py's client over it: what either sends passes the same place.
    "jetstream.client.nats_py": 730,
    # What is read of each stream about jobs that are gone, and what follows from it.
    "jetstream.dead_letters.account": 800,
    # What a refresh reads, what it knows afterwards, and when it can't tell.
    "jetstream.dead_letters.tracked_letters": 450,
    # One follower, and those that wait for it: once, or for each letter that arrives.
    "jetstream.dead_letters.letter_watch": 520,
    # All fields of the stored form, and what is believed of them.
    "jetstream.dead_letters.record": 390,
    # Entries, their order, and what is asked of both.
    "jetstream.dead_letters.entry_index": 390,
    "jetstream.dead_letters.diagnose": 600,
    # What is stored of a letter, and the queries of it: each depends on what the other holds.
    "jetstream.dead_letters.table": 700,
    # Which runs share a manifest, and what a try may believe of it: facts of one stored record.
    "jetstream.publishing.manifest": 700,
    # The stored form of these facts, who may change it, and when it can go.
    "jetstream.publishing.manifest_record": 570,
    # What a table of stored jobs, a search and an answer of the server prove about one job.
    "jetstream.publishing.stored_jobs": 535,
    # What makes a job's identity, for many at once and for one: both have to give the same.
    "jetstream.publishing.preparation": 590,
    # What a schedule may be, what is stored of it, and what becomes of it.
    "jetstream.publishing.schedules": 385,
    # Which stored jobs a change of filters concerns, and in which order the server takes it: one decision.
    "jetstream.provisioning.consumer_steps": 430,
    # Cursor, manifest and handle of one publication, and what retry, clear and re-created run mean for them.
    "jetstream.publication": 670,
    # Each operation twice, blocking and awaited, with what it takes.
    "hooks.jetstream": 480,
    # Most of it documents and checks the arguments of one operator.
    "operators.publish": 340,
    # What is in flight, what a full queue holds back, and why nothing more is sent: each answer changes all three.
    "jetstream.publishing.outbox": 690,
    # What is read of each stream, what is decided of it, and who gets it, of jobs and of the new jobs of redriven ones.
    "jetstream.waiting.follower": 640,
    # One report a job: how it is read, held, stored, and found again; with the ids that no end tells.
    "jetstream.waiting.job_reports": 540,
    # Jobs and consumers of one moment: which jobs have ended unseen, and which no consumer delivers.
    "jetstream.waiting.comparison": 370,
    # Most of it takes, checks and documents the arguments of every operator that waits.
    "operators.job_waiting": 400,
    # One pull for all watchers, and what becomes of its messages until they are settled.
    "triggers.message_producer": 545,
    # Records of letters and of ranges, with the condition and the check of what was stored before.
    "jetstream.audit.log": 400,
    # The lease's message, what its holder may do, and how it is taken: each relies on the others' times.
    "jetstream.audit.lease": 510,
    # The record of a letter, and that of many letters, which says the same of each.
    "jetstream.audit.records": 630,
    # A redrive as it is stored, and what people ask of it, which changes its state.
    "jetstream.audit.redrives": 500,
    # All names of the wire contract.
    "jetstream.contract": 410,
    # All steps of a batch, in their order, with what has no room yet and what is stored already.
    "jetstream.redrive.steps": 480,
    # A redrive as the program sees it that runs it: its lease, record, controls and progress change together.
    "jetstream.redrive.operation": 640,
    # What a wave takes, how its jobs end, and what follows: each reads the wave's record.
    "jetstream.redrive.waves": 450,
    # Keys, what each waits for, and the job that came before its next letter.
    "jetstream.redrive.key_order": 430,
    # Entries that are claimed, and how they are held: both are one protocol with the handler's consumer.
    "jetstream.redrive.claims": 410,
    # The loop, and a step of it.
    "jetstream.redrive.redrive": 390,
    # Numbers and entries of one moment: which dead jobs nothing names, and how many a busy consumer has.
    "jetstream.dead_letters.reconciliation": 500,
    # What is read of a queue, again where it doesn't agree, and what is classified by it.
    "jetstream.dead_letters.scan": 420,
    # All evidence about one job, and the rules in the order in which they are asked.
    "jetstream.dead_letters.classify": 930,
    # All reads of that evidence, so that their order shows.
    "jetstream.dead_letters.facts": 420,
    # One loop: what is pulled, looked for, stored and acknowledged.
    "jetstream.mover": 650,
    # All roles, side by side.
    "jetstream.roles.permissions": 400,
    # What becomes of each row in flight, and of the connection under it.
    "spark.source.publisher": 450,
    "spark.source.row_encoder": 400,
    # The table of the options, half of it their texts, and what a reader or a writer makes of it.
    "spark.source.options": 660,
    # One table, with the rule of each row.
    "jetstream.evidence": 450,
    # The tree of the core's errors.
    "jetstream.errors": 400,
    # One table: the sentence of each rule about a field of the server, and the rules.
    "jetstream.queue.field_rules": 750,
    # Most of it documents the arguments of one operator.
    "operators.redrive": 370,
}
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
    {"archive", "audit", "publishing", "cancellation", "roles"},
    {"dead_letters", "mover"},
    {"waiting"},
    {"publication", "redrive", "inspection"},
    # A consumer that is created would run dead letters again: they are found, and parked, before.
    {"provisioning"},
)
_SPARK_LEVELS = (
    {"errors", "gc_tuning", "connection_options", "connection_policy", "connections"},
    {"wire"},
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
    return [f"{name} has {count} lines" for name, count in lines.items() if count >= _DEEP.get(name, _MAX_LINES)]


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
_PROTOCOL = ("jetstream.client.", "spark.wire.", "spark.source.row_encoder")
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
    assert list(used) == ["jetstream.client.nats_py"]
    # Ten at most, each with a guard and another way without it; see docs/decisions.md.
    assert used["jetstream.client.nats_py"] == {"_transport"}


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
