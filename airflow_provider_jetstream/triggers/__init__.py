"""Triggers, which wait without holding a worker slot."""

from airflow_provider_jetstream.airflow_version import require_airflow

require_airflow()
