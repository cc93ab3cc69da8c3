"""The plugin through which Airflow's UI gets what this package adds to it."""

from __future__ import annotations

from airflow.providers.common.compat.sdk import AirflowPlugin


class JetStreamMonitorPlugin(AirflowPlugin):
    """Registers the package's additions to the UI; every Airflow process loads it, so it imports nothing heavy."""

    name = "jetstream_monitor"
