"""The messages that a consumer delivers to one subscription, which are parsed many at a time.

Protocol: MSG and HMSG in "NATS Client Protocol"; ADR-15, "JetStream Subject Names and Reply Subjects".
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# $JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<time>.<pending>, without the domain, the account
# and the token that some versions have besides.
_REPLY: Final = rb"\$JS\.ACK\.([^. \t\r\n]+)\.([^. \t\r\n]+)\.(\d{1,18})\.(\d{1,18})\.\d{1,20}\.(\d{1,19})\.\d{1,20}"
# $JS.ACK.<domain>.<account>.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<time>.<pending>.<token>;
# domain and account together, and the token, are missing in some versions.
DELIVERY_REPLY: Final = re.compile(
    rb"\$JS\.ACK\.(?:[^.]+\.[^.]+\.)?([^.]+)\.([^.]+)\.(\d{1,18})\.(\d{1,18})\.\d{1,20}\.(\d{1,19})\.\d{1,20}(?:\..*)?"
)
_END: Final = b"\r\n"

_Message = TypeVar("_Message")


class DeliveryRun(Generic[_Message]):
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
