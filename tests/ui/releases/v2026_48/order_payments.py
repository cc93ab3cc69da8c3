"""Charges orders; the release that mends the defect of docs/runbook.md."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from airflow_provider_jetstream.worker import Delivery


class AccountClosedError(Exception):
    """The customer's account is closed."""


async def charge(job: Delivery) -> dict[str, float]:
    """Charge an order.

    :param job: JSON with ``order``, ``customer`` and ``total``, as the shop writes it: ``1.249,90``
    :raises AccountClosedError: nobody can be charged
    """
    order = json.loads(job.body)
    total = parse_total(order["total"])
    await asyncio.sleep(0.02)
    if order["account"] == "closed":
        raise AccountClosedError(f"the account of customer {order['customer']} is closed since 2026-11-01")
    return {"charged": total}


def parse_total(text: str) -> float:
    """Return a total as a number."""
    return float(text.replace(".", "").replace(",", "."))
