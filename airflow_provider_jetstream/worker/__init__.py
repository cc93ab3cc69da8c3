"""The Python worker: does a queue's jobs, without Airflow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from airflow_provider_jetstream.worker.delivery import Delivery
    from airflow_provider_jetstream.worker.errors import GiveUpError, HandlerDeadlineError, RetryLaterError
    from airflow_provider_jetstream.worker.worker import Worker

__all__ = [
    "Delivery",
    "GiveUpError",
    "HandlerDeadlineError",
    "RetryLaterError",
    "Worker",
]

__getattr__ = lazy_exports(__name__)
