"""Prints the invoices of the DAG ``invoices``; one of them only once it was redriven."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from airflow_provider_jetstream.worker import Delivery

log = logging.getLogger("invoices")

LEDGER = "INVOICES_LEDGER"
JAMMING = "invoice-1"


class PaperJamError(Exception):
    """The printer is jammed until somebody has seen to it."""


def print_invoice(job: Delivery) -> None:
    """Print an invoice.

    :param job: the invoice, JSON with ``id``
    :raises PaperJamError: this invoice jams the printer, unless it was redriven
    """
    invoice = job.json()["id"]
    if invoice == JAMMING and not job.redrives:
        raise PaperJamError(f"{invoice} jammed the printer")
    if ledger := os.environ.get(LEDGER):
        with Path(ledger).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"invoice": invoice}) + "\n")
    log.info("printed %s", invoice)
