"""Leases and pauses that end soon, for processes that are killed: whoever comes after them needn't wait a minute."""

from airflow_provider_jetstream.jetstream.audit import lease
from airflow_provider_jetstream.jetstream.redrive import in_place


def shorten_leases(seconds: float) -> None:
    """Let every lease that this process takes run out soon, unless it is renewed, and pauses as well."""
    lease.LEASE_SECONDS, lease.TIME_LIMITS = seconds, 0.0
    in_place._LATE_SECONDS = in_place._CHECK_SECONDS = max(1.0, seconds)  # noqa: SLF001
