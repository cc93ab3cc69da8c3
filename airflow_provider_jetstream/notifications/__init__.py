"""Notifiers: messages about tasks and DAG runs, published on NATS."""

from airflow_provider_jetstream.airflow_version import require_airflow

require_airflow()
