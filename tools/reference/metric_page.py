"""The page about metrics: those of queues and redrives, of the exporter, of a worker, and of Airflow's stats."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.command.exporter_command import SampleCollector
from airflow_provider_jetstream.jetstream import RedriveOutcomes, RedriveState
from airflow_provider_jetstream.jetstream.inspection.queue_metrics import METRICS
from airflow_provider_jetstream.jetstream.inspection.queue_state import QueueState
from airflow_provider_jetstream.tasks.airflow_metrics import REDRIVE_COUNTS
from airflow_provider_jetstream.worker.logs import DeliveryOutcome
from airflow_provider_jetstream.worker.metrics import WORKER_METRICS
from tools.reference.docstrings import attribute_texts
from tools.reference.markdown import code, heading, join, plain, table

if TYPE_CHECKING:
    from collections.abc import Iterable
    from enum import Enum

_INTRO = (
    "Units are in the names: `seconds`, `bytes`, `ratio` (0 to 1); everything else is a number of things. Counters have"
    " the suffix `_total` in Prometheus."
)
_AIRFLOW = (
    "Sensors of dead letters and redrive operators send `jetstream_queue_dead_letters` and `jetstream_redrive_letters`"
    " as gauges through Airflow's own stats, with the labels as tags ([details](../command-line.md#exporter))."
)
_HEAD = ("metric", "kind", "labels", "meaning")


def metric_page() -> str:
    """Return the page."""
    return join(
        [
            heading(1, "Metrics"),
            _INTRO,
            heading(2, "Queues and redrives"),
            "Served by [`jetstream-queue exporter`](../command-line.md#exporter).",
            table(_HEAD, queue_rows()),
            heading(2, "The exporter"),
            table(_HEAD, exporter_rows()),
            heading(2, "A worker"),
            "Served by [`jetstream-worker run --metrics-port`](../worker.md).",
            table(_HEAD, worker_rows()),
            heading(2, "Airflow's stats"),
            _AIRFLOW,
            heading(2, "Values of labels"),
            heading(3, "state of jetstream_queue_state"),
            _values(QueueState),
            heading(3, "state of jetstream_redrives"),
            _values(RedriveState),
            heading(3, "outcome of jetstream_redrive_letters"),
            ", ".join(map(code, (*REDRIVE_COUNTS, *RedriveOutcomes.model_fields))) + ".",
            heading(3, "outcome of jetstream_worker_jobs"),
            _values(DeliveryOutcome),
        ]
    )


def queue_rows() -> list[list[str]]:
    """Return the metrics of queues and redrives."""
    return [_row(name, metric.kind, metric.labels, metric.text) for name, metric in METRICS.items()]


def exporter_rows() -> list[list[str]]:
    """Return the exporter's metrics about itself."""
    collector = SampleCollector(1.0)
    collector.set([], 0.0)
    return [
        _row(family.name, family.type, (), family.documentation)
        for family in collector.collect()
        if family.name not in METRICS
    ]


def worker_rows() -> list[list[str]]:
    """Return the metrics of a worker."""
    return [_row(name, metric.kind, metric.labels, metric.text) for name, metric in WORKER_METRICS.items()]


def metric_problems() -> list[str]:
    """Return what the reference lacks about metrics and the values of their labels."""
    found = [f"{row[0]}: no text" for row in (*queue_rows(), *exporter_rows(), *worker_rows()) if not row[-1]]
    for values in (QueueState, RedriveState, DeliveryOutcome):
        found += [f"{value!r}: no text" for value in values if value.name not in attribute_texts(values)]
    return found


def _row(name: str, kind: str, labels: Iterable[str], text: str) -> list[str]:
    return [code(f"{name}_total" if kind == "counter" else name), kind, ", ".join(map(code, labels)), text]


def _values(values: type[Enum]) -> str:
    texts = attribute_texts(values)
    return table(["value", "meaning"], [[code(value.value), plain(texts.get(value.name, ""), {})] for value in values])
