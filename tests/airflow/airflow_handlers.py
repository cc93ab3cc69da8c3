"""Handlers of the workers that the tests of the skins start."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from airflow_provider_jetstream.worker import Delivery

LEDGER = "JOBS_LEDGER"


def instant(job: Delivery) -> None:
    """Record the job."""
    line = json.dumps({"job": job.body.decode(), "sequence": job.sequence, "attempt": job.attempt})
    with Path(os.environ[LEDGER]).open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def picky(job: Delivery) -> str:
    """Refuse what is bad."""
    if job.body == b"bad":
        raise ValueError("this job can't be done")
    return "done"


async def late(job: Delivery) -> None:
    """End when the waiting task has probably just deferred itself."""
    await asyncio.sleep(2.0 + job.sequence % 16 / 10)
    instant(job)
