"""How many modules of the package a DAG file loads with each public class, and what it doesn't load."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from airflow_provider_jetstream.tasks import runtime

_MOST_MODULES = 45
_CLASSES = {
    "assets.stream_asset": "queue_asset",
    "hooks.jetstream": "JetStreamHook",
    "notifications.jetstream": "JetStreamNotifier",
    "operators.cancel": "JetStreamCancelOperator",
    "operators.consume": "JetStreamConsumeOperator",
    "operators.provision": "JetStreamProvisionOperator",
    "operators.publish": "JetStreamPublishOperator",
    "operators.redrive": "JetStreamRedriveOperator",
    "operators.spark": "JetStreamDeadLetterReportOperator",
    "queues.jetstream": "JetStreamMessageQueueProvider",
    "sensors.dead_letter": "JetStreamDeadLetterSensor",
    "sensors.jobs": "JetStreamJobsSensor",
    "sensors.queue": "JetStreamQueueDrainedSensor",
    "triggers.completion": "JobCompletionTrigger",
    "triggers.dead_letter": "DeadLetterTrigger",
    "triggers.message": "JetStreamMessageTrigger",
    "triggers.queue": "QueueDrainedTrigger",
    "triggers.redrive": "RedriveWaveTrigger",
    "triggers.waiting_messages": "WaitingMessagesTrigger",
}
# What acts on a server, or waits for it, and what only an argument that is given needs.
_ACTING = (
    *("client.connect", "client.nats_py", "dead_letters.scan", "publication", "redrive.redrive", "waiting.wait"),
    *("dead_letters.selection", "queue.work_queue", "redrive.json_patch", "redrive.request"),
)
# One process for all: importing Airflow takes longest, and each fork begins after that.
_PROGRAM = f"""
import importlib, json, os, sys
from airflow.sdk import DAG, BaseHook, BaseNotifier, BaseOperator, BaseSensorOperator, task
for module, name in {_CLASSES!r}.items():
    sys.stdout.flush()
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    getattr(importlib.import_module("airflow_provider_jetstream." + module), name)
    print(json.dumps([module, sorted(name for name in sys.modules if name.startswith("airflow_provider_jetstream"))]))
    sys.stdout.flush()
    os._exit(0)
"""


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    found = subprocess.run([sys.executable, "-c", _PROGRAM], check=True, capture_output=True, text=True)
    return dict(json.loads(line) for line in found.stdout.splitlines() if line.startswith("["))


@pytest.mark.parametrize("module", _CLASSES)
def test_a_dag_file_that_imports_a_class_loads_few_modules(module: str, loaded: dict[str, list[str]]) -> None:
    modules = loaded[module]
    assert len(modules) <= _MOST_MODULES, "\n".join(modules)
    acting = {f"airflow_provider_jetstream.jetstream.{name}" for name in _ACTING}
    assert acting.isdisjoint(modules)


def test_the_names_that_tasks_act_with_are_typed_and_there() -> None:
    tree = ast.parse(Path(str(runtime.__file__)).read_text(encoding="utf-8"))
    (typed,) = (node for node in tree.body if isinstance(node, ast.If))
    checked = [alias.name for node in typed.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(checked) == sorted(runtime.__all__)
    assert [name for name in checked if not hasattr(runtime, name)] == []
