"""A DAG that redrives the dead letters of any queue, as the configuration of its run says."""

from airflow_provider_jetstream.airflow_version import require_airflow

require_airflow()

from airflow_provider_jetstream.reprocessing.dag import reprocess_dag  # noqa: E402

__all__ = ["reprocess_dag"]
