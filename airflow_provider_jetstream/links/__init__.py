"""Links from a task to the page that shows the queues."""

from airflow_provider_jetstream.airflow_version import require_airflow

require_airflow()
