"""No credential is anywhere in Airflow's home; it runs after the other files, so their logs are searched too."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

from airflow_provider_jetstream.dev.airflow_home import database_path
from testbed.planted_secrets import files_with_secrets, places_of_secrets

if TYPE_CHECKING:
    from pathlib import Path

    from testbed.airflow import Airflow


def test_no_file_of_airflow_or_spark_holds_a_secret(airflow: Airflow, refused: str, spark_events: Path) -> None:
    names = {str(path.relative_to(airflow.home)) for path in airflow.home.rglob("*") if path.is_file()}
    # The searched files exist: the log of a refused task, the components' output, the database.
    assert any(f"run_id={refused}/task_id=nats_wrong_password" in name for name in names)
    assert {"logs-of-components/scheduler.log", "logs-of-components/api-server.log", "airflow.db"} <= names
    assert files_with_secrets((airflow.home, spark_events)) == {}


def test_no_row_of_the_database_holds_a_secret(airflow: Airflow, refused: str) -> None:
    with closing(sqlite3.connect(f"file:{database_path(airflow.home)}?mode=ro", uri=True)) as database:
        assert database.execute("SELECT count(*) FROM connection").fetchone() == (0,)
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        rows = {table: database.execute(f'SELECT * FROM "{table}"').fetchall() for table in tables}
    assert len(rows["rendered_task_instance_fields"]) > 10
    assert {"trigger", "xcom", "log", "serialized_dag", "task_instance", "dag_run", "job"} <= rows.keys()
    found = {table: places_of_secrets(str(content).encode(errors="replace")) for table, content in rows.items()}
    assert {table: places for table, places in found.items() if places} == {}
