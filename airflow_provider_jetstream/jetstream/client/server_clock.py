"""The time by the server's clock, whatever this machine's clock says."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Self

from airflow_provider_jetstream.jetstream.client.stream_api import stream_info

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow_provider_jetstream.jetstream.client.connection import Connection


@dataclass(frozen=True, slots=True)
class ServerClock:
    """Counts on from the time in an answer of the server; late by the time that the answer took, and never early.

    :param answered_at: the time in the answer
    :param read_at: when it arrived, by this process's monotonic clock
    """

    answered_at: datetime
    read_at: float

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> Self:
        """Read the time in STREAM.INFO or CONSUMER.INFO, which has just arrived."""
        return cls(datetime.fromisoformat(info["ts"]), time.monotonic())

    @classmethod
    async def read(cls, connection: Connection, stream: str) -> Self:
        """Ask the server for the time.

        :param stream: any stream that exists
        """
        return cls.of(await stream_info(connection, stream))

    def now(self) -> datetime:
        """Return the time."""
        return self.answered_at + timedelta(seconds=time.monotonic() - self.read_at)

    def seconds_until(self, moment: datetime) -> float:
        """Return the seconds until a moment; 0 or less where it is past."""
        return (moment - self.now()).total_seconds()
