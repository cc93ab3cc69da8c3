"""docs/examples.md and the folder of example DAGs name the same DAGs, queues, workers and tests."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import pytest
from airflow.sdk import DAG

from testbed.code_blocks import ROOT

if TYPE_CHECKING:
    from pathlib import Path

PAGE = ROOT / "docs" / "examples.md"
DAGS = ROOT / "example_dags"
# Its queue is the one that the page of Airflow's UI names.
FOR_EVERY_QUEUE = "jetstream_redrive"
_LINK = re.compile(r"\[`(?P<name>[^`]+)`\]\((?P<path>[^)#]+)\)")
_COLUMNS = 5


@dataclass(frozen=True)
class Row:
    """A line of the page's tables: links from each cell, by what they are called."""

    dags: dict[str, Path]
    shows: str
    queues: dict[str, Path]
    workers: dict[str, Path]
    tests: dict[str, Path]


@cache
def _rows() -> list[Row]:
    rows = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if not line.startswith("| ") or len(cells) != _COLUMNS or cells[0] in ("DAG", "---"):
            continue
        dags, queues, workers, tests = (_links(cells[column]) for column in (0, 2, 3, 4))
        rows.append(Row(dags, cells[1], queues, workers, tests))
    return rows


def _links(cell: str) -> dict[str, Path]:
    return {found["name"]: (PAGE.parent / found["path"]).resolve() for found in _LINK.finditer(cell)}


@cache
def _folder() -> dict[str, Path]:
    """Return the files of all example DAGs, by the DAGs' ids."""
    files = sorted(DAGS.glob("*.py"))
    return {
        dag.dag_id: file
        for file in files
        for dag in vars(importlib.import_module(f"example_dags.{file.stem}")).values()
        if isinstance(dag, DAG)
    }


def _row_of(dag_id: str) -> Row:
    (row,) = [row for row in _rows() if dag_id in row.dags]
    return row


def test_the_page_has_each_dag_of_the_folder_and_no_other() -> None:
    listed = [(dag_id, file) for row in _rows() for dag_id, file in row.dags.items()]
    assert sorted(listed) == sorted(_folder().items())
    assert {file.stem for file in DAGS.glob("*.py")} <= set(_folder())
    assert [row for row in _rows() if not row.shows or not row.tests] == []


@pytest.mark.parametrize("dag_id", _folder())
def test_the_queue_and_the_worker_of_a_dag_are_those_of_its_file(dag_id: str) -> None:
    row, file = _row_of(dag_id), _folder()[dag_id]
    text = file.read_text(encoding="utf-8")
    named = re.findall(r'"queues" / "(\w+\.yaml)"', text)
    assert set(row.queues) == set(named), "the queue that the DAG names"
    assert row.queues or dag_id == FOR_EVERY_QUEUE
    for name, path in row.queues.items():
        assert path == DAGS / "queues" / name
        assert path.is_file()
    for name, path in row.workers.items():
        assert path == ROOT / "example_workers" / name
        assert path.is_file()
        assert f"example_workers.{path.stem}:" in text, "the command of the worker"


def test_the_page_has_each_worker_of_the_folder() -> None:
    workers = {path.name for path in (ROOT / "example_workers").glob("[a-z]*.py")}
    assert workers == {name for row in _rows() for name in row.workers}


@pytest.mark.parametrize("page", ["examples.md", "worker-contract.md"])
def test_the_pages_have_each_worker_in_another_language(page: str) -> None:
    workers = {path.name for path in (ROOT / "example_workers").glob("worker.*")}
    assert len(workers) > 1
    assert workers == set(re.findall(r"\(\.\./example_workers/(worker\.\w+)\)", (ROOT / "docs" / page).read_text()))
