"""Processes the jobs of the DAG ``priority_jobs``; the body ``bad`` can't be processed."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from airflow_provider_jetstream.worker import Delivery

log = logging.getLogger("jobs")

LEDGER = "JOBS_LEDGER"


class BadJobError(Exception):
    """This job can't be processed, whatever the attempt."""


def process(job: Delivery) -> None:
    """Process a job.

    :raises BadJobError: the job's body is ``bad``
    """
    if job.body == b"bad":
        raise BadJobError(f"{job.subject} {job.sequence} is bad")
    if ledger := os.environ.get(LEDGER):
        line = json.dumps({"job": job.body.decode(), "subject": job.subject, "sequence": job.sequence})
        with Path(ledger).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    log.info("processed %s", job.body.decode())
