"""Prometheus metrics of a worker; prometheus-client is imported only where a port is configured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol

from airflow_provider_jetstream.worker.errors import WorkerSetupError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from prometheus_client import Counter, Histogram

_LABELS: Final = ("stream", "consumer", "worker")
_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 900, 3_600)


class WorkerMetric(NamedTuple):
    """The kind, the text and the labels of a metric of a worker.

    :param labels: the names of its labels
    """

    kind: Literal["counter", "gauge", "histogram"]
    text: str
    labels: tuple[str, ...] = _LABELS


# A counter's name has no _total here; Prometheus adds it.
WORKER_METRICS: Final = {
    "jetstream_worker_jobs": WorkerMetric("counter", "Deliveries that ended", (*_LABELS, "outcome")),
    "jetstream_worker_job_seconds": WorkerMetric("histogram", "Seconds from arrival to end"),
    "jetstream_worker_running_jobs": WorkerMetric("gauge", "Jobs in flight"),
    "jetstream_worker_abandoned_jobs": WorkerMetric("gauge", "Handlers past their deadline"),
}


class ConsumerMetrics(Protocol):
    """Metrics of one consumer's jobs in one worker."""

    def record_deliveries(self, outcome: str, seconds: Sequence[float]) -> None:
        """Count deliveries that ended, and the time of each from its arrival to its end."""


class Metrics(Protocol):
    """Metrics of one worker."""

    def for_consumer(
        self, stream: str, consumer: str, running: Callable[[], int], abandoned: Callable[[], int]
    ) -> ConsumerMetrics:
        """Open a consumer's metrics.

        :param running: counts its jobs in flight
        :param abandoned: counts its handlers that run past their deadline
        """

    def close(self) -> None:
        """Stop serving metrics."""


class NoMetrics:
    """Counts nothing."""

    def for_consumer(self, *_: object) -> ConsumerMetrics:
        """Return itself."""
        return self

    def record_deliveries(self, outcome: str, seconds: Sequence[float]) -> None:
        """Count nothing."""

    def close(self) -> None:
        """Do nothing."""


class PrometheusMetrics:
    """Serves metrics under ``/metrics``; port 0 takes any free port.

    :raises WorkerSetupError: prometheus-client isn't installed, or the port is taken
    """

    def __init__(self, port: int, worker: str, address: str = "0.0.0.0") -> None:  # noqa: S104
        try:
            from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
        except ImportError as error:
            raise WorkerSetupError(
                f"expected prometheus-client to serve metrics, found none ({error}): install it, or this package with"
                " its extra metrics"
            ) from None
        registry = CollectorRegistry()
        self._worker = worker
        self._jobs = Counter(*_form("jetstream_worker_jobs"), registry=registry)
        self._seconds = Histogram(*_form("jetstream_worker_job_seconds"), registry=registry, buckets=_BUCKETS)
        self._running = Gauge(*_form("jetstream_worker_running_jobs"), registry=registry)
        self._abandoned = Gauge(*_form("jetstream_worker_abandoned_jobs"), registry=registry)
        try:
            self._server, self._thread = start_http_server(port, address, registry=registry)
        except (OSError, OverflowError) as error:
            raise WorkerSetupError(f"expected a free port for metrics, found {port}: {error}") from None

    @property
    def port(self) -> int:
        """The port of the HTTP server."""
        return int(self._server.server_port)

    def for_consumer(
        self, stream: str, consumer: str, running: Callable[[], int], abandoned: Callable[[], int]
    ) -> ConsumerMetrics:
        """Open a consumer's metrics; see :class:`Metrics`."""
        values = (stream, consumer, self._worker)
        self._running.labels(*values).set_function(running)
        self._abandoned.labels(*values).set_function(abandoned)
        return _PrometheusConsumer(self._jobs, self._seconds, values)

    def close(self) -> None:
        """Stop the HTTP server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _form(name: str) -> tuple[str, str, tuple[str, ...]]:
    metric = WORKER_METRICS[name]
    return name, metric.text, metric.labels


class _PrometheusConsumer:
    def __init__(self, jobs: Counter, seconds: Histogram, values: tuple[str, ...]) -> None:
        self._jobs = jobs
        self._values = values
        self._seconds = seconds.labels(*values)

    def record_deliveries(self, outcome: str, seconds: Sequence[float]) -> None:
        self._jobs.labels(*self._values, outcome).inc(len(seconds))
        for duration in seconds:
            self._seconds.observe(duration)
