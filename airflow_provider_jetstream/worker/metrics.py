"""Numbers about a worker for Prometheus; its client is imported only where a port is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from airflow_provider_jetstream.jetstream.errors import WorkerSetupError

if TYPE_CHECKING:
    from collections.abc import Callable

_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 900, 3_600)


class Metrics(Protocol):
    """Counts what a worker does."""

    def ended(self, outcome: str, seconds: float) -> None:
        """Count the end of a delivery.

        :param outcome: what became of the job
        :param seconds: from its arrival to its end
        """

    def close(self) -> None:
        """Count no more."""


class NoMetrics:
    """Counts nothing."""

    def ended(self, outcome: str, seconds: float) -> None:
        """Count nothing.

        :param outcome: passed over
        :param seconds: passed over
        """

    def close(self) -> None:
        """Do nothing."""


class PrometheusMetrics:
    """Serves numbers under ``/metrics``.

    :param port: where; 0 for any that is free
    :param labels: what tells this worker apart: stream, consumer, worker
    :param running: counts the jobs in hand
    :param abandoned: counts the handlers that go on past their time
    :raises WorkerSetupError: prometheus-client isn't installed, or the port is taken
    """

    def __init__(
        self, port: int, labels: dict[str, str], running: Callable[[], int], abandoned: Callable[[], int]
    ) -> None:
        try:
            from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
        except ImportError as error:
            raise WorkerSetupError(
                f"expected prometheus-client to serve numbers, found none ({error}): install it, or this package with"
                " its extra metrics"
            ) from None
        registry = CollectorRegistry()
        names, values = tuple(labels), tuple(labels.values())
        self._values = values
        self._jobs = Counter("jetstream_worker_jobs", "Deliveries that ended", (*names, "outcome"), registry=registry)
        self._seconds = Histogram(
            "jetstream_worker_job_seconds", "From arrival to end", names, registry=registry, buckets=_BUCKETS
        ).labels(*values)
        gauges = {"running": ("Jobs in hand", running), "abandoned": ("Handlers past their time", abandoned)}
        for name, (told, count) in gauges.items():
            gauge = Gauge(f"jetstream_worker_{name}_jobs", told, names, registry=registry)
            gauge.labels(*values).set_function(count)
        try:
            self._server, self._thread = start_http_server(port, registry=registry)
        except (OSError, OverflowError) as error:
            raise WorkerSetupError(f"expected a free port for metrics, found {port}: {error}") from None

    @property
    def port(self) -> int:
        """Where the numbers are served."""
        return int(self._server.server_port)

    def ended(self, outcome: str, seconds: float) -> None:
        """Count the end of a delivery.

        :param outcome: what became of the job
        :param seconds: from its arrival to its end
        """
        self._jobs.labels(*self._values, outcome).inc()
        self._seconds.observe(seconds)

    def close(self) -> None:
        """Serve no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
