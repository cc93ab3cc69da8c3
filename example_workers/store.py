"""Processes the orders of the DAG ``dead_letter_reprocess``: some fail for now, some until repaired, some for ever."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from airflow_provider_jetstream.worker import GiveUpError

if TYPE_CHECKING:
    from airflow_provider_jetstream.worker import Delivery

LEDGER = "STORE_LEDGER"


class BankBusyError(Exception):
    """The bank didn't answer; it will at another time of day."""


class MalformedOrderError(Exception):
    """The order has a form that the store doesn't accept."""


def process(job: Delivery) -> None:
    """Process an order.

    :param job: the order, JSON with ``id``, ``amount`` and ``bank``; an order of a slow bank succeeds once redriven
    :raises BankBusyError: another attempt may succeed
    :raises MalformedOrderError: the body must be repaired
    :raises GiveUpError: the body isn't an order, and further attempts would change nothing
    """
    try:
        order = json.loads(job.body)
    except ValueError as error:
        raise GiveUpError("expected an order as JSON, found something else") from error
    if not isinstance(order["amount"], int | float):
        raise MalformedOrderError(f"expected the amount as a number, found {order['amount']!r}")
    if order["bank"] == "slow" and not job.redrives:
        raise BankBusyError("the bank didn't answer")
    if ledger := os.environ.get(LEDGER):
        with Path(ledger).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"id": order["id"], "amount": order["amount"]}) + "\n")
