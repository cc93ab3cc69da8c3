"""What Airflow's ``common.messaging`` knows of this package."""

from airflow_provider_jetstream.airflow_version import require_airflow

require_airflow()
