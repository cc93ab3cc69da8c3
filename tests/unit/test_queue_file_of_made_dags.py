"""A queue's file beside the DAG's file, whichever module makes the DAG: found at parse and at run alike."""

from __future__ import annotations

import shutil
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from airflow.dag_processing.dagbag import DagBag

from airflow_provider_jetstream.tasks.queue_source import load_queue

if TYPE_CHECKING:
    from collections.abc import Iterator

DAGS = Path(__file__).parent.parent / "airflow" / "dags"
SEND = 'JetStreamPublishOperator(task_id="send", work_queue={}, subject="made.a", jobs=[1])'
IMPORTS = """
from airflow.sdk import DAG
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator
"""


@pytest.fixture
def dags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of DAGs, and a working directory elsewhere, which has a file of that path too."""
    folder, elsewhere = tmp_path / "dags", tmp_path / "elsewhere"
    for name in ("made", "makers"):
        shutil.copytree(DAGS / name, folder / name)
    (elsewhere / "queues").mkdir(parents=True)
    text = (folder / "made/queues/made.yaml").read_text()
    for other in (elsewhere, folder / "makers"):
        (other / "queues").mkdir(exist_ok=True)
        (other / "queues/made.yaml").write_text(text.replace("made", "other"))
    monkeypatch.chdir(elsewhere)
    monkeypatch.syspath_prepend(str(folder / "makers"))
    yield folder
    for name in ("makers_of_dags", "made_elsewhere", "zipped"):
        sys.modules.pop(name, None)


def _parsed(path: Path) -> DagBag:
    return DagBag(path, safe_mode=False)


def _queues_at_run(bag: DagBag) -> dict[str, str]:
    """Return the queue that each task finds once the file is parsed, as in the task's process."""
    assert not bag.import_errors
    tasks: list[Any] = [task for dag in bag.dags.values() for task in dag.tasks]
    return {
        f"{task.dag_id}.{task.task_id}": load_queue(task.work_queue, task).name
        for task in tasks
        if isinstance(getattr(task, "work_queue", None), str) and "{{" not in task.work_queue
    }


def test_dags_that_functions_of_another_folder_make_find_the_file_beside_their_own(dags: Path) -> None:
    found = _queues_at_run(_parsed(dags / "made" / "made_dags.py"))
    assert set(found.values()) == {"made"}
    assert {name.partition(".")[0] for name in found} == {
        "made_of_every_kind",
        "decorated",
        "made_of_a_declaration_0",
        "made_of_a_declaration_1",
    }


@pytest.mark.parametrize("path", ["absent.yaml", "queues/absent.yaml"])
def test_a_file_beside_the_maker_or_in_the_working_directory_isnt_taken(dags: Path, path: str) -> None:
    for other in (dags / "makers", dags.parent / "elsewhere"):
        (other / path).write_text((other / "queues/made.yaml").read_text())
    file = dags / "made" / "wrong.py"
    file.write_text(f'from makers_of_dags import make_every_kind\ndag = make_every_kind("wrong", {path!r})\n')
    (error,) = _parsed(file).import_errors.values()
    assert str(dags / "made" / path) in error
    assert "expected a YAML file at this path" in error


@pytest.mark.parametrize("path", ['"queues/made.yaml"', 'str(Path(__file__).parent / "queues/made.yaml")'])
def test_an_archive_of_dags_says_what_to_use(dags: Path, path: str) -> None:
    text = f"from pathlib import Path\n{IMPORTS}\nwith DAG('zipped') as dag:\n    {SEND.format(path)}\n"
    archive = _archive(dags, text)
    (error,) = _parsed(archive).import_errors.values()
    assert f"found that {archive} is no folder" in error
    assert "yaml.safe_load(__loader__.get_data(" in error


def test_a_queue_in_an_archive_is_read_by_its_loader(dags: Path) -> None:
    text = (
        f"import yaml\nfrom pathlib import Path\n{IMPORTS}\n"
        'QUEUE = yaml.safe_load(__loader__.get_data(str(Path(__file__).parent / "queues/made.yaml")))\n'
        f"with DAG('zipped') as dag:\n    {SEND.format('QUEUE')}\n"
    )
    bag = _parsed(_archive(dags, text))
    assert not bag.import_errors
    send: Any = bag.dags["zipped"].task_dict["send"]
    assert load_queue(send.work_queue).name == "made"


def _archive(dags: Path, text: str) -> Path:
    archive = dags / "archive.zip"
    with zipfile.ZipFile(archive, "w") as writer:
        writer.writestr("zipped.py", text)
        writer.write(dags / "made/queues/made.yaml", "queues/made.yaml")
    return archive
