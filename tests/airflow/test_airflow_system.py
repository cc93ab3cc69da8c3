"""The system test of the provider, in the form of Airflow's own, run as its docstring says."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from airflow_steps import ROOT

from testbed.airflow_settings import airflow_env, migrate, prepare_home

if TYPE_CHECKING:
    from pathlib import Path

    from testbed.nats_server import NatsServer


@pytest.mark.airflow
def test_the_system_test_passes(
    nats: NatsServer, connections: dict[str, dict[str, object]], tmp_path: Path, migrated_databases: Path
) -> None:
    folder = ROOT / "tests" / "system" / "jetstream"
    home = tmp_path / "home"
    good = {"nats_default": json.dumps(connections["nats_default"])}
    env = airflow_env(home=home, dags_folder=folder, port=0, connections=good, extra={}, parallelism=1)
    prepare_home(home)
    migrate(home, env, sys.executable, migrated_databases)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder / "example_work_queue.py")]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "1 passed" in done.stdout
