"""The clock by which the page states ages. Tests move it by hours: what was read before is old then."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

# Seconds by which a test has moved the clock.
MOVED = 0.0


def of_server(at: datetime) -> datetime:
    """Return a time by a server's clock, which tests move as well."""
    return at + timedelta(seconds=MOVED)


def monotonic() -> float:
    """Return seconds that only grow."""
    return time.monotonic() + MOVED


def now() -> datetime:
    """Return the time in UTC."""
    return datetime.now(UTC) + timedelta(seconds=MOVED)
