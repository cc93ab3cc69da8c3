"""Names that were retired when the package got its rooms: private metaphors, and names with several meanings.

docs/decisions.md has the reasons. What a name became: the module's, class's or function's subject in the terms of
NATS, Airflow and Spark.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

import pytest
from source_code import Module, Package, package_of_tests

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_RETIRED_MODULES = _words(
    """
    access acting api_fetch api_gets asked asking audit bells calling cancellation_book cancelling capture choice
    circumstances clearing client collecting command completing compression connection_failures consumer_fetch
    consumer_rules copying declarations deliveries delivery_rules direct_answers direct_fetch direct_gets doing
    draining drift driven driving ending ends entries entry_removal failing failures findings fitting follower
    frames gathering gets giving_up holding inspection installed job_times jobs keepalive kept lanes letter_record
    letters looking lookout lookup losses mark mentions metrics names narrowing numbers once order originals orphans
    outcome pace page pages parking parts payloads places plain plain_rows planning premises present priorities
    processes proof proving provisioning provisioning_steps publish_report published_before publishing pulling pump
    quantities queue queue_rules queue_warnings reader reading reading_ahead receipts reconciling records
    redrive_order rendering repairs report_page resizing results run running runtime scanning settling share shares
    sharing shelter shipping shortcuts slots source spark_application spark_nats stored storing streams summary tail
    task_identity testimony thread threads together told tolerance verdicts waiting watching wire work
    """
)

# Modules whose last name was retired for another module and is right for these.
_OTHER_MODULES = {
    "plugins.monitor.models.letters": "response models, named after their route",
    "sensors.jobs": "Airflow's layout",
    "sensors.queue": "Airflow's layout",
    "triggers.queue": "Airflow's layout",
    "tasks.outcome": "what a task returns and how it fails; the outcome of a worker's handler is its result",
    "worker.metrics": "Prometheus metrics; the core's ack metrics have their own name",
}

_RETIRED_CLASSES = _words(
    """
    Ahead Ask AskAll AskEach Bell CancellationBook Choice Circumstances Columns DeliveryRules Dismissal
    DrivenConnection Driver End Equipment Follower Gone HandOver HandlerCall Index Intake JobDoer Judge Keeper Kind
    Lane LetterKeeper Look LookingSensor LookingTrigger Lookout Mark Mention Messages Once Pace Part Pause Plain
    PlainRows Premises Present ReadingAhead Receipt Receipts Reckoning RedriveOrder Share Shelter Shortcuts Slots
    Source Stored Tail Task Testimony Together Told Tolerance Turns Verdict Wanted Watch
    """
)

_RETIRED_FUNCTIONS = _words(
    """
    alive_at ask_each asked_apart asked_in_group asked_on at_once choose collected_rarely doubted driven early
    find_present foreseen from_the_beginning gone hand_back hand_over has_rung hear hears_terminations helps_out
    hung_up ignored insist judge learn listen look look_again look_around lose order_for order_of patience pause
    reckon require_asked see_to sought take_mark taker tell together told unkept untaken untold
    """
)

# How a value came isn't what it is.
_RETIRED_WORDS = {"told", "asked", "looked"}
_RETIRED_VARIABLES = {"each"}


_NAMED_NODES = (
    ast.ClassDef,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ExceptHandler,
    ast.MatchAs,
    ast.MatchStar,
)


# One process parses the package for all of them.
pytestmark = pytest.mark.xdist_group("source code")


@pytest.fixture(scope="module")
def package() -> Package:
    return package_of_tests()


def retired_modules(package: Package) -> list[str]:
    return [
        module.name
        for module in package.modules.values()
        if module.path.stem in _RETIRED_MODULES and module.name not in _OTHER_MODULES
    ]


def retired_definitions(package: Package) -> list[str]:
    offenders = []
    for module in package.modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                retired = _RETIRED_CLASSES
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                retired = _RETIRED_FUNCTIONS
            else:
                continue
            if node.name.strip("_") in retired:
                offenders.append(f"{module.name}.{node.name} (line {node.lineno})")
    return offenders


def retired_words(package: Package) -> list[str]:
    return [
        f"{module.name}: {name} (line {line})"
        for module in package.modules.values()
        for name, line in _identifiers(module)
        if _RETIRED_WORDS.intersection(name.lower().split("_")) or name in _RETIRED_VARIABLES
    ]


def _identifiers(module: Module) -> Iterator[tuple[str, int]]:
    """Yield the names that a module binds or defines, with their lines."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, _NAMED_NODES) and node.name:
            yield node.name, node.lineno


def _assert_none(offenders: list[str]) -> None:
    assert not offenders, "\n".join([f"{len(offenders)} retired names", *offenders])


def test_no_module_has_a_retired_name(package: Package) -> None:
    _assert_none(retired_modules(package))


@pytest.mark.slow
def test_no_class_or_function_has_a_retired_name(package: Package) -> None:
    _assert_none(retired_definitions(package))


def test_no_value_is_named_after_how_it_came(package: Package) -> None:
    _assert_none(retired_words(package))


def test_a_retired_name_is_found(tmp_path: Path) -> None:
    root = tmp_path / "package"
    root.mkdir()
    (root / "told.py").write_text(
        "class _Bell:\n    def hear(self, asked): ...\nfor each in []:\n    was_told: int = 1\n"
    )
    package = Package(root)
    assert retired_modules(package) == ["told"]
    assert retired_definitions(package) == ["told._Bell (line 1)", "told.hear (line 2)"]
    assert sorted(retired_words(package)) == [
        "told: asked (line 2)",
        "told: each (line 3)",
        "told: was_told (line 4)",
    ]
