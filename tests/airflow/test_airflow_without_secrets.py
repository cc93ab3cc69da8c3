"""No credential is anywhere in Airflow's home; it runs after the other files, so their logs are searched too."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

from testbed.airflow_settings import database_path

if TYPE_CHECKING:
    from airflow_steps import Secrets

    from testbed.airflow import Airflow


def test_no_file_of_airflow_holds_a_secret(airflow: Airflow, refused: str, secrets: Secrets) -> None:
    files = [path for path in airflow.home.rglob("*") if path.is_file()]
    names = {str(path.relative_to(airflow.home)) for path in files}
    # The searched files exist: the log of a refused task, the components' output, the database.
    assert any(f"run_id={refused}/task_id=nats_wrong_password" in name for name in names)
    assert {"logs-of-components/scheduler.log", "logs-of-components/api-server.log", "airflow.db"} <= names
    found = [
        (str(path.relative_to(airflow.home)), secret.split("-")[0])
        for path in files
        for secret in secrets.all()
        if secret.encode() in path.read_bytes()
    ]
    assert found == []


def test_no_row_of_the_database_holds_a_secret(airflow: Airflow, refused: str, secrets: Secrets) -> None:
    with closing(sqlite3.connect(f"file:{database_path(airflow.home)}?mode=ro", uri=True)) as database:
        assert database.execute("SELECT count(*) FROM connection").fetchone() == (0,)
        rows = {
            table: database.execute(f"SELECT * FROM {table}").fetchall()
            for table in ("trigger", "xcom", "rendered_task_instance_fields", "task_instance", "log", "serialized_dag")
        }
    assert len(rows["rendered_task_instance_fields"]) > 10
    text = json.dumps(rows, default=str)
    assert [secret.split("-")[0] for secret in secrets.all() if secret in text] == []
