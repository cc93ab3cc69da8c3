"""An Airflow of several teams: what a team's connection opens for tasks, triggers and the page."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
from airflow_steps import log_text, process_jobs, wait_for, wait_for_states

from airflow_provider_jetstream.jetstream import WorkQueue
from testbed.airflow import Airflow
from testbed.airflow_client import AirflowClient
from testbed.airflow_settings import migrate, prepare_home
from testbed.ports import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from airflow_provider_jetstream.jetstream import ConnectionSettings
    from testbed.nats_server import NatsServer

pytestmark = [pytest.mark.airflow, pytest.mark.slow]

QUEUE = {
    "name": "leads",
    "subjects": ["leads.>"],
    "consumers": [{"name": "caller", "max_deliver": 1, "ack_wait": "1m"}],
    "events": "leads_events",
    "dead_letters": "leads_dead",
}
DAG = f"""
from airflow.sdk import DAG
from airflow_provider_jetstream.operators.provision import JetStreamProvisionOperator
from airflow_provider_jetstream.operators.publish import JetStreamPublishOperator

def publish(task_id, nats_conn_id, **arguments):
    return JetStreamPublishOperator(
        task_id=task_id, nats_conn_id=nats_conn_id, work_queue={QUEUE!r}, subject="leads.new", jobs=[task_id],
        wait_for_completion=True, retries=0, **arguments,
    )

with DAG("leads", schedule=None):
    JetStreamProvisionOperator(task_id="provision", nats_conn_id="nats_sales", work_queue={QUEUE!r}) >> [
        publish("inline", "nats_sales", deferrable=False),
        publish("deferred", "nats_sales", deferrable=True, defer_after=0),
        publish("unread", "nats_unread", deferrable=True, defer_after=0),
    ]
"""
LOCAL = "airflow.dag_processing.bundles.local.LocalDagBundle"
RUN = "of_a_team"


@pytest.fixture(scope="module")
def teams(
    nats: NatsServer,
    connections: dict[str, dict[str, object]],
    tmp_path_factory: pytest.TempPathFactory,
    migrated_databases: Path,
) -> Iterator[Airflow]:
    """An Airflow with a bundle, two connections and a triggerer of the team sales."""
    folder = tmp_path_factory.mktemp("teams")
    for name in ("nobodys", "sales"):
        (folder / name).mkdir()
    (folder / "sales" / "leads.py").write_text(DAG)
    bundles = [
        {"name": "dags-folder", "classpath": LOCAL, "kwargs": {}},
        {"name": "sales", "classpath": LOCAL, "kwargs": {"path": str(folder / "sales")}, "team_name": "sales"},
    ]
    airflow = Airflow(
        folder / "home",
        folder / "nobodys",
        template_db=migrated_databases,
        env={
            "AIRFLOW__CORE__MULTI_TEAM": "True",
            "AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_CONFIG_LIST": json.dumps(bundles),
            "AIRFLOW__JETSTREAM__MONITOR_CONNECTIONS": "nats_sales",
            "AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL": "1",
        },
    )
    prepare_home(airflow.home)
    migrate(airflow.home, airflow.env, sys.executable, migrated_databases)
    created = airflow.cli("teams", "create", "sales")
    assert created.returncode == 0, created.stderr
    ours = connections["nats_default"]
    assert (ours["host"], ours["port"]) == (LOOPBACK, nats.port)
    with airflow:
        for conn_id in ("nats_sales", "nats_unread"):
            airflow.api("POST", "connections", {"connection_id": conn_id, "team_name": "sales", **ours})
        known = {"AIRFLOW_CONN_NATS_SALES": json.dumps(ours)}
        airflow.start_triggerer("triggerer-of-sales", team="sales", env=known)
        airflow.wait_for_dags("leads")
        airflow.trigger("leads", run_id=RUN)
        yield airflow


def test_tasks_use_their_teams_connection_and_triggers_one_of_the_triggerers_environment(
    teams: Airflow, settings: ConnectionSettings
) -> None:
    waiting = {"inline": "running", "deferred": "deferred", "unread": "failed"}
    wait_for_states(teams, "leads", RUN, waiting, timeout=300)
    assert "The conn_id `nats_unread` isn't defined, or belongs to a team" in log_text(teams, "leads", RUN, "unread")
    # All three have published with it.
    done = asyncio.run(process_jobs(settings, WorkQueue.load(QUEUE), 3))
    assert sorted(job.body.decode() for job in done) == ["deferred", "inline", "unread"]
    wait_for_states(teams, "leads", RUN, {"inline": "success", "deferred": "success"}, timeout=300)


def test_the_page_shows_a_teams_connection_to_the_team_only(teams: Airflow) -> None:
    def shown() -> dict[str, Any] | None:
        (state,) = teams.api("GET", "/jetstream/api/snapshot")["connections"]
        assert state["problem"] is None, state
        return dict(state) if state["queues"] else None

    assert "leads" in [queue["queue"] for queue in wait_for(shown, "the team's queue")["queues"]]
    stranger = AirflowClient(teams.url, "viewer", "viewer")
    assert stranger.api("GET", "/jetstream/api/snapshot")["connections"] == []
    assert stranger.request("GET", "/jetstream/api/queues/nats_sales/leads").status_code == 403
    stranger.close()
