"""Settles card payments: the handler of the queues in the documentation's pictures."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from airflow_provider_jetstream.worker import Delivery


class AcquirerTimeoutError(Exception):
    """The acquirer didn't answer in time."""


class LedgerClosedError(Exception):
    """The day's ledger is closed."""


async def settle(job: Delivery) -> None:
    """Settle a payment.

    :param job: JSON with ``payment``, ``amount`` and ``acquirer``
    :raises AcquirerTimeoutError: another attempt may succeed
    :raises LedgerClosedError: the payment belongs to a day that is closed
    """
    payment = json.loads(job.body)
    await asyncio.sleep(0.05)
    if payment["acquirer"] == "worldline" and not job.redrives:
        raise AcquirerTimeoutError("acquirer worldline answered 504 after 3 attempts: upstream request timeout")
    if payment["day"] < "2026-11-20":
        raise LedgerClosedError(f"the ledger of {payment['day']} is closed; post it to the correction account")
