"""Assets: the streams of work queues, as Airflow and OpenLineage know them."""

from airflow_provider_jetstream.airflow_version import require_airflow

require_airflow()
