"""What a bare socket reaches: the floors that reading and writing with Spark are held against.

They do what the server needs to send or store the same bytes, and look at as little as they can.
"""

import json
import re
from contextlib import closing
from uuid import uuid4

from airflow_provider_jetstream.spark.source.source_stream import SourceStream

_PULL = 10_000
_MEGABYTE = 1 << 20


def drain(stream: SourceStream, messages: int) -> None:
    """Receive a limits stream from a consumer that nobody acknowledges to, and count the first lines of messages."""
    with closing(stream.socket) as wire:
        config = {"name": f"floor{uuid4().hex}", "ack_policy": "none", "mem_storage": True}
        topic = f"{stream.name}.{config['name']}"
        stream.api(f"CONSUMER.CREATE.{topic}", {"stream_name": stream.name, "config": config})
        pull = b'{"batch":%d,"expires":20000000000}' % _PULL
        request = (
            f"PUB $JS.API.CONSUMER.MSG.NEXT.{topic} {wire.new_reply_subject()} {len(pull)}\r\n".encode()
            + pull
            + b"\r\n"
        )
        wire.send(request * 2)
        # None of these letters is in a body, so that a search leaps over them.
        mark = b"MSG %b." % stream.name.encode()
        seen, asked = 0, 2
        while seen < messages:
            wire.receive(lambda _buffer, filled: filled >= _MEGABYTE)
            end = wire.buffer.rfind(b"\r\n", 0, wire.filled) + 2
            seen += wire.buffer.count(mark, 0, end)
            wire.consume(end)
            while asked * _PULL - seen <= _PULL:
                wire.send(request)
                asked += 1
        stream.api(f"CONSUMER.DELETE.{topic}")
    if seen != messages:
        raise AssertionError(f"expected {messages} messages, found {seen}")


_LAST = re.compile(rb"NATS/1\.0 204 EOB\r\n.*?Nats-Last-Sequence: (\d+)\r\n", re.DOTALL)


def drain_directly(stream: SourceStream, first: int, last: int, batch: int = 256) -> None:
    """Receive messages of any stream by direct gets, each asked for when the one before has ended."""
    with closing(stream.socket) as wire:
        topic, seen, next_one = f"$JS.API.DIRECT.GET.{stream.name}", 0, first
        while next_one <= last:
            request = {"seq": next_one, "next_by_subj": ">", "batch": min(batch, last - next_one + 1)}
            pull = json.dumps(request).encode()
            wire.send(f"PUB {topic} {wire.new_reply_subject()} {len(pull)}\r\n".encode() + pull + b"\r\n")
            ended = None
            while not ended:
                wire.receive(lambda buffer, filled: buffer.rfind(b"204 EOB", max(0, filled - 400), filled) >= 0)
                ended = _LAST.search(wire.buffer, max(0, wire.filled - 400), wire.filled)
            seen += wire.buffer.count(b"\r\nNats-Sequence: ", 0, wire.filled)
            next_one = int(ended[1]) + 1
            wire.consume(wire.filled)
    if seen != last - first + 1:
        raise AssertionError(f"expected {last - first + 1} messages, found {seen}")


def publish_window(stream: SourceStream, subject: str, messages: int, body: bytes, window: int = 1000) -> None:
    """Publish messages with ids, a window of them unanswered at a time, and count the acknowledgements."""
    with closing(stream.socket) as wire:
        run = uuid4().hex[:8].encode()
        # The places of the ids and of the reply subjects are all that changes from message to message.
        head = b"NATS/1.0\r\nNats-Msg-Id: %b:%%08d\r\n\r\n" % run
        size = len(head % 0)
        start = b"HPUB %b %b.%%d %d %d\r\n" % (subject.encode(), wire.inbox.encode(), size, size + len(body))
        frame = start + head + body.replace(b"%", b"%%") + b"\r\n"
        mark = b'{"stream":"%b"' % stream.name.encode()
        sent = answered = 0
        while answered < messages:
            now = min(window - (sent - answered), messages - sent)
            if now >= window // 4 or (now and sent + now == messages):
                wire.send(b"".join([frame % (at, at) for at in range(sent, sent + now)]))
                sent += now
            wire.receive(lambda _buffer, _filled: True)
            end = wire.buffer.rfind(b"\r\n", 0, wire.filled) + 2
            answered += wire.buffer.count(mark, 0, end)
            wire.consume(end)
