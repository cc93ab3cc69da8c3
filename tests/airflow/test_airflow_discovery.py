"""Airflow discovers the provider and lists its parts, without a warning."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import pytest
from airflow_steps import ROOT, wait_for

from airflow_provider_jetstream.jetstream import ConnectionSettings
from testbed.ports import LOOPBACK, free_port

if TYPE_CHECKING:
    from subprocess import CompletedProcess

    from testbed.airflow import Airflow
    from testbed.nats_server import NatsServer

COMMANDS = {
    "get": ("providers", "get", "airflow-provider-jetstream", "--full", "--output", "json"),
    "hooks": ("providers", "hooks", "--output", "json"),
    "triggers": ("providers", "triggers", "--output", "json"),
    "behaviours": ("providers", "behaviours", "--output", "json"),
    "list": ("providers", "list", "--output", "json"),
    "queues": ("providers", "queues", "--output", "json"),
    "notifications": ("providers", "notifications", "--output", "json"),
    "links": ("providers", "links", "--output", "json"),
    "widgets": ("providers", "widgets", "--output", "json"),
    "plugins": ("plugins", "--output", "json"),
}
PACKAGE = "airflow_provider_jetstream"


# One process for all commands, since each would import Airflow for seconds.
_RUNNER = """
import contextlib, io, json, sys
from airflow.cli.cli_parser import get_parser
outputs = {}
for name, arguments in json.loads(sys.argv[1]).items():
    command = get_parser().parse_args(arguments)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        command.func(command)
    outputs[name] = output.getvalue()
print("OUTPUTS", json.dumps(outputs))
"""


@pytest.fixture(scope="module")
def process(airflow: Airflow) -> CompletedProcess[str]:
    """The process in which the ``airflow`` command has run with all arguments."""
    command = [airflow.python, "-c", _RUNNER, json.dumps(COMMANDS)]
    return subprocess.run(command, env=airflow.env, cwd=airflow.home, capture_output=True, text=True, check=True)


@pytest.fixture(scope="module")
def outputs(process: CompletedProcess[str]) -> dict[str, str]:
    (line,) = (line for line in process.stdout.splitlines() if line.startswith("OUTPUTS "))
    return dict(json.loads(line.removeprefix("OUTPUTS ")))


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("hooks", f"{PACKAGE}.hooks.jetstream.JetStreamHook"),
        ("triggers", f"{PACKAGE}.triggers.completion"),
        ("triggers", f"{PACKAGE}.triggers.dead_letter"),
        ("triggers", f"{PACKAGE}.triggers.queue"),
        ("list", "airflow-provider-jetstream"),
        ("notifications", f"{PACKAGE}.notifications.jetstream.JetStreamNotifier"),
        *(("links", f"{PACKAGE}.links.{link}") for link in ("monitor.QueueLink", "monitor.JobReportsLink")),
        ("queues", f"{PACKAGE}.queues.jetstream.JetStreamMessageQueueProvider"),
        ("get", f"{PACKAGE}.operators.consume.jetstream_consume_task"),
        # No command lists these by themselves.
        *(("get", f"{PACKAGE}.assets.stream_asset.{name}") for name in ("sanitize_uri", "create_asset")),
        ("behaviours", '"nats"'),
        ("plugins", "jetstream_monitor"),
        *(("widgets", f"extra__nats__{field}") for field in ("token", "tls_ca_file", "timeout")),
    ],
)
def test_a_command_lists_the_providers_parts(outputs: dict[str, str], command: str, expected: str) -> None:
    assert expected in json.dumps(json.loads(outputs[command]), ensure_ascii=False)


def test_no_command_and_no_component_warns_about_the_package(
    airflow: Airflow, outputs: dict[str, str], process: CompletedProcess[str]
) -> None:
    texts = {"stderr": process.stderr, **outputs}
    texts |= {path.name: path.read_text(errors="replace") for path in airflow.component_logs.iterdir()}
    assert "triggerer.log" in texts
    assert [
        (name, line)
        for name, text in texts.items()
        for line in text.splitlines()
        # A task's own warning is about its queue.
        if PACKAGE in line and "ti_id=" not in line
        if any(word in line.lower() for word in ("warn", "deprecat", "traceback"))
    ] == []


def test_every_dag_can_be_imported(airflow: Airflow) -> None:
    for path in (ROOT / "example_dags").glob("*.py"):
        wait_for(lambda dag_id=path.stem: airflow.dag(dag_id), f"the DAG {path.stem}")  # type: ignore[misc]
    assert airflow.import_errors() == []


def test_the_connection_form_has_the_fields(airflow: Airflow) -> None:
    forms = {form["connection_type"]: form for form in airflow.api("GET", "/ui/connections/hook_meta")}
    form = forms["nats"]
    assert form["hook_name"] == "NATS JetStream"
    assert form["standard_fields"]["host"]["title"] == "Servers"
    assert form["standard_fields"]["url_schema"]["hidden"] is True
    assert set(form["extra_fields"]) == ConnectionSettings.model_fields.keys() - {"servers", "user", "password", "name"}
    hidden = {name for name, field in form["extra_fields"].items() if field["schema"].get("format") == "password"}
    assert hidden == {"token", "nkey_seed_secret", "credentials_secret"}
    # A field that may be empty must allow null, else the form requires it.
    assert all("null" in field["schema"]["type"] for field in form["extra_fields"].values())


def press_test_button(airflow: Airflow, connection: dict[str, object]) -> tuple[bool, str]:
    answer = airflow.api("POST", "connections/test", {"connection_id": "tried", **connection})
    return answer["status"], answer["message"]


def test_the_test_button_works(airflow: Airflow, nats: NatsServer, connections: dict[str, dict[str, object]]) -> None:
    ok, message = press_test_button(airflow, connections["nats_default"])
    assert ok, message
    assert message.startswith(f"Connected to nats-server {nats.version} with JetStream")


def test_the_test_button_says_what_is_wrong(airflow: Airflow, connections: dict[str, dict[str, object]]) -> None:
    port = free_port()
    ok, message = press_test_button(airflow, connections["nats_default"] | {"port": port})
    assert not ok
    assert message.startswith(f"no NATS server reached at nats://{LOOPBACK}:{port}: ")
    assert message.endswith("; check host, port and firewall")
    ok, message = press_test_button(airflow, connections["nats_wrong_password"])
    assert not ok
    assert "refused the credentials: expected valid ones, found user and password; check them" in message
