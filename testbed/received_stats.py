"""Receives what Airflow's stats send: StatsD's packets, and OpenTelemetry's requests."""

from __future__ import annotations

import http.server
import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from testbed.ports import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import Iterator

_LONGEST = 65_535


class ReceivedGauges:
    """The gauges that have been received.

    :param port: where to send them
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self._values: dict[str, list[float]] = {}
        self._lock = threading.Lock()

    def add(self, name: str, value: float) -> None:
        """Take a value."""
        with self._lock:
            self._values.setdefault(name, []).append(value)

    def of(self, text: str) -> dict[str, list[float]]:
        """Return the values of each gauge whose name has a text in it, in the order in which they came."""
        with self._lock:
            return {name: list(values) for name, values in self._values.items() if text in name}


@contextmanager
def received_statsd() -> Iterator[ReceivedGauges]:
    """Receive StatsD's packets; a gauge has the name on the wire."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_000_000)
        opened.bind((LOOPBACK, 0))
        gauges = ReceivedGauges(opened.getsockname()[1])

        def receive() -> None:
            while packet := opened.recv(_LONGEST):
                for line in packet.decode().splitlines():
                    name, _, value = line.rpartition(":")
                    number, _, kind = value.partition("|")
                    if kind.startswith("g"):
                        gauges.add(name, float(number))

        thread = threading.Thread(target=receive, daemon=True)
        thread.start()
        try:
            yield gauges
        finally:
            # An empty packet ends the thread.
            opened.sendto(b"", opened.getsockname())
            thread.join(10)


@contextmanager
def received_otlp() -> Iterator[ReceivedGauges]:
    """Receive OpenTelemetry's requests; a gauge's attributes follow its name, as in ``name{queue=orders}``."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            request = ExportMetricsServiceRequest.FromString(body)
            for resource in request.resource_metrics:
                for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
                    for point in metric.gauge.data_points:
                        tags = ",".join(f"{tag.key}={tag.value.string_value}" for tag in point.attributes)
                        gauges.add(f"{metric.name}{{{tags}}}", point.as_double or float(point.as_int))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer((LOOPBACK, 0), Handler)
    gauges = ReceivedGauges(server.server_port)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield gauges
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
