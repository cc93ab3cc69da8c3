"""A DAG of a git bundle, Airflow's provider of which is installed into a folder of its own.

A run keeps the version of the bundle with which it began: its tasks have to find the queue's file of that version.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from testbed.environments import find_uv

if TYPE_CHECKING:
    from pathlib import Path

PACKAGES = ("apache-airflow-providers-git", "gitpython", "gitdb", "smmap")
DAG = """
from airflow.sdk import DAG
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator
with DAG("of_git", schedule=None):
    JetStreamPublishOperator(task_id="send", work_queue="queues/orders.yaml", subject="orders.new", jobs=["a"])
"""
QUEUE = """
name: {name}
subjects: [orders.>]
consumers: [{{name: packer, max_deliver: 2, ack_wait: 5s}}]
"""
# What the DAG processor does for the newest version, and the process of a task for that of its run.
PARSE = """
import json, sys
sys.path.append({packages!r})
import airflow.providers
airflow.providers.__path__.append({packages!r} + "/airflow/providers")
from airflow.dag_processing.dagbag import DagBag
from airflow.providers.git.bundles.git import GitDagBundle
from airflow_provider_jetstream.tasks.queue_source import load_queue
found = []
for version in {versions!r}:
    bundle = GitDagBundle(
        name="orders", repo_url={repository!r}, tracking_ref="main", subdir="dags", version=version
    )
    bundle.initialize()
    bag = DagBag(bundle.path / "of_git.py", bundle_path=bundle.path, bundle_name="orders", safe_mode=False)
    assert not bag.import_errors, bag.import_errors
    task = bag.dags["of_git"].task_dict["send"]
    found.append([load_queue(task.work_queue, task).name, task.work_queue])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def git_provider(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with Airflow's provider of git bundles."""
    folder = tmp_path_factory.mktemp("git_provider")
    command = [str(find_uv()), "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *PACKAGES]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def test_tasks_of_a_version_of_a_git_bundle_find_the_queues_file_of_that_version(
    git_provider: Path, tmp_path: Path
) -> None:
    repository = tmp_path / "repository"
    (repository / "dags" / "queues").mkdir(parents=True)
    (repository / "dags" / "of_git.py").write_text(DAG)
    _git(tmp_path, "init", "--quiet", "--initial-branch=main", str(repository))
    versions = []
    for name in ("first", "second"):
        (repository / "dags" / "queues" / "orders.yaml").write_text(QUEUE.format(name=name))
        _git(repository, "add", ".")
        _git(repository, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", name)
        versions.append(_git(repository, "rev-parse", "HEAD").strip())
    program = PARSE.format(packages=str(git_provider), repository=str(repository), versions=[None, *versions])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ
        | {
            "AIRFLOW_HOME": str(tmp_path / "home"),
            "AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_STORAGE_PATH": str(tmp_path / "bundles"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == [
        ["second", "queues/orders.yaml"],
        ["first", "queues/orders.yaml"],
        ["second", "queues/orders.yaml"],
    ]


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout
