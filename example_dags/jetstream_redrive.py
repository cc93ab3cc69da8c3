"""The DAG that the monitor's page triggers to redrive dead letters; Airflow decides who may trigger it."""

from airflow_provider_jetstream.reprocessing import reprocess_dag

dag = reprocess_dag()
