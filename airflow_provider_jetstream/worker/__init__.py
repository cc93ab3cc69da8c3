"""Doing a queue's jobs in Python, without Airflow."""

from airflow_provider_jetstream.worker.delivery import Delivery
from airflow_provider_jetstream.worker.errors import GiveUpError, RetryLaterError
from airflow_provider_jetstream.worker.worker import Worker

__all__ = ["Delivery", "GiveUpError", "RetryLaterError", "Worker"]
