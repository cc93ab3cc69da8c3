"""Processes the orders of the DAG ``orders``, and fails about half of them."""

from __future__ import annotations

import json
import logging
import os
import time
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from airflow_provider_jetstream.worker import GiveUpError

if TYPE_CHECKING:
    from airflow_provider_jetstream.worker import Delivery

log = logging.getLogger("orders")

LEDGER = "ORDERS_LEDGER"


class OrderFailedError(Exception):
    """This attempt of an order failed."""


def process(job: Delivery) -> None:
    """Process an order.

    About every second attempt fails, and always the same ones, so that each run has the same dead letters; an order
    that was redriven succeeds.

    :raises OrderFailedError: this attempt fails
    :raises GiveUpError: the body isn't an order, and further attempts would change nothing
    """
    try:
        order = job.body.decode()
    except UnicodeDecodeError as error:
        raise GiveUpError("expected an order as text, found something else") from error
    if not job.redrives and sha256(f"{order} {job.attempt}".encode()).digest()[0] % 2:
        raise OrderFailedError(f"{order} could not be processed")
    time.sleep(0.01)
    if ledger := os.environ.get(LEDGER):
        line = json.dumps({"order": order, "sequence": job.sequence, "process": os.getpid()})
        with Path(ledger).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    log.info("processed %s", order)
