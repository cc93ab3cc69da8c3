"""Pulling jobs, no more than were asked for, each handed on the moment it comes."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Self

from airflow_provider_jetstream.jetstream.units import NANOSECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.worker.consumers import BoundConsumer

log = logging.getLogger("jetstream.worker")

PULL_EXPIRES = 1.0
PAUSE_AFTER_REFUSAL = 0.5
NO_MESSAGES = {str(HTTPStatus.NOT_FOUND.value), str(HTTPStatus.REQUEST_TIMEOUT.value)}

# A request with no_wait alone stays open, unanswered, where the consumer has as many jobs in flight as it may. A server
# that is slow for a while may need longer than the shortest time to deliver anything at all.
_LINGERS = (0.02, 0.16)
# While it is open, it comes before the bells of the consumer's own workers.
_LINGERS_AS_HELPER = (0.005, 0.005)
_OTHERS_WAIT = "Requests Pending"


class ConsumerFetcher:
    """One pull request at a time.

    The client's own ``fetch`` of several keeps the first message until the others are there or its time is over.

    :param connection: the server
    :param lane: whose jobs are pulled
    :param take: is called with each message
    """

    def __init__(self, connection: Connection, lane: BoundConsumer, take: Callable[[Msg], None]) -> None:
        self._connection = connection
        self._subject = lane.next_subject
        self._asking = lane.request_fields
        self._take = take
        self._inbox = connection.client.new_inbox()
        self._subscription: Subscription | None = None
        self._requests = 0
        self._missing = 0
        self._refusal: str | None = None
        self._others_wait = False
        self._shortest, self._longest = _LINGERS_AS_HELPER if lane.is_fallback else _LINGERS
        self._lingers = self._shortest
        self._in_vain = 0.0
        self._ended = asyncio.Event()

    @property
    def is_refused(self) -> bool:
        """Whether the server wouldn't take the last request."""
        return self._refusal is not None

    async def __aenter__(self) -> Self:
        self._subscription = await self._connection.client.subscribe(f"{self._inbox}.*", cb=self._arrived)
        return self

    async def __aexit__(self, *_: object) -> None:
        await unsubscribe(self._subscription)

    async def fetch(self, count: int) -> None:
        """Ask for messages, and return when they came or the server has no more for now.

        Not to be cancelled: what the server sends then would have burned a delivery.

        :param count: how many at the most
        """
        if not self._connection.client.is_connected:
            # The client would send every request of the meantime once it is back, and each would bring messages.
            await asyncio.sleep(PAUSE_AFTER_REFUSAL)
            return
        # The server tells when the request expires; only a lost connection leaves it unanswered.
        await self._ask(count, PULL_EXPIRES, 2 * PULL_EXPIRES)
        if self._refusal:
            await asyncio.sleep(PAUSE_AFTER_REFUSAL)

    async def fetch_ready(self, count: int) -> int:
        """Ask for messages that can be delivered just now; not to be cancelled either.

        :param count: how many at the most
        :return: how many came
        """
        if not self._connection.client.is_connected:
            return 0
        again = time.monotonic() - self._in_vain < PULL_EXPIRES
        self._lingers = min(2 * self._lingers, self._longest) if again else self._shortest
        await self._ask(count, self._lingers, PULL_EXPIRES, no_wait=True)
        if self._others_wait:
            # Their requests may be such that what is there isn't for them.
            await self._ask(count, self._lingers, PULL_EXPIRES)
        came = count - self._missing
        self._in_vain = 0.0 if came else time.monotonic()
        return came

    async def _ask(self, count: int, expires: float, patience: float, **more: Any) -> None:
        from nats import errors

        self._requests += 1
        self._missing, self._refusal, self._others_wait = count, None, False
        self._ended.clear()
        request = {"batch": count, "expires": round(expires * NANOSECONDS), **more, **self._asking}
        body = json.dumps(request).encode()
        try:
            await self._connection.client.publish(self._subject, body, reply=f"{self._inbox}.{self._requests}")
            async with asyncio.timeout(patience):
                await self._ended.wait()
        except TimeoutError:
            return
        except errors.Error as error:
            self._refusal = str(error)
        if self._refusal:
            log.warning("%s brings nothing just now: %s", self._subject, self._refusal)

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
        status, description = read_status(answer)
        if status not in NO_MESSAGES:
            self._refusal = f"{description} (status {status})"
        self._others_wait = description == _OTHERS_WAIT
        self._ended.set()


def read_status(answer: Msg) -> tuple[str, str]:
    """Read what the server says of a pull request.

    :param answer: what came in place of a job
    :return: the status, and what it means
    """
    headers = answer.headers or {}
    # Where nobody serves the subject the client takes the header after that for the description.
    description = (headers.get("Description") or "").partition("\n")[0].strip()
    return headers.get("Status", ""), description or "nobody serves it"


async def unsubscribe(subscription: Subscription | None) -> None:
    """End a subscription, which may have gone with its connection.

    :param subscription: the subscription, if there is one
    """
    from nats import errors

    try:
        if subscription:
            await subscription.unsubscribe()
    except errors.Error as error:
        log.debug("The subscription for pulled jobs went with its connection: %s", error)
