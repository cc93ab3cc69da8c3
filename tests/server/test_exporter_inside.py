"""What no face shows of exporter."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from airflow_provider_jetstream.jetstream import (
    account_for_jobs,
    connect,
    connection_settings,
    discover_queue,
)
from airflow_provider_jetstream.jetstream.inspection.queue_metrics import METRICS, QueueSampler
from testbed.prometheus import exporter
from testbed.queues import eventually, make_queue, publish_jobs, store_completion

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream import WorkQueue
    from testbed.face import NatsPyConnection
    from testbed.nats_server import NatsServer

_FOLDER = Path(__file__).parents[2] / "monitoring"


_OWN = {"jetstream_exporter_up", "jetstream_exporter_age_seconds", "jetstream_exporter_read_seconds"}


def scrape(port: int) -> dict[str, dict[tuple[str, ...], float]]:
    """Return the values by metric and labels as Prometheus reads them."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    except OSError:
        return {}
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


async def busy_queue(connection: NatsPyConnection, name: str) -> WorkQueue:
    """A queue with a limit, pending jobs, dead letters, and one whose redrive is recorded."""
    queue = await make_queue(connection, name, max_msgs=100, dead=["a", "b"])
    await publish_jobs(connection, queue, ["c", "d", "e"])
    assert queue.audit
    info = await connection.api(f"STREAM.INFO.{name}")
    record = {
        "id": "20261121T020000-0a1b2c3d",
        "stream": name,
        "created": info["created"],
        "run": "r",
        "state": "at_gate",
        "began_at": "2026-11-21T02:00:00Z",
        "redriven": 10,
        "outcomes": {"completed": 4, "died_again": 6},
    }
    await connection.client.jetstream().publish(f"audit.{name}.redrives.{record['id']}", json.dumps(record).encode())
    # An account names a job that is deleted; the consumer's workers store completions.
    (deleted,) = await publish_jobs(connection, queue, ["deleted"])
    await store_completion(connection, queue, deleted + 1)
    await connection.api(f"STREAM.MSG.DELETE.{name}", {"seq": deleted})
    await account_for_jobs(connection, queue)
    return queue


@pytest.mark.slow
async def test_what_is_scraped_has_every_metric_that_dashboard_and_rules_use(own_nats: NatsServer, name: str) -> None:
    async with connect(connection_settings({"servers": (own_nats.url,)})) as admin:
        await busy_queue(admin, name)
    with exporter(own_nats.url) as port:

        def scraped() -> dict[str, dict[tuple[str, ...], float]] | None:
            found = scrape(port)
            return found if "jetstream_queue_messages" in found else None

        found = await eventually(scraped, within=60)
    assert found["jetstream_queue_messages"] == {(name,): 5}
    assert found["jetstream_queue_dead_letters"] == {(name,): 2}
    assert found["jetstream_queue_dead_letter_entries_stored_total"] == {(name,): 2}
    assert found["jetstream_queue_fill_ratio"] == {(name,): 0.05}
    assert found["jetstream_consumer_pending_jobs"] == {("worker", name): 3}
    assert found["jetstream_redrives"][name, "at_gate"] == 1
    assert [labels for labels, value in found["jetstream_queue_state"].items() if value] == [(name, "stuck")]
    assert found["jetstream_redrive_letters"]["died_again", name] == 6
    assert found["jetstream_queue_unaccounted_jobs"] == {(name,): 1}
    assert found["jetstream_queue_unknown_ends"] == {(name,): 0}
    assert 0 <= found["jetstream_queue_account_age_seconds"][name,] < 3600
    exposed = {metric + ("_total" if METRICS[metric].kind == "counter" else "") for metric in METRICS} | _OWN
    assert exposed <= found.keys(), exposed - found.keys()
    dashboard, rules = (_FOLDER / "grafana-dashboard.json").read_text(), (_FOLDER / "alerts.yaml").read_text()
    for text in (dashboard, rules):
        used = set(re.findall(r"\bjetstream_[a-z_]+", text))
        assert used <= found.keys(), used - found.keys()
    # Nothing is exported that nobody looks at.
    assert exposed <= set(re.findall(r"\bjetstream_[a-z_]+", dashboard + rules)) | {"jetstream_exporter_read_seconds"}


@pytest.mark.slow
async def test_a_queue_that_can_not_be_discovered_has_its_numbers_all_the_same(
    connection: NatsPyConnection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await connection.api(f"STREAM.CREATE.{name}", {"name": name, "subjects": [name], "retention": "workqueue"})
    calls = []

    async def counted(opened: NatsPyConnection, queue: str) -> WorkQueue:
        calls.append(queue)
        return await discover_queue(opened, queue)

    monkeypatch.setattr(f"{QueueSampler.__module__}.discover_queue", counted)
    sampler = QueueSampler()
    for _ in range(3):
        samples = await sampler.sample(connection)
    assert ("jetstream_queue_consumers", (name,), 0) in samples
    # What a queue is isn't read again with each reading of numbers.
    assert calls.count(name) == 1
