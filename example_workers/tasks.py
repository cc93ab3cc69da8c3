"""Processes the tasks of the DAG ``partitioned_tasks``.

A task may be delivered again after it was processed, when the worker dies before its acknowledgement is stored. So a
result is stored under the id of its task, and a task that has a result isn't processed again: any worker can take it,
none remembers anything itself.
"""

from __future__ import annotations

import json
import logging
import os
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from airflow_provider_jetstream.worker import Delivery

log = logging.getLogger("tasks")

RESULTS = "TASKS_RESULTS"


def process(job: Delivery) -> dict[str, Any]:
    """Process a task, unless a delivery before this one has.

    :return: the result, which the completion carries
    """
    stored = Path(os.environ[RESULTS]) / f"{sha256(job.id.encode()).hexdigest()}.json"
    try:
        result: dict[str, Any] = json.loads(stored.read_text())
    except FileNotFoundError:
        result = {"type": job.subject.rpartition(".")[2], "task": job.body.decode(), "sequence": job.sequence}
        partial = stored.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(result))
        # Renamed into place: a worker that is killed leaves either the whole result or none.
        partial.rename(stored)
    log.info("processed %s", result["task"])
    return result
