"""Processes the orders of the shop that stays open after the demo, at a pace that a person can follow."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from example_workers import store

if TYPE_CHECKING:
    from airflow_provider_jetstream.worker import Delivery


def process(job: Delivery) -> None:
    """Take a second for an order, then process it as the store does."""
    time.sleep(1)
    store.process(job)
