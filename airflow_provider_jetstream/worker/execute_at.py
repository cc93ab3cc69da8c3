"""The header ``X-Execute-At``: jobs that a queue's publishers want to be started at a later time.

Until then the job stays in the queue: the worker naks it with the time that is left as the delay, which costs one of
its deliveries, however long it is. The worker holds the job itself where the next delivery would come within a moment,
or where there is none: a nak of the last delivery makes a dead letter of a job that was never started.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.contract import EXECUTE_AT
from airflow_provider_jetstream.jetstream.units import parse_time
from airflow_provider_jetstream.worker.errors import InvalidExecuteAtError

if TYPE_CHECKING:
    from datetime import datetime

    from airflow_provider_jetstream.worker.delivery import Delivery


def seconds_until_due(job: Delivery, now: datetime) -> float:
    """Return for how many seconds a job has to wait for its time; 0 where it has none.

    :param now: by the server's clock
    :raises InvalidExecuteAtError: its header is no time
    """
    text = job.headers.get(EXECUTE_AT)
    if text is None:
        return 0.0
    try:
        due = parse_time(text)
    except ValueError as error:
        raise InvalidExecuteAtError(f"header {EXECUTE_AT}: {error}; correct it and redrive the job") from None
    return max(0.0, (due - now).total_seconds())
