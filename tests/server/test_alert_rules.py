"""The alert rules and the dashboard in a real Prometheus: each rule's own tests, and what an exporter really serves."""

from __future__ import annotations

import json
import re
import subprocess
from typing import TYPE_CHECKING

import pytest
import yaml

from airflow_provider_jetstream.jetstream import account_for_jobs, connect, connection_settings
from testbed.dead_letters import make_terminated_letters
from testbed.prometheus import ALERTS, exporter, prometheus, prometheus_program
from testbed.queues import eventually, make_dead_letters, make_queue, publish_jobs

if TYPE_CHECKING:
    from pathlib import Path

    from testbed.nats_server import NatsServer

TESTS = ALERTS.with_name("alerts_test.yaml")
DASHBOARD = ALERTS.with_name("grafana-dashboard.json")


def promtool(*arguments: str) -> str:
    """Run promtool; return what it prints."""
    done = subprocess.run(
        [prometheus_program("promtool"), *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_prometheus_takes_the_rules_and_each_fires_when_it_should_only() -> None:
    assert "SUCCESS" in promtool("check", "rules", str(ALERTS))
    assert "SUCCESS" in promtool("test", "rules", str(TESTS))


def test_each_rule_has_a_test_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    cases = [case for test in yaml.safe_load(TESTS.read_text())["tests"] for case in test["alert_rule_test"]]
    for rule in group["rules"]:
        fires = {bool(case.get("exp_alerts")) for case in cases if case["alertname"] == rule["alert"]}
        assert fires == {True, False}, rule["alert"]


@pytest.mark.slow
async def test_rules_and_dashboard_are_evaluated_on_what_the_exporter_serves(
    own_nats: NatsServer, name: str, tmp_path: Path
) -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    async with connect(connection_settings({"servers": (own_nats.url,)})) as admin:
        queue = await make_queue(admin, name, max_msgs=100)
        await make_dead_letters(admin, queue, ["a", "b"])
        await publish_jobs(admin, queue, ["c"])
        await account_for_jobs(admin, queue)
        with exporter(own_nats.url) as port, prometheus(port, tmp_path / "prometheus") as server:
            await eventually(
                lambda: server.values("jetstream_queue_dead_letter_entries_stored_total") == [2], within=60
            )
            await eventually(lambda: not server.rule_problems(), within=60)
            assert not server.firing()
            await make_terminated_letters(admin, queue, ["d", "e", "f"], reason="no such account")
            fired = await eventually(server.firing, within=60)
            assert fired.keys() == {"JetStreamDeadLetters"}
            assert fired["JetStreamDeadLetters"][0]["annotations"]["summary"] == f"Jobs of {name} die"
            for panel in panels:
                for target in panel["targets"]:
                    expression = re.sub(r"\$__\w+", "5m", target["expr"].replace("$queue", ".*"))
                    found = server.values(expression)
                    # Of redrives there is nothing yet.
                    assert found or "jetstream_redrive_letters" in expression, expression
