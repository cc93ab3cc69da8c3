"""Leases and pauses that end soon, for processes that are killed: whoever comes after them needn't wait a minute."""

from airflow_provider_jetstream.jetstream.audit import lease
from airflow_provider_jetstream.jetstream.redrive import in_place

_SECONDS = 2.0


def shorten_leases() -> None:
    """Let every lease that this process takes run out after two seconds, unless it is renewed, and pauses as well."""
    lease.LEASE_SECONDS, lease.TIME_LIMITS = _SECONDS, 0.0
    in_place._LATE_SECONDS = in_place._CHECK_SECONDS = _SECONDS  # noqa: SLF001
