"""Stores a message once under a ``Nats-Msg-Id``, also where somebody else has used that id.

The server drops a message of an id that it remembers, whatever subject and body the earlier one had, and the PubAck
says ``duplicate`` (NATS ADR-33). Most ids can be computed, and whoever may publish on any subject of a stream can use
them up. So a duplicate counts as stored only where the message that is stored is the sender's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import uuid4

from airflow_provider_jetstream.jetstream.client.headers import Headers
from airflow_provider_jetstream.jetstream.client.message_reader import get_message
from airflow_provider_jetstream.jetstream.client.publish_ack import store
from airflow_provider_jetstream.jetstream.contract import MSG_ID
from airflow_provider_jetstream.jetstream.errors import NotFoundError, PermissionDeniedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.client.publish_ack import PubAck


async def store_once(
    connection: Connection,
    subject: str,
    body: bytes,
    headers: dict[str, str],
    is_own: Callable[[StoredMessage], bool],
    *,
    time_limit: float | None = None,
) -> PubAck:
    """Store a message, under another id where the server has dropped it for a message that isn't the sender's.

    :param headers: with its id
    :param is_own: returns whether a stored message may stand for this one; its subject is the same
    :param time_limit: seconds for each request; the connection's own where absent
    :raises ApiError: the stream refused the message
    :raises TransientError: it isn't known to be stored
    """

    async def send(headers: dict[str, str]) -> PubAck:
        return await store(connection, subject, body, headers, time_limit=time_limit)

    return await confirmed_once(connection, await send(headers), subject, headers, is_own, send)


async def confirmed_once(
    connection: Connection,
    ack: PubAck,
    subject: str,
    headers: dict[str, str],
    is_own: Callable[[StoredMessage], bool],
    send: Callable[[Headers], Awaitable[PubAck]],
) -> PubAck:
    """Return the PubAck of a message that was sent with an id, or that of sending it again under another id.

    :param ack: the PubAck of the first time
    :param send: sends the message with other headers
    """
    if not ack.duplicate or await is_own_duplicate(connection, ack, subject, is_own):
        return ack
    return await send(with_another_id(headers))


async def is_own_duplicate(
    connection: Connection, ack: PubAck, subject: str, is_own: Callable[[StoredMessage], bool]
) -> bool:
    """Return whether the message for which the server has dropped another one is the sender's own.

    It isn't where nothing is stored any more: the server remembers an id longer than its message. What the user may not
    read proves nothing either.
    """
    try:
        stored = await get_message(connection, ack.stream, ack.sequence)
    except (PermissionDeniedError, NotFoundError):
        return False
    return stored is not None and stored.subject == subject and is_own(stored)


def with_another_id(headers: dict[str, str]) -> Headers:
    """Return headers with an id that nobody can have used, which begins with that of these headers."""
    others = (pair for pair in headers.items() if pair[0] != MSG_ID)
    return Headers([*others, (MSG_ID, f"{headers[MSG_ID]}:{uuid4().hex}")])
