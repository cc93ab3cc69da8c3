"""Where the file of a queue is looked for, and what an error says about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG

from airflow_provider_jetstream.jetstream.errors import QueueDeclarationError
from airflow_provider_jetstream.links.monitor import QueueLink
from airflow_provider_jetstream.operators.provision import JetStreamProvisionOperator
from airflow_provider_jetstream.tasks.queue_source import declared_queue, load_queue

QUEUE = "name: {0}\nsubjects: [{0}.>]\nconsumers: [{{name: w, max_deliver: 2}}]\n"
RELATIVE = "queues/mail.yaml"


@pytest.fixture
def dag_folder(tmp_path: Path) -> Path:
    (tmp_path / "dags" / "queues").mkdir(parents=True)
    return tmp_path / "dags"


@pytest.fixture
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "elsewhere"
    (folder / "queues").mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


def _operator(dag_folder: Path, work_queue: str | Path) -> JetStreamProvisionOperator:
    with DAG("relative") as dag:
        dag.fileloc = str(dag_folder / "mail.py")
        return JetStreamProvisionOperator(task_id="provision", work_queue=work_queue)


@pytest.mark.parametrize("kind", [str, Path])
def test_a_relative_path_leads_to_the_file_beside_the_dags(
    dag_folder: Path, working_directory: Path, kind: type[str | Path]
) -> None:
    (dag_folder / RELATIVE).write_text(QUEUE.format("beside"))
    (working_directory / RELATIVE).write_text(QUEUE.format("other"))
    operator = _operator(dag_folder, kind(RELATIVE))
    # The argument keeps the path as it is written: it would differ between machines.
    assert operator.work_queue == kind(RELATIVE)
    assert load_queue(operator.work_queue, operator).name == "beside"
    # Its link to the page finds the file too.
    key: Any = None
    assert "queue=beside" in QueueLink().get_link(operator, ti_key=key)


def test_the_working_directory_counts_outside_of_dags_only(dag_folder: Path, working_directory: Path) -> None:
    # The DAG processor's and the task's are two: a file found in one would be missed in the other.
    (working_directory / RELATIVE).write_text(QUEUE.format("here"))
    assert load_queue(RELATIVE).name == "here"
    with pytest.raises(QueueDeclarationError, match="No such file"):
        _operator(dag_folder, RELATIVE)


def test_an_error_names_the_whole_path(dag_folder: Path, working_directory: Path) -> None:
    with pytest.raises(QueueDeclarationError) as caught:
        _operator(dag_folder, RELATIVE)
    assert str(dag_folder / RELATIVE) in str(caught.value)
    (dag_folder / RELATIVE).write_text("name: mail\nsubject: [mail.>]\n")
    with pytest.raises(QueueDeclarationError) as caught:
        _operator(dag_folder, RELATIVE)
    assert "subject: no such field" in str(caught.value)
    with pytest.raises(QueueDeclarationError) as caught:
        load_queue("absent.yaml")
    assert str(working_directory / "absent.yaml") in str(caught.value)


def test_a_file_that_only_the_tasks_machine_has_is_read_by_the_task(dag_folder: Path, tmp_path: Path) -> None:
    absent = tmp_path / "mounted" / "mail.yaml"
    assert declared_queue(str(absent)) is None
    operator = _operator(dag_folder, absent)
    with pytest.raises(QueueDeclarationError, match="No such file"):
        load_queue(absent, operator)
