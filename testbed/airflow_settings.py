"""The users, the settings and the metadata database of the tests' Airflow."""

import contextlib
import importlib.metadata
import os
import sqlite3
import subprocess
from collections.abc import Mapping
from pathlib import Path

from airflow_provider_jetstream.dev import airflow_home
from airflow_provider_jetstream.dev.airflow_home import database_path

USERS = {"admin": "admin", "viewer": "viewer"}
_SETTINGS = {
    # A scheduled DAG must not run beside the DAGs under test.
    "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "True",
    "AIRFLOW__CORE__TEST_CONNECTION": "Enabled",
}


class MigrationError(RuntimeError):
    """``airflow db migrate`` didn't succeed."""


def airflow_env(
    *,
    home: Path,
    dags_folder: Path,
    port: int,
    connections: Mapping[str, str],
    extra: Mapping[str, str],
    parallelism: int,
    path: str = "",
) -> dict[str, str]:
    """Return the whole environment of an Airflow's processes; ``extra`` overrides the rest."""
    return airflow_home.airflow_env(
        home=home,
        dags_folder=dags_folder,
        port=port,
        users=USERS,
        connections=connections,
        extra=_SETTINGS | dict(extra),
        parallelism=parallelism,
        path=path,
    )


def prepare_home(home: Path) -> None:
    """Create the folder of an Airflow with the files that its first command needs."""
    airflow_home.prepare_home(home, USERS)


def migrate(home: Path, env: Mapping[str, str], python: str, template_db: Path | None) -> None:
    """Create the metadata database, as a copy of a template where there is one.

    ``template_db`` is a folder with a migrated sqlite database per version of Airflow; a missing one is added.
    """
    database = database_path(home)
    if database.exists():
        return
    version = importlib.metadata.version("apache-airflow")
    is_sqlite = env["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"].startswith("sqlite")
    template = template_db / f"airflow-{version}.db" if template_db and is_sqlite else None
    if template and template.exists():
        _copy(template, database)
        return
    done = subprocess.run(
        [python, "-m", "airflow", "db", "migrate"],
        env=dict(env),
        cwd=home,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        output = (done.stdout + done.stderr)[-4000:]
        raise MigrationError(f"airflow db migrate failed with {done.returncode}:\n{output}")
    if template:
        template.parent.mkdir(parents=True, exist_ok=True)
        # Renamed into place, so that a session running beside this one never copies half of it.
        partial = template.with_suffix(f".{os.getpid()}")
        _copy(database, partial)
        partial.rename(template)


def _copy(source: Path, target: Path) -> None:
    with (
        contextlib.closing(sqlite3.connect(source)) as old,
        contextlib.closing(sqlite3.connect(target)) as new,
    ):
        old.backup(new)
