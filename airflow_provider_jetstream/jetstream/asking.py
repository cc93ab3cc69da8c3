"""Asking the server many things side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.errors import TransientError
from airflow_provider_jetstream.jetstream.reading import at_once

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow_provider_jetstream.jetstream.connection import Connection
    from airflow_provider_jetstream.jetstream.headers import Headers


async def ask_each(
    connection: Connection, requests: Sequence[tuple[str, bytes]], headers: Sequence[Headers] | None = None
) -> list[bytes | TransientError]:
    """Send requests, as many side by side as elsewhere.

    :param connection: the server
    :param requests: full subjects and bodies
    :param headers: for each its headers, where they are messages to be stored
    :return: for each its answer, or why there is none
    """
    if connection.ask_each:
        return await connection.ask_each(requests, headers)

    async def ask(place: int) -> tuple[bytes | TransientError]:
        try:
            if headers:
                return (await connection.publish_acknowledged(*requests[place], headers[place]),)
            return ((await connection.request(*requests[place])).data,)
        except TransientError as error:
            return (error,)

    return [answer for (answer,) in await at_once(ask, range(len(requests)))]
