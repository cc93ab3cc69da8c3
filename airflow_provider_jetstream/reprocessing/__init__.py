"""A DAG for every queue that brings dead letters back as its run is told to."""

from airflow_provider_jetstream.reprocessing.dag import reprocess_dag

__all__ = ["reprocess_dag"]
