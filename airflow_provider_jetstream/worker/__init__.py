"""Doing a queue's jobs in Python, without Airflow."""

from airflow_provider_jetstream.worker.runtime import Delivery, Worker

__all__ = ["Delivery", "Worker"]
