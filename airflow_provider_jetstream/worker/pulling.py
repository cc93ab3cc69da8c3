"""Pulling jobs, no more than were asked for, each handed on the moment it comes."""

from __future__ import annotations

import asyncio
import json
import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable

    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

    from airflow_provider_jetstream.jetstream.connection import Connection

log = logging.getLogger("jetstream.worker")

_EXPIRES = 1.0
_PAUSE_AFTER_REFUSAL = 0.5

_NOTHING_CAME = {str(HTTPStatus.NOT_FOUND.value), str(HTTPStatus.REQUEST_TIMEOUT.value)}


class Puller:
    """One pull request at a time.

    The client's own ``fetch`` of several keeps the first message until the others are there or its time is over.

    :param connection: the server
    :param stream: the stream
    :param consumer: one of its consumers
    :param take: is called with each message
    """

    def __init__(self, connection: Connection, stream: str, consumer: str, take: Callable[[Msg], None]) -> None:
        self._connection = connection
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._take = take
        self._inbox = connection.client.new_inbox()
        self._subscription: Subscription | None = None
        self._requests = 0
        self._missing = 0
        self._refusal: str | None = None
        self._ended = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._subscription = await self._connection.client.subscribe(f"{self._inbox}.*", cb=self._arrived)
        return self

    async def __aexit__(self, *_: object) -> None:
        from nats import errors

        try:
            if self._subscription:
                await self._subscription.unsubscribe()
        except errors.Error as error:
            log.debug("The subscription for pulled jobs went with its connection: %s", error)

    async def pull(self, count: int) -> None:
        """Ask for messages, and return when they came or the server has no more for now.

        Not to be cancelled: what the server sends then would have burned a delivery.

        :param count: how many at the most
        """
        from nats import errors

        if not self._connection.client.is_connected:
            # The client would send every request of the meantime once it is back, and each would bring messages.
            await asyncio.sleep(_PAUSE_AFTER_REFUSAL)
            return
        self._requests += 1
        self._missing, self._refusal = count, None
        self._ended.clear()
        request = json.dumps({"batch": count, "expires": int(_EXPIRES * 1e9)}).encode()
        try:
            await self._connection.client.publish(self._subject, request, reply=f"{self._inbox}.{self._requests}")
            # The server tells when the request expires; only a lost connection leaves it unanswered.
            async with asyncio.timeout(2 * _EXPIRES):
                await self._ended.wait()
        except TimeoutError:
            return
        except errors.Error as error:
            self._refusal = str(error)
        if self._refusal:
            log.warning("%s brings nothing just now: %s", self._subject, self._refusal)
            await asyncio.sleep(_PAUSE_AFTER_REFUSAL)

    async def _arrived(self, message: Msg) -> None:
        if message.subject.startswith(self._inbox):
            self._answered(message)
            return
        self._missing -= 1
        if self._missing <= 0:
            self._ended.set()
        self._take(message)

    def _answered(self, answer: Msg) -> None:
        if answer.subject != f"{self._inbox}.{self._requests}":
            return
        headers = answer.headers or {}
        status = headers.get("Status", "")
        if status not in _NOTHING_CAME:
            self._refusal = f"{headers.get('Description') or 'nobody serves it'} (status {status})"
        self._ended.set()
