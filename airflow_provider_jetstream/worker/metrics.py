"""Numbers about a worker for Prometheus; its client is imported only where a port is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from airflow_provider_jetstream.worker.errors import WorkerSetupError

if TYPE_CHECKING:
    from collections.abc import Callable

    from prometheus_client import Counter, Histogram

_NAMES = ("stream", "consumer", "worker")
_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 900, 3_600)


class ConsumerMetrics(Protocol):
    """Counts what a worker does with the jobs of one consumer."""

    def ended(self, outcome: str, seconds: float) -> None:
        """Count the end of a delivery.

        :param outcome: what became of the job
        :param seconds: from its arrival to its end
        """


class Metrics(Protocol):
    """Counts what a worker does."""

    def lane(
        self, stream: str, consumer: str, running: Callable[[], int], abandoned: Callable[[], int]
    ) -> ConsumerMetrics:
        """Count for one consumer.

        :param stream: its stream
        :param consumer: its name
        :param running: counts its jobs in hand
        :param abandoned: counts its handlers that go on past their time
        :return: what counts the others
        """

    def close(self) -> None:
        """Count no more."""


class NoMetrics:
    """Counts nothing."""

    def lane(self, *_: object) -> ConsumerMetrics:
        """Count nothing.

        :return: what counts nothing
        """
        return self

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
    :param worker: the worker's name
    :raises WorkerSetupError: prometheus-client isn't installed, or the port is taken
    """

    def __init__(self, port: int, worker: str) -> None:
        try:
            from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
        except ImportError as error:
            raise WorkerSetupError(
                f"expected prometheus-client to serve numbers, found none ({error}): install it, or this package with"
                " its extra metrics"
            ) from None
        registry = CollectorRegistry()
        self._worker = worker
        self._jobs = Counter("jetstream_worker_jobs", "Deliveries that ended", (*_NAMES, "outcome"), registry=registry)
        self._seconds = Histogram(
            "jetstream_worker_job_seconds", "From arrival to end", _NAMES, registry=registry, buckets=_BUCKETS
        )
        self._running = Gauge("jetstream_worker_running_jobs", "Jobs in hand", _NAMES, registry=registry)
        self._abandoned = Gauge(
            "jetstream_worker_abandoned_jobs", "Handlers past their time", _NAMES, registry=registry
        )
        try:
            self._server, self._thread = start_http_server(port, registry=registry)
        except (OSError, OverflowError) as error:
            raise WorkerSetupError(f"expected a free port for metrics, found {port}: {error}") from None

    @property
    def port(self) -> int:
        """Where the numbers are served."""
        return int(self._server.server_port)

    def lane(
        self, stream: str, consumer: str, running: Callable[[], int], abandoned: Callable[[], int]
    ) -> ConsumerMetrics:
        """Count for one consumer.

        :param stream: its stream
        :param consumer: its name
        :param running: counts its jobs in hand
        :param abandoned: counts its handlers that go on past their time
        :return: what counts the others
        """
        values = (stream, consumer, self._worker)
        self._running.labels(*values).set_function(running)
        self._abandoned.labels(*values).set_function(abandoned)
        return _PrometheusConsumer(self._jobs, self._seconds, values)

    def close(self) -> None:
        """Serve no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _PrometheusConsumer:
    def __init__(self, jobs: Counter, seconds: Histogram, values: tuple[str, ...]) -> None:
        self._jobs = jobs
        self._values = values
        self._seconds = seconds.labels(*values)

    def ended(self, outcome: str, seconds: float) -> None:
        self._jobs.labels(*self._values, outcome).inc()
        self._seconds.observe(seconds)
