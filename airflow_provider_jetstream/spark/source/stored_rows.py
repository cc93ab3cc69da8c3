"""Finds out whether a row that the server refuses for its expected sequence was stored by an earlier attempt.

nats-server 2.15.0 compares the expected sequence before the message id (2.10.27 doesn't): what a task,
or a connection that broke, has stored itself is refused when it is sent again, and not acknowledged as a duplicate.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from airflow_provider_jetstream.jetstream.client.blocking.socket import NatsSocket
from airflow_provider_jetstream.jetstream.errors import JetStreamProviderError, TransientError
from airflow_provider_jetstream.spark.connection_options import socket_settings
from airflow_provider_jetstream.spark.source.source_stream import SourceStream

if TYPE_CHECKING:
    from collections.abc import Mapping

WRONG_LAST_SEQUENCE: Final = 10071

_EXPECTED = re.compile(rb"\r\nNats-Expected-Last-(?:Subject-)?Sequence:[ \t]*(\d{1,19})[ \t]*(?=\r\n)", re.IGNORECASE)


class StoredRows:
    """Looks rows up in their stream, over a connection of its own that is opened when the first one is.

    :param raw_options: the data source's options, from which the connection is made
    """

    def __init__(self, raw_options: Mapping[str, str], stream: str) -> None:
        self._raw_options = raw_options
        self._name = stream
        self._stream: SourceStream | None = None

    def close(self) -> None:
        """Close the connection; the next row opens another one."""
        if self._stream:
            self._stream.socket.close()
            self._stream = None

    def finds(self, subject: str, message_id: str, frame: bytes) -> bool:
        """Return whether the message that follows the sequences which a row's frame expects is that row.

        :raises TransientError: there is no answer at the moment
        """
        expected = [int(number) for number in _EXPECTED.findall(frame.partition(b"\r\n\r\n")[0] + b"\r\n")]
        if not expected:
            return False
        try:
            if self._stream is None:
                self._stream = SourceStream(NatsSocket(socket_settings(self._raw_options)), self._name)
            message = self._stream.next_message(max(expected) + 1, subject)
        except TransientError:
            raise
        except JetStreamProviderError:
            # Such as a denied permission: the server's refusal stands.
            return False
        return message is not None and message.header("Nats-Msg-Id") == message_id
