"""What a client knows about the loss of its connection: the causes, and when its settings are to be read again."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

from airflow_provider_jetstream.jetstream.client.denials import is_refusal

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from airflow_provider_jetstream.jetstream.client.settings import ConnectionSettings

    RenewSettings = Callable[[], Awaitable[ConnectionSettings]]

log = logging.getLogger(__name__)

# Seconds: after these, a connection that can't be restored may have moved; a refused one has other credentials at once.
RENEW_AFTER: Final = 5.0
RENEW_AGAIN: Final = 5.0
# For so long credentials may be wrong while they are exchanged here and there.
REFUSED_FOR_GOOD: Final = 300.0
_REPORT_EVERY: Final = 30.0
_MOST_FAILURES: Final = 20


class Outage:
    """The attempts to connect since the connection was lost, or since the beginning.

    :ivar failures: why the connection was lost, where the server has said that, and why attempts failed
    """

    def __init__(self) -> None:
        self.failures: list[Exception] = []
        self._began_at = time.monotonic()
        self._refused_since: float | None = None
        self._renewed_at: float | None = None
        self._reported_at: float | None = None

    def begin(self, report: Exception | None = None) -> None:
        """Note that the connection is lost.

        :param report: what the server has said right before
        """
        self.failures = []
        self._began_at = time.monotonic()
        self._refused_since = self._renewed_at = self._reported_at = None
        if report:
            self.record(report)

    def record(self, error: Exception) -> None:
        """Note why an attempt failed."""
        self.failures.append(error)
        del self.failures[:-_MOST_FAILURES]
        if is_refusal(str(error)):
            self._refused_since = self._refused_since or time.monotonic()
        elif not isinstance(error, ConnectionError):
            self._refused_since = None

    def report(self, servers: str) -> None:
        """Log the latest cause, though not at every attempt."""
        now = time.monotonic()
        if self.failures and (self._reported_at is None or now - self._reported_at > _REPORT_EVERY):
            self._reported_at = now
            cause = str(self.failures[-1]) or type(self.failures[-1]).__name__
            log.warning("The connection to %s is lost, and tried again: %s", servers, cause)

    @property
    def renewal_is_due(self) -> bool:
        """Whether the settings are to be read again before the next attempt."""
        now = time.monotonic()
        if not self.failures or (self._renewed_at is not None and now - self._renewed_at < RENEW_AGAIN):
            return False
        return self._refused_since is not None or now - self._began_at >= RENEW_AFTER

    def note_renewal(self) -> None:
        """Note that the settings are read again now."""
        self._renewed_at = time.monotonic()

    @property
    def is_refused_for_good(self) -> bool:
        """Whether the credentials were refused for so long that nobody will correct them."""
        return self._refused_since is not None and time.monotonic() - self._refused_since >= REFUSED_FOR_GOOD
