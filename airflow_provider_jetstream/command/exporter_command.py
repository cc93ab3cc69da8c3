"""The sub-command ``exporter``: the metrics of all queues for Prometheus."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.command.exit_codes import ExitCode
from airflow_provider_jetstream.command.options import (
    connection_options,
    output_options,
    port,
    positive_float,
    settings_of,
)
from airflow_provider_jetstream.jetstream.errors import ArgumentError, JetStreamProviderError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from airflow_provider_jetstream.command.output import Output
    from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings
    from airflow_provider_jetstream.jetstream.inspection.queue_metrics import Sample

_PORT = 9808
_INTERVAL = 15.0
_STALE_INTERVALS = 3


def add_exporter_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    exporter = commands.add_parser(
        "exporter",
        parents=[connection_options(), output_options()],
        help="serve the metrics of all queues for Prometheus, until Ctrl-C",
    )
    exporter.set_defaults(run=_export)
    exporter.add_argument("--port", type=port, default=_PORT, help=f"where to serve /metrics; {_PORT} where absent")
    exporter.add_argument("--address", default="0.0.0.0", help="on which address; all where absent")  # noqa: S104
    exporter.add_argument(
        "--interval",
        type=positive_float,
        default=_INTERVAL,
        metavar="SECONDS",
        help="between two readings of the server; 15",
    )


class SampleCollector:
    """Gives Prometheus the last samples; none that are older than three intervals.

    :param interval: seconds between two readings of the server
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._lock = threading.Lock()
        self._samples: list[Sample] = []
        self._sampled_at: float | None = None
        self._seconds = 0.0
        self._is_up = False

    def set(self, samples: list[Sample], seconds: float) -> None:
        """Take the samples of now.

        :param seconds: how long the reading took
        """
        with self._lock:
            self._samples, self._seconds, self._is_up = samples, seconds, True
            self._sampled_at = time.monotonic()

    def fail(self) -> None:
        """Note that a reading failed."""
        with self._lock:
            self._is_up = False

    def collect(self) -> Iterator[Any]:
        """Yield the metrics, as prometheus-client calls it for each request."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        from airflow_provider_jetstream.jetstream.inspection.queue_metrics import METRICS

        with self._lock:
            samples, sampled_at, seconds, is_up = self._samples, self._sampled_at, self._seconds, self._is_up
        age = None if sampled_at is None else time.monotonic() - sampled_at
        yield GaugeMetricFamily("jetstream_exporter_up", "1 where the last reading of the server succeeded", is_up)
        if age is None:
            return
        yield GaugeMetricFamily("jetstream_exporter_age_seconds", "Age of the numbers", age)
        yield GaugeMetricFamily("jetstream_exporter_read_seconds", "How long the last reading took", seconds)
        if age > _STALE_INTERVALS * self._interval + seconds:
            return
        families: dict[str, Any] = {}
        for name, metric in METRICS.items():
            family = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            families[name] = family(name, metric.text, labels=metric.labels)
        for sample in samples:
            families[sample.metric].add_metric(sample.labels, sample.value)
        yield from families.values()


async def _export(options: argparse.Namespace, out: Output) -> ExitCode:
    settings, collector = settings_of(options, out), SampleCollector(options.interval)
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as error:
        raise ArgumentError(
            f"expected prometheus-client to serve metrics, found none ({error}): install it, or this package with its"
            " extra metrics"
        ) from None
    registry = CollectorRegistry()
    registry.register(collector)
    try:
        server, thread = start_http_server(options.port, options.address, registry=registry)
    except (OSError, OverflowError) as error:
        raise ArgumentError(f"expected a free port for metrics, found {options.port}: {error}") from None
    out.note(f"serves metrics on port {server.server_port}")
    try:
        # A signal is how it ends.
        with suppress(asyncio.CancelledError):
            await _sample_repeatedly(settings, collector, options.interval, out)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    return ExitCode.DONE


async def _sample_repeatedly(
    settings: ConnectionSettings, collector: SampleCollector, interval: float, out: Output
) -> None:
    """Sample the queues without end; a server that is away, or refuses, is tried again."""
    from airflow_provider_jetstream.jetstream.client.connect import connect
    from airflow_provider_jetstream.jetstream.inspection.queue_metrics import QueueSampler

    while True:
        try:
            async with connect(settings) as connection:
                sampler = QueueSampler()
                while True:
                    began = time.monotonic()
                    samples = await sampler.sample(connection)
                    collector.set(samples, time.monotonic() - began)
                    await asyncio.sleep(interval)
        except JetStreamProviderError as error:
            collector.fail()
            out.note(f"warning: {error}")
            await asyncio.sleep(interval)
