"""Direct gets: which streams answer them as exactly as the API, and batches of them.

Protocol: ADR-31, "JetStream Direct Get".
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NoReturn

from airflow_provider_jetstream.jetstream.client.concurrency import MAX_CONCURRENT, pause_if_due
from airflow_provider_jetstream.jetstream.client.message import parse_direct_get, parse_msg_get
from airflow_provider_jetstream.jetstream.client.wire_text import UNKNOWN_BYTE
from airflow_provider_jetstream.jetstream.errors import ApiError, TransientError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage

# The API level from which on one request may have many answers.
BATCHES: Final = 1
# The status in the first line of headers.
STATUS: Final = slice(9, 12)
NO_RESPONDERS: Final = b"NATS/1.0 503"

_BATCH_BYTES = 4 << 20
# Before other tasks of the event loop may run.
_PARSED_AT_ONCE = 64
_STATUS_LINE = b"NATS/1.0 "
_SEQUENCE_HEADER = b"\r\nNats-Sequence: "
_END_OF_BATCH = (b"204", b"404")


def exact_streams(configs: Iterable[Mapping[str, Any]], names: Collection[str]) -> set[str]:
    """Choose those of the named streams whose direct gets are as exact as the API.

    Any replica may answer a direct get and be behind the leader; so may a mirror that answers for its origin.

    :param configs: the configurations of all streams of the account
    """
    all_configs = list(configs)
    mirrored = {
        config["mirror"]["name"] for config in all_configs if config.get("mirror") and config.get("mirror_direct")
    }
    return {
        config["name"]
        for config in all_configs
        if config["name"] in names
        and config["name"] not in mirrored
        and config.get("allow_direct")
        and config["num_replicas"] == 1
        and not config.get("mirror")
    }


async def get_batch(connection: Connection, stream: str, request: Mapping[str, Any]) -> list[StoredMessage]:
    """Read many messages by one direct get.

    :param request: such as ``{"seq": 1, "next_by_subj": ">", "batch": 256}`` or ``{"multi_last": [...]}``
    :raises UnreachableError: the stream is unavailable, or allows no direct gets any more
    :raises ApiError: the server refused
    :raises WireError: an answer doesn't name its message
    """
    subject = f"{connection.api_prefix}.DIRECT.GET.{stream}"
    *answers, (last_header, _) = await connection.request_batch(subject, json.dumps(request).encode())
    if last_header[STATUS] not in _END_OF_BATCH:
        refuse(last_header, subject)
    messages: list[StoredMessage] = []
    for start in range(0, len(answers), _PARSED_AT_ONCE):
        messages += [parse_direct_get(header, body) for header, body in answers[start : start + _PARSED_AT_ONCE]]
        await pause_if_due()
    return messages


async def get_limited_batch(
    connection: Connection, stream: str, request: Mapping[str, Any], count: int = MAX_CONCURRENT
) -> list[StoredMessage]:
    """Read messages by one direct get, so few that an answer stays small; raises what :func:`get_batch` raises."""
    limits = {"batch": min(count, MAX_CONCURRENT), "max_bytes": _BATCH_BYTES}
    return await get_batch(connection, stream, {**request, **limits})


async def get_last_messages(connection: Connection, stream: str, subjects: Sequence[str]) -> list[StoredMessage]:
    """Read the last messages of subjects by batches; omits subjects without messages."""
    messages: list[StoredMessage] = []
    for start in range(0, len(subjects), MAX_CONCURRENT):
        left = list(subjects[start : start + MAX_CONCURRENT])
        while left and (last := await get_limited_batch(connection, stream, {"multi_last": left})):
            messages += last
            # The server ends an answer early where it becomes too large.
            answered = {message.subject for message in last}
            left = [subject for subject in left if subject not in answered] if len(last) < len(left) else []
    return messages


async def with_exact_subject(connection: Connection, stream: str, message: StoredMessage) -> StoredMessage:
    """Complete the subject of a message of which an API answer shows only a part: its bytes that aren't UTF-8 miss.

    Where the stream allows no direct gets, they stay :data:`~.wire_text.UNKNOWN_BYTE`.
    """
    if UNKNOWN_BYTE not in message.subject:
        return message
    # The subject may have the replacement character itself; then it is the subject of a message.
    shown = message.subject.replace(UNKNOWN_BYTE, "\ufffd")
    request = {"seq": message.sequence, "next_by_subj": shown}
    answer = await connection.api_request(f"STREAM.MSG.GET.{stream}", json.dumps(request).encode())
    if (same := parse_msg_get(answer, stream)) and same.sequence == message.sequence:
        return replace(message, subject=shown)
    if connection.api_level >= BATCHES:
        with suppress(TransientError, ApiError):
            request = {"seq": message.sequence, "next_by_subj": ">"}
            for found in await get_batch(connection, stream, request | {"batch": 1}):
                # A replica may be behind, but never has another message of the same sequence and time.
                if (found.sequence, found.time) == (message.sequence, message.time):
                    return found
    return message


def refuse(header: bytes, subject: str) -> NoReturn:
    """Raise the error that a status means which isn't about messages.

    :param header: the headers of the answer
    :param subject: the subject of the request
    """
    if header.startswith(NO_RESPONDERS):
        raise UnreachableError(
            f"nobody answers on {subject}: the stream is unavailable, or allows no direct gets any more"
        )
    raise ApiError(int(header[STATUS]), 0, header.decode(errors="replace").strip(), subject)


def is_last_of_batch(header: bytes) -> bool:
    """Return whether an answer to a batch request is the last one."""
    # A stored message may itself have a status in its first line, but never lacks the server's own headers.
    return header.startswith(_STATUS_LINE) and _SEQUENCE_HEADER not in header
