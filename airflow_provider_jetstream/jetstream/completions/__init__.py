"""Learning that jobs ended, and how: from stored events first, then from new ones.

Nothing here depends on having listened at the right moment. A mark taken before publishing says from where to read; who
joins late, or again after a restart, reads the same events. All who wait for jobs of one queue over one connection
share one :class:`~airflow_provider_jetstream.jetstream.completions.follower.Follower`.
"""

from airflow_provider_jetstream.jetstream.completions.ends import DELETED_IN_FLIGHT
from airflow_provider_jetstream.jetstream.completions.mark import Mark, take_mark
from airflow_provider_jetstream.jetstream.completions.report import WaitReport
from airflow_provider_jetstream.jetstream.completions.tolerance import Tolerance
from airflow_provider_jetstream.jetstream.completions.waiting import wait_for_jobs

__all__ = ["DELETED_IN_FLIGHT", "Mark", "Tolerance", "WaitReport", "take_mark", "wait_for_jobs"]
