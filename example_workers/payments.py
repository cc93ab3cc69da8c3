"""Makes the payments of the DAG ``redrive_in_waves``; the bank is closed at first."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from airflow_provider_jetstream.worker import Delivery

log = logging.getLogger("payments")

LEDGER = "PAYMENTS_LEDGER"


class BankClosedError(Exception):
    """The bank takes no payment now; it will at another time."""


def pay(job: Delivery) -> None:
    """Make a payment.

    :param job: the payment, JSON with ``id`` and ``closed``, the number of its attempts that find the bank closed; each
        redrive is another attempt
    :raises BankClosedError: this attempt is one of these
    """
    payment = job.json()
    if job.redrives < payment["closed"]:
        raise BankClosedError(f"{payment['id']} found the bank closed")
    if ledger := os.environ.get(LEDGER):
        with Path(ledger).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"payment": payment["id"]}) + "\n")
    log.info("made %s", payment["id"])
