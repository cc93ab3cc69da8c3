"""Backs up and restores streams with their consumers, as ``nats stream backup`` and ``nats stream restore`` do."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow_provider_jetstream.jetstream.client.nats_py import NatsPyConnection

_CHUNK = 128 * 1024
_SECONDS = 10.0


@dataclass(frozen=True)
class StreamBackup:
    """One stream at one moment.

    :param config: its configuration, as the server gave it
    :param state: its state at that moment
    :param chunks: the server's archive of its messages and its durable consumers
    """

    config: dict[str, Any]
    state: dict[str, Any]
    chunks: Sequence[bytes]

    @property
    def name(self) -> str:
        """The stream's name."""
        return str(self.config["name"])


async def back_up(connection: NatsPyConnection, stream: str) -> StreamBackup:
    """Back up a stream while it is in use.

    :raises ApiError: the server refuses, as for a stream in memory
    :raises RuntimeError: the server ended the backup with an error
    """
    client = connection.client
    inbox = client.new_inbox()
    chunks: list[bytes] = []
    subscription = await client.subscribe(inbox)
    try:
        request = {"deliver_subject": inbox, "chunk_size": _CHUNK, "no_consumers": False, "jsck": True}
        answer = await connection.api(f"STREAM.SNAPSHOT.{stream}", request)
        while True:
            async with asyncio.timeout(_SECONDS):
                message = await subscription.next_msg(_SECONDS)
            if not message.data:
                # The server's last message has no data; with an error it has a status of 4xx.
                if (message.headers or {}).get("Status", "").startswith("4"):
                    raise RuntimeError(f"the backup of {stream} was ended: {message.headers}")
                return StreamBackup(answer["config"], answer["state"], chunks)
            chunks.append(message.data)
            # Not each chunk asks for an acknowledgement, and without those of the others the server stops.
            if message.reply:
                await client.publish(message.reply, b"")
    finally:
        await subscription.unsubscribe()


async def restore(connection: NatsPyConnection, backup: StreamBackup) -> dict[str, Any]:
    """Make a stream of a backup; return the server's answer, which has its configuration and state.

    :raises ApiError: the server refuses, as where the stream exists
    :raises RuntimeError: the server couldn't read the backup
    """
    begun = await connection.api(f"STREAM.RESTORE.{backup.name}", {"config": backup.config, "state": backup.state})
    subject = begun["deliver_subject"]
    for chunk in backup.chunks:
        answer = await connection.client.request(subject, chunk, timeout=_SECONDS)
        if answer.data:
            raise RuntimeError(answer.data.decode())
    # An empty message says that this was all.
    done: dict[str, Any] = json.loads((await connection.client.request(subject, b"", timeout=_SECONDS)).data)
    if error := done.get("error"):
        raise RuntimeError(f"the restore of {backup.name} failed: {error}")
    return done


async def delete_stream(connection: NatsPyConnection, stream: str) -> None:
    """Delete a stream with its consumers."""
    await connection.api(f"STREAM.DELETE.{stream}")
