"""The example DAGs and those of the documentation are safe patterns: what fails in them is seen, and ends.

A task that fails turns its run red, whatever its trigger rules; a scheduled run ends before it piles up with others.
"""

from __future__ import annotations

import ast
import importlib
from datetime import timedelta
from functools import cache
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import pytest
from airflow.sdk import DAG, BaseSensorOperator, TriggerRule

from airflow_provider_jetstream.airflow_compat import AirflowFailException, AirflowSkipException
from airflow_provider_jetstream.sensors.dead_letter import JetStreamDeadLetterSensor
from testbed.code_blocks import ROOT, code_blocks, write_readme_queue

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from airflow.sdk.types import Operator

_EXAMPLES = sorted(path.stem for path in (ROOT / "example_dags").glob("[a-z]*.py"))
_QUEUE = {"name": "q", "subjects": ["q"], "dead_letters": "q_dead"}
# What becomes of a task with one failed task before it.
_HIDING = {"all_done", "always", "all_failed", "one_failed", "one_done", "one_success", "all_skipped", "none_skipped"}


@cache
def _documented_blocks() -> dict[str, list[str]]:
    """Return the Python blocks that make DAGs, by page, each after those before it on its page."""
    pages: dict[str, list[str]] = {}
    for block in code_blocks("python"):
        if "DAG(" in block.code or pages.get(block.page):
            pages.setdefault(block.page, []).append(block.code)
    return pages


@pytest.fixture(autouse=True)
def shown_queues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the files that the DAGs of the README, the first steps and the tutorial name beside the pages."""
    (tmp_path / "docs").mkdir()
    for folder in (tmp_path, tmp_path / "docs"):
        write_readme_queue(folder)
    for block in code_blocks("yaml"):
        if block.file:
            for folder in (tmp_path, tmp_path / "docs"):
                (folder / PurePosixPath(block.file).name).write_text(block.code)
    monkeypatch.chdir(tmp_path)


def _example(name: str) -> list[DAG]:
    module = importlib.import_module(f"example_dags.{name}")
    return [value for value in vars(module).values() if isinstance(value, DAG)]


def _documented(page: str) -> list[DAG]:
    names: dict[str, object] = {}
    dags: list[DAG] = []
    for code in _documented_blocks()[page]:
        if "await " in code or not any(name in code for name in ("DAG(", "import ", "def ")):
            continue
        exec(compile(ast.parse(code), page, "exec"), names)
        dags += [value for value in names.values() if isinstance(value, DAG) and value not in dags]
    return dags


_DAGS = [
    *(pytest.param(_example, name, id=name) for name in _EXAMPLES),
    *(pytest.param(_documented, page, id=page) for page in _documented_blocks()),
]


def hidden_failures(dag: DAG) -> list[str]:
    """Return the tasks whose failure leaves each last task of the DAG successful."""
    return [task.task_id for task in dag.tasks if not _fails(dag.tasks, task.task_id)]


def _fails(tasks: Iterable[Operator], failed: str) -> bool:
    """Return whether the run fails if one task does and the others succeed where they run."""
    ended = {failed: False}
    by_id = {task.task_id: task for task in tasks}

    def succeeds(task_id: str) -> bool:
        if task_id not in ended:
            task = by_id[task_id]
            before = [succeeds(other) for other in task.upstream_task_ids]
            ended[task_id] = all(before) or TriggerRule(task.trigger_rule).value in _HIDING
        return ended[task_id]

    return not all(succeeds(task.task_id) for task in by_id.values() if not task.downstream_task_ids)


def unbounded(dag: DAG) -> list[str]:
    """Return why runs of a scheduled DAG may pile up."""
    if dag.schedule is None:
        return []
    problems = []
    if dag.max_active_runs != 1:
        problems.append("max_active_runs isn't 1")
    if dag.catchup:
        problems.append("catchup")
    if dag.dagrun_timeout is None and any(task.execution_timeout is None for task in dag.tasks):
        problems.append("neither a dagrun_timeout nor an execution_timeout for each task")
    limit = dag.dagrun_timeout or timedelta.max
    problems += [
        f"{task.task_id} senses for longer than a run may take"
        for task in dag.tasks
        if isinstance(task, BaseSensorOperator) and timedelta(seconds=task.timeout) >= limit
    ]
    return problems


@pytest.mark.parametrize(("dags_of", "name"), _DAGS)
def test_a_task_that_fails_turns_the_run_red(dags_of: object, name: str) -> None:
    assert callable(dags_of)
    dags = dags_of(name)
    assert dags
    assert {dag.dag_id: hidden_failures(dag) for dag in dags} == {dag.dag_id: [] for dag in dags}


@pytest.mark.parametrize(("dags_of", "name"), _DAGS)
def test_runs_of_a_schedule_dont_pile_up(dags_of: object, name: str) -> None:
    assert callable(dags_of)
    assert {dag.dag_id: unbounded(dag) for dag in dags_of(name)} == {dag.dag_id: [] for dag in dags_of(name)}


@pytest.mark.parametrize("event", [{"status": "error", "message": "JS113 no such stream"}, None])
def test_a_sensor_with_soft_fail_isnt_skipped_where_its_queue_cant_be_polled(event: object) -> None:
    sensor = JetStreamDeadLetterSensor(task_id="sense", work_queue=_QUEUE, soft_fail=True, deferrable=True)
    with pytest.raises(AirflowFailException):
        sensor.resume_execution("execute_complete", {"event": event}, {})


def test_a_sensor_with_soft_fail_is_skipped_after_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    sensor = JetStreamDeadLetterSensor(
        task_id="sense", work_queue=_QUEUE, soft_fail=True, deferrable=False, timeout=0, poke_interval=0
    )
    monkeypatch.setattr(sensor, "poke", lambda _context: False)
    with pytest.raises(AirflowSkipException):
        sensor.execute({})
