"""``jetstream-queue exporter`` as a process that is scraped, and the names that dashboard and alert rules use."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from airflow_provider_jetstream.jetstream import (
    RedriveState,
)
from airflow_provider_jetstream.jetstream.inspection.queue_metrics import METRICS
from airflow_provider_jetstream.jetstream.inspection.queue_state import QueueState

_FOLDER = Path(__file__).parents[2] / "monitoring"


def test_dashboard_and_rules_are_what_grafana_and_prometheus_take() -> None:
    dashboard = json.loads((_FOLDER / "grafana-dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    (group,) = yaml.safe_load((_FOLDER / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]:
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]
    expressions += [rule["expr"] for rule in group["rules"]]
    for expression in expressions:
        assert expression.count("(") == expression.count(")")
        for labels in re.findall(r"(jetstream_[a-z_]+)\{([^}]*)\}", expression):
            metric = METRICS[labels[0].removesuffix("_total")]
            assert set(re.findall(r"(\w+)=", labels[1])) <= set(metric.labels)
        states = {"jetstream_redrives": RedriveState, "jetstream_queue_state": QueueState}
        for metric, found in re.findall(r'(\w+)\{[^}]*state=~"([^"]+)"', expression):
            assert set(found.split("|")) <= set(states[metric])
