"""Handlers of the example queues: most jobs complete, some fail for now, some until repaired, some for ever."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from airflow_provider_jetstream.worker import GiveUpError

if TYPE_CHECKING:
    from airflow_provider_jetstream.worker import Delivery

# So that a person sees jobs in flight.
_SECONDS_OF_A_RECEIPT = 0.2
_SECONDS_OF_A_THUMBNAIL = 2.0


class AddressError(Exception):
    """The address has to be repaired before the receipt can be sent."""


class MailboxBusyError(Exception):
    """The mailbox takes no receipt now; it will later."""


def send_receipt(job: Delivery) -> dict[str, str]:
    """Send a receipt by email, or rather wait as long as that takes.

    :param job: JSON with ``to``, and with ``busy`` where the mailbox takes it only once it is redriven
    :raises AddressError: the body must be repaired
    :raises MailboxBusyError: a redriven receipt is sent
    """
    receipt = job.json()
    time.sleep(_SECONDS_OF_A_RECEIPT)
    address: str = receipt["to"]
    if address != address.lower():
        raise AddressError("expected an address in small letters, found capitals")
    if receipt.get("busy") and not job.redrives:
        raise MailboxBusyError("expected the mailbox to take the receipt, found it busy")
    return {"sent": address}


def render_thumbnail(job: Delivery) -> None:
    """Render a thumbnail, or rather wait as long as that takes.

    :param job: JSON with ``file``
    :raises GiveUpError: the file isn't an image, and further attempts would change nothing
    """
    file: str = job.json()["file"]
    if not file.endswith((".jpg", ".png")):
        raise GiveUpError(f"expected an image, found {Path(file).suffix}")
    time.sleep(_SECONDS_OF_A_THUMBNAIL)
