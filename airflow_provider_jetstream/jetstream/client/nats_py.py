"""The connection on an event loop that tasks, triggers and programs open, with nats-py's client over it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.client.session import Session

if TYPE_CHECKING:
    from airflow_provider_jetstream.jetstream.client.nats_client import NatsPyClient


class NatsPyConnection(Session):
    """A connection that restores itself for as long as it is open."""

    @cached_property
    def client(self) -> NatsPyClient:
        """nats-py's client, over the same connection to the server."""
        # Importing nats-py takes a third of a second, and few programs need it.
        from airflow_provider_jetstream.jetstream.client.nats_client import NatsPyClient

        return NatsPyClient(self)

    async def close(self, seconds: float) -> None:
        """Close the connection once all is sent.

        :param seconds: how long it may take; what isn't sent then is dropped
        """
        if "client" in vars(self):
            # It may raise while it connects anew, and nothing is left to do about that.
            with suppress(Exception):
                async with asyncio.timeout(seconds):
                    await self.client.close()
        await self.finish(seconds)
