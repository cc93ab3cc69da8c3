"""Storing one message and learning where it is, or why it isn't."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow_provider_jetstream.jetstream.client.concurrency import request_many
from airflow_provider_jetstream.jetstream.errors import ApiError, TransientError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.headers import Headers


# By far the most frequent answer; any other one is read as the JSON that it is.
_STORED = re.compile(rb'\{"stream":"([^"\\]*)", ?"seq":(\d+)\}')


@dataclass(frozen=True, slots=True)
class PubAck:
    """The server's word that a message is stored.

    :param stream: where
    :param sequence: its stream sequence
    :param duplicate: whether it was stored before, under the same id
    """

    stream: str
    sequence: int
    duplicate: bool = False


async def store(connection: Connection, subject: str, body: bytes, headers: Headers | None = None) -> PubAck:
    """Publish a message and wait for the server's word.

    :param connection: the server
    :param subject: its subject
    :param body: its body
    :param headers: its headers
    :return: where it is stored
    :raises ApiError: the stream refused it
    :raises UnreachableError: no stream captures the subject just now, or the connection is gone
    :raises DeadlineError: no answer within the time limit; it may be stored all the same
    """
    return parse_publish_ack(subject, await connection.publish_acknowledged(subject, body, headers))


async def store_each(
    connection: Connection, messages: Sequence[tuple[str, bytes]], headers: Sequence[Headers]
) -> list[PubAck | ApiError | TransientError]:
    """Publish messages side by side and wait for the server's word about each.

    :param connection: the server
    :param messages: their subjects and bodies
    :param headers: the headers of each
    :return: for each where it is stored, or what :func:`store` raises
    """
    found: list[PubAck | ApiError | TransientError] = []
    for (subject, _), answer in zip(messages, await request_many(connection, messages, headers), strict=True):
        try:
            found.append(answer if isinstance(answer, TransientError) else parse_publish_ack(subject, answer))
        except (ApiError, TransientError) as error:
            found.append(error)
    return found


def parse_publish_ack(subject: str, answer: bytes) -> PubAck:
    """Parse a stream's answer to a message.

    :param subject: the message's subject
    :param answer: the answer's body
    :return: where the message is stored
    :raises ApiError: the stream refused the message
    :raises UnreachableError: the answer isn't a PubAck: something else subscribes to the subject
    """
    if told := _STORED.fullmatch(answer):
        return PubAck(told[1].decode(), int(told[2]))
    ack = _decoded(answer)
    stream, sequence, refusal = ack.get("stream"), ack.get("seq"), ack.get("error")
    if isinstance(refusal, dict):
        code, err_code = int(refusal.get("code", 0)), int(refusal.get("err_code", 0))
        raise ApiError(code, err_code, str(refusal.get("description")), subject, stream)
    if not isinstance(stream, str) or not isinstance(sequence, int):
        raise UnreachableError(
            f"expected a stream's acknowledgement on {subject}, found another answer: someone else listens there"
        )
    return PubAck(stream, sequence, bool(ack.get("duplicate")))


def _decoded(answer: bytes) -> dict[str, Any]:
    try:
        ack = json.loads(answer)
    except ValueError:
        return {}
    return ack if isinstance(ack, dict) else {}
