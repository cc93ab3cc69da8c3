"""Metrics of queues and redrives through Airflow's own stats: StatsD, Datadog or OpenTelemetry, as Airflow is set up.

The names are those of :mod:`~airflow_provider_jetstream.jetstream.inspection.queue_metrics`, with labels as tags. To
StatsD, Airflow sends tags only where its ``[metrics] statsd_influxdb_enabled`` is set. Elsewhere all queues would share
one gauge, so the labels' values are part of its name.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.airflow_compat import Stats, conf
from airflow_provider_jetstream.jetstream.inspection.queue_metrics import METRICS, Sample

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from airflow_provider_jetstream.jetstream.dead_letters.diagnose import Diagnosis

log = logging.getLogger(__name__)

REDRIVE_COUNTS = ("redriven", "parked", "discarded", "failed")
# Airflow sends no metric to StatsD whose name or tags have another character.
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]")


def send_samples(samples: Iterable[Sample]) -> None:
    """Send samples as gauges, counters included: their values are totals. What can't be sent fails no task."""
    try:
        is_statsd = _reads("statsd_on") and not _reads("statsd_datadog_enabled")
        has_tags = not is_statsd or _reads("statsd_influxdb_enabled")
        for sample in samples:
            labels = [_NOT_IN_NAMES.sub("_", label) for label in sample.labels] if is_statsd else sample.labels
            if has_tags:
                tags = dict(zip(METRICS[sample.metric].labels, labels, strict=True))
                Stats.gauge(sample.metric, sample.value, tags=tags)
            else:
                Stats.gauge(".".join((sample.metric, *labels)), sample.value)
    except Exception:
        # Whatever the deployment's stats raise, the task has done its work.
        log.warning("Metrics couldn't be sent to Airflow's stats", exc_info=True)


def _reads(setting: str) -> bool:
    return bool(conf.getboolean("metrics", setting, fallback=False))


def send_dead_letter_metrics(diagnosis: Diagnosis) -> None:
    """Send how many dead letters a queue has."""
    send_samples([Sample("jetstream_queue_dead_letters", (diagnosis.queue,), diagnosis.dead)])


def send_redrive_metrics(queue: str, summary: Mapping[str, Any]) -> None:
    """Send what a redrive did, and what became of its letters as far as that is known.

    :param summary: a report on a redrive, as JSON
    """
    counts = {name: summary[name] for name in REDRIVE_COUNTS if name in summary} | dict(summary.get("outcomes") or {})
    send_samples(Sample("jetstream_redrive_letters", (queue, outcome), count) for outcome, count in counts.items())
