"""The parser of nats-py's client: what a server sends, in bounded lines and messages, whatever bytes are in a subject.

nats-py's own parser takes every white space for the end of a subject. A publisher may use most of them in one, such as
a vertical tab: the client then receives nothing more, and every worker with it. The server separates the fields of a
line by spaces only.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import TYPE_CHECKING, Any

from nats.errors import ProtocolError
from nats.protocol.parser import AWAITING_CONTROL_LINE, AWAITING_MSG_PAYLOAD, Parser

from airflow_provider_jetstream.jetstream.client.concurrency import pause_if_due
from airflow_provider_jetstream.jetstream.client.server_info import parse_server_info
from airflow_provider_jetstream.jetstream.errors import WireError
from airflow_provider_jetstream.jetstream.limits import MESSAGE, PROTOCOL_LINE

if TYPE_CHECKING:
    from nats.aio.client import Client

    from airflow_provider_jetstream.jetstream.client.connection import OnMessage
    from airflow_provider_jetstream.jetstream.client.wire import FrameForm

log = logging.getLogger(__name__)

# The server leaves two spaces where an answer of its own has no reply subject, as to CONSUMER.RESET.
_MESSAGE = re.compile(rb"MSG ([^ \t\r\n]+) (\d{1,18}) (?:([^ \t\r\n]+) | )?(\d{1,9})\r\n")
_MESSAGE_WITH_HEADERS = re.compile(rb"HMSG ([^ \t\r\n]+) (\d{1,18}) (?:([^ \t\r\n]+) | )?(\d{1,9}) (\d{1,9})\r\n")
_END_OF_MESSAGE = b"\r\n"
# A read brings hundreds of messages, whose callbacks together would hold the event loop for twenty milliseconds.
_AT_ONCE = 64
_UNHANDLED = (ValueError, LookupError, TypeError, AttributeError)


class FrameParser(Parser):
    """Parses what a server sends.

    :param client: gets each message and each control line
    :ivar raw_callbacks: by subscription number, what gets its messages in place of the client
    :ivar forms: by subscription number, what takes messages of one form many at a time
    """

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self.raw_callbacks: dict[int, OnMessage] = {}
        self.forms: dict[int, FrameForm] = {}
        self._size = 0
        self._header_size = 0
        self._fields: tuple[int, bytes, bytes] = (0, b"", b"")

    async def parse(self, data: bytes = b"") -> None:
        """Parse bytes in the order in which they arrive.

        :raises ProtocolError: no nats-server has sent this; the client connects anew
        """
        self.buf.extend(data)
        while self.buf:
            if self.state == AWAITING_CONTROL_LINE:
                is_cut_short = self._hand_over_run()
                # The client reads on without a pause while there is something to read.
                await pause_if_due()
                if is_cut_short:
                    continue
                if not self.buf:
                    return
            parsed = await (self._parse_line() if self.state == AWAITING_CONTROL_LINE else self._parse_payload())
            if not parsed:
                return

    def _hand_over_run(self) -> bool:
        """Hand whole messages of raw subscriptions to their callbacks, until something else is next or they are many.

        :return: whether they are many
        """
        callbacks = self.raw_callbacks
        if not callbacks:
            return False
        data, position, count, total = bytes(self.buf), 0, 0, 0
        try:
            for _ in range(_AT_ONCE):
                pattern = _MESSAGE_WITH_HEADERS if data.startswith(b"H", position) else _MESSAGE
                match = pattern.match(data, position)
                if match is None:
                    return False
                subject, text, reply, *sizes = match.groups()
                number = int(text)
                body = start = match.end()
                end = start + int(sizes[-1])
                if len(sizes) > 1:
                    body += int(sizes[0])
                if form := self.forms.get(number):
                    position, messages, size = form.take(data, position)
                    count, total = count + messages, total + size
                    if messages:
                        continue
                callback = callbacks.get(number)
                if callback is None or body > end or data[end : end + 2] != _END_OF_MESSAGE:
                    # For another subscription, incomplete or malformed.
                    return False
                position, count, total = end + 2, count + 1, total + end - body
                self._call(callback, subject, reply or b"", data[start:body] or None, data[body:end])
            return True
        finally:
            del self.buf[:position]
            self.nc.stats["in_msgs"] += count
            self.nc.stats["in_bytes"] += total

    @staticmethod
    def _call(callback: OnMessage, subject: bytes, reply: bytes, headers: bytes | None, payload: bytes) -> None:
        try:
            callback(subject, reply, headers, payload)
        except _UNHANDLED as error:
            _log_dropped(error)

    async def _parse_line(self) -> bool:
        if match := _MESSAGE.match(self.buf):
            subject, number, reply, size = match.groups()
            self._begin_message(match.end(), (int(number), bytes(subject), bytes(reply or b"")), 0, int(size))
            return True
        if match := _MESSAGE_WITH_HEADERS.match(self.buf):
            subject, number, reply, header_size, size = match.groups()
            fields = int(number), bytes(subject), bytes(reply or b"")
            self._begin_message(match.end(), fields, int(header_size), int(size))
            return True
        end = self.buf.find(b"\n")
        if end < 0:
            if len(self.buf) > PROTOCOL_LINE:
                raise ProtocolError(f"nats: a line of more than {PROTOCOL_LINE} bytes")
            return False
        line = bytes(self.buf[:end]).strip()
        del self.buf[: end + 1]
        await self._handle_control(line)
        return True

    def _begin_message(self, end: int, fields: tuple[int, bytes, bytes], header_size: int, size: int) -> None:
        if header_size > size or size > MESSAGE:
            raise ProtocolError("nats: malformed MSG")
        del self.buf[:end]
        self._fields, self._header_size, self._size = fields, header_size, size
        self.state = AWAITING_MSG_PAYLOAD

    async def _parse_payload(self) -> bool:
        end = self._size + len(_END_OF_MESSAGE)
        if len(self.buf) < end:
            return False
        if self.buf[self._size : end] != _END_OF_MESSAGE:
            raise ProtocolError("nats: malformed MSG")
        headers = bytes(self.buf[: self._header_size]) or None
        payload = bytes(self.buf[self._header_size : self._size])
        del self.buf[:end]
        self.state = AWAITING_CONTROL_LINE
        number, subject, reply = self._fields
        if callback := self.raw_callbacks.get(number):
            self.nc.stats["in_msgs"] += 1
            self.nc.stats["in_bytes"] += len(payload)
            self._call(callback, subject, reply, headers, payload)
            return True
        await self._handle(self.nc._process_msg, number, subject, reply, payload, headers)  # noqa: SLF001
        return True

    async def _handle_control(self, line: bytes) -> None:
        name, _, rest = line.partition(b" ")
        match name.upper():
            case b"PING":
                await self.nc._process_ping()  # noqa: SLF001
            case b"PONG":
                self._replace_cancelled_pong()
                await self.nc._process_pong()  # noqa: SLF001
            case b"-ERR":
                await self.nc._process_err(rest.decode(errors="replace").strip())  # noqa: SLF001
            case b"INFO":
                try:
                    info = parse_server_info(rest)
                except WireError as error:
                    raise ProtocolError(f"nats: {error}") from None
                await self._handle(self.nc._process_info, info)  # noqa: SLF001
            case b"+OK":
                pass
            case _:
                raise ProtocolError("nats: unknown protocol")

    def _replace_cancelled_pong(self) -> None:
        """Let the client count a PONG for which nobody waits any more; it would fail at that, and read nothing more."""
        pongs = self.nc._pongs  # noqa: SLF001
        if pongs and pongs[0].done():
            pongs[0] = asyncio.get_running_loop().create_future()

    async def _handle(self, handle: Any, *arguments: Any) -> None:
        try:
            await handle(*arguments)
        except _UNHANDLED as error:
            _log_dropped(error)


def _log_dropped(error: Exception) -> None:
    # The client would receive nothing more, and nobody would learn of it.
    log.warning("A message can't be handled, and is dropped: %s", type(error).__name__)
