"""What reaches StatsD and OpenTelemetry from Airflow's own stats, set up as the process of a task does."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from airflow_steps import own_statsd, process_jobs, provisioned, statsd
from dags.redrives import queue as queue_of

from airflow_provider_jetstream.jetstream import connect
from airflow_provider_jetstream.jetstream.errors import DeadlineError
from airflow_provider_jetstream.operators.redrive import JetStreamRedriveOperator
from testbed.ports import LOOPBACK
from testbed.queues import eventually
from testbed.received_stats import received_otlp, received_statsd

if TYPE_CHECKING:
    from pathlib import Path

    from airflow.sdk import Context

    from airflow_provider_jetstream.jetstream import ConnectionSettings

# The task's process begins in the same way.
SENDING = """
from airflow.sdk._shared.observability.metrics import stats
from airflow.sdk.configuration import conf
from airflow.sdk.observability.metrics import stats_utils

stats.initialize(
    factory=stats_utils.get_stats_factory(), export_legacy_names=conf.getboolean("metrics", "legacy_names_on")
)
from airflow_provider_jetstream.jetstream.inspection.queue_metrics import Sample
from airflow_provider_jetstream.tasks.airflow_metrics import send_redrive_metrics, send_samples

outcomes = {"completed": 4, "died_again": 6, "still_running": 0, "unknown": 0}
send_redrive_metrics("orders", {"redriven": 10, "parked": 1, "failed": 0, "outcomes": outcomes})
send_samples(Sample("jetstream_queue_dead_letters", (queue,), 87) for queue in ("orders", "Z\u00fcrich orders"))
"""


def send(home: Path, **settings: str) -> None:
    """Send metrics with these settings of Airflow, in a process of its own."""
    env = {"AIRFLOW_HOME": str(home), "AIRFLOW__CORE__LOAD_EXAMPLES": "False", **settings}
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("AIRFLOW", "OTEL"))}
    subprocess.run([sys.executable, "-c", SENDING], env=clean | env, check=True, timeout=120)


@pytest.mark.slow
async def test_statsd_without_tags_has_the_queue_in_the_name(tmp_path: Path) -> None:
    with received_statsd() as gauges:
        send(tmp_path, **statsd(gauges.port))
        await eventually(lambda: len(gauges.of("jetstream_queue_dead_letters")) == 2)
        assert gauges.of("jetstream_") == {
            "airflow.jetstream_redrive_letters.orders.redriven": [10],
            "airflow.jetstream_redrive_letters.orders.parked": [1],
            "airflow.jetstream_redrive_letters.orders.failed": [0],
            "airflow.jetstream_redrive_letters.orders.completed": [4],
            "airflow.jetstream_redrive_letters.orders.died_again": [6],
            "airflow.jetstream_redrive_letters.orders.still_running": [0],
            "airflow.jetstream_redrive_letters.orders.unknown": [0],
            "airflow.jetstream_queue_dead_letters.orders": [87],
            "airflow.jetstream_queue_dead_letters.Z_rich_orders": [87],
        }


@pytest.mark.slow
def test_labels_are_attributes_of_opentelemetry_and_the_end_of_the_process_loses_nothing(tmp_path: Path) -> None:
    with received_otlp() as gauges:
        send(
            tmp_path,
            AIRFLOW__METRICS__OTEL_ON="True",
            OTEL_EXPORTER_OTLP_METRICS_ENDPOINT=f"http://{LOOPBACK}:{gauges.port}/v1/metrics",
            OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf",
        )
        found = {name: values[-1] for name, values in gauges.of("jetstream_").items()}
    outcomes = {
        "redriven": 10,
        "parked": 1,
        "failed": 0,
        "completed": 4,
        "died_again": 6,
        "still_running": 0,
        "unknown": 0,
    }
    assert found == {
        f"airflow.jetstream_redrive_letters{{queue=orders,outcome={outcome}}}": count
        for outcome, count in outcomes.items()
    } | {f"airflow.jetstream_queue_dead_letters{{queue={queue}}}": 87 for queue in ("orders", "Z\u00fcrich orders")}


@pytest.mark.slow
async def test_a_redrive_in_waves_sends_how_far_it_is(
    settings: ConnectionSettings, name: str, own_connections: None
) -> None:
    queue = await provisioned(settings, queue_of(name))
    async with connect(settings) as connection:
        for body in (b"one", b"two"):
            await connection.client.jetstream().publish(f"{name}.one", body)
    await process_jobs(settings, queue, 2, fail=True)
    waves = JetStreamRedriveOperator(
        task_id="redrive", work_queue=queue, waves=[1, "rest"], deferrable=False, wait_timeout=0.5
    )
    task = SimpleNamespace(dag_id="dag", run_id="run", task_id="redrive", map_index=-1, try_number=1)
    with own_statsd() as gauges:
        with pytest.raises(DeadlineError):
            await asyncio.to_thread(waves.execute, cast("Context", {"ti": task}))
        await eventually(lambda: len(gauges.of(f"jetstream_redrive_letters.{name}.")) == 8)
        assert gauges.of("redriven") == {f"airflow.jetstream_redrive_letters.{name}.redriven": [1]}
        assert gauges.of("still_running") == {f"airflow.jetstream_redrive_letters.{name}.still_running": [1]}
