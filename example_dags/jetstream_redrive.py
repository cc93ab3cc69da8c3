"""The DAG with which the monitor's page brings dead letters back; Airflow asks who may trigger it."""

from airflow_provider_jetstream.reprocessing import reprocess_dag

dag = reprocess_dag()
