"""The NATS protocol: bytes to frames and back, without I/O.

:func:`next_frame` parses what a server sends: on an event loop through :class:`FrameReader`, on a blocking socket, and
as the reference for Spark's parser of columns. :class:`SentFrameReader` parses what a client sends, for whoever stands
between both. A :class:`FrameForm` takes frames of one form many at a time. Whoever is at the other end may send
anything: lines and messages are bounded, and what isn't a frame is a :class:`WireError`.

Protocol: "NATS Client Protocol" in the NATS documentation; ADR-15, "JetStream Subject Names and Reply Subjects".
"""

from __future__ import annotations

import json
import re
import secrets
import string
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Protocol, TypeVar

from airflow_provider_jetstream.jetstream.client.wire_text import decode_text, encode_text
from airflow_provider_jetstream.jetstream.errors import WireError
from airflow_provider_jetstream.jetstream.limits import MESSAGE, PROTOCOL_LINE, PUBLISHED_SUBJECT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

_Message = TypeVar("_Message")

# The server separates the fields of a line by spaces, and leaves two where an answer of its own has no reply subject.
# A name may have any other byte: a publisher's subject may hold most white space.
_MESSAGE: Final = re.compile(rb"MSG ([^ \t\r\n]+) ([^ \t\r\n]+) (?:([^ \t\r\n]+) | )?(\d{1,9})\r\n")
_MESSAGE_WITH_HEADERS: Final = re.compile(
    rb"HMSG ([^ \t\r\n]+) ([^ \t\r\n]+) (?:([^ \t\r\n]+) | )?(\d{1,9}) (\d{1,9})\r\n"
)
_CONTROL: Final = (b"PING", b"PONG", b"+OK", b"-ERR", b"INFO")
_MESSAGES: Final = (b"MSG", b"HMSG")
_SHOWN: Final = 80

# Spark's parser finds frames by the subscription's id. DEL is rare in text, so it examines few candidates. Seven of
# them contain exactly one aligned word of four bytes, wherever the id begins.
MARKS: Final = b"\x7f" * 7
_ALPHABET: Final = string.ascii_letters + string.digits
_RANDOM: Final = 7
SID_LENGTH: Final = len(MARKS) + _RANDOM

_SEPARATOR: Final = re.compile(rb"[ \t]+")
# The sizes at the end of each verb's line; the server takes verbs in any case.
_SIZES: Final = {b"PUB": 1, b"HPUB": 2}
# Verb and subject; a reply subject may follow.
_FIELDS: Final = 2
_DIGITS: Final = 18

# The server separates the fields of a line by these, and ends the line at a line feed. Any other control character may
# be a part of a subject that it has stored; what this package lets users publish on is stricter.
_SUBJECT: Final = re.compile(rb"[^\t\n\r ]+")
_END: Final = b"\r\n"

# $JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<time>.<pending>, without the domain, the account
# and the token that some versions have besides.
_REPLY: Final = rb"\$JS\.ACK\.([^. \t\r\n]+)\.([^. \t\r\n]+)\.(\d{1,18})\.(\d{1,18})\.\d{1,20}\.(\d{1,19})\.\d{1,20}"
# $JS.ACK.<domain>.<account>.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<time>.<pending>.<token>;
# domain and account together, and the token, are missing in some versions.
DELIVERY_REPLY: Final = re.compile(
    rb"\$JS\.ACK\.(?:[^.]+\.[^.]+\.)?([^.]+)\.([^.]+)\.(\d{1,18})\.(\d{1,18})\.\d{1,20}\.(\d{1,19})\.\d{1,20}(?:\..*)?"
)


class Frame(NamedTuple):
    """A frame of a server, as positions in a buffer.

    :param op: ``MSG``, ``HMSG`` or the name of a control line
    :param end: the first byte after it
    :param line: its first line, without its end
    :param sid: the subscription of a message; empty for a control line
    :param offsets: for a message: subject (start, end), reply (start, end), header start, body start, body end
    """

    op: bytes
    end: int
    line: bytes
    sid: bytes = b""
    offsets: tuple[int, int, int, int, int, int, int] = (0, 0, 0, 0, 0, 0, 0)


class Unfinished:
    """What is known of a frame that hasn't arrived as a whole, so that a line in many pieces is read once.

    Its positions are those of one buffer, whose frames are parsed from its start on.
    """

    __slots__ = ("_needed", "_searched")

    def __init__(self) -> None:
        # No line ends before the one position, and the last frame that was begun ends at the other.
        self._searched = self._needed = 0

    def drop(self, count: int) -> None:
        """Adjust positions after bytes at the start of the buffer were removed."""
        self._searched, self._needed = self._searched - count, self._needed - count

    def next_frame(self, buffer: bytearray | bytes, start: int, filled: int) -> Frame | None:
        """Parse a frame as :func:`next_frame` does."""
        if filled < self._needed or not self._has_line(buffer, start, filled):
            return None
        if (frame := _frame_at(buffer, start, filled)) is None or frame.end > filled:
            self._needed = frame.end if frame else 0
            return None
        return frame

    def _has_line(self, buffer: bytearray | bytes, start: int, filled: int) -> bool:
        # The last byte may be the first one of a line's end.
        if buffer.find(_END, max(start, self._searched - 1), filled) >= 0:
            return True
        self._searched = filled
        # A line that is too long is refused before its end.
        return filled - start > PROTOCOL_LINE


def next_frame(buffer: bytearray | bytes, start: int, filled: int) -> Frame | None:
    """Parse the frame that begins at a position; ``None`` where it hasn't arrived as a whole.

    :param filled: the number of bytes in the buffer
    :raises WireError: the bytes aren't a frame
    """
    frame = _frame_at(buffer, start, filled)
    return None if frame is None or frame.end > filled else frame


def _frame_at(buffer: bytearray | bytes, start: int, filled: int) -> Frame | None:
    """Parse the frame whose first line is there; its end may not have arrived."""
    if match := _MESSAGE.match(buffer, start, filled):
        header_size, size = 0, int(match[4])
        op = b"MSG"
    elif match := _MESSAGE_WITH_HEADERS.match(buffer, start, filled):
        header_size, size = int(match[4]), int(match[5])
        op = b"HMSG"
    else:
        return _control_line(buffer, start, filled)
    header = match.end()
    end = header + size
    if size > MESSAGE:
        raise WireError(f"expected a message of at most {MESSAGE} bytes, found {match[0][:_SHOWN]!r}")
    if header_size > size:
        raise WireError(f"expected a header within its message, found {match[0][:_SHOWN]!r}")
    if end + 2 <= filled and buffer[end : end + 2] != _END:
        raise WireError(f"expected a message of {size} bytes, found another end after {match[0][:_SHOWN]!r}")
    reply = match.span(3)
    if reply[0] < 0:
        reply = match.end(2), match.end(2)
    return Frame(op, end + 2, match[0][:-2], match[2], (*match.span(1), *reply, header, header + header_size, end))


def _control_line(buffer: bytearray | bytes, start: int, filled: int) -> Frame | None:
    end = buffer.find(_END, start, min(filled, start + PROTOCOL_LINE + len(_END)))
    if end < 0:
        if filled - start > PROTOCOL_LINE:
            raise WireError(f"expected a line of the NATS protocol, found {bytes(buffer[start : start + 40])!r}…")
        return None
    line = bytes(buffer[start:end])
    op = line.partition(b" ")[0].upper()
    if op in _MESSAGES:
        raise WireError(f"expected the first line of a message, found {line[:_SHOWN]!r}")
    if op not in _CONTROL:
        raise WireError(f"expected a line of the NATS protocol, found {line[:40]!r}")
    return Frame(op, end + len(_END), line)


def new_sid() -> bytes:
    """Return a subscription id of fourteen bytes that no payload contains by chance and no publisher can guess."""
    return MARKS + "".join(secrets.choice(_ALPHABET) for _ in range(_RANDOM)).encode()


class FrameReader:
    """Divides what a server sends into frames, however the bytes are cut.

    :ivar forms: by subscription, what takes messages of one form many at a time
    :ivar messages: how many messages were read
    :ivar size: the size of their bodies
    """

    def __init__(self) -> None:
        self.forms: dict[bytes, FrameForm] = {}
        self.messages = 0
        self.size = 0
        self._parts: list[bytes] = []
        self._data = b""
        self._position = 0
        # How many bytes have to come before the next frame can be whole; those of a line, before it is too long.
        self._missing = 0
        self._is_line = False

    def feed(self, data: bytes) -> None:
        """Take bytes in the order in which they arrive."""
        self._parts.append(data)
        self._missing = 0 if self._is_line and b"\n" in data else self._missing - len(data)

    def read(
        self,
        on_message: Callable[[bytes, bytes, bytes, bytes | None, bytes], None],
        on_control: Callable[[bytes, bytes], None],
        most: int,
    ) -> bool:
        """Hand whole frames over until one isn't whole, or they are many.

        :param on_message: gets subscription, subject, reply, headers (``None`` without any) and body
        :param on_control: gets the name of a control line, and the line
        :param most: how many frames, or whole forms of frames, are read at once
        :return: whether there may be more
        :raises WireError: no nats-server has sent this
        """
        if self._missing > 0:
            return False
        if self._parts:
            rest = self._data[self._position :]
            self._data = b"".join((rest, *self._parts)) if rest else b"".join(self._parts)
            self._parts, self._position = [], 0
        data, forms, filled = self._data, self.forms, len(self._data)
        for _ in range(most):
            frame = _frame_at(data, self._position, filled)
            if frame is None or frame.end > filled:
                self._is_line = frame is None
                self._missing = (frame.end if frame else self._position + PROTOCOL_LINE + 1) - filled
                return False
            _, end, line, sid, offsets = frame
            if not sid:
                self._position = end
                on_control(frame.op, line)
                continue
            if form := forms.get(sid):
                self._position, count, size = form.take(data, self._position)
                if count:
                    self.messages += count
                    self.size += size
                    continue
            subject, subject_end, reply, reply_end, header, body, stop = offsets
            self._position = end
            self.messages += 1
            self.size += stop - body
            on_message(
                sid, data[subject:subject_end], data[reply:reply_end], data[header:body] or None, data[body:stop]
            )
        return True


@dataclass(frozen=True, slots=True)
class SentFrame:
    """A frame of a client; every line but PUB and HPUB is one by itself.

    :param data: the whole frame, as it is on the wire
    :param verb: the first field of its line, in capitals
    :param subject: the subject of a message; empty for every other frame
    :param payload: the message's body
    :param reply: its subject for answers; empty without one
    :param headers: its headers as they are on the wire; empty without any
    """

    data: bytes
    verb: bytes = b""
    subject: str = ""
    payload: bytes = b""
    reply: str = ""
    headers: bytes = b""


class SentFrameReader:
    """Divides what a client sends into frames."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[SentFrame]:
        """Yield the frames that are complete with these bytes.

        :raises WireError: no client of a nats-server has sent this
        """
        self._rest += data
        position = 0
        try:
            while frame := _sent_frame(self._rest, position):
                position += len(frame.data)
                yield frame
        finally:
            self._rest = self._rest[position:]


def _sent_frame(data: bytes, start: int) -> SentFrame | None:
    line_end = data.find(_END, start)
    if line_end < 0:
        if len(data) - start > PROTOCOL_LINE:
            raise WireError(f"expected a line of a NATS client, found {len(data) - start} bytes without an end")
        return None
    begin = line_end + len(_END)
    fields = _SEPARATOR.split(data[start:line_end].strip(b" \t\r\n"))
    verb = fields[0].upper()
    sizes = _SIZES.get(verb, 0)
    if not sizes or len(fields) < _FIELDS + sizes or not all(map(bytes.isdigit, fields[-sizes:])):
        return SentFrame(data[start:begin], verb)
    size, header_size = int(fields[-1][:_DIGITS]), int(fields[-2][:_DIGITS]) if sizes > 1 else 0
    if size > MESSAGE:
        raise WireError(f"expected a message of at most {MESSAGE} bytes, found one of {size}")
    end = begin + size
    if len(data) < end + len(_END):
        return None
    reply = fields[2] if len(fields) > _FIELDS + sizes else b""
    body = begin + header_size
    return SentFrame(
        data[start : end + len(_END)],
        verb,
        decode_text(fields[1]),
        data[body:end],
        decode_text(reply),
        data[begin:body],
    )


class FrameForm(Protocol):
    """Takes messages of one form from what has arrived, many at a time."""

    def bind(self, number: int) -> None:
        """Set the number of the subscription whose messages are taken."""

    def take(self, data: bytes, start: int) -> tuple[int, int, int]:
        """Take the whole messages of the form that begin at a position.

        :return: where they end, how many they are, and the size of their bodies
        """


class AnswerForm:
    """The answers by which a server confirms what it has stored or taken, which are parsed many at a time.

    An answer with headers, such as one that nobody takes the request, is none of them.

    :param prefix: the inbox and a dot; the number of the request follows
    :param on_answers: gets the numbers of requests, and the body of each answer
    """

    def __init__(self, prefix: bytes, on_answers: Callable[[Sequence[int], Sequence[bytes]], None]) -> None:
        self._prefix = re.escape(prefix)
        self._on_answers = on_answers

    def bind(self, number: int) -> None:
        """Set the number of the subscription to the inbox."""
        # A body of one line: the confirmation of an acknowledgement has none.
        frame = rb"MSG %b(\d{1,18}) %d {1,2}(\d{1,4})\r\n([^\r\n]*)\r\n" % (self._prefix, number)
        self._frame = re.compile(frame)
        # Atomic: what was matched is never matched again. A possessive repeat goes wrong before Python 3.11.5.
        self._frames = re.compile(rb"(?>(?:%b)*)" % frame)

    def take(self, data: bytes, start: int) -> tuple[int, int, int]:
        """Hand the answers that begin at a position over; return where they end, how many they are, and their size."""
        match = self._frames.match(data, start)
        if match is None or match.end() == start:
            return start, 0, 0
        numbers, sizes, bodies = zip(*self._frame.findall(data, start, match.end()), strict=True)
        lengths = list(map(len, bodies))
        if list(map(int, sizes)) != lengths:
            # Made to look like one; the parser finds out where it ends.
            return start, 0, 0
        self._on_answers(list(map(int, numbers)), bodies)
        return match.end(), len(lengths), sum(lengths)


class DeliveryForm(Generic[_Message]):
    """The deliveries to one subscription, in the form in which nearly all servers send them.

    A status of the server is none of them, nor is a message whose subject looks like one.

    :param status_prefix: how the subject of a status begins
    :param read: makes a message of subject, reply subject, its fields (stream, consumer, number of the delivery,
        sequence and time), headers and body
    :param on_messages: gets messages that follow each other
    """

    def __init__(
        self,
        status_prefix: bytes,
        read: Callable[[bytes, bytes, Sequence[bytes], bytes, bytes], _Message],
        on_messages: Callable[[Sequence[_Message]], None],
    ) -> None:
        self._status_prefix = status_prefix
        self._read = read
        self._on_messages = on_messages

    def bind(self, number: int) -> None:
        """Set the number of the subscription."""
        self._frame = re.compile(rb"(H?)MSG ([^ \t\r\n]+) %d (%b) (?:(\d{1,9}) )?(\d{1,9})\r\n" % (number, _REPLY))

    def take(self, data: bytes, start: int) -> tuple[int, int, int]:
        """Hand the whole messages that begin at a position over.

        :return: where they end, how many they are, and the size of their bodies
        """
        messages: list[_Message] = []
        position, total, match_frame = start, 0, self._frame.match
        while match := match_frame(data, position):
            has_headers, subject, reply, *fields, header_size, size = match.groups()
            begin = match.end()
            body, end = begin + int(header_size or 0), begin + int(size)
            is_form = bool(has_headers) is (header_size is not None) and body <= end
            if not is_form or data[end : end + 2] != _END or subject.startswith(self._status_prefix):
                # Cut short, or not what it looks like: the parser finds out.
                break
            messages.append(self._read(subject, reply, fields, data[begin:body], data[body:end]))
            position, total = end + len(_END), total + end - body
        if messages:
            self._on_messages(messages)
        return position, len(messages), total


class PublishAckForm:
    """The plain PubAcks of one stream in an inbox, which are matched and parsed many at a time.

    Plain ones say that the message is stored and wasn't before. Any other answer isn't matched.

    :param reply_prefix: the inbox and a dot; the index of the published message follows
    :param domain: the stream's JetStream domain; empty where it has none
    :param on_acknowledged: gets the indexes of messages, and the sequence of each
    """

    def __init__(
        self,
        reply_prefix: bytes,
        stream: str,
        domain: str,
        on_acknowledged: Callable[[Sequence[int], Sequence[int]], None],
    ) -> None:
        self._reply_prefix = re.escape(reply_prefix)
        place = rb'\{"stream": ?"%b", ?' % re.escape(stream.encode())
        if domain:
            place += rb'"domain": ?"%b", ?' % re.escape(domain.encode())
        self._body = rb'(%b"seq": ?)([1-9]\d{0,18})\}' % place
        self._on_acknowledged = on_acknowledged
        self._number = 0
        # The form of one server's answers: as above without the choices, so that only the numbers are captured.
        self._form = b""

    def bind(self, number: int) -> None:
        """Set the number of the subscription to the inbox."""
        self._number = number
        self._first = re.compile(
            rb"MSG (%b)(\d{1,18}) %d (\d{1,9})\r\n%b\r\n" % (self._reply_prefix, number, self._body)
        )
        self._form = b""

    def take(self, data: bytes, start: int) -> tuple[int, int, int]:
        """Hand the PubAcks that begin at a position over; return where they end, how many they are, and their size."""
        first = self._first.match(data, start)
        if first is None:
            return start, 0, 0
        if first[4] != self._form:
            self._set_form(first[1], first[4])
        if (match := self._frames.match(data, start)) is None or match.end() == start:
            return start, 0, 0
        fields = self._frame.findall(data, start, match.end())
        indexes, sizes, sequences = zip(*fields, strict=True)
        lengths = list(map(int, sizes))
        around = len(self._form) + len(b"}")
        if lengths != [around + length for length in map(len, sequences)]:
            # Made to look like one; the parser finds out where it ends.
            return start, 0, 0
        self._on_acknowledged(list(map(int, indexes)), list(map(int, sequences)))
        return match.end(), len(fields), sum(lengths)

    def _set_form(self, reply_prefix: bytes, form: bytes) -> None:
        self._form = form
        frame = rb"MSG %b(\d{1,18}) %d (\d{1,9})\r\n%b([1-9]\d{0,18})\}\r\n" % (
            *(re.escape(reply_prefix), self._number, re.escape(form)),
        )
        self._frame = re.compile(frame)
        # Atomic: what was matched is never matched again. A possessive repeat goes wrong before Python 3.11.5.
        self._frames = re.compile(rb"(?>(?:%b)*)" % frame)


@lru_cache(maxsize=4096)
def encode_subject(subject: str) -> bytes:
    """Encode a subject to which something is published.

    :raises WireError: a line of the protocol can't hold it
    """
    encoded = encode_text(subject)
    if len(encoded) > PUBLISHED_SUBJECT or not _SUBJECT.fullmatch(encoded):
        # The server closes the connection that sends a longer line, and takes the rest for another field.
        raise WireError(
            f"expected a subject of at most {PUBLISHED_SUBJECT} bytes without space, tab or line break, found"
            f" {subject[:80]!r}"
        )
    return encoded


def encode_message(subject: bytes, payload: bytes, headers: bytes = b"", reply: bytes = b"") -> bytes:
    """Encode one message: PUB, or HPUB where it has headers.

    :param subject: from :func:`encode_subject`
    :param headers: from :func:`~.headers.encode_headers`; empty where it has none
    :param reply: the subject for answers, in the same form as the subject
    """
    if headers:
        size = len(headers)
        return b"HPUB %b %b %d %d\r\n%b%b\r\n" % (subject, reply, size, size + len(payload), headers, payload)
    return b"PUB %b %b %d\r\n%b\r\n" % (subject, reply, len(payload), payload)


def encode_numbered(
    subject: bytes,
    reply_prefix: bytes,
    first: int,
    headers: bytes,
    values: Sequence[Sequence[bytes]],
    sizes: int | Sequence[int],
    payloads: Sequence[bytes],
) -> bytes:
    """Encode messages that differ in payload and some values of their headers: one format for all of them.

    :param reply_prefix: the subjects for answers without the numbers at their ends
    :param first: the number of the first message
    :param headers: encoded, with ``%b`` in the place of each value, and other percent signs doubled
    :param values: for each place, those of all messages
    :param sizes: of the headers of each message; one number where all have the same
    """
    count, lengths = len(payloads), list(map(len, payloads))
    numbers = range(first, first + count)
    line = b"HPUB %b %b%%d" % (subject.replace(b"%", b"%%"), reply_prefix.replace(b"%", b"%%"))
    columns: list[Iterable[int] | Sequence[bytes]]
    if not isinstance(sizes, int):
        form = b"%b %%d %%d\r\n%b%%b\r\n" % (line, headers)
        columns = [numbers, sizes, map(int.__add__, sizes, lengths), *values, payloads]
    elif min(lengths) == max(lengths):
        form = b"%b %d %d\r\n%b%%b\r\n" % (line, sizes, sizes + lengths[0], headers)
        columns = [numbers, *values, payloads]
    else:
        form = b"%b %d %%d\r\n%b%%b\r\n" % (line, sizes, headers)
        columns = [numbers, map(sizes.__add__, lengths), *values, payloads]
    return form * count % tuple(chain.from_iterable(zip(*columns, strict=True)))


def encode_requests(
    subjects: Sequence[bytes],
    reply_prefix: bytes,
    first: int,
    payloads: Sequence[bytes],
    headers: Sequence[bytes] | None = None,
) -> bytes:
    """Encode requests whose answers' subjects end with consecutive numbers: one format for all of them.

    :param subjects: from :func:`encode_subject`
    :param reply_prefix: the subjects for answers without the numbers at their ends
    :param first: the number of the first request
    :param headers: those of each, encoded; ``None`` where none has any
    """
    count, sizes, prefix = len(subjects), list(map(len, payloads)), reply_prefix.replace(b"%", b"%%")
    numbers = range(first, first + count)
    columns: list[Iterable[int] | Sequence[bytes]] = [subjects, numbers, sizes, payloads]
    form = b"PUB %%b %b%%d %%d\r\n%%b\r\n" % prefix
    if headers is not None:
        header_sizes = list(map(len, headers))
        columns = [subjects, numbers, header_sizes, map(int.__add__, header_sizes, sizes), headers, payloads]
        form = b"HPUB %%b %b%%d %%d %%d\r\n%%b%%b\r\n" % prefix
    return form * count % tuple(chain.from_iterable(zip(*columns, strict=True)))


_VERSION: Final = re.compile(r"[0-9]{1,4}\.[0-9]{1,4}\.[0-9]{1,4}(?:[-+][0-9A-Za-z.+-]{0,64})?")
_FLAGS: Final = ("tls_required", "tls_available", "tls_verify", "auth_required", "headers", "jetstream", "ldm")
_ADDRESS: Final = re.compile(r"\[?[^\s/@#?\\\[\]]{1,255}\]?:[0-9]{1,5}")
_TEXTS: Final = ("nonce", "domain", "server_id", "server_name", "client_ip", "cluster")


def parse_server_info(content: bytes) -> dict[str, Any]:
    """Parse the JSON of an INFO line.

    :raises WireError: no nats-server has sent this
    """
    if len(content) > PROTOCOL_LINE:
        raise WireError(f"expected INFO of a nats-server, found a line of {len(content)} bytes")
    try:
        info = json.loads(content)
    except (ValueError, RecursionError):
        raise WireError(f"expected INFO of a nats-server, found {content[:40]!r}") from None
    if not isinstance(info, dict):
        raise WireError(f"expected INFO of a nats-server, found {content[:40]!r}")
    if problem := _problem(info):
        raise WireError(f"expected INFO of a nats-server, found {problem}")
    return info


def server_version(info: dict[str, Any]) -> tuple[int, ...]:
    """Return the version of a server by its parsed INFO, as three numbers."""
    return tuple(int(number) for number in re.findall(r"[0-9]+", info["version"])[:3])


def _problem(info: dict[str, Any]) -> str | None:
    version, largest = info.get("version"), info.get("max_payload")
    if not isinstance(version, str) or not _VERSION.fullmatch(version):
        return f"the version {str(version)[:40]!r}"
    if not isinstance(largest, int) or isinstance(largest, bool) or not 0 < largest <= MESSAGE:
        return f"a max_payload of {str(largest)[:40]!r}"
    for name in _FLAGS:
        if not isinstance(info.get(name, False), bool):
            return f"{name} with another value than true or false"
    for name in _TEXTS:
        if not isinstance(info.get(name, ""), str):
            return f"{name} with another value than text"
    addresses = info.get("connect_urls") or []
    if not isinstance(addresses, list) or not all(
        isinstance(item, str) and _ADDRESS.fullmatch(item) for item in addresses
    ):
        return "connect_urls that aren't addresses"
    return None
