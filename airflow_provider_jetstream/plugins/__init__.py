"""Additions to the Airflow UI."""

from airflow_provider_jetstream.airflow_version import require_airflow

require_airflow()
