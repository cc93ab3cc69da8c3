"""``jetstream-queue exporter`` as a process that is scraped, and the names that dashboard and alert rules use."""

from __future__ import annotations

import urllib.request
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from testbed.prometheus import exporter
from testbed.queues import eventually

if TYPE_CHECKING:
    from testbed.nats_server import NatsServer


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


@pytest.mark.slow
async def test_an_exporter_whose_server_goes_away_says_so_and_comes_back(own_nats: NatsServer) -> None:
    with exporter(own_nats.url, "--timeout", "2") as port:
        await eventually(lambda: scrape(port).get("jetstream_exporter_up") == {(): 1}, within=60)
        own_nats.kill()
        await eventually(lambda: scrape(port).get("jetstream_exporter_up") == {(): 0}, within=60)
        # Old numbers aren't shown as if they were those of now.
        await eventually(lambda: "jetstream_queue_messages" not in scrape(port), within=60)
        own_nats.start()
        await eventually(lambda: scrape(port).get("jetstream_exporter_up") == {(): 1}, within=60)
