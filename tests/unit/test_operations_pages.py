"""The YAML and the names on the pages for operators are what the programs take, and the proofs that they name exist."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import yaml

from airflow_provider_jetstream.command import program as queue_program
from airflow_provider_jetstream.jetstream.client.settings import VARIABLES
from airflow_provider_jetstream.jetstream.inspection.queue_metrics import METRICS
from airflow_provider_jetstream.jetstream.queue.work_queue import WorkQueue
from airflow_provider_jetstream.jetstream.roles.permissions import permissions
from airflow_provider_jetstream.worker import cli
from airflow_provider_jetstream.worker.in_flight import _SETTLE_TIMEOUT
from testbed.code_blocks import ROOT, code_blocks

QUEUE = "example_dags/queues/orders.yaml"
# The server's own, where a consumer declares none.
MAX_ACK_PENDING = 1_000


@cache
def objects() -> dict[tuple[str, str], dict[str, Any]]:
    """The objects of docs/kubernetes.md, by kind and name."""
    blocks = [yaml.safe_load(block.code) for block in code_blocks("yaml") if block.page == "docs/kubernetes.md"]
    return {(each["kind"], each["metadata"]["name"]): each for each in blocks}


def pod_of(deployment: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod of a Deployment and its only container."""
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    return pod, container


def worker() -> tuple[dict[str, Any], dict[str, Any], Any]:
    pod, container = pod_of(objects()["Deployment", "orders-worker"])
    program, *arguments = container["command"]
    assert program == "jetstream-worker"
    return pod, container, cli._parser().parse_args(arguments)  # noqa: SLF001 - The parser is the command's face.


def test_the_worker_is_one_of_a_declared_consumer_and_its_files_are_mounted() -> None:
    pod, container, options = worker()
    queue = WorkQueue.load(ROOT / QUEUE)
    assert options.consumer in {consumer.name for consumer in queue.consumers}
    assert f"--from-file=orders.yaml={QUEUE}" in (ROOT / "docs/kubernetes.md").read_text()
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    for file in (options.queue, variables["NATS_CREDENTIALS_FILE"]):
        assert mounts[file.rpartition("/")[0]] in {volume["name"] for volume in pod["volumes"]}
    policy = permissions(queue, "worker", consumer=options.consumer)
    assert variables["NATS_INBOX_PREFIX"] == policy.inbox_prefix


def test_the_pod_has_longer_to_end_than_its_worker() -> None:
    pod, _, options = worker()
    margin = pod["terminationGracePeriodSeconds"] - options.grace
    assert margin == 15
    # A last pull request, settling, and the end of the connection.
    assert margin >= 1 + _SETTLE_TIMEOUT + 5


@pytest.mark.parametrize("name", ["orders-worker", "jetstream-exporter"])
def test_probes_ask_the_port_on_which_metrics_are_served(name: str) -> None:
    _, container = pod_of(objects()["Deployment", name])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    probes = [value for key, value in container.items() if key.endswith("Probe")]
    assert probes
    assert {probe["httpGet"]["path"] for probe in probes} == {"/metrics"}
    if name == "orders-worker":
        served = worker()[2].metrics_port
    else:
        program, *arguments = container["command"]
        assert program == "jetstream-queue"
        served = queue_program.command_parser().parse_args(arguments).port
        annotations = objects()["Deployment", name]["spec"]["template"]["metadata"]["annotations"]
        assert annotations["prometheus.io/port"] == str(served)
        prefix = {
            "name": "NATS_INBOX_PREFIX",
            "value": permissions(WorkQueue.load(ROOT / QUEUE), "monitor").inbox_prefix,
        }
        assert prefix in container["env"]
    assert {ports[probe["httpGet"]["port"]] for probe in probes} == {served}
    assert {each["name"] for each in container["env"]} <= {f"NATS_{suffix}" for suffix in VARIABLES.values()}


def test_the_scaled_object_scales_this_worker_by_metrics_that_the_exporter_serves() -> None:
    spec = objects()["ScaledObject", "orders-worker"]["spec"]
    _, _, options = worker()
    queue = WorkQueue.load(ROOT / QUEUE)
    assert ("Deployment", spec["scaleTargetRef"]["name"]) in objects()
    (trigger,) = spec["triggers"]
    used = re.findall(r"(jetstream_\w+)\{([^}]*)\}", trigger["metadata"]["query"])
    assert {name for name, _ in used} <= METRICS.keys()
    for name, labels in used:
        named = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        assert set(named) == set(METRICS[name].labels)
        assert named == {"queue": queue.name, "consumer": options.consumer}
    in_flight = queue.consumer(options.consumer).max_ack_pending or MAX_ACK_PENDING
    assert spec["maxReplicaCount"] * options.concurrency <= in_flight
    assert int(trigger["metadata"]["threshold"]) == 2 * options.concurrency
    # KEDA takes text only.
    assert all(isinstance(value, str) for value in trigger["metadata"].values())


def test_the_runbook_says_what_to_do_about_each_alert() -> None:
    rules = yaml.safe_load((ROOT / "monitoring/alerts.yaml").read_text(encoding="utf-8"))
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    runbook = (ROOT / "docs/runbook.md").read_text(encoding="utf-8")
    assert alerts == set(re.findall(r"`(JetStream\w+)`", runbook))
