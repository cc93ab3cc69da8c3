"""Asking the server many things side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_jetstream.jetstream.errors import TransientError
from airflow_provider_jetstream.jetstream.reading import at_once

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow_provider_jetstream.jetstream.connection import Connection


async def ask_each(connection: Connection, requests: Sequence[tuple[str, bytes]]) -> list[bytes | TransientError]:
    """Send requests, as many side by side as elsewhere.

    :param connection: the server
    :param requests: full subjects and bodies
    :return: for each its answer, or why there is none
    """
    if connection.ask_each:
        return await connection.ask_each(requests)

    async def ask(request: tuple[str, bytes]) -> tuple[bytes | TransientError]:
        try:
            return ((await connection.request(*request)).data,)
        except TransientError as error:
            return (error,)

    return [answer for (answer,) in await at_once(ask, requests)]
