"""The oldest supported Airflow, in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.connection_form import CONNECTION_FIELDS
from testbed.environments import ROOT, create_environment, lowest_python

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.group("environment with the oldest Airflow")

FLOOR = "apache-airflow==3.1.8"

SKINS = (
    "assets.stream_asset",
    "hooks.jetstream",
    "links.monitor",
    "operators.consume",
    "operators.provision",
    "operators.publish",
    "operators.redrive",
    "operators.spark",
    "plugins.monitor",
    "reprocessing",
    "sensors.dead_letter",
    "sensors.jobs",
    "sensors.queue",
    "triggers.completion",
    "triggers.dead_letter",
    "triggers.message",
    "triggers.queue",
    "triggers.waiting_messages",
)


@pytest.fixture(scope="module")
def floor_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of the environment."""
    folder = tmp_path_factory.mktemp("floor") / "venv"
    return create_environment(folder, lowest_python(), [FLOOR, str(ROOT)])


def test_every_skin_imports_without_a_deprecation(floor_python: Path, tmp_path: Path) -> None:
    imports = [f"importlib.import_module('airflow_provider_jetstream.{skin}')" for skin in SKINS]
    program = "\n".join(
        ["import importlib, warnings", "import airflow", "warnings.simplefilter('error', DeprecationWarning)", *imports]
    )
    done = subprocess.run(
        [floor_python, "-c", program],
        env={"PATH": os.environ["PATH"], "AIRFLOW_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


_FORM = """
import json
from airflow.api_fastapi.core_api.services.ui.connections import HookMetaService
form = next(form for form in HookMetaService.hook_meta_data() if form.connection_type == "nats")
hidden = [name for name, field in form.extra_fields.items() if field["schema"].get("format") == "password"]
print("FORM", json.dumps([form.hook_name, form.standard_fields.host.title, sorted(form.extra_fields), sorted(hidden)]))
"""


def test_the_connection_form_has_its_fields(floor_python: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [floor_python, "-c", _FORM],
        env={"PATH": os.environ["PATH"], "AIRFLOW_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FORM "))
    name, host, fields, hidden = json.loads(line.removeprefix("FORM "))
    assert (name, host) == ("NATS JetStream", "Servers")
    assert fields == sorted(CONNECTION_FIELDS)
    assert hidden == ["credentials_secret", "nkey_seed_secret", "token"]


def test_the_monitor_page_has_its_routes(floor_python: Path, tmp_path: Path) -> None:
    program = "from airflow_provider_jetstream.plugins.monitor import JetStreamMonitorPlugin as Plugin"
    done = subprocess.run(
        [floor_python, "-c", f"{program}; print(*(route.path for route in Plugin().fastapi_apps[0]['app'].routes))"],
        env={"PATH": os.environ["PATH"], "AIRFLOW_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {"/", "/api/me", "/api/snapshot"} <= set(done.stdout.split())


def test_the_mode_payload_says_that_it_needs_a_newer_airflow(floor_python: Path, tmp_path: Path) -> None:
    program = """
from airflow_provider_jetstream.triggers.message import JetStreamMessageTrigger
consumers = [{"name": "c", "max_deliver": 3}]
arguments = {"work_queue": {"name": "q", "subjects": ["q.>"], "consumers": consumers}, "consumer": "c"}
print(JetStreamMessageTrigger(**arguments).serialize()[1]["mode"])
JetStreamMessageTrigger(**arguments, mode="payload")
"""
    done = subprocess.run(
        [floor_python, "-c", program],
        env={"PATH": os.environ["PATH"], "AIRFLOW_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout.split()[-1:] == ["doorbell"], done.stderr
    assert "ArgumentError: expected Airflow 3.3 or newer for mode='payload'" in done.stderr
    assert "found 3.1.8: upgrade Airflow, or use mode='doorbell'" in done.stderr
