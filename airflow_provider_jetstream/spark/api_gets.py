"""Gets by JetStream's API, which the leader of any stream answers: as exact as it gets, and dearer than direct gets."""

from __future__ import annotations

import re
from base64 import b64decode

from airflow_provider_jetstream.jetstream.connection_failures import decoded
from airflow_provider_jetstream.jetstream.errors import ApiError, UnreachableError
from airflow_provider_jetstream.jetstream.stored import NO_MESSAGE, StoredMessage, message_of, missing, parse_headers
from airflow_provider_jetstream.spark.gets import Gets

_NOBODY = b"NATS/1.0 503"
# As the server writes an answer; what is written otherwise is read as the JSON that it is.
_ANSWER = re.compile(
    rb'\{"type":"io\.nats\.jetstream\.api\.v1\.stream_msg_get_response","message":\{"subject":"([^"\\]*)","seq":(\d+),'
    rb'(?:"hdrs":"([^"\\]*)",)?(?:"data":"([^"\\]*)",)?"time":"([^"\\]*)"\}\}'
)


class ApiGets(Gets):
    """Gets from a stream by the API.

    :param stream: its name
    """

    def __init__(self, stream: str) -> None:
        super().__init__(f"$JS.API.STREAM.MSG.GET.{stream}")
        self._stream = stream

    def read(self, header: bytes, body: bytes) -> StoredMessage | None:
        """Read an answer.

        :param header: its header
        :param body: its body
        :return: the message, if there is one
        :raises NotFoundError: the stream doesn't exist
        :raises UnreachableError: nobody serves it just now
        """
        if told := _ANSWER.fullmatch(body):
            subject, sequence, pairs, data, time = told.groups()
            headers = parse_headers(b64decode(pairs)) if pairs else ()
            return StoredMessage(subject.decode(), int(sequence), time.decode(), headers, b64decode(data or b""))
        if header.startswith(_NOBODY):
            raise UnreachableError(
                f"nobody answers on {self._subject}: the stream or JetStream itself is away; try again"
            )
        try:
            return message_of(decoded(body, self._subject.removeprefix("$JS.API.")))
        except ApiError as error:
            if error.err_code == NO_MESSAGE:
                return None
            raise missing(error, f"stream {self._stream}") from None
