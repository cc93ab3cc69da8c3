"""The floors for reading and writing with Spark: the throughput of a bare socket.

They send what the server needs to send or store the same bytes, and parse as little as possible.
"""

import json
import re
from contextlib import closing
from uuid import uuid4

from airflow_provider_jetstream.spark.source.source_stream import SourceStream

_PULL = 10_000
_MEGABYTE = 1 << 20


def drain(stream: SourceStream, messages: int) -> None:
    """Receive a limits stream from a consumer without acknowledgements, and count the first lines of messages."""
    with closing(stream.socket) as socket:
        config = {"name": f"floor{uuid4().hex}", "ack_policy": "none", "mem_storage": True}
        subject = f"{stream.name}.{config['name']}"
        stream.api(f"CONSUMER.CREATE.{subject}", {"stream_name": stream.name, "config": config})
        pull = b'{"batch":%d,"expires":20000000000}' % _PULL
        request = (
            f"PUB $JS.API.CONSUMER.MSG.NEXT.{subject} {socket.new_reply_subject()} {len(pull)}\r\n".encode()
            + pull
            + b"\r\n"
        )
        socket.send(request * 2)
        # No body contains these bytes, so that the search skips bodies quickly.
        prefix = b"MSG %b." % stream.name.encode()
        received, requested = 0, 2
        while received < messages:
            socket.receive(lambda _buffer, filled: filled >= _MEGABYTE)
            end = socket.buffer.rfind(b"\r\n", 0, socket.filled) + 2
            received += socket.buffer.count(prefix, 0, end)
            socket.consume(end)
            while requested * _PULL - received <= _PULL:
                socket.send(request)
                requested += 1
        stream.api(f"CONSUMER.DELETE.{subject}")
    if received != messages:
        raise AssertionError(f"expected {messages} messages, found {received}")


_LAST = re.compile(rb"NATS/1\.0 204 EOB\r\n.*?Nats-Last-Sequence: (\d+)\r\n", re.DOTALL)


def drain_directly(stream: SourceStream, first: int, last: int, batch: int = 256) -> None:
    """Receive messages of any stream by direct gets, each batch requested when the one before has ended."""
    with closing(stream.socket) as socket:
        subject, received, next_sequence = f"$JS.API.DIRECT.GET.{stream.name}", 0, first
        while next_sequence <= last:
            request = {"seq": next_sequence, "next_by_subj": ">", "batch": min(batch, last - next_sequence + 1)}
            pull = json.dumps(request).encode()
            socket.send(f"PUB {subject} {socket.new_reply_subject()} {len(pull)}\r\n".encode() + pull + b"\r\n")
            last_answer = None
            while not last_answer:
                socket.receive(lambda buffer, filled: buffer.rfind(b"204 EOB", max(0, filled - 400), filled) >= 0)
                last_answer = _LAST.search(socket.buffer, max(0, socket.filled - 400), socket.filled)
            received += socket.buffer.count(b"\r\nNats-Sequence: ", 0, socket.filled)
            next_sequence = int(last_answer[1]) + 1
            socket.consume(socket.filled)
    if received != last - first + 1:
        raise AssertionError(f"expected {last - first + 1} messages, found {received}")


def publish_window(stream: SourceStream, subject: str, messages: int, body: bytes, window: int = 1000) -> None:
    """Publish messages with ids, with a window of unanswered ones, and count the acknowledgements."""
    with closing(stream.socket) as socket:
        run = uuid4().hex[:8].encode()
        # Only the ids and the reply subjects differ from message to message.
        head = b"NATS/1.0\r\nNats-Msg-Id: %b:%%08d\r\n\r\n" % run
        size = len(head % 0)
        line = b"HPUB %b %b.%%d %d %d\r\n" % (subject.encode(), socket.inbox.encode(), size, size + len(body))
        frame = line + head + body.replace(b"%", b"%%") + b"\r\n"
        prefix = b'{"stream":"%b"' % stream.name.encode()
        sent = answered = 0
        while answered < messages:
            count = min(window - (sent - answered), messages - sent)
            if count >= window // 4 or (count and sent + count == messages):
                socket.send(b"".join([frame % (at, at) for at in range(sent, sent + count)]))
                sent += count
            socket.receive(lambda _buffer, _filled: True)
            end = socket.buffer.rfind(b"\r\n", 0, socket.filled) + 2
            answered += socket.buffer.count(prefix, 0, end)
            socket.consume(end)
