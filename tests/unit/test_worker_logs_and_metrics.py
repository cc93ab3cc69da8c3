"""The log lines and metrics of a worker."""

from __future__ import annotations

import json
import logging
import re
import socket
import sys
from typing import TYPE_CHECKING

import pytest

from airflow_provider_jetstream.worker.errors import WorkerSetupError
from airflow_provider_jetstream.worker.logs import JsonFormatter
from airflow_provider_jetstream.worker.metrics import PrometheusMetrics

if TYPE_CHECKING:
    from collections.abc import Iterator


def record(message: str, *arguments: object, **extra: object) -> logging.LogRecord:
    entry = logging.LogRecord("shop", logging.WARNING, __file__, 1, message, arguments, None)
    entry.__dict__.update(extra)
    return entry


def test_a_record_is_one_line_of_json_whatever_it_contains() -> None:
    line = JsonFormatter().format(record("two\nlines of %s", "größe", job={"sequence": 7, "odd": object}))
    assert "\n" not in line
    fields = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", fields.pop("time"))
    assert fields == {
        "level": "WARNING",
        "logger": "shop",
        "message": "two\nlines of größe",
        "sequence": 7,
        "odd": "<class 'object'>",
    }


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port with a listener."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_port_that_is_taken_is_named(taken_port: int) -> None:
    with pytest.raises(WorkerSetupError, match=f"expected a free port for metrics, found {taken_port}: "):
        PrometheusMetrics(taken_port, "3")


def test_metrics_without_prometheus_client_are_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(WorkerSetupError, match="expected prometheus-client to serve metrics, found none"):
        PrometheusMetrics(0, "3")
