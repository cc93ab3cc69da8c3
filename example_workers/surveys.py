"""Sends the surveys of the DAG ``delayed_jobs``."""

from __future__ import annotations

import json
import logging
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from airflow_provider_jetstream.worker import Delivery

log = logging.getLogger("surveys")

LEDGER = "SURVEYS_LEDGER"


def send(job: Delivery) -> None:
    """Send a survey.

    :param job: the survey, JSON with ``to``
    """
    to = job.json()["to"]
    if ledger := os.environ.get(LEDGER):
        with Path(ledger).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"to": to, "sent_at": datetime.now(UTC).isoformat()}) + "\n")
    log.info("sent a survey to %s", to)
