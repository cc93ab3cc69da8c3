"""The reader of stored messages: one, many at a time, a range, or all that are stored from now on.

Reading without a consumer works with every retention policy, takes no job away from a worker, and leaves nothing behind
on the server. Messages are read by ``MSG.GET``, which the stream's leader answers: a direct get may be behind. Batches
of direct gets are sent to streams that answer them exactly (:func:`find_exact_streams`). What was read is what a
function returns.

Protocol: ADR-31, "JetStream Direct Get".
"""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

from airflow_provider_jetstream.jetstream.client.concurrency import MAX_CONCURRENT, map_concurrently, pause_if_due
from airflow_provider_jetstream.jetstream.client.headers import NO_RESPONDERS, STATUS, STATUS_LINE
from airflow_provider_jetstream.jetstream.client.message import parse_direct_get, parse_msg_get
from airflow_provider_jetstream.jetstream.client.stream_api import list_streams, stream_info
from airflow_provider_jetstream.jetstream.client.subjects import covers
from airflow_provider_jetstream.jetstream.client.wire_text import UNKNOWN_BYTE
from airflow_provider_jetstream.jetstream.errors import ApiError, TransientError, UnreachableError, WireError
from airflow_provider_jetstream.jetstream.evidence import proves_nothing

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection, Iterable, Mapping, Sequence
    from datetime import datetime

    from airflow_provider_jetstream.jetstream.client.connection import Connection
    from airflow_provider_jetstream.jetstream.client.message import StoredMessage
    from airflow_provider_jetstream.jetstream.errors import PermissionDeniedError

# The API level from which on one request may have many answers.
BATCHES: Final = 1

_BATCH_BYTES = 4 << 20
# Before other tasks of the event loop may run.
_PARSED_AT_ONCE = 64
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


async def get_batch(
    connection: Connection, stream: str, request: Mapping[str, Any], count: int = MAX_CONCURRENT
) -> list[StoredMessage]:
    """Read many messages by one direct get; so few that the answer stays small.

    :param request: such as ``{"seq": 1, "next_by_subj": ">"}`` or ``{"multi_last": [...]}``
    :param count: how many at most
    :raises UnreachableError: the stream is unavailable, or allows no direct gets any more
    :raises ApiError: the server refused
    :raises WireError: an answer doesn't name its message
    """
    subject = f"{connection.api_prefix}.DIRECT.GET.{stream}"
    payload = json.dumps({**request, "batch": min(count, MAX_CONCURRENT), "max_bytes": _BATCH_BYTES}).encode()
    *answers, (last_header, _) = await connection.ask(subject, payload, is_last_of_batch)
    if last_header[STATUS] not in _END_OF_BATCH:
        refuse(last_header, subject)
    messages: list[StoredMessage] = []
    for start in range(0, len(answers), _PARSED_AT_ONCE):
        messages += [parse_direct_get(header, body) for header, body in answers[start : start + _PARSED_AT_ONCE]]
        await pause_if_due()
    return messages


async def get_last_messages(connection: Connection, stream: str, subjects: Sequence[str]) -> list[StoredMessage]:
    """Read the last messages of subjects by batches; omits subjects without messages."""
    messages: list[StoredMessage] = []
    for start in range(0, len(subjects), MAX_CONCURRENT):
        left = list(subjects[start : start + MAX_CONCURRENT])
        while left and (last := await get_batch(connection, stream, {"multi_last": left})):
            messages += last
            # The server ends an answer early where it becomes too large.
            answered = {message.subject for message in last}
            left = [subject for subject in left if subject not in answered] if len(last) < len(left) else []
    return messages


async def with_exact_subject(connection: Connection, stream: str, message: StoredMessage) -> StoredMessage:
    """Return the message with its whole subject: the API's JSON drops bytes that aren't UTF-8.

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
            for found in await get_batch(connection, stream, request, 1):
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
    return header.startswith(STATUS_LINE) and _SEQUENCE_HEADER not in header


log = logging.getLogger(__name__)

# A subscriber receives a message a little before the stream has stored it.
_STORE_DELAYS = (0.0, 0.005, 0.02, 0.1)
_POLL_SECONDS = 2.0
_RETRY_PAUSE = 1.0

# The stream may allow no direct gets any more. If it is away, the requests to its leader raise the error.
REFUSALS: Final = (ApiError, TransientError, WireError)
# Before other tasks of the event loop may run.
_READ_AT_ONCE = 32
_FIRST_WIDTH = 32
_LEAST_SIZE = 1024
_MAX_BYTES_AT_ONCE = 16 * 2**20


async def get_message(connection: Connection, stream: str, sequence: int) -> StoredMessage | None:
    """Read the message of a sequence; ``None`` where it isn't stored any more.

    :param stream: the name of the stream
    :param sequence: the message's stream sequence
    :raises NotFoundError: the stream doesn't exist
    """
    return await msg_get(connection, stream, {"seq": sequence})


async def next_message(connection: Connection, stream: str, start: int, subject: str) -> StoredMessage | None:
    """Read the first message at or after a sequence whose subject matches a filter; ``None`` where there is none yet.

    :raises NotFoundError: the stream doesn't exist
    """
    return await msg_get(connection, stream, {"seq": start, "next_by_subj": subject})


async def last_message(connection: Connection, stream: str, subject: str) -> StoredMessage | None:
    """Read the last message of a subject that is what the subject is for; ``None`` where there is none.

    What else is stored there is passed by: see :mod:`~airflow_provider_jetstream.jetstream.evidence`.

    :raises NotFoundError: the stream doesn't exist
    """
    return (await last_with_position(connection, stream, subject))[0]


async def last_with_position(connection: Connection, stream: str, subject: str) -> tuple[StoredMessage | None, int]:
    """Read what :func:`last_message` does, and the sequence of the subject's last message, whatever that is.

    What replaces the message is stored on condition that this one is still the last; 0 where there is none.

    :raises NotFoundError: the stream doesn't exist
    """
    message = await msg_get(connection, stream, {"last_by_subj": subject})
    if message is None:
        return None, 0
    if not proves_nothing(message):
        return message, message.sequence
    found = None
    async for earlier in read_range(connection, stream, subject, stop=message.sequence):
        found = found if proves_nothing(earlier) else earlier
    return found, message.sequence


async def msg_get(connection: Connection, stream: str, request: Mapping[str, Any]) -> StoredMessage | None:
    """Read one message from the stream's leader by a request as ``MSG.GET`` takes it.

    :raises NotFoundError: the stream doesn't exist
    """
    answer = await connection.api_request(f"STREAM.MSG.GET.{stream}", json.dumps(request).encode())
    message = parse_msg_get(answer, stream)
    return await with_exact_subject(connection, stream, message) if message else None


async def read_range(
    connection: Connection, stream: str, subject: str = ">", start: int = 1, stop: int | None = None
) -> AsyncGenerator[StoredMessage, None]:
    """Read in order what a stream stores now: many requests at a time, few messages in memory.

    :param subject: a filter
    :param start: the first sequence
    :param stop: the last sequence; where absent, the stream's last one at the time of the call
    :raises NotFoundError: the stream doesn't exist
    """
    if stop is None:
        stop = int((await stream_info(connection, stream))["state"]["last_seq"])
    if stream in connection.exact_streams:
        with suppress(*REFUSALS):
            async for message in read_batches(connection, stream, subject, start, stop):
                yield message
                start = message.sequence + 1
            return
    async for message in _read_concurrently(connection, stream, subject, start, stop):
        yield message


async def read_batches(
    connection: Connection, stream: str, subject: str, start: int, stop: int
) -> AsyncGenerator[StoredMessage, None]:
    """Read in order a range of a stream whose direct gets are exact.

    :raises ApiError: the stream allows no direct gets any more, as for the other :data:`REFUSALS`
    """
    while start <= stop:
        request = {"seq": start, "next_by_subj": subject}
        messages = await get_batch(connection, stream, request, stop - start + 1)
        for number, message in enumerate(messages):
            if message.sequence > stop:
                return
            yield message
            if number % _READ_AT_ONCE == 0:
                await pause_if_due()
        if not messages:
            return
        start = messages[-1].sequence + 1


async def _read_concurrently(
    connection: Connection, stream: str, subject: str, start: int, stop: int
) -> AsyncGenerator[StoredMessage, None]:
    async def read(sequence: int) -> StoredMessage | None:
        return await get_message(connection, stream, sequence)

    width, largest = _FIRST_WIDTH, _LEAST_SIZE
    while start <= stop:
        # The server skips gaps and messages of other subjects for a request for the next message only.
        head = await next_message(connection, stream, start, subject)
        if head is None or head.sequence > stop:
            return
        yield head
        start = min(head.sequence + width, stop) + 1
        matching = 0
        for message in await map_concurrently(read, range(head.sequence + 1, start)):
            if message is not None and covers(subject, message.subject):
                matching += 1
                largest = max(largest, len(message.data))
                yield message
        # So the width follows how densely the matching messages are stored.
        width = min(width * 2, MAX_CONCURRENT) if matching * 2 >= width else max(width // 4, 1)
        width = max(1, min(width, _MAX_BYTES_AT_ONCE // largest))


def _warn(stream: str, subject: str, denial: PermissionDeniedError) -> None:
    if denial.action == "subscribe" and denial.subject == subject:
        log.warning("%s is read only every %g seconds: %s", stream, _POLL_SECONDS, denial)


async def follow(connection: Connection, stream: str, subject: str, start: int) -> AsyncGenerator[StoredMessage, None]:
    """Read what is stored from a sequence on, and go on with what is stored later, without end and without a gap.

    A plain subscription only signals that the stream may have a new message. The message itself is read from the
    stream, so none is missed while the connection or the server is away.

    :param subject: a filter
    :param start: the first sequence
    :raises NotFoundError: the stream doesn't exist
    :raises UnreachableError: the connection is closed for good
    """
    arrived = asyncio.Event()

    try:
        subscription = await connection.subscribe_raw(
            subject, lambda *_: arrived.set(), partial(_warn, stream, subject)
        )
    except UnreachableError as error:
        raise UnreachableError(f"{stream} can't be followed: {error}; open a new connection") from None
    try:
        while True:
            arrived.clear()
            message: StoredMessage | None = None
            for delay in _STORE_DELAYS:
                await asyncio.sleep(delay)
                try:
                    message = await next_message(connection, stream, start, subject)
                except TransientError as error:
                    if connection.is_closed:
                        raise UnreachableError(
                            f"the connection is closed while following {stream}: open a new one and go on from"
                            f" sequence {start}"
                        ) from None
                    log.warning("Reading %s failed, trying again: %s", stream, error)
                    await asyncio.sleep(_RETRY_PAUSE)
                    continue
                if message is not None:
                    break
            if message is not None:
                start = message.sequence + 1
                # The stream may store more behind it: read again before waiting.
                arrived.set()
                yield message
            with suppress(TimeoutError):
                # Not wait_for: before Python 3.12 it can swallow a cancellation that comes together with the signal.
                async with asyncio.timeout(_POLL_SECONDS):
                    await arrived.wait()
    finally:
        with suppress(Exception):
            await subscription.unsubscribe()


# A range is read as a whole where at least one of so many of its sequences is wanted.
_SPARSE: Final = 2
# Below so many, single reads take no longer than finding out whether batches are exact.
_FEW: Final = 512


async def find_exact_streams(connection: Connection, streams: Collection[str]) -> Connection:
    """Return a connection that knows which of some streams answer direct gets as exactly as their leader.

    It takes requests for the configurations of all streams of the account: it isn't worth it for few messages.

    :raises TransientError: the server doesn't answer
    """
    exact: frozenset[str] = frozenset()
    if connection.api_level >= BATCHES:
        configs = [info["config"] for info in await list_streams(connection)]
        exact = frozenset(exact_streams(configs, streams))
    return cast("Connection", _ExactReader(connection, exact))


class _ExactReader:
    """A connection that knows which streams answer direct gets exactly; in all else it is the one that it stands for.

    It is made for a while: any stream may be changed.
    """

    def __init__(self, connection: Connection, exact: frozenset[str]) -> None:
        self._connection = connection
        self.exact_streams = exact

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


class Streams:
    """Reads stored messages over a connection.

    :param connection: knows which streams answer direct gets exactly; of the others their leaders are asked
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def get_many(self, stream: str, sequences: Sequence[int]) -> dict[int, StoredMessage | None]:
        """Read messages by their sequences, which are in order; ``None`` where one isn't stored."""
        read: dict[int, StoredMessage | None] = dict.fromkeys(sequences)
        if self._is_exact(stream) and sequences and sequences[-1] - sequences[0] < _SPARSE * len(sequences):
            with suppress(*REFUSALS):
                async for message in read_batches(self._connection, stream, ">", sequences[0], sequences[-1]):
                    if message.sequence in read:
                        read[message.sequence] = message
                return read
        messages_by_request = await self._get_each(stream, [b'{"seq":%d}' % sequence for sequence in sequences])
        return dict(zip(sequences, messages_by_request, strict=True))

    async def last_many(self, stream: str, subjects: Sequence[str]) -> dict[str, StoredMessage | None]:
        """Read the last messages of subjects, whatever they are; ``None`` where a subject has none."""
        read: dict[str, StoredMessage | None] = dict.fromkeys(subjects)
        if self._is_exact(stream) and subjects:
            with suppress(*REFUSALS):
                messages = await get_last_messages(self._connection, stream, list(read))
                return read | {message.subject: message for message in messages}
        requests = [json.dumps({"last_by_subj": subject}).encode() for subject in read]
        return dict(zip(read, await self._get_each(stream, requests), strict=True))

    def _is_exact(self, stream: str) -> bool:
        return stream in self._connection.exact_streams

    async def _get_each(self, stream: str, requests: Sequence[bytes]) -> list[StoredMessage | None]:
        subject = f"{self._connection.api_prefix}.STREAM.MSG.GET.{stream}"
        messages: list[StoredMessage | None] = []
        for answer in await self._connection.request_many([(subject, request) for request in requests]):
            if isinstance(answer, TransientError):
                raise answer
            message = parse_msg_get(answer, stream)
            messages.append(await with_exact_subject(self._connection, stream, message) if message else None)
        return messages


async def read_bulk(connection: Connection, info: Mapping[str, Any], start: int) -> AsyncGenerator[StoredMessage, None]:
    """Read in order every message of a stream from a sequence on, by batches where there is much of it.

    :param info: the server's STREAM.INFO of the stream; later messages aren't read
    """
    stream, stop = info["config"]["name"], int(info["state"]["last_seq"])
    start = max(start, int(info["state"]["first_seq"]), 1)
    if stop - start >= _FEW and stream not in connection.exact_streams:
        connection = await find_exact_streams(connection, {stream})
    if start <= stop:
        async for message in read_range(connection, stream, ">", start, stop):
            yield message


async def first_since(connection: Connection, info: Mapping[str, Any], moment: datetime) -> int:
    """Return a sequence of a stream before which everything was stored before a moment, by binary search.

    :param info: the server's STREAM.INFO of the stream
    """
    low, high = max(1, int(info["state"]["first_seq"])), int(info["state"]["last_seq"]) + 1
    while high - low > _FEW:
        middle = (low + high) // 2
        message = await next_message(connection, info["config"]["name"], middle, ">")
        if message is not None and message.stored_at < moment:
            low = message.sequence + 1
        else:
            high = middle
    return low
